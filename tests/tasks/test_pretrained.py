"""What fine-tuning takes over from a pretraining run."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lit_linformer.data.tokenizer import load_tokenizer, train_tokenizer
from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.runs.checkpoints import find_checkpoint
from lit_linformer.runs.trained_model import read_model
from lit_linformer.tasks import MLM, SequenceClassification, TrainingModule
from lit_linformer.tasks.pretrained import check_same_tokenizer
from lit_linformer.utils.errors import UserError
from tests.helpers import TINY, inside, load, run_forked


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, cache):
    """A pretraining run's folder."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "tiny.yaml").write_text(TINY)
    with inside(folder):
        assert run_forked(["fit", "--config", "tiny.yaml", "--data.source", str(corpus), "--data.cache_dir", str(cache)]) == 0
    return folder / "runs/tiny"


def test_run_directory_gives_its_best_checkpoint(run):
    source = read_model(run)
    assert source.path == find_checkpoint(run, "best") and source.path.name.startswith("best-00000007")
    weights = load(source.path)["state_dict"]
    module = SequenceClassification(pretrained=str(run), num_labels=3)
    for name, tensor in module.net.encoder.state_dict().items():
        assert torch.equal(tensor, weights[f"net.encoder.{name}"]), name
    assert module.net.head.output.weight.shape == (3, 16)


def test_a_checkpoint_file_alone_carries_settings_and_tokenizer(run, tmp_path):
    shutil.copy(run / "checkpoints/last.ckpt", tmp_path / "elsewhere.ckpt")
    source = read_model(tmp_path / "elsewhere.ckpt")
    assert source.encoder == MLM.load_from_checkpoint(run / "checkpoints/last.ckpt", weights_only=True).net.encoder.config
    assert source.own_tokenizer.sha256 == load_tokenizer(str(run)).sha256


@pytest.mark.parametrize("task", [MLM, SequenceClassification])
def test_weights_of_a_net_of_ones_own_are_refused_in_one_line(task, run, tmp_path):
    """For example, from a subclass of MLM with other feed-forwards, whose config describes an encoder without them."""
    checkpoint = load(run / "checkpoints/last.ckpt")
    weights = checkpoint["state_dict"]
    weights["net.encoder.layers.0.down.0.weight"] = weights.pop("net.encoder.layers.0.down.weight")
    torch.save(checkpoint, tmp_path / "own.ckpt")
    with pytest.raises(UserError, match=r"^model\.pretrained is .*/own\.ckpt, whose weights are of another model \(it has"):
        task(pretrained=str(tmp_path / "own.ckpt"))


class Own(TrainingModule):
    """As docs/extending.md says to begin with a trained encoder."""

    def __init__(self, pretrained=None, encoder=None, vocab_size=None):
        super().__init__()
        source, encoder = self.start_from(pretrained, encoder, vocab_size)
        self.net = torch.nn.ModuleDict({"encoder": Encoder(encoder)})
        if source is not None:
            source.fill(self.net.encoder, source.encoder_weights)


def test_a_module_of_ones_own_begins_with_a_trained_encoder(run):
    weights = load(find_checkpoint(run, "best"))["state_dict"]
    module = Own(pretrained=str(run))
    for name, tensor in module.net.encoder.state_dict().items():
        assert torch.equal(tensor, weights[f"net.encoder.{name}"]), name
    shape = module.net.encoder.config
    assert Own(encoder=shape, vocab_size=shape.vocab_size).net.encoder.config == shape


def test_settings_without_weights(run):
    torch.manual_seed(0)
    module = SequenceClassification(pretrained=str(run), load_weights=False)
    there = load(find_checkpoint(run, "best"))["state_dict"]["net.encoder.tokens.weight"]
    mine = module.net.encoder.tokens.weight
    assert mine.shape == there.shape and not torch.equal(mine, there)


def test_dropout_is_the_recipes_not_the_checkpoints(run):
    config = SequenceClassification(pretrained=str(run), dropout=0.3, attention_dropout=0.0).net.encoder.config
    assert (config.dropout, config.attention_dropout) == (0.3, 0.0) and read_model(run).encoder.dropout == 0.2


