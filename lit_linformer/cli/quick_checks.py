"""Refuses what can be refused at once, before torch is imported: files, names of settings, a model without an encoder.

Names are known for this package's classes and for Lightning's Trainer, read from their source files. The parser checks
everything else, including all values.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_linformer.cli.defaults import ALWAYS_THERE, DEFAULT_CLASSES, ENCODER
from lit_linformer.cli.given import (
    CLASS,
    TEXTS,
    beside_class_path,
    given_settings,
    names_class,
    one_dash,
    stray_words,
    typed_words,
    walk,
)
from lit_linformer.cli.short_help import exported, find
from lit_linformer.runs.folder import CONFIG
from lit_linformer.utils import sources
from lit_linformer.utils.configs import SETTINGS_FILE, check_command, config_contents
from lit_linformer.utils.errors import SettingError, UserError

TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
SYNTAX = ("help", "config", *CLASS)
NEAR = 0.6  # least similarity of a name that is suggested; 1: the same
# What other libraries call a setting, where the name itself is not similar to it.
ELSEWHERE = {
    "seed_everything": "seed random_seed",
    "name": "run_name output_dir exp_name experiment",
    "ckpt_path": "resume resume_from resume_from_checkpoint checkpoint",
    "trainer.devices": "gpus num_gpus ngpus n_gpu",
    "trainer.accelerator": "device use_cuda no_cuda cuda",
    "trainer.precision": "fp16 bf16 amp half mixed_precision dtype",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps accumulation_steps grad_accum update_freq",
    "trainer.gradient_clip_val": "max_grad_norm clip_grad grad_clip clip_norm",
    "trainer.val_check_interval": "eval_steps eval_interval eval_every validate_interval",
    "trainer.max_steps": "steps num_steps num_train_steps max_iters iterations total_steps",
    "trainer.logger": "report_to wandb tensorboard",
    "model.pretrained": "model_name_or_path init_from load_from finetune_from",
    "model.encoder.projection_dim": "k proj_dim proj_k num_slots",
    "model.encoder.hidden_size": "d_model dim n_embd embed_dim hidden_dim emb_dim width",
    "model.encoder.num_layers": "n_layer depth num_hidden_layers",
    "model.encoder.num_heads": "n_head num_attention_heads",
    "model.encoder.position": "rope pos_emb positional_encoding",
    "data.max_length": "seq_len seq_length sequence_length max_seq_length max_seq_len block_size context_length n",
    "data.source": "path dataset dataset_name data_dir train_file corpus",
    "data.mask_rate": "mlm_probability mask_prob masking",
}


def check_quickly(argv: list[str]) -> None:
    """Raises UserError, naming the setting and the file, for what is certainly wrong."""
    given = given_settings(argv)
    for stray in stray_words(argv):
        for file in (Path(stray), Path(stray) / CONFIG):
            if file.is_file():
                raise UserError(f"{stray!r} is neither a setting nor the value of one", f"--config {file}")
    for name in one_dash(argv):
        raise UserError(f"unknown setting '{name}'; did you mean '-{name}'?")
    contents = list(config_contents(argv))
    for file, content in contents:
        check_command(Path(file), content, "fit", SETTINGS_FILE)
    for file, section, value in walk(argv):
        if value is None and section in (*DEFAULT_CLASSES, *ALWAYS_THERE, "trainer"):  # e.g. all below it is commented out
            allowed = f"its settings by name, or no {section} at all"
            raise SettingError(section, None, allowed, more=f" in {file}" if file else "")
        if file and section == "config":  # the parser would read it; --help and the checks would not
            raise UserError(f"{file} names another file, config: {value}", "one more --config on the command line")
        key = next((key for key in CLASS if isinstance(value, dict) and key in value), None)
        if section in DEFAULT_CLASSES and key is not None and (beside := beside_class_path(value)) is not None:
            raise UserError(f"{section} has {beside} beside {key}{f' in {file}' if file else ''}", "under init_args")
    _check_order(contents)
    typed = [name for name, _ in typed_words(argv)]
    if twice := next((name for name in (*TEXTS, "data.file") if typed.count(name) > 1), None):
        allowed = f"""once, with a list: --{twice} '["one", "another"]'""" if twice in TEXTS else "one file"
        raise UserError(f"{twice} is given {typed.count(twice)} times, of which the last alone would be read", allowed)
    for name in typed:
        if "." not in name and (suggested := nearest(name, ["config"])):
            raise UserError(f"unknown setting '{name}'{suggested}")
    if any(name.endswith(".help") for name in typed):  # --trainer.callbacks.help Spectrum: prints that class's settings
        return
    known = known_settings(given)
    for name, file in _named(argv, given):
        if (wrong := _unknown(name, known)) is not None:
            where = f" in {file}" if file else ""
            if not given.get("model") and (owner := _owner(wrong)) is not None:
                allowed = "a config that names it before this one, as those in conf/finetune/ do"
                raise UserError(f"{wrong}{where} is a setting of {owner}, and the model is MLM", allowed)
            raise UserError(
                f"unknown setting '{wrong}'{where}{nearest(wrong, [one for names in known.values() for one in names])}"
            )
    if argv[0] == "fit" and not any(word.startswith("--print_config") for word in argv):
        _check_encoder(given, _class("model", given.get("model") or DEFAULT_CLASSES["model"]))


def _check_order(contents: list[tuple[str, dict[str, Any]]]) -> None:
    """Raises UserError for an overlay that comes before the file that names the class whose settings it changes."""
    for key in DEFAULT_CLASSES:
        files = [(file, names_class(content[key])) for file, content in contents if key in content]
        if files and not files[0][1] and (base := next((file for file, names in files if names), None)):
            what = f"{files[0][0]} changes settings of the {key}, and comes before {base}, which says what the {key} is"
            raise UserError(what, f"--config {base} --config {files[0][0]}")


def _owner(name: str) -> str | None:
    """The task that has this setting of the model."""
    section, _, setting = name.partition(".")
    tasks = exported("model") if section == "model" else {}
    return next((task for task, one in tasks.items() if setting in one.settings()), None)


def _class(key: str, path: Any) -> sources.Declared | None:
    """The class, if it is one of this package's."""
    found = find(key, path)
    return found if found is not None and found.ours else None


