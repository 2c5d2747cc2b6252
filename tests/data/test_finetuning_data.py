"""The data module of fine-tuning: with Lightning and without, resumed, on two processes, and what it refuses."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_linformer.data import FineTuningData
from lit_linformer.data.encoding import text_hash
from lit_linformer.data.selection import select_rows
from tests.data.conftest import make_documents
from tests.data.glue import write_glue
from tests.data.test_pretraining_data import Recorder, recorded, trainer
from tests.data.test_rows import write_json


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """IMDB's layout: 203 training rows of 1 to 40 words, sorted by class; 60 for the test, 7 of them training rows too."""
    root = tmp_path_factory.mktemp("imdb")
    texts = [" ".join(text.split()[: 1 + i % 40]) + f" {i}" for i, text in enumerate(make_documents(260, 5))]
    train, test = texts[:203], texts[200:]
    write_json(root / "train.jsonl", [{"text": t, "label": "neg" if i < 100 else "pos"} for i, t in enumerate(train)])
    tests = [*test[3:56], *train[:4], *test[:3]]
    write_json(root / "test.jsonl", [{"text": t, "label": i % 2} for i, t in enumerate(tests)])
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def make(root, cache):
    def make(**settings):
        small = {"vocab_size": 300, "max_length": 64, "batch_size": 8, "tokenizer": "bpe"}
        return FineTuningData(**({"task": "IMDB", "source": str(root), "cache_dir": cache} | small | settings))

    return make


def ready(data, stage="fit"):
    data.prepare_data()
    data.setup(stage)
    return data


def numbers(rows):
    """The rows of a set, as numbers in the file."""
    return rows.rows.tolist()


def test_without_a_trainer(make):
    data = ready(make())
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape[0] == len(batch["labels"]) == len(batch["index"]) == 8
    assert data.num_tokens == len(data.tokenizer) <= 300 and data.num_labels == 2 and data.max_length == 64
    assert data.evaluation_names == ("",) and data.metrics == ("accuracy",) and data.text_task.name == "IMDB"


def test_labels_and_texts_stay_together(make, root):
    data = ready(make())
    lines = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"], dtype=torch.bool))
            for ids, kept, label, index in zip(batch["input_ids"], mask, batch["labels"], batch["index"], strict=True):
                expected = data.tokenizer.encode(lines[index]["text"])[:62]
                assert ids[kept].tolist() == [data.tokenizer.bos_id, *expected, data.tokenizer.eos_id]
                assert (ids[~kept] == data.tokenizer.pad_id).all()
                assert label == ["neg", "pos"].index(lines[index]["label"])


def test_held_out_rows_are_the_same_for_every_seed_and_no_training_rows(make):
    sets = [ready(make(seed=seed)).sets for seed in (0, 7)]
    assert numbers(sets[0]["validation"]) == numbers(sets[1]["validation"])
    assert len(sets[0]["validation"]) == 20  # a tenth of 203
    assert sorted(numbers(sets[0]["train"]) + numbers(sets[0]["validation"])) == list(range(203))
    assert len(ready(make(validation_fraction=0.5)).sets["validation"]) == 102
    assert ready(make(validation_fraction=0)).sets.keys() == {"train"}


def test_order_is_the_seeds(make):
    first, same, other = ([b["index"].tolist() for b in ready(make(seed=s)).train_dataloader()] for s in (0, 0, 1))
    assert first == same != other


def test_leaked_rows_are_dropped(make, capsys):
    data = ready(make(drop_leaked=True))
    leaked = set(range(4)) | set(range(200, 203))
    held_out = set(numbers(data.sets["validation"]))
    assert set(numbers(data.sets["train"])) == set(range(203)) - leaked - held_out
    dropped = len(leaked - held_out)
    assert f"{dropped} training rows dropped: their texts are in validation or test too\n" in capsys.readouterr().out
    assert leaked - held_out <= set(numbers(ready(make()).sets["train"]))


def test_few_training_rows_are_of_all_classes_and_always_the_same(make):
    rows = numbers(ready(make(limit_train=40)).sets["train"])
    assert rows == numbers(ready(make(limit_train=40, seed=5)).sets["train"]) and len(set(rows)) == 40
    assert rows[:10] == numbers(ready(make(limit_train=10)).sets["train"])
    assert 10 < sum(row < 100 for row in rows) < 30  # the file is sorted by class
    with pytest.raises(ValueError, match=r"^data.limit_train=500 must be at most 183, the training rows there are$"):
        ready(make(limit_train=500))


