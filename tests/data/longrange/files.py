"""Small files in the layout of Long Range Arena's authors."""

import json
from pathlib import Path

import numpy as np

SPLITS = {"train": 8, "validation": 4, "test": 4}


def write_long_range(root: Path, task: str) -> Path:
    """root/files, with all splits of a task that is read from files; empty for one that is generated."""
    folder, draw = root / "files", np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for split, rows in SPLITS.items():
        if task == "text" and split != "validation":  # IMDB has none
            lines = [json.dumps({"text": f"{split} réview {row} " * (row + 1) * 20, "label": row % 2}) for row in range(rows)]
            (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        if task == "retrieval":
            name = "eval" if split == "validation" else split
            lines = [f"{row % 2}.0\ta{row}\tb{row}\t{'one ' * row}\t{split} {'two ' * 200}" for row in range(1, rows + 1)]
            (folder / f"new_aan_pairs.{name}.tsv").write_text("".join(f"{line}\n" for line in lines))
        if task == "image" and split != "validation":
            images = draw.integers(0, 256, (rows, 3073), np.uint8)
            images[:, 0] = np.arange(rows) % 10
            for number in range(1, 3 if split == "train" else 2):  # two training files, each with half of the rows
                part = images[number - 1 :: 2] if split == "train" else images
                name = f"data_batch_{number}.bin" if split == "train" else "test_batch.bin"
                (folder / name).write_bytes(part.tobytes())
    return folder
