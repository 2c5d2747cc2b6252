"""LightningModules: what is trained, and how."""

from lit_linformer.tasks.base import TrainingModule
from lit_linformer.tasks.classification import SequenceClassification
from lit_linformer.tasks.distillation import Distillation
from lit_linformer.tasks.mlm import MLM
from lit_linformer.tasks.recall import Recall

TASKS = ("MLM", "SequenceClassification", "Distillation", "Recall")  # those that configs name
__all__ = ["MLM", "Distillation", "Recall", "SequenceClassification", "TrainingModule"]
