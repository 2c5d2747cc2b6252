"""The benchmark command: what it writes, how it resumes, what ends a measurement, and bad settings."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lit_linformer.studies.benchmark.layers import main, notes, read_settings
from lit_linformer.studies.benchmark.models import operations
from tests.helpers import HANGS
from tests.studies.conftest import SMALL, settings_of

ROOT = Path(__file__).parents[3]


def load():
    return json.loads(Path("runs/benchmark/benchmark.json").read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs/benchmark"


@pytest.mark.slow
def test_command_measures_writes_and_goes_on(folder, capsys):
    main([*SMALL, "--backward", "both"])
    shown = capsys.readouterr().out
    assert "[8/8] time, forward+backward, n = 64, batch 2: written-out " in shown
    assert "note: n = 32 has no k = 64, which is more than n" in shown
    assert shown.count("### Time saved against written-out attention") == 2
    data = load()
    assert data["environment"]["torch"] == torch.__version__ and data["environment"]["hardware"]
    assert data["settings"]["num_layers"] == 1 and data["settings"]["intermediate_size"] == 64
    assert list(data["cells"]) == [
        f"{kind}/{direction}/{n}"
        for n in (32, 64)
        for direction in ("forward", "forward+backward")
        for kind in ("memory", "time")
    ]
    for cell in data["cells"].values():
        models = cell["models"]
        assert list(models) == ["written-out", "fused", "linformer 8"] + ["linformer 64"] * (cell["n"] == 64)
        assert {entry["status"] for entry in models.values()} == {"ok"} and cell["batch"] == 128 // cell["n"]
        for name, found in cell["ratios"].items():
            assert found.keys() == {"written-out", "fused"}
            for baseline, entry in found.items():
                ours, theirs = models[name], models[baseline]
                if cell["kind"] == "memory":
                    assert entry["ratio"] == theirs["bytes"] / ours["bytes"]
                    continue
                assert len(ours["seconds"]) == 3 and ours["median"] == statistics.median(ours["seconds"]) > 0
                rounds = [b / a for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]
                assert entry["ratio"] == statistics.median(rounds)
                assert min(rounds) <= entry["quartiles"][0] <= entry["ratio"] <= entry["quartiles"][1] <= max(rounds)
                counts = [operations(of, data["settings"], cell["n"]) for of in ("fused", name)]
                assert entry["operation_counts"] == counts[0] / counts[1]
    check_files(folder)

    before = {key: cell["models"] for key, cell in data["cells"].items()}
    for entry in data["cells"]["time/forward/64"]["models"].values():
        entry |= {"status": "failed", "reason": "it is tried again"}
    (folder / "benchmark.json").write_text(json.dumps(data))
    main([*SMALL, "--backward", "false", "--lengths", "32", "64", "96"])
    again = capsys.readouterr().out
    assert again.count("finished before") == 3 and "[6/6] time, forward, n = 96, batch 1: written-out " in again
    after = {key: cell["models"] for key, cell in load()["cells"].items()}
    assert len(after) == 10 and after["time/forward/64"]["fused"]["status"] == "ok"
    assert all(after[key] == models for key, models in before.items() if key != "time/forward/64")
    assert len(list(folder.glob("events*"))) == 1

    with pytest.raises(ValueError, match=r"measured with rounds 3, not 4; allowed: another --output, or --overwrite true"):
        main([*SMALL, "--rounds", "4"])
    (folder / "benchmark.json").write_text('{"command": "python run.py benchmark", "cells')
    with pytest.raises(ValueError, match=r"benchmark.json is not whole; allowed: --overwrite true"):
        main(SMALL)
    main([*SMALL, "--lengths", "32", "--projection_dims", "8", "--rounds", "1", "--memory", "false", "--overwrite", "true"])
    assert list(load()["cells"]) == ["time/forward/32"]


def check_files(folder):
    """Figures are not empty, and figures and tables are in TensorBoard, too."""
    from matplotlib.image import imread
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("figure2.png", "table3.png"):
        picture = imread(folder / name)
        assert min(picture.shape[:2]) > 300 and len({tuple(pixel) for row in picture[::5] for pixel in row[::5]}) > 20
    text = (folder / "benchmark.md").read_text()
    assert "|  32: operation counts |" in text.replace(" 32:", "  32:") and "| 64 |     2 |" in text
    events = EventAccumulator(str(folder)).Reload()
    assert events.Tags()["images"] == ["figure2", "table3"]
    assert [point.step for point in events.Scalars("time, forward, ms/fused")] == [32, 64]


@pytest.mark.slow
def test_paper_stands_beside_what_was_measured(folder, capsys):
    """At n = 512, with a tiny width: the forward pass, compared with unfused attention."""
    argv = "--lengths 512 --projection_dims 128 256 512 --hidden_size 8 --num_heads 1 --num_layers 1 --tokens 512".split()
    main([*argv, "--rounds", "1", "--memory", "false"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|") and "512: paper" in line]
    assert [[word.strip() for word in line.strip("|").split("|")] for line in lines] == [["512: paper", "1.5", "1.3", ""]]
    ratios = load()["cells"]["time/forward/512"]["ratios"]
    assert ratios["linformer 256"]["written-out"]["paper"] == 1.3 and "paper" not in ratios["linformer 256"]["fused"]


@pytest.mark.slow
def test_out_of_memory_and_over_the_limit_are_results(tmp_path):
    """Under a memory limit: scores of 137 GB do not fit; on a core the fused kernel takes a minute, the Linformer 0.5 s."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
        "from lit_linformer.studies.benchmark.layers import main; main(sys.argv[1:])"
    )
    argv = "--lengths 131072 --projection_dims 8 --hidden_size 64 --num_heads 2 --num_layers 1 --tokens 64".split()
    argv += ["--rounds", "1", "--cell_seconds", "8", "--threads", "1", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for cell in json.loads((tmp_path / "out/benchmark.json").read_text())["cells"].values():
        statuses = {name: entry["status"] for name, entry in cell["models"].items()}
        assert statuses == {"written-out": "OOM", "fused": "over limit", "linformer 8": "ok"}
    assert "| 131,072 | written-out: OOM |" in done.stdout and "| 131,072 | fused: over limit |" in done.stdout
    assert " s by operation counts" in done.stdout  # the estimate was not over the limit
    assert "note: n = 131072 is more than tokens = 64: a batch of one sequence there" in done.stdout


def test_no_model_within_the_time_limit(folder, capsys):
    main([*SMALL, "--lengths", "64", "--memory", "false", "--cell_seconds", "1e-9"])
    assert {entry["status"] for entry in load()["cells"]["time/forward/64"]["models"].values()} == {"over limit"}
    shown = capsys.readouterr().out
    assert "fused over limit, linformer 8 over limit" in shown and "benchmark.md, table3.png\n" in shown


@pytest.mark.slow
def test_killed_it_leaves_no_process_and_keeps_its_cells(tmp_path):
    """kill -9 during a pass that takes many seconds."""
    argv = (
        "--lengths 64 65536 --projection_dims 8 --hidden_size 16 --num_heads 2 --num_layers 40 --tokens 64 --rounds 1".split()
    )
    argv += ["--models", "fused", "--memory", "false"]
    code = "import sys; from lit_linformer.studies.benchmark.layers import main; main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "out.txt", "w") as out:
        command = [sys.executable, "-c", code, *argv]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True)
    wait_for(lambda: "[1/2]" in (tmp_path / "out.txt").read_text())
    time.sleep(1)
    process.kill()
    process.wait()
    wait_for(lambda: not group(process.pid))
    assert "[2/2]" not in (tmp_path / "out.txt").read_text()
    cells = json.loads((tmp_path / "runs/benchmark/benchmark.json").read_text())["cells"]
    assert list(cells) == ["time/forward/64"] and cells["time/forward/64"]["models"]["fused"]["status"] == "ok"


