"""Tokenizers: trained here, loaded from every layout, and checked for what masked training needs."""

import json
from itertools import pairwise

import pytest

from lit_linformer.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def wordpiece(documents):
    return train_tokenizer("wordpiece", documents, 400)


def test_bpe_has_robertas_special_tokens_and_loses_nothing(tokenizer, documents):
    names = [tokenizer.backend.id_to_token(i) for i in range(5)]
    assert names == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    ids = (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4) == tuple(tokenizer.special_ids)
    for text in [*documents[:20], "never seen: 漢字 \t\x00 🙂"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == max(tokenizer.backend.get_vocab().values()) + 1


def test_real_size_is_told_not_the_one_asked_for(documents):
    assert len(train_tokenizer("bpe", documents[:2], 5000)) < 5000


def test_training_is_deterministic(documents):
    for kind in ("bpe", "wordpiece"):  # each training seeds its hash maps anew
        assert train_tokenizer(kind, documents, 400).sha256 == train_tokenizer(kind, iter(documents), 400).sha256


def test_wordpiece_is_lower_cased_with_berts_special_tokens(wordpiece):
    assert [wordpiece.backend.id_to_token(i) for i in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert wordpiece.encode("The ATTENTION") == wordpiece.encode("the attention")
    assert wordpiece.decode(wordpiece.encode("The matrix")) == "the matrix"


def test_mask_in_a_text_swallows_the_space_left_of_it(tokenizer):
    assert tokenizer.encode("the <mask> of") == [
        *tokenizer.encode("the"), tokenizer.mask_id, *tokenizer.encode(" of"),
    ]  # fmt: skip


def test_special_names_in_a_corpus_are_plain_text(tokenizer, wordpiece):
    for each, text in ((tokenizer, "a <mask> and </s> tag"), (wordpiece, "a [MASK] and [SEP] tag")):
        (ids,) = each.encode_plain([text])
        assert not {each.mask_id, each.eos_id} & set(ids)
        assert {each.mask_id, each.eos_id} <= set(each.encode(text))


def words(*others: str, declared: bool = True) -> Tokenizer:
    """A tokenizer whose model takes special tokens' names in a text for those tokens; declared: as special ones."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    names = ["<s>", "<pad>", "</s>", "<mask>", *others]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(names[:4] * declared)
    return Tokenizer(backend, "words")


def test_special_names_that_a_file_has_as_plain_words_are_special():
    text = "a</s>is<mask>and <pad>"
    for known in (words("<unk>", "a", "is", "and", declared=there) for there in (True, False)):
        assert known.encode(text) == [5, 2, 6, 3, 7, 1] and known.decode([5, 3, 1], skip_special_tokens=True) == "a"
        assert Tokenizer.from_str(known.to_str(), "its file").sha256 == known.sha256


def test_special_names_that_the_model_holds_are_unknown_words(tokenizer, wordpiece):
    text = "a </s> is <mask> and <pad>"
    known = words("<unk>", "a", "is", "and")
    assert list(known.encode_plain([text, "a"])) == [[5, 4, 6, 4, 7, 4], [5]] and known.encode(text) == [5, 2, 6, 3, 7, 1]
    assert list(words("a", "is", "and").encode_plain([text])) == [[4, 5, 6]]  # without one they are left out
    # Those that were always read as text have the cache's files as they are.
    assert [each.of_plain_text == each.sha256 for each in (known, tokenizer, wordpiece)] == [False, True, True]


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path, documents):
    tokenizer.save(tmp_path / "tokenizer.json")
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(spec))
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.encode(documents[0]) == tokenizer.encode(documents[0])


def test_as_text_it_is_the_same(tokenizer):
    copy = Tokenizer.from_str(tokenizer.to_str(), "a copy")
    assert copy.sha256 == tokenizer.sha256 and copy.encode("the matrix") == tokenizer.encode("the matrix")
    with pytest.raises(ValueError, match=r"^data.tokenizer is 'a copy'; allowed: a tokenizer.json \("):
        Tokenizer.from_str("{", "a copy")


def test_truncation_and_padding_of_a_file_are_switched_off(tokenizer, tmp_path, documents):
    """A sentence encoder's tokenizer.json has both: blocks would lose the text after token 128."""
    config = json.loads(tokenizer.backend.to_str())
    config["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    config["padding"] = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                         "pad_type_id": 0, "pad_token": "<pad>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    assert load_tokenizer(str(tmp_path)).encode(documents[0]) == tokenizer.encode(documents[0])


def test_roberta_folder(tokenizer, tmp_path, documents):
    """vocab.json and merges.txt, with the special tokens in the vocabulary, as converted from fairseq."""
    config = json.loads(tokenizer.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(config["vocab"]))
    merges = [" ".join(pair) for pair in config["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    loaded = load_tokenizer(str(tmp_path))
    assert len(loaded) == len(tokenizer)
    assert (loaded.bos_id, loaded.mask_id, loaded.special_ids) == (0, 4, [0, 1, 2, 3, 4])
    assert loaded.encode("the <mask> of") == tokenizer.encode("the <mask> of")
    for document in documents[:20]:
        assert loaded.encode(document) == tokenizer.encode(document)
    (tmp_path / "merges.txt").write_text("nonsense")
    with pytest.raises(ValueError, match=r"allowed: vocab.json and merges.txt of a byte-level BPE"):
        load_tokenizer(str(tmp_path))


UNCASED = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "un", "##known", "."]


def test_bert_vocabulary_tells_its_case(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(UNCASED))
    for spec in (tmp_path, file):
        loaded = load_tokenizer(str(spec))
        assert (len(loaded), loaded.pad_id, loaded.bos_id, loaded.eos_id, loaded.mask_id) == (12, 0, 3, 4, 5)
        assert loaded.encode("The cats [MASK].") == [6, 7, 8, 5, 11]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(str(tmp_path)).encode("The cats") == [2, 7, 8]  # "The" is unknown now
    (tmp_path / "tokenizer_config.json").unlink()
    file.write_text("\n".join([*UNCASED, "The"]))
    assert load_tokenizer(str(tmp_path)).encode("The the") == [12, 6]


def test_bert_settings_of_accents_and_chinese(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*UNCASED, "über", "uber", "東京", "東", "京"]), encoding="utf-8")
    for told, expected in (
        ({}, ["uber", "東", "京"]),
        ({"strip_accents": None, "tokenize_chinese_chars": None}, ["uber", "東", "京"]),
        ({"strip_accents": False, "tokenize_chinese_chars": False}, ["über", "東京"]),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | {"do_lower_case": True}))
        loaded = load_tokenizer(str(tmp_path))
        assert [loaded.backend.id_to_token(i) for i in loaded.encode("Über 東京")] == expected


def test_bad_files_are_one_line(tmp_path):
    cases = {
        "nowhere": "allowed: bpe, wordpiece, or a file or folder that exists",
        "empty": "allowed: a folder with tokenizer.json, with vocab.json and merges.txt, or with vocab.txt",
        "broken.json": r"allowed: a tokenizer.json \(",
        "nomask.txt": r"which has no mask token; allowed: one with <mask> or \[MASK\]",
        "nopad.txt": r"has no pad token",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text('{"model": ')
    (tmp_path / "nomask.txt").write_text("\n".join(t for t in UNCASED if t != "[MASK]"))
    (tmp_path / "nopad.txt").write_text("\n".join(t for t in UNCASED if t != "[PAD]"))
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            load_tokenizer(str(tmp_path / name))
        assert str(caught.value).startswith("data.tokenizer is '") and "\n" not in str(caught.value)


def test_small_vocabularies_are_refused(documents):
    with pytest.raises(ValueError, match=r"data.vocab_size is 260; allowed: 261 or more with data.tokenizer bpe"):
        train_tokenizer("bpe", documents, 260)
    with pytest.raises(ValueError, match=r"data.vocab_size is 100; allowed: 256 or more with data.tokenizer wordpiece"):
        train_tokenizer("wordpiece", documents, 100)


def test_an_error_of_the_corpus_comes_through_training():
    def broken():
        yield "some text"
        raise ValueError("data.source: a.txt, line 3 is not UTF-8")

    with pytest.raises(ValueError, match="line 3 is not UTF-8"):
        train_tokenizer("bpe", broken(), 300)


def test_training_reads_no_more_than_its_share(monkeypatch):
    monkeypatch.setattr("lit_linformer.data.training_text.MOST_CHARACTERS", 100_000)
    read = []

    def endless():
        while True:
            read.append(1)
            yield "word " * 2_000

    train_tokenizer("bpe", endless(), 300)
    assert len(read) == 10


def continuation(tokenizer, text):
    ids = tokenizer.encode(text)
    joins, ends_word = tokenizer.word_tables()
    return [(tokenizer.backend.id_to_token(b), bool(joins[b] & ends_word[a])) for a, b in pairwise(ids)]


def test_word_tables_of_wordpiece(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(UNCASED))
    found = continuation(load_tokenizer(str(tmp_path)), "The cats unknown.")
    assert found == [("cat", False), ("##s", True), ("un", False), ("##known", True), (".", False)]


def test_word_tables_of_byte_level_bpe():
    from tokenizers import Tokenizer as Backend

    backend: Backend = train_tokenizer("bpe", ["nothing"], 261).backend  # bytes only: each one is a token
    found = continuation(Tokenizer(backend, "bytes"), "ab c-d é!")
    assert found == [("b", True), ("Ġ", False), ("c", False), ("-", False), ("d", False), ("Ġ", False), ("Ã", False),
                     ("©", True), ("!", False)]  # fmt: skip


def test_words_are_whole_whatever_the_merges(tokenizer):
    text = "the attention of linear projections unquestionably größere naïve Καλημέρα windowed"
    ids, words = tokenizer.encode(text), [[]]
    for i, (_, joined) in zip(ids, [("", True), *continuation(tokenizer, text)], strict=True):
        words += [] if joined else [[]]
        words[-1].append(i)
    assert [word for word in (tokenizer.decode(word).strip() for word in words) if word] == text.split()
    assert len(ids) > len(words)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_same_ids_whatever_an_export_added(kind, documents):
    from tokenizers import normalizers, processors

    own, others = train_tokenizer(kind, documents, 400), train_tokenizer(kind, documents, 300)
    exported = Tokenizer.from_str(own.to_str(), "exported")
    parts = [normalizers.Strip(), *([exported.backend.normalizer] if exported.backend.normalizer else [])]
    exported.backend.normalizer = normalizers.Sequence(parts)
    bos, eos = (own.backend.id_to_token(i) for i in (own.bos_id, own.eos_id))
    ends = [(bos, own.bos_id), (eos, own.eos_id)]
    exported.backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=ends)
    assert exported.sha256 != own.sha256
    assert own.same_ids(exported) and exported.same_ids(own)
    assert not own.same_ids(others) and not exported.same_ids(others)


def test_same_ids_with_several_normalizers(documents):
    from tokenizers import normalizers

    def made(*parts):
        found = Tokenizer.from_str(plain.to_str(), "made")
        found.backend.normalizer = normalizers.Sequence(list(parts)) if len(parts) != 1 else parts[0]
        return Tokenizer.from_str(found.to_str(), "made")

    plain = train_tokenizer("bpe", documents, 400)
    strip, nfd, lower = normalizers.Strip(), normalizers.NFD(), normalizers.Lowercase()
    assert made(nfd, lower).same_ids(made(normalizers.Sequence([strip, normalizers.Sequence([nfd, lower])])))
    assert not made(strip, nfd, lower).same_ids(plain) and not made(strip, nfd, lower).same_ids(made(strip, nfd))
    assert made(strip, nfd).same_ids(made(nfd)) and not made(strip).same_ids(plain)
