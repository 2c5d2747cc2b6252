"""Exports a trained model: `python run.py export --ckpt_path runs/quickstart --format huggingface --output out/quickstart`.

    safetensors   model.safetensors, for lit_linformer.export.load and --model.pretrained; plain PyTorch
    huggingface   what the Auto classes and pipelines of transformers load: pip install 'lit-linformer[hf]'
    onnx          model.onnx, any batch and length up to n, checked with onnxruntime: pip install 'lit-linformer[onnx]'
    torch         model.pt2, a torch.export program, any batch and length up to n

Each comes with config.json, tokenizer.json (for a model of texts), SHA256SUMS, and README.md, a model card with the numbers of
the training, its command and its curve (perplexity.csv, perplexity.png). Every export is loaded again and compared with the
checkpoint on random inputs with padding; the largest difference of the logits is printed, and more than 1e-4 of the largest
logit is an error. Nothing appears at --output before that.

--dtype bfloat16 (safetensors, huggingface) halves the file: the effect of the rounding is printed, the comparison is with the
rounded weights, and the model still computes in float32. --results adds to the card the scores of runs that fine-tuned this
model, such as runs/sst2, with their commands.
--quantize int8 (onnx) makes the weights of linear layers 8-bit and prints what it costs: the perplexity, or a classifier's
changed answers, on the run's validation text or on --source.
"""

import contextlib
import errno
import importlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_linformer.runs.record import RunRecord
from lit_linformer.utils.amounts import count
from lit_linformer.utils.arguments import FLAG, Setting, choice, parse, several, word
from lit_linformer.utils.environment import command_line
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.files import read_json

if TYPE_CHECKING:  # the help needs no torch
    from lit_linformer.runs.trained_model import TrainedModel

SETTINGS = {
    "ckpt_path": Setting(word("FILE|RUN|FOLDER"), "checkpoint, run (its best checkpoint), or exported folder", required=True),
    "format": Setting(choice("safetensors", "huggingface", "onnx", "torch"), "what to write", required=True),
    "output": Setting(word("FOLDER"), "where to write", required=True),
    "overwrite": Setting(FLAG, "replace an earlier export at --output", False),
    "dtype": Setting(choice("float32", "bfloat16"), "dtype of the weights in model.safetensors", "float32"),
    "name": Setting(word("NAME"), "what the card calls the model (default: the run's name)"),
    "text": Setting(word("WORDS"), "for the card: the training text and its licence (default: the source's name)"),
    "license": Setting(word("ID"), "for the card: licence of the weights, as written on the Hugging Face hub: mit"),
    "results": Setting(several(word("RUN")), "for the card: runs that fine-tuned or measured this model", []),
    "quantize": Setting(choice("int8"), "with onnx: 8-bit weights, too, in model.int8.onnx"),
    "source": Setting(word("TEXT"), "with quantize: text to measure on, as data.source (default: the run's validation text)"),
}
# All files that an export may write.
FILES = {"config.json", "tokenizer.json", "README.md", "model.safetensors", "model.onnx", "model.int8.onnx", "model.pt2"}
FILES |= {"SHA256SUMS", "perplexity.csv", "perplexity.png"}
FILES |= {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}  # by transformers
FILES |= {"modules.json", "sentence_bert_config.json", "1_Pooling", "1_Pooling/config.json"}  # for Sentence Transformers
# What a format needs beyond the project's own dependencies, and how to get it.
NEEDS = {
    "huggingface": (("transformers",), "'lit-linformer[hf]'"),
    "onnx": (("onnx", "onnxscript", "onnxruntime"), "'lit-linformer[onnx]'"),
}
# Each has write(model, folder), and logits(model, folder): the written model, as a function of input_ids and attention_mask.
MODULES = {"safetensors": "safetensors_folder", "huggingface": "huggingface_folder", "onnx": "onnx", "torch": "graph"}
LEFT_OUT = ("train/", "val/loss", "val/score", "test/loss", "test/score")  # of --results; score is the mean of the others


def main(argv: list[str]) -> None:
    """Writes and checks the export and prints the result; raises ValueError, in one line, for bad input."""
    given = parse("export", __doc__, SETTINGS, argv)
    form = given["format"]
    if given["quantize"] and form != "onnx":
        raise SettingError("quantize", given["quantize"], "with format=onnx", more=f" with format={form!r}")
    if given["source"] and not given["quantize"]:
        raise SettingError("source", given["source"], "with --quantize int8", more=" without quantize")
    if given["dtype"] != "float32" and form not in ("safetensors", "huggingface"):
        raise SettingError("dtype", given["dtype"], "with safetensors, huggingface", more=f" with format={form!r}")
    output = Path(given["output"])
    check_output(output, given["overwrite"])
    check_installed(form)
    results = [read_results(Path(folder)) for folder in given["results"]]

    from lit_linformer.runs.trained_model import open_checkpoint

    model = open_checkpoint(given["ckpt_path"], reads_text=False)
    model.name = given["name"] or model.facts.get("name", model.name)
    model.facts |= {key: given[key] for key in ("name", "text", "license") if given[key]}
    model.facts |= {"exported": command_line(["export", *argv])} | ({"results": results} if results else {})
    with staged(output) as folder:
        lines = write(model, form, folder, given)
    print(describe(model))
    for line in lines:
        print(line)
    print(f"→ {output}/: {', '.join(sorted(path.name for path in output.iterdir()))}", flush=True)


