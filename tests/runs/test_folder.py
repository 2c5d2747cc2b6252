"""Run folders: only runs are overwritten, only their own files deleted, and a start that is refused leaves nothing."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lit_linformer.runs.folder import Claim, check_name, foreign_files, is_run, own_files, write_marker
from tests.cli.test_errors import complaint
from tests.helpers import output, run_forked, small_disk
from tests.test_conf import ROOT

CONFIG = {"trainer": {}, "model": {}, "data": {}, "best": {}, "last": {}}


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("name", ["a", "quickstart", "table2/linformer-128", "lr=1e-3,k=4", "v1.0_x", "Übung"])
def test_names(name):
    assert check_name(name) == name


BAD = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "/tmp/x",
    "a/",
    "/",
    "a//b",
    "a/.",
    "~",
    "-x",
    "a b",
    "a\n",
    "a\0b",
    ".hidden",
    "a/..",
    None,
]


@pytest.mark.parametrize("name", BAD)
def test_names_that_lead_elsewhere(name):
    with pytest.raises(ValueError, match=r"^name is .*; allowed: letters, digits"):
        check_name(name)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../..", "/tmp/x"])
def test_no_command_takes_such_a_name(name, tiny, tmp_path):
    before = files(tmp_path)
    for command in (["fit", *tiny, "--overwrite", "true"], ["convert", "--from", "x"], ["grid", "--config", "grid.yaml"]):
        (tmp_path / "grid.yaml").write_text(
            "axes: {k: {4: --model.lr 1}, seed: {1: --seed_everything 1}}\n"
            "table: {rows: k, columns: seed, value: val/perplexity}\n"
        )
        assert f"name is '{name}'; allowed: letters, digits" in complaint([*command, f"--name={name}"], tmp_path)
    assert files(tmp_path) - before <= {"complaint.txt", "grid.yaml"} and not (tmp_path / "runs").exists()


def test_what_a_run_is(tmp_path):
    assert not is_run(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {}, "data": {}}))  # from another project
    assert not is_run(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))  # as it was before the marker existed
    assert is_run(tmp_path)
    (tmp_path / "config.yaml").unlink()
    write_marker(tmp_path)
    assert is_run(tmp_path)
    (tmp_path / "run.json").write_text('{"project": "another"}')
    assert not is_run(tmp_path)


def test_a_converted_model_of_before_the_marker_is_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {}, "model": {}, "data": {}}))
    assert not is_run(tmp_path)
    make(tmp_path, "conversion.json")
    assert is_run(tmp_path)


OWN = (
    "config.yaml", "tokenizer.json", "tokenizer.json.12.tmp", "perplexity.csv", "result.json", "events.out.tfevents.1.host.2",
    "by_tokens/events.out.tfevents.3", "submission/SST-2.tsv", "checkpoints/last.ckpt", "checkpoints/new.ckpt.tmp",
    "checkpoints/best-00000007-1.0000.ckpt", "checkpoints/previous.ckpt/meta.pt", "checkpoints/previous.ckpt/__0_0.distcp",
    "checkpoints/epoch=0-step=8-v1.ckpt",
)  # fmt: skip
FOREIGN = ("notes.txt", "checkpoints/pytorch_model.bin", "checkpoints/previous.ckpt/mine.txt", "sub/config.yaml", "by_tokens/x")


def test_what_callbacks_write_is_a_runs_own(tmp_path):
    """Takes the names from the callbacks' code: a file missing from OURS would stay in an overwritten run."""
    code = "".join(path.read_text() for path in (Path(__file__).parents[2] / "lit_linformer/callbacks").glob("*.py"))
    names = set(re.findall(r'"(\w+\.(?:csv|jsonl?|png))"', code))
    names |= {f"validate_{name}" for name in re.findall(r'self\.file\(trainer, "(\S+)"\)', code)}
    assert {"copy_slices.csv", "validate_copy_slices.csv", "validate_spectrum.json", "predictions.jsonl"} <= names
    make(tmp_path, *names)
    write_marker(tmp_path)
    assert not list(foreign_files(tmp_path))


