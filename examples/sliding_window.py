"""An attention of your own: each token attends to those at most WINDOW away, with FlexAttention's kernels, in O(n · WINDOW).

    PYTHONPATH=. python run.py benchmark --models fused linformer examples.sliding_window.SlidingWindow --lengths 4096 16384

The kernels are compiled, on a CPU with g++. torch has no backward kernel for a CPU: training there computes all n² scores.
"""

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lit_linformer.model import SelfAttention
from lit_linformer.model.errors import UserError

WINDOW = 256


@functools.lru_cache(maxsize=8)
def near(length: int, device: torch.device) -> BlockMask:
    """The blocks of the (N, N) scores that contain a pair within the window; compiled, so that the full mask is never made."""
    made = torch.compile(create_block_mask, dynamic=False)
    with torch.inference_mode(False):  # training could not use a mask that a validation has made
        return made(lambda b, h, q, k: (q - k).abs() <= WINDOW, None, None, length, length, device=device)


@functools.cache
def kernel():
    return torch.compile(flex_attention, dynamic=False)


class SlidingWindow(SelfAttention):
    """Attention to the tokens at most WINDOW away, for rows without padding."""

    title, exact = "sliding window", False

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise UserError("a row of the batch has pads", "full rows", when="with SlidingWindow")
        q, k, v = self.heads(x)
        if x.device.type == "cpu" and torch.is_grad_enabled():
            places = torch.arange(x.shape[1])
            context = scaled_dot_product_attention(q, k, v, (places[:, None] - places).abs() <= WINDOW)
        else:
            context = kernel()(q, k, v, block_mask=near(x.shape[1], x.device))
        return self.output(context, x, attention_mask), None

    def flops(self, length: int, shared: None = None) -> int:
        return self.linear_flops(length, length) + 4 * length * min(length, 2 * WINDOW + 1) * self.hidden_size
