"""The model, in plain PyTorch: nothing here imports Lightning, data or configuration, so the folder can be copied out."""

from .attention import ATTENTIONS, Attention, LocalConvolution
from .coarse import CoarseAttention
from .dynamic import Dynamic
from .encoder import Encoder, EncoderConfig, EncoderLayer, count_parameters
from .full import SelfAttention
from .gated import Gated
from .heads import ClassificationHead, MaskedLanguageModel, MaskedLMHead, SequenceClassifier
from .linformer import LinformerAttention
from .lookup import LookupAttention
from .lsh import LshAttention
from .luna import LunaAttention
from .nystrom import NystromAttention
from .projection import PROJECTIONS, Projection, make_projection
from .projections import Linear
from .sparse import SparseAttention
from .window import WindowAttention

__all__ = [
    "ATTENTIONS",
    "PROJECTIONS",
    "Attention",
    "ClassificationHead",
    "CoarseAttention",
    "Dynamic",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "Gated",
    "Linear",
    "LinformerAttention",
    "LocalConvolution",
    "LookupAttention",
    "LshAttention",
    "LunaAttention",
    "MaskedLMHead",
    "MaskedLanguageModel",
    "NystromAttention",
    "Projection",
    "SelfAttention",
    "SequenceClassifier",
    "SparseAttention",
    "WindowAttention",
    "count_parameters",
    "make_projection",
]
