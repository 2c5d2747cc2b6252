"""Warns, in one line each, about settings on the command line that the chosen attention, projection and so on do not read.

Settings in --config files are exempt: an overlay may set them for every kind of model that it is used with.
"""

from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_warn

from lit_linformer.cli.given import typed_words
from lit_linformer.model import ATTENTIONS, PROJECTIONS, Projection
from lit_linformer.tasks.optim import READ_WITH

ENCODER, OF_PROJECTIONS = "model.encoder", ("projection_lr_factor", "projection_weight_decay")
OF_CONFIG = ("check", "arguments", "from_config", "shared", "of_ids")  # methods of an attention that receive the config


def warn_ignored(argv: list[str], model: Namespace) -> None:
    """Warns about a fit's ignored settings. model: with class_path and init_args."""
    typed, settings = [name for name, _ in typed_words(argv)], dict(vars(model.get("init_args", Namespace())))
    for names, reason in _unread(settings):
        if told := dict.fromkeys(name for name in typed for one in names if name == one or name.startswith(f"{one}.")):
            rank_zero_warn(f"{', '.join(told)} {'is' if len(told) == 1 else 'are'} ignored: {reason}")


def _unread(settings: dict[str, Any]) -> Iterator[tuple[set[str], str]]:
    """(settings, why nothing reads them). A user's own class that is given the config may read any."""
    for name, (decides, value) in READ_WITH.items():
        if settings.get(decides, value) != value:
            yield {f"model.{name}"}, f"model.{decides} is {settings[decides]}"
    if settings.get("schedule") == "constant":
        yield {"model.final_lr_factor"}, "model.schedule is constant"
    encoder = settings.get("encoder")
    if not isinstance(encoder, Namespace) or not {"attention", "projection", "position", "local_width"} <= vars(encoder).keys():
        return
    kind = ATTENTIONS.find(encoder.attention)
    if all(getattr(kind, name).__module__.startswith("lit_linformer.") for name in OF_CONFIG):
        others = {name for one in ATTENTIONS.values() for name in one.settings} - {*kind.settings}
        unread = {f"{ENCODER}.{name}" for name in others} | {f"model.{name}" for name in OF_PROJECTIONS if not kind.slots}
        yield unread, f"{ENCODER}.attention is {encoder.attention}"
        if kind.slots and encoder.projection in PROJECTIONS:
            others = {*Projection.settings} - {*PROJECTIONS[encoder.projection].settings}
            yield {f"{ENCODER}.{name}" for name in others}, f"{ENCODER}.projection is {encoder.projection}"
    if encoder.position != "rotary":
        yield {f"{ENCODER}.rotary_base"}, f"{ENCODER}.position is {encoder.position}"
    if not encoder.local_width:
        yield {f"{ENCODER}.local_std"}, f"{ENCODER}.local_width is 0"
