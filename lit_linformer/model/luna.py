"""Luna's attention. Shapes as in attention.py; here the K slots are latents."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .attention import ATTENTIONS, Attention, as_bias, merge_heads, split_heads
from .errors import SettingError, UserError
from .projection import check_dims

if TYPE_CHECKING:
    from .encoder import EncoderConfig


@ATTENTIONS.add("luna")
class LunaAttention(Attention):
    """K latents attend to the tokens (pack), then the tokens to the latents (unpack), as in Luna (Ma et al., 2021, section 3).

        Y_P = softmax(W_PQ P (W_PK x)ᵀ/√d) W_PV x
        Y_x = softmax(W_Q x (W_K Y_P)ᵀ/√d) W_V Y_P

    In the first layer P is the LayerNorm of the encoder's latents, in the others that of the previous layer's P + Y_P. O(N K).

    Args:
        hidden_size, …: as Attention's.
        projection_dim: K, the same in all layers.
    """

    title, settings, handed_on = "Luna", ("projection_dim",), ("latents",)

    def __init__(self, hidden_size: int, num_heads: int, max_length: int, projection_dim: int, *settings: Any, **more: Any):
        super().__init__(hidden_size, num_heads, max_length, *settings, **more)
        self.projection_dim = projection_dim
        biased = self.key.bias is not None
        self.pack_query, self.pack_key, self.pack_value = (nn.Linear(hidden_size, hidden_size, biased) for _ in range(3))
        self.latent_norm = nn.LayerNorm(hidden_size, bias=biased)

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        dims = check_dims(config)
        if len(set(dims)) > 1:
            allowed = "one k for all layers, which hand their latents on"
            raise SettingError("projection_dim", dims, allowed, when=f"with attention={config.attention}")

    @classmethod
    def arguments(cls, config: "EncoderConfig", layer: int) -> dict[str, Any]:
        return super().arguments(config, layer) | {"projection_dim": config.projection_dims[layer]}

    @classmethod
    def shared(cls, config: "EncoderConfig") -> nn.Embedding:
        """The latents that the first layer starts from, (K, D)."""
        return nn.Embedding(config.projection_dims[0], config.hidden_size)

    @classmethod
    def details(cls, config: "EncoderConfig") -> list[str]:
        return [f"k = {config.projection_dims[0]}"]

    @classmethod
    def columns(cls, config: "EncoderConfig", layer: int, length: int) -> int:
        return config.projection_dims[layer]

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        need_weights: bool = False,
        shared: nn.Embedding | None = None,
        latents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Attend.

        Args:
            x: (B, N, D), padded on the right.
            attention_mask: (B, N) bool, True at real tokens; None when all are.
            need_weights: also return the maps of the unpacking, without dropout.
            shared: the encoder's latents; only the first layer reads them.
            latents: the previous layer's latents, (B, K, D); None in the first layer.

        Returns:
            (B, N, D), the maps (B, H, N, K) or None, and the latents for the next layer.
        """
        self.check_length(x)
        P, packed = self.pack(x, attention_mask, shared, latents)
        q = split_heads(self.query(x), self.num_heads)
        context, weights = self.attend(q, *self._unpacked(packed), None, need_weights)
        return self.output(context, x, attention_mask), weights, {"latents": P + packed}

    def pack(
        self, x: Tensor, attention_mask: Tensor | None, shared: nn.Embedding | None, latents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """P and Y_P, (B, K, D) each; UserError if neither ``latents`` nor the encoder's ``shared`` ones are given."""
        if latents is None:
            if shared is None:
                raise UserError("luna's first layer needs the latents: pass shared=LunaAttention.shared(config)")
            latents = shared.weight.expand(x.shape[0], -1, -1)
        P = self.latent_norm(latents)
        q, k, v = (split_heads(part, self.num_heads) for part in (self.pack_query(P), self.pack_key(x), self.pack_value(x)))
        bias = None if attention_mask is None else as_bias(attention_mask[:, None, None], q.dtype)
        return P, merge_heads(self.attend(q, k, v, bias)[0])

    def compress(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        shared: nn.Embedding | None = None,
        latents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the latents, (B, H, K, d) each."""
        return self._unpacked(self.pack(x, attention_mask, shared, latents)[1])

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        return split_heads(self.key(packed), self.num_heads), split_heads(self.value(packed), self.num_heads)

    def flops(self, length: int, shared: nn.Module | None = None) -> int:
        K, D = self.projection_dim, self.hidden_size
        return self.linear_flops(length, K) + 4 * length * D * D + 2 * K * D * D + 8 * K * length * D
