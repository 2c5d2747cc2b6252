"""The subjects of `benchmark` other than layers, at a tiny size: training, loop, lengths, parallel, preparation."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lit_linformer.studies.benchmark import lengths
from lit_linformer.studies.benchmark.command import main
from lit_linformer.studies.benchmark.preparation import Beginning
from tests.helpers import TINY
from tests.test_distributed import free_port

SMALL = str(Path(__file__).parents[3] / "models/small")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def result(name):
    found = json.loads(Path("out", f"{name}.json").read_text())
    assert found["command"].startswith("python run.py benchmark --what") and found["environment"]["torch"]
    assert str(Path.cwd()) not in json.dumps(found)
    return found


@pytest.mark.slow
def test_training(here, capsys):
    sizes = "--hidden_size 32 --num_layers 1 --vocab_size 300 --length 32 --projection_dim 8 --tokens 128 --rounds 3"
    models = "--models linformer lookup linformer-lightning transformer --scaling 64 --num_heads 2 --threads 1 --output out"
    main(["--what", "training", *sizes.split(), *models.split()])
    shown, found = capsys.readouterr().out, result("training")
    names = ["linformer 32", "lookup 32", "linformer-lightning 32", "transformer 32", "linformer 64"]
    assert list(found["models"]) == names and all(name in shown for name in names)
    for model in found["models"].values():
        assert model["status"] == "ok" and len(model["seconds"]) == 3 and model["gflops_per_second"] > 0
        assert model["tokens_per_second"]["median"] == pytest.approx(128 / sorted(model["seconds"])[1], rel=1e-3)
    assert found["ratios"].keys() == {
        "linformer 32 / transformer 32", "lookup 32 / transformer 32", "linformer 32 / linformer-lightning 32",
        "linformer 64 / linformer 32",
    }  # fmt: skip


@pytest.mark.slow
def test_training_beside_transformers(here):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = "--hidden_size 32 --num_layers 1 --vocab_size 300 --length 32 --projection_dim 8 --tokens 64 --rounds 1 --steps 2"
    main(f"--what=training {sizes} --models roberta,roberta-trainer,linformer --threads 1 --output out".split())
    found = result("training")
    assert {model["status"] for model in found["models"].values()} == {"ok"}
    assert found["ratios"]["linformer 32 / roberta 32"]["median"] > 0 and found["environment"]["transformers"]


def test_loop(here, corpus, cache, capsys):
    config = yaml.safe_load(TINY)
    config["data"]["init_args"] |= {"source": str(corpus), "cache_dir": str(cache)}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    main("--what loop --config tiny.yaml --steps 4 --rounds 2 --threads 1 --device cpu --output out".split())
    found = result("loop")
    assert len(found["ratios"]) == 2 and found["ratio"]["median"] > 0 and 0 <= found["data_wait"]["median"] < 1
    assert "round 2: Lightning " in capsys.readouterr().out
    config["model"]["class_path"] = "lit_linformer.tasks.Distillation"
    Path("other.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"config is other.yaml, of .*Distillation .*; allowed: a config of MLM and Pre"):
        main(["--what", "loop", "--config", "other.yaml"])


def test_preparation(here, corpus, capsys):
    main(f"--what preparation --source {corpus} --megabytes 0.01 --rounds 2 --output out".split())
    found, shown = result("preparation"), capsys.readouterr().out
    part, whole = found["memory"]
    assert 0 < part["bytes"] < whole["bytes"] <= corpus.stat().st_size and 0 < whole["peak"] < 2**30
    assert len(found["ratios"]) == 2 and "median ratio " in shown and "peak memory for " in shown
    first = list(Beginning(str(corpus), 1))
    assert len(first) == 1 and corpus.read_text().startswith(first[0])


@pytest.mark.slow
def test_lengths(here, learnt, capsys):
    """Compares with rows of as many real tokens but no padding."""
    words = f"--what lengths --task SST-2 --pretrained {learnt / 'runs/task'} --source {learnt / 'glue'} --cache_dir cache"
    words += f" --length 16 --windows 3 --whole {learnt / 'runs/task'} --batch_size 6 --steps 3 --rounds 2"
    main([*words.split(), *"--threads 1 --device cpu --output out".split()])
    found, shown = result("lengths"), capsys.readouterr().out
    for name in ("training", "inference"):
        assert 0.8 < found[name]["real_tokens"] <= 1 and f"{name}: " in shown
        assert all(speed["median"] > 0 for speed in found[name]["tokens_per_second"].values())
        assert found[name]["ratios"].keys() == {"of the mean length", "of n tokens", "read whole"}
        assert found[name]["peak_bytes"].keys() == found[name]["tokens_per_second"].keys()


def test_a_batch_stands_beside_others_without_pads():
    ids = torch.arange(12).view(3, 4)
    mask = torch.arange(4) < torch.tensor([[4], [3], [2]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(3)}
    same, even, full = lengths.beside(batch, 8)
    assert same is batch and lengths.real_tokens(batch) == 9
    assert even["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 8, 9]] and torch.equal(even["labels"], torch.arange(3))
    assert full["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 8]] and full["labels"].tolist() == [0]
    assert "attention_mask" not in even | full


def test_ratios_of_lengths_are_of_the_time_a_token_takes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("lit_linformer.studies.benchmark.steps.now", lambda settings: clock[0])
    monkeypatch.setattr("lit_linformer.studies.benchmark.passes.peak_memory", lambda action, device: 0)
    sizes = {lengths.OWN: (10, 20.0), "of n tokens": (8, 4.0), lengths.WHOLE: (6, 10.0)}  # tokens, seconds

    def run(seconds):
        return lambda batch: clock.__setitem__(0, clock[0] + seconds)

    runs = {kind: run(seconds) for kind, (_, seconds) in sizes.items()}
    batch = {kind: {"input_ids": torch.zeros(1, tokens)} for kind, (tokens, _) in sizes.items()}
    found = lengths.measured(runs, [batch, batch], {"rounds": 3, "device": "cpu"})
    assert {kind: ratio["median"] for kind, ratio in found["ratios"].items()} == {"of n tokens": 0.25, lengths.WHOLE: 0.5}
    assert {kind: speed["median"] for kind, speed in found["tokens_per_second"].items()} == {
        lengths.OWN: 0.5, "of n tokens": 2.0, lengths.WHOLE: 0.6,
    }  # fmt: skip


@pytest.mark.slow
def test_parallel(here, tiny, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    words = "--what parallel --steps 4 --rounds 1 --device cpu --output out --config".split()
    main([*words, tiny[1], "--arguments", shlex.join(tiny[2:])])
    found = result("ddp")
    assert found["alone_tokens_per_second"][0] > 0 and found["share"]["median"] > 0
    with pytest.raises(ValueError, match=r"a run ended with exit status 2: error: .*no\.yaml"):
        main([*words, "no.yaml"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model": "lit_linformer.tasks.MLM", "data": None}, "of lit_linformer.tasks.MLM and None; allowed: a config of MLM"),
        (
            {
                "model": {"class_path": "lit_linformer.tasks.MLM", "init_args": {"pretrained": "runs/a"}},
                "data": {"class_path": "lit_linformer.data.PretrainingData"},
            },
            "which names no model.encoder; allowed: a config with an encoder of its own",
        ),
    ],
)
def test_a_config_that_the_loop_cannot_build(config, expected, here):
    Path("other.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError) as caught:
        main(["--what", "loop", "--config", "other.yaml"])
    assert str(caught.value).startswith(f"config is other.yaml, {expected}")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--what", "train"], "what is 'train'; did you mean 'training'?; allowed: layers, training, loop, lengths, para"),
        (["--what", "training", "--rounds", "0"], "rounds is '0'; allowed: a whole number, 1 or more"),
        (["--what", "training", "--clock", "cpu", "--threads", "2"], "clock is cpu; allowed: wall, or a CPU with threads = 1"),
        (["--what", "training", "--num_heads", "7"], "hidden_size is 768; allowed: a multiple of num_heads = 7"),
        (["--what", "training", "--length", "64"], "projection_dim (k) is 128; allowed: 1 to max_length = 64"),
        (["--what", "lengths", "--pretrained", SMALL, "--length", "513"], "length is 513; allowed: up to the n of "),
        (["--what", "parallel", "--processes", "1"], "processes is '1'; allowed: a whole number, 2 or more"),
        (["--what", "loop", "--config", "no.yaml"], "config is 'no.yaml', which is no file; allowed: "),
        (["--what", "layers", "--steps", "2"], "unknown setting '--steps' of benchmark"),
    ],
)
def test_bad_settings(argv, expected, here):
    with pytest.raises(ValueError) as caught:
        main(argv)
    assert str(caught.value).startswith(expected) and not list(here.iterdir())


def test_the_package_starts_itself_without_run_py(here):
    """As installed from a wheel."""
    command = [sys.executable, "-m", "lit_linformer", "benchmark", "--lengths", "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "error: lengths is 'x'; allowed: a whole number, 1 or more\n"
