"""The comparison for scripts/torture.py: how a run that was killed differs from one that was left alone."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_linformer.runs.checkpoints import find_checkpoint
from lit_linformer.runs.sharded import load_sharded
from lit_linformer.utils.files import read_rows

# Wall-clock times; what Lightning neither restores nor reads; validation's own counter of batches.
UNEQUAL = {"seconds", "training_seconds", "cpu_seconds", "current_score", "epoch_loop.val_loop.batch_progress"}
# What must be equal in a checkpoint. In last.ckpt everything is compared: others may be from before or after a validation.
TRAINED = ("state_dict", "optimizer_states", "lr_schedulers", "seen", "global_step", "epoch")
# Lightning writes these along with every other tag, so twice if it writes twice.
UNREAD = {"epoch", "watch/epoch"}
logging.getLogger("tensorboard").setLevel(logging.ERROR)


def compare(alone: Path, killed: Path) -> dict[str, list[str]]:
    """What differs between two rounds' folders: ``bits`` of checkpoints and files, ``curves``. Both should be empty."""
    a, b = (next((folder / "runs").iterdir(), folder) for folder in (alone, killed))
    return {
        "bits": [*_files(alone, killed), *_checkpoints(a, b), *_results(a, b)],
        "curves": [*_table(a, b), *_tensorboard(a, b)],
    }


def _files(alone: Path, killed: Path) -> Iterator[str]:
    """Left-over and missing files in runs/ and cache/, and what differs in token files, tokenizer and config."""
    names, theirs = _listing(alone), _listing(killed)
    for name in sorted(names.keys() | theirs.keys()):
        if name not in theirs:
            yield f"{name} is missing"
        elif name not in names:
            yield f"{name} is left over"
        elif name.endswith((".bin", "tokenizer.json", "meta.json", "config.yaml")):
            if names[name].read_bytes() != theirs[name].read_bytes():
                yield f"{name} has another content"


def _listing(folder: Path) -> dict[str, Path]:
    """Files by name, without TensorBoard's: each start has one of its own."""
    paths = [path for part in ("runs", "cache") for path in (folder / part).rglob("*") if "tfevents" not in path.name]
    return {str(path.relative_to(folder)): path for path in paths}


def _checkpoints(a: Path, b: Path) -> Iterator[str]:
    for path in sorted((a / "checkpoints").iterdir()):
        other = b / "checkpoints" / path.name
        if other.exists():
            try:
                pair = [_read(path), _read(other)]
            except Exception as error:  # whatever torch raises for an incomplete file
                yield f"{path.name} cannot be read: {type(error).__name__}: {error}"
                continue
            if path.name != "last.ckpt":
                pair = [{key: checkpoint.get(key) for key in TRAINED} for checkpoint in pair]
            yield from _unequal(*pair, path.name)


def _read(path: Path) -> dict[str, Any]:
    return load_sharded(path) if path.is_dir() else torch.load(path, map_location="cpu", weights_only=True)


def _unequal(a: Any, b: Any, where: str) -> Iterator[str]:
    """Where two trees of plain values and tensors differ, to the last bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys(), key=str):
            if key not in a or key not in b:
                yield f"{where}: {key} is in one only"
            elif key not in UNEQUAL:
                yield from _unequal(a[key], b[key], f"{where}.{str(key).partition('{')[0]}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for number, pair in enumerate(zip(a, b, strict=True)):
            yield from _unequal(*pair, f"{where}.{number}")
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
            yield f"{where}: other numbers"
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        yield f"{where}: {len(a)} of them alone, {len(b)} killed"
    elif a != b and (a == a or b == b):  # an undefined value, NaN, is not equal to itself
        yield f"{where}: {str(a)[:80]} alone, {str(b)[:80]} killed"


def _results(a: Path, b: Path) -> Iterator[str]:
    found = []
    for run in (a, b):
        content = json.loads((run / "result.json").read_text(encoding="utf-8")) if (run / "result.json").exists() else {}
        found.append({key: content.get(key) for key in ("step", "tokens", "metrics", "best_step", "best_metrics")})
    yield from _unequal(*found, "result.json")


def _table(a: Path, b: Path) -> Iterator[str]:
    """Compares perplexity.csv, and checks that `validate` takes the checkpoint that is the best by it."""
    tables = [read_rows(run / "perplexity.csv") for run in (a, b)]
    steps = [[int(row["step"]) for row in table] for table in tables]
    if steps[0] != steps[1]:
        yield f"perplexity.csv: steps {steps[0]} alone, {steps[1]} killed"
    else:
        yield from _unequal(*tables, "perplexity.csv")
    trained = [(row["perplexity"], int(row["step"])) for row in tables[1] if row["step"]]
    best, taken = min(trained, default=(math.inf, 0)), find_checkpoint(b, "best")
    if taken is None or taken.name != f"best-{best[1]:08d}-{best[0]:.4f}.ckpt":
        yield f"the best is {best[0]} at step {best[1]} in perplexity.csv, but {taken and taken.name} for validate"


def _tensorboard(a: Path, b: Path) -> Iterator[str]:
    """Compares each tag's points as TensorBoard reads them; none may come twice. Throughput's windows begin anew."""
    mine, theirs = _curves(a), _curves(b)
    for tag in sorted(mine.keys() | theirs.keys()):
        points, others = mine.get(tag, []), theirs.get(tag, [])
        before, after = ([step for step, _ in of] for of in (points, others))
        if twice := sorted({step for step in after if after.count(step) > 1}):
            yield f"TensorBoard, {tag}: steps {twice} twice"
        elif (tag.startswith("watch/") and tag != "watch/lr") or points == others:  # speed
            continue
        elif before != after:
            lost, added = sorted(set(before) - set(after)), sorted(set(after) - set(before))
            yield f"TensorBoard, {tag}: steps {lost} lost, {added} added"
        else:
            yield f"TensorBoard, {tag}: other values"
    tokens = [row["tokens"] for row in read_rows(b / "perplexity.csv")]
    if tokens != [step for step, _ in theirs.get("val/perplexity_by_tokens", [])]:
        yield "TensorBoard, val/perplexity_by_tokens: other points than perplexity.csv"


def _curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for folder in (run, run / "by_tokens"):
        if folder.is_dir():
            events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
            for tag in set(events.Tags()["scalars"]) - UNREAD:
                found[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return found
