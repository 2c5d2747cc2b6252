"""What a trained model settles for a run that continues it, starts from it or evaluates it: tokenizer, row length, classes."""

from pathlib import Path

from jsonargparse import Namespace

from lit_linformer.cli.evaluated import COMMANDS
from lit_linformer.cli.given import typed_words
from lit_linformer.data.datamodule import TRAINED
from lit_linformer.model import EncoderConfig
from lit_linformer.runs.checkpoints import carried_tokenizer
from lit_linformer.runs.folder import TOKENIZER
from lit_linformer.runs.trained_model import StoredModel, read_model, task_of
from lit_linformer.tasks.pretrained import pretrained_encoder
from lit_linformer.utils.errors import SettingError, UserError


def carry_over(subcommand: str, argv: list[str], config: Namespace) -> None:
    """Sets in a command's config what the model says that ckpt_path or model.pretrained names."""
    model, data = config.model.get("init_args", Namespace()), config.data.get("init_args", Namespace())
    if model.get("pretrained") or "load_weights" in model:  # what fine-tunes takes its own checkpoint for the pretrained
        _of_pretrained(subcommand, config)
    elif config.get("ckpt_path") and "tokenizer" in data:
        # The text that a tokenizer was trained on may have changed since; for predict none of its files need be here.
        gone = subcommand == "predict" and "data.tokenizer" not in dict(typed_words(argv))
        if data.tokenizer in TRAINED or gone:
            data.tokenizer = _tokenizer_of(Path(config.ckpt_path)) or data.tokenizer


def _tokenizer_of(checkpoint: Path) -> str | None:
    """What `load_tokenizer` reads: the checkpoint, or the tokenizer.json of its run; None where there is neither."""
    try:
        carried_tokenizer(checkpoint, "ckpt_path")
        return str(checkpoint)
    except UserError:
        beside = checkpoint.parent.parent / TOKENIZER
        return str(beside) if beside.is_file() else None


def _of_pretrained(subcommand: str, config: Namespace) -> None:
    model, data = config.model.init_args, config.data.get("init_args", Namespace())
    own: tuple = (None, *TRAINED)  # a new tokenizer would be of no use to old weights
    if config.get("ckpt_path"):
        model.pretrained = config.ckpt_path
        if "load_weights" in model:
            model.load_weights = False
    elif "load_weights" in model:
        own = (None,)
    source = read_model(model.pretrained) if model.pretrained else None
    if source is not None and model.encoder:
        pretrained_encoder(source, EncoderConfig(**vars(model.encoder)), None)
    if source is not None and "pooling" in model and (config.get("ckpt_path") or subcommand in COMMANDS):
        _check_same_task(source, model, config.data)
    if "tokenizer" in data and data.get("tokenizer") in own and source is not None:
        data.tokenizer = source.tokenizer or data.tokenizer
    if data.get("max_length") is None:
        encoder = source.encoder if source is not None else model.encoder
        data.max_length = None if encoder is None else encoder.max_length


def _check_same_task(source: StoredModel, model: Namespace, data: Namespace) -> None:
    """SettingError where a trained classifier is to be used otherwise than it was trained."""
    pooling = source.settings.get("pooling", model.pooling)
    if model.pooling != pooling:
        raise SettingError("model.pooling", model.pooling, f"{pooling}, as {source.path} was trained")
    asked, trained = task_of(data.class_path, vars(data.get("init_args", Namespace()))), source.labels
    if asked is not None and asked.labels is not None and trained is not None and asked.labels != trained:
        raise SettingError(
            "data.labels", list(asked.labels), f"{list(trained)}, the classes of {source.path} in the order of their numbers"
        )
