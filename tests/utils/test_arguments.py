"""The parser of the commands other than the Trainer's: its forms, its errors, and the help of every command."""

import subprocess
import sys
from pathlib import Path

import pytest

from lit_linformer.cli import COMMANDS, LIGHTNING
from lit_linformer.studies.benchmark.subject import SUBJECTS
from lit_linformer.utils.arguments import FLAG, Setting, choice, listed, number, parse, several, whole, word

ROOT = Path(__file__).parents[2]
DOC = "What it does.\n\nMore, as 90 % of it.\n"
SETTINGS = {
    "lengths": Setting(listed(whole("N", 1)), "n", [512]),
    "run": Setting(several(word("RUN")), "folders", required=True),
    "text": Setting(word("TEXT"), "any"),
    "share": Setting(number("SHARE", above=0, most=1), "a share", 0.9),
    "order": Setting(choice("first", "last"), "which", "first"),
    "overwrite": Setting(FLAG, "replace", False),
}


def read(*argv):
    return parse("measure", DOC, SETTINGS, list(argv))


def test_forms_of_values():
    for words in (["512", "64"], ["512,64"], ["[512, 64]"], ["[512,", "64]"], ["9", "--lengths", "512", "64"]):
        assert read("--run", "a", "--lengths", *words)["lengths"] == [512, 64]
    assert read("--run=a", "--lengths=512,64")["lengths"] == read("--run", "a", "--lengths=512", "64")["lengths"] == [512, 64]
    found = read("--run", "a,b", "c", "--run", "d", "--text", "--lr 1", "--share", "1e-1")
    assert found["run"] == ["a,b", "c", "d"] and found["text"] == "--lr 1" and found["share"] == 0.1
    assert read("--run", "a", "--text", "--config=x")["text"] == "--config=x"
    for words, expected in ((["--overwrite"], True), (["--overwrite", "true"], True), (["--overwrite=false"], False)):
        assert read(*words, "--run", "a")["overwrite"] is read(*words, "--run=a")["overwrite"] is expected
    assert read("--run", "a") == {
        "lengths": [512], "run": ["a"], "text": None, "share": 0.9, "order": "first", "overwrite": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "--run is not given; allowed: RUN, folders"),
        (["--runs", "a"], "unknown setting '--runs' of measure; did you mean '--run'?; allowed: --lengths, --run, --text"),
        (["--run", "a", "--runs=a"], "unknown setting '--runs' of measure"),
        (["512"], "'512' is neither a setting of measure nor the value of one; allowed: --lengths"),
        (["--run", "a", "--order", "first", "last"], "'last' is neither a setting of measure"),
        (["--run"], "--run has no value; allowed: RUN"),
        (["--text", "--run", "a"], "--text has no value; allowed: TEXT"),
        (["--run", "a", "--lengths", "0"], "lengths is '0'; allowed: a whole number, 1 or more"),
        (["--run", "a", "--lengths", "-3"], "lengths is '-3'; allowed: a whole number, 1 or more"),
        (["--run", "a", "--lengths", ""], "lengths is ''; allowed: a whole number, 1 or more"),
        (["--run", "a", "--lengths", str(2**70)], f"lengths is '{2**70}'; allowed: a whole number, 1 or more"),
        (["--run", "a", "--share", "0"], "share is '0'; allowed: a number, more than 0, up to 1"),
        (["--run", "a", "--share", "nan"], "share is 'nan'; allowed: a number, more than 0, up to 1"),
        (["--run", "a", "--order", "lats"], "order is 'lats'; did you mean 'last'?; allowed: first, last"),
        (["--run", "a", "--overwrite", "yes"], "overwrite is 'yes'; allowed: true, false"),
    ],
)
def test_errors(argv, expected):
    with pytest.raises(ValueError) as caught:
        read(*argv)
    assert str(caught.value).startswith(expected)


def test_help_without_docstrings(capsys):
    with pytest.raises(SystemExit):
        parse("measure", None, SETTINGS, ["--help"])  # as under python -OO
    assert "--lengths" in capsys.readouterr().out


def test_help_of_every_command_is_quick():
    """It lists every setting and imports nothing slow; all in one process, since starting processes is what takes time."""
    code = """
import importlib, sys
from lit_linformer.cli import COMMANDS, LIGHTNING, main
from lit_linformer.studies.benchmark.subject import SUBJECTS
lines = [[name] for name in COMMANDS if name not in LIGHTNING] + [["benchmark", "--what", what] for what in SUBJECTS]
for line in lines:
    print("\\nHELP OF", *line)
    try:
        main([*line, "--help"])
    except SystemExit as end:
        assert not end.code
print("\\nLOADED", [name for name in ("torch", "lightning", "matplotlib", "jsonargparse") if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    *helps, loaded = shown.split("\nHELP OF ")[1:-1] + shown.split("\nHELP OF ")[-1].split("\nLOADED ")
    assert loaded.strip() == "[]" and len(helps) == len(set(COMMANDS) - set(LIGHTNING)) + len(SUBJECTS)
    by_command = {text.partition("\n")[0]: text for text in helps}
    assert "--print_commands" in by_command["grid"] and "skip:" in by_command["grid"]
    assert "--source" in by_command["report"] and "--mask_rate" in by_command["benchmark --what training"]
    for name, text in by_command.items():
        assert f"usage: python run.py {name.removesuffix(' --what layers')} " in text, text
