"""How fast text becomes token files, beside the tokenizer alone, and how much memory that takes.

    python scripts/bench_data.py --source texts/ --tokenizer bpe --repeats 5

Alone: `encode_batch_fast` over documents that are already in memory, results thrown away. Ours: reading, decompressing,
tokenising and writing the same documents. Both take turns in one run, because other work on the machine comes and goes.
"""

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from lit_linformer.data.checksums import ShardWriter
from lit_linformer.data.pieces import batches_of
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.token_files import _pieces, write_tokens
from lit_linformer.data.tokenizer import load_tokenizer, train_tokenizer

SPLITS = ("train",)


def first_bytes(corpus: Corpus, most: float):
    for document in corpus:
        yield document
        most -= len(document.encode())
        if most <= 0:
            return


def ours(corpus: Corpus, most: float, tokenizer) -> tuple[float, int]:
    """Seconds and bytes."""
    counts = {"train": {"documents": 0, "tokens": 0, "bytes": 0}}
    with tempfile.TemporaryDirectory() as folder, closing(ShardWriter(Path(folder, "train.bin"))) as file:
        started = time.perf_counter()
        pieces = _pieces(first_bytes(corpus, most), tokenizer, lambda _: "train")
        for _ in write_tokens(pieces, tokenizer, {"train": file}, counts, np.dtype(np.uint16)):
            pass
        return time.perf_counter() - started, counts["train"]["bytes"]


def alone(batches: list[list[str]], tokenizer) -> float:
    started = time.perf_counter()
    for batch in batches:
        tokenizer.encode_plain(batch)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", default="embedded", help="as data.source")
    parser.add_argument("--tokenizer", default="bpe", help="bpe, wordpiece, or a path as data.tokenizer")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--megabytes", type=float, default=16, help="text a turn")
    parser.add_argument("--memory-of", type=float, help=argparse.SUPPRESS)  # used by the script itself
    args = parser.parse_args()
    corpus = Corpus(args.source)

    if args.memory_of is not None:
        _, size = ours(corpus, args.memory_of, load_tokenizer(args.tokenizer))
        # ru_maxrss may count the parent, for a forked child starts as its copy: VmHWM starts anew with the program
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        peak = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
        peak = peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"peak memory for {size / 1e6:7.1f} MB of text: {peak / 1024:.0f} MiB")
        return

    with tempfile.TemporaryDirectory() as folder:
        if args.tokenizer in ("bpe", "wordpiece"):
            tokenizer = train_tokenizer(args.tokenizer, first_bytes(corpus, 5e6), 16384)
        else:
            tokenizer = load_tokenizer(args.tokenizer)
        tokenizer.save(Path(folder, "tokenizer.json"))
        most = args.megabytes * 1e6
        pieces = _pieces(first_bytes(corpus, most), tokenizer, lambda _: "train")
        batches = [[text for _, text, _, _ in batch] for batch in batches_of(pieces, text=1)]
        size = sum(len(text.encode()) for text in itertools.chain(*batches))
        ratios = []
        for turn in range(args.repeats):
            seconds = {}
            for name in ("alone", "ours") if turn % 2 else ("ours", "alone"):
                seconds[name] = alone(batches, tokenizer) if name == "alone" else ours(corpus, most, tokenizer)[0]
            ratios.append(seconds["alone"] / seconds["ours"])
            speeds = ", ".join(f"{name} {size / seconds[name] / 1e6:.2f} MB/s" for name in ("alone", "ours"))
            print(f"turn {turn + 1}: {speeds}, ratio {ratios[-1]:.2f}", flush=True)
        print(f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
        for part in (most, float("inf")):
            command = [sys.executable, __file__, "--source", args.source, "--memory-of", str(part)]
            subprocess.run([*command, "--tokenizer", str(Path(folder, "tokenizer.json"))], check=True)


if __name__ == "__main__":
    main()
