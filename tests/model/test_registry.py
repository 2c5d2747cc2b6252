"""Kinds by name and class path: what is found, what is refused without being called, what a user's own class inherits."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lit_linformer.model
from lit_linformer.model import ATTENTIONS, PROJECTIONS, Encoder, EncoderConfig, Linear, Projection, SelfAttention
from lit_linformer.model.flops import forward_flops, training_flops
from lit_linformer.model.window import WindowAttention

SHAPE = {"vocab_size": 50, "max_length": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16}


class Plain(Projection):
    """Only what is required."""

    def forward(self, x, mask=None):
        return x.new_zeros(*x.shape[:-2], self.projection_dim, x.shape[-1]) + x.mean(-2, keepdim=True)


class Doubled(Linear):
    """A forward other than the one that its base's methods describe."""

    def forward(self, x, mask=None):
        return 2 * super().forward(x, mask).tanh()


class Alone(SelfAttention):
    """A forward that returns only its result."""

    def forward(self, x, attention_mask=None):
        return self.value(x)


class Few(Projection):
    """One slot too few."""

    def forward(self, x, mask=None):
        return x[..., : self.projection_dim - 1, :]


class Short(Alone):
    """Only for the first token, which addition would broadcast to all."""

    def forward(self, x, attention_mask=None):
        return self.value(x[:, :1])


class Complex(Alone):
    """Mixes tokens with a Fourier transform, as FNet does, but forgets `.real`."""

    def forward(self, x, attention_mask=None):
        return torch.fft.fft2(x)


class Third(Alone):
    """Hands nothing on, and says so with None."""

    def forward(self, x, attention_mask=None):
        return self.value(x), None, None


class Silent(Alone):
    """Returns nothing."""

    def forward(self, x, attention_mask=None):
        x = self.value(x)


class Bare(Alone):
    """No **shape."""

    def __init__(self, reach: int = 3):
        super().__init__(8, 2, 16)


class Needy(Alone):
    """A setting without a default."""

    def __init__(self, reach: int, **shape):
        super().__init__(**shape)


class Dilated(WindowAttention):
    """One setting more than its base class."""

    def __init__(self, *shape, dilation: int = 1, **more):
        super().__init__(*shape, **more)
        self.dilation = dilation


class Dynamic(Projection):
    """Long-Short Transformer's: weights from the layer's input, computed once for keys and values."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.scores, self.computed = torch.nn.Linear(SHAPE["hidden_size"], self.projection_dim, bias=False), 0

    def start(self):
        torch.nn.init.ones_(self.scores.weight)

    def for_input(self, x, mask):
        self.computed += 1
        scores = self.scores(x)  # (B, N, K)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None], torch.finfo(x.dtype).min)
        weights = scores.softmax(1).transpose(1, 2)
        return lambda z, mask: (weights if z.dim() == 3 else weights[:, None]) @ z


class Scaled(Linear):
    """E of tokens that are scaled by the layer's input."""

    def for_input(self, x, mask):
        size = x.norm(dim=-1, keepdim=True)
        return lambda z, mask: self(size * z, mask)


def path(cls):
    return f"{__name__}.{cls.__name__}"


def encoder(**settings):
    torch.manual_seed(0)
    return Encoder(EncoderConfig(**{**SHAPE, "projection_dim": 4, "dropout": 0.0, "attention_dropout": 0.0, **settings})).eval()


REFUSED = {
    "pool": r"projection is 'pool'; allowed: linear, conv, mean, max, gaussian, dynamic, gated, or the path of a subclass of",
    "liner": r"projection is 'liner'; did you mean 'linear'\?; allowed: linear",
    "os.system": r"projection is 'os.system', but os is Python's own; allowed",
    "torch.nn.Linear": r"projection is 'torch.nn.Linear', which is no subclass of Projection; allowed",
    "torch.manual_seed": r"which is no subclass of Projection; allowed",
    "lit_linformer.model.Projection": r"which is no subclass of Projection; allowed",
    "lit_linformer.model.Nothing": r"but module lit_linformer.model has no Nothing; allowed",
    "nowhere_to_be_found.Idea": r"but there is no module nowhere_to_be_found in the working directory, nor installed; allowed",
    "..Idea": r"projection is '..Idea'; allowed",
    7: r"projection is 7; allowed",
}


class Misnamed(Projection):
    def foward(self, x, mask=None):
        return x[..., : self.projection_dim, :]


class Unmasked(Projection):
    def forward(self, x):
        return x[..., : self.projection_dim, :]


