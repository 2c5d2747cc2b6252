"""The model, in plain PyTorch: nothing here imports Lightning, data or configuration, so the folder can be copied out."""

from .attention import ATTENTIONS, Attention, LocalConvolution
from .encoder import Encoder, EncoderConfig, EncoderLayer, count_parameters
from .full import SelfAttention
from .heads import ClassificationHead, MaskedLanguageModel, MaskedLMHead, SequenceClassifier
from .linformer import LinformerAttention
from .lookup import LookupAttention
from .projection import PROJECTIONS, Projection, make_projection
from .projections import Linear

__all__ = [
    "ATTENTIONS",
    "PROJECTIONS",
    "Attention",
    "ClassificationHead",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "Linear",
    "LinformerAttention",
    "LocalConvolution",
    "LookupAttention",
    "MaskedLMHead",
    "MaskedLanguageModel",
    "Projection",
    "SelfAttention",
    "SequenceClassifier",
    "count_parameters",
    "make_projection",
]
