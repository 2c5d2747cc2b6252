"""Parameter groups, the learning rate, and 16-bit gradients."""

import copy
import itertools
from pathlib import Path

import pytest
import torch

from lit_linformer.data import PretrainingData
from lit_linformer.model import EncoderConfig, MaskedLanguageModel, SequenceClassifier
from lit_linformer.tasks import MLM
from lit_linformer.tasks.muon import QUINTIC, MuonAndAdamW, orthogonalized
from lit_linformer.tasks.optim import Optimization, layer_decay, parameter_groups
from tests.cli.test_errors import complaint
from tests.helpers import load, output


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value", "layerwise"])
def test_every_parameter_is_in_one_group_by_its_kind(sharing):
    config = EncoderConfig(
        vocab_size=50, max_length=16, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=16, projection_dim=4,
        sharing=sharing, local_width=3, norm="pre",
    )  # fmt: skip
    model = MaskedLanguageModel(config)
    groups = {group["name"]: group for group in parameter_groups(model, 1.0, Optimization(1.0, None, 0.1, 0.3, 0.05))}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "decay": (1.0, 0.1),
        "no_decay": (1.0, 0.0),
        "projection": (0.3, 0.05),
    }
    group_of = {id(parameter): name for name, group in groups.items() for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters())) == len(group_of)
    for name, parameter in model.named_parameters():
        if ".E." in f".{name}" or ".F." in f".{name}":
            expected = "projection"
        elif name.endswith("bias") or "norm" in name or "tokens" in name or "positions" in name:
            expected = "no_decay"
        else:
            expected = "decay"
        assert group_of[id(parameter)] == expected, name


def test_a_transformer_has_no_projection_group():
    config = EncoderConfig(vocab_size=50, max_length=16, hidden_size=8, num_layers=1, num_heads=2, attention="full")
    names = [group["name"] for group in parameter_groups(MaskedLanguageModel(config), 1, Optimization())]
    assert names == ["decay", "no_decay"]


