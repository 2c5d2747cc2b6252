"""Token files and blocks: no token lost or repeated; made once, whole or not at all."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from lit_linformer.data.cache import fingerprint, make_once, read_meta
from lit_linformer.data.pieces import pieces_of
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.pretraining.token_files import Holdout, TokenBlocks, make_token_files
from lit_linformer.data.tokenizer import train_tokenizer
from tests.data.conftest import make_documents
from tests.helpers import HANGS


def stream_of(blocks: TokenBlocks) -> list[int]:
    """The tokens of all rows, without bos and padding."""
    rows = blocks.rows(range(len(blocks)))
    assert (rows[:, 0] == blocks.bos_id).all()
    return rows[:, 1:].reshape(-1)[: blocks.tokens].tolist()


def make(cache, corpus, tokenizer, holdout=None):
    return make_token_files(cache, {"train": corpus}, holdout or Holdout(0, 0), tokenizer, progress=False)


@pytest.mark.parametrize("seed, length", [(0, 8), (1, 13), (2, 64), (3, 129), (4, 1000)])
def test_blocks_hold_every_token_once_in_order(tmp_path, tokenizer, monkeypatch, seed, length):
    monkeypatch.setattr("lit_linformer.data.pieces.BATCH_BYTES", 700)  # many batches in flight
    documents = make_documents(150, seed)
    (tmp_path / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    holdout = Holdout(0.1, 0.2)
    folder = make(tmp_path / "cache", Corpus(str(tmp_path / "text.txt")), tokenizer, holdout)
    expected = {"train": [], "validation": [], "test": []}
    for i, document in enumerate(documents):
        expected[holdout.split(i)] += [*tokenizer.encode(document), tokenizer.eos_id]
    counts = read_meta(folder)["splits"]
    for split, tokens in expected.items():
        blocks = TokenBlocks(folder, split, length, tokenizer.bos_id, tokenizer.pad_id)
        assert stream_of(blocks) == tokens
        documents_here = [d for i, d in enumerate(documents) if holdout.split(i) == split]
        longest = max(len(tokenizer.encode(d)) for d in documents_here) + 1
        assert blocks.longest_document(tokenizer.eos_id) == longest
        assert blocks.longest_document(tokenizer.eos_id, 5) == 5  # only the beginning of a document
        assert len(blocks) == -(-len(tokens) // (length - 1)) and blocks.full == len(tokens) // (length - 1)
        assert (blocks.rows(range(len(blocks)))[:, 1:].reshape(-1)[len(tokens) :] == tokenizer.pad_id).all()
        assert counts[split]["documents"] == sum(holdout.split(i) == split for i in range(150))
        if blocks.full >= 3:  # rows spread evenly
            assert (blocks.full_rows(3) == blocks.rows([0, round((blocks.full - 1) / 2), blocks.full - 1])).all()
    assert sum(count["bytes"] for count in counts.values()) == sum(len(d.encode()) for d in documents)


def test_padding_is_a_matter_of_place(tmp_path, tokenizer, text_file):
    """A token of the text may have the id of pad: files from before names of special tokens were text."""
    blocks = TokenBlocks(make(tmp_path, Corpus(str(text_file)), tokenizer), "train", 64, tokenizer.bos_id, tokenizer.pad_id)
    last = len(blocks) - 1
    expected = blocks[[(0, 3), (0, last)]]["attention_mask"]
    assert expected.sum(1).tolist() == [64, 1 + blocks.tokens - last * 63] and "attention_mask" not in blocks[[(0, 3)]]
    blocks.pad_id = int(blocks.stream[3 * 63 + 20])
    assert torch.equal(blocks[[(0, 3), (0, last)]]["attention_mask"], expected) and "attention_mask" not in blocks[[(0, 3)]]


def test_held_out_documents_are_about_the_share_and_the_same_ever_after():
    splits = [Holdout(0.05, 0.1).split(i) for i in range(20_000)]
    assert splits.count("validation") == pytest.approx(1000, abs=5 * 31)  # five standard deviations
    assert splits.count("test") == pytest.approx(2000, abs=5 * 43)
    assert [i for i in range(150) if splits[i] == "validation"][:4] == [
        i for i in range(150) if Holdout(0.05, 0).split(i) == "validation"
    ][:4]  # the test share does not change the validation text


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_overlong_documents_are_cut_only_where_tokens_stay_the_same(tmp_path, documents, monkeypatch, kind):
    monkeypatch.setattr("lit_linformer.data.pieces.PIECE_CHARACTERS", 1)  # cut wherever it is allowed
    runs = [f"the{run}of" for run in ("\n\n", "\n \n ", " \n\n\n", "\n\t\n  ", "\r\n\r\n ")] * 500
    tokenizer = train_tokenizer(kind, [*documents, *runs], 500)  # so runs of white space are tokens
    assert tokenizer.splits_at_newlines
    text = "\n".join(documents + runs) + "\nnext \nspace\n  indented\n\nblank\r\nwindows\n's apostrophe\n\ttab\nend."
    pieces = [piece for piece, _ in pieces_of(text, safe=True)]
    assert len(pieces) > 1000 and "".join(pieces) == text
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}))
    folder = make(tmp_path, Corpus(str(tmp_path / "rows.jsonl")), tokenizer)
    blocks = TokenBlocks(folder, "train", 64, tokenizer.bos_id, tokenizer.pad_id)
    assert stream_of(blocks) == [*tokenizer.encode(text), tokenizer.eos_id]
    assert read_meta(folder)["splits"]["train"]["documents"] == 1


def test_large_vocabularies_take_four_bytes(tmp_path, tokenizer, text_file):
    small = make(tmp_path, Corpus(str(text_file)), tokenizer)
    large = train_tokenizer("bpe", make_documents(50), 400)
    large.backend.add_tokens([f"extra{i}" for i in range(70_000)])
    large = type(large)(large.backend, "large")
    assert len(large) > 1 << 16
    folder = make(tmp_path, Corpus(str(text_file)), large)
    assert (read_meta(small)["dtype"], read_meta(folder)["dtype"]) == ("uint16", "uint32")
    blocks = TokenBlocks(folder, "train", 32, large.bos_id, large.pad_id)
    assert len(stream_of(blocks)) == blocks.tokens == (folder / "train.bin").stat().st_size // 4


def test_fingerprint_changes_with_all_that_shapes_the_tokens_and_only_with_it(tmp_path, tokenizer, documents):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents[:20]), encoding="utf-8")
    os.utime(path, ns=(1, 1))

    def name(holdout=(0, 0), tokenizer=tokenizer, cache="cache", **corpus):
        return make(tmp_path / cache, Corpus(str(path), **corpus), tokenizer, Holdout(*holdout)).name

    same = {name(), name(), name(cache="elsewhere"), name(setting="data.other")}
    assert len(same) == 1
    others = [name(holdout=(0.1, 0)), name(holdout=(0, 0.1)), name(document_start="the"), name(column="body")]
    others.append(name(tokenizer=train_tokenizer("bpe", documents, 400)))
    os.utime(path, ns=(1, 2))
    others.append(name())
    path.write_text("\n\n".join(documents[:21]), encoding="utf-8")
    os.utime(path, ns=(1, 2))
    others.append(name())
    assert len({*others, *same}) == 1 + len(others)


def test_text_that_changes_while_it_is_read_is_not_kept(tmp_path, tokenizer, documents, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")

    class Growing(Corpus):
        def __iter__(self):
            yield from super().__iter__()
            path.write_text("more", encoding="utf-8")

    with pytest.raises(ValueError, match=r"^data.source: .*text.txt has changed while it was read; allowed: files that stay"):
        make(tmp_path / "cache", Growing(str(path)), tokenizer)
    assert not list((tmp_path / "cache").rglob("meta.json"))


def test_second_start_builds_nothing(tmp_path, tokenizer, text_file):
    folder = make(tmp_path, Corpus(str(text_file)), tokenizer)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.iterdir()]}
    assert make(tmp_path, Corpus(str(text_file)), tokenizer) == folder
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.iterdir()]} == before
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_file_is_not_read(tmp_path, tokenizer, text_file):
    folder = make(tmp_path, Corpus(str(text_file)), tokenizer)
    with open(folder / "train.bin", "ab") as file:
        file.truncate(10)
    with pytest.raises(ValueError, match=r"train.bin is damaged: it has 10 bytes of [\d,]+; delete the folder .*tokens-"):
        TokenBlocks(folder, "train", 16, 0, 1)


def test_pickled_blocks_are_small_and_read_on(tmp_path, tokenizer, text_file):
    import pickle

    blocks = TokenBlocks(make(tmp_path, Corpus(str(text_file)), tokenizer), "train", 16, 0, 1)
    rows = blocks.rows([3, 1])
    copy = pickle.loads(pickle.dumps(blocks))
    assert len(pickle.dumps(blocks)) < 1000 < blocks.tokens
    assert np.array_equal(copy.rows([3, 1]), rows)


@pytest.mark.parametrize("content", ["", '{"format": 1, "dtype": "uint', "\0" * 100, None])
def test_half_a_meta_json_is_one_line(tmp_path, tokenizer, text_file, content):
    folder = make(tmp_path, Corpus(str(text_file)), tokenizer)
    (folder / "meta.json").unlink()
    if content is not None:
        (folder / "meta.json").write_text(content)
    what = "it is not there" if content is None else "it is no JSON"
    with pytest.raises(
        ValueError, match=rf"meta.json is damaged: {what}; delete the folder .*tokens-.*, it will be made again$"
    ):
        TokenBlocks(folder, "train", 16, 0, 1)


@pytest.mark.parametrize("key", ["documents", "checksums", "dtype"])
def test_a_flipped_digit_or_key_of_meta_json_is_one_line(tmp_path, tokenizer, text_file, key):
    path = make(tmp_path, Corpus(str(text_file)), tokenizer) / "meta.json"
    place = path.read_text().index(f'"{key}":') + (len('"documents": ') if key == "documents" else 1)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"meta.json is damaged: it is not what was written; delete the folder .*tokens-"):
        TokenBlocks(path.parent, "train", 16, 0, 1)


# Several processes, killed processes, full disks: in processes of their own.

MAKER = """
import sys, time
from pathlib import Path
from lit_linformer.data.cache import make_once

