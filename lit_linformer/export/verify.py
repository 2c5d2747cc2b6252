"""Compares each export with its checkpoint: the largest difference of logits on random inputs with padding."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lit_linformer.runs.trained_model import TrainedModel
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.quiet import quiet

TOLERANCE = 1e-4  # of logits, float32, relative to the largest one if that is more than 1


def random_inputs(model: TrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
    """input_ids (B, N) int64, or (B, N, input_size) float32, and attention_mask (B, N) int64.

    One token, full length and lengths in between; rows with and without padding."""
    longest = model.encoder.max_length
    draw = torch.Generator().manual_seed(0)
    for rows, length in ((1, 1), (3, 2), (2, min(17, longest)), (3, longest // 2 + 1), (2, longest), (1, longest)):
        tokens = random_tokens(model, rows, length, draw)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=draw)
        lengths[-1] = length
        yield tokens, (torch.arange(length) < lengths).long()


def random_tokens(model: TrainedModel, rows: int, length: int, draw: torch.Generator) -> Tensor:
    """(rows, length) int64, or, for a model with an input_size, (rows, length, input_size) float32."""
    if model.encoder.input_size:
        return torch.randn(rows, length, model.encoder.input_size, generator=draw)
    return torch.randint(0, model.encoder.vocab_size, (rows, length), generator=draw)


def read(model: TrainedModel, logits: Tensor, real: Tensor) -> Tensor:
    """The logits to compare: a masked language model's, (B, N, vocab_size), at real tokens (B, N); all of a classifier's.

    At padding a program that attends to all pairs has other logits than the model.
    """
    return logits if model.classifies else logits[real]


@torch.inference_mode()
def largest_difference(model: TrainedModel, other: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Largest absolute difference of the logits to compare; ValueError if it is more than TOLERANCE allows."""
    worst = 0.0
    for ids, mask in random_inputs(model):
        real = mask.bool()
        expected, found = (read(model, logits, real) for logits in (model.net(ids, real), other(ids, mask)))
        worst = max(worst, _difference("the export differs from the checkpoint", expected, found, ids))
    return worst


@torch.inference_mode()
def difference_from_transformers(model: TrainedModel, folder: Path) -> float:
    """Largest difference of logits at real tokens between a converted model and what transformers loads from its folder.

    If the folder has no head, hidden states are compared. ValueError if it is more than TOLERANCE allows.
    """
    from transformers import AutoModelForMaskedLM

    running = {"return_dict": True, "chunk_size_feed_forward": 0}  # config.json may tell transformers to run it in another way
    with quiet():
        theirs = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32, **running).eval()
    pad, worst = theirs.config.pad_token_id, 0.0
    if pad is None or pad < 0:  # then any token can stand at padding
        pad = model.tokenizer.pad_id
    for ids, mask in random_inputs(model):
        real = mask.bool()
        ids = ids.where(ids != pad, model.tokenizer.mask_id).where(real, pad)  # RoBERTa's positions count only real tokens
        if "new_head" in model.facts:
            expected, found = theirs(ids, mask, output_hidden_states=True).hidden_states[-1], model.net.encoder(ids, real)
        else:
            expected, found = theirs(ids, mask).logits, model.net(ids, real)
        worst = max(worst, _difference(f"the conversion differs from {folder}", expected[real], found[real], ids))
    return worst


def _difference(what: str, expected: Tensor, found: Tensor, ids: Tensor) -> float:
    """The largest absolute difference; ValueError, "WHAT by …", if it is too large."""
    difference = (expected - found).abs().max().item()
    allowed = TOLERANCE * max(1.0, expected.abs().max().item())
    if not difference <= allowed:  # NaN too
        size = f"{ids.shape[0]} × {ids.shape[1]} tokens"
        raise UserError(f"{what} by {difference:.2g} on {size}", f"{allowed:.2g}")
    return difference
