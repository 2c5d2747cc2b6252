"""Settings that a run takes from the trained model that it resumes, starts from or evaluates: tokenizer, row length, classes.

`validate`, `test` and `predict` evaluate the run's checkpoint, or a model that the command line names:

    python run.py predict --model.pretrained models/small --data.text "Paris is the <mask> of France."

Only the command line counts for this: in a run's config.yaml, model.pretrained is what the run started from.
"""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lit_linformer.cli.defaults import RUN
from lit_linformer.cli.given import typed_words
from lit_linformer.data.datamodule import TRAINED
from lit_linformer.data.tokenizer import load_tokenizer
from lit_linformer.model import EncoderConfig
from lit_linformer.runs.checkpoints import check_checkpoint, config_of
from lit_linformer.runs.exported import is_exported
from lit_linformer.runs.folder import TOKENIZER, as_name
from lit_linformer.runs.place import given_run
from lit_linformer.runs.trained_model import StoredModel, find_model, read_model, task_of
from lit_linformer.tasks.pretrained import pretrained_encoder
from lit_linformer.utils.configs import config_files
from lit_linformer.utils.errors import SettingError

EVALUATING = ("validate", "test", "predict")


def carry_over(subcommand: str, argv: list[str], config: Namespace) -> None:
    """Sets, in a command's config, what the model that ckpt_path or model.pretrained names determines."""
    model, data = config.model.get("init_args", Namespace()), config.data.get("init_args", Namespace())
    pretrained = model.get("pretrained")  # in a user's own class it may be a flag, or name something else
    typed = {name for name, _ in typed_words(argv)}
    named = isinstance(pretrained, str) and pretrained and (_ours(config.model.class_path) or Path(pretrained).exists())
    if named or ("load_weights" in model and "pretrained" in model):
        # A fine-tuning module uses its own checkpoint as the pretrained one.
        _of_pretrained(subcommand, config, typed)
    elif config.get("ckpt_path") and "tokenizer" in data:
        path = Path(config.ckpt_path)
        checkpoint = check_checkpoint(path, whole=False)
        _check_masked_model(checkpoint, path, config.model.class_path)
        beside = path.parent.parent / TOKENIZER
        theirs = path if isinstance(checkpoint.get("tokenizer"), str) else beside if beside.is_file() else None
        # The text that a tokenizer was trained on may have changed since; predict needs none of the tokenizer's files here.
        if data.tokenizer in TRAINED or (subcommand == "predict" and "data.tokenizer" not in typed):
            _check_trained_alike(checkpoint, path, data, typed)
            data.tokenizer = data.tokenizer if theirs is None else str(theirs)
        elif theirs is not None and _ours(config.data.class_path) and data.tokenizer is not None:
            if not load_tokenizer(data.tokenizer).same_ids(load_tokenizer(str(theirs))):
                allowed = f"the one that {path} was trained with (leave data.tokenizer out)"
                raise SettingError("data.tokenizer", data.tokenizer, allowed)


def _ours(class_path: str) -> bool:
    """Whether a class is this project's; in a user's own class a setting of the same name may mean anything."""
    return class_path.startswith("lit_linformer.")


def _check_masked_model(checkpoint: dict[str, Any], path: Path, class_path: str) -> None:
    """Raises SettingError for a classifier's checkpoint if the model is one of this project's language models."""
    if _ours(class_path) and "num_labels" in (checkpoint.get("hyper_parameters") or {}):
        allowed = f"one of {class_path.rpartition('.')[2]} (a classifier's run has a config.yaml of its own)"
        raise SettingError("ckpt_path", path, allowed, more=", which is a classifier")


def _check_trained_alike(checkpoint: dict[str, Any], path: Path, data: Namespace, typed: set[str]) -> None:
    """Raises SettingError if the command line names another tokenizer, or size, than the checkpoint's: it would be ignored."""
    stored = (config_of(checkpoint, path, "ckpt_path").get("data") or {}).get("init_args") or {}
    for name in ("tokenizer", "vocab_size"):
        if f"data.{name}" in typed and stored.get(name, data.get(name)) != data.get(name):
            allowed = f"{stored[name]}, as {path} was trained; or a run of another --name"
            raise SettingError(f"data.{name}", data.get(name), allowed)