def test_selection_of_nothing_is_refused():
    hashes = np.arange(5, dtype=np.uint64)
    for fraction, what in ((0.01, "none"), (0.99, "all")):
        with pytest.raises(ValueError, match=rf"^data.validation_fraction={fraction} holds out {what} of 5 rows: it must"):
            select_rows(hashes, fraction)
    with pytest.raises(ValueError, match=r"^data.drop_leaked=True leaves no training row"):
        select_rows(hashes, other_hashes=hashes)
    assert text_hash(("a", "b")) != text_hash(("a b",)) and text_hash((" a\n",)) == text_hash(("a",))


def test_tokenizer_learns_from_rows_that_train_only(tmp_path):
    words = ["".join(chr(ord("a") + int(digit)) for digit in f"{i:03}") * 2 for i in range(300)]
    write_json(tmp_path / "train.jsonl", [{"text": f"{w} {w} {w}", "label": i % 2} for i, w in enumerate(words)])
    write_json(tmp_path / "test.jsonl", [{"text": f"{w} {w} {w}", "label": 0} for w in words[:50]])
    settings = {"source": str(tmp_path), "cache_dir": str(tmp_path / "c"), "tokenizer": "bpe", "vocab_size": 9000}
    data = ready(FineTuningData("IMDB", validation_fraction=0.3, drop_leaked=True, limit_train=100, **settings))
    learnt = {word for word in words if f"Ġ{word}" in data.tokenizer.backend.get_vocab()}
    assert learnt == {words[row] for row in data.sets["train"].rows} and len(learnt) == 100


def test_the_cache_is_made_once(make, tmp_path):
    make().tokenizer.save(tmp_path / "tokenizer.json")
    settings = {"tokenizer": str(tmp_path / "tokenizer.json"), "cache_dir": str(tmp_path / "cache")}
    ready(make(**settings))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    for other in ({}, {"max_length": 40}, {"seed": 4, "limit_train": 9}, {"max_windows": 3}, {"validation_fraction": 0.3}):
        ready(make(**settings, **other))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


def test_mnli_has_two_evaluation_sets(tmp_path, make):
    expected = write_glue(tmp_path, "MNLI")
    data = make(task="MNLI", source=str(tmp_path), cache_dir=str(tmp_path / "cache"), eval_batch_size=3)
    assert data.evaluation_names == ("matched", "mismatched") and data.num_labels == 3
    ready(data)
    for name, loader in zip(data.evaluation_names, data.val_dataloader(), strict=True):
        batches = list(loader)
        assert [len(batch["index"]) for batch in batches] == [3, 1]
        found = {i: label for b in batches for i, label in zip(b["index"].tolist(), b["labels"].tolist(), strict=True)}
        assert [found[i] for i in range(4)] == [row.label for row in expected[f"validation_{name}"]]
    data.setup("test")
    assert ["labels" in next(iter(loader)) for loader in data.test_dataloader()] == [False, False]
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    with pytest.raises(ValueError, match=r"has no validation_mismatched split: it must be .*dev_mismatched.tsv"):
        make(task="MNLI", source=str(tmp_path)).prepare_data()


@pytest.mark.parametrize("task", ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "QNLI", "RTE", "WNLI"])
def test_glue(tmp_path, make, task):
    expected = write_glue(tmp_path, task)
    data = ready(make(task=task, source=str(tmp_path), cache_dir=str(tmp_path / "cache"), vocab_size=270))
    (batch,) = data.val_dataloader()
    found = dict(zip(batch["index"].tolist(), batch["labels"].tolist(), strict=True))
    assert [found[i] for i in range(4)] == [row.label for row in expected["validation"]]
    assert batch["labels"].dtype == (torch.float32 if task == "STS-B" else torch.int64)
    data.setup("test")
    (batch,) = data.test_dataloader()
    assert "labels" not in batch and sorted(batch["index"].tolist()) == list(range(4))


