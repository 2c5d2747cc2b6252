"""Where a run is: every command finds it next to its config.yaml, from any working directory and after it was moved."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.runs.place import given_run, own_folder, run_folder, seen_from
from lit_linformer.utils.configs import configs_first
from lit_linformer.utils.files import read_rows
from tests.helpers import in_one_process, inside


@pytest.fixture
def moved(pretrained, tmp_path, monkeypatch):
    """A trained run at another path, which contains a space, and an empty working directory."""
    folder = tmp_path / "my runs" / "a copy"
    shutil.copytree(pretrained, folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def test_every_command_that_takes_a_config_finds_the_run_beside_it(moved, tmp_path):
    config = ["--config", str(moved / "config.yaml")]
    lines = [
        ["predict", "--data.text", "a <mask>", *config],  # typed settings override the config, wherever --config is
        ["validate", *config],
        ["test", *config],
        ["fit", "--ckpt_path", "last", *config, "--trainer.max_steps", "9"],
        ["fit", *config, "--trainer.max_steps", "9"],
    ]
    *found, refused = in_one_process(lines, tmp_path / "logs")
    assert [status for status, _ in found] == [0] * 4, found
    assert refused[0] == 2 and f"{moved} already holds a run" in refused[1]
    assert not (tmp_path / "elsewhere/runs").exists()
    assert {"predictions.jsonl", "validate.json", "test.json"} <= {path.name for path in moved.iterdir()}
    assert json.loads((moved / "result.json").read_text())["step"] == 9
    assert [row["step"] for row in read_rows(moved / "perplexity.csv")][:3] == [0, 4, 8]
    assert f"--config '{moved}/config.yaml'" in found[-1][1]
    assert f"tensorboard --logdir '{moved.parent}'" in found[-1][1]


@pytest.mark.slow
def test_every_command_that_takes_a_folder_finds_it(moved, tmp_path):
    run = str(moved)
    lines = [
        ["export", "--ckpt_path", run, "--format", "safetensors", "--output", "out"],
        ["spectrum", "--run", run, "--num_sentences", "2"],
        ["report", "--source", run, "--output", "page"],
        ["draw", "--ckpt_path", run, "--text", "some words", "--output", "slots.png"],
        ["convert", "--from", run, "--max_length", "64", "--name", "longer"],
    ]
    found = in_one_process(lines, tmp_path / "logs")
    assert [status for status, _ in found] == [0] * 5, found
    shutil.move("runs/longer", "moved")  # its config.yaml names runs/longer as its start
    with inside(tmp_path):
        words = ["predict", "--config", "elsewhere/moved/config.yaml", "--data.text", "a <mask>"]
        assert in_one_process([words], tmp_path / "again")[0][0] == 0
    assert (Path("moved") / "predictions.jsonl").is_file()


def test_paths_of_a_run_are_found_where_it_began(moved, tmp_path):
    # A path typed as texts/a.txt next to runs/ is found there; a path that exists here is taken from here.
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").touch()
    run = tmp_path / "runs/group/one"
    settings = {"source": "texts/*.txt", "validation_source": "embedded", "tokenizer": "runs/gone/tokenizer.json", "file": None}
    seen_from(run, settings)
    assert settings["source"] == str(tmp_path / "texts/*.txt")
    assert settings["validation_source"] == "embedded" and settings["tokenizer"] == "runs/gone/tokenizer.json"
    shutil.copytree(tmp_path / "texts", tmp_path / "in [brackets]/texts [2]")
    shutil.copytree(tmp_path / "texts", tmp_path / "in [brackets]/texts")
    settings = {"source": "texts [2]/a.txt", "validation_source": "texts/*.txt"}
    seen_from(tmp_path / "in [brackets]/runs/one", settings)
    assert settings["source"] == str(tmp_path / "in [brackets]/texts [2]/a.txt")
    assert [path.name for path in Corpus(settings["validation_source"]).files()] == ["a.txt"]
    settings = {"source": "hub:texts", "validation_source": "hub:texts:test", "test_source": "hub:wikitext:test"}
    seen_from(run, settings)
    assert settings["source"] == f"hub:{tmp_path}/texts" and settings["validation_source"] == f"hub:{tmp_path}/texts:test"
    assert settings["test_source"] == "hub:wikitext:test"
    with inside(tmp_path):
        settings = {"source": "texts/a.txt"}
        seen_from(Path("runs/group/one"), settings)
        assert settings == {"source": "texts/a.txt"}


def test_a_name_or_a_folder_that_is_given_places_the_run_elsewhere(moved, tmp_path):
    config = str(moved / "config.yaml")
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"name": "other"}))
    assert given_run(["fit", "--config", config]) == given_run(["fit", f"--config={config}"]) == (moved, True)
    for more in (["--name", "b"], ["--name=b"], ["--trainer.default_root_dir", "x"], ["--config", str(overlay)]):
        assert given_run(["fit", "--config", config, *more]) == (moved, False)
    assert given_run(["fit", "--config", str(overlay), "--config", config]) == (moved, True)
    assert given_run(["fit", "--config", str(overlay)]) == (None, False)
    assert own_folder(overlay) is None and own_folder("config.yaml") is None
    assert run_folder("a/b") == Path("runs/a/b") and run_folder("a", "/x") == Path("/x")


def test_configs_come_first():
    words = ["fit", "--name", "a", "--config=x.yaml", "--model.lr", "1", "-c", "y.yaml"]
    assert configs_first(words) == ["fit", "--config", "x.yaml", "-c", "y.yaml", "--name", "a", "--model.lr", "1"]
