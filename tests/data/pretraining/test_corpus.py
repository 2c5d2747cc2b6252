"""Sources of text: every format gives the same documents, and errors are one line."""

import gzip
import itertools
import json
import lzma
import os

import pyarrow
import pyarrow.parquet
import pytest

from lit_linformer.data.pretraining.corpus import LONGEST_DOCUMENT, Corpus

DOCUMENTS = ["First paragraph.\nSecond, with naïve café.", "Another document.", "Third\none\nhere."]
TEXT = "\n\n".join(DOCUMENTS).encode()
JSON = "\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(DOCUMENTS)).encode() + b"\n"


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def halves(compress):
    """Two concatenated frames, as from `cat a.gz b.gz`."""
    return lambda data: compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


COMPRESSIONS = {"": bytes, ".gz": halves(gzip.compress), ".xz": halves(lzma.compress), ".zst": halves(zstd)}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("suffix", ["", ".txt", ".tokens", ".md", ".jsonl", ".ndjson", ".json"])
def test_every_format_gives_the_same_documents(tmp_path, suffix, compression):
    path = tmp_path / f"corpus{suffix}{compression}"
    path.write_bytes(COMPRESSIONS[compression](JSON if "js" in suffix else TEXT))
    corpus = Corpus(str(path))
    assert list(corpus) == DOCUMENTS
    assert list(corpus) == DOCUMENTS  # a second pass
    assert corpus.fraction == pytest.approx(1)


