"""LightningModules: what is trained, and how."""

from lit_linformer.tasks.mlm import MLM

__all__ = ["MLM"]
