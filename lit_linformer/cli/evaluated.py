"""`validate`, `test` and `predict` of a model that `--model.pretrained` names: a folder that `export` wrote, or a run.

    python run.py predict --model.pretrained models/small --data.text "Paris is the <mask> of France."

Only the command line's word counts: a run's config.yaml names under model.pretrained what the run started from, and what is
evaluated is the run's own checkpoint.
"""

from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch import LightningModule

from lit_linformer.cli.given import typed_words
from lit_linformer.runs.exported import is_exported
from lit_linformer.runs.trained_model import find_model, read_model
from lit_linformer.utils.configs import config_files
from lit_linformer.utils.errors import SettingError

COMMANDS = ("validate", "test", "predict")
DEFAULT_NAME = "run"


def evaluated(subcommand: str, argv: list[str], config: Namespace) -> Path | None:
    """The model, where the command line asks for one; its checkpoint becomes ckpt_path, or it is an exported folder.

    Without --name what is found lies in runs/pretrained-MODEL, without a config rows are as long as the model's n.
    """
    settings = config.model.get("init_args", Namespace())
    named, typed = settings.get("pretrained"), dict(typed_words(argv))
    if subcommand not in COMMANDS or named is None or config.ckpt_path or "model.pretrained" not in typed:
        return None
    path = Path(named)
    if not is_exported(path):
        config.ckpt_path = str(find_model(path, "model.pretrained"))
    if config.name == DEFAULT_NAME and "name" not in typed:
        config.name = f"pretrained-{path.resolve().stem}"
    if not any(config_files(argv)) and "data.max_length" not in typed and "max_length" in config.data.get("init_args", ()):
        config.data.init_args.max_length = None  # the model's
    return path


def load_exported(module: LightningModule, folder: Path) -> None:
    """All weights of an exported folder, a classifier's head too, which a fine-tuning would not take over.

    Raises ValueError where the folder holds another model than the config describes.
    """
    stored, own = read_model(folder), module.net.state_dict()
    for name, tensor in own.items():
        if name not in stored.weights or stored.weights[name].shape != tensor.shape:
            what = "a classifier" if "num_labels" in stored.settings else "a masked language model"
            raise SettingError(
                "model.pretrained",
                folder,
                "settings of model and data that are that model's",
                more=f", {what} whose weights are not those of {type(module).__name__} as it is set up here ({name})",
            )
    module.net.load_state_dict(stored.weights)
