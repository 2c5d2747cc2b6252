"""Multi-head attention: Linformer's over k projected slots, and the Transformer's over all n tokens.

Shapes: B batch, N tokens (N <= n = max_length), K = k projected slots, H heads, D hidden width, d = D/H head width, w width of
the local convolution. Names as in the paper (section 4): x input, q, k, v queries, keys, values, E and F the projections.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_linformer.model.projection import Projection

SHARINGS = ("none", "headwise", "key-value", "layerwise")
ORDERS = ("compress_first", "project_first")


class LinformerAttention(nn.Module):
    """Self-attention with linear complexity: softmax(q (E K)ᵀ / √d) F V (paper, equation 7), O(N K) in time and memory.

    Args:
        hidden_size: D.
        num_heads: H; divides D.
        max_length: n, the longest input.
        projection_dim: k.
        sharing: which E and F are one and the same (paper, section 4). none: a matrix a head for keys and for values;
            headwise: one E and one F for all heads; key-value: E = F; layerwise: as key-value, but the one E belongs to the
            encoder, which hands it to ``forward``.
        projection: linear | conv | mean | max | gaussian, see ``Projection``.
        projection_init: how a learned E starts: block_mean | split | strided | normal | xavier.
        projection_noise: standard deviation of noise on top of that start.
        order: compress_first computes W_K (E x), project_first E (W_K x). Without biases they are equal for every linear E;
            with them the first adds b to each slot (as the authors' code does) and the second b times E's row sum (as the
            paper's formula does). Compressing first saves 4 D² floating-point operations a token, but needs one E for all
            heads: with sharing="none" the order is project_first.
        mass_bias: add log(mass) to a slot's scores, where mass is the share of |E_j| on real tokens: an empty slot gets no
            attention. Without effect on rows of full length. Off: a model trained on full rows has learnt to spread over
            all slots, and was worse on short ones with it (docs/LOG.md).
        local_width: width w of a ``LocalConvolution`` of x, added to the heads' output before W_O; 0: none.
        dropout: probability with which attention weights are dropped.
        causal: refused; every slot mixes all positions, so no mask keeps later tokens out.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        projection_dim: int,
        sharing: str = "headwise",
        projection: str = "linear",
        projection_init: str = "block_mean",
        projection_noise: float = 0.0,
        order: str = "compress_first",
        mass_bias: bool = False,
        local_width: int = 0,
        dropout: float = 0.0,
        causal: bool = False,
    ):
        super().__init__()
        check_heads(hidden_size, num_heads)
        check_causal(causal)
        if sharing not in SHARINGS:
            raise ValueError(f"sharing is {sharing!r}; allowed: {', '.join(SHARINGS)}")
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; allowed: {', '.join(ORDERS)}")
        self.num_heads, self.dropout = num_heads, dropout
        self.compress_first = order == "compress_first" and sharing != "none"
        self.mass_bias = mass_bias
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

        def projection_matrix() -> Projection:
            return Projection(
                projection,
                max_length,
                projection_dim,
                num_heads=num_heads if sharing == "none" else None,
                channels=hidden_size if self.compress_first else hidden_size // num_heads,
                init=projection_init,
                noise=projection_noise,
            )

        self.local = LocalConvolution(hidden_size, local_width) if local_width else None
        self.E = None if sharing == "layerwise" else projection_matrix()
        self.F = projection_matrix() if sharing in ("none", "headwise") else None
        self.max_length = max_length

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        need_weights: bool = False,
        shared: Projection | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: (B, N, D), pads on the right.
            attention_mask: (B, N) bool, True at real tokens; None when all are.
            need_weights: also return the attention maps, without dropout.
            shared: the encoder's E = F, with sharing="layerwise".

        Returns:
            (B, N, D), and the maps (B, H, N, K) or None.
        """
        if x.shape[1] > self.max_length:
            raise ValueError(f"the input has {x.shape[1]} tokens; allowed: up to max_length = {self.max_length}")
        E = shared if self.E is None else self.E
        if E is None:
            raise ValueError(
                "sharing='layerwise' needs the shared E: pass shared=Projection(...), or take 'key-value' for one layer"
            )
        F = E if self.F is None else self.F
        q = split_heads(self.query(x), self.num_heads)
        local = 0.0 if self.local is None else self.local(zero_pads(x, attention_mask))
        # Pads are zeroed right before E, in every layer: only so does no pad ever reach a slot.
        if self.compress_first:
            x = zero_pads(x, attention_mask)
            if E.commutes and x.shape[1] < E.projection_dim:
                # Fewer tokens than slots: E (x W) + b is (E x) W + b, with W applied to N rows instead of K.
                k, v = E(functional.linear(x, self.key.weight)), F(functional.linear(x, self.value.weight))
                k, v = k + self.key.bias.to(k.dtype), v + self.value.bias.to(v.dtype)
            else:
                x_E = E(x, attention_mask)  # (B, K, D)
                x_F = x_E if F is E else F(x, attention_mask)
                k, v = self.key(x_E), self.value(x_F)
            k, v = split_heads(k, self.num_heads), split_heads(v, self.num_heads)
        else:
            k = split_heads(zero_pads(self.key(x), attention_mask), self.num_heads)
            v = split_heads(zero_pads(self.value(x), attention_mask), self.num_heads)
            k, v = E(k, attention_mask), F(v, attention_mask)  # (B, H, K, d)
        bias = log_mass(E.mass(x, attention_mask), q.dtype) if self.mass_bias else None
        context, weights = attend(q, k, v, bias, self.dropout if self.training else 0.0, need_weights)
        return self.out(merge_heads(context) + local), weights


class SelfAttention(nn.Module):
    """The Transformer's attention, softmax(q kᵀ / √d) v over all N tokens, on torch's fused kernels.

    Args:
        hidden_size: D.
        num_heads: H; divides D.
        max_length: n, the longest input.
        local_width: as in ``LinformerAttention``.
        dropout: probability with which attention weights are dropped.
        causal: refused, as in ``LinformerAttention``: what is trained here is bidirectional.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        local_width: int = 0,
        dropout: float = 0.0,
        causal: bool = False,
    ):
        super().__init__()
        check_heads(hidden_size, num_heads)
        check_causal(causal)
        self.num_heads, self.max_length, self.dropout = num_heads, max_length, dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.local = LocalConvolution(hidden_size, local_width) if local_width else None

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, D) and (B, N) bool or None → (B, N, D), and the maps (B, H, N, N) if asked for."""
        if x.shape[1] > self.max_length:
            raise ValueError(f"the input has {x.shape[1]} tokens; allowed: up to max_length = {self.max_length}")
        q, k, v = (split_heads(linear(x), self.num_heads) for linear in (self.query, self.key, self.value))
        local = 0.0 if self.local is None else self.local(zero_pads(x, attention_mask))
        bias = None if attention_mask is None else log_mass(attention_mask[:, None], q.dtype)
        context, weights = attend(q, k, v, bias, self.dropout if self.training else 0.0, need_weights)
        return self.out(merge_heads(context) + local), weights


class LocalConvolution(nn.Module):
    """A depthwise convolution over the tokens, (B, N, D) → (B, N, D), that starts at zero: a local branch beside attention.

    Not in the paper. At budgets of millions of tokens it is what lets either model leave the unigram level (docs/LOG.md).

    Args:
        hidden_size: D.
        width: w, odd: the token itself and (w - 1)/2 neighbours on each side.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        if width < 1 or width % 2 == 0:
            raise ValueError(f"local_width is {width}; allowed: 0 (none) or a positive odd number")
        self.width = width
        self.weight = nn.Parameter(torch.zeros(hidden_size, 1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return self._shifted(x)
        # As a 2-d convolution of height 1 the channels-last input needs no copy: 3 × faster than conv1d on CPU, 16 × 512 × 256.
        # CPU autocast is off: the bfloat16 backward of a depthwise convolution took 3 × as long as the float32 one.
        with torch.autocast("cpu", enabled=False):
            x = x.to(self.weight.dtype).transpose(1, 2).unsqueeze(2)
            x = functional.conv2d(x, self.weight, padding=(0, self.width // 2), groups=x.shape[1])
        return x.squeeze(2).transpose(1, 2)

    def _shifted(self, x: Tensor) -> Tensor:
        # The same as a sum of w shifted copies, which a compiler melts into the kernels before and after. Forward and backward
        # on CPU, compiled, 4 × 512 × 768: 17.0 ms instead of 27.2, in bfloat16 14.5 instead of 29.5; eagerly 84 instead of 15.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as the neighbouring matrix products read it
        length, x = x.shape[1], functional.pad(x, (0, 0, self.width // 2, self.width // 2))
        return sum(x[:, shift : shift + length] * self.weight[:, 0, 0, shift] for shift in range(self.width))


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ/√d + bias) v, fused unless the maps are asked for. bias: broadcastable to (B, H, N, K)."""
    # The fused kernel's bfloat16 backward is slow on a CPU: 8 × 4 heads, 512 queries, 128 keys: 28.8 ms, written out 13.7.
    slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[-2] <= 256
    if not need_weights and not slow:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout), None
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return functional.dropout(weights, dropout) @ v, weights if need_weights else None


def log_mass(mass: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """log(mass) as an attention bias: (B, H, K) shares or a bool mask → (B, H, 1, K); None stays None.

    Zero mass becomes a large negative number, not -inf, so that a row with no real token at all stays finite. Half of the
    lowest number, so that adding a score cannot overflow to -inf in half precision.
    """
    if mass is None:
        return None
    lowest = torch.finfo(dtype).min / 2
    bias = mass.to(torch.promote_types(dtype, torch.float32)).log().clamp(min=lowest)
    return bias.to(dtype)[:, :, None]


def zero_pads(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, N, D) with the rows at pads set to zero, whatever stands there (NaN too)."""
    return x if attention_mask is None else x.masked_fill(~attention_mask[..., None], 0.0)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, D) → (B, H, N, d)"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, d) → (B, N, D)"""
    return x.transpose(1, 2).flatten(-2)


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Raises ValueError where the heads don't divide the width."""
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(f"hidden_size is {hidden_size}; allowed: a multiple of num_heads = {num_heads}")


def check_causal(causal: bool) -> None:
    """Raises ValueError for causal=True."""
    if causal:
        raise ValueError(
            "causal is True; allowed: False. E mixes all n positions into every slot: no mask over slots hides later tokens"
        )
