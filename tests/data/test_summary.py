"""The summary of the data: its counts equal those of the rows, how it is shown, and what it advises."""

import json

import numpy as np
import pytest

from lit_linformer.data.finetuning.row_layout import RowLayout
from lit_linformer.data.summary import data_rows, summary_rows


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("pair", [False, True])
def test_rows_that_are_cut_lose_tokens(pair, windows):
    if pair and windows > 1:
        pytest.skip("pairs have no windows")
    layout = RowLayout(0, 2, 1, 16, pair, max_windows=windows, window_overlap=5)
    lengths = np.random.default_rng(0).integers(1, 48, (200, 1 + pair))
    lengths[0] = 1
    for row, cut in zip(lengths, layout.is_cut(lengths), strict=True):
        texts = [np.arange(100 + 1000 * number, 100 + 1000 * number + length) for number, length in enumerate(row)]
        kept = {token for tokens in layout.rows(texts) for token in tokens} - {0, 2}
        assert (len(kept) < row.sum()) == cut
    assert 0 < layout.is_cut(lengths).mean() < 1


def test_a_fine_tuning_run(make_data):
    data = make_data(max_length=16)
    assert data.summary() == {} and data_rows(data, 512) == []
    data.setup("fit")
    summary = data.summary()
    train, held_out = summary["train"], summary["validation"]
    rows = data.sets["train"]
    assert train["rows"] == len(rows) and train["tokens"] == sum(len(rows.files.ids(row)[0]) for row in rows.rows)
    assert train["cut"] == pytest.approx(np.mean([len(rows.files.ids(row)[0]) > 14 for row in rows.rows]), abs=1e-4)
    assert train["labels"]["neg"] + held_out["labels"]["neg"] == 100 and sum(train["labels"].values()) == train["rows"]
    (_, first), (_, second), *note = data_rows(data, 512)
    label, hint = note[0][0], " ".join(text for _, text in note)
    assert first.split("  ")[-1] == f"neg: {train['labels']['neg']}, pos: {train['labels']['pos']}"
    assert first.index("tokens") == second.index("tokens") and f"{train['cut']:.1%} cut at 16" in first
    assert label == "note" and "data.max_length up to the model's 512 cuts fewer" in hint
    assert "data.max_windows" not in hint  # data.window_overlap leaves no room for windows
    data = make_data(max_length=16, window_overlap=2)
    data.setup("validate")
    assert data.summary_hints(16)[0].endswith(
        "at data.max_length = 16: data.max_windows 10 reads 95 % of them whole, in windows"
    )
    data = make_data(max_length=16, window_overlap=2, max_windows=10)
    data.setup("validate")
    assert data.summary()["validation"]["cut"] <= 0.05 and "cut at 10 × 16  " in data_rows(data, 16)[0][1]
    assert data.summary_hints(16) == []


@pytest.mark.parametrize(("values", "told"), [((0, 1), True), ((0, 0.5), False), (range(6), False), ((3,), False)])
def test_classes_that_are_taken_for_numbers(tmp_path, values, told):
    import csv

    from lit_linformer.data import FineTuningData

    with open(tmp_path / "rows.csv", "w", newline="") as file:
        rows = [[f"a text, the {i}th", values[i % len(values)]] for i in range(30)]
        csv.writer(file).writerows([["text", "stars"], *rows])
    own = {"columns": ["text"], "label_column": "stars", "tokenizer": "bpe", "vocab_size": 280}
    data = FineTuningData(source=str(tmp_path / "rows.csv"), cache_dir=str(tmp_path), **own)
    data.setup("fit")
    hint = """stars is predicted as a number, since data.labels is not given; as classes with --data.labels '["0","1"]'"""
    assert data.summary_hints(512) == [hint] * told
    assert data.summary()["train"]["values"]["least"] == min(values)


