"""Distillation: a model learns to imitate its teacher. This is how a converted Linformer recovers its perplexity.

Shapes: B rows, N tokens per row, M masked positions per row, D hidden width, V vocabulary, L layers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.model import MaskedLanguageModel
from lit_linformer.model.attention import zero_pads
from lit_linformer.model.encoder import layer_outputs
from lit_linformer.model.flops import forward_flops, training_flops
from lit_linformer.model.heads import IGNORED, mean_nll
from lit_linformer.model.parts import at_least_float32
from lit_linformer.model.ranges import Range, check_ranges
from lit_linformer.runs.trained_model import read_model
from lit_linformer.tasks.base import Batch
from lit_linformer.tasks.data_fits import check_row_length
from lit_linformer.tasks.mlm import MLM, inputs
from lit_linformer.tasks.perplexity import Perplexity
from lit_linformer.tasks.pretrained import check_same_tokenizer, load_masked_model
from lit_linformer.utils.errors import SettingError, UserError

WEIGHTS = ("logits_weight", "hidden_weight", "labels_weight")
# Teachers that `check_early` has read and setup has yet to take: each is read only once.
CHECKED: dict[str, tuple[MaskedLanguageModel, Tokenizer | None]] = {}
Weight = Annotated[float, Range(least=0, largest=1e6)]


class Distillation(MLM):
    """Masked language modelling with a teacher, whose perplexity is logged beside the model's own: val/teacher_perplexity.

    The loss is a weighted sum of three terms. A weight of 0 leaves its term out; with labels_weight alone this is plain masked
    language modelling.

    Args:
        teacher: a run directory (its best checkpoint, or its last), a checkpoint file, or a folder that `export` wrote as
            safetensors or huggingface; it must have the same vocabulary. Only training needs it.
        logits_weight: weight of KL(teacher ‖ student) over the vocabulary, in nats, at the masked positions (Hinton et al.,
            2015).
        hidden_weight: weight of ‖student − teacher‖² / ‖teacher‖² of the hidden states, averaged over the layers; both models
            must have the same number of layers and the same width.
        labels_weight: weight of the usual loss, the negative log-likelihood of the masked tokens.
        kwargs: MLM's settings.
    """

    def __init__(
        self,
        teacher: str | None = None,
        logits_weight: Weight = 1.0,
        hidden_weight: Weight = 1.0,
        labels_weight: Weight = 0.0,
        **kwargs: Any,
    ):
        check_ranges("model.", Distillation.__init__, locals())
        super().__init__(**kwargs)
        self.weights = (logits_weight, hidden_weight, labels_weight)
        if not (logits_weight or labels_weight):  # DDP waits for the gradients of all parameters that require one
            for unused in (self.net.head, self.net.encoder.final_norm):
                if unused is not None:
                    unused.requires_grad_(False)
        self.teacher_name = teacher
        self._teacher: tuple[MaskedLanguageModel, ...] = ()  # a tuple keeps it out of parameters, checkpoints and optimiser
        self._teacher_value: float | None = None
        self.teacher_perplexity = Perplexity()

    @classmethod
    def check_early(cls, settings: Mapping[str, Any]) -> None:
        super().check_early(settings)
        _check_terms(settings["teacher"], [settings[name] for name in WEIGHTS])
        CHECKED[settings["teacher"]] = read_teacher(settings["teacher"])

    @property
    def teacher(self) -> MaskedLanguageModel:
        return self._teacher[0]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return  # a trained model needs no teacher, which may be gone
        _check_terms(self.teacher_name, self.weights)
        checked = CHECKED.pop(self.teacher_name, None)
        net, tokenizer = read_teacher(self.teacher_name) if checked is None else checked
        self._teacher = (net,)
        mine, theirs = self.net.encoder.config, self.teacher.encoder.config
        for name in ("vocab_size", *(("num_layers", "hidden_size") if self.weights[1] else ())):
            if getattr(mine, name) != getattr(theirs, name):
                raise SettingError(
                    "model.teacher",
                    Path(self.teacher_name),
                    f"the same{', or hidden_weight 0' if name != 'vocab_size' else ''}",
                    more=f", whose {name} is {getattr(theirs, name)}, the model's {getattr(mine, name)}",
                )
        data = self.trainer.datamodule
        allowed = "one of the same (--data.tokenizer takes the teacher's checkpoint, whose own it then is)"
        check_same_tokenizer(data, tokenizer, f"model.teacher={self.teacher_name}", allowed)
        check_row_length(getattr(data, "max_length", None) or 0, theirs.max_length, "the teacher's max_length")

    def on_fit_start(self) -> None:
        self.teacher.to(self.device, self.net.encoder.tokens.weight.dtype)

    def training_loss(self, batch: Batch) -> Tensor:
        terms = _terms(self.net, self.teacher, self.weights, *inputs(batch))
        for name, weight, term in zip(WEIGHTS, self.weights, terms, strict=True):
            if weight:
                self.log(f"train/{name.removesuffix('_weight')}_loss", term.detach())
        return sum(weight * term for weight, term in zip(self.weights, terms, strict=True))

    def training_flops(self, batch: Batch) -> int | None:
        logits, hidden, labels = self.weights
        (rows, length), masked = batch["input_ids"].shape, batch["positions"].shape[1]
        flops = training_flops(self.net.encoder, length, masked if logits or labels else 0)
        teacher = forward_flops(self.teacher.encoder, length, masked if logits else 0) if logits or hidden else 0
        return None if None in (flops, teacher) else rows * (flops + teacher)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        found = super().validation_step(batch, batch_idx)
        if self._teacher_value is None and self.trainer.state.fn == "fit":
            self.teacher_perplexity.update(self.teacher.nll(*inputs(batch)), batch["labels"])
        return found

    def on_validation_epoch_end(self) -> None:
        if self.trainer.state.fn != "fit":
            return
        if self._teacher_value is None:
            value = self.teacher_perplexity.compute().item()
            self.teacher_perplexity.reset()
            if self.trainer.sanity_checking and self.trainer.num_sanity_val_steps != float("inf"):
                return  # only from a few batches
            self._teacher_value = value
        self.log("val/teacher_perplexity", self._teacher_value)


def _check_terms(teacher: str | None, weights: Sequence[float]) -> None:
    if not any(weights):
        raise UserError("model.logits_weight, hidden_weight and labels_weight are all 0", "one that is more")
    if teacher is None:
        raise UserError("model.teacher is not given", "a run or a checkpoint, the model that is to be learnt from")


def read_teacher(path: str) -> tuple[MaskedLanguageModel, Tokenizer | None]:
    """The model, in evaluation mode and without gradients, and its tokenizer, or None if it has none.

    ValueError, in one line, for anything but a masked language model.
    """
    source = read_model(path, "model.teacher")
    source.check_modules()
    net = MaskedLanguageModel(source.encoder)
    load_masked_model(net, source, path)
    return net.eval().requires_grad_(False), source.own_tokenizer


def _terms(
    student: MaskedLanguageModel,
    teacher: MaskedLanguageModel,
    weights: tuple[float, float, float],
    input_ids: Tensor,
    positions: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None,
) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """The three terms, unweighted; 0.0 for one of weight 0. A head gets tokens only for a term that reads their logits."""

    def run(net: MaskedLanguageModel, head: bool) -> tuple[Tensor, list[Tensor]]:
        # Not net.encoder without the head, since only the call of net gathers weights that are sharded.
        with layer_outputs(net.encoder) as states:
            logits = net(input_ids, attention_mask, positions if head else positions[:, :0])  # (B, M, V)
        return at_least_float32(logits), states[1:]

    logits, mine = run(student, head=bool(weights[0] or weights[2]))
    logits_term = hidden_term = labels_term = 0.0
    if weights[0] or weights[1]:
        with torch.no_grad():
            wanted, theirs = run(teacher, head=bool(weights[0]))
    if weights[0]:
        chances, targets = logits.log_softmax(-1), wanted.log_softmax(-1)
        divergence = functional.kl_div(chances, targets, reduction="none", log_target=True).sum(-1)
        asked = labels != IGNORED
        logits_term = (divergence * asked).sum() / asked.sum().clamp(min=1)
    if weights[1]:
        hidden_term = sum(_relative(*pair, attention_mask) for pair in zip(mine, theirs, strict=True)) / len(mine)
    if weights[2]:
        labels_term = mean_nll(logits, labels)
    return logits_term, hidden_term, labels_term


def _relative(mine: Tensor, theirs: Tensor, attention_mask: Tensor | None) -> Tensor:
    """‖mine − theirs‖² / ‖theirs‖² over the real tokens of (B, N, D)."""
    mine, theirs = (zero_pads(at_least_float32(x), attention_mask) for x in (mine, theirs))
    return (mine - theirs).square().sum() / theirs.square().sum()
