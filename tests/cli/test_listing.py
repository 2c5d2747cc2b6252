"""`python run.py list`: names in the registries, configs with their first lines, runs with their state."""

import json
import os
import pty
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from lit_linformer import callbacks, cli, data, tasks
from lit_linformer.cli.listing import BY_THEMSELVES, main
from lit_linformer.model import ATTENTIONS, PROJECTIONS, EncoderConfig
from lit_linformer.runs.lock import RunLock
from lit_linformer.utils.configs import head
from tests.helpers import inside, output

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "conf").rglob("*.yaml"))


def listed(capsys, *argv):
    """{name: the rest of its line}"""
    main(list(argv))
    lines = [line.strip().split(None, 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return {line[0]: line[1] if len(line) > 1 else "" for line in lines}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("attentions", list(ATTENTIONS)),
        ("projections", list(PROJECTIONS)),
        ("tasks", tasks.TASKS),
        ("data", data.__all__),
        ("callbacks", [name for name in callbacks.__all__ if name[0].isupper() and name not in BY_THEMSELVES]),
    ],
)
def test_names_are_those_that_a_setting_takes(what, names, capsys):
    found = listed(capsys, what)
    assert sorted(found) == sorted(names) and all(len(words) > 20 for words in found.values())


def test_settings_of_a_class_stand_on_its_own_page(capsys):
    assert "threshold 0.9" in listed(capsys, "callbacks")["Spectrum"]


def test_an_attention_is_listed_with_the_settings_that_attention_options_takes(capsys):
    for name, words in listed(capsys, "attentions").items():
        taken = ATTENTIONS[name].arguments(EncoderConfig(vocab_size=8, attention=name), 0)
        own = [option for option in ATTENTIONS.defaults(ATTENTIONS[name]) if option not in taken]
        shown = words.rpartition("  (")[2].rstrip(")").split(", ") if own else []
        assert sorted(one.split()[0] for one in shown) == sorted(own), name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_every_config_says_at_its_top_what_it_is_and_what_it_costs(path):
    told, content = head(path), yaml.safe_load(path.read_text())
    assert len(told.sentence) > 20
    complete = "axes" in content or "space" in content or "class_path" in content.get("model", {})
    assert told.sentence.startswith("Overlay: ") != complete
    assert bool(told.cost) == complete, "a line `# Cost: …` after the first sentence"


def test_configs_are_listed_with_their_cost(capsys):
    with inside(ROOT):
        found, grids, spaces = (listed(capsys, kind) for kind in ("configs", "grids", "spaces"))
    assert {*found, *grids, *spaces} == {str(path.relative_to(ROOT)) for path in CONFIGS}
    assert set(grids) == {str(path.relative_to(ROOT)) for path in CONFIGS if "axes" in yaml.safe_load(path.read_text())}
    assert set(spaces) == {str(path.relative_to(ROOT)) for path in CONFIGS if path.parent.name == "tune"}
    assert not found.keys() & {*grids, *spaces}
    assert (
        found["conf/quickstart.yaml"].startswith("A first curve: ")
        and "(cost: five to eight minutes" in found["conf/quickstart.yaml"]
    )


def test_runs_with_best_value_and_state(put, tiny, capsys):
    place = put("tiny").parent
    best = json.loads((place / "tiny/result.json").read_text())
    row = listed(capsys, "runs")["runs/tiny"]
    assert row.startswith(f"{best['best_metrics']['val/perplexity']:.2f} perplexity") and "finished" in row
    assert "MLM, linformer, k = 8" in row and " 12 " in row and "1,536" in row
    main(["runs", "--source", "runs", "runs/tiny"])
    assert capsys.readouterr().out.count("runs/tiny") == 1
    for name in ("killed", "short", "begun", "busy"):
        shutil.copytree(place / "tiny", place / "more" / name)
    (place / "more/killed/result.json").unlink()
    (place / "more/short/result.json").write_text(json.dumps(best | {"step": 5}))
    shutil.rmtree(place / "more/begun/checkpoints")
    (place / "more/begun/result.json").unlink()
    (place / "more/begun/perplexity.csv").unlink()
    lock = RunLock(place / "more/busy")
    found = listed(capsys, "runs", "--source", "runs/more")
    lock.release()
    assert "stopped at step 12 of 12" in found["runs/more/killed"]  # as its checkpoint says
    assert re.search(r"\d\.\d\d perplexity", found["runs/more/killed"])
    assert "ended at step 5 of 12" in found["runs/more/short"]
    assert "stopped before its first checkpoint" in found["runs/more/begun"]
    assert "running, step 12 of 12" in found["runs/more/busy"]
    assert "finished" in listed(capsys, "runs", "--source", "runs/more/busy")["runs/more/busy"]
    assert set(listed(capsys, "runs")) == {
        "runs/tiny",
        *(f"runs/more/{name}" for name in ("killed", "short", "begun", "busy")),
        "run",
    }


def test_a_run_that_was_stopped_is_listed_with_its_best_checkpoint(tmp_path, monkeypatch, capsys):
    """Not its latest; the time is in whole seconds, and k is shown only if the attention has slots."""
    monkeypatch.chdir(tmp_path)
    for name, attention in (("stopped", "lsh"), ("own", "lookup")):
        folder = Path("runs", name)
        (folder / "checkpoints").mkdir(parents=True)
        for step, value in ((100, 20.0), (200, 21.0), (300, 22.0)):
            (folder / f"checkpoints/best-{step:08d}-{value:.4f}.ckpt").touch()
        (folder / "perplexity.csv").write_text("step,seconds,perplexity\n300,119.7,22.0\n200,80,21.0\n100,119.7,20.0\n")
        model = {"class_path": "lit_linformer.tasks.MLM"}
        model["init_args"] = {"encoder": {"attention": attention, "projection_dim": 128}}
        (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {}, "data": {}, "best": {}, "last": {}, "model": model}))
    found = listed(capsys, "runs")
    assert found["runs/stopped"].startswith("20.00 perplexity") and " 2:00 " in found["runs/stopped"]
    assert found["runs/stopped"].endswith("MLM, lsh") and found["runs/own"].endswith("MLM, lookup, k = 128")


def test_the_best_of_another_metric_is_shown_in_four_digits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in (("small", 1.2e-5), ("large", 2.34567)):
        (folder := Path("runs", name)).mkdir(parents=True)
        (folder / "config.yaml").write_text("{trainer: {}, model: {}, data: {}, best: {monitor: val/mse}, last: {}}")
        (folder / "result.json").write_text(json.dumps({"step": 3, "best_step": 3, "best_metrics": {"val/mse": value}}))
    found = listed(capsys, "runs")
    assert found["runs/small"].startswith("1.2e-05 mse") and found["runs/large"].startswith("2.346 mse")


def test_no_run_yet_and_what_there_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["runs"])
    assert "none in runs; the first: python run.py fit --config conf/quickstart.yaml" in capsys.readouterr().out
    line = output(["list", "attention"], tmp_path, status=2)
    assert line == (
        "error: list attention; did you mean 'attentions'?; allowed: list, or list with one of "
        "attentions, projections, tasks, data, callbacks, configs, grids, spaces, runs\n"
    )


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_no_line_is_longer_than_it(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    child, terminal = pty.fork()
    if child == 0:
        try:
            sys.stdout = os.fdopen(1, "w")  # not pytest's
            with inside(ROOT):
                cli.main(["list"])
                cli.main(["list", "configs"])
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            os._exit(1)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines = shown.decode().splitlines()
    assert max(map(len, lines)) <= columns and any(line.startswith("  conf/quickstart.yaml") for line in lines)
