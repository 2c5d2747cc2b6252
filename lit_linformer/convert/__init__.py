"""Converts models: RoBERTa, BERT and DistilBERT from Hugging Face, a Transformer to a Linformer, a model to a longer n."""
