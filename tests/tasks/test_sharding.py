"""FSDP2: a run in two processes equals the plain one, and each resumes from the other's checkpoint."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_linformer.runs.checkpoints import find_checkpoint
from lit_linformer.runs.trained_model import open_checkpoint
from tests.helpers import HANGS, fit, load, output, read_log
from tests.test_distributed import EXACT, GLOBAL, free_port

ROOT = Path(__file__).parents[2]
SHARDED = ["--config", str(ROOT / "conf/trainer/fsdp.yaml"), "--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]


def fit_sharded(argv: list[str], name: str, log: Path, *extra: str) -> None:
    """Runs `fit` in two processes started from outside, as torchrun does."""
    port, processes = str(free_port()), []
    overlay = [*SHARDED, "--trainer.devices", "2"]

    def process(rank: int) -> None:
        started = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ.update(started, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        sys.exit(fit([*argv, *overlay], name, log, *extra))

    for rank in range(2):
        processes.append(multiprocessing.get_context("fork").Process(target=process, args=(rank,)))
        processes[-1].start()
    for started in processes:
        started.join(HANGS)
    assert [started.exitcode for started in processes] == [0, 0], log.with_suffix(".out").read_text()


def test_evaluation_shards_a_plain_checkpoint_and_scores_its_average(tiny, tmp_path):
    assert fit(tiny, "run", tmp_path / "run", "--trainer.callbacks+", "Averaging", "--trainer.callbacks.decay", "0.9") == 0
    command, found = ["validate", "--config", "runs/run/config.yaml", "--ckpt_path", "last"], []
    for overlay in ([], [*SHARDED, "--trainer.devices", "1"]):
        output([*command, *overlay], tmp_path)
        found.append(json.loads((tmp_path / "runs/run/validate.json").read_text())["metrics"]["val/perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
def test_a_sharded_model_is_compiled_layer_by_layer(tiny, tmp_path):
    tiny = [*tiny, *EXACT[:4], *GLOBAL, "--trainer.max_steps", "3", "--model.schedule", "constant"]
    losses = {}
    for name in ("true", "false"):
        fit_sharded(tiny, name, tmp_path / name, "--model.compile", name)
        losses[name] = [float.fromhex(line["loss"]) for line in read_log(tmp_path / f"{name}.0").values()]
    assert losses["true"] == pytest.approx(losses["false"], abs=1e-4) and losses["true"] != losses["false"]


@pytest.mark.slow
def test_sharded_run_is_the_plain_one_and_either_goes_on_from_the_others_checkpoint(tiny, tmp_path):
    tiny = [*tiny, *EXACT[:4], *GLOBAL, "--model.schedule", "constant"]  # does not depend on max_steps
    assert fit(tiny, "plain", tmp_path / "plain") == 0
    fit_sharded(tiny, "down", tmp_path / "down", "--trainer.max_steps", "5")
    assert fit(tiny, "down", tmp_path / "down", "--ckpt_path", "last") == 0
    averaging = ["--trainer.callbacks+", "Averaging", "--trainer.callbacks.decay", "0.9"]  # resuming uses the run's own weights
    assert fit(tiny, "up", tmp_path / "up", "--trainer.max_steps", "5", *averaging) == 0
    fit_sharded(tiny, "up", tmp_path / "up", "--ckpt_path", "last")
    checkpoints = tmp_path / "runs/up/checkpoints"
    assert {path.name for path in (checkpoints / "last.ckpt").iterdir()} >= {"__0_0.distcp", "__1_0.distcp", "meta.pt"}
    (best,) = checkpoints.glob("best-*.ckpt")

    convert = [sys.executable, str(ROOT / "scripts/plain_checkpoint.py"), str(checkpoints / "last.ckpt"), "converted.ckpt"]
    subprocess.run(convert, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    plain = load(tmp_path / "runs/plain/checkpoints/last.ckpt")
    found = [load(tmp_path / "converted.ckpt"), load(tmp_path / "runs/down/checkpoints/last.ckpt")]
    for checkpoint in found:
        assert checkpoint["global_step"] == 12
        torch.testing.assert_close(dict(checkpoint["state_dict"]), dict(plain["state_dict"]), rtol=1e-3, atol=1e-4)
    opened = open_checkpoint(checkpoints / "last.ckpt")  # as export, convert and draw read it
    assert all(torch.equal(tensor, found[0]["state_dict"][f"net.{name}"]) for name, tensor in opened.net.state_dict().items())
    mine, theirs = (checkpoint["optimizer_states"][0] for checkpoint in (found[0], plain))
    assert [group["params"] for group in mine["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    for number, state in theirs["state"].items():
        torch.testing.assert_close(mine["state"][number]["exp_avg"], state["exp_avg"], rtol=1e-2, atol=1e-4)

    (checkpoints / "last.ckpt/__1_0.distcp").unlink()
    assert find_checkpoint(tmp_path / "runs/up", "last").name == "previous.ckpt"
    shown = output(["validate", *tiny, "--name", "up"], tmp_path)
    assert str(best.name) in shown
    row = (tmp_path / "runs/plain/perplexity.csv").read_text().splitlines()[-1].split(",")
    found = json.loads((tmp_path / "runs/up/validate.json").read_text())["metrics"]["val/perplexity"]
    assert found == pytest.approx(float(row[3]), rel=1e-4)