def known_settings(given: dict[str, Any]) -> dict[str, list[str]]:
    """{section: its settings} for the sections whose settings can be read. given: the settings of a command line."""
    classes = {key: _class(key, given.get(key) or path) for key, path in DEFAULT_CLASSES.items()}
    declared = {key: sources.find(path) for key, path in {**ALWAYS_THERE, "trainer": TRAINER}.items()} | classes
    known = {key: [f"{key}.{name}" for name in one.settings()] for key, one in declared.items() if one is not None}
    if "model.encoder" in known.get("model", ()) and (encoder := sources.find(ENCODER)) is not None:
        known["model.encoder"] = [f"model.encoder.{name}" for name in encoder.settings()]
    return known


def _named(argv: list[str], given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting, file) of files, and (setting, "") of the command line; without a file's settings of a replaced class."""
    current = dict(DEFAULT_CLASSES)
    for file, section, value in walk(argv):
        if not file:
            yield section, ""
        elif isinstance(value, dict) and section in current:
            current[section] = value.get("class_path") or current[section]
            if current[section] != (given.get(section) or DEFAULT_CLASSES[section]):
                continue
            value = value.get("init_args")
        for name, inner in value.items() if file and isinstance(value, dict) else ():
            yield f"{section}.{name}", file
            if (section, name) == ("model", "encoder") and isinstance(inner, dict):
                yield from ((f"model.encoder.{part}", file) for part in inner)


def _unknown(name: str, known: dict[str, list[str]]) -> str | None:
    """The part of a name that is certainly not a setting; None if only the parser can tell."""
    parts = name.rstrip("+").split(".")
    if set(parts) & set(SYNTAX) or parts[0] not in known or len(parts) < 2:
        return None
    if (first := ".".join(parts[:2])) not in known[parts[0]]:
        return first
    if first == "model.encoder" and len(parts) > 2 and (deeper := ".".join(parts[:3])) not in known["model.encoder"]:
        return deeper
    return None


def _check_encoder(given: dict[str, Any], model: sources.Declared | None) -> None:
    settings = model.settings() if model is not None else {}
    there = any(key.startswith("model.encoder") and value is not None for key, value in given.items())
    if "encoder" not in settings or "pretrained" not in settings or there:
        return
    if given.get("model.pretrained") is None and given.get("ckpt_path") is None:
        raise no_encoder("load_weights" in settings)


def no_encoder(fine_tunes: bool, run: Path | None = None) -> UserError:
    """The error for a model that has nothing to start from. run: that of the checkpoint."""
    if run is not None:
        return UserError("model.encoder is not given", f"--config {run / CONFIG}, with the settings of the checkpoint's run")
    if fine_tunes:
        return UserError(
            "model.pretrained is not given",
            "a run directory or a checkpoint, or model.encoder with the settings of one to train from scratch",
        )
    return UserError(
        "model.encoder is not given",
        "its settings, as --config conf/quickstart.yaml has them, or model.pretrained with a model to start from",
    )


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean …?` with the setting of that name elsewhere, or the one whose last word is the most similar; among
    equals one of the same section."""
    word = name.rpartition(".")[2].lower()
    called = next((one for one, names in ELSEWHERE.items() if word in names.split()), "")
    if called in known or (called and "." not in called):  # each command has those without a section
        return f"; did you mean '{called}'?"
    scored = [(_likeness(name, one), one) for one in known if one != name]
    best, found = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return f"; did you mean '{found}'?" if best >= NEAR else ""


def _likeness(name: str, known: str) -> float:
    (section, _, word), (there, _, other) = name.rpartition("."), known.rpartition(".")
    alike = difflib.SequenceMatcher(None, word, other).ratio()
    begins = (len(other) > 1 and word.startswith(other)) or (len(word) > 2 and other.startswith(word))
    if begins or "".join(part[:1] for part in word.split("_")) == other:
        alike = max(alike, 0.8)  # lrate, learning_rate for lr; every for every_n_steps
    return alike + 0.1 * difflib.SequenceMatcher(None, section, there).ratio()
