"""Parts of the encoder that EncoderConfig chooses among: positions, norms, feed-forward. Shapes as in attention.py."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .errors import SettingError, UserError

if TYPE_CHECKING:
    from .encoder import EncoderConfig

FEED_FORWARDS = ("gelu", "geglu")
NORM_TYPES = ("layer", "rms")


def exporting() -> bool:
    """Whether torch.export is tracing, possibly for any length, and not torch.compile.

    During torch.compile torch 2.11's is_exporting() is always True. Export uses dynamo, as compile does, only with strict=True.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is that: for sums and losses, which half precision would round."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exact_sum(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """A sum in float32 at least: the sum over a long row may overflow float16."""
    return x.sum(dim, keepdim=keepdim, dtype=torch.promote_types(x.dtype, torch.float32))


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context without autocast; it also works on a device that has none, such as meta."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def rotated(x: Tensor, num_heads: int, base: float) -> Tensor:
    """Queries or keys (B, N, D) rotated by their positions: rotary positions (Su et al., 2021, RoFormer, section 3.4.2).

    In each head, channels c and c + d/2 of token t are a point in a plane, rotated by the angle t base^(-2c/d). With R_t for
    all channels together (R_i q_i)·(R_t k_t) = q_i·R_(t-i) k_t, so that a score depends on the tokens' relative position alone.
    """
    length, half = x.shape[1], x.shape[-1] // num_heads // 2
    exact = torch.promote_types(x.dtype, torch.float32)  # bfloat16 cannot tell positions 256 and 257 apart
    rate = base ** (-torch.arange(half, dtype=exact, device=x.device) / half)
    angle = torch.arange(length, dtype=exact, device=x.device)[:, None, None] * rate  # (N, 1, d/2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.unflatten(-1, (num_heads, 2, half)).unbind(-2)  # (B, N, H, d/2) each
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2).to(x.dtype)


def image_side(max_length: int) -> tuple[int, int]:
    """The square image whose pixels, row by row, are n tokens: its side w in pixels, and how many tokens come before it.

    n = w²: none; n = w² + 2: one before and one after it, such as LongRangeData's bos and eos. SettingError for any other n.
    """
    for around in (0, 1):
        side = math.isqrt(max(0, max_length - 2 * around))
        if side and side * side + 2 * around == max_length:
            return side, around
    allowed = "w² tokens, or w² + 2 with bos and eos: 1024, 1026"
    raise SettingError("max_length", max_length, allowed, more=", which is no square image")


class ImagePositions(nn.Module):
    """Positions of the pixels of a square image: an embedding of the row plus one of the column, and one each for bos and eos.

    2 w vectors instead of w², so that what is learnt at one pixel holds for its row and its column. The Sparse Transformer
    (Child et al., 2019, "Modeling diverse data types") adds embeddings of row, column and channel in this way.
    """

    def __init__(self, max_length: int, hidden_size: int):
        super().__init__()
        side, around = image_side(max_length)
        self.rows, self.columns = nn.Embedding(side, hidden_size), nn.Embedding(side, hidden_size)
        self.around = nn.Embedding(2, hidden_size) if around else None

    @property
    def weight(self) -> Tensor:
        """(n, D), like that of an ``nn.Embedding`` with n positions."""
        pixels = (self.rows.weight[:, None] + self.columns.weight).flatten(0, 1)
        if self.around is None:
            return pixels
        return torch.cat([self.around.weight[:1], pixels, self.around.weight[1:]])


# Each takes n and D and makes the module whose ``weight``, (n, D), is added to the tokens. None: nothing is added.
POSITIONS: dict[str, Callable[[int, int], nn.Embedding | ImagePositions | None]] = {
    "learned": nn.Embedding,
    "rotary": lambda max_length, hidden_size: None,
    "image": ImagePositions,
}


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + ε) · weight (Zhang and Sennrich, 2019): no mean is taken, and there is no bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))  # float32 in bf16-mixed, which autocast ensures for LayerNorm alone


def make_norm(config: "EncoderConfig") -> nn.Module:
    """A norm over the last dimension, D, as config.norm_type says: one of NORM_TYPES."""
    if config.norm_type == "rms":
        return RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)


def inner_width(config: "EncoderConfig") -> int:
    """Width of the feed-forward: intermediate_size; for GeGLU, which has three matrices, two thirds of it, a multiple of 8.

    So both have the same number of parameters and operations, up to the rounding.
    """
    if config.feed_forward == "gelu":
        return config.intermediate_size
    return max(1, round(config.intermediate_size / 12)) * 8


def differences(config: "EncoderConfig") -> list[str]:
    """How the encoder's parts differ from the paper's, in a few words each."""
    chosen = {
        "rotary positions": config.position == "rotary",
        "positions of an image": config.position == "image",
        "GeGLU": config.feed_forward == "geglu",
        "RMSNorm": config.norm_type == "rms",
        "no biases": not config.bias,
    }
    return [words for words, true in chosen.items() if true]


def check_parts(config: "EncoderConfig") -> None:
    """Raises UserError for an attention, a head width or an n that does not work with the positions."""
    if config.position == "image":
        image_side(config.max_length)
    if config.position != "rotary":
        return
    if (width := config.hidden_size // config.num_heads) % 2:
        allowed = "an even head width, since channels are rotated in pairs"
        raise SettingError("hidden_size/num_heads", width, allowed, when="with position='rotary'")
    if not config.attention_kind.rotary:
        silent = f", but attention={config.attention} does not say that its forward rotates queries and keys"
        raise SettingError("position", "rotary", "learned, or a class with `rotary = True`", more=silent)


def check_input(tokens: Tensor, input_size: int) -> None:
    """Raises UserError for tokens that are not (B, N) ids or, with an input_size, (B, N, input_size) floats."""
    shape = tuple(tokens.shape)
    if input_size and not (len(shape) == 3 and shape[2] == input_size and tokens.is_floating_point()):
        what = f"input_ids are {str(tokens.dtype).removeprefix('torch.')} of shape {shape}"
        raise UserError(what, f"floats of shape (B, N, {input_size})", when=f"with input_size={input_size}")
    if not input_size and len(shape) != 2:
        raise UserError(f"input_ids have shape {shape}", "(B, N), or an input_size, the numbers that a token consists of")
    if shape[1] == 0:
        raise UserError("input_ids have no tokens", "one or more in each row")


def check_mask(mask: Tensor, ids: Tensor, training: bool) -> None:
    """Raises UserError for a mask (B, N) bool that does not have the tokens' shape, or has padding before real tokens.

    The latter is checked only where that is cheap: not in training on a GPU, since it would have to wait for the GPU, nor
    while the model is traced.
    """
    if mask.shape != ids.shape[:2]:
        raise UserError(f"attention_mask has shape {tuple(mask.shape)}", f"input_ids', {tuple(ids.shape[:2])}")
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced or not (mask.is_cpu or (mask.is_cuda and not training and not torch.cuda.is_current_stream_capturing())):
        return
    try:
        pads_first = bool((mask[:, 1:] > mask[:, :-1]).any())
    except RuntimeError:  # torch.func.vmap's and fake tensors have no values to look at
        return
    if pads_first:
        allowed = "real tokens first, then pads: of a tokenizer of transformers padding_side='right'"
        raise UserError("attention_mask has pads before real tokens", allowed)