@pytest.mark.parametrize(
    ("setting", "value"), [("num_layers", 3), ("max_length", 64), ("local_width", 0), ("attention", "full"), ("norm", "post")]
)
def test_another_encoder_is_refused(run, setting, value):
    encoder = EncoderConfig(**{**vars(read_model(run).encoder), setting: value})
    with pytest.raises(ValueError, match=rf"model.encoder.{setting} is .*, in the checkpoint .*; allowed: the same"):
        SequenceClassification(pretrained=str(run), encoder=encoder)


def test_the_same_encoder_is_not(run):
    SequenceClassification(pretrained=str(run), encoder=read_model(run).encoder)


def test_what_cannot_be_taken_over_is_said(run, tmp_path):
    with pytest.raises(ValueError, match=r"data.tokenizer has 999 tokens, model.pretrained=.* 300; allowed"):
        SequenceClassification(pretrained=str(run), vocab_size=999)
    with pytest.raises(ValueError, match=r"model.pretrained is nowhere, which does not exist; allowed: a run directory"):
        SequenceClassification(pretrained="nowhere")
    with pytest.raises(ValueError, match="a folder without checkpoints/; allowed: a run that was trained"):
        SequenceClassification(pretrained=str(tmp_path))
    torch.save({"state_dict": {"weight": torch.zeros(1)}, "global_step": 1}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"which holds no encoder; allowed"):
        SequenceClassification(pretrained=str(tmp_path / "other.ckpt"))
    with pytest.raises(ValueError, match=r"model.pretrained is not given; allowed"):
        SequenceClassification()


def test_best_of_a_run_whose_metric_is_to_be_high(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("best-00000100-0.7000.ckpt", "best-00000200--0.1000.ckpt", "best-00000300-nan.ckpt"):
        torch.save({"state_dict": {}, "global_step": 1}, tmp_path / "checkpoints" / name)
    assert find_checkpoint(tmp_path, "best").name == "best-00000200--0.1000.ckpt"
    (tmp_path / "config.yaml").write_text("best: {monitor: val/score, mode: max}\n")
    assert find_checkpoint(tmp_path, "best").name == "best-00000100-0.7000.ckpt"


def test_tokenizers_are_compared_where_data_of_ones_own_has_one():
    words = ["one two three two one"] * 9
    own, other = (train_tokenizer("bpe", words, size) for size in (262, 261))
    check_same_tokenizer(SimpleNamespace(), own)
    check_same_tokenizer(SimpleNamespace(tokenizer=own), own)
    check_same_tokenizer(SimpleNamespace(tokenizer=own.backend), own)  # of the package tokenizers: it cannot be compared
    with pytest.raises(ValueError, match=r"data.tokenizer='SimpleNamespace' is another tokenizer than the one that model"):
        check_same_tokenizer(SimpleNamespace(tokenizer=other), own)


def test_a_pretrained_encoder_is_given_settings_as_one_from_scratch_is(run):
    encoder = read_model(run).encoder
    with pytest.raises(ValueError, match=r"model.encoder.dropout is 0.3, which is not read; allowed: model.dropout"):
        SequenceClassification(pretrained=str(run), encoder=replace(encoder, dropout=0.3))
    checkpointing = replace(encoder, activation_checkpointing=True)
    assert SequenceClassification(pretrained=str(run), encoder=checkpointing).net.encoder.config.activation_checkpointing


def test_settings_of_the_encoder_that_a_classifier_does_not_read():
    shape = {"vocab_size": 60, "max_length": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "projection_dim": 4}
    for name, value in (("dropout", 0.3), ("attention_dropout", 0.0)):
        with pytest.raises(ValueError, match=rf"model.encoder.{name} is {value}, which is not read; allowed: model.{name}"):
            SequenceClassification(encoder=EncoderConfig(**shape, **{name: value}))
        assert SequenceClassification(encoder=EncoderConfig(**shape, **{name: value}), **{name: value}).hparams[name] == value
    module = SequenceClassification(encoder=EncoderConfig(**shape, activation_checkpointing=True))
    assert module.net.encoder.config.activation_checkpointing and module.hparams.activation_checkpointing