def wait_for(condition):
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def group(number):
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may just have ended
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat.parent.name] if int(process_group) == number and state != "Z" else []
    return found


def test_peer(folder, monkeypatch):
    pytest.importorskip("linformer")
    main(
        [*SMALL, "--lengths", "64", "--projection_dims", "8", "--peer", "true", "--precision", "bf16", "--models", "linformer"]
    )
    for cell in load()["cells"].values():
        value = {"time": "median", "memory": "bytes"}[cell["kind"]]
        assert list(cell["models"]) == ["linformer 8", "peer 8"] and cell["models"]["peer 8"][value] > 0
        assert list(cell["ratios"]["linformer 8"]) == ["peer"] and cell["ratios"]["linformer 8"]["peer"]["ratio"] > 0
    monkeypatch.setitem(sys.modules, "linformer", None)  # Python's marker for not installed
    with pytest.raises(ValueError, match=r"peer is true, but .*; allowed: false, or `pip install linformer` first"):
        settings_of("--peer", "true")


def test_a_batch_of_other_tokens_than_the_tables_say_is_noted():
    found = notes(settings_of("--lengths", "32", "48", "128", "200", "--projection_dims", "8"))
    assert found == [
        "n = 200 is more than tokens = 128: a batch of one sequence there",
        "tokens = 128 is no multiple of n = 48: a batch of 96 tokens there",
    ]


