"""What stands on the encoder: the masked-language-model head.

Shapes: B batch, N tokens, M masked positions a row, D hidden width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_linformer.model.encoder import Encoder, EncoderConfig

IGNORED = -100  # a label that counts for nothing: torch's own default for cross_entropy


class MaskedLMHead(nn.Module):
    """RoBERTa's head: dense, GELU, LayerNorm, then the token embedding's transpose and a bias."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        nn.init.normal_(self.dense.weight, std=config.initializer_range)
        nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) → (..., D), what the tied output matrix is applied to."""
        return self.norm(functional.gelu(self.dense(hidden)))


class MaskedLanguageModel(nn.Module):
    """Encoder and head; logits are computed at the masked positions only, 15 % of the vocabulary matmul.

    Args:
        config: the encoder's.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.encoder = Encoder(config)
        self.head = MaskedLMHead(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits (B, M, V) at ``positions`` (B, M) int64, or at all N tokens."""
        features = self.features(input_ids, attention_mask, positions)
        return functional.linear(features, self.encoder.tokens.weight, self.head.bias)

    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """(B, M, D), what the output matrix is applied to, at ``positions`` (B, M) or at all N tokens."""
        hidden = self.encoder(input_ids, attention_mask)
        if positions is not None:
            hidden = hidden.take_along_dim(positions[..., None], dim=1)
        return self.head(hidden)

    def loss(self, input_ids: Tensor, positions: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood, in nats, of labels (B, M) at positions (B, M); IGNORED labels count for nothing."""
        # Not torch's linear_cross_entropy: what it saves at 15 % of the tokens is little, and its chunked path doesn't compile.
        logits = self(input_ids, attention_mask, positions)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def nll(self, input_ids: Tensor, positions: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Negative log-likelihood of each label, (B, M) float32 in nats, 0 where a label is IGNORED: what perplexity sums.

        The logits are computed in float32 whatever the autocast: rounded to bfloat16 they move the perplexity.
        """
        features = self.features(input_ids, attention_mask, positions)
        with torch.autocast(features.device.type, enabled=False):
            logits = functional.linear(features.float(), self.encoder.tokens.weight.float(), self.head.bias.float())
            return functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
