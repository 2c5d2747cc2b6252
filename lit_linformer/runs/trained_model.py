"""Trained models, read from a run, a checkpoint file or an exported folder: for everything that starts from one.

`read_model` returns what is stored: settings, weights, where the tokenizer is. `open_checkpoint` builds the model from that,
with its tokenizer, if its data have one, and what is known about its training.
"""

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lit_linformer.data.tokenizer import Tokenizer, load_tokenizer
from lit_linformer.model import (
    ATTENTIONS,
    PROJECTIONS,
    Attention,
    EncoderConfig,
    MaskedLanguageModel,
    Projection,
    SequenceClassifier,
)
from lit_linformer.runs import exported
from lit_linformer.runs.checkpoints import (
    OURS,
    best_or_last,
    check_checkpoint,
    config_of,
    encoder_of,
    stored_encoder,
    without,
)
from lit_linformer.runs.folder import PERPLEXITY, SCORES, TOKENIZER
from lit_linformer.runs.place import seen_from
from lit_linformer.runs.record import RunRecord, of_class
from lit_linformer.runs.sharded import is_sharded
from lit_linformer.utils.environment import versions
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.files import read_rows
from lit_linformer.utils.weights import check_finite

if TYPE_CHECKING:
    from lit_linformer.data.finetuning.text_tasks import TextTask

COLUMNS = ("step", "tokens", "perplexity")
# Names of weights and buffers of attention and projection: a user's own may have infinite buffers, such as masks.
OF_OWN = re.compile(r"\.(attention|E)\.")


@dataclass
class StoredModel:
    """The parts of a model, as they are stored.

    Args:
        path: the checkpoint, or the exported folder.
        encoder: the encoder's settings.
        weights: the state dict of the whole model, encoder and head.
        settings: num_labels and pooling of a classifier; a task's hyper-parameters.
        setting: the setting with which the user named it, for messages.
        tokenizer: a path that `load_tokenizer` reads; None: there is no tokenizer.
        checkpoint: everything in the checkpoint; empty for an exported folder.
        exported: config.json of an exported folder; empty for a checkpoint.
    """

    path: Path
    encoder: EncoderConfig
    weights: dict[str, Tensor]
    settings: dict[str, Any]
    setting: str
    tokenizer: str | None
    checkpoint: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Any] = field(default_factory=dict)

    @property
    def encoder_weights(self) -> dict[str, Tensor]:
        """The encoder's state dict."""
        prefix = "encoder."
        return {name.removeprefix(prefix): t for name, t in self.weights.items() if name.startswith(prefix)}

    @cached_property
    def own_tokenizer(self) -> Tokenizer | None:
        if isinstance(text := self.checkpoint.get("tokenizer"), str):
            return Tokenizer.from_str(text, str(self.path))
        return load_tokenizer(self.tokenizer) if self.tokenizer is not None else None

    @cached_property
    def data(self) -> dict[str, Any]:
        """The run's data settings, {"class_path": …, "init_args": {…}}; empty if they are not known."""
        return config_of(self.checkpoint, self.path, self.setting).get("data") or {}

    @property
    def own_modules(self) -> dict[str, str]:
        """`own_modules` of the network that was trained."""
        return self.checkpoint.get("own_modules", {})

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Names of a classifier's classes, in the order of their numbers; None: not known."""
        if self.exported:
            labels = tuple(self.exported.get("labels") or (self.exported.get("id2label") or {}).values())
            labels = () if labels == tuple(f"LABEL_{i}" for i in range(len(labels))) else labels
        else:
            task = task_of(str(self.data.get("class_path")), self.data.get("init_args") or {})
            labels = (self.checkpoint.get("labels") if task is None else task.labels) or ()
        return labels if len(labels) == self.settings.get("num_labels") != 1 else None

    @property
    def several_labels(self) -> bool:
        """Whether a text may have any number of a classifier's classes."""
        told = self.exported.get("several_labels", self.checkpoint.get("several_labels", False))
        return bool(told) or self.exported.get("problem_type") == "multi_label_classification"

    def build(self) -> MaskedLanguageModel | SequenceClassifier:
        """MaskedLanguageModel or SequenceClassifier, float32, in evaluation mode; SettingError for a user's own modules."""
        self.check_modules()
        encoder = replace(self.encoder, activation_checkpointing=False)
        try:
            net: MaskedLanguageModel | SequenceClassifier
            if "num_labels" in self.settings:
                net = SequenceClassifier(encoder, self.settings["num_labels"], self.settings["pooling"])
            else:
                net = MaskedLanguageModel(encoder)
        except (TypeError, KeyError, ValueError, RuntimeError) as error:
            raise self._another(error) from error
        self.fill(net, self.weights)
        return net.float().eval()

    def check_modules(self) -> None:
        """SettingError if a user's own modules were trained, which the encoder's settings do not describe."""
        for name, kind in self.own_modules.items():
            allowed = "a model of this project's classes (for others: fit, validate, test, and predict --config)"
            raise SettingError(self.setting, self.path, allowed, more=f", whose {name} is {kind}")

    def fill(self, part: nn.Module, weights: dict[str, Tensor]) -> None:
        """Loads weights into a network or its encoder; SettingError if they don't fit, as in a user's own task."""
        try:
            if others := sorted(part.state_dict().keys() ^ weights.keys()):
                has = "it has" if others[0] in weights else "it lacks"
                raise UserError(f"{has} {others[0]}, {len(others)} names differ in all")
            part.load_state_dict(weights)
        except (ValueError, RuntimeError) as error:
            raise self._another(error) from error

    def _another(self, error: Exception) -> SettingError:
        more = f", whose weights are of another model ({' '.join(str(error).split())[:200]})"
        return SettingError(self.setting, self.path, "a checkpoint of MLM or SequenceClassification", more=more)


