"""lit-linformer: pretrain, fine-tune and measure Linformers with PyTorch Lightning."""
