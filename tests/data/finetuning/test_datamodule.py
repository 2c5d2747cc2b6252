"""The fine-tuning data module: what is read, held out and trained on, and what is refused."""

import json
import re
import warnings

import numpy as np
import pytest
import torch

from lit_linformer.data import FineTuningData
from lit_linformer.data.finetuning.encoded_texts import text_hash
from lit_linformer.data.finetuning.splits import Splits, select_rows
from tests.data.finetuning.glue import write_glue
from tests.data.finetuning.test_labelled_rows import write_json


def ready(data, stage="fit"):
    data.prepare_data()
    data.setup(stage)
    return data


def numbers(rows):
    """The numbers in the file of a set's rows."""
    return rows.rows.tolist()


@pytest.mark.parametrize("split", ["train", "val", "test", "predict"])
def test_loaders_before_setup_are_one_line(make_data, split):
    with pytest.raises(ValueError, match=r"^FineTuningData has not opened '.*'; allowed: its loaders after prepare_data"):
        getattr(make_data(), f"{split}_dataloader")()


def test_without_a_trainer(make_data):
    data = ready(make_data())
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape[0] == len(batch["labels"]) == len(batch["index"]) == 8
    assert data.num_tokens == len(data.tokenizer) <= 300 and data.num_labels == 2 and data.max_length == 64
    assert data.evaluation_names == ("",) and data.metrics == ("accuracy",) and data.text_task.name == "IMDB"


def test_labels_and_texts_stay_together(make_data, imdb):
    data = ready(make_data())
    lines = [json.loads(line) for line in (imdb / "train.jsonl").read_text().splitlines()]
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"], dtype=torch.bool))
            for ids, kept, label, index in zip(batch["input_ids"], mask, batch["labels"], batch["index"], strict=True):
                expected = data.tokenizer.encode(lines[index]["text"])[:62]
                assert ids[kept].tolist() == [data.tokenizer.bos_id, *expected, data.tokenizer.eos_id]
                assert (ids[~kept] == data.tokenizer.pad_id).all()
                assert label == ["neg", "pos"].index(lines[index]["label"])


def test_held_out_rows_are_the_same_for_every_seed_and_no_training_rows(make_data):
    sets = [ready(make_data(seed=seed)).sets for seed in (0, 7)]
    assert numbers(sets[0]["validation"]) == numbers(sets[1]["validation"])
    assert len(sets[0]["validation"]) == 20  # a tenth of 203
    assert sorted(numbers(sets[0]["train"]) + numbers(sets[0]["validation"])) == list(range(203))
    assert len(ready(make_data(validation_fraction=0.5)).sets["validation"]) == 102
    without = ready(make_data(validation_fraction=0))
    assert without.sets.keys() == {"train"}
    assert without.val_dataloader() == []


def test_order_is_the_seeds(make_data):
    first, same, other = ([b["index"].tolist() for b in ready(make_data(seed=s)).train_dataloader()] for s in (0, 0, 1))
    assert first == same != other


def test_leaked_rows_are_dropped(make_data, capsys):
    data = ready(make_data(drop_leaked=True))
    leaked = set(range(4)) | set(range(200, 203))
    held_out = set(numbers(data.sets["validation"]))
    assert set(numbers(data.sets["train"])) == set(range(203)) - leaked - held_out
    dropped = len(leaked - held_out)
    assert f"{dropped} training rows dropped: their texts are in validation or test too\n" in capsys.readouterr().out
    assert leaked - held_out <= set(numbers(ready(make_data()).sets["train"]))


def test_few_training_rows_are_of_all_classes_and_always_the_same(make_data):
    rows = numbers(ready(make_data(limit_train=40)).sets["train"])
    assert rows == numbers(ready(make_data(limit_train=40, seed=5)).sets["train"]) and len(set(rows)) == 40
    assert rows[:10] == numbers(ready(make_data(limit_train=10)).sets["train"])
    assert 10 < sum(row < 100 for row in rows) < 30  # the file is sorted by class
    with pytest.raises(ValueError, match=r"^data.limit_train is 500; allowed: up to 183, the training rows there are$"):
        ready(make_data(limit_train=500))


