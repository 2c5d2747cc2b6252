"""The model, in plain PyTorch: nothing here imports Lightning, data or configuration, so the folder can be lifted out."""

from lit_linformer.model.attention import LinformerAttention, LocalConvolution, SelfAttention
from lit_linformer.model.encoder import Encoder, EncoderConfig, EncoderLayer, count_parameters
from lit_linformer.model.heads import ClassificationHead, MaskedLanguageModel, MaskedLMHead, SequenceClassifier
from lit_linformer.model.projection import Projection

__all__ = [
    "ClassificationHead",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "LinformerAttention",
    "LocalConvolution",
    "MaskedLMHead",
    "MaskedLanguageModel",
    "Projection",
    "SelfAttention",
    "SequenceClassifier",
    "count_parameters",
]