def muon_groups(factor=2.0, **encoder):
    shape = {"vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16}
    config = EncoderConfig(**{**shape, "projection_dim": 4, "local_width": 3, "sharing": "headwise", **encoder})
    torch.manual_seed(0)
    model = MaskedLanguageModel(config)
    settings = Optimization(1.0, None, 0.1, 0.3, 0.05, optimizer="muon", muon_lr_factor=factor)
    return model, parameter_groups(model, 0.01, settings)


def test_muon_is_for_the_layers_matrices():
    model, groups = muon_groups(feed_forward="geglu", projection="gated")
    of = {group["name"]: group for group in groups}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)].split(".", 3)[-1] for parameter in of["muon"]["params"]}
    linears = ("attention.query", "attention.key", "attention.value", "attention.out", "gate", "up", "down")
    assert found == {f"{name}.weight" for name in linears}
    assert len(of["muon"]["params"]) == 2 * 7 and (of["muon"]["lr"], of["muon"]["weight_decay"]) == (0.02, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def stepped(model, optimizers, seeds):
    """Takes a step for each seed, with gradients that depend on it, each of another order of magnitude."""
    for seed in seeds:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 10.0**-seed
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_and_adamw_are_one_optimiser_and_torchs_two():
    model, groups = muon_groups()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    one = stepped(model, [MuonAndAdamW(groups, (0.9, 0.98), 1e-6)], range(3))
    model, groups = muon_groups()
    own = next(group for group in groups if group["name"] == "muon")
    muon = torch.optim.Muon([own], adjust_lr_fn="match_rms_adamw")
    rest = [group for group in groups if group["name"] != "muon"]
    two = stepped(model, [muon, torch.optim.AdamW(rest, betas=(0.9, 0.98), eps=1e-6, fused=True)], range(3))
    muons = {id(parameter) for parameter in own["params"]}
    for parameter, a, b, before in zip(model.parameters(), one, two, start, strict=True):
        if id(parameter) in muons:  # torch's rounds to bfloat16, so the two are 0.014 apart here
            assert not torch.equal(b, before) and (a - b).norm() < 0.04 * (b - before).norm()
        else:
            assert torch.equal(a, b)


def test_a_step_of_muon_is_what_is_written_out():
    """Exactly: torch's own, above, rounds away a weight decay and another momentum."""
    torch.manual_seed(0)
    weight, other = torch.nn.Parameter(torch.randn(6, 3)), torch.nn.Parameter(torch.ones(1))
    rates = {"lr": 0.1, "weight_decay": 2.0}
    optimizer = MuonAndAdamW([{"name": "muon", "params": [weight], **rates}, {"params": [other], **rates}], (0.9, 0.98), 1e-6)
    expected, momentum = weight.detach().clone(), torch.zeros(6, 3)
    for _ in range(3):
        weight.grad = torch.randn(6, 3)
        momentum = 0.95 * momentum + 0.05 * weight.grad
        ahead = 0.95 * momentum + 0.05 * weight.grad
        expected = (1 - 0.1 * 2.0) * expected - 0.1 * 0.2 * 6**0.5 * orthogonalized(ahead[None])[0]
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (1, 8, 24)])
def test_newton_schulz_changes_singular_values_alone(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
    torch.testing.assert_close(orthogonalized(matrices), u * s[:, None] @ v)
    torch.testing.assert_close(orthogonalized(matrices)[:1], orthogonalized(matrices[:1]))  # in a batch as alone
    assert orthogonalized(torch.zeros(shape)).eq(0).all()


def test_muon_goes_on_from_its_state():
    model, groups = muon_groups()
    whole = stepped(model, [MuonAndAdamW(groups, (0.9, 0.98), 1e-6)], range(4))
    model, groups = muon_groups()
    first = MuonAndAdamW(groups, (0.9, 0.98), 1e-6)
    stepped(model, [first], range(2))
    state = copy.deepcopy(first.state_dict())
    weights = copy.deepcopy(model.state_dict())
    again, groups = muon_groups()
    again.load_state_dict(weights)
    second = MuonAndAdamW(groups, (0.9, 0.98), 1e-6)
    second.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(whole, stepped(again, [second], range(2, 4)), strict=True))
    for group in second.param_groups:  # a step uses the rate that a schedule sets
        group["lr"] = 0.0
    stepped(again, [second], [4])
    assert all(torch.equal(a, b) for a, b in zip(whole, again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"schedule": "wsd", "decay_share": None},
            "model.decay_share is null; allowed with model.schedule='wsd': more than 0, up to 1",
        ),
        ({"optimizer": "lion"}, "model.optimizer is 'lion'; allowed: adamw, muon"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        Optimization(**settings)


def test_sharded_matrices_are_not_muons():
    shape = {"vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "projection_dim": 4}
    model = MLM(EncoderConfig(**shape), optimizer="muon")
    model._device_mesh = object()
    with pytest.raises(ValueError, match=r"model.optimizer is 'muon', but trainer.strategy divides each matrix .* adamw"):
        model.configure_model()


def test_warm_up_stable_decay():
    settings = Optimization(schedule="wsd", final_lr_factor=0.1, decay_share=0.25)
    factors = [settings.lr_factor(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10:76] == [1.0] * 66
    assert all(a > b for a, b in itertools.pairwise(factors[75:]))
    assert factors[75 + 9] == pytest.approx(0.1 + 0.9 * (1 - 0.6)) and factors[100] == pytest.approx(0.1)
    whole = [Optimization(schedule="wsd", decay_share=1.0).lr_factor(step, 10, 100) for step in (10, 11)]
    assert whole[0] == 1.0 and whole[1] < 1.0  # warm-up takes precedence
    assert Optimization(schedule="wsd", decay_share=0.29).lr_factor(72, 0, 100) < 1.0  # 0.29 · 100 is a little less than 29


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial"])
def test_rises_to_1_and_falls_to_final(schedule):
    settings = Optimization(schedule=schedule, final_lr_factor=0.1)
    factors = [settings.lr_factor(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1.0 and factors[100] == pytest.approx(0.1)
    assert all(a < b for a, b in itertools.pairwise(factors[:11]))
    assert all(a > b for a, b in itertools.pairwise(factors[10:]))
    assert settings.lr_factor(1000, 10, 100) == pytest.approx(0.1)


def test_shapes_at_the_middle():
    names = ("linear", "cosine", "polynomial", "constant")
    at_half = {name: Optimization(schedule=name).lr_factor(50, 0, 100) for name in names}
    assert at_half == pytest.approx({"linear": 0.5, "cosine": 0.5, "polynomial": 0.25, "constant": 1.0})
    assert Optimization(schedule="polynomial", power=1.0).lr_factor(50, 0, 100) == 0.5


def test_layer_decay_falls_from_the_head_down_to_the_embeddings():
    config = EncoderConfig(
        vocab_size=50, max_length=16, hidden_size=8, num_layers=3, num_heads=2, projection_dim=4, norm="pre"
    )  # fmt: skip
    model = SequenceClassifier(config, 2)
    groups = parameter_groups(model, 1.0, Optimization(1.0, None, 0.1, 0.5, 0.0), layer_decay(0.5, 3))
    lr_of = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        expected = {
            "head": 1.0, "encoder.final_norm": 0.5, "encoder.layers.2": 0.5,
            "encoder.layers.1": 0.25, "encoder.layers.0": 0.125, "encoder.E": 0.125 * 0.5,
            "encoder.tokens": 0.0625, "encoder.positions": 0.0625, "encoder.embedding_norm": 0.0625,
        }  # fmt: skip
        (value,) = (value for prefix, value in expected.items() if name.startswith(prefix + "."))
        assert lr_of[id(parameter)] == value, name
    assert groups[0]["lr"] == 1.0 and len(lr_of) == len(list(model.parameters()))


def test_without_layer_decay_there_are_three_groups():
    config = EncoderConfig(vocab_size=50, max_length=16, hidden_size=8, num_layers=3, num_heads=2, projection_dim=4)
    groups = parameter_groups(SequenceClassifier(config, 2), 1.0, Optimization(1.0, None, 0.1, 0.5, 0.0), layer_decay(1.0, 3))
    assert [group["name"] for group in groups] == ["decay", "no_decay", "projection"]


def gradient_norms(precision: list, tmp_path: Path, corpus: Path) -> tuple[list[float], dict]:
    """Gradient norms that reach the optimiser in four steps with gradient_clip_val=0.05, and the weights."""
    from lightning.pytorch import Callback, Trainer, seed_everything

    norms = []

    class Norm(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            gradients = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                norms.append(torch.cat(gradients).norm().item())

    seed_everything(0)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_length": 32, "projection_dim": 8}
    data = PretrainingData(
        str(corpus), vocab_size=300, max_length=32, batch_size=4, validation_fraction=0.1, cache_dir=str(tmp_path)
    )
    model = MLM(EncoderConfig(vocab_size=data.num_tokens, dropout=0.0, attention_dropout=0.0, norm="pre", **sizes))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", max_steps=4, gradient_clip_val=0.05, limit_val_batches=0, num_sanity_val_steps=0, plugins=precision,
        callbacks=[Norm()], use_distributed_sampler=False, **quiet,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return norms, model.state_dict()


def test_sixteen_bits_scale_gradients_clip_them_unscaled_and_skip_a_step_that_overflows(corpus, tmp_path):
    from lightning.pytorch.plugins.precision import MixedPrecision

    whole, weights = gradient_norms([], tmp_path, corpus)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    half, same = gradient_norms([MixedPrecision("16-mixed", "cpu", scaler)], tmp_path, corpus)
    # Clipped after unscaling: otherwise all would be 0.05 / 1,024.
    assert half == pytest.approx(whole, rel=0.02) and max(half) == pytest.approx(0.05, rel=0.02)
    for name, tensor in weights.items():
        torch.testing.assert_close(same[name], tensor, rtol=0, atol=2e-3)
    large = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    _, kept = gradient_norms([MixedPrecision("16-mixed", "cpu", large)], tmp_path, corpus)
    assert large.get_scale() == 2.0**36 and all(tensor.isfinite().all() for tensor in kept.values())


def test_muon_takes_groups_that_come_later_and_copies():
    model, groups = muon_groups()
    late = next(group["params"] for group in groups if group["name"] != "muon")
    optimizer = MuonAndAdamW([group for group in groups if group["params"] is not late], (0.9, 0.98), 1e-6)
    optimizer.add_param_group({"params": late, "lr": 0.01})
    before = [parameter.detach().clone() for parameter in late]
    stepped(model, [optimizer], [0])
    assert late and all(not torch.equal(a, b) for a, b in zip(before, late, strict=True))
    other = copy.deepcopy(optimizer)
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    other.step()
    pairs = zip(optimizer.param_groups, other.param_groups, strict=True)
    assert all(not torch.equal(a, b) for one, two in pairs for a, b in zip(one["params"], two["params"], strict=True))


class OwnOptimizer(MLM):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnSchedule(OwnOptimizer):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)}


class TwoOptimizers(MLM):
    """Manual optimisation, with a schedule for one of the two."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.automatic_optimization = False

    def configure_optimizers(self):
        first, second = (torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2))
        return [first, second], [torch.optim.lr_scheduler.LambdaLR(first, lambda step: 1.0)]

    def training_step(self, batch, batch_idx):
        loss = self.training_loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["OwnOptimizer", "OwnSchedule", "TwoOptimizers"])
def test_a_subclass_may_have_another_optimiser(kind, tiny, tmp_path):
    unclipped = ["--trainer.gradient_clip_val", "null"]  # which manual optimisation requires
    output(["fit", *tiny, *unclipped, "--model", f"tests.tasks.test_optim.{kind}", "--trainer.max_steps", "2"], tmp_path)
    state = load(tmp_path / "runs/tiny/checkpoints/last.ckpt")
    assert state["global_step"] == 2 and state["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1


@pytest.mark.slow
def test_another_optimiser_does_not_go_on(put, tiny, tmp_path):
    put("tiny")
    line = complaint(["fit", *tiny, "--ckpt_path", "last", "--trainer.max_steps", "14", "--model.optimizer", "muon"], tmp_path)
    assert "model.optimizer is 'muon'; allowed to continue from this checkpoint: adamw" in line
