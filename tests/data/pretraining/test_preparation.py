"""Long preparations: killed at any shard they continue, and the files equal those of an uninterrupted one."""

import multiprocessing
import os
import signal

import pytest

from lit_linformer.data import pieces
from lit_linformer.data.cache import PROGRESS, make_once
from lit_linformer.data.pretraining import token_files as blocks
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.token_files import Holdout, make_token_files
from tests.data.conftest import make_documents
from tests.helpers import HANGS


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Batches of 2 kB, shards of 5 kB and pieces of 300 characters, so that shards also end within documents."""
    monkeypatch.setattr(blocks, "SHARD_BYTES", 5000)
    for name, value in {"BATCH_BYTES": 2000, "PIECE_CHARACTERS": 300}.items():
        monkeypatch.setattr(pieces, name, value)


@pytest.fixture
def corpora(text_file, tmp_path):
    validation = tmp_path / "validation.txt"
    validation.write_text("\n\n".join(make_documents(60, seed=1)), encoding="utf-8")
    return {"train": Corpus(str(text_file)), "validation": Corpus(str(validation))}


def make(cache, corpora, tokenizer):
    return make_token_files(cache, corpora, Holdout(0.0, 0.1), tokenizer)


def make_until_shard(cache, corpora, tokenizer, number, end):
    """Runs in a process of its own, which calls `end` after shard `number`; returns its exit status."""

    def process():
        finish, seen = blocks._finish_shard, []

        def finish_shard(*args):
            finish(*args)
            seen.append(1)
            if len(seen) == number:
                end()

        blocks._finish_shard = finish_shard
        make(cache, corpora, tokenizer)

    started = multiprocessing.get_context("fork").Process(target=process)
    started.start()
    started.join(HANGS)
    return started.exitcode


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_killed_again_and_again_it_goes_on_and_repeats_no_shard(corpora, tokenizer, tmp_path, capsys):
    expected = contents(make(tmp_path / "whole", corpora, tokenizer))
    read, kills = [], 0
    while make_until_shard(tmp_path / "killed", corpora, tokenizer, 2, kill) == -signal.SIGKILL:
        kills += 1
        (progress,) = (tmp_path / "killed").glob(f"*.tmp/{PROGRESS}")
        read.append(sum(blocks.read_progress(progress.parent)["read"].values()))
        assert read == sorted(set(read)), "it began anew"
        torn = progress.with_name("train.bin")
        torn.write_bytes(torn.read_bytes() + b"half a shard")
    assert kills >= 3 and read[-1] > 200  # in the validation source, after 200 documents
    assert contents(make(tmp_path / "killed", corpora, tokenizer)) == expected
    assert not list((tmp_path / "killed").glob("*.tmp"))


def test_an_error_keeps_what_is_done_and_a_damaged_rest_is_made_anew(corpora, tokenizer, tmp_path, capfd):
    expected = contents(make(tmp_path / "whole", corpora, tokenizer))

    def fail():
        raise ValueError("data.source: a line that is not UTF-8")

    assert make_until_shard(tmp_path / "failed", corpora, tokenizer, 2, fail) == 1
    (progress,) = (tmp_path / "failed").glob(f"*.tmp/{PROGRESS}")
    progress.with_name("train.bin").write_bytes(b"too short")
    capfd.readouterr()
    assert contents(make(tmp_path / "failed", corpora, tokenizer)) == expected
    assert "continuing after" not in capfd.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"read": 3, "counts": {}}', '{"read": {}, "counts": {"train": 1}}'])
def test_progress_that_is_not_ours_is_no_progress(corpora, tokenizer, tmp_path, content):
    expected = contents(make(tmp_path / "whole", corpora, tokenizer))
    make_until_shard(tmp_path / "killed", corpora, tokenizer, 2, kill)
    (progress,) = (tmp_path / "killed").glob(f"*.tmp/{PROGRESS}")
    progress.write_text(content)
    assert contents(make(tmp_path / "killed", corpora, tokenizer)) == expected


def test_unfinished_preparation_outlives_others_for_two_weeks(corpora, tokenizer, tmp_path):
    make_until_shard(tmp_path, corpora, tokenizer, 1, kill)
    (progress,) = tmp_path.glob(f"*.tmp/{PROGRESS}")
    make_once(tmp_path / "other", lambda folder: None)
    assert progress.exists()
    os.utime(progress, (0, 0))
    make_once(tmp_path / "another", lambda folder: None)
    assert not progress.parent.exists()