def test_selection_of_nothing_is_refused():
    hashes = np.arange(5, dtype=np.uint64)
    for fraction, what in ((0.01, "none"), (0.99, "all")):
        with pytest.raises(ValueError, match=rf"^data.validation_fraction is {fraction}, which is {what} of 5 rows; allowed"):
            select_rows(hashes, fraction)
    with pytest.raises(ValueError, match=r"^data.drop_leaked=True leaves no training row"):
        select_rows(hashes, other_hashes=hashes)
    assert len({text_hash(texts) for texts in (("a", "b"), ("ab",), ("a b",))}) == 3
    assert text_hash((" a\n",)) == text_hash(("a",))


def test_tokenizer_learns_from_rows_that_train_only(tmp_path):
    words = ["".join(chr(ord("a") + int(digit)) for digit in f"{i:03}") * 2 for i in range(300)]
    write_json(tmp_path / "train.jsonl", [{"text": f"{w} {w} {w}", "label": i % 2} for i, w in enumerate(words)])
    write_json(tmp_path / "test.jsonl", [{"text": f"{w} {w} {w}", "label": 0} for w in words[:50]])
    settings = {"source": str(tmp_path), "cache_dir": str(tmp_path / "c"), "tokenizer": "bpe", "vocab_size": 9000}
    data = ready(FineTuningData("IMDB", validation_fraction=0.3, drop_leaked=True, limit_train=100, **settings))
    learnt = {word for word in words if f"Ġ{word}" in data.tokenizer.backend.get_vocab()}
    assert learnt == {words[row] for row in data.sets["train"].rows} and len(learnt) == 100
    others = [(0.3, True, 99), (0.3, False, 100), (0.2, True, 100)]  # settings that choose other rows, for another tokenizer
    assert all(Splits(data.source, *other).stamp() != data.splits.stamp() for other in others)


def test_the_cache_is_made_once(make_data, tmp_path):
    make_data().tokenizer.save(tmp_path / "tokenizer.json")
    settings = {"tokenizer": str(tmp_path / "tokenizer.json"), "cache_dir": str(tmp_path / "cache")}
    ready(make_data(**settings))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    for other in ({}, {"max_length": 40}, {"seed": 4, "limit_train": 9}, {"max_windows": 3}, {"validation_fraction": 0.3}):
        ready(make_data(**settings, **other))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


def test_mnli_has_two_evaluation_sets(tmp_path, make_data):
    expected = write_glue(tmp_path, "MNLI")
    data = make_data(task="MNLI", source=str(tmp_path), cache_dir=str(tmp_path / "cache"), eval_batch_size=3)
    assert data.evaluation_names == ("matched", "mismatched") and data.num_labels == 3
    ready(data)
    for name, loader in zip(data.evaluation_names, data.val_dataloader(), strict=True):
        batches = list(loader)
        assert sum(len(batch["index"]) for batch in batches) == 4 and max(len(batch["index"]) for batch in batches) <= 3
        found = {i: label for b in batches for i, label in zip(b["index"].tolist(), b["labels"].tolist(), strict=True)}
        assert [found[i] for i in range(4)] == [row.label for row in expected[f"validation_{name}"]]
    data.setup("test")
    assert ["labels" in next(iter(loader)) for loader in data.test_dataloader()] == [False, False]
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    with pytest.raises(ValueError, match=r"has no validation_mismatched split; allowed: .*dev_mismatched.tsv"):
        make_data(task="MNLI", source=str(tmp_path)).prepare_data()


