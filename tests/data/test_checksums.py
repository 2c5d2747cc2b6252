"""Checksums: a changed byte is reported, with its file and shard; intact files are read once on each machine."""

import json
import os
import shutil

import numpy as np
import pytest

from lit_linformer.data import checksums
from lit_linformer.data.cache import make_once, write_progress
from lit_linformer.data.checksums import ShardWriter, verify
from lit_linformer.data.finetuning.encoded_texts import encoded_files
from lit_linformer.data.finetuning.labelled_rows import LabelledSource
from lit_linformer.data.finetuning.text_tasks import own_task
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.token_files import Holdout, TokenBlocks, make_token_files
from lit_linformer.data.row_files import FILES
from tests.data.finetuning.test_labelled_rows import write_json
from tests.helpers import disk_calls, output


@pytest.fixture
def folder(tmp_path, text_file, tokenizer, monkeypatch):
    """Token files in shards of 3 kB of text, not yet checked on any machine."""
    monkeypatch.setenv("LIT_LINFORMER_CACHE", str(tmp_path / "home"))
    for name, value in {"pretraining.token_files.SHARD_BYTES": 3000, "pieces.BATCH_BYTES": 1000}.items():
        monkeypatch.setattr(f"lit_linformer.data.{name}", value)
    corpora = {"train": Corpus(str(text_file))}
    folder = make_token_files(tmp_path / "cache", corpora, Holdout(0.1, 0.1), tokenizer, progress=False)
    shutil.rmtree(tmp_path / "home")
    return folder


def test_shards_are_on_the_disk_before_they_are_called_complete(tmp_path, monkeypatch):
    calls = disk_calls(monkeypatch)

    def make(temporary):
        tokens = ShardWriter(temporary / "train.bin")
        for _ in range(2):
            tokens.write(np.arange(9))
            tokens.end_shard()
            write_progress(temporary, {"shards": tokens.shards})
        tokens.close()

    make_once(tmp_path / "entry", make)
    shard = ["sync train.bin", "sync progress.json.new", "rename progress.json"]
    assert calls[:6] == shard * 2
    assert {*calls[6:-3]} == {"sync train.bin", "sync progress.json"}
    assert calls[-3:] == ["sync entry.tmp", "rename entry", f"sync {tmp_path.name}"]


@pytest.fixture
def read(monkeypatch):
    """Names of the files whose checksums are computed."""
    seen = []
    checksum = checksums._checksum
    monkeypatch.setattr(checksums, "_checksum", lambda path, *args: seen.append(path.name) or checksum(path, *args))
    return seen


def check(folder, when="once", splits=("train", "validation", "test")):
    verify(folder, [f"{split}.bin" for split in splits], when)


def change(path, start, new):
    """Keeps the size and the modification time."""
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(new)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_every_shard_has_its_checksum(folder):
    meta = json.loads((folder / "meta.json").read_text())
    shards = meta["checksums"]
    assert len(shards["train.bin"]) > 5
    for name, parts in shards.items():
        assert sum(size for size, _ in parts) == (folder / name).stat().st_size


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_one_bit_is_told_with_its_file_and_shard(folder, tokenizer, split):
    path = folder / f"{split}.bin"
    shards = json.loads((folder / "meta.json").read_text())["checksums"][path.name]
    start = sum(size for size, _ in shards[:-1])
    with open(path, "rb") as file:
        file.seek(start)
        flipped = bytes([file.read(1)[0] ^ 1])
    change(path, start, flipped)
    number = f"shard {len(shards)} of {len(shards)}, bytes {start:,} to {path.stat().st_size:,}"
    message = rf"{path.name} is damaged: {number}, is not what was written; delete the folder .*{folder.name}, it will be made"
    with pytest.raises(ValueError, match=message):
        check(folder)
    with pytest.raises(ValueError, match=path.name):  # and again
        check(folder)
    check(folder, splits={"train", "validation", "test"} - {split})
    check(folder, when="never")


def test_zeros_and_a_wrong_length_are_told(folder, tokenizer):
    path = folder / "train.bin"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match=r"train.bin is damaged: shard 1 of \d+, bytes 0 to "):
        check(folder)
    path.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train.bin is damaged: it has [\d,]+ bytes of [\d,]+; delete"):
        check(folder)


def test_a_machine_checks_a_file_once_unless_it_was_touched(folder, tokenizer, read):
    check(folder)
    assert set(read) == {"train.bin", "validation.bin", "test.bin"}
    read.clear()
    check(folder)
    assert not read
    check(folder, when="always", splits=["test"])
    assert set(read) == {"test.bin"}
    read.clear()
    os.utime(folder / "validation.bin", ns=(1, 1))
    check(folder)
    assert set(read) == {"validation.bin"}
    read.clear()
    copy = shutil.copytree(folder, folder.with_name("copied") / folder.name)  # same times, other inodes
    check(copy, splits=["train"])
    assert set(read) == {"train.bin"}


