"""Texts whose masks are to be filled: which are accepted, which are skipped and reported, and which are refused."""

import pickle

import pytest

from lit_linformer.data.pretraining.prompts import encode_prompts
from lit_linformer.data.prompts import given_texts, text_prompts
from tests.data.recorder import Recorder, recorded, trainer


def test_predict_through_lightning_builds_no_token_files(make, tmp_path):
    tokenizer = make().tokenizer
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "lines.txt").write_text("of <mask> attention\n\nthe matrix is <mask> and <mask> of the sequence\n")
    data = make(
        source="nowhere.txt",  # predict with a tokenizer's file needs no corpus
        tokenizer=str(tmp_path / "tokenizer.json"),
        cache_dir=str(tmp_path / "cache"),
        text="the <mask> of",
        file=str(tmp_path / "lines.txt"),
        batch_size=2,
    )
    trainer().predict(Recorder(tmp_path), data)
    given = ["the <mask> of", "of <mask> attention", "the matrix is <mask> and <mask> of the sequence"]
    batches = recorded(tmp_path, "other")
    assert sorted(text for batch in batches for text in batch["texts"]) == sorted(given)
    assert batches[0]["texts"] == given[2:]  # longest first
    for batch in batches:
        assert [given[number] for number in batch["index"]] == [batch["texts"][row] for row in batch["rows"]]
        masked = [(r, c) for r, ids in enumerate(batch["input_ids"]) for c, i in enumerate(ids) if i == tokenizer.mask_id]
        assert list(zip(batch["rows"], batch["columns"], strict=True)) == masked
        for ids, mask, text in zip(batch["input_ids"], batch["attention_mask"], batch["texts"], strict=True):
            real = [i for i, kept in zip(ids, mask, strict=True) if kept]
            assert real == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
            assert all(i == tokenizer.pad_id for i in ids[len(real) :])
    assert not (tmp_path / "cache").exists()


def test_predict_skips_what_has_no_mask_and_says_which(make, tmp_path, capsys):
    lines = ["no mask", "one <mask>", "", "none", *["neither"] * 6, "a <mask>", "<mask> " * 70]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    data = make(text="the <mask>", file=str(tmp_path / "lines.txt"))
    data.setup("predict")
    assert [(prompt["text"], prompt["place"]) for prompt in data.prompts] == [
        ("the <mask>", {}), ("one <mask>", {"line": 2}), ("a <mask>", {"line": 11}),
    ]  # fmt: skip
    unmasked, long = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert unmasked == f"note: data.file='{tmp_path}/lines.txt': 8 lines without <mask> are skipped: 1, 4, 5, 6, 7, …"
    assert long.endswith("lines.txt': 1 line longer than data.max_length = 64 is skipped: 12")
    longest = len(data.prompts[1]["ids"])
    assert len(encode_prompts([*text_prompts(str(tmp_path / "lines.txt"))], data.tokenizer, longest)) == 2  # full rows
    (tmp_path / "rows.jsonl").write_text('{"text": "none"}\n{"text": null}\n{"text": "the <mask>"}\n')
    data = make(file=str(tmp_path / "rows.jsonl"))
    data.setup("predict")
    assert [prompt["text"] for prompt in data.prompts] == ["the <mask>"]
    (tmp_path / "rows.jsonl").write_text('{"text": "none"}\n{"text": "' + "<mask> " * 70 + '"}\n')
    with pytest.raises(ValueError, match=r"all 2 lines are without <mask> or longer than data.max_length = 64; allowed: some"):
        data.setup("predict")
    (tmp_path / "rows.jsonl").write_text('{"text": "the <mask>"}\n{"text": "' + "<mask> " * 200_000 + '"}\n')
    data = make(file=str(tmp_path / "rows.jsonl"))
    data.setup("predict")
    assert [prompt["text"] for prompt in data.prompts] == ["the <mask>"]
    assert "1 line longer than 1,000,000 characters is skipped: 2" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"text": "none"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl': all 1 lines are without <mask>; allowed: some that can be"):
        data.setup("predict")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"text": "nothing missing"}, r"data.text is 'nothing missing'; allowed: a text with <mask> where"),
        ({"text": ["a <mask>", "b"]}, r"data.text is 'b'; allowed: a text with <mask>"),
        ({"text": "<mask> " * 70}, r"data.text has \d+ tokens with bos and eos; allowed: up to data.max_length = 64"),
        ({}, r"^data.text is not given, nor is data.file; allowed: "),
        ({"text": "<mask> " * 200_000}, r"data.text has 1,400,000 characters; allowed: up to 1,000,000"),
        ({"file": "no/such/file"}, r"data.file: no/such/file cannot be read: No such file"),
        ({"file": "no/such.csv"}, r"^data.file is 'no/such.csv', which is not there; allowed: a file of text, or a table"),
    ],
)
def test_bad_prompts(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).setup("predict")


def test_texts_that_are_given_go_to_processes_that_are_not_forked():
    given = given_texts("the <mask>")
    assert pickle.loads(pickle.dumps(given)) == given
