"""Slots, plus nearby tokens. Shapes as in attention.py and chunks.py; w window size, here S = 2 w."""

from typing import TYPE_CHECKING, Annotated, Any

from torch import Tensor, nn

from .attention import ATTENTIONS, merge_heads, split_heads
from .chunks import check_even, columns, near_flops, near_maps, near_scores, near_values, real_columns
from .errors import SettingError
from .projection import Projection
from .ranges import Range
from .slots_and_tokens import Pair, Seen, SlotsAndTokens

if TYPE_CHECKING:
    from .encoder import EncoderConfig

Window = Annotated[int, Range(least=2, most=2**16)]


@ATTENTIONS.add("window")
class WindowAttention(SlotsAndTokens):
    """The Linformer's attention with the Long-Short Transformer's window (Zhu et al., 2021, section 3) in the same softmax.

        softmax([q K̄ᵀ ; q K_wᵀ] / √d) [V̄ ; V_w]

    K̄ and V̄ are the slots, from any projection, K_w and V_w the 2 w tokens in the query's window of w and w/2 on each side.
    With ``dual_norm`` (DualLN) keys and values of tokens pass through one LayerNorm, those of slots through another, since
    averages over many tokens are far smaller at first. With projection=dynamic, sharing=heads, order=project_first and
    dual_norm=True it is the paper's model. Linear in N: 2 w columns in addition to K.

    Args:
        hidden_size, …: as LinformerAttention's.
        window: w, even.
        dual_norm: whether to use the two LayerNorms, with torch's epsilon; the encoder's norm_type does not change them.
    """

    title = "Linformer with window"
    grows = "interpolate"  # more slots would take weight from the tokens in the same softmax

    def __init__(self, *shape: Any, window: Window = 32, dual_norm: bool = False, **more: Any):
        super().__init__(*shape, **more)
        check_even("window", window)
        self.window = window
        biased = self.key.bias is not None
        self.token_norm, self.slot_norm = (nn.LayerNorm(self.hidden_size, bias=biased) if dual_norm else None for _ in range(2))

    @classmethod
    def check(cls, config: "EncoderConfig") -> None:
        super().check(config)
        options = config.attention_options or {}
        check_even("window", options.get("window", 2))
        if config.position == "rotary" and options.get("dual_norm"):
            allowed = "false, since it scales channels that are rotated together differently"
            raise SettingError("attention_options.dual_norm", True, allowed, when="with position='rotary'")

    def see(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, need_weights: bool) -> Seen:
        length, reach = q.shape[2], self.window // 2
        seen = columns(length, self.window, reach, q.device)
        scores = near_scores(q, k, real_columns(seen, attention_mask), reach)
        return scores, lambda weights: near_values(weights, v, seen.shape[1], reach), lambda weights: near_maps(weights, seen)

    def of_tokens(self, x: Tensor) -> Pair:
        k, v = super().of_tokens(x)
        return (k, v) if self.token_norm is None else (self.token_norm(k), self.token_norm(v))

    def keys_and_values(self, x: Tensor, attention_mask: Tensor | None, shared: Projection | None) -> tuple[Pair, Pair]:
        slots, tokens = super().keys_and_values(x, attention_mask, shared)
        if self.slot_norm is not None:
            of_k, of_v = (split_heads(self.slot_norm(merge_heads(part)), self.num_heads) for part in slots)
            slots = of_k, of_v
        return slots, tokens

    def token_flops(self, length: int) -> int:
        return near_flops(length, self.window, self.window // 2, self.hidden_size)
