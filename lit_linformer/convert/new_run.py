"""Writes a model as the folder of a run that has not trained yet, from which other runs and commands start."""

from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from lit_linformer.runs.checkpoints import write_checkpoint
from lit_linformer.runs.folder import CONFIG, CONVERSION, TOKENIZER, write_marker
from lit_linformer.runs.record import of_class
from lit_linformer.runs.trained_model import TrainedModel
from lit_linformer.utils.configs import as_yaml
from lit_linformer.utils.files import write_json

HEAD = """# Written by `convert` (conversion.json). The model as it is:
#   python run.py {used}
# Trained on, as another run:
#   python run.py fit {typed} --name NAME{source} --trainer.max_steps 1000
"""


def write(model: TrainedModel, folder: Path, run: Path, conversion: dict[str, Any]) -> None:
    """Writes run.json, config.yaml, conversion.json, checkpoints/last.ckpt and, for a model of texts, tokenizer.json.

    The folder will be renamed to ``run``."""
    data, tokenizer = dict(model.data), model.tokenizer
    class_path = data.pop("class_path", None)
    if tokenizer is not None:
        own = of_class(class_path, "PretrainingData")  # another class has other settings
        data = {key: value for key, value in data.items() if own and key not in ("text", "file")}
        data |= {"tokenizer": str(run / TOKENIZER), "max_length": model.max_length}
        class_path = "lit_linformer.data.PretrainingData"
    elif "max_length" in data:
        data["max_length"] = model.max_length
    config = {
        "seed_everything": 0,
        "name": run.name,
        "trainer": {
            "accelerator": "auto",
            "devices": 1,
            "gradient_clip_val": 1.0,
            "val_check_interval": 250,
            "check_val_every_n_epoch": None,
            "callbacks": [{"class_path": "lit_linformer.callbacks.PerplexityCurve"}],
        },
        "model": {"class_path": "lit_linformer.tasks.MLM", "init_args": {"pretrained": str(run)}},
        "data": {"class_path": class_path, "init_args": data},
    }
    text = as_yaml(config)
    typed = f"--config {run}/config.yaml"
    used, source = f"validate {typed}", ""
    if tokenizer is not None:
        used, source = f'predict {typed} --data.text "…"', " --data.source texts/"
        tokenizer.save(folder / TOKENIZER)
    (folder / CONFIG).write_text(HEAD.format(used=used, typed=typed, source=source) + text, encoding="utf-8")
    write_json(folder / CONVERSION, conversion, indent=2)
    write_marker(folder, run.name)
    checkpoint = {
        "state_dict": {f"net.{name}": tensor for name, tensor in model.net.state_dict().items()},
        "hyper_parameters": {"encoder": asdict(model.encoder), "vocab_size": model.encoder.vocab_size},
        "pytorch-lightning_version": metadata.version("lightning"),
        "epoch": 0,
        "global_step": 0,
        "config": text,
        "conversion": conversion,
    }
    if tokenizer is not None:
        checkpoint["tokenizer"] = tokenizer.to_str()
    write_checkpoint(checkpoint, folder / "checkpoints" / "last.ckpt")
