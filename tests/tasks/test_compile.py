"""torch.compile as a setting: the same training and checkpoints, few graphs, and one line if there is no compiler."""

import copy
import functools
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
from lightning.pytorch import Callback
from torch._dynamo.utils import counters

from lit_linformer.data import LongRangeData, RecallData
from lit_linformer.model import EncoderConfig, EncoderLayer, MaskedLanguageModel
from lit_linformer.tasks import MLM, Recall, SequenceClassification
from lit_linformer.tasks.compiling import compile_training
from tests.data.recorder import trainer
from tests.helpers import assert_same, fit, load, output, read_log, slow
from tests.model.mechanisms import IMAGE, MECHANISMS, MODERNS

SHAPE = {"vocab_size": 60, "max_length": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}


@pytest.fixture
def traced(monkeypatch):
    """torch.compile that traces and guards as usual, but runs the traced graph without a compiler: exact and fast."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def encoder(**settings):
    return EncoderConfig(**{**SHAPE, "projection_dim": 8, "dropout": 0.0, "attention_dropout": 0.0, **settings})


def mlm_batch(mask=False):
    batch = {name: torch.randint(1, 60, (3, n)) for name, n in (("input_ids", 32), ("labels", 5))}
    batch |= {"positions": torch.arange(5).repeat(3, 1)}
    return batch | ({"attention_mask": torch.arange(32) < torch.tensor([[32], [32], [20]])} if mask else {})


def loss_of(model, batch):
    """training_step without a trainer."""
    model.count = model.log = lambda *args, **kwargs: None
    model.optimizers = lambda: torch.optim.SGD(model.parameters())
    return model.training_step(batch, 0)


@pytest.mark.slow
def test_compiled_training_is_the_same_to_rounding(tiny, tmp_path):
    # In processes of their own: a later test could not fork from this one with what the compiler leaves behind.
    small = "--model.encoder.num_layers 1 --model.encoder.dropout 0 --model.encoder.attention_dropout 0 --trainer.max_steps 4"
    logs = {}
    for name in ("true", "false"):
        assert fit(tiny, name, tmp_path / name, *small.split(), "--model.compile", name) == 0
        logs[name] = [float.fromhex(line["loss"]) for line in read_log(tmp_path / f"{name}.0").values()]
    assert logs["true"] == pytest.approx(logs["false"], abs=1e-4) and logs["true"] != logs["false"]
    compiled, plain = (load(tmp_path / f"runs/{name}/checkpoints/last.ckpt")["state_dict"] for name in logs)
    assert list(compiled) == list(plain)
    for name, weight in plain.items():
        assert torch.allclose(weight, compiled[name], atol=1e-3), name


@pytest.mark.parametrize(
    "settings",
    [
        *({"sharing": sharing} for sharing in ("none", "headwise", "key-value")),
        {"activation_checkpointing": True, "local_width": 3, "norm": "pre"},
        {"projection": "mean", "mass_bias": True},
        {"short_rows": "mean"},
        {"attention": "full"},
        {"attention": "lookup"},
        IMAGE | {"max_length": 36, "projection_dim": 9},
        *map(slow, MECHANISMS.values()),
        *(MODERNS[f"modern {name}"] for name in ("full", "lookup")),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_a_layers_rows_of_one_length_are_one_graph_and_those_with_pads_another(settings, traced):
    model = MLM(encoder(**settings))
    plain = copy.deepcopy(model.net)
    compile_training(model.net)
    for mask in (False, False, True, False, True):
        batch = mlm_batch(mask)
        loss = loss_of(model, batch)
        loss.backward()
        assert torch.equal(loss, plain.loss(**batch))
    assert traced() == 2 + 1  # the third is the loss over the vocabulary


@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        ({}, 1),
        ({"attention": "lookup", "attention_options": {"window": 4}}, 2),
        ({"projection_dim": [8, 8, 4, 8], "sharing": "none"}, 2),
    ],
    ids=["alike", "lookup and window", "two k"],
)
def test_layers_of_one_kind_share_a_graph_and_evaluation_has_none(settings, graphs, traced):
    net = MLM(encoder(num_layers=4, **settings)).net
    plain, batch = copy.deepcopy(net), mlm_batch()
    compile_training(net)
    assert torch.equal(net.eval().loss(**batch), plain.loss(**batch)) and traced() == 0
    assert torch.equal(net.train().loss(**batch), plain.loss(**batch)) and traced() == graphs + 1


def test_a_copy_is_compiled_with_weights_of_its_own(traced):
    net = MLM(encoder()).net
    compile_training(net)
    other, batch = copy.deepcopy(net), mlm_batch()
    with torch.no_grad():
        other.encoder.layers[0].up.weight.normal_()
    before = net.loss(**batch)
    assert not torch.equal(other.loss(**batch), before) and torch.equal(net.loss(**batch), before)
    other.loss(**batch).backward()
    assert net.encoder.layers[0].up.weight.grad is None and traced() == 2


def test_batches_of_any_length_are_three_graphs(traced):
    model = SequenceClassification(encoder=encoder(), compile=True, dropout=0.0, attention_dropout=0.0)
    compile_training(model.net, dynamic=True)
    lengths = [20, 5, 32, 31, 6, 9, 12, 32, 7, 8, 30]
    for number, n in enumerate(lengths):
        batch = {"input_ids": torch.randint(1, 60, (4, n)), "labels": torch.randint(2, (4,)), "index": torch.arange(4)}
        if number % 3:
            batch["attention_mask"] = torch.arange(n) < torch.randint(1, n + 1, (4, 1))
        loss = loss_of(model, batch)
        loss.backward()
        assert torch.allclose(loss, torch.nn.functional.cross_entropy(model.eval()(batch), batch["labels"]), atol=1e-6)
        model.train()
    assert traced() <= 3


@pytest.mark.parametrize("equal", [True, False])
def test_images_are_compiled_without_a_mask(equal):
    model = SequenceClassification(encoder=encoder(), compile=True, dropout=0.0, attention_dropout=0.0)
    model.trainer, masks = SimpleNamespace(datamodule=SimpleNamespace(equal_rows=equal)), []
    model.net.forward = lambda ids, mask, *rest: masks.append(mask) or torch.zeros(len(ids), 2)
    ids, labels = torch.randint(1, 60, (4, 32)), torch.randint(2, (4,))
    model.training_loss({"input_ids": ids, "labels": labels, "index": torch.arange(4)})
    assert (masks[0] is None) == equal and (equal or masks[0].all())


class Watch(Callback):
    def __init__(self):
        self.lengths, self.cudnn = set(), set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.lengths.add(batch["input_ids"].shape[1])
        self.cudnn.add(torch.backends.cuda.cudnn_sdp_enabled())


@pytest.mark.parametrize("attention", ["linformer", slow("lookup"), slow("full")])
@pytest.mark.parametrize("equal", [slow(True), False])
def test_for_unequal_rows_nothing_is_made_anew_for_each_length(equal, attention, traced, tmp_path):
    if equal:
        data = RecallData(max_length=32, pairs=3, vocab_size=60, rows=40, validation_rows=4, batch_size=4)
    else:
        rows = {"rows": 40, "held_out_rows": 4, "batch_size": 4}
        data = LongRangeData(masked=True, max_length=2048, cache_dir=str(tmp_path), **rows)
    settings = encoder(max_length=data.max_length, attention=attention)
    module = (Recall if equal else MLM)(encoder=settings, vocab_size=data.num_tokens, compile=True, warmup_steps=0)
    watch = Watch()
    steps = {"max_steps": 10, "max_epochs": -1, "limit_val_batches": 0, "use_distributed_sampler": False}
    trainer(**steps, callbacks=[watch]).fit(module, data)
    assert (len(watch.lengths) == 1) == equal and (equal or len(watch.lengths) > 5)
    assert traced() <= 1 + 2 + 2  # the check for a compiler; a layer; the loss
    assert watch.cudnn == {equal} and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.slow
def test_runs_go_on_compiled_or_not(tiny, tmp_path, traced):
    words = {True: ["--model.compile", "true"], False: []}
    tiny = [*tiny, "--model.encoder.local_width", "0"]  # to be exact: compiled, the local convolution adds in another order
    for name, first, then in (("plain", False, False), ("off", True, False), ("on", False, True)):
        if name == "on":  # its first part equals plain's
            shutil.copytree("runs/before", "runs/on")
        else:
            output(["fit", *tiny, "--name", name, *words[first], "--trainer.max_steps", "3"], tmp_path)
        if name == "plain":
            shutil.copytree("runs/plain", "runs/before")
        more = ["--trainer.max_steps", "6", "--ckpt_path", "last"]
        shown = output(["fit", *tiny, "--name", name, *words[then], *more], tmp_path)
        assert (f"model.compile: {first} → {then}" in shown) == (first != then)
    finals = {name: load(tmp_path / f"runs/{name}/checkpoints/last.ckpt") for name in ("plain", "off", "on")}
    for name in ("off", "on"):
        assert "compile" not in finals[name]["hyper_parameters"]
        for part in ("state_dict", "optimizer_states"):
            assert_same(finals["plain"][part], finals[name][part], part)


def test_a_model_without_an_encoder_is_refused():
    with pytest.raises(ValueError, match=r"model.compile is true, but Linear has no encoder to compile; allowed: false"):
        compile_training(torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_without_a_compiler_it_says_so(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # Like CXX=no-such-compiler; with the config's own patch, as pytest's would leave the setting deleted.
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        shown = output(["fit", *tiny, "--model.compile", "true"], tmp_path, status=2).splitlines()[-1]
    assert shown.startswith("error: model.compile is true, but torch.compile fails here: ")
    assert "no-such-compiler" in shown and "allowed: false, or install" in shown


class Positive(EncoderLayer):
    """A layer of a user's own."""

    def forward(self, x, attention_mask, need_weights, given):
        return super().forward(x.relu(), attention_mask, need_weights, given)


def test_a_layer_of_ones_own_is_compiled_as_it_is(traced):
    model, batch = MLM(encoder(), warmup_steps=0), mlm_batch()
    model.net.encoder.layers[0].__class__ = Positive
    plain = model.training_loss(batch)
    compile_training(model.net)
    torch.testing.assert_close(model.training_loss(batch), plain)


class Smoothed(MaskedLanguageModel):
    """A net of a user's own, with another loss."""

    def loss_of(self, hidden, positions, labels):
        return super().loss_of(hidden, positions, labels) + hidden.square().mean()


def test_a_loss_of_ones_own_is_compiled_as_it_is(traced):
    model, batch = MLM(encoder(), warmup_steps=0), mlm_batch()
    model.net.__class__ = Smoothed
    plain = model.training_loss(batch)
    compile_training(model.net)
    torch.testing.assert_close(model.training_loss(batch), plain)
