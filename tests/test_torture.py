"""scripts/torture.py in short: a few kills of each kind, and that it finds what is not right."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from tests.helpers import HANGS
from tests.test_gpu_suite import ROOT, script

# Ways to damage files of a killed run, and what must be found for each.
RUN = "runs/torture"


def leave_new(folder):
    (folder / RUN / "checkpoints/new.ckpt").touch()


def change_a_weight(folder):
    path = folder / RUN / "checkpoints/last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    next(iter(checkpoint["state_dict"].values())).view(-1)[0] += 1e-7
    torch.save(checkpoint, path)


def cut_off_the_best(folder):
    (path,) = (folder / RUN / "checkpoints").glob("best-*.ckpt")
    path.write_bytes(path.read_bytes()[:1000])


def rename_the_best(folder):
    (path,) = (folder / RUN / "checkpoints").glob("best-*.ckpt")
    path.rename(path.with_name("best-00000007-1.0000.ckpt"))


def lose_a_row(folder):
    path = folder / RUN / "perplexity.csv"
    path.write_text("".join(path.read_text().splitlines(True)[:-1]))


def repeat_a_point(folder):
    with SummaryWriter(folder / RUN) as writer:
        writer.add_scalar("train/loss", 1.0, 1)


def change_a_token(folder):
    (path,) = (folder / "cache").glob("tokens-*/train.bin")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


DAMAGES = {
    leave_new: ("bits", "new.ckpt is left over"),
    change_a_weight: ("bits", "last.ckpt.state_dict.net."),
    cut_off_the_best: ("bits", "cannot be read"),
    rename_the_best: ("curves", "but best-00000007-1.0000.ckpt for validate"),
    lose_a_row: ("curves", "perplexity.csv: steps [0, 1, 3, 4, 6, 7, 9] alone, [0, 1, 3, 4, 6, 7] killed"),
    repeat_a_point: ("curves", "train/loss: steps [1] twice"),
    change_a_token: ("bits", "train.bin has another content"),
}


def phases(output: Path) -> set[str]:
    """The phases in which runs were killed; all must have resumed, to the same bits and curves."""
    rounds = json.loads((output / "torture.json").read_text())["rounds"]
    assert not any(done[part] for done in rounds for part in ("went on", "bits", "curves"))
    return {kill["phase"] for done in rounds for kill in done["kills"]}


@pytest.mark.slow
def test_one_process_killed_in_each_phase(tmp_path):
    shown = script("torture.py", "--cases", "plain-1", "--kills", 9, "--keep", "--output", tmp_path)
    assert len(phases(tmp_path)) == 9
    assert "| all | | 9 | 9 | 9 | 9 |" in shown and (tmp_path / "report.md").read_text().startswith("# Killed")

    spec = importlib.util.spec_from_file_location("torture_compare", ROOT / "scripts/torture_compare.py")
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)
    alone, killed, copy = (tmp_path / f"rounds/{name}" for name in ("plain-1-alone", "plain-1-1", "copy"))
    for damage, (part, told) in DAMAGES.items():
        shutil.copytree(killed, copy)
        damage(copy)
        found = compare.compare(alone, copy)
        assert any(told in line for line in found[part]), (damage, found)
        shutil.rmtree(copy)


@pytest.mark.slow
def test_two_sharded_processes_killed(tmp_path):
    script("torture.py", "--cases", "sharded-2", "--kills", 3, "--output", tmp_path)
    assert "files of a checkpoint" in phases(
        tmp_path
    )  # whether a resumed start reaches the third point depends on the first two


STUCK = """
import sys
from pathlib import Path
import torture, torture_runs

command = torture_runs.command
def stuck(argv):
    if Path.cwd().name == "plain-1-0" and Path("runs/torture/config.yaml").exists():
        sys.exit("error: it does not go on")
    command(argv)

torture_runs.command = stuck
torture.main()
"""


@pytest.mark.slow
def test_run_that_does_not_go_on_is_told_with_the_kill(tmp_path):
    words = [sys.executable, "-c", STUCK, "--only", "plain-1:0", "--output", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}{os.pathsep}{ROOT}"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANGS, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    (told,) = json.loads((tmp_path / "torture.json").read_text())["rounds"]
    assert told["went on"][0].endswith("error: it does not go on") and told["kills"]
    assert "plain-1:0  FAILED" in done.stdout and told["kills"][-1]["kill"] in (tmp_path / "report.md").read_text()
