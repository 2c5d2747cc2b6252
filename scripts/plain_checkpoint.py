"""Makes one checkpoint file of a sharded one (conf/trainer/fsdp.yaml), which is a folder.

python scripts/plain_checkpoint.py runs/NAME/checkpoints/last.ckpt plain.ckpt
"""

import argparse
from pathlib import Path

from lit_linformer.callbacks import AtomicCheckpointIO
from lit_linformer.runs.checkpoints import check_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the sharded checkpoint")
    parser.add_argument("file", type=Path, help="the plain one to write")
    args = parser.parse_args()
    AtomicCheckpointIO().save_checkpoint(check_checkpoint(args.folder, "folder"), args.file)


if __name__ == "__main__":
    main()
