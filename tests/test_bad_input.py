"""Every bad input of bad_input.yaml, and six values for each numeric setting of each command: one line, and nothing hangs.

The line begins with `error: `, contains the words in the table, and is printed last; the exit status is 2.
"""

import importlib
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from lit_linformer.cli import PROGRAMS
from lit_linformer.cli.app import LinformerCLI
from lit_linformer.cli.help import settings_of
from lit_linformer.utils.arguments import check_number
from tests.helpers import in_one_process

TABLE = yaml.safe_load(Path(__file__).with_name("bad_input.yaml").read_text())
VALUES = {"nan": ".nan", "inf": ".inf", "-1": "-1", "0": "0", "2^70": str(2**70), "text": "much"}
TASKS, DATA, CALLBACKS = "lit_linformer.tasks", "lit_linformer.data", "lit_linformer.callbacks"
WEIGHTS = tuple(f"model.{name}_weight" for name in ("logits", "hidden", "labels"))
# What each part of the generated table adds to the command line, and which settings it covers.
PARTS = {
    "MLM": ([], ("model.", "data.", "best.", "last.", "throughput.", "progress.", "seed_everything")),
    "trainer": ([], ("trainer.",)),
    "SequenceClassification": (["--model", f"{TASKS}.SequenceClassification"], ("model.",)),
    "Distillation": (["--model", f"{TASKS}.Distillation"], WEIGHTS),
    "FineTuningData": (["--data", f"{DATA}.FineTuningData"], ("data.",)),
}


def refusal(status: int, printed: str) -> str | None:
    """The error line, or None if the command did not end with one."""
    lines = printed.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    whole = status == 2 and len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in printed
    return errors[0] if whole and len(errors[0]) < 500 and "Union" not in errors[0] else None


def numeric(hint: Any) -> bool:
    return hint in (int, float) or any(numeric(part) for part in get_args(hint))


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_numbers_of_fit(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Building the parser anew for each line would take half of the time.
    build, built = LinformerCLI.setup_parser, {}

    def once(cli, *args, **kwargs):
        if not built:
            build(cli, *args, **kwargs)
            built.update(vars(cli))
        for name in ("parser", "_subcommand_parsers", "_subcommand_method_arguments"):
            setattr(cli, name, built[name])

    monkeypatch.setattr(LinformerCLI, "setup_parser", once)
    extra, prefixes = PARTS[part]
    # What is declared as in MLM, or in its data, has been checked there.
    known, others = settings_of(["fit", *extra]), settings_of(["fit"]) if extra else {}
    keys = [key for key, hint in known.items() if key.startswith(prefixes) and numeric(hint) and others.get(key) != hint]
    # A line whose number is not refused fails at the checkpoint, before anything is built.
    check_numbers(["fit", *extra, "--ckpt_path", "nowhere.ckpt"], keys, tmp_path)


def check_numbers(command: list[str], keys: list[str], folder: Path, scope: str = "") -> None:
    cases = [(key, value) for key in keys for value in VALUES]
    lines = [[*command, f"--{key}", VALUES[value]] for key, value in cases]
    wrong = []
    for (key, value), (status, printed) in zip(cases, in_one_process(lines, folder), strict=True):
        line, name = refusal(status, printed), key
        if value in TABLE["meaningful"].get(scope + key, {}):
            if line is None or line.startswith(f"error: {name} is "):
                wrong.append(f"{key} {value} has its meaning, but: {status} {printed}")
        elif line is None or not line.startswith(f"error: {name} is ") or "; allowed: " not in line:
            wrong.append(f"{key} {value}: {status} {printed[-300:]}")
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)


# Studies read their settings themselves. A line whose number is not refused fails at the settings given here.
STUDIES = {
    "benchmark --device nowhere": "benchmark",
    "benchmark --what training --device nowhere": "benchmark",
    "benchmark --what loop --config nowhere.yaml": "benchmark",
    "benchmark --what lengths --device nowhere": "benchmark",
    "benchmark --what parallel --device nowhere": "benchmark",
    "benchmark --what preparation --source nowhere": "benchmark",
    "spectrum --run nowhere": "spectrum",
    "grid --config nowhere.yaml": "grid",
    "tune --config nowhere.yaml --space nowhere.yaml": "tune",
    "convert --from nowhere --name n": "convert",
    "draw --ckpt_path nowhere --text x --output x.png": "draw",
    "embed --ckpt_path nowhere --text x --output x.npy": "embed",
}


@pytest.mark.parametrize("start", STUDIES)
def test_numbers_of_studies(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = STUDIES[start]
    words = shlex.split(start)
    module = PROGRAMS[command]
    if command == "benchmark":
        module = f"lit_linformer.studies.benchmark.{words[2] if words[1] == '--what' else 'layers'}"
    settings = importlib.import_module(module).SETTINGS
    keys = [key for key, setting in settings.items() if getattr(setting.kind.read, "func", None) is check_number]
    assert keys
    if command == "convert":
        words += ["--attention", "linformer"]
    check_numbers(words, keys, tmp_path, f"{command} ")


TOGETHER = 60  # lines in one test: one of two hundred would keep a single core busy at the end


@pytest.mark.parametrize(
    ("start", "first"),
    [
        pytest.param(start, n, marks=[pytest.mark.slow] * (n > 0))
        for start, rows in TABLE["lines"].items()
        for n in range(0, len(rows), TOGETHER)
    ],
)
def test_lines(start, first, tiny, tmp_path):
    for name, content in TABLE["files"].items():
        (tmp_path / name).write_text(content)
    rows = TABLE["lines"][start][first : first + TOGETHER]
    lines = [shlex.split(f"{start} {line}") for line, *_ in rows]
    # Refused before data are prepared: a cache made here would count as left behind.
    tiny = [*tiny, "--data.cache_dir", "cache"] if start == "fit TINY" else tiny
    lines = [[part for word in line for part in (tiny if word == "TINY" else [word])] for line in lines]
    before = {path for path in tmp_path.rglob("*")}
    wrong = []
    for (line, *words), (status, printed) in zip(rows, in_one_process(lines, tmp_path / "printed"), strict=True):
        told = refusal(status, printed)
        if told is None or not all(word in told for word in words):
            wrong.append(f"{start} {line}: {status} {printed[-400:] if told is None else told}")
    assert not wrong, f"{len(wrong)} of {len(rows)}\n" + "\n".join(wrong)
    beside = {"printed", "__pycache__"}
    left = [path for path in tmp_path.rglob("*") if path not in before and beside.isdisjoint(path.parts)]
    assert not left  # a refused line leaves nothing behind
