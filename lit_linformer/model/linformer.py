"""The Linformer's attention, over k projected slots. Shapes and names as in attention.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attention import ATTENTIONS, Attention, log_mass, split_heads, zero_pads
from .errors import SettingError, UserError
from .parts import exporting
from .projection import PROJECTIONS, Projection, check_dims, longer_dims, make_projection

if TYPE_CHECKING:
    from .encoder import EncoderConfig

ORDERS = ("compress_first", "project_first")


@dataclass(frozen=True)
class Sharing:
    """Which E and F are shared (paper, section 4).

    heads_apart: each head has its own matrices; two: F is a second matrix, not E; one_for_layers: all layers share one E = F.
    """

    heads_apart: bool = False
    two: bool = False
    one_for_layers: bool = False


SHARINGS = {
    "none": Sharing(heads_apart=True, two=True),
    "heads": Sharing(heads_apart=True),
    "headwise": Sharing(two=True),
    "key-value": Sharing(),
    "layerwise": Sharing(one_for_layers=True),
}


@ATTENTIONS.add("linformer")
class LinformerAttention(Attention):
    """Self-attention with linear complexity: softmax(q (E K)ᵀ / √d) F V (paper, equation 7), O(N K) in time and memory.

    Args:
        hidden_size: D.
        num_heads: H; divides D.
        max_length: n, the longest input.
        projection_dim: k.
        sharing: which E and F are shared (paper, section 4). none: a matrix for each head, for keys and for values; heads
            (not in the paper): a matrix for each head, E = F; headwise: one E and one F for all heads; key-value: E = F;
            layerwise: as key-value, but the one E belongs to the encoder, which hands it to ``forward``.
        projection: linear | conv | mean | max | gaussian, see projections.py, dynamic or gated, each in a file of its name, or
            the path of a class.
        projection_init: how a learned E is initialised, see EncoderConfig: block_mean | split | strided | squares | normal |
            xavier.
        projection_noise: standard deviation of noise added to that initialisation.
        order: compress_first computes W_K (E x), project_first E (W_K x). Without biases they are equal for every linear E;
            with them the first adds b to each slot (as the authors' code does) and the second b times E's row sum (as the
            paper's formula does). Compressing first saves 4 (N - K) D² operations, and with E = F 2 K N D, but needs one E for
            all heads: with sharing="none" or "heads" the order is project_first.
        mass_bias: add log(mass) to a slot's scores, where mass is the share of |E_j| on real tokens: an empty slot gets no
            attention. No effect on rows of full length. Off by default: a model trained on full rows has learnt to spread its
            attention over all slots, and did worse on short rows with it (docs/LOG.md).
        short_rows: what E (linear, gaussian, conv) reads at positions beyond the end of a row: zeros, as in the paper, or the
            mean of the row's tokens.
        local_width: width w of a ``LocalConvolution`` of x, added to the heads' output before W_O; 0: none.
        dropout: probability with which attention weights are dropped.
        projection_options: further arguments of the projection, such as those of gated or of your own class.
        bias: whether the linear layers have one.
        rotary_base: as Attention's. Each key is rotated by its own token's position, and E mixes the results: equation 7 with
            the Transformer's keys, so that the scores of slots are the Transformer's scores times Eᵀ. (Slots made before the
            rotation would have no single position to be rotated by.)
    """

    title, slots, rotary = "Linformer", True, True
    settings = (
        "projection_dim", "sharing", "projection", "projection_init", "projection_noise", "projection_options", "order",
        "mass_bias", "short_rows",
    )  # fmt: skip

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
        short_rows: str = "zeros",
        local_width: int = 0,
        dropout: float = 0.0,
        projection_options: dict[str, Any] | None = None,
        bias: bool = True,
        rotary_base: float | None = None,
    ):
        super().__init__(hidden_size, num_heads, max_length, local_width, dropout, bias, rotary_base)
        check_sharing(sharing, order)
        if rotary_base is not None:
            check_rotary(sharing, order, projection, projection_options or {})
        shares = SHARINGS[sharing]
        self.compress_first = compresses_first(sharing, order)
        self.mass_bias, self.projection_dim = mass_bias, projection_dim

        def made() -> Projection:
            return make_projection(
                projection,
                max_length,
                projection_dim,
                num_heads=num_heads if shares.heads_apart else None,
                channels=hidden_size if self.compress_first else hidden_size // num_heads,
                init=projection_init,
                noise=projection_noise,
                hidden_size=hidden_size,
                short_rows=short_rows,
                **(projection_options or {}),
            )

        self.E = None if shares.one_for_layers else made()
        self.F = made() if shares.two else None

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        check_sharing(config.sharing, config.order)
        dims = check_dims(config)
        if SHARINGS[config.sharing].one_for_layers and len(set(dims)) > 1:
            raise SettingError(
                "projection_dim", dims, f"one k for all layers, which share one E with sharing={config.sharing!r}"
            )
        kind = PROJECTIONS.find(config.projection)
        if config.position == "rotary":
            check_rotary(config.sharing, config.order, config.projection, config.projection_options or {})
        PROJECTIONS.check_options(config.projection, PROJECTION_ARGUMENTS, config.projection_options)
        for dim in dims:
            kind.check(config.max_length, dim, config.projection_init)
            kind.check_options(config.max_length, dim, config.projection_options or {})
        if config.mass_bias and kind.mass is Projection.mass:
            raise SettingError("mass_bias", True, "false, since it has no `mass`", when=f"with projection={config.projection}")

    @classmethod
    def arguments(cls, config: "EncoderConfig", layer: int) -> dict[str, Any]:
        own = {name: getattr(config, name) for name in LinformerAttention.settings}
        return super().arguments(config, layer) | own | {"projection_dim": config.projection_dims[layer]}

    @classmethod
    def shared(cls, config: "EncoderConfig") -> Projection | None:
        """The encoder's E, with layerwise sharing."""
        if not SHARINGS[config.sharing].one_for_layers:
            return None
        first = compresses_first(config.sharing, config.order)
        return make_projection(
            config.projection,
            config.max_length,
            config.projection_dims[0],
            channels=config.hidden_size if first else config.hidden_size // config.num_heads,
            init=config.projection_init,
            noise=config.projection_noise,
            hidden_size=config.hidden_size,
            short_rows=config.short_rows,
            **(config.projection_options or {}),
        )

    @classmethod
    def details(cls, config: "EncoderConfig") -> list[str]:
        dims = config.projection_dims
        kind = [config.projection] if config.projection != type(config).projection else []
        return [f"k = {dims[0] if len(set(dims)) == 1 else dims}", config.sharing, *kind]

    @classmethod
    def columns(cls, config: "EncoderConfig", layer: int, length: int) -> int:
        return config.projection_dims[layer]

    @classmethod
    def lengthened(cls, config: "EncoderConfig", max_length: int, how: str) -> dict[str, Any]:
        return longer_dims(config, max_length, how)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        need_weights: bool = False,
        shared: Projection | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: (B, N, D), padded on the right.
            attention_mask: (B, N) bool, True at real tokens; None when all are.
            need_weights: also return the attention maps, without dropout.
            shared: the encoder's E = F, with sharing="layerwise".

        Returns:
            (B, N, D), and the maps (B, H, N, K) or None.
        """
        self.check_length(x)
        q = split_heads(self.queries(x), self.num_heads)
        k, v = self.compress(x, attention_mask, shared)
        bias = self.slot_bias(x, attention_mask, shared, q.dtype)
        context, weights = self.attend(q, k, v, bias, need_weights)
        return self.output(context, x, attention_mask), weights

    def compress(
        self, x: Tensor, attention_mask: Tensor | None = None, shared: Projection | None = None
    ) -> tuple[Tensor, Tensor]:
        """The slots' keys and values, (B, H, K, d) each."""
        E, F = self.projections(shared)
        # Padding is zeroed right before E, in every layer, so that none ever reaches a slot.
        if not self.compress_first:
            k = split_heads(zero_pads(self.keys(x), attention_mask), self.num_heads)
            v = split_heads(zero_pads(self.value(x), attention_mask), self.num_heads)
            return self.project(k, v, x, attention_mask, shared)
        x = zero_pads(x, attention_mask)
        if E.commutes and not exporting() and x.shape[1] < E.projection_dim:
            # Fewer tokens than slots: E (x W) + b is (E x) W + b, with W applied to N rows instead of K. (An exported program
            # may serve any length, and cannot choose.)
            k, v = (
                _projected_after(linear, to_slots, x, attention_mask) for linear, to_slots in ((self.key, E), (self.value, F))
            )
        else:
            x_E = E.for_input(x, attention_mask)(x, attention_mask)  # (B, K, D)
            x_F = x_E if F is E else F.for_input(x, attention_mask)(x, attention_mask)
            k, v = self.key(x_E), self.value(x_F)
        return split_heads(k, self.num_heads), split_heads(v, self.num_heads)

    def project(
        self, k: Tensor, v: Tensor, x: Tensor, attention_mask: Tensor | None, shared: Projection | None
    ) -> tuple[Tensor, Tensor]:
        """E k and F v, (B, H, K, d) each, for keys and values (B, H, N, d), zero at padding; x: the layer's input (B, N, D)."""
        E, F = self.projections(shared)
        to_slots = E.for_input(x, attention_mask)
        k = to_slots(k, attention_mask)
        return k, (to_slots if F is E else F.for_input(x, attention_mask))(v, attention_mask)

    def slot_bias(
        self, x: Tensor, attention_mask: Tensor | None, shared: Projection | None, dtype: torch.dtype
    ) -> Tensor | None:
        """With mass_bias, log(mass) of the slots, (1 or B, 1 or H, 1, K); None without it, and if every row is full."""
        mass = self.projections(shared)[0].mass(x, attention_mask) if self.mass_bias else None
        return log_mass(mass, dtype)

    def projections(self, shared: Projection | None) -> tuple[Projection, Projection]:
        """E and F of this layer; UserError if all layers share E and it was not passed as ``shared``."""
        E = shared if self.E is None else self.E
        if E is None:
            raise UserError(
                "sharing='layerwise' needs the shared E: pass shared=make_projection(…), or take 'key-value' for one layer"
            )
        return E, E if self.F is None else self.F

    def matrix(self, x: Tensor, shared: Projection | None = None) -> Tensor | None:
        """The matrix E of the keys."""
        return self.projections(shared)[0].matrix(x)

    def flops(self, length: int, shared: Projection | None = None) -> int | None:
        rows, applied = self._applied(length, shared)
        compressing = [projection.flops(length, self.hidden_size) for projection in applied]
        compressing += [projection.weights_flops(length) for projection in dict.fromkeys(applied)]
        if any(one is None for one in compressing):
            return None
        counted = sum(one for one in compressing if one is not None)
        return self.linear_flops(length, rows) + counted + 4 * self.projection_dim * length * self.hidden_size

    def fixed_flops(self, length: int, shared: Projection | None = None) -> int:
        applied = self._applied(length, shared)[1]
        fixed = [one for one in applied if not any(weight.requires_grad for weight in one.parameters())]
        return sum(projection.flops(length, self.hidden_size) or 0 for projection in fixed)

    def _applied(self, length: int, shared: Projection | None) -> tuple[int, list[Projection]]:
        """How many rows W_K and W_V are applied to, and the projections that are applied, one after the other."""
        E, F = self.projections(shared)
        if not self.compress_first or (E.commutes and length < self.projection_dim):
            return length, [E, F]
        return self.projection_dim, [E] if F is E else [E, F]


def _projected_after(linear: nn.Module, projection: Projection, x: Tensor, mask: Tensor | None) -> Tensor:
    """E (x W) + b, where W is applied by the layer itself, which may hold an adapter or have hooks."""
    y = linear(x)
    if linear.bias is None:
        return projection(y, mask)
    bias = linear.bias.to(y.dtype)
    return projection(y - bias, mask) + bias


# Arguments that are passed to make_projection here, so that projection_options may not name them.
PROJECTION_ARGUMENTS = {"max_length", "projection_dim", "num_heads", "channels", "init", "noise", "hidden_size", "short_rows"}


def compresses_first(sharing: str, order: str) -> bool:
    """Whether x is compressed before W_K and W_V, which is possible only if all heads share one matrix."""
    return order == ORDERS[0] and not SHARINGS[sharing].heads_apart


def check_sharing(sharing: str, order: str) -> None:
    """Raises ValueError, naming the setting, for an unknown value."""
    for name, value, allowed in (("sharing", sharing, SHARINGS), ("order", order, ORDERS)):
        if value not in allowed:
            raise SettingError(name, value, ", ".join(allowed))


def check_rotary(sharing: str, order: str, projection: str, options: dict[str, Any]) -> None:
    """Raises SettingError for settings with which a slot cannot be made of rotated keys."""
    when = "with position='rotary'"
    if compresses_first(sharing, order):
        allowed = "project_first, since a key is rotated by its token's position before E mixes it with others"
        raise SettingError("order", order, allowed, when=when)
    if not PROJECTIONS.find(projection).weighs_tokens(options):
        chosen = "".join(f", {name}={value}" for name, value in options.items())
        allowed = "one whose slots are sums of tokens, with one weight for all channels: linear, mean, gaussian, dynamic, gated"
        raise SettingError("projection", projection, f"{allowed} with gate=head", more=chosen, when=when)
