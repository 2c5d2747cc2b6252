"""The torch format, a torch.export program, and what it shares with onnx: one graph for any batch and length."""

import copy
import io
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_linformer.interop.folder import write_config
from lit_linformer.interop.source import TrainedModel
from lit_linformer.model import Projection

PROGRAM = "model.pt2"


class AnyLength(Projection):
    """The same projection, without branches on the length N, which a trace would take once and for all."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.kind in ("linear", "gaussian"):
            # Whether a slice of columns is contiguous depends on N = n, and the trace would note it: of a matrix a head a slice
            # of tokens, (n, H, K), of one for all a gathered copy. Either is the faster one in onnxruntime, by a tenth.
            if self.weight.dim() == 3:
                return self.by_token[: x.shape[-2]].permute(1, 2, 0) @ x
            columns = torch.arange(x.shape[-2], device=x.device)
            return self.weight.index_select(-1, columns) @ x
        return super().forward(x, mask)

    def mass(self, x: Tensor, mask: Tensor) -> Tensor:
        full = functional.pad(mask, (0, self.max_length - mask.shape[-1]))
        return super().mass(x.new_empty(self.max_length, 1), full)

    def _windows(self, x: Tensor, fill: float) -> Tensor:
        x = functional.pad(x, (0, 0, 0, self.max_length - x.shape[-2]), value=fill)
        return x.unflatten(-2, (self.projection_dim, self.window))


class Graph(nn.Module):
    """Logits of input_ids and attention_mask, (B, N) int64 each, with nothing in it that depends on N but sizes."""

    def __init__(self, model: TrainedModel):
        super().__init__()
        self.net = copy.deepcopy(model.net).requires_grad_(False)
        for module in self.net.modules():
            if isinstance(module, Projection):
                module.__class__ = AnyLength
                if module.commutes and module.weight.dim() == 3:
                    module.by_token = module.weight.permute(2, 0, 1).contiguous()
                # Of two equal formulas the one that suits every length; attention.py picks the other where N < k.
                module.commutes = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.net(input_ids, attention_mask.bool())


def example(model: TrainedModel) -> tuple[tuple[Tensor, Tensor], dict]:
    """Inputs to trace with, and the sizes that are free: the batch, and the length up to n."""
    longest = model.encoder.max_length
    length = max(2, min(longest - 1, longest // 2 + 3))  # not n itself, nor 1, which a trace may take for constants
    ids = torch.zeros(2, length, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    sizes = {0: torch.export.Dim("batch", min=1, max=2**20), 1: torch.export.Dim("length", min=1, max=longest)}
    return (ids, mask), {"input_ids": sizes, "attention_mask": sizes}


def write(model: TrainedModel, folder: Path) -> None:
    """config.json, tokenizer.json and model.pt2."""
    write_config(model, folder)
    inputs, sizes = example(model)
    program = torch.export.export(Graph(model), inputs, dynamic_shapes=sizes, strict=False)
    # By way of memory: on a full disk torch's own file would abort the process when it is closed.
    content = io.BytesIO()
    torch.export.save(program, content)
    (folder / PROGRAM).write_bytes(content.getbuffer())


def logits(model: TrainedModel, folder: Path) -> nn.Module:
    """What was written, as a function of input_ids and attention_mask (B, N)."""
    return torch.export.load(folder / PROGRAM).module()
