"""Where a run is: in runs/NAME when it begins, then beside its config.yaml, even if that is moved or used from elsewhere."""

import glob
from pathlib import Path
from typing import Any

from lit_linformer.runs.folder import CONFIG, CONVERSION, TOKENIZER, is_run
from lit_linformer.utils.configs import config_contents

RUNS = Path("runs")
# Settings that put a run elsewhere than beside its config.yaml.
PLACES = ("--name", "--trainer.default_root_dir")
# Settings of model and data that may be paths: in a run's config.yaml they are as typed, relative to where it began.
PATHS = ("source", "validation_source", "test_source", "tokenizer", "cache_dir", "pretrained", "teacher")


def run_folder(name: str, root: str | Path | None = None) -> Path:
    """The folder of the run ``name``; ``root``: trainer.default_root_dir, which overrides it."""
    return Path(root) if root else RUNS / name


def own_folder(config: str | Path) -> Path | None:
    """The run folder whose config.yaml this is; None for any other file."""
    path = Path(config)
    return path.parent if path.name == CONFIG and is_run(path.parent) else None


def given_run(argv: list[str]) -> tuple[Path | None, bool]:
    """The run whose config.yaml a command line gives (the last one, if several), and whether the command is for that run.

    It is not if the command line, or a later file, gives another name or folder.
    """
    found, own = None, False
    for config, content in config_contents(argv):
        trainer = content.get("trainer")
        if (folder := own_folder(config)) is not None:
            found, own = folder, True
        elif "name" in content or (isinstance(trainer, dict) and "default_root_dir" in trainer):
            own = False
    return found, own and not any(word.partition("=")[0] in PLACES for word in argv)


def seen_from(folder: Path, settings: Any) -> None:
    """Changes paths in the settings of a run's model or data that exist not here but where the run began, beside runs/.

    For a model that `convert` wrote, which may have been moved, pretrained and tokenizer are the run's own.
    """
    began = next((parent.parent for parent in folder.absolute().parents if parent.name == RUNS.name), None)
    own = {"pretrained": folder, "tokenizer": folder / TOKENIZER} if (folder / CONVERSION).is_file() else {}
    for name in PATHS:
        value = settings.get(name)
        if not isinstance(value, str) or Path(value).exists() or glob.glob(value):
            continue
        if value.startswith("hub:"):  # whose path may be a folder
            path, colon, split = value.removeprefix("hub:").partition(":")
            if began is not None and not Path(path).exists() and (began / path).is_dir():
                settings[name] = f"hub:{began / path}{colon}{split}"
            continue
        if began is not None and (began / value).exists():
            settings[name] = str(began / value)
        elif began is not None and glob.glob(value, root_dir=began):
            settings[name] = str(Path(glob.escape(str(began))) / value)
        elif name in own and "/" in value:
            settings[name] = str(own[name])