def read_model(asked: str | Path, setting: str = "model.pretrained") -> StoredModel:
    """Reads a run folder's best checkpoint (its last, if there is no best), a checkpoint file, or an exported folder.

    Raises ValueError, in one line that names the setting, for anything else, and for weights that are not finite.
    """
    path = Path(asked)
    if exported.is_exported(path):
        config = exported.read_config(path, setting)
        encoder = stored_encoder(config["encoder"], path, setting)
        settings: dict[str, Any] = {
            key: config[key] for key in ("num_labels", "pooling") if config["task"] != "masked-lm" and key in config
        }
        weights = exported.read_weights(path, setting)
        tokenizer = str(path) if (path / TOKENIZER).is_file() else None
        stored = StoredModel(path, encoder, weights, settings, setting, tokenizer, exported=config)
    else:
        path = find_model(path, setting)
        checkpoint = check_checkpoint(path, setting)
        encoder, prefix = encoder_of(checkpoint, path, setting), "net."
        weights = {n.removeprefix(prefix): t for n, t in checkpoint["state_dict"].items() if n.startswith(prefix)}
        if not weights:
            raise SettingError(setting, path, OURS, more=", which holds no encoder")
        tokenizer = str(path) if "tokenizer" in checkpoint else None
        stored = StoredModel(path, encoder, weights, checkpoint["hyper_parameters"], setting, tokenizer, checkpoint)
    own = own_classes(encoder)
    check_finite({n: t for n, t in weights.items() if not (own and OF_OWN.search(n))}, f"{setting} is {path}")
    return stored


def find_model(path: Path, setting: str) -> Path:
    """A checkpoint file: the path itself, or a run folder's best checkpoint, or its last if there is no best."""
    if not path.exists():
        raise SettingError(
            setting, path, "a run directory, a checkpoint file, or an exported folder", more=", which does not exist"
        )
    if not path.is_dir() or is_sharded(path):  # a sharded checkpoint is a folder
        return path
    if (found := best_or_last(path)) is None:
        exported.check_format(path, setting)
        why = f", but {without(path)}" if (path / "checkpoints").is_dir() else ", a folder without checkpoints/"
        raise SettingError(setting, path, "a run that was trained, or a file", more=why)
    return found


