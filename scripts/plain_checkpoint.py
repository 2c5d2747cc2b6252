"""Converts a sharded checkpoint (conf/trainer/fsdp.yaml), which is a folder, into a single file.

python scripts/plain_checkpoint.py runs/NAME/checkpoints/last.ckpt plain.ckpt
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_linformer.callbacks import AtomicCheckpointIO
from lit_linformer.runs.checkpoints import check_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the sharded checkpoint")
    parser.add_argument("file", type=Path, help="the plain one to write")
    args = parser.parse_args()
    try:
        AtomicCheckpointIO().save_checkpoint(check_checkpoint(args.folder, "folder"), args.file)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