REFUSED[f"{__name__}.Misnamed"] = r"projection is '.*\.Misnamed', which has no forward; allowed"
REFUSED[f"{__name__}.Unmasked"] = r"projection is '.*\.Unmasked', whose forward takes no mask after x; allowed"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_projection_is_refused_in_one_line(name):
    with pytest.raises(ValueError, match=REFUSED[name]) as error:
        EncoderConfig(**SHAPE, projection_dim=4, projection=name)
    assert "\n" not in str(error.value)


def test_the_transformer_is_not_taken_for_a_linformer():
    with pytest.raises(ValueError, match=r"attention is 'Transformer'; did you mean 'full'\?; allowed: linformer"):
        ATTENTIONS.find("Transformer")


def test_a_module_that_does_not_import_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_an_idea.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"module half_an_idea cannot be imported: SyntaxError: .*; allowed"):
        ATTENTIONS.find("half_an_idea.Idea")
    (tmp_path / "needy_idea.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(
        ValueError, match=r"module needy_idea cannot be imported: No module named 'nowhere_to_be_found'; allowed"
    ):
        ATTENTIONS.find("needy_idea.Idea")


def test_every_entry_says_its_own_name():
    assert [PROJECTIONS.name(kind) for kind in PROJECTIONS.values()] == list(PROJECTIONS)
    assert PROJECTIONS.name(Plain) == path(Plain)
    said = {
        name: ATTENTIONS.find(name).describe(EncoderConfig(**SHAPE, attention=name, projection_dim=4)) for name in ATTENTIONS
    }
    slots = "k = 4, layerwise"
    assert said == {
        "full": "transformer", "linformer": f"linformer, {slots}", "lookup": f"linformer with lookup, {slots}",
        "lsh": "reformer", "coarse": f"linformer, coarse to fine, {slots}",
        "luna": "luna, k = 4", "nystrom": "nyströmformer, k = 4", "sparse": "sparse transformer",
        "window": f"linformer with window, {slots}",
    }  # fmt: skip
    config = EncoderConfig(**SHAPE, projection_dim=4, projection=path(Plain))
    assert config.attention_kind.describe(config) == f"linformer, k = 4, layerwise, {path(Plain)}"
    config = EncoderConfig(**SHAPE, attention=path(Alone))
    assert config.attention_kind.describe(config) == path(Alone) and not config.attention_kind.exact


def test_options_are_the_classs_own():
    for name, kind in (("projection", Plain), ("attention", Alone)):
        with pytest.raises(ValueError, match=rf"{name}_options names 'width'; allowed with {name}={path(kind)}: none"):
            EncoderConfig(**SHAPE, projection_dim=4, **{name: path(kind), f"{name}_options": {"width": 3}})


def test_what_derives_from_an_entry_has_its_options_too():
    made = encoder(attention=path(Dilated), attention_options={"window": 6, "dilation": 2}).layers[0].attention
    assert (made.window, made.dilation) == (6, 2)
    for options, told in (
        ({"window": 3}, "attention_options.window is 3; allowed: an even number"),
        ({"dilation": True}, "attention_options.dilation is true; allowed: a whole number"),
        (
            {"chunk": 3},
            rf"attention_options names 'chunk'; allowed with attention={path(Dilated)}: window, dual_norm, dilation",
        ),
        ({"hidden_size": 3}, "attention_options names 'hidden_size'"),
    ):
        with pytest.raises(ValueError, match=f"^{told}"):
            encoder(attention=path(Dilated), attention_options=options)


@pytest.mark.parametrize("sharing", ["none", "headwise", "layerwise"])
def test_a_projection_of_ones_own_in_every_sharing(sharing):
    made = encoder(projection=path(Plain), sharing=sharing)
    hidden, maps = made(torch.randint(0, 50, (2, 9)), need_weights=True)
    assert hidden.shape == (2, 9, 8) and maps[1].shape == (2, 2, 9, 4)
    assert forward_flops(made, 9) is None and training_flops(made, 9) is None
    with pytest.raises(ValueError, match=r"mass_bias is true; allowed with projection=.*Plain: false"):
        encoder(projection=path(Plain), mass_bias=True)


def test_what_a_class_tells_of_its_forward_is_not_inherited_by_another_forward():
    assert Linear.commutes and not Doubled.commutes and Doubled.flops is Projection.flops
    assert Doubled.matrix is Projection.matrix and Doubled.any_length is Projection.any_length
    made = encoder(projection=path(Doubled), sharing="key-value")
    short = made.layers[0].attention(torch.randn(1, 2, 8))[0]  # fewer tokens than slots: Linear's formula for these is not used
    assert short.shape == (1, 2, 8) and forward_flops(made, 2) is None
    assert forward_flops(encoder(attention=path(Alone)), 9) is None


