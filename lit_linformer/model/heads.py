"""The heads on top of the encoder: the masked-language-model head, and the head that classifies a sequence.

Shapes: B batch, N tokens, M masked positions per row, D hidden width, V vocabulary, C classes, W windows of all documents.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .encoder import Encoder, EncoderConfig
from .errors import SettingError
from .parts import at_least_float32, exact_sum, make_norm, without_autocast

IGNORED = -100  # a label that is ignored: torch's own default for cross_entropy
POOLINGS = ("first", "mean")


class MaskedLMHead(nn.Module):
    """RoBERTa's head: dense, GELU, norm, then the token embedding's transpose and a bias."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, config.bias)
        self.norm = make_norm(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        nn.init.normal_(self.dense.weight, std=config.initializer_range)
        if self.dense.bias is not None:
            nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) → (..., D), to be multiplied by the output matrix, which is the token embedding's."""
        return self.norm(functional.gelu(self.dense(hidden)))


class MaskedLanguageModel(nn.Module):
    """Encoder and head. Logits are computed at the masked positions only: with 15 % masked, 15 % of the vocabulary matmul.

    Args:
        config: the encoder's.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        if config.input_size:
            raise SettingError("input_size", config.input_size, "0", when="with a masked language model, which predicts ids")
        self.encoder = Encoder(config)
        self.head = MaskedLMHead(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits (B, M, V) at ``positions`` (B, M) int64, or at all N tokens."""
        return self._logits(self.encoder(input_ids, attention_mask), positions)

    def _features(self, hidden: Tensor, positions: Tensor | None) -> Tensor:
        """The head's output before the output matrix: (B, M, D) at ``positions`` (B, M), or (B, N, D) at all N tokens."""
        if positions is None:
            return self.head(hidden)
        # Not take_along_dim, with which torch.compile makes a graph for each N.
        return self.head(hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[2])))

    def _logits(self, hidden: Tensor, positions: Tensor | None) -> Tensor:
        return functional.linear(self._features(hidden, positions), self.encoder.tokens.weight, self.head.bias)

    def loss(self, input_ids: Tensor, positions: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood, in nats, of labels (B, M) at positions (B, M); see `mean_nll`."""
        return self.loss_of(self.encoder(input_ids, attention_mask), positions, labels)

    def loss_of(self, hidden: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """The same from the encoder's hidden states (B, N, D)."""
        # Not torch's linear_cross_entropy: it saves little with 15 % of the tokens, and its chunked path doesn't compile.
        return mean_nll(at_least_float32(self._logits(hidden, positions)), labels)

    def nll(self, input_ids: Tensor, positions: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Negative log-likelihood of each label, (B, M) in nats, 0 where a label is IGNORED: what perplexity sums."""
        return label_nll(self.exact_logits(input_ids, positions, attention_mask), labels)

    def exact_logits(self, input_ids: Tensor, positions: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits (B, M, V) in float32, even under autocast: rounding to bfloat16 changes perplexity and creates ties.

        In float64 for a model of float64.
        """
        features = self._features(self.encoder(input_ids, attention_mask), positions)
        with without_autocast(features.device):
            bias = None if self.head.bias is None else at_least_float32(self.head.bias)
            return functional.linear(at_least_float32(features), at_least_float32(self.encoder.tokens.weight), bias)


def label_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of labels (B, M) in nats, from logits (B, M, V): (B, M), 0 where a label is IGNORED."""
    # On flattened logits it takes an eighth of the time on a CPU, but a token's value then depends on its batch.
    return functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


def mean_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of ``label_nll`` over labels that are not IGNORED; 0 if all are: a short last row may have no token to mask."""
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


class ClassificationHead(nn.Module):
    """RoBERTa's head: dropout, dense, tanh, dropout, output; it has biases even if the encoder has none."""

    def __init__(self, config: EncoderConfig, num_labels: int):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, num_labels)
        self.dropout = nn.Dropout(config.dropout)
        for linear in (self.dense, self.output):
            nn.init.normal_(linear.weight, std=config.initializer_range)
            nn.init.zeros_(linear.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        """(B, D) → (B, C), in the weights' precision even under autocast: bfloat16 would round 1977 to 1976, and make ties."""
        hidden = self.dropout(torch.tanh(self.dense(self.dropout(pooled))))
        with without_autocast(hidden.device):
            return self.output(hidden.to(self.output.weight.dtype))


class SequenceClassifier(nn.Module):
    """Encoder and head: C logits for each sequence, or one number if num_labels is 1 (regression).

    Args:
        config: the encoder's.
        num_labels: C, classes; 1 for regression.
        pooling: what represents a sequence: first (its first token's hidden state, RoBERTa's) | mean (over its real tokens).
    """

    def __init__(self, config: EncoderConfig, num_labels: int, pooling: str = "first"):
        super().__init__()
        if num_labels < 1:
            raise SettingError("num_labels", num_labels, "1 (regression) or more")
        if pooling not in POOLINGS:
            raise SettingError("pooling", pooling, ", ".join(POOLINGS))
        self.pooling = pooling
        self.encoder = Encoder(config)
        self.head = ClassificationHead(config, num_labels)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document: Tensor | None = None,
        num_documents: int = 0,
    ) -> Tensor:
        """Logits (B, C).

        Args:
            input_ids: (B, N) int64, or (B, N, input_size) floats, as the encoder's.
            attention_mask: (B, N) bool, or None when all tokens are real.
            document: (W,) int64, each row's document, if the rows of input_ids are W windows of num_documents documents. The
                logits of a document are the mean of its windows' logits.
            num_documents: B, with ``document``.

        Returns:
            (B, C).
        """
        logits = self.head(pool(self.encoder(input_ids, attention_mask), attention_mask, self.pooling))
        if document is None:
            return logits
        logits = at_least_float32(logits)  # bfloat16 counts only to 256
        sums = logits.new_zeros(num_documents, logits.shape[1]).index_add(0, document, logits)
        ones = logits.new_ones(document.shape[0], 1)  # not bincount, which stalls a GPU and breaks a compiled graph
        return sums / logits.new_zeros(num_documents, 1).index_add(0, document, ones)


def pool(hidden: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """(B, N, D) → (B, D): the first token's, or the mean over the real ones, where attention_mask (B, N) is True."""
    if pooling == "first":
        return hidden[:, 0]
    if attention_mask is None:
        return hidden.mean(1)
    real = attention_mask[..., None].bool()
    return (exact_sum(hidden * real, 1) / real.sum(1).clamp(min=1)).to(hidden.dtype)