def test_parquet(tmp_path):
    table = pyarrow.table({"id": [1, 2, 3, 4], "body": [*DOCUMENTS, None]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    corpus = Corpus(str(tmp_path), column="body")
    assert list(corpus) == DOCUMENTS and corpus.fraction == pytest.approx(1)
    with pytest.raises(ValueError, match=r"data.column is 'text', which .*rows.parquet does not have; allowed: 'id', 'body'"):
        list(Corpus(str(tmp_path)))
    with pytest.raises(ValueError, match=r"data.column is 'id', which holds int in .*rows.parquet, row 1; allowed"):
        list(Corpus(str(tmp_path), column="id"))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(ValueError, match=r"rows.parquet is no Parquet file"):
        list(Corpus(str(tmp_path), column="body"))


def test_folder_is_read_recursively_and_sorted_and_glob(tmp_path):
    for name, text in {"b.txt": "two", "a/z.txt": "one", "c.pdf": "never", ".hidden.txt": "never"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(Corpus(str(tmp_path))) == ["one", "two"]
    assert list(Corpus(str(tmp_path / "*.txt"))) == ["two"]
    assert list(Corpus(str(tmp_path / "**/*.txt"))) == ["one", "two"]


def test_a_folder_that_a_folder_links_to_is_read_once(tmp_path):
    for name in ("texts/a.txt", "elsewhere/b.txt", "elsewhere/deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    for name, to in {"link": "../elsewhere", "again": "../elsewhere/deep", "loop": "."}.items():
        (tmp_path / "texts" / name).symlink_to(to)
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "texts")
    assert sorted(Corpus(str(tmp_path / "texts"))) == ["elsewhere/b.txt", "elsewhere/deep/c.txt", "texts/a.txt"]


def test_a_file_that_links_or_patterns_find_again_is_read_once(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b.txt").write_text("b")
    (tmp_path / "c.txt").symlink_to("deep/b.txt")
    (tmp_path / "again").symlink_to("deep")
    for pattern in ("", "**/*.txt", "**/**/*.txt"):
        assert list(Corpus(str(tmp_path / pattern))) == ["b"], pattern


def test_a_folder_says_which_files_are_read(tmp_path):
    for name in ("a.txt", "b/c.txt", "d.jsonl.gz", "README.md", "x.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * 100_000)
    told = Corpus(str(tmp_path)).files_read()
    assert told == (
        f"data.source {tmp_path}: 4 files (2 .txt, 1 .md, 1 .jsonl.gz), 0.4 MB; README.md among them, which a pattern may "
        f"leave out: data.source '{tmp_path}/**/*.txt'"
    )
    pattern = f"{tmp_path}/**/*.txt"
    assert Corpus(pattern).files_read() == f"data.source {pattern}: 2 files (2 .txt), 0.2 MB"
    assert Corpus(str(tmp_path / "a.txt")).files_read() is Corpus("embedded").files_read() is None


@pytest.mark.parametrize("suffix", [".md", ""])
def test_no_pattern_is_advised_that_would_leave_them_in(tmp_path, suffix):
    for name in ("a", "b", "README"):
        (tmp_path / f"{name}{suffix}").write_text("x" * 100_000)
    (tmp_path / "NOTICE.txt").write_text("x" * 100_000)
    kind = suffix or "without suffix"
    assert Corpus(str(tmp_path)).files_read() == f"data.source {tmp_path}: 4 files (3 {kind}, 1 .txt), 0.4 MB"


def test_wikitext_without_document_start_gets_a_hint(tmp_path, capsys):
    text = "".join(f" = Title {i} = \n \n = = Section = = \n \n Text = of it . \n \n" for i in range(4))
    (tmp_path / "wiki.tokens").write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text.splitlines(True)))
    for name in ("wiki.tokens", "rows.jsonl"):
        corpus = Corpus(str(tmp_path / name))
        assert len(list(corpus)) == len(list(corpus))
        (hint,) = capsys.readouterr().err.splitlines()
        assert "' = Title 2 =' look" in hint
        assert hint.endswith("with --data.document_start '^ = [^=]' each article is a document")
    assert len(list(Corpus(str(tmp_path), document_start="^ = [^=]"))) == 8
    assert capsys.readouterr().err == ""


def test_line_ends_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\nOne\r\ntwo\r\n \t\r\n\r\nThree\r\n")
    assert list(Corpus(str(path))) == ["One\ntwo", "Three"]


def test_document_start_joins_what_blank_lines_divide(tmp_path):
    path = tmp_path / "wiki.tokens"
    path.write_text(" \n = Title = \n \n Text of it . \n \n = = Section = = \n \n More . \n \n = Other = \n \n Last . \n")
    first, second = Corpus(str(path), document_start="^ = [^=]")
    assert first == " = Title = \n Text of it . \n = = Section = = \n More . "
    assert second == " = Other = \n Last . "


def test_document_start_on_rows(tmp_path):
    rows = ["= A", "text", "", "= B", "more"]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    assert list(Corpus(str(tmp_path), document_start="=")) == ["= A\ntext", "= B\nmore"]


def test_a_file_without_blank_lines_is_cut_so_that_memory_stays_flat(tmp_path):
    line = "x" * 999_999 + "\n"
    (tmp_path / "log.txt").write_text(line * 20)
    for start in (None, "title"):
        documents = list(Corpus(str(tmp_path), document_start=start))
        assert [len(d) for d in documents] == [16 * 1_000_000 - 1, 4 * 1_000_000 - 1]
        assert len(documents[0]) <= LONGEST_DOCUMENT


@pytest.mark.slow
def test_embedded_corpus_is_large_and_repeatable():
    corpus = Corpus("embedded")
    documents = list(corpus)
    assert sum(len(document.encode()) for document in documents) > 2_000_000
    assert len(documents) > 500
    assert len(set(documents)) == len(documents)
    assert any("context manager" in document for document in documents)
    assert documents[:100] == list(itertools.islice(corpus, 100))


@pytest.fixture
def hub_folder(tmp_path):
    """A data set in the hub's layout: a card that names configurations and their files."""
    root = tmp_path / "my-data"
    (root / "large").mkdir(parents=True)
    for split, texts in {"train": DOCUMENTS, "validation": ["Held out."]}.items():
        (root / "large" / f"{split}.jsonl").write_text("\n".join(json.dumps({"body": t, "n": 1}) for t in texts))
    files = "".join(f"  - split: {split}\n    path: large/{split}.jsonl\n" for split in ("train", "validation"))
    (root / "README.md").write_text(f"---\nconfigs:\n- config_name: large\n  data_files:\n{files}---\n")
    return root


def test_hub_layout(hub_folder, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    assert list(Corpus(f"hub:{hub_folder}:large:train", column="body")) == DOCUMENTS
    assert list(Corpus(f"hub:{hub_folder}:validation", column="body")) == ["Held out."]
    assert list(Corpus(f"hub:{hub_folder}:large:train[:1]", column="body")) == DOCUMENTS[:1]
    with pytest.raises(ValueError, match=r"data.column is 'text', which hub:.* does not have; allowed: 'body', 'n'"):
        list(Corpus(f"hub:{hub_folder}:large:train"))
    with pytest.raises(ValueError, match=r"^data.source is 'hub:.*small.*cannot be loaded .*large.*$"):
        list(Corpus(f"hub:{hub_folder}:small:train", column="body"))
    stamp = Corpus(f"hub:{hub_folder}:large:train").stamp()
    assert {name for name, _, _ in stamp["files"]} == {"README.md", "large/train.jsonl", "large/validation.jsonl"}


def test_hub_out_of_reach_is_one_line_with_a_remedy():
    with pytest.raises(ValueError) as caught:
        list(Corpus("hub:nobody/nothing:train"))
    assert str(caught.value).startswith("data.source is 'hub:nobody/nothing:train', which cannot be loaded (")
    assert str(caught.value).endswith("or without network the path of a local copy")


@pytest.mark.parametrize("source", ["hub:name", "hub:a:b:c:d", "hub::train"])
def test_hub_names_are_checked(source):
    with pytest.raises(ValueError, match="allowed: hub:NAME:SPLIT or"):
        Corpus(source)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def denied(path):
        if os.path.basename(path) in ("closed", "lost+found"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)  # root may read any folder
    with pytest.raises(ValueError, match=r"^data.source: .*/closed cannot be read: Permission denied; allowed: folders"):
        Corpus(str(tmp_path)).files()
    assert len(Corpus(str(tmp_path / "*.txt")).files()) == 1
    (tmp_path / "closed").rmdir()
    assert len(Corpus(str(tmp_path)).files()) == 1


def test_missing_and_empty(tmp_path):
    with pytest.raises(ValueError, match=r"data.source is '.*nothing.txt', which is not there; allowed"):
        list(Corpus(str(tmp_path / "nothing.txt")))
    with pytest.raises(
        ValueError, match=r"data.validation_source is '.*', where no file is of a kind that is read; allowed: text"
    ):
        list(Corpus(str(tmp_path), setting="data.validation_source"))
    (tmp_path / "blank.txt").write_text("\n \n\n")
    with pytest.raises(ValueError, match="holds no text"):
        list(Corpus(str(tmp_path)))
    with pytest.raises(ValueError, match=r"^data.source is ''; allowed"):
        Corpus("")
    with pytest.raises(ValueError, match=r"data.document_start is '\('; allowed: a regular expression \("):
        Corpus("embedded", document_start="(")


def test_what_is_not_utf8_is_named_by_file_and_line(tmp_path):
    (tmp_path / "latin.txt").write_bytes("gut\n\nBücher\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"data.source: .*latin.txt, line 3 is not UTF-8: byte 0xfc at its position 1"):
        list(Corpus(str(tmp_path)))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "changed", "other"])
def test_damaged_compressed_files(tmp_path, suffix, damage):
    if (suffix, damage) == (".zst", "changed"):
        pytest.skip("zstd frames carry no checksum unless asked to")
    text = os.urandom(200_000).hex().encode()
    data = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}[suffix](text)
    middle = len(data) // 2
    damaged = {"cut": data[:middle], "changed": data[:middle] + b"\0\xff" * 50 + data[middle + 100 :], "other": b"plain"}
    (tmp_path / f"text.txt{suffix}").write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=rf"data.source: .*text.txt{suffix} cannot be read: "):
        list(Corpus(str(tmp_path)))


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": "broken', r"rows.jsonl, line 2 is not a line of JSON"),
        (b'{"text": "\xff"}', r"rows.jsonl, line 2 is not a line of JSON"),
        (b'["text"]', r"rows.jsonl, line 2 is a JSON list; allowed: an object on each line"),
        (b'{"body": "x", "id": 1}', r"data.column is 'text', which .*rows.jsonl, line 2 does not have; allowed: 'body', 'id'"),
        (b'{"text": 3}', r"data.column is 'text', which holds int in .*rows.jsonl, line 2"),
    ],
)
def test_bad_json_is_named_by_file_and_line(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        list(Corpus(str(tmp_path)))


def test_stamp_changes_with_the_files_and_only_with_them(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    os.utime(path, ns=(1, 1))
    before = Corpus(str(tmp_path)).stamp()
    assert Corpus(str(tmp_path)).stamp() == before == json.loads(json.dumps(before))
    (tmp_path / "unread.pdf").write_text("x")
    assert Corpus(str(tmp_path)).stamp() == before
    os.utime(path, ns=(1, 2))
    touched = Corpus(str(tmp_path)).stamp()
    assert touched != before
    (tmp_path / "b.txt").write_text("more")
    assert Corpus(str(tmp_path)).stamp() not in (before, touched)
    assert Corpus(str(tmp_path), column="body").stamp() != Corpus(str(tmp_path)).stamp()