@pytest.mark.parametrize("task", ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "QNLI", "RTE", "WNLI"])
def test_glue(tmp_path, make_data, task):
    expected = write_glue(tmp_path, task)
    data = ready(make_data(task=task, source=str(tmp_path), cache_dir=str(tmp_path / "cache"), vocab_size=270))
    batches = list(data.val_dataloader())
    found = {i: label for b in batches for i, label in zip(b["index"].tolist(), b["labels"].tolist(), strict=True)}
    assert [found[i] for i in range(4)] == [row.label for row in expected["validation"]]
    assert batches[0]["labels"].dtype == (torch.float32 if task == "STS-B" else torch.int64)
    data.setup("test")
    batches = list(data.test_dataloader())
    assert sorted(i for batch in batches for i in batch["index"].tolist()) == list(range(4))
    assert not any("labels" in batch for batch in batches)


def test_a_validation_split_that_must_be_there(tmp_path, make_data):
    write_glue(tmp_path, "RTE")
    with pytest.warns(UserWarning, match=r"data.validation_fraction=0.25 is ignored: .* has a validation split"):
        ready(make_data(task="RTE", source=str(tmp_path), cache_dir=str(tmp_path / "cache"), validation_fraction=0.25))
    (tmp_path / "RTE" / "dev.tsv").unlink()
    with pytest.raises(ValueError, match=r"no validation split; allowed: .*dev.tsv, .* or data.validation_fraction a share"):
        make_data(task="RTE", source=str(tmp_path)).prepare_data()
    data = ready(make_data(task="RTE", source=str(tmp_path), cache_dir=str(tmp_path / "cache"), validation_fraction=0.25))
    assert len(data.sets["validation"]) == 1


def test_a_task_of_ones_own(tmp_path, make_data):
    rows = [{"title": f"t {i}", "body": "b", "stars": i / 4} for i in range(20)]
    write_json(tmp_path / "train.jsonl", rows)
    own = {"task": None, "source": str(tmp_path), "columns": ["title", "body"], "label_column": "stars"}
    data = ready(make_data(**own, cache_dir=str(tmp_path / "cache")))
    assert data.num_labels == 1 and data.metrics == ("pearson", "spearman") and len(data.sets["validation"]) == 2
    batch = next(iter(data.train_dataloader()))
    assert batch["labels"].tolist() == [i / 4 for i in batch["index"].tolist()]


def test_a_hub_folder_is_asked_for_its_splits_once(tmp_path, make_data, imdb, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "train.jsonl").write_text("".join(
        json.dumps({"text": row["text"], "label": ["neg", "pos"].index(row["label"])}) + "\n"
        for row in map(json.loads, (imdb / "train.jsonl").read_text().splitlines())
    ))  # fmt: skip
    (hub / "test.jsonl").write_text((imdb / "test.jsonl").read_text())
    settings = {"source": f"hub:{hub}", "cache_dir": str(tmp_path / "cache")}
    data, local = ready(make_data(**settings)), ready(make_data())
    assert [b["input_ids"].tolist() for b in data.val_dataloader()] == [b["input_ids"].tolist() for b in local.val_dataloader()]
    again = ready(make_data(**settings))
    assert "_hub_rows" not in again.source.__dict__  # neither datasets nor the network


def test_other_data_on_resume_is_announced(make_data):
    data = ready(make_data())
    with pytest.warns(UserWarning, match=r"the checkpoint saw other data \(texts-0123, now texts-"):
        data.load_state_dict({"samples": 40, "tokens": "texts-0123"})
    assert data.train_dataloader().samples == 40
    assert ready(make_data(limit_train=20)).state_dict()["tokens"] != data.state_dict()["tokens"]


