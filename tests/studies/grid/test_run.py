"""A grid of real runs: finished, failed, stopped and resumed."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lit_linformer.studies.grid.command import main
from lit_linformer.studies.grid.file import read_grid
from lit_linformer.studies.grid.run import RunningCell, gpu_shares, run_jobs
from tests.helpers import HANGS

ROOT = Path(__file__).parents[3]


def write_small_grid(tiny, axes, **table):
    """A grid of real runs on the tiny model."""
    rows, columns = list(axes)[:2]
    table = {"rows": rows, "columns": columns, "value": "val/perplexity", **table}
    Path("grid.yaml").write_text(yaml.safe_dump({"arguments": shlex.join(tiny), "axes": axes, "table": table}, sort_keys=False))


@pytest.mark.slow
def test_grid_of_pretrainings(tiny, tmp_path, capsys):
    """Two real runs at a time; one column shows the test split. Then the same command has nothing to do."""
    axes = {
        "model": {"Linformer": "--trainer.max_steps 2 --trainer.val_check_interval 2"},
        "width": {"16": "--model.encoder.hidden_size 16", "32": "--model.encoder.hidden_size 32"},
    }
    write_small_grid(tiny, axes, value={"16": "val/perplexity", "32": "test/perplexity"})
    main(["--config", "grid.yaml", "--jobs", "2"])
    shown = capsys.readouterr().out
    assert shown.count("fit → runs/grid/") == 2 and shown.count("val/perplexity ") == 1 and "– " not in shown
    table = json.loads(Path("runs/grid/table.json").read_text())
    for cell in table["cells"]:
        file = Path("runs", cell["run"], "test.json" if cell["metric"] == "test/perplexity" else "result.json")
        assert cell["value"] == json.loads(file.read_text())["metrics"][cell["metric"]]  # validated once: the last is the best
        assert 1 < cell["value"] < 500
    made = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.ckpt")}
    main(["--config", "grid.yaml"])
    again = capsys.readouterr().out
    assert again.count("finished before") == 2 and "→" not in again
    assert made == {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.ckpt")}
    assert [line for line in again.splitlines() if line[0:1] == "|"] == [
        line for line in shown.splitlines() if line[0:1] == "|"
    ]


@pytest.mark.parametrize(
    ("visible", "jobs", "shares"),
    [
        ("0,1,2,3", 1, [None]),
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("4,5,6", 2, ["4", "5"]),
        ("GPU-a,GPU-b", 3, ["GPU-a", "GPU-b", "GPU-a"]),
        ("7", 2, [None, None]),
    ],
)
def test_jobs_divide_the_gpus_among_them(visible, jobs, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_shares(jobs) == shares


def test_each_run_sees_its_own_gpus(tiny, tmp_path, monkeypatch):
    """Three cells, two at a time: the third gets the GPUs of the one that ended first. They are only names, and cells sleep."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr("lit_linformer.studies.grid.run.run_command", lambda: ["sh", "-c", "sleep 1"])
    write_small_grid(tiny, {"seed": {str(seed): f"--seed_everything {seed}" for seed in range(3)}, "k": {"8": ""}})
    cells, seen = read_grid(Path("grid.yaml")).cells, {}

    def watch(job):
        with contextlib.suppress(ProcessLookupError):  # it may just have ended
            variables = Path(f"/proc/{job.process.pid}/environ").read_bytes().split(b"\0")
            if found := [each for each in variables if each.startswith(b"CUDA_VISIBLE_DEVICES=")]:  # none before it has begun
                seen.setdefault(job.cell.name, found)

    run_jobs((RunningCell(cell, str(cell)) for cell in cells), 2, lambda job: None, watch)
    first, second, third = (seen[cell.name] for cell in cells)
    assert (first, second) == ([b"CUDA_VISIBLE_DEVICES=0,1"], [b"CUDA_VISIBLE_DEVICES=2,3"]) and third in (first, second)


@pytest.mark.slow
def test_failed_cells_leave_the_others_and_go_on(tiny, tmp_path, capsys):
    """A bad setting, and a cell killed at step 9 with a checkpoint of step 5: the printed command resumes it."""
    kill = {"class_path": "tests.helpers.BatchLog", "init_args": {"path": str(tmp_path / "batches"), "kill_at": 9}}
    axes = {
        "case": {"bad": "--model.lr 0", "killed": f"--trainer.callbacks+ {shlex.quote(json.dumps(kill))}", "good": ""},
        "k": {"8": "--model.encoder.projection_dim 8"},
    }
    write_small_grid(tiny, axes)
    with pytest.raises(ValueError, match="2 of 3 cells failed: bad · 8, killed · 8; their output is in runs/grid/"):
        main(["--config", "grid.yaml"])
    shown = capsys.readouterr().out
    assert "[1/3] bad · 8: failed" in shown and "model.lr is 0" in shown and "s): ended by SIGKILL" in shown
    assert "[3/3] good · 8: val/perplexity " in shown
    cases = json.loads(Path("runs/grid/table.json").read_text())["medians"]
    assert cases["bad"] == cases["killed"] == {} and cases["good"]["8"]["runs"] == 1
    assert re.search(r"^\| killed \| +– ", shown, re.M)

    axes["case"]["killed"] = ""
    write_small_grid(tiny, axes)
    main(["--config", "grid.yaml", "--print_commands", "true", "--only", "case=killed"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("--ckpt_path auto") and not Path("runs/grid/killed-8/result.json").exists()
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0 and "resuming at step 5" in done.stdout, done.stderr
    main(["--config", "grid.yaml", "--only", "case=killed"])
    assert "[1/1] killed · 8: val/perplexity " in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_stops_the_cells_and_no_cell_runs_twice(tiny, tmp_path, capsys):
    write_small_grid(tiny, {"model": {"long": "--trainer.max_steps 1000000"}, "k": {"8": "--last.every_n_steps 1"}})
    code = "import sys; from lit_linformer.studies.grid.command import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--config", "grid.yaml"]
    grid = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        deadline = time.monotonic() + HANGS
        while not Path("runs/grid/long-8/checkpoints/last.ckpt").exists():
            assert time.monotonic() < deadline and grid.poll() is None
            time.sleep(0.1)
        main(["--config", "grid.yaml"])
        assert "[1/1] long · 8: left alone, it is already running" in capsys.readouterr().out
        grid.send_signal(signal.SIGTERM)
        _, errors = grid.communicate(timeout=HANGS)
    finally:
        grid.kill()
    assert grid.returncode != 0 and "stopped; the same command continues from here" in errors
    with open("runs/grid/long-8.log") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds the lock: no process of the cell is left
    assert read_grid(Path("grid.yaml")).cells[0].left()[0][-2:] == ["--ckpt_path", "auto"]
