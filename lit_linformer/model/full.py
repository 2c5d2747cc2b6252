"""The Transformer's attention, over all n tokens. Shapes as in attention.py."""

from torch import Tensor, nn

from .attention import ATTENTIONS, Attention, as_bias


@ATTENTIONS.add("full")
class SelfAttention(Attention):
    """softmax(q kᵀ / √d) v over all N tokens, with torch's fused kernels. Arguments as for ``Attention``."""

    title, exact, rotary = "Transformer", True, True

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, D) and (B, N) bool or None → (B, N, D), and the maps (B, H, N, N) if asked for."""
        q, k, v = self.heads(x)
        bias = None if attention_mask is None else as_bias(attention_mask[:, None, None], q.dtype)
        context, weights = self.attend(q, k, v, bias, need_weights)
        return self.output(context, x, attention_mask), weights

    def flops(self, length: int, shared: nn.Module | None = None) -> int:
        return self.linear_flops(length, length) + 4 * length * length * self.hidden_size