def write(model: "TrainedModel", form: str, folder: Path, given: dict[str, Any]) -> list[str]:
    """Writes and checks the folder's files; returns lines on the result. Raises ValueError if the export differs."""
    from lit_linformer.export import card
    from lit_linformer.export.verify import largest_difference
    from lit_linformer.runs.exported import write_sums

    module = importlib.import_module(f"lit_linformer.export.{MODULES[form]}")
    rounded = []
    if given["dtype"] != "float32":
        from lit_linformer.export.safetensors_folder import round_weights, store_rounded

        rounded = [round_weights(model)]
    batches: list = []
    if given["quantize"]:  # a text that cannot be read is reported before the model is written
        from lit_linformer.export import quantize

        if model.tokenizer is None:
            more = f", but {model.name} has no tokenizer"
            raise SettingError("quantize", given["quantize"], "for a model of texts", more=more)
        model.tokenizer.save(folder / "tokenizer.json")
        batches = quantize.read_batches(model, given["source"], folder / "tokenizer.json")
    module.write(model, folder)
    if rounded:
        store_rounded(folder)
    written = module.logits(model, folder)
    difference = largest_difference(model, written)
    of = "the bfloat16 weights'" if rounded else "the checkpoint's"
    lines = [f"largest difference of logits from {of}, on random inputs with padding: {difference:.2g}", *rounded]
    if form == "onnx":
        sessions, measured = {"onnxruntime": written}, []
        if given["quantize"]:
            quantize.write(folder)
            sessions["onnxruntime int8"] = module.logits(model, folder, module.INT8)
            measured = [quantize.cost(model, batches, *sessions.values())]
        lines += [*measured, module.compare_speed(model, sessions)]
    card.write(model, folder, form, lines)
    write_sums(folder)
    return lines


def describe(model: "TrainedModel") -> str:
    from lit_linformer.model import count_parameters

    e = model.encoder
    head = f"vocabulary of {e.vocab_size}"
    if model.classifies:
        several = ", several a text" if model.several_labels else ""
        head = "regression" if model.num_labels == 1 else f"{model.num_labels} labels{several}"
    kind, size = e.attention_kind.describe(e), count(count_parameters(model.net))
    step = f", step {model.facts['step']}" if "step" in model.facts else ""  # not known of what transformers alone made
    return f"{model.name}: {kind}, n = {e.max_length}, {head}, {size} parameters{step}"


def read_results(folder: Path) -> dict[str, Any]:
    """{"run", "metrics", "commands"} of a run; ValueError, in one line, for a folder without results."""
    metrics: dict[str, float] = {}
    commands, run = [], RunRecord(folder)
    for found, key in ((run.result, "best_metrics"), (run.validated, "metrics"), (run.tested, "metrics")):
        metrics |= {k: v for k, v in (found.get(key) or {}).items() if not k.startswith(LEFT_OUT) and isinstance(v, float)}
        commands += [found["command"]] if found.get("command") else []
    if not metrics:
        allowed = "the folder of a run that fit, validate or test has ended in"
        raise SettingError("results", folder, allowed, more=", which holds no metrics")
    return {"run": folder.resolve().name, "metrics": metrics, "commands": commands}


def check_installed(form: str) -> None:
    """Raises ValueError, with the pip command, if a format's packages are missing."""
    packages, extra = NEEDS.get(form, ((), ""))
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        more = f", which needs {' and '.join(missing)}, not installed here"
        raise SettingError("format", form, f"pip install {extra}", more=more, when="after")


def check_output(output: Path, overwrite: bool) -> None:
    """Raises ValueError if there is something at output that must not be replaced."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.is_dir():
        if not overwrite:
            raise SettingError("output", output, "a new folder, or --overwrite true", more=", which is not empty")
        if not is_export(output):
            raise SettingError(
                "output", output, "the folder of an earlier one", more=", which holds no export", when="with overwrite"
            )
        there = (path.relative_to(output).as_posix() for path in output.rglob("*"))
        if foreign := sorted(name for name in there if name not in FILES):
            raise SettingError("output", output, "another folder", more=f", which holds {foreign[0]}, and no export wrote that")
    elif output.exists() or output.is_symlink():
        raise SettingError("output", output, "a folder", more=", which is a file")


def is_export(folder: Path) -> bool:
    """Whether a folder is an export of ours, by its model card and config.json."""
    config = read_json(folder / "config.json") or {}
    with contextlib.suppress(OSError, ValueError):
        card = (folder / "README.md").read_text(encoding="utf-8")
        ours = config.get("model_type") == "lit_linformer" or "lit_linformer" in config
        return ours and "exported with lit-linformer" in card
    return False


@contextlib.contextmanager
def staged(output: Path, setting: str = "output") -> Iterator[Path]:
    """A temporary folder next to output, renamed to it when complete, or else removed.

    Raises ValueError, in one line that names the setting, if nothing can be written.
    """
    output = output.resolve()  # replaces a link's target, not the link
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise UserError(f"{setting}: cannot write {output}: {error.strerror}", "a folder that is open to writing") from error
    before = folder.with_name(folder.name + ".before")
    try:
        yield folder
        _open_to_others(folder)
        if output.exists():
            output.rename(before)
        folder.rename(output)
        shutil.rmtree(before, ignore_errors=True)
    except Exception as error:
        if not _is_full(error, folder):
            raise
        raise UserError(f"{setting}: cannot write {output}: No space left on device", "a disk with more room") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists() and not output.exists():
            before.rename(output)


def _is_full(error: Exception, folder: Path) -> bool:
    """Whether the disk was full: each library reports that in its own way, torch by the place in its code."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
        return True
    by_torch = isinstance(error, OSError | RuntimeError) and re.search("inline_container|PytorchStreamWriter", str(error))
    return bool(by_torch) and shutil.disk_usage(folder).free < 2**20


def _open_to_others(folder: Path) -> None:
    """Gives files the usual permissions: mkdtemp's folder and safetensors' file would be accessible only to their owner."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
