"""The README's commands and code, as they stand: run, on a model shrunk by what a test appends."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from lit_linformer.cli import INTEROP, STUDIES
from tests.data.glue import write_glue
from tests.helpers import run_forked, write_corpus
from tests.test_conf import SHRINK

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_command_runs(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "conf", "conf")
    (tmp_path / "texts").mkdir()
    write_corpus(tmp_path / "texts/text.txt")
    write_glue(tmp_path / "glue", "SST-2")
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(part, comments=True)[2:] for line in lines for part in line.split("&&") if "run.py" in part]
    assert len(commands) >= 10 and commands[0] == ["fit", "--config", "conf/quickstart.yaml"]
    for command in commands:
        extra = []
        if command[0] == "benchmark":
            extra = "--hidden_size 32 --num_heads 2 --num_layers 1 --tokens 2048 --rounds 1 --memory false".split()
        elif "--help" not in command and command[0] not in STUDIES + INTEROP:
            extra = ["--data.cache_dir", str(cache)]
            if "finetune" in command[2]:
                extra += ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"]
            elif "convert" in command[2]:
                extra += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.validation_fraction", "0.1"]
            elif command[2].startswith("conf/"):
                extra += [*SHRINK, *([] if "--data.source" in command else ["--data.source", "texts/text.txt"])]
        log = tmp_path / "out.txt"
        if command[0] in STUDIES:  # in a process of their own: benchmark starts helpers, which a fork of pytest cannot wait for
            done = subprocess.run([sys.executable, ROOT / "run.py", *command, *extra], capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            continue
        assert run_forked([*command, *extra], log) == 0, (command, log.read_text())
    for code in blocks("py"):  # on what the commands have left
        exec(compile(code, "README.md", "exec"), {})


def test_two_install_commands_are_the_ones_that_ci_runs():
    installs = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("pip install")]
    assert len(installs) == 2 and all(line.startswith("pip install -c constraints.txt") for line in installs)


def test_code_runs():
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), {})


def test_file_tree_and_tables_name_what_exists():
    for path in re.findall(r"`((?:conf|lit_linformer|scripts|docs)/[\w/.]+?)/?`", README):
        assert (ROOT / path).exists(), path
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml")}
    told = {part for part in configs if part in README or Path(part).name in README or part.startswith("conf/debug/")}
    assert told == configs