@dataclass
class TrainedModel:
    """A trained model, ready to be used or written.

    Args:
        name: that of the run, the folder or the file.
        net: MaskedLanguageModel or SequenceClassifier, float32, in evaluation mode.
        tokenizer: the one it was trained with; None: its tokens are not pieces of text.
        max_length: tokens of the longest rows it was trained on; at most the encoder's.
        labels: names of the classes; None for masked language models and regressions.
        several_labels: whether a text may have any number of them.
        pair: whether a row has two texts.
        facts: version, step, tokens, text, perplexity or scores, and the run's command, seconds and environment, as far as
            known; no paths of this machine.
        curve: (step, tokens, perplexity) of the validations up to this checkpoint.
        data: the settings of the run's data module, with class_path; empty if they are not known.
    """

    name: str
    net: MaskedLanguageModel | SequenceClassifier
    tokenizer: Tokenizer | None
    max_length: int
    labels: tuple[str, ...] | None = None
    several_labels: bool = False
    pair: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    curve: list[tuple[int, int, float]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def encoder(self) -> EncoderConfig:
        return self.net.encoder.config

    @property
    def classifies(self) -> bool:
        return isinstance(self.net, SequenceClassifier)

    @property
    def num_labels(self) -> int:
        return self.net.head.output.out_features  # type: ignore[return-value]

    def config(self) -> dict[str, Any]:
        """config.json of this project's own formats."""
        task: dict[str, Any] = {"task": "masked-lm"}
        if self.classifies:
            task = {"task": "sequence-classification", "num_labels": self.num_labels, "pooling": self.net.pooling}
            task |= {"labels": list(self.labels) if self.labels else None, "pair": self.pair}
            task |= {"several_labels": True} if self.several_labels else {}
        return task | {"max_length": self.max_length, "encoder": vars(self.encoder), "lit_linformer": self.facts}


def open_checkpoint(asked: str | Path, setting: str = "ckpt_path", reads_text: bool = True) -> TrainedModel:
    """Builds what `read_model` reads, with its tokenizer and what is known about its training.

    Raises ValueError, in one line that names the setting, for anything but a model and, if it ``reads_text``, for one without
    a tokenizer.
    """
    stored = read_model(asked, setting)
    path, net, tokenizer = stored.path, stored.build(), stored.own_tokenizer
    if tokenizer is None and reads_text:
        raise SettingError(setting, path, "a checkpoint that has one", more=", which carries no tokenizer")
    encoder = net.encoder.config
    if tokenizer is not None and len(tokenizer) > encoder.vocab_size:
        more = f": its tokenizer has {len(tokenizer)} tokens"
        raise SettingError(setting, path, f"its model's {encoder.vocab_size}", more=more)
    settings = stored.data.get("init_args") or {}
    longest = (settings | stored.exported).get("max_length")
    longest = min(longest, encoder.max_length) if isinstance(longest, int) else encoder.max_length
    if stored.exported:
        model = TrainedModel(path.resolve().name, net, tokenizer, longest, stored.labels, stored.several_labels)
        model.pair = model.classifies and bool(stored.exported.get("pair", False))
        model.facts = {"version": version()} | (stored.exported.get("lit_linformer") or {})
        model.curve = _curve(read_rows(path / PERPLEXITY))
        return model
    run, settings = path.parent.parent, dict(settings)
    seen_from(run, settings)
    name = run.name if path.parent.name == "checkpoints" else path.stem
    model = TrainedModel(name, net, tokenizer, longest, stored.labels, stored.several_labels)
    model.data = {"class_path": str(stored.data.get("class_path", "")), **settings}
    _add_facts(model, stored.checkpoint, run)
    if (task := task_of(model.data["class_path"], settings)) is not None:
        model.facts["task"], model.pair = task.name, model.classifies and len(task.columns) == 2
    if (windows := settings.get("max_windows") or 1) > 1:
        model.facts["windows"] = windows
    if tokenizer is None and model.data["class_path"]:
        model.facts["data"] = model.data["class_path"]
    return model


def task_of(class_path: str, settings: dict[str, Any]) -> "TextTask | None":
    """The task that data settings name or describe; None for data other than FineTuningData and LongRangeData."""
    from lit_linformer.data.finetuning.text_tasks import find_task, own_task
    from lit_linformer.data.longrange.sources import TASKS

    if of_class(class_path, "LongRangeData"):
        task = TASKS.get(settings.get("task", ""))
        return None if task is None else task.text_task
    if not of_class(class_path, "FineTuningData"):
        return None
    if settings.get("task"):
        return find_task(settings["task"])
    if not settings.get("columns"):
        return None
    separator = settings.get("label_separator")  # which runs from before do not have
    return own_task(settings["columns"], settings["label_column"], settings["labels"], label_separator=separator)


def _add_facts(model: TrainedModel, checkpoint: dict, run: Path) -> None:
    step = checkpoint["global_step"]
    facts = {"version": version(), "step": step}
    if "conversion" in checkpoint:
        facts["converted_from"] = checkpoint["conversion"]["from"]
    if "seen" in checkpoint:
        facts["tokens"] = checkpoint["seen"]["tokens"]
    source = model.data.get("source")
    if isinstance(source, str):
        facts["text"] = source if source.startswith("hub:") and not Path(source[4:]).exists() else Path(source).resolve().name
    if not model.classifies:
        rows = read_rows(run / PERPLEXITY) or checkpoint.get("callbacks", {}).get("PerplexityCurve", {}).get("rows", [])
        model.curve = [point for point in _curve(rows) if point[0] <= step and math.isfinite(point[2])]
        if model.curve:
            facts["best_perplexity"] = min(perplexity for _, _, perplexity in model.curve)
        if model.curve and model.curve[-1][0] == step:
            facts["perplexity"] = model.curve[-1][2]
    elif scores := [row for row in read_rows(run / SCORES) if row["step"] == step]:
        facts["scores"] = {key.removeprefix("val/"): value for key, value in scores[-1].items() if key.startswith("val/")}
    result = RunRecord(run).result
    model.facts = facts | {key: result[key] for key in ("seconds", "command", "environment") if result.get(key)}


def _curve(rows: list[dict[str, float]]) -> list[tuple[int, int, float]]:
    return [(int(row["step"]), int(row["tokens"]), row["perplexity"]) for row in rows if {*COLUMNS} <= row.keys()]


def own_classes(config: EncoderConfig) -> list[str]:
    """Class paths of attention and projection that are not this project's."""
    found = {config.attention: ATTENTIONS}
    if config.attention_kind.slots:
        found[config.projection] = PROJECTIONS
    return [name for name, known in found.items() if name not in known]


def own_modules(net: nn.Module, name: str = "") -> dict[str, str]:
    """Names and class paths of a user's own modules in a network, but for attention and projection, which settings name."""
    if isinstance(net, Attention | Projection):
        return {}
    modules = (kind for kind in type(net).__mro__ if issubclass(kind, nn.Module))
    own = next((kind for kind in modules if kind.__module__.partition(".")[0] not in ("torch", "lit_linformer")), None)
    found = {} if own is None else {name or "net": f"{own.__module__}.{own.__qualname__}"}
    for child, module in net.named_children():
        found |= own_modules(module, f"{name}.{child}" if name else child)
    return found


def version() -> str:
    """This project's version."""
    return versions().get("lit-linformer", "unknown")  # a copied folder is not installed