def _of_pretrained(subcommand: str, config: Namespace, typed: set[str]) -> None:
    model, data = config.model.init_args, config.data.get("init_args", Namespace())
    own: tuple = (None, *TRAINED)  # a newly trained tokenizer would not fit old weights
    if config.get("ckpt_path"):
        model.pretrained = config.ckpt_path
        if "load_weights" in model:
            model.load_weights = False
    elif "load_weights" in model:
        own = (None,)
    source = read_model(model.pretrained) if model.pretrained else None
    classifies = "pooling" in model and _ours(config.model.class_path)
    if source is not None and config.get("ckpt_path") and classifies and "num_labels" not in source.settings:
        allowed = f"one of SequenceClassification (fit with --model.pretrained {source.path} fine-tunes it)"
        raise SettingError("ckpt_path", source.path, allowed, more=", which is no classifier")
    if source is not None and model.get("encoder"):
        pretrained_encoder(source, EncoderConfig(**vars(model.encoder)), None)
    if source is not None and "pooling" in model and (config.get("ckpt_path") or subcommand in EVALUATING):
        _check_same_task(source, model, config.data)
    if "tokenizer" in data and data.get("tokenizer") in own and source is not None:
        beside = source.path.parent.parent / TOKENIZER  # for checkpoints from before they carried one
        if source.tokenizer is None and _ours(config.data.class_path) and not beside.is_file():
            allowed = "a model of texts, data.tokenizer with the file of its own, or data as it was trained on"
            raise SettingError("model.pretrained", source.path, allowed, more=", which has no tokenizer")
        if data.tokenizer is not None and "data.tokenizer" in typed and not config.get("ckpt_path") and source.tokenizer:
            allowed = f"the one that {source.path} was trained with (leave data.tokenizer out)"  # else it would be ignored
            raise SettingError("data.tokenizer", data.tokenizer, allowed)
        data.tokenizer = source.tokenizer or data.tokenizer
    if "max_length" in data and data.max_length is None:
        encoder = source.encoder if source is not None else model.get("encoder")
        data.max_length = None if encoder is None else encoder.max_length


def _check_same_task(source: StoredModel, model: Namespace, data: Namespace) -> None:
    """Raises SettingError if a trained classifier is used with another pooling or other classes than it was trained with."""
    pooling = source.settings.get("pooling", model.pooling)
    if model.pooling != pooling:
        raise SettingError("model.pooling", model.pooling, f"{pooling}, as {source.path} was trained")
    asked, trained = task_of(data.class_path, vars(data.get("init_args", Namespace()))), source.labels
    if asked is not None and asked.several_labels != source.several_labels:
        allowed = "what separates several labels, as" if source.several_labels else "null: one label for each row, as"
        raise SettingError("data.label_separator", asked.label_separator, f"{allowed} {source.path} was trained")
    if asked is None or asked.labels is None or trained is None or asked.labels == trained:
        return
    order = f"{list(trained)}, the classes of {source.path} in the order of their numbers"
    if len(asked.labels) != len(trained) or set(asked.labels) == set(trained):
        given = data.init_args.get("task")
        more = f", whose classes are {list(asked.labels)}" if given else ""
        raise SettingError("data.task" if given else "data.labels", given or list(asked.labels), order, more=more)
    # Perhaps another task with the same meaning: negative and positive, neg and pos.
    rank_zero_warn(f"{source.path} was trained with the classes {list(trained)}; here they stand for {list(asked.labels)}")


def evaluated(subcommand: str, argv: list[str], config: Namespace) -> Path | None:
    """The model to evaluate, if the command line names one. Its checkpoint becomes ckpt_path, unless it is an exported folder.

    Without --name, results go to runs/pretrained-MODEL, unless the config is that of the model's own run; without a config,
    rows are as long as the model's n.
    """
    settings = config.model.get("init_args", Namespace())
    named, typed = settings.get("pretrained"), dict(typed_words(argv))
    if subcommand not in EVALUATING or not isinstance(named, str) or config.ckpt_path or "model.pretrained" not in typed:
        return None
    path = Path(named)
    if not is_exported(path):
        config.ckpt_path = str(find_model(path, "model.pretrained"))
    begun, own = given_run(argv)
    another = begun is not None and own and not path.resolve().is_relative_to(begun.resolve())  # than the run of the config
    if "name" not in typed and (another or config.name == RUN["name"][0]):
        name = path.stem if path.is_file() else path.resolve().name
        config.name = f"pretrained-{as_name(name)}"
    if not any(config_files(argv)) and "data.max_length" not in typed and "max_length" in config.data.get("init_args", ()):
        config.data.init_args.max_length = None  # the model's
    return path


def load_exported(module: LightningModule, folder: Path) -> None:
    """Loads all weights of an exported folder, including a classifier's head, which fine-tuning would not take over.

    Raises ValueError if the folder holds another model than the config describes.
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