def test_overwriting_deletes_what_a_run_wrote_and_nothing_else(tmp_path):
    folder = make(tmp_path / "run", *OWN, *FOREIGN)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    outside = make(tmp_path / "outside", "last.ckpt", "meta.pt")
    (folder / "checkpoints/last.ckpt").unlink()
    (folder / "checkpoints/last.ckpt").symlink_to(outside)
    assert {str(path.relative_to(folder)) for path in foreign_files(folder)} == {
        "notes.txt", "checkpoints/pytorch_model.bin", "sub", "by_tokens/x"
    }  # fmt: skip
    claim = Claim(folder)
    claim.start_anew(overwrite=True, goes_on=False)
    assert (
        set(OWN) - {"checkpoints/last.ckpt"} < files(folder) and (folder / "checkpoints/last.ckpt").is_symlink()
    )  # until training begins
    claim.begin()
    claim.release()
    assert files(folder) == {"run.json", *FOREIGN} and files(outside) == {"last.ckpt", "meta.pt"}


def test_killed_while_it_overwrites_a_folder_still_is_a_run(tmp_path, monkeypatch):
    folder = make(tmp_path / "run", *OWN)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    claim = Claim(folder)
    claim.start_anew(overwrite=True, goes_on=False)
    removed = []

    def kill_at_the_third(path):
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(path)
        path.unlink()

    monkeypatch.setattr("lit_linformer.runs.folder.remove", kill_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        claim.begin()
    claim.lock.release()
    assert is_run(folder) and folder / "config.yaml" in removed


@pytest.mark.parametrize("name", ["checkpoints/last.ckpt", "config.yaml", "tokenizer.json", "result.json"])
def test_a_folder_that_is_no_run_is_left_alone(name, tmp_path):
    folder = make(tmp_path / "run", name, "notes.txt")
    for overwrite in (False, True):
        claim = Claim(folder)
        with pytest.raises(ValueError, match=rf"^name: .*run holds {name}, but no run of this project; allowed: another"):
            claim.start_anew(overwrite, goes_on=True)
        claim.release()
    assert files(folder) == {name, "notes.txt"}


def test_a_start_that_is_refused_leaves_no_trace(tmp_path):
    claim = Claim(tmp_path / "runs/table/cell")
    claim.start_anew(False, False)
    make(claim.folder, "events.out.tfevents.1", "by_tokens/events.out.tfevents.1")
    claim.release()
    assert not (tmp_path / "runs").exists()

    folder = make(tmp_path / "run", "events.out.tfevents.0", "checkpoints/last.ckpt", "notes.txt")
    write_marker(folder)
    before = files(folder)
    claim = Claim(folder)
    claim.start_anew(True, False)
    make(folder, "events.out.tfevents.1", "config.yaml")
    claim.release()
    assert files(folder) == before


def test_a_start_that_is_refused_leaves_what_an_evaluation_wrote_meanwhile(tmp_path):
    folder = make(tmp_path / "run", "checkpoints/last.ckpt")
    write_marker(folder)
    claim = Claim(folder)
    evaluated = ("validate.json", "test.json.17.tmp", "predictions.jsonl", "validate_spectrum.json", "submission/SST-2.tsv")
    make(folder, *evaluated, "events.out.tfevents.1")
    claim.release()
    assert files(folder) == {"run.json", "checkpoints/last.ckpt", *evaluated}


def test_what_a_killed_start_left_half_written_stops_no_other_and_goes(tmp_path):
    # Killed before the marker was in place; then during training.
    run = make(tmp_path / "run", "run.json.17.tmp", "events.out.tfevents.1.host.17.0")
    claim = Claim(run)
    claim.start_anew(overwrite=False, goes_on=True)
    claim.begin()
    claim.release()
    assert files(run) == {"run.json"}
    make(run, "perplexity.csv", "perplexity.csv.18.tmp", "checkpoints/last.ckpt", "mine.tmp")
    claim = Claim(run)
    claim.begin()
    claim.release()
    assert files(run) == {"run.json", "perplexity.csv", "checkpoints/last.ckpt", "mine.tmp"}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^name: cannot write into .*file/run \(Not a directory\); allowed: "):
        Claim(tmp_path / "file" / "run")
    assert files(tmp_path) == {"file"}


def test_own_files_of_nothing(tmp_path):
    assert list(own_files(tmp_path / "nowhere")) == []


# Whole runs


@pytest.mark.slow
def test_overwrite_and_refusals_of_fit(tiny, tmp_path):
    short = ["fit", *tiny, "--trainer.max_steps", "2", "--trainer.num_sanity_val_steps", "0"]
    other = make(tmp_path / "runs/other", "checkpoints/model.ckpt", "config.yaml")
    assert run_forked(short) == 0
    folder = tmp_path / "runs/tiny"
    make(folder, "notes.txt")
    events = {path.name for path in folder.glob("events.*")}
    before = files(folder)

    # Typos in other settings: the run to be overwritten is unchanged, and there is nothing new.
    for wrong in (["--model.encoder.hidden_size", "17"], ["--data.source", "nowhere.txt"], ["--data.max_length", "4096"]):
        complaint([*short, "--overwrite", "true", *wrong], tmp_path)
        assert files(folder) == before
    # Starting from the run to be overwritten.
    line = complaint([*short, "--overwrite", "true", "--model.pretrained", "runs/tiny"], tmp_path)
    assert "model.pretrained is runs/tiny, which --overwrite true would delete; allowed: another --name" in line
    assert "holds config.yaml, but no run of this project" in complaint(
        [*short, "--name", "other", "--overwrite", "true"], tmp_path
    )
    assert files(other) == {"checkpoints/model.ckpt", "config.yaml"} and files(folder) == before

    assert run_forked([*short, "--overwrite", "true"]) == 0
    assert "notes.txt" in files(folder) and not events & files(folder) and {".lock"}.isdisjoint(files(folder))
    # A new name whose start is refused leaves no folder, hence no empty run in TensorBoard.
    complaint([*short, "--name", "refused", "--data.max_length", "4096"], tmp_path)
    assert not (tmp_path / "runs/refused").exists()


@pytest.mark.slow
def test_a_run_of_548a2f2_goes_on_and_is_overwritten(put, tiny, tmp_path):
    """Such a run has no marker, and may have versions of a best checkpoint left behind by kills."""
    folder = put("tiny")
    (folder / "run.json").unlink()
    best = next((folder / "checkpoints").glob("best-*.ckpt"))
    (best.with_name(best.stem + "-v1.ckpt")).write_bytes(best.read_bytes())
    shown = output(["fit", *tiny, "--ckpt_path", "auto", "--trainer.max_steps", "13"], tmp_path)
    assert "resuming at step 12" in shown and (folder / "run.json").is_file()
    assert [path.name for path in (folder / "checkpoints").glob("best-*.ckpt")] == [best.name]
    (folder / "run.json").unlink()
    assert run_forked(["fit", *tiny, "--overwrite", "true", "--trainer.max_steps", "2"]) == 0
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


def read_only(folder: Path) -> None:
    """Open files stay writable, as when a network file system becomes read-only."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)


class BecomesReadOnly(Callback):
    """Makes runs/ read-only after two batches."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if pl_module.batches_seen == 2:
            read_only(Path(trainer.default_root_dir).parent)


@pytest.mark.slow
def test_a_read_only_folder_is_one_line(tiny, tmp_path):
    with small_disk(tmp_path / "runs", "8m") as runs:
        argv = ["fit", *tiny, "--trainer.callbacks+", "tests.runs.test_folder.BecomesReadOnly"]
        line = complaint(argv, tmp_path, os.EX_IOERR)
        assert "Read-only file system" in line and "runs/tiny" in line
        subprocess.run(["umount", "-l", str(runs)], check=True)
        assert run_forked(["fit", *tiny, "--ckpt_path", "auto"]) == 0
        read_only(runs)
        for extra in (["--ckpt_path", "last"], ["--overwrite", "true"], ["--name", "other"]):
            line = complaint(["fit", *tiny, *extra], tmp_path)
            assert re.search(r"name: cannot write into runs/(tiny|other) \(Read-only file system\); allowed: ", line)
        elsewhere = "allowed: a folder that is open to writing as --trainer.default_root_dir"
        line = complaint(["validate", *tiny], tmp_path)
        assert line.endswith(f"name: cannot write the results into runs/tiny; {elsewhere}, with --ckpt_path runs/tiny")
        predict = ["predict", "--model.pretrained", str(ROOT / "models/small"), "--data.text", "The <mask>."]
        assert complaint(predict, tmp_path).endswith(f"cannot write the results into runs/pretrained-small; {elsewhere}")
        assert run_forked(["validate", *tiny, "--trainer.default_root_dir", "other", "--ckpt_path", "runs/tiny"]) == 0
        subprocess.run(["umount", "-l", str(runs)], check=True)