def test_nor_is_it_by_a_for_input_alone():
    made = encoder(projection=path(Scaled), sharing="key-value").layers[0].attention
    x = torch.randn(1, 2, 8)  # fewer tokens than slots
    torch.testing.assert_close(made.compress(x)[0].transpose(1, 2).flatten(2), made.key(made.E.for_input(x, None)(x, None)))
    assert Scaled.flops is Projection.flops and Scaled.any_length is Projection.any_length and Linear.commutes


def test_an_attention_that_gives_no_more_than_a_tensor():
    hidden, maps = encoder(attention=path(Alone))(torch.randint(0, 50, (2, 9)), need_weights=True)
    assert hidden.shape == (2, 9, 8) and maps == {}


@pytest.mark.parametrize("order", ["compress_first", "project_first"])
def test_a_forward_that_returns_another_shape_is_refused(order):
    ids = torch.randint(0, 50, (2, 9))
    shapes = (
        r"\(2, 3, 8\); allowed: a tensor \(2, 4, 8\)" if order == "compress_first" else r"\(2, 2, 3, 4\); allowed: a tensor"
    )
    with pytest.raises(ValueError, match=f"forward of projection {path(Few)} returns a tensor {shapes}"):
        encoder(projection=path(Few), order=order)(ids)
    complex_numbers = r"tensor \(2, 9, 8\) of complex numbers"
    for kind, said in ((Short, r"tensor \(2, 1, 8\)"), (Complex, complex_numbers), (Silent, "NoneType")):
        with pytest.raises(
            ValueError, match=rf"forward of attention {path(kind)} returns a {said}; allowed: a tensor \(2, 9, 8\)"
        ):
            encoder(attention=path(kind))(ids)


def test_a_third_result_that_is_no_dict_is_refused():
    with pytest.raises(ValueError, match=f"attention {path(Third)} returns a third result, a NoneType; allowed: a dict"):
        encoder(attention=path(Third))(torch.randint(0, 50, (2, 9)))


def test_an_init_that_the_encoder_cannot_call_is_refused():
    with pytest.raises(ValueError, match=r"Bare', whose __init__ takes no bias; allowed: a class with .*\*\*shape"):
        encoder(attention=path(Bare))
    with pytest.raises(ValueError, match=r"attention_options lacks 'reach'; allowed: a value for it"):
        encoder(attention=path(Needy))
    encoder(attention=path(Needy), attention_options={"reach": 2})


@pytest.mark.parametrize("order", ["compress_first", "project_first"])
def test_weights_of_the_layers_input_are_computed_once_and_pads_do_not_matter(order):
    made = encoder(projection=path(Dynamic), order=order, sharing="key-value")
    ids, mask = torch.randint(0, 50, (2, 12)), torch.arange(12)[None].expand(2, -1) < 7
    torch.testing.assert_close(made(ids, mask)[:, :7], made(ids[:, :7]))
    assert [layer.attention.E.computed for layer in made.layers] == [2, 2]
    assert (made.layers[0].attention.E.scores.weight == 1).all()  # its own start, not the encoder's


def lifted_out(code, folder):
    """What the code prints next to a copy of lit_linformer/model/ under another name, without lit_linformer."""
    shutil.copytree(Path(lit_linformer.model.__file__).parent, folder / "lifted_out")
    code = "import sys, torch; sys.modules['lit_linformer'] = None; from lifted_out import Encoder, EncoderConfig\n" + code
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_copy_of_the_folder_under_another_name_works_and_needs_nothing_but_torch(tmp_path):
    code = (
        f"print(*Encoder(EncoderConfig(**{SHAPE}, projection_dim=4))(torch.zeros(2, 9, dtype=torch.int64)).shape); "
        "print(*[name for name in ('lightning', 'jsonargparse', 'datasets') if name in sys.modules])"
    )
    assert lifted_out(code, tmp_path).split() == ["2", "9", "8"]


@pytest.mark.slow
def test_trained_weights_go_with_it_as_the_docs_say(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    ((save, read),) = re.findall(r"^(torch\.save.*?\n)(.*?)```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(save, {"torch": torch, "net": SimpleNamespace(encoder=encoder())})
    shown = lifted_out(read + "print(*encoder(torch.zeros(2, 9, dtype=torch.int64)).shape)", tmp_path)
    assert shown.split() == ["2", "9", "8"]
