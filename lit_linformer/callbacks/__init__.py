"""Callbacks: they observe and record, and never change training."""

from lit_linformer.callbacks.checkpoint import AtomicCheckpointIO, LastCheckpoint, best_checkpoint
from lit_linformer.callbacks.perplexity import PerplexityCurve
from lit_linformer.callbacks.predictions import PredictionWriter
from lit_linformer.callbacks.progress import Progress

__all__ = ["AtomicCheckpointIO", "LastCheckpoint", "PerplexityCurve", "PredictionWriter", "Progress", "best_checkpoint"]
