"""Recall's rows: each masked value follows its key elsewhere, and nothing else reveals it; accuracy counts those found."""

import json
import pickle

import pytest
import torch
from lightning.pytorch import Trainer

from lit_linformer.data import RecallData
from lit_linformer.data.loader import FILLER
from lit_linformer.data.recall import BOS, MASK
from lit_linformer.model import EncoderConfig
from lit_linformer.tasks import Recall
from tests.helpers import output

SHAPE = {"max_length": 64, "pairs": 6, "vocab_size": 60, "rows": 40, "validation_rows": 10, "batch_size": 4}


def data(**settings):
    made = RecallData(**{**SHAPE, **settings})
    made.setup()
    return made


@pytest.mark.parametrize(("distance", "gap"), [(0, 0), (9, 0), (0, 2), (5, 1)])
def test_a_row_tells_each_value_that_it_asks_for(distance, gap):
    for batch in data(distance=distance, gap=gap).val_dataloader():
        for ids, positions, labels in zip(
            batch["input_ids"].tolist(), batch["positions"], batch["labels"].tolist(), strict=True
        ):
            assert ids[0] == BOS and len(ids) == 64 and ids.count(MASK) == 6 == len(set(positions.tolist()))
            asked = [place - 1 - gap for place in positions.tolist()]
            assert positions.tolist() == sorted(positions.tolist()) and all(ids[place + 1 + gap] == MASK for place in asked)
            assert len({ids[place] for place in asked}) == 6
            for place, value in zip(asked, labels, strict=True):
                assert 3 <= ids[place] < 22 <= value < 41  # a third of the 57 for each
                (told,) = (other for other, token in enumerate(ids) if token == ids[place] and other != place)
                assert ids[told + 1 + gap] == value and place - (told + 1 + gap) > distance
            noise = [ids[place] for place in range(1, 64) if place not in {p + shift for p in asked for shift in (0, 1 + gap)}]
            assert sum(token < 41 for token in noise) == 12  # the pairs alone


def test_rows_hang_on_number_and_seed_and_held_out_ones_on_the_number():
    one, same, other = data(seed=1), data(seed=1), data(seed=2)
    first = one.datasets["train"].row(3)
    assert all((a == b).all() for a, b in zip(first, same.datasets["train"].row(3), strict=True))
    for rows in (other.datasets["train"].row(3), one.datasets["train"].row(4), one.datasets["validation"].row(3)):
        assert (first[0] != rows[0]).any()
    assert (one.datasets["test"].row(3)[0] == other.datasets["test"].row(3)[0]).all()
    batch = one.datasets["validation"][[(0, 2), (0, -1)]]  # a filler has no labels
    assert (batch["labels"][0] > 0).all() and (batch["labels"][1] == -100).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pairs": 200}, "data.pairs is 200; allowed: up to 15 with data.max_length = 64"),
        ({"pairs": 9, "distance": 31}, "data.pairs is 9; allowed: up to 8 with data.max_length = 64, data.distance = 31"),
        ({"gap": 80}, "data.pairs is 6; allowed: a longer data.max_length"),
        ({"vocab_size": 20}, "data.vocab_size is 20; allowed with data.pairs = 6: 21 or more"),
        ({"pairs": 0}, "data.pairs is 0; allowed: 1 or more"),
        ({"distance": -1}, "data.distance is -1; allowed: 0 or more"),
    ],
)
def test_what_cannot_be_made_is_refused(settings, said):
    with pytest.raises(ValueError, match=said.replace(".", "\\.")):
        data(**settings)


def test_accuracy_is_the_share_of_values_found(tmp_path):
    torch.manual_seed(0)
    shape = {"vocab_size": 60, "max_length": 64, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
    model = Recall(encoder=EncoderConfig(**shape, projection_dim=8, dropout=0.0, attention_dropout=0.0)).eval()
    torch.nn.init.normal_(model.net.encoder.tokens.weight)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    batches = []
    model.net.encoder.register_forward_hook(lambda *_: batches.append(1))
    (found,) = trainer.validate(model, data(validation_rows=40), verbose=False)
    assert len(batches) == len(data(validation_rows=40).val_dataloader())  # each is read once
    right = asked = 0
    for batch in data(validation_rows=40).val_dataloader():
        values = model.net(batch["input_ids"], None, batch["positions"]).argmax(-1)
        right, asked = right + (values == batch["labels"]).sum().item(), asked + values.numel()
    assert asked == 240 and found["val/accuracy"] == pytest.approx(right / asked) and found["val/perplexity"] > 1


def test_rows_that_fill_up_a_batch_do_not_lower_the_accuracy(monkeypatch):
    model = Recall(encoder=EncoderConfig(vocab_size=60, max_length=64, hidden_size=8, num_heads=2, projection_dim=8))
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    labels = data().val_dataloader().dataset[[(0, 0), (0, FILLER)]]["labels"]
    model._score(torch.nn.functional.one_hot(labels.clamp(min=0), 60).float(), labels, model.val_perplexity, "val/perplexity")
    assert model.val_accuracy.compute() == 1.0


@pytest.mark.slow
def test_a_run_trains_resumes_and_tests(tmp_path, monkeypatch):
    """conf/recall/small.yaml, shortened; an interrupted run and an uninterrupted one see the same rows."""
    from pathlib import Path

    config = Path(__file__).parents[2] / "conf/recall/small.yaml"
    monkeypatch.chdir(tmp_path)
    argv = [
        "--config",
        str(config),
        "--data.validation_rows",
        "8",
        "--trainer.val_check_interval",
        "2",
        "--last.every_n_steps",
        "2",
    ]
    whole, half = ([*argv, "--name", name, "--trainer.max_steps", "4"] for name in ("whole", "half"))
    output(["fit", *whole], tmp_path)
    output(["fit", *half[:-1], "2"], tmp_path)
    output(["fit", *half, "--ckpt_path", "last"], tmp_path)
    for name in ("whole", "half"):
        assert "val/accuracy" in json.loads((tmp_path / f"runs/{name}/result.json").read_text())["metrics"]
    assert "test/accuracy" in output(["test", *whole], tmp_path)
    refused = output(["fit", *argv, "--name", "bad", "--data.pairs", "64"], tmp_path, 2)
    assert "error: data.pairs is 64; allowed: up to 31 with data.max_length = 128" in refused


def test_rows_go_to_processes_that_are_not_forked():
    made = data()
    made.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    made.trainer.hook = lambda: None  # which cannot be pickled
    rows = made.datasets["train"]
    again = pickle.loads(pickle.dumps(rows))
    assert all(torch.equal(one, other) for one, other in zip(rows[[(0, 3)]].values(), again[[(0, 3)]].values(), strict=True))