def test_the_mean_of_small_values_is_not_0(tmp_path):
    from lit_linformer.data import FineTuningData

    (tmp_path / "rows.tsv").write_text("text\tlabel\n" + "".join(f"a text, the {i}th\t{1 + i % 2}e-6\n" for i in range(40)))
    own = {"columns": ["text"], "tokenizer": "bpe", "vocab_size": 280, "validation_fraction": 0}
    data = FineTuningData(source=str(tmp_path / "rows.tsv"), cache_dir=str(tmp_path), **own)
    data.setup("fit")
    assert data.summary()["train"]["values"]["mean"] == 1.5e-6
    assert data_rows(data, None)[0][1].endswith("1e-06 to 2e-06, mean 1.5e-06")


@pytest.mark.parametrize("labels", [["bad", "good"], ["bad", "good", "ugly"]])
def test_a_label_that_no_row_has(labels, tmp_path):
    from lit_linformer.data import FineTuningData

    rows = [f"a text, {i} of them\t{('bad', 'good')[i % 2]}\n" for i in range(30)]
    (tmp_path / "rows.tsv").write_text("".join(["text\tlabel\n", *rows]))
    own = {"columns": ["text"], "label_column": "label", "tokenizer": "bpe", "vocab_size": 280, "cache_dir": str(tmp_path)}
    data = FineTuningData(source=str(tmp_path / "rows.tsv"), labels=labels, **own)
    data.setup("fit")
    hints = data.summary_hints(512)
    assert hints == [f"no training row has the label {name!r}: is data.labels what you meant?" for name in labels[2:]]


def test_a_label_that_no_held_out_row_has(tmp_path):
    from lit_linformer.data import FineTuningData

    rows = [f"a text, {i} of them\t{('bad', 'good')[i == 7]}\n" for i in range(30)]  # row 7 is for training
    (tmp_path / "rows.tsv").write_text("".join(["text\tlabel\n", *rows]))
    own = {"columns": ["text"], "labels": ["bad", "good"], "tokenizer": "bpe", "vocab_size": 280, "cache_dir": str(tmp_path)}
    data = FineTuningData(source=str(tmp_path / "rows.tsv"), **own)
    data.setup("fit")
    assert data.summary()["train"]["labels"]["good"] == 1
    (hint,) = data.summary_hints(512)
    assert hint.startswith("no validation row has the label 'good': val/score says nothing about it (more validation rows")


def test_pretraining_counts_come_from_the_token_files(make, tmp_path):
    counts = {"documents": 1, "tokens": 1271, "bytes": 5000}
    splits = {"train": counts, "validation": {**counts, "documents": 20}, "test": {"tokens": 0}}
    (tmp_path / "meta.json").write_text(json.dumps({"splits": splits}))
    data = make(max_length=128)
    data.folder = tmp_path
    summary = data.summary()
    assert summary["train"] == {"documents": 1, "tokens": 1271, "rows": 11, "row_length": 128}
    assert summary_rows(summary) == [
        ("train       ", "  1 document  1,271 tokens  11 rows of 128"),
        ("validation  ", "20 documents  1,271 tokens  11 rows of 128"),
    ]


def test_documents_that_are_all_shorter_than_a_row(make):
    longest = 0
    for n in (64, 1024):
        data = make(max_length=n)
        assert data.summary_hints(n) == []  # nothing is prepared yet
        data.prepare_data()
        data.setup("fit")
        longest = data.blocks["train"].longest_document(data.tokenizer.eos_id)
        told = f"the longest document has {longest} of a row's 1,024 tokens: each row joins several"
        assert 64 < longest < 1000 and data.summary_hints(n) == ([told] if n == 1024 else [])


def test_many_classes_and_values():
    told = {"rows": 9, "tokens": 40, "cut": 0.0, "max_length": 64}
    ((_, line),) = summary_rows({"train": told | {"labels": {str(stars): 1 for stars in range(9)}}})
    assert line == "9 rows  40 tokens  none cut at 64  0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, … (9 classes)"
    ((_, line),) = summary_rows({"train": told | {"values": {"least": 0.0, "mean": 2.5, "greatest": 5.0}}})
    assert line.endswith("none cut at 64  0 to 5, mean 2.5")
    assert summary_rows({"train": {"graphs": 3}, "test": {}}) == [("train  ", "3 graphs"), ("test   ", "")]