def test_a_validation_split_that_must_be_there(tmp_path, make):
    write_glue(tmp_path, "RTE")
    with pytest.warns(UserWarning, match=r"data.validation_fraction=0.25 is ignored: .* has a validation split"):
        ready(make(task="RTE", source=str(tmp_path), cache_dir=str(tmp_path / "cache"), validation_fraction=0.25))
    (tmp_path / "RTE" / "dev.tsv").unlink()
    with pytest.raises(ValueError, match=r"no validation split: it must be .*dev.tsv, .* or data.validation_fraction a share"):
        make(task="RTE", source=str(tmp_path)).prepare_data()
    data = ready(make(task="RTE", source=str(tmp_path), cache_dir=str(tmp_path / "cache"), validation_fraction=0.25))
    assert len(data.sets["validation"]) == 1


def test_a_task_of_ones_own(tmp_path, make):
    rows = [{"title": f"t {i}", "body": "b", "stars": i / 4} for i in range(20)]
    write_json(tmp_path / "train.jsonl", rows)
    own = {"task": None, "source": str(tmp_path), "columns": ["title", "body"], "label_column": "stars"}
    data = ready(make(**own, cache_dir=str(tmp_path / "cache")))
    assert data.num_labels == 1 and data.metrics == ("pearson", "spearman") and len(data.sets["validation"]) == 2
    batch = next(iter(data.train_dataloader()))
    assert batch["labels"].tolist() == [i / 4 for i in batch["index"].tolist()]


