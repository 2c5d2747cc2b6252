"""Callbacks: most observe and record; Finite and Preemption may end training, and Resuming makes a resumed run exact.

Only Averaging changes what is validated and kept: weights averaged over the steps.
"""

from lit_linformer.callbacks.averaging import Averaging
from lit_linformer.callbacks.checkpoint import AtomicCheckpointIO, LastCheckpoint, best_checkpoint, best_of
from lit_linformer.callbacks.copy_slices import CopySlices
from lit_linformer.callbacks.curves import Curves
from lit_linformer.callbacks.finite import Finite
from lit_linformer.callbacks.length_sweep import LengthSweep
from lit_linformer.callbacks.observing import Measuring, write_csv
from lit_linformer.callbacks.owed import LastValidation, Owed
from lit_linformer.callbacks.perplexity_curve import PerplexityCurve
from lit_linformer.callbacks.predictions import EvaluationWriter, PredictionWriter
from lit_linformer.callbacks.preemption import Preemption
from lit_linformer.callbacks.progress import Progress
from lit_linformer.callbacks.result import RunResult
from lit_linformer.callbacks.resuming import Resuming
from lit_linformer.callbacks.spectrum import Spectrum
from lit_linformer.callbacks.task_scores import TaskScores
from lit_linformer.callbacks.throughput import Throughput
from lit_linformer.callbacks.trim_memory import TrimMemory

__all__ = [
    "AtomicCheckpointIO",
    "Averaging",
    "CopySlices",
    "Curves",
    "EvaluationWriter",
    "Finite",
    "LastCheckpoint",
    "LastValidation",
    "LengthSweep",
    "Measuring",
    "Owed",
    "PerplexityCurve",
    "PredictionWriter",
    "Preemption",
    "Progress",
    "Resuming",
    "RunResult",
    "Spectrum",
    "TaskScores",
    "Throughput",
    "TrimMemory",
    "best_checkpoint",
    "best_of",
    "write_csv",
]
