"""Models in: RoBERTa and its kin; a Transformer becomes a Linformer; a longer n."""
