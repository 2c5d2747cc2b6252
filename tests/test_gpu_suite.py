"""scripts/gpu_suite.py, rehearsed on a CPU."""

import argparse
import importlib.util
import json
import re
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


@pytest.fixture
def suite():
    spec = importlib.util.spec_from_file_location("gpu_suite", ROOT / "scripts/gpu_suite.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_gpu_suite_rehearsed_on_a_cpu(suite, tiny, tmp_path, corpus, cache):
    """Every part; then the same command has only training left to continue."""
    output(["fit", *tiny, "--name", "tokenizer", "--trainer.max_steps", "1"], tmp_path)
    words = ["--source", corpus, "--tokenizer", "runs/tokenizer/tokenizer.json", "--output", "suite", "--device", "cpu"]
    words += ["--minutes", "60", "--piece_mb", "0.02"]
    shown = script("gpu_suite.py", *words)
    page = tmp_path / "suite/page"
    parts = json.loads((page / "suite.json").read_text())["parts"]
    assert list(parts) == "speed tests mechanisms prepare half nccl table3 window roberta pretrain".split()
    assert all(part["status"] == "ok" for part in parts.values()), shown
    assert "skipped" in parts["tests"]["results"] and parts["table3"]["results"]["cells"]
    assert parts["speed"]["results"]["ratios"]["linformer 8192 / linformer 512"]["median"] > 0
    assert parts["mechanisms"]["results"]["ratios"]["lookup 512 / transformer 512"]["median"] > 0
    assert parts["nccl"]["results"]["share"]["median"] > 0 and parts["pretrain"]["results"]["step"] == 6
    text = (page / "report.md").read_text()
    assert "tokens/s at n = 8192" in text and "| roberta-trainer 512" in text and "examples.sliding_window" in text
    pictures = re.findall(r"\]\((\S+\.png)\)", text)
    assert {"table3-figure2.png", "window-figure2.png", "pretrain.png"} <= set(pictures)
    assert all((page / picture).stat().st_size > 1000 for picture in pictures)
    assert str(tmp_path) not in text + (page / "suite.json").read_text()
    pieces = sorted((page / "weights").glob("model.safetensors.*"))
    assert len(pieces) > 1 and all(piece.stat().st_size <= 0.02 * 2**20 for piece in pieces)
    (page / "weights/model.safetensors").write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    filled = output(["predict", "--model.pretrained", str(page / "weights"), "--data.text", "the <mask> is here"], tmp_path)
    assert "the " in filled and " is here" in filled
    assert suite.trained(tmp_path / "suite/pretrain/checkpoints/last.ckpt") > 0 == suite.trained(tmp_path / "none.ckpt")
    again = script("gpu_suite.py", *words)
    assert again.count(", at most ") == 1 and "pretrain, at most " in again and "table3: ok" in again


def test_a_part_of_the_gpu_suite_may_fail_or_take_too_long(suite, tmp_path):
    sleeps = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep({HANGS})'])"
    for code, limit, expected in (("1", HANGS, "ok"), ("1 / 0", HANGS, "failed"), (sleeps, 1, "time limit")):
        status, seconds = suite.run([sys.executable, "-c", code], tmp_path / "log", limit)
        assert status == expected and seconds < HANGS
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed/training.json").write_text('{"models": {"linformer 512": {"mfu": 0.52}}')
    assert suite.results("speed", tmp_path) is None  # truncated


def test_the_next_call_of_the_gpu_suite_does_what_is_left(suite, tmp_path, monkeypatch, capsys):
    """Finished parts are skipped, failed ones tried once more, and what a part has measured stays if the next try fails."""
    code = "import pathlib; pathlib.Path('{0}').mkdir(exist_ok=True); pathlib.Path('{0}/training.json').write_text('{1}')"
    told = json.dumps({"models": {"linformer 512": {"status": "ok", "mfu": 0.412}}, "ratios": {}})
    works, fails = [sys.executable, "-c", code.format("speed", told)], [sys.executable, "-c", "exit('error: no')"]
    parts = {"speed": works, "mechanisms": fails, "table3": fails, "half": works}
    monkeypatch.setattr(suite, "commands", lambda args, seconds: parts)
    args = argparse.Namespace(minutes=60, only=list(parts), least=1, tiny=False)
    content = {"parts": {}, "environment": {"hardware": "none"}, "command": "python scripts/gpu_suite.py"}
    (tmp_path / "page").mkdir()
    begun = []
    for call in range(3):
        suite.measure(args, content, tmp_path)
        begun.append([line.split(",")[0] for line in capsys.readouterr().out.splitlines() if ", at most " in line])
        content = {**content, "parts": json.loads((tmp_path / "page/suite.json").read_text())["parts"]}
        parts["table3"] = works if call == 0 else parts["table3"]
    assert begun == [["speed", "mechanisms", "half", "table3"], ["mechanisms", "table3"], []]
    assert [content["parts"][name]["status"] for name in parts] == ["ok", "failed", "ok", "ok"]
    assert content["parts"]["mechanisms"]["log"] == ["error: no"]
    page = (tmp_path / "page/report.md").read_text()
    assert re.search(r"\| 0.4 +\| 0.412 +\| MFU of a training step", page) and page.count("not measured") == 4
    suite.measure(argparse.Namespace(minutes=0, only=["speed", "nccl"], least=1, tiny=False), {"parts": {}}, tmp_path)
    assert capsys.readouterr().out == "speed: no time left\nnccl: no time left\n"