def test_validating_rows_that_a_checkpoint_trained_on_is_announced(make_data, tmp_path):
    ready(make_data()).tokenizer.save(tmp_path / "tokenizer.json")
    own = {"tokenizer": str(tmp_path / "tokenizer.json")}  # a trained one depends on the training rows
    trained = ready(make_data(validation_fraction=0.1, **own)).state_dict()
    same, more = (ready(make_data(validation_fraction=fraction, **own), "validate") for fraction in (0.1, 0.5))
    assert same.sets.keys() == more.sets.keys() == {"validation"} and same.state_dict()["held_out"] == trained["held_out"]
    with pytest.warns(UserWarning, match="saw other data .* it may have trained on what is held out here"):
        more.load_state_dict(trained)
    # The number of training rows does not affect which rows are held out, and may exceed those here.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(trained)
        few = make_data(validation_fraction=0.1, limit_train=10**6, **own)
        few.setup("validate")
        few.load_state_dict(trained)


# What it refuses


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"task": "IMDBB"}, r"^data.task is 'IMDBB'; allowed: CoLA, .*; did you mean 'IMDB'\?$"),
        ({"task": None}, r"^data.task is not given; allowed: CoLA, .*, or data.columns, which describes a task of your own$"),
        ({"columns": ["text"]}, r"^data.columns is \['text'\]; allowed with data.task IMDB: none"),
        ({"label_column": "stars"}, r"^data.label_column is 'stars'; allowed with data.task IMDB: none"),
        ({"metrics": ["f1"]}, r"^data.metrics is \['f1'\]; allowed with data.task IMDB: none"),
        ({"task": None, "columns": ["a"], "source": None}, r"^data.source is not given; allowed: a folder"),
        ({"task": None, "columns": ["a"], "metrics": ["f1"]}, r"^data.metrics has 'f1', which is not for a regression"),
        ({"tokenizer": None}, r"^data.tokenizer is not given; allowed: .*model.pretrained carries one over"),
        ({"vocab_size": 100}, r"^data.vocab_size is 100; allowed: 261 or more with data.tokenizer bpe$"),
        ({"max_length": 7}, r"^data.max_length is 7; allowed: 8 or more$"),
        ({"batch_size": 0}, r"^data.batch_size is 0; allowed: 1 or more$"),
        ({"eval_batch_size": 0}, r"^data.eval_batch_size is 0; allowed: 1 or more$"),
        ({"limit_train": 0}, r"^data.limit_train is 0; allowed: 1 or more$"),
        ({"num_workers": -1}, r"^data.num_workers is -1; allowed: 0 to 256$"),
        ({"seed": -1}, r"^data.seed is -1; allowed: 0 to 4294967295$"),
        ({"validation_fraction": 1.0}, r"^data.validation_fraction is 1.0; allowed: at least 0, less than 1$"),
        ({"empty_texts": "drop"}, r"^data.empty_texts is 'drop'; allowed: error, keep$"),
        ({"truncation": "longest"}, r"^data.truncation is 'longest'; allowed: longest_first, only_first, only_second$"),
        ({"truncation": "only_first"}, r"^data.truncation is 'only_first'; allowed for a task with one text: longest_first$"),
        ({"max_windows": 2, "task": "RTE"}, r"^data.max_windows is 2; allowed for pairs of texts: 1$"),
        ({"source": ""}, r"^data.source is ''; allowed: a folder"),
    ],
)
def test_bad_settings_are_refused_when_the_object_is_built(make_data, settings, message):
    with pytest.raises(ValueError, match=message):
        make_data(**settings)


def test_nothing_given_means_the_hub_and_512(make_data):
    data = make_data(source=None, max_length=None)
    assert data.source.hub == ["stanfordnlp/imdb", "plain_text"] and data.max_length == 512


def test_an_unlabelled_test_of_ones_own_cannot_be_scored(tmp_path, make_data, imdb):
    write_json(tmp_path / "test.jsonl", [{"text": "fine"}, {"text": "bad"}])
    (tmp_path / "train.jsonl").write_text((imdb / "train.jsonl").read_text())
    data = make_data(source=str(tmp_path), cache_dir=str(tmp_path / "cache"), drop_leaked=True)
    data.prepare_data()  # texts without labels suffice to look for leaks
    with pytest.raises(ValueError, match=r"whose test split has no labels; allowed: .*`predict` with data.file classifies"):
        data.setup("test")