def test_settings_in_their_forms_and_defaults():
    settings = read_settings(
        ["--lengths", "512,64", "128", "--projection_dims=16,8", "--device", "cpu", "--cell_seconds", "1e2"]
    )
    assert settings["lengths"] == [64, 128, 512] and settings["projection_dims"] == [8, 16]
    assert (settings["hidden_size"], settings["intermediate_size"], settings["num_layers"]) == (768, 3072, 2)
    assert settings["memory"] is True and settings["backward"] is False and settings["largest_batch"] is False
    assert settings["cell_seconds"] == 100 and math.isfinite(settings["batch_memory"])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--length", "64"],
            "unknown setting '--length' of benchmark; did you mean '--lengths'?; allowed: --what, --lengths, --proj",
        ),
        (["64"], "'64' is neither a setting of benchmark nor the value of one; allowed: --what, --lengths"),
        (["--lengths"], "--lengths has no value; allowed: N"),
        (["--lengths", "64", "big"], "lengths is 'big'; allowed: a whole number, 1 or more"),
        (["--lengths", "0"], "lengths is '0'; allowed: a whole number, 1 or more"),
        (["--projection_dims", "8", "65"], "projection_dims is 65; allowed: at most the longest of lengths, 64"),
        (["--models", "fused", "window", "--projection_dims", "65"], "projection_dims is 65; allowed: at most the longest of"),
        (["--models", "fuse"], "models is 'fuse'; did you mean 'fused'?; allowed: written-out, fused, linformer"),
        (["--tokens", "1", "2"], "'2' is neither a setting of benchmark"),
        (["--tokens", "-5"], "tokens is '-5'; allowed: a whole number, 1 or more"),
        (["--num_heads", "3"], "hidden_size is 16; allowed: a multiple of num_heads = 3"),
        (
            ["--sharing", "layer"],
            "sharing is 'layer'; did you mean 'layerwise'?; allowed: none, heads, headwise, key-value, layerwise",
        ),
        (["--order", "first"], "order is 'first'"),
        (["--local_width", "4"], "local_width is 4; allowed: 0 (none) or a positive odd number"),
        (["--backward", "yes"], "backward is 'yes'; allowed: true, false, both"),
        (["--precision", "bf61"], "precision is 'bf61'; did you mean 'bf16'?; allowed: float32, bf16, fp16"),
        (["--device", "tpu"], "device is 'tpu'; did you mean 'cpu'?; allowed: auto, cpu"),
        (["--rounds", "0"], "rounds is '0'; allowed: a whole number, 1 or more"),
        (["--cell_seconds", "0"], "cell_seconds is '0'; allowed: a number, more than 0"),
        (["--cell_seconds", "nan"], "cell_seconds is 'nan'; allowed: a number, more than 0"),
        (["--device", "cpu", "--largest_batch", "true"], "largest_batch is true; allowed: false on a CPU"),
        (["--peer", "true", "--intermediate_size", "20"], "intermediate_size is 20; allowed with peer: 4 hidden_size = 64"),
    ],
)
def test_bad_command_line(argv, expected, folder):
    with pytest.raises(ValueError) as caught:
        main([*([] if argv == ["64"] else SMALL), *argv])
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("runs").exists()