def make(folder):
    print("making", flush=True)
    for part in range(int(sys.argv[2])):
        (folder / f"part{part}").write_bytes(b"x" * 100_000)
        time.sleep(0.02)

print(make_once(Path(sys.argv[1]), make), flush=True)
"""


def maker(folder, parts, **settings):
    command = [sys.executable, "-c", MAKER, str(folder), str(parts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def test_four_processes_at_once_make_it_once(tmp_path):
    folder = tmp_path / "cache" / "thing-1"
    outputs = [process.communicate(timeout=HANGS)[0] for process in [maker(folder, 20) for _ in range(4)]]
    assert sorted(outputs) == [f"{folder}\n"] * 3 + [f"making\n{folder}\n"]
    assert len(list(folder.iterdir())) == 20
    assert {path.name for path in folder.parent.iterdir()} <= {"thing-1", "thing-1.lock"}


def test_killed_maker_leaves_nothing_that_is_taken_for_finished(tmp_path):
    folder = tmp_path / f"thing-{fingerprint(1)}"
    process = maker(folder, 10_000)
    assert process.stdout.readline() == "making\n"
    temporary = folder.with_suffix(".tmp")
    while not (temporary / "part3").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=HANGS)
    assert temporary.exists() and not folder.exists()

    make_once(tmp_path / "thing-2", lambda made: (made / "file").write_text("2"))  # making another thing cleans up
    assert not temporary.exists() and not folder.exists()
    make_once(folder, lambda made: (made / "file").write_text("1"))
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_maker_killed_right_after_the_rename_leaves_nothing_beside_its_files(tmp_path):
    (tmp_path / "thing-1").mkdir()
    for name in ("file", "progress.json"):
        (tmp_path / "thing-1" / name).write_text("{}")
    make_once(tmp_path / "thing-1", lambda made: pytest.fail("it is there"))
    assert [path.name for path in (tmp_path / "thing-1").iterdir()] == ["file"]


def test_what_another_process_is_making_is_not_swept_up(tmp_path):
    process = maker(tmp_path / "thing-1", 40)
    assert process.stdout.readline() == "making\n"
    make_once(tmp_path / "thing-2", lambda made: (made / "file").write_text("2"))
    assert process.communicate(timeout=HANGS)[0] == f"{tmp_path}/thing-1\n"
    assert len(list((tmp_path / "thing-1").iterdir())) == 40


def test_failing_maker_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").write_text("half")
        raise ValueError("data.source: broken")

    with pytest.raises(ValueError, match=r"^data.source: broken$"):
        make_once(tmp_path / "thing-1", fail)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["thing-1.lock"])


def test_a_link_in_the_cache_is_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("precious")
    (mine / "progress.json").write_text("{}")
    cache = tmp_path / "cache"
    cache.mkdir()
    names = [f"thing-{fingerprint(number)}" for number in range(3)]
    for name in names[:2]:
        (cache / f"{name}.tmp").symlink_to(mine)
    (cache / f"{names[2]}.tmp").write_text("a file")
    (cache / "notes.tmp").write_text("nothing of the cache's")
    made = make_once(cache / names[0], lambda folder: (folder / "file").write_text("1"))
    assert [path.name for path in made.iterdir()] == ["file"] and not made.is_symlink()
    assert [path.name for path in cache.glob("*.tmp")] == ["notes.tmp"]  # removed, not followed
    assert sorted(path.name for path in mine.iterdir()) == ["precious", "progress.json"]


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_no_room_for_the_files_is_one_line_and_leaves_nothing(tmp_path, tokenizer, documents):
    """With a limit on file size the write fails in the writing thread, as on a full disk."""
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("\n\n".join(make_documents(1000)), encoding="utf-8")
    program = """
