"""Converts models: RoBERTa and its kin from Hugging Face, a Transformer to a Linformer, a model to a longer n."""
