"""What is exported: a checkpoint's model, its tokenizer, and what is known of its training."""

from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from lit_linformer.data.tokenizer import Tokenizer, load_tokenizer
from lit_linformer.model import ATTENTIONS, PROJECTIONS, EncoderConfig, MaskedLanguageModel, SequenceClassifier
from lit_linformer.runs.checkpoints import check_checkpoint, config_of, encoder_of, find_checkpoint, is_sharded
from lit_linformer.runs.folder import TOKENIZER
from lit_linformer.utils.files import read_rows
from lit_linformer.utils.finite import check_finite


@dataclass
class TrainedModel:
    """A trained model, ready to be written.

    Args:
        name: the run's, or the file's.
        net: MaskedLanguageModel or SequenceClassifier, float32, in evaluation mode.
        tokenizer: the one it was trained with.
        max_length: longest row it was trained on; up to the encoder's.
        labels: names of the classes; None for masked language models and regressions.
        pair: a row has two texts.
        facts: version, step, tokens, text, and perplexity or scores, as far as known; no paths of this machine.
        curve: (step, tokens, perplexity) of the validations up to this checkpoint.
        data: the settings of the run's data module, with class_path; empty where they are not known.
    """

    name: str
    net: nn.Module
    tokenizer: Tokenizer
    max_length: int
    labels: tuple[str, ...] | None = None
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
        return self.net.head.output.out_features

    def config(self) -> dict[str, Any]:
        """config.json of the formats that are this project's own."""
        task = {"task": "masked-lm"}
        if self.classifies:
            task = {"task": "sequence-classification", "num_labels": self.num_labels, "pooling": self.net.pooling}
            task |= {"labels": list(self.labels) if self.labels else None, "pair": self.pair}
        return task | {"max_length": self.max_length, "encoder": vars(self.encoder), "lit_linformer": self.facts}


def open_checkpoint(asked: str | Path, setting: str = "ckpt_path") -> TrainedModel:
    """Of a run directory the best checkpoint (its last, where there is no best), or a checkpoint file.

    Raises ValueError, in one line that names the setting, for what is neither.
    """
    path = _find(Path(asked), setting)
    checkpoint = check_checkpoint(path, setting)
    net = _build(path, checkpoint, setting)
    beside = path.parent.parent
    if isinstance(text := checkpoint.get("tokenizer"), str):
        tokenizer = Tokenizer.from_str(text, str(path))
    elif (beside / TOKENIZER).is_file():
        tokenizer = load_tokenizer(str(beside / TOKENIZER))
    else:
        raise ValueError(
            f"{setting} is {path}, which carries no tokenizer and lies in no run directory with a {TOKENIZER}; "
            "allowed: a checkpoint that has one"
        )
    vocabulary = net.encoder.config.vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(f"{setting} is {path}: its tokenizer has {len(tokenizer)} tokens; allowed: its model's {vocabulary}")
    data = config_of(checkpoint, path, setting).get("data") or {}
    settings = data.get("init_args") or {}
    longest = settings.get("max_length")
    longest = min(longest, net.encoder.config.max_length) if isinstance(longest, int) else net.encoder.config.max_length
    model = TrainedModel(beside.name if path.parent.name == "checkpoints" else path.stem, net, tokenizer, longest)
    model.data = {"class_path": str(data.get("class_path", "")), **settings}
    if model.classifies:
        _add_task(model)
    _add_facts(model, checkpoint, beside)
    return model


def _find(path: Path, setting: str) -> Path:
    if not path.exists():
        raise ValueError(f"{setting} is {path}, which does not exist; allowed: the folder of a run, or a checkpoint file")
    if not path.is_dir() or is_sharded(path):  # a sharded checkpoint is a folder
        return path
    found = find_checkpoint(path, "best") or find_checkpoint(path, "last")
    if found is None:
        raise ValueError(f"{setting} is {path}, a folder without checkpoints/; allowed: a run that was trained, or a file")
    return found


def _build(path: Path, checkpoint: dict, setting: str) -> nn.Module:
    encoder = replace(encoder_of(checkpoint, path, setting), activation_checkpointing=False)
    settings, prefix = checkpoint["hyper_parameters"], "net."
    weights = {name.removeprefix(prefix): t for name, t in checkpoint["state_dict"].items() if name.startswith(prefix)}
    if not weights:
        raise ValueError(f"{setting} is {path}, which holds no encoder; allowed: a checkpoint of this project")
    check_finite(weights, f"{setting} is {path}")
    try:
        if "num_labels" in settings:
            net = SequenceClassifier(encoder, settings["num_labels"], settings["pooling"])
        else:
            net = MaskedLanguageModel(encoder)
        net.load_state_dict(weights)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())[:200]
        allowed = "a checkpoint of MLM or SequenceClassification"
        raise ValueError(f"{setting} is {path}, whose weights are of another model ({what}); allowed: {allowed}") from error
    return net.float().eval()


def _add_task(model: TrainedModel) -> None:
    """Names of the classes, from the task that the run's data settings name."""
    from lit_linformer.data.finetuning.text_tasks import find_task, own_task

    data = model.data
    if not data["class_path"].endswith("FineTuningData"):
        return
    task = find_task(data["task"]) if data.get("task") else own_task(data["columns"], data["label_column"], data["labels"])
    model.facts["task"], model.pair = task.name, len(task.columns) == 2
    if task.labels is not None and len(task.labels) == model.num_labels:
        model.labels = task.labels


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
        rows = read_rows(run / "perplexity.csv") or checkpoint.get("callbacks", {}).get("PerplexityCurve", {}).get("rows", [])
        rows = [row for row in rows if row["step"] <= step]
        model.curve = [(int(row["step"]), int(row["tokens"]), float(row["perplexity"])) for row in rows]
        if model.curve:
            facts["best_perplexity"] = min(perplexity for _, _, perplexity in model.curve)
        if model.curve and model.curve[-1][0] == step:
            facts["perplexity"] = model.curve[-1][2]
    elif scores := [row for row in read_rows(run / "scores.csv") if row["step"] == step]:
        facts["scores"] = {key.removeprefix("val/"): value for key, value in scores[-1].items() if key.startswith("val/")}
    model.facts = facts | model.facts


def own_classes(config: EncoderConfig) -> list[str]:
    """Class paths of attention and projection that are none of this project's."""
    found = {config.attention: ATTENTIONS}
    if config.attention_kind.slots:
        found[config.projection] = PROJECTIONS
    return [name for name, known in found.items() if name not in known]


def version() -> str:
    """This project's."""
    try:
        return metadata.version("lit-linformer")
    except metadata.PackageNotFoundError:  # a clone that was not installed
        return "unknown"
