"""scripts/gpu_suite.py, rehearsed on a CPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import HANGS, output

ROOT = Path(__file__).parents[1]


def script(name, *words, status=0):
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_gpu_suite_rehearsed_on_a_cpu(tiny, tmp_path, corpus, cache):
    output(["fit", *tiny, "--name", "tokenizer", "--trainer.max_steps", "1"], tmp_path)
    words = ["--source", corpus, "--tokenizer", "runs/tokenizer/tokenizer.json", "--output", "suite", "--device", "cpu"]
    shown = script("gpu_suite.py", *words, "--minutes", "60")
    found = json.loads((tmp_path / "suite/suite.json").read_text())
    steps = found["steps"]
    assert list(steps) == ["tests", "throughput", "roberta", "benchmark", "linformer", "transformer", "report"]
    assert all(step["status"] == "ok" for step in steps.values()), shown
    assert "skipped" in steps["tests"]["results"] and steps["benchmark"]["results"]["cells"]
    assert steps["throughput"]["results"]["ratios"]["linformer 8192 / linformer 512"]["median"] > 0
    for kind in ("linformer", "transformer"):
        assert steps[kind]["results"]["step"] == 4 and f"{kind} after" in shown
    for picture in ("report/curves.png", "benchmark/figure2.png"):
        assert (tmp_path / "suite" / picture).stat().st_size > 1000
    assert str(tmp_path) not in json.dumps(found)


def test_a_step_of_the_gpu_suite_may_fail_or_take_too_long(tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_suite", ROOT / "scripts/gpu_suite.py")
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    sleeps = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep({HANGS})'])"
    for code, limit, expected in (("1", HANGS, "ok"), ("1 / 0", HANGS, "failed"), (sleeps, 1, "time limit")):
        status, seconds = suite.run([sys.executable, "-c", code], tmp_path / "log", limit)
        assert status == expected and seconds < HANGS
    (tmp_path / "throughput").mkdir()
    (tmp_path / "throughput/training.json").write_text('{"models": {"linformer 512": {"mfu": 0.52}}')
    assert suite.results("throughput", tmp_path, tmp_path / "log") is None  # not whole
    steps = {"throughput": {"status": "ok", "seconds": 3, "results": {"models": {"linformer 512": {"mfu": 0.52}}}}}
    assert any("0.52  MFU" in line for line in suite.summary(steps))
    assert sum("not measured" in line for line in suite.summary(steps)) == 2