def test_damage_that_was_found_once_is_found_by_the_next_start(folder, tokenizer):
    check(folder)
    change(folder / "train.bin", 0, b"??")  # as a faulty disk does: size and time stay the same
    check(folder)
    for when in ("always", "once"):
        with pytest.raises(ValueError, match=r"train.bin is damaged: shard 1 of "):
            check(folder, when)


def test_another_machine_checks_for_itself(folder, tokenizer, read, monkeypatch):
    check(folder)
    read.clear()
    monkeypatch.setattr("platform.node", lambda: "other/machine")
    check(folder)
    assert read


def test_what_was_just_made_needs_no_check(tmp_path, text_file, tokenizer, read, monkeypatch):
    monkeypatch.setenv("LIT_LINFORMER_CACHE", str(tmp_path / "home"))
    corpora = {"train": Corpus(str(text_file))}
    folder = make_token_files(tmp_path / "cache", corpora, Holdout(0.1, 0.1), tokenizer, progress=False)
    check(folder)
    assert not read


@pytest.mark.parametrize("record", ["{", "[]", '{"train.bin": 3}', "file"])
def test_a_record_that_is_unreadable_or_cannot_be_written_means_that_files_are_checked(
    folder, tokenizer, read, record, tmp_path
):
    if record == "file":
        (tmp_path / "home").write_text("not a folder")
    else:
        check(folder)
        (path,) = (tmp_path / "home").rglob("*.json")
        path.write_text(record)
        read.clear()
    check(folder)
    assert "train.bin" in read


def test_files_of_a_version_without_checksums_are_read_unchecked(folder, tokenizer, read, capsys):
    meta = json.loads((folder / "meta.json").read_text())
    del meta["checksums"], meta["fingerprint"]
    (folder / "meta.json").write_text(json.dumps(meta))
    check(folder, when="always")
    assert not read
    assert f"note: {folder} was made before there were checksums, and is not checked; delete it" in capsys.readouterr().err
    assert len(TokenBlocks(folder, "train", 32, tokenizer.bos_id, tokenizer.pad_id).full_rows(3)) == 3


@pytest.mark.parametrize("name", FILES)
def test_labelled_rows_are_checked_too(tmp_path, tokenizer, documents, name):
    write_json(tmp_path / "source/train.jsonl", [{"text": text, "label": i % 2} for i, text in enumerate(documents)])
    source = LabelledSource(str(tmp_path / "source"), own_task(["text"], labels=["a", "b"]))
    folder = encoded_files(tmp_path / "cache", source, "train", tokenizer)
    verify(folder, FILES, "always")
    change(folder / name, 8, bytes([(folder / name).read_bytes()[8] ^ 128]))
    with pytest.raises(ValueError, match=rf"{name} is damaged: shard 1 of 1, bytes 0 to [\d,]+, is not what was written"):
        verify(folder, FILES, "always")


def test_shards_go_on_where_they_were(tmp_path):
    path, data = tmp_path / "file", np.arange(1000, dtype=np.uint16)
    whole = ShardWriter(path)
    for part in (data[:300], data[300:300], data[300:]):
        whole.write(part)
        whole.end_shard()
    whole.close()
    assert [size for size, _ in whole.shards] == [600, 1400] and path.read_bytes() == data.tobytes()
    with open(path, "ab") as file:
        file.write(b"half a shard")
    again = ShardWriter(path, whole.shards[:1])
    again.write(data[300:])
    again.end_shard()
    again.close()
    assert again.shards == whole.shards and path.read_bytes() == data.tobytes()


@pytest.mark.slow
def test_fit_tells_damage_in_one_line(tiny, tmp_path, corpus):
    cache = tmp_path / "own"
    tiny = [*tiny, "--data.cache_dir", str(cache)]
    output(["prepare", *tiny], tmp_path)
    (train,) = cache.glob("tokens-*/train.bin")
    train.write_bytes(bytes(train.stat().st_size))
    said = output(["fit", *tiny], tmp_path, status=2).strip().splitlines()
    assert said[-1].startswith(f"error: {train} is damaged: shard 1 of 1, bytes 0 to ") and "Traceback" not in said
    shutil.rmtree(train.parent)
    output(["prepare", *tiny, "--data.verify", "always"], tmp_path)
    assert "data.verify is 'now'; allowed: once, always, never" in output(
        ["prepare", *tiny, "--data.verify", "now"], tmp_path, status=2
    )