def test_a_text_that_may_not_be_cut_is_named_by_its_row(tmp_path, make_data):
    rows = [{"premise": "short", "hypothesis": "the " * (30 * (i == 5) + 1), "label": i % 2} for i in range(9)]
    for split in ("train", "validation"):
        write_json(tmp_path / f"{split}.jsonl", rows)
    own = {"task": None, "columns": ["premise", "hypothesis"], "labels": ["a", "b"], "max_length": 20}
    settings = {**own, "source": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    ready(make_data(**settings, truncation="only_second"))
    with pytest.raises(ValueError, match=r"^data.truncation is 'only_first', and row 5 \(from 0\) of the train split is too"):
        ready(make_data(**settings, truncation="only_first"))


def reviews(path, texts):
    rows = [f"{text},{('bad', 'good')[number % 2]}\n" for number, text in enumerate(texts)]
    path.write_text("".join(["text,label\n", *rows]))
    return {"task": None, "source": str(path), "columns": ["text"], "labels": ["bad", "good"], "validation_fraction": 0.25}


def test_the_table_that_a_model_was_trained_on_is_no_test(make_data, tmp_path):
    table = reviews(tmp_path / "reviews.csv", [f"so it was {number}" for number in range(40)])
    state = ready(make_data(**table)).state_dict()
    again = ready(make_data(**table), "test")
    with pytest.raises(ValueError, match=r"reviews\.csv', which the model was trained on; allowed with test"):
        again.load_state_dict(state)
    other = reviews(tmp_path / "other.csv", [f"so it will be {number}" for number in range(40)])
    ready(make_data(**other), "test").load_state_dict(state)
    (tmp_path / "tokenizer.json").write_text(again.tokenizer.to_str())
    kept = {"tokenizer": str(tmp_path / "tokenizer.json"), "limit_train": 30}
    few = make_data(**reviews(tmp_path / "few.csv", ["so it is"]) | kept)  # too few to be split
    few.setup("test")
    few.load_state_dict(state)
    assert len(few.sets["test"]) == 1


def test_a_table_without_labels_is_no_test(make_data, tmp_path):
    table = reviews(tmp_path / "reviews.csv", [f"so it was {number}" for number in range(40)])
    (tmp_path / "tokenizer.json").write_text(ready(make_data(**table)).tokenizer.to_str())
    (tmp_path / "bare.csv").write_text("text\nso it is\nso it was\n")
    kept = {"source": str(tmp_path / "bare.csv"), "tokenizer": str(tmp_path / "tokenizer.json")}
    with pytest.raises(ValueError, match="whose test split has no labels; allowed: one with labels"):
        make_data(**table | kept).setup("test")


def test_held_out_rows_whose_texts_are_trained_on_are_told(make_data, tmp_path):
    table = reviews(tmp_path / "reviews.csv", [f"so it was {number // 2}" for number in range(40)])
    hint = " ".join(ready(make_data(**table)).summary_hints(None))
    assert re.search(r"\d+ of 10 held-out rows have the text of a training row: data.drop_leaked true trains without", hint)
    assert "held-out rows" not in " ".join(ready(make_data(**table, drop_leaked=True)).summary_hints(None))
    assert "no validation" not in hint
    assert "is 0: no validation" in " ".join(ready(make_data(**table | {"validation_fraction": 0.0})).summary_hints(None))


@pytest.mark.parametrize("validation", [False, True])
def test_a_table_of_a_header_alone_is_told_before_a_tokenizer_learns_from_it(validation, make_data, tmp_path):
    settings = reviews(tmp_path / "train.csv", [])
    if validation:
        reviews(tmp_path / "validation.csv", ["so it was"])
        settings |= {"source": str(tmp_path), "validation_fraction": None}
    with pytest.raises(ValueError, match=r"^data.source is '.*', whose train split is empty; allowed: 1 row or more$"):
        make_data(**settings, cache_dir=str(tmp_path / "cache")).prepare_data()
