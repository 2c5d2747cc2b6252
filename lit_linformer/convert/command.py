"""Converts a model: `python run.py convert --from roberta-base/ --attention linformer --source texts/ --name linbert`.

    --from roberta-base/, --from hub:roberta-base     a RoBERTa, BERT or DistilBERT of Hugging Face to our Transformer
    --from runs/transformer --attention linformer     a Transformer to a Linformer with its weights, and new E and F
    --from runs/linformer --max_length 4096           a model of either kind to a longer n

These can be combined. runs/NAME is written as a run that has not trained yet: other runs start from it with
--model.pretrained, and `validate`, `predict`, `export`, `draw` and `spectrum` read it. conversion.json records what was done.

With --source the perplexity at 15 % masking is printed before and after, on the same text, at the old n and at the new one.
A converted Linformer is much worse at first, and recovers with further training: conf/convert/distill.yaml learns from the
Transformer, conf/convert/mlm.yaml from text alone.

A Hugging Face folder is read without transformers. If transformers is installed, the result is compared with its model on
random inputs with padding; a difference of more than 1e-4 of the largest logit is an error.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_linformer.runs.folder import CONVERSION, check_name, foreign_files, is_run
from lit_linformer.runs.place import run_folder
from lit_linformer.utils.arguments import FLAG, Setting, check_choice, check_device, choice, listed, mapping, parse, whole, word
from lit_linformer.utils.environment import command_line
from lit_linformer.utils.errors import SettingError, UserError

if TYPE_CHECKING:  # the help needs no torch
    from lit_linformer.model import EncoderConfig
    from lit_linformer.runs.trained_model import TrainedModel

EXTENSION = choice("interpolate", "repeat")
START = "strided"
SETTINGS = {
    "from": Setting(
        word("FOLDER|hub:NAME|FILE"),
        "a Hugging Face or exported folder, a run (its best checkpoint), or a checkpoint",
        required=True,
    ),
    "name": Setting(word("NAME"), "the new run is runs/NAME", required=True),
    "attention": Setting(word("NAME"), "linformer gives a Transformer E and F; or a class path (default: as it is)"),
    "attention_options": Setting(
        mapping("{NAME: VALUE}"), "as model.encoder.attention_options: with attention=lookup '{window: 32}' (default: none)"
    ),
    "projection_dim": Setting(listed(whole("K", 1)), "with attention=linformer: k, or one for each layer (default: n/4)"),
    "sharing": Setting(word("HOW"), "which E and F are shared, as model.encoder.sharing (default: none)"),
    "projection": Setting(word("KIND"), "as model.encoder.projection (default: linear)"),
    "projection_init": Setting(
        word("START"), "initialisation of E and F, as model.encoder.projection_init; or svd (default: strided)"
    ),
    "max_length": Setting(whole("N", 1), "n, longer than the model's (default: unchanged)"),
    "positions": Setting(EXTENSION, "how position embeddings are extended (default: repeat)"),
    "projections": Setting(
        EXTENSION, "how E and F are extended; repeat: k grows with n (default: interpolate with lookup or window, else repeat)"
    ),
    "source": Setting(
        word("TEXT|validation"), "measure perplexity on this text (as for data.source), or on the run's own; svd needs one"
    ),
    "num_rows": Setting(whole("ROWS", 1), "number of rows of n tokens to measure on (default: 64)"),
    "tokenizer": Setting(word("FILE|FOLDER"), "tokenizer for a Hugging Face folder without one"),
    "device": Setting(word("auto|cpu|cuda"), "where to measure (default: auto)"),
    "overwrite": Setting(FLAG, "replace an earlier conversion of that name (default: false)"),
}
WITH_LINFORMER = ("projection_dim", "sharing", "projection", "projection_init")


def main(argv: list[str]) -> None:
    """Converts, measures and prints the results; raises ValueError, in one line, for bad input."""
    given = {key: value for key, value in parse("convert", __doc__, SETTINGS, argv).items() if value is not None}
    if len(given.get("projection_dim", ())) == 1:
        given["projection_dim"] = given["projection_dim"][0]
    _check(given)
    output = run_folder(check_name(given["name"]))
    check_output(output, given.get("overwrite", False))

    from lit_linformer.convert.new_run import write
    from lit_linformer.export.command import describe, staged

    device = check_device(given.get("device", "auto"))
    model, lines = open_model(given)
    for line in lines:
        print(line)
    with staged(output, "name") as folder:
        content = {"command": command_line(["convert", *argv]), "from": model.name}
        content |= {"settings": given, "perplexity": convert(model, given, folder, device)}
        model.name = output.name
        write(model, folder, output, content)
    print(describe(model))
    print(f"→ {output}/: train on from it with --model.pretrained {output}", flush=True)


def _check(given: dict[str, Any]) -> None:
    """Raises ValueError for an invalid value, and for a setting that has no effect without another."""
    from lit_linformer.convert.surgery import FILLS
    from lit_linformer.model import ATTENTIONS, PROJECTIONS
    from lit_linformer.model.linformer import SHARINGS
    from lit_linformer.model.starts import PROJECTION_INITS

    for key, known in (("attention", ATTENTIONS), ("projection", PROJECTIONS)):
        if key in given:
            known.find(given[key])
    choices = {"sharing": SHARINGS, "projection_init": (*PROJECTION_INITS, *FILLS)}
    for key, allowed in choices.items():
        if key in given:
            check_choice(key, given[key], allowed)
    read = ATTENTIONS.find(given["attention"]).settings if "attention" in given else ()
    for key in WITH_LINFORMER:
        if key in given and key not in read:
            kind = f"with attention={given['attention']}" if "attention" in given else "without attention"
            takes = ", ".join(name for name, other in ATTENTIONS.items() if key in other.settings)
            raise SettingError(key, given[key], f"with --attention {takes}", more=f" {kind}")
    needs = {"positions": "max_length", "projections": "max_length", "attention_options": "attention"}
    for key, other in needs.items():
        if key in given and other not in given:
            raise SettingError(key, given[key], f"with --{other}", more=f" without {other}")
    if given.get("projection_init") in FILLS and "source" not in given:
        allowed = "with --source, the text whose attention is decomposed"
        raise SettingError("projection_init", given["projection_init"], allowed, more=" without source")


def check_output(output: Path, overwrite: bool) -> None:
    """Raises ValueError if there is something at output that must not be replaced."""
    if output.is_file():
        raise UserError(f"name: {output} is a file", "another --name")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not overwrite:
        raise UserError(f"name: {output} already holds something", "another --name, or --overwrite true")
    if not (output / CONVERSION).is_file() or not is_run(output):
        raise UserError(f"name: {output} holds no conversion", "an earlier one", when="with overwrite")
    if foreign := foreign_files(output):
        raise UserError(
            f"name: {output} holds {foreign[0].relative_to(output)}, and no conversion wrote that", "another --name"
        )


def open_model(given: dict[str, Any]) -> "tuple[TrainedModel, list[str]]":
    """The model that --from names, and lines to print."""
    from lit_linformer.convert import bert
    from lit_linformer.runs.exported import check_format, is_exported
    from lit_linformer.runs.trained_model import open_checkpoint

    name = given["from"].removeprefix("hub:")
    folder = Path(given["from"]) if name == given["from"] else bert.from_hub(name)
    if not folder.exists():
        allowed = "a Hugging Face folder or hub:NAME, a run, or a checkpoint"
        raise SettingError("from", folder, allowed, more=", which does not exist")
    if folder.is_dir() and bert.is_folder(folder):
        model, lines = bert.open_folder(folder, given.get("tokenizer"))
        if importlib.util.find_spec("transformers") is None:
            return model, [*lines, "not held against transformers, which is not installed"]
        from lit_linformer.export.verify import difference_from_transformers

        difference = difference_from_transformers(model, folder)
        return model, [*lines, f"largest difference from transformers, on random inputs with padding: {difference:.2g}"]
    if "tokenizer" in given:
        raise SettingError("tokenizer", given["tokenizer"], "with a Hugging Face folder, since a run has its own")
    ours = is_exported(folder) or any((folder / name).exists() for name in ("checkpoints", "config.yaml", ".metadata"))
    if folder.is_dir() and not ours:
        check_format(folder, "from")
        allowed = "a Hugging Face folder with config.json, the folder of a run, or a checkpoint"
        raise SettingError("from", folder, allowed, more=", which is no model")
    model = open_checkpoint(folder, "from", reads_text=False)
    if model.classifies:
        raise SettingError("from", folder, "a masked language model, to be fine-tuned after conversion", more=", a classifier")
    if model.tokenizer is None and "source" in given:
        raise SettingError("source", given["source"], "for a model of texts", more=f", but {folder} has no tokenizer")
    if model.tokenizer is None and not model.data.get("class_path"):
        raise SettingError("from", folder, "the run that it was exported from", more=", which says nothing of its data")
    return model, []


def convert(model: "TrainedModel", given: dict[str, Any], folder: Path, device: str) -> list[dict[str, Any]]:
    """Changes the model as asked; prints and returns the perplexities on the way, if there is a text."""
    from lit_linformer.convert import surgery
    from lit_linformer.tasks.evaluation import masked_batches, names_text, open_text, perplexity

    source = given.get("source")
    if source == "validation" and not names_text(model.data):
        raise UserError(f"source is 'validation', but {given['from']} names no text of its own", "a text")
    old, new = model.encoder.max_length, given.get("max_length", model.encoder.max_length)
    measured: list[dict[str, Any]] = []
    data = split = None
    if source is not None:
        model.tokenizer.save(folder / "tokenizer.json")
        data, split = open_text(model.data, None if source == "validation" else source, folder / "tokenizer.json", old)

    def measure(what: str, max_length: int) -> None:
        if data is None:
            return
        rows = max(1, given.get("num_rows", 64) * old // max_length)
        found = perplexity(model.net.to(device), masked_batches(data, split, max_length, rows))
        model.net.to("cpu")
        measured.append({"what": what, "max_length": max_length, "perplexity": found})
        print(f"perplexity {what + ', n = ' + str(max_length):<44}{found:10.2f}", flush=True)

    measure("as it was", old)
    if given.get("attention") not in (None, model.encoder.attention):
        _change_attention(model, given, None if data is None else data.blocks[split])
        measure(f"as a {_said(model.encoder, given)}", old)
    elif "attention" in given and any(key in given for key in (*WITH_LINFORMER, "attention_options")):
        raise SettingError("attention", given["attention"], "a Transformer", more=f", and {given['from']} is one already")
    if "positions" in given and model.encoder.position == "rotary":
        allowed = "for learned positions, since rotary ones need no extension"
        raise SettingError("positions", given["positions"], allowed, more=f", but {given['from']} has rotary positions")
    if "max_length" in given:
        how = given.get("positions", "repeat"), given.get("projections", model.encoder.attention_kind.grows)
        model.net = surgery.to_longer(model.net, new, *how)
        row, model.max_length = model.max_length, new  # rows may have been shorter than n
        if isinstance(before := model.data.get("batch_size"), int):  # keeps the tokens a step; a user's own data may have null
            model.data["batch_size"] = now = max(1, before * row // new)
            if rows := model.data.get("global_batch_size"):
                # A micro-batch may come to less than one row: then there are fewer micro-batches.
                model.data["global_batch_size"] = max(1, min(rows // before * now, rows * row // new))
        measure("made longer", old)
        measure("made longer", new)
    return measured


def _change_attention(model: "TrainedModel", given: dict[str, Any], blocks: Any) -> None:
    """Gives a Transformer another attention, and keeps its weights. blocks: those of the text to measure on; None: no text."""
    from lit_linformer.convert import surgery
    from lit_linformer.model import ATTENTIONS

    kind, before = ATTENTIONS.find(given["attention"]), model.encoder.attention_kind
    if not before.exact:
        more = f", but {given['from']} is a {before.title or model.encoder.attention}"
        raise SettingError("attention", given["attention"], model.encoder.attention, more=more)
    settings = {"sharing": "none", "projection": "linear", "projection_dim": max(1, model.encoder.max_length // 4)}
    settings = {key: given.get(key, value) for key, value in settings.items() if key in kind.settings}
    settings["attention_options"] = given.get("attention_options")
    if settings.get("projection") not in (None, model.encoder.projection):
        settings["projection_options"] = None  # a Transformer may have some, unread, of another projection
    start, rows = given.get("projection_init", START), None
    if start in surgery.FILLS:
        import torch

        if not blocks.full:
            more = f", which has no full row of {blocks.length} tokens"
            raise SettingError("source", given["source"], "a longer text", more=more, when=f"with projection_init={start}")
        rows = torch.from_numpy(blocks.full_rows(given.get("num_rows", 64)))
    model.net = surgery.to_linformer(model.net, start, rows, given["attention"], **settings)


def _said(encoder: "EncoderConfig", given: dict[str, Any]) -> str:
    """What the model is now: `Linformer, k = 16, strided`, or a projection other than linear instead of the initialisation."""
    kind = encoder.attention_kind
    words = [kind.title or encoder.attention]
    if kind.slots:
        words += [f"k = {encoder.projection_dim}", given.get("projection") or given.get("projection_init", START)]
    return ", ".join(words)
