"""`draw`: the maps are the model's own, the output is a picture, bad input is one line."""

import pytest
import torch

from lit_linformer.model import Encoder, EncoderConfig, LinformerAttention, make_projection
from lit_linformer.runs.trained_model import open_checkpoint
from lit_linformer.studies.draw import as_text, draw, row_names, slot_maps
from lit_linformer.utils.figures import figure_class
from tests.cli.test_errors import complaint
from tests.helpers import output


@pytest.mark.parametrize(("kind", "heads"), [("linear", None), ("linear", 2), ("gaussian", None), ("mean", None), ("conv", 2)])
def test_a_projection_as_a_matrix_does_what_the_projection_does(kind, heads):
    projection = make_projection(kind, 12, 4, num_heads=heads, channels=1, noise=0.1)
    x = torch.randn(2, 9, 1) if heads is None else torch.randn(2, heads, 9, 1)
    assert torch.allclose(projection.matrix(x[:1]) @ x, projection(x), atol=1e-6)


def test_maps_are_the_encoders():
    torch.manual_seed(0)
    shape = {"vocab_size": 20, "max_length": 12, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 8}
    encoder = Encoder(EncoderConfig(**shape, projection_dim=4, sharing="none")).eval()
    ids = [0, 5, 6, 7, 2]
    _, maps = encoder(torch.tensor([ids]), need_weights=True)
    feeds, reads = slot_maps(encoder, ids, 1, 1)
    assert torch.equal(feeds, encoder.layers[1].attention.E.weight[1, :, :5])
    assert torch.allclose(reads, maps[1][0, 1].T) and torch.allclose(reads.sum(0), torch.ones(5))
    mean_feeds, mean_reads = slot_maps(encoder, ids, 1, None)
    assert mean_feeds.shape == mean_reads.shape == (4, 5) and torch.allclose(mean_reads, maps[1][0].mean(0).T)


def test_tokens_that_a_layer_sees_beside_its_slots_are_no_slots():
    shape = {"vocab_size": 20, "max_length": 12, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8}
    encoder = Encoder(EncoderConfig(**shape, attention="window", projection_dim=4)).eval()
    names = ["<s>", "a", "b", "</s>"]
    feeds, reads = slot_maps(encoder, [0, 5, 6, 2], 0, None)
    rows = row_names(encoder.config, 0, len(reads), names)
    assert rows == [f"slot {j}" for j in range(4)] + [f"token {name}" for name in names]
    told = as_text(0, feeds, reads, names, rows, 8).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in told] == rows
    assert ["fed by" in line for line in told] == [True] * 4 + [False] * 4 and all("read by" in line for line in told)


class NoMaps(LinformerAttention):
    """Has a ``matrix``, which it inherits, but no ``need_weights``."""

    def forward(self, x, attention_mask=None, shared=None):
        return super().forward(x, attention_mask, shared=shared)


def test_an_attention_without_maps_is_named():
    shape = {"vocab_size": 20, "max_length": 12, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8}
    encoder = Encoder(EncoderConfig(**shape, attention="tests.studies.test_draw.NoMaps", projection_dim=4))
    said = "attention is 'tests.studies.test_draw.NoMaps', whose forward gives no maps; allowed: one that takes need_weights"
    with pytest.raises(ValueError, match=said):
        slot_maps(encoder, [0, 5, 6, 2], 0, None)


def test_draws_and_tells_a_text(pretrained, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ["draw", "--ckpt_path", str(pretrained), "--text", "one <mask> here", "--slots", "4"]  # three are told in words, too
    shown = output([*argv, "--output", str(tmp_path / "new/slots.png")], tmp_path)
    assert (tmp_path / "new/slots.png").read_bytes()[:4] == b"\x89PNG"
    lines = [line for line in shown.splitlines() if not line.startswith("warning: ")]
    assert [line for line in lines if line.startswith("layer")] == ["layer 0", "layer 1"] and "fed by" in lines[1]
    assert len(lines) == 2 + 2 * 3 + 1 and "<mask>" in shown
    argv += ["--layers", "1", "--head", "1", "--output", str(tmp_path / "slots.svg")]
    assert "layer 0" not in output(argv, tmp_path) and (tmp_path / "slots.svg").is_file()


def test_dollars_are_drawn_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")  # which takes what stands between two of them for mathematics
    maps = [(torch.rand(2, 3), torch.rand(2, 3))]
    figure = draw(figure_class(), [0], maps, ["$$", "$x_{$", "\\$"], [["slot 0", "token $$"]], 2)
    figure.savefig(tmp_path / "slots.png")
    assert [label.get_text().replace("\\$", "$") for label in figure.axes[0].get_xticklabels()] == ["$$", "$x_{$", "\\$"]


def test_of_many_slots_some_are_named():
    pytest.importorskip("matplotlib")
    maps = [(torch.rand(200, 3), torch.rand(200, 3))]
    figure = draw(figure_class(), [0], maps, ["a", "b", "c"], [[f"slot {row}" for row in range(200)]], 200)
    named = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(named) == len(figure.axes[1].get_yticks()) == 50 and named[:2] == ["slot 0", "slot 4"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"layers": "0,2"}, "layers is [0, 2]; allowed: layers from 0 to 1"),
        ({"layers": "last"}, "layers is 'last'; allowed: a whole number, 0 or more"),
        ({"head": "2"}, "head is 2; allowed: 0 to 1"),
        ({"slots": "0"}, "slots is '0'; allowed: a whole number, 1 or more"),
        ({"output": "slots"}, "output is slots; allowed: a file that ends in .png"),
        ({"text": "word " * 40}, "tokens with bos and eos; allowed: up to max_length = 32"),
        ({"text": None}, "text is not given; allowed: TEXT"),
        ({"ckpt_path": "nowhere"}, "ckpt_path is nowhere, which does not exist"),
    ],
)
def test_bad_setting(change, expected, pretrained, tmp_path):
    pytest.importorskip("matplotlib")
    settings = {"ckpt_path": str(pretrained), "text": "a", "output": str(tmp_path / "slots.png")} | change
    argv = [word for key, value in settings.items() if value is not None for word in (f"--{key}", value)]
    assert expected in complaint(["draw", *argv], tmp_path)
    assert not list(tmp_path.glob("slots*"))


def test_a_transformer_has_no_slots(pretrained, tmp_path):
    checkpoint = torch.load(pretrained / "checkpoints/last.ckpt", weights_only=True)
    encoder = checkpoint["hyper_parameters"]["encoder"]
    encoder["attention"] = "full"
    checkpoint["state_dict"].pop("net.encoder.E.weight")
    torch.save(checkpoint, tmp_path / "full.ckpt")
    argv = ["draw", "--ckpt_path", str(tmp_path / "full.ckpt"), "--text", "a", "--output", str(tmp_path / "slots.png")]
    assert "whose attention is 'full'; allowed: linformer" in complaint(argv, tmp_path)
    assert open_checkpoint(tmp_path / "full.ckpt").encoder.attention == "full"
