"""What is printed before training."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lit_linformer.callbacks.observing import parameters_of
from lit_linformer.tasks.base import encoder_of
from lit_linformer.utils.amounts import clock, count
from lit_linformer.utils.environment import cores, hardware, lacks_bfloat16

Rows = list[tuple[str, str]]  # label and text
WIDTH, INDENT = 80, 12  # of a line, and where its text begins: after "validation", the longest label of the data's lines


def header(trainer: Trainer, pl_module: LightningModule) -> Rows:
    """Lines about the model, the machine, the training that begins, and the run folder."""
    whole, learning = map(count, parameters_of(pl_module))
    kind, size = type(pl_module).__name__, f"{whole} parameters" + f", of which {learning} learn" * (whole != learning)
    if (encoder := encoder_of(pl_module)) is not None:
        c = encoder.config
        kind = f"{c.attention_kind.describe(c)}, n = {c.max_length}"
        size = f"{c.num_layers} layers of width {c.hidden_size}, {size}"
    return [
        ("model", kind),
        ("size", size),
        ("device", f"{_device(trainer)}, precision {trainer.precision}{_slow(trainer)}"),
        ("training", _training(trainer)),
        ("run", "not kept: trainer.fast_dev_run" if trainer.fast_dev_run else str(trainer.default_root_dir)),
    ]


def _slow(trainer: Trainer) -> str:
    emulated = str(trainer.precision).startswith("bf16") and trainer.strategy.root_device.type == "cpu" and lacks_bfloat16()
    return ", for which this processor has no units: 32-true is faster" if emulated else ""


def _device(trainer: Trainer) -> str:
    device = str(trainer.strategy.root_device)
    what = hardware(device) if device.startswith(("cpu", "cuda")) else device
    if trainer.world_size > 1:
        return f"{trainer.world_size} × {what}"
    return f"{what} ({cores()} cores)" if device == "cpu" else what


def _training(trainer: Trainer) -> str:
    # Not trainer.estimated_stepping_batches: read this early, it keeps the loader's state from being restored.
    ends = ((trainer.max_steps, "step"), (trainer.max_epochs or -1, "epoch"))
    limits = [f"{number:,} {unit}{'s' * (number != 1)}" for number, unit in ends if number > 0]
    rows = getattr(trainer.datamodule, "rows_per_step", None)
    length = getattr(trainer.datamodule, "max_length", None)
    each = f" of {rows} rows" if rows else ""
    each += f" of up to {length} tokens" if rows and length else ""
    if trainer.max_steps > 0:
        return " or ".join(limits) + each
    timers = [one for one in trainer.callbacks if isinstance(one, Timer)]  # trainer.max_time's, or one's own
    times = [left + one.time_elapsed() for one in timers if (left := one.time_remaining()) is not None]
    limits = limits or [f"for {clock(min(times))}" if times else "without an end"]
    return ", ".join([*limits, *([f"steps{each}"] if each else [])])


def wrapped(rows: Rows, width: int = WIDTH) -> Rows:
    """The same with lines of at most ``width``, broken at commas if there are any."""
    lines = []
    for label, text in rows:
        label, line = label.ljust(INDENT), ""
        for part in text.split(", "):
            if line and len(label) + len(line) + 3 + len(part) > width:
                lines.append((label, f"{line},"))
                label, line = " " * INDENT, part
            else:
                line = f"{line}, {part}" if line else part
        lines.append((label, line))
    return lines