def test_a_hub_folder_is_asked_for_its_splits_once(tmp_path, make, root, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "train.jsonl").write_text("".join(
        json.dumps({"text": row["text"], "label": ["neg", "pos"].index(row["label"])}) + "\n"
        for row in map(json.loads, (root / "train.jsonl").read_text().splitlines())
    ))  # fmt: skip
    (hub / "test.jsonl").write_text((root / "test.jsonl").read_text())
    settings = {"source": f"hub:{hub}", "cache_dir": str(tmp_path / "cache")}
    data, local = ready(make(**settings)), ready(make())
    assert [b["input_ids"].tolist() for b in data.val_dataloader()] == [b["input_ids"].tolist() for b in local.val_dataloader()]
    again = ready(make(**settings))
    assert "_hub_rows" not in again.source.__dict__  # neither datasets nor the network


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", [3, 11])
def test_lightning_resumes_exactly(make, tmp_path, num_workers, steps):
    """Stopped in and at the end of epochs, with accumulation and with validation in mid-epoch."""
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}
    settings = {"max_steps": 14, "num_sanity_val_steps": 0} | settings
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    trainer(**settings).fit(Recorder(tmp_path / "whole"), make(num_workers=num_workers))
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_top_k=0)
    first = trainer(**(settings | {"max_steps": steps, "callbacks": [checkpoint], "enable_checkpointing": True}))
    first.fit(Recorder(tmp_path / "parts"), make(num_workers=num_workers))
    resumed = make(num_workers=num_workers)
    trainer(**settings).fit(Recorder(tmp_path / "parts"), resumed, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    whole, parts = recorded(tmp_path / "whole"), recorded(tmp_path / "parts")
    assert len(whole) == 28 and whole == parts
    assert resumed.state_dict()["samples"] == 28 * 8


def test_two_processes_read_what_one_reads(make, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    trainer(max_steps=9, num_sanity_val_steps=-1).fit(Recorder(tmp_path / "one"), make(batch_size=16))
    two = trainer(max_steps=9, num_sanity_val_steps=-1, devices=2, strategy="ddp_fork")
    two.fit(Recorder(tmp_path / "two"), make(batch_size=8))
    one, ranks = recorded(tmp_path / "one"), [recorded(tmp_path / "two", rank=rank) for rank in range(2)]
    assert len(one) == len(ranks[0]) == len(ranks[1]) == 9
    for together, *parts in zip(one, *ranks, strict=True):
        assert [together["index"][0::2], together["index"][1::2]] == [part["index"] for part in parts]
    validations = [recorded(tmp_path / "two", "validation", rank) for rank in range(2)]
    assert len(validations[0]) == len(validations[1])
    seen = [i for each in validations for batch in each for i in batch["index"] if i >= 0]
    assert sorted(seen) == sorted(i for batch in recorded(tmp_path / "one", "validation") for i in batch["index"])


def test_a_second_fit_starts_anew_and_overfitting_repeats_its_rows(make, tmp_path):
    data = make()
    for _ in range(2):
        trainer(max_steps=3, num_sanity_val_steps=0).fit(Recorder(tmp_path), data)
    lines = recorded(tmp_path)
    assert len(lines) == 6 and lines[:3] == lines[3:]
    (tmp_path / "over").mkdir()
    trainer(overfit_batches=2, max_epochs=3).fit(Recorder(tmp_path / "over"), make())
    lines = recorded(tmp_path / "over")
    assert len({i for line in lines for i in line["index"]}) == 16 and len(lines) == 6


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_each_stage_stands_alone(make, tmp_path, stage):
    getattr(trainer(), stage)(Recorder(tmp_path), make())
    lines = recorded(tmp_path, "validation" if stage == "validate" else "other")
    assert sum(len(line["index"]) for line in lines) == (20 if stage == "validate" else 60)


def test_other_data_on_resume_is_announced(make):
    data = ready(make())
    with pytest.warns(UserWarning, match=r"the checkpoint saw other data \(texts-0123, now texts-"):
        data.load_state_dict({"samples": 40, "tokens": "texts-0123"})
    assert data.train_dataloader().samples == 40
    assert ready(make(limit_train=20)).state_dict()["tokens"] != data.state_dict()["tokens"]


# Predicting


def predicted(data):
    data.setup("predict")
    batches = list(data.predict_dataloader())
    return [text for batch in batches for text in batch["texts"]], batches


def test_predict_texts_from_a_string_a_list_and_a_file(make, tmp_path):
    (tmp_path / "lines.txt").write_text("\ufeffsecond text\n\n  third  \n", encoding="utf-8")
    assert predicted(make(text="one"))[0] == ["one"]
    assert predicted(make(text=["one", "two"]))[0] == ["one", "two"]
    assert predicted(make(file=str(tmp_path / "lines.txt")))[0] == ["second text", "  third  "]
    data = make(text="the first", file=str(tmp_path / "lines.txt"), eval_batch_size=2)
    texts, (first, second) = predicted(data)
    assert texts == ["the first", "second text", "  third  "] and second["index"].tolist() == [2]
    encode, tokenizer = data.tokenizer.encode, data.tokenizer
    for ids, mask, text in zip(first["input_ids"], first["attention_mask"], texts, strict=False):
        assert ids[mask].tolist() == [tokenizer.bos_id, *encode(text.strip()), tokenizer.eos_id]
    assert second["input_ids"].tolist() == [[tokenizer.bos_id, *encode("third"), tokenizer.eos_id]]


def test_predict_pairs(make, tmp_path):
    (tmp_path / "lines.txt").write_text("a b\tc d\ne\tf\n")
    pairs = {"task": "RTE", "tokenizer": str(tmp_path / "tokenizer.json"), "source": "nowhere"}
    make().tokenizer.save(tmp_path / "tokenizer.json")
    data = make(**pairs, text=["x", "y"], text_pair=["1", "2"], file=str(tmp_path / "lines.txt"))
    texts, (batch,) = predicted(data)
    assert texts == [["x", "1"], ["y", "2"], ["a b", "c d"], ["e", "f"]]
    bos, eos, encode = data.tokenizer.bos_id, data.tokenizer.eos_id, data.tokenizer.encode
    assert batch["input_ids"][2].tolist()[: batch["attention_mask"][2].sum()] == [
        bos, *encode("a b"), eos, eos, *encode("c d"), eos,
    ]  # fmt: skip
    assert predicted(make(**pairs, text="x", text_pair="1"))[0] == [["x", "1"]]


def test_predict_windows(make):
    _, (batch,) = predicted(make(text=["the " * 40, "of"], max_length=16, max_windows=2, window_overlap=4))
    assert batch["document"].tolist() == [0, 0, 1] and batch["index"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, r"^nothing to predict: give data.text .* or data.file"),
        ({"text": " "}, r"^data.text: \(' ',\) holds an empty text"),
        ({"file": "no/such/file"}, r"^data.file='no/such/file' cannot be read"),
        ({"file": "pairs"}, r"^data.file='.*', line 2 has 2 fields: it must hold one text without a tab$"),
        ({"file": "pairs", "task": "RTE"}, r"^data.file='.*', line 1 has 1 fields: it must hold two texts divided by a tab$"),
        ({"text": "x", "text_pair": "y"}, r"^data.text_pair='y' must be left out: the task has one text a row$"),
        (
            {"text": ["x", "y"], "text_pair": "z", "task": "RTE"},
            r"^data.text_pair must have as many texts as data.text, 2, it has 1",
        ),
    ],
)
def test_bad_predictions(make, tmp_path, settings, message):
    if settings.get("file") == "pairs":
        (tmp_path / "pairs").write_text("one\ntwo\tthree\n")
        settings = settings | {"file": str(tmp_path / "pairs")}
    with pytest.raises(ValueError, match=message):
        make(**settings).setup("predict")