import sys
from pathlib import Path
from lit_linformer.data.pretraining.token_files import Holdout, make_token_files
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.tokenizer import load_tokenizer
make_token_files(Path("cache"), {"train": Corpus("text.txt")}, Holdout(0, 0), load_tokenizer("."), progress=False)
"""
    settings = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": os.getcwd()}, "preexec_fn": limit_file_size}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **settings)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "Error: data.cache_dir is 'cache', where tokens-" in last
    assert "cannot be written (File too large); allowed" in last
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "half").write_text("half")
        with open("/dev/full", "wb") as file:
            file.write(b"x" * 100_000)

    with pytest.raises(ValueError, match=r"^data.cache_dir is '.*', where thing-1 .* \(No space left on device\); allowed"):
        make_once(tmp_path / "thing-1", fill)
    assert not list(tmp_path.glob("thing-1.tmp")) and not (tmp_path / "thing-1").exists()


def test_a_source_that_vanishes_is_not_the_caches_fault(tmp_path, tokenizer, documents):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")

    class Vanishing(Corpus):
        def __iter__(self):
            read = super().__iter__()
            yield next(read)
            path.unlink()
            yield from read

    with pytest.raises(FileNotFoundError) as caught:
        make(tmp_path / "cache", Vanishing(str(path)), tokenizer)
    assert caught.value.filename == str(path)
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())


def test_cache_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^data.cache_dir is '.*file', where thing-1 cannot be written \("):
        make_once(tmp_path / "file" / "thing-1", lambda folder: None)
