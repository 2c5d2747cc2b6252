"""The torch format, a torch.export program, and what it shares with onnx: one graph for any batch and length."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_linformer.export.safetensors_folder import write_config
from lit_linformer.export.verify import random_tokens
from lit_linformer.model import Projection
from lit_linformer.runs.trained_model import TrainedModel, own_classes
from lit_linformer.utils.errors import SettingError, first_line

PROGRAM = "model.pt2"


class Graph(nn.Module):
    """Logits from input_ids and attention_mask, (B, N) int64 each; in its graph only sizes depend on N.

    With an input_size, input_ids are (B, N, input_size) float32.
    """

    def __init__(self, model: TrainedModel):
        super().__init__()
        self.net = copy.deepcopy(model.net).requires_grad_(False)
        for parent in list(self.net.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, Projection):
                    setattr(parent, name, module.any_length())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.net(input_ids, attention_mask.bool())


def example(model: TrainedModel) -> tuple[tuple[Tensor, Tensor], dict]:
    """Inputs to trace with, and the dynamic sizes: the batch, and the length up to n."""
    longest = model.encoder.max_length
    length = max(2, min(longest - 1, longest // 2 + 3))  # neither n nor 1, which a trace may take for constants
    ids = random_tokens(model, 2, length, torch.Generator().manual_seed(0))
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    sizes = {0: torch.export.Dim("batch", min=1, max=2**20), 1: torch.export.Dim("length", min=1, max=longest)}
    return (ids, mask), {"input_ids": sizes, "attention_mask": sizes}


@contextmanager
def traceable(model: TrainedModel, form: str) -> Iterator[None]:
    """Reports, in one line, a user's own class that cannot be traced; with this project's classes it is a bug of ours."""
    try:
        yield
    except Exception as error:
        if not (own := own_classes(model.encoder)):
            raise
        forward = "a forward without branches on tensors and lengths, and without a slice E[:, :length] (pad x to n instead)"
        more = f", but {' and '.join(own)} cannot be traced for every length ({first_line(error)})"
        raise SettingError("format", form, f"safetensors, huggingface, or {forward}", more=more) from error


def traced(model: TrainedModel) -> torch.export.ExportedProgram:
    inputs, sizes = example(model)
    return torch.export.export(Graph(model), inputs, dynamic_shapes=sizes, strict=False)


def write(model: TrainedModel, folder: Path) -> None:
    """Writes config.json, tokenizer.json, if there is a tokenizer, and model.pt2."""
    write_config(model, folder)
    with traceable(model, "torch"):
        program = traced(model)
    # Through memory: on a full disk, closing torch's own file would abort the process.
    content = io.BytesIO()
    torch.export.save(program, content)
    (folder / PROGRAM).write_bytes(content.getbuffer())


def logits(model: TrainedModel, folder: Path) -> nn.Module:
    """The written model, as a function of input_ids and attention_mask (B, N)."""
    return torch.export.load(folder / PROGRAM).module()