# What it refuses


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"task": "IMDBB"}, r"^data.task is 'IMDBB'; allowed: CoLA, .*; did you mean 'IMDB'\?$"),
        ({"task": None}, r"^data.task is not given; allowed: CoLA, .*, or data.columns, which describes a task of your own$"),
        ({"columns": ["text"]}, r"^data.columns=\['text'\] must be left out for data.task='IMDB'"),
        ({"metrics": ["f1"]}, r"^data.metrics=\['f1'\] must be left out for data.task='IMDB'"),
        ({"task": None, "columns": ["a"], "source": None}, r"^data.source is not given: it must be a folder"),
        ({"task": None, "columns": ["a"], "metrics": ["f1"]}, r"^data.metrics: 'f1' is not for a regression"),
        ({"tokenizer": None}, r"^data.tokenizer is not given; allowed: .*model.pretrained carries one over"),
        ({"vocab_size": 100}, r"^data.vocab_size=100 must be at least 261 for data.tokenizer=bpe$"),
        ({"max_length": 7}, r"^data.max_length=7 must be at least 8$"),
        ({"batch_size": 0}, r"^data.batch_size=0 must be at least 1$"),
        ({"eval_batch_size": 0}, r"^data.eval_batch_size=0 must be at least 1$"),
        ({"limit_train": 0}, r"^data.limit_train=0 must be at least 1$"),
        ({"num_workers": -1}, r"^data.num_workers=-1 must be at least 0$"),
        ({"seed": -1}, r"^data.seed=-1 must be at least 0$"),
        ({"validation_fraction": 1.0}, r"^data.validation_fraction=1.0 must be at least 0 and below 1$"),
        ({"empty_texts": "drop"}, r"^data.empty_texts='drop' must be 'error' or 'keep'$"),
        ({"truncation": "only_first"}, r"^data.truncation='only_first' must be longest_first for a task with one text$"),
        ({"max_windows": 2, "task": "RTE"}, r"^data.max_windows=2 must be 1 for pairs of texts$"),
        ({"source": ""}, r"^data.source is empty"),
    ],
)
def test_bad_settings_are_refused_when_the_object_is_built(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_nothing_given_means_the_hub_and_512(make):
    data = make(source=None, max_length=None)
    assert data.source.hub == ["stanfordnlp/imdb", "plain_text"] and data.max_length == 512


def test_an_unlabelled_test_of_ones_own_cannot_be_scored(tmp_path, make, root):
    write_json(tmp_path / "test.jsonl", [{"text": "fine"}, {"text": "bad"}])
    (tmp_path / "train.jsonl").write_text((root / "train.jsonl").read_text())
    data = make(source=str(tmp_path), cache_dir=str(tmp_path / "cache"), drop_leaked=True)
    data.prepare_data()  # texts without labels do to look for leaks
    with pytest.raises(ValueError, match=r"its test split has no labels: it must .*`predict` with data.file classifies"):
        data.setup("test")


def test_a_text_that_may_not_be_cut_is_named_by_its_row(tmp_path, make):
    rows = [{"premise": "short", "hypothesis": "the " * (30 * (i == 5) + 1), "label": i % 2} for i in range(9)]
    for split in ("train", "validation"):
        write_json(tmp_path / f"{split}.jsonl", rows)
    own = {"task": None, "columns": ["premise", "hypothesis"], "labels": ["a", "b"], "max_length": 20}
    settings = {**own, "source": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    ready(make(**settings, truncation="only_second"))
    with pytest.raises(ValueError, match=r"^data.truncation='only_first': row 5 \(from 0\) of the train split has a text too"):
        ready(make(**settings, truncation="only_first"))


def test_importing_costs_no_heavy_library():
    heavy = {"datasets", "pyarrow", "pandas"}
    if find_spec("transformers") is None:  # which torchmetrics imports where it is installed, and it the tokenizers
        heavy.add("tokenizers")
    program = f"import sys; from lit_linformer.data import FineTuningData, PretrainingData; print({heavy} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "set()\n"
