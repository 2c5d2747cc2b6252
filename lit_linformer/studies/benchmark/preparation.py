"""How fast text becomes token files, compared with the tokenizer alone, and how much memory it takes.

Alone: `tokenizers` on documents that are already in memory, without keeping the results. Ours: reading, decompressing,
tokenising and writing the same documents with their checksums. They take turns, since the machine may be busy. Memory is the
peak of a process that imports neither torch nor Lightning. Writes preparation.json.

    python run.py benchmark --what preparation --source texts/ --megabytes 16
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_linformer.data.pieces import batches_of, pieces_of
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.token_files import Holdout, make_token_files
from lit_linformer.data.tokenizer import load_tokenizer, train_tokenizer
from lit_linformer.studies.benchmark.subject import ROUNDS, WHAT, begin, output, spread, write
from lit_linformer.utils.arguments import Setting, number, word
from lit_linformer.utils.environment import ROOT, process_memory

SETTINGS = {
    "what": WHAT,
    "source": Setting(word("TEXT"), "as data.source", "embedded"),
    "tokenizer": Setting(word("bpe|wordpiece|FILE"), "as data.tokenizer", "bpe"),
    "megabytes": Setting(number("MB", above=0), "text in each round", 16.0),
    "rounds": ROUNDS,
    "output": output("runs/benchmark-preparation"),
}


class Beginning(Corpus):
    """The first documents of a text, until they have ``most`` bytes."""

    def __init__(self, source: str, most: float):
        super().__init__(source)
        self.most = most

    def __iter__(self) -> Iterator[str]:
        left = self.most
        for document in super().__iter__():
            yield document
            left -= len(document.encode())
            if left <= 0:
                return


def main(argv: list[str]) -> None:
    """Measures, writes and prints; ValueError for a bad setting."""
    settings = begin("preparation", __doc__, SETTINGS, argv, "preparation")
    source, most = settings["source"], settings["megabytes"] * 1e6
    with tempfile.TemporaryDirectory() as scratch:
        if settings["tokenizer"] in ("bpe", "wordpiece"):
            tokenizer = train_tokenizer(settings["tokenizer"], Beginning(source, 5e6), 16384)
        else:
            tokenizer = load_tokenizer(settings["tokenizer"])
        tokenizer.save(Path(scratch, "tokenizer.json"))
        pieces = (piece for text in Beginning(source, most) for piece in pieces_of(text, tokenizer.splits_at_newlines))
        batches = [[text for text, _, _ in batch] for batch in batches_of(pieces)]
        size = sum(len(text.encode()) for text in itertools.chain(*batches))
        ways = {"alone": lambda: alone(batches, tokenizer), "ours": lambda: ours(source, most, tokenizer)[0]}
        ratios: list[float] = []
        for turn in range(settings["rounds"]):
            seconds = {name: ways[name]() for name in (ways if turn % 2 else reversed(ways))}
            ratios.append(seconds["alone"] / seconds["ours"])
            speeds = ", ".join(f"{name} {size / seconds[name] / 1e6:.2f} MB/s" for name in ways)
            print(f"round {turn + 1}: {speeds}, ratio {ratios[-1]:.2f}", flush=True)
        print(f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
        memory, here = [], {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        for part in (most, float("inf")):
            words = ["-m", __spec__.name, source, str(part), str(Path(scratch, "tokenizer.json"))]
            done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True, env=here)
            memory.append(json.loads(done.stdout))
            print(f"peak memory for {memory[-1]['bytes'] / 1e6:.1f} MB of text: {memory[-1]['peak'] / 2**20:.0f} MiB")
    content = {"settings": settings, "ratios": ratios, "ratio": spread(ratios), "memory": memory}
    write(settings["output"], "preparation", argv, "cpu", content)


def ours(source: str, most: float, tokenizer: Any) -> tuple[float, int]:
    """Seconds that the preparation takes, and bytes of text."""
    with tempfile.TemporaryDirectory() as cache:
        started = time.perf_counter()
        corpora = {"train": Beginning(source, most)}
        folder = make_token_files(Path(cache), corpora, Holdout(0.0, 0.0), tokenizer, progress=False)
        seconds = time.perf_counter() - started
        return seconds, json.loads((folder / "meta.json").read_text(encoding="utf-8"))["splits"]["train"]["bytes"]


def alone(batches: list[list[str]], tokenizer: Any) -> float:
    started = time.perf_counter()
    for batch in batches:
        tokenizer.encode_plain(batch)
    return time.perf_counter() - started


if __name__ == "__main__":  # the process whose memory is measured
    _, size = ours(sys.argv[1], float(sys.argv[2]), load_tokenizer(sys.argv[3]))
    print(json.dumps({"bytes": size, "peak": process_memory("VmHWM")}))
