"""What a run's folder says of the run, without torch: for lists of many runs."""

import contextlib
import pickletools
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_linformer.runs.folder import CONFIG, CONVERSION, checkpoints, is_run
from lit_linformer.runs.lock import is_held
from lit_linformer.utils.files import read_json, read_rows

CURVES = ("perplexity.csv", "scores.csv", "curve.csv")
DEEPEST = 3  # folders below runs/ in which runs are looked for
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, ten times as fast, where it was built in


@dataclass(frozen=True)
class RunSummary:
    """A run, as far as its files tell; None or nothing for what they do not."""

    folder: Path
    model: str
    best: float | None
    monitor: str
    best_step: int | None
    step: int | None
    tokens: int | None
    seconds: float | None
    state: str


def find_runs(source: Path) -> list[Path]:
    """The runs in a folder, or the folder itself where it is one, in the order of their names."""
    if is_run(source):
        return [source]
    found: list[Path] = []
    places = [source]
    for _ in range(DEEPEST):
        places = [inner for place in places for inner in _folders(place)]
        found += [place for place in places if is_run(place)]
        places = [place for place in places if place not in found]
    return sorted(found)


def summary(folder: Path) -> RunSummary:
    config = _config(folder)
    result = read_json(folder / "result.json") or {}
    rows = next((rows for name in CURVES if (rows := read_rows(folder / name))), [])
    last = rows[-1] if rows else {}
    monitor = _of(config, "best.monitor") or "val/perplexity"
    best, best_step = _best(folder, result, monitor)
    step = result.get("step") or checkpoint_step(folder / "checkpoints" / "last.ckpt") or _whole(last.get("step"))
    return RunSummary(
        folder=folder,
        model=_model(config),
        best=best,
        monitor=monitor,
        best_step=best_step,
        step=step,
        tokens=result.get("tokens") or _whole(last.get("tokens")),
        seconds=result.get("seconds") or last.get("seconds"),
        state=_state(folder, result, step, _of(config, "trainer.max_steps")),
    )


def _state(folder: Path, result: dict[str, Any], step: int | None, most: Any) -> str:
    end = f" of {most:,}" if isinstance(most, int) and most > 0 else ""
    if is_held(folder):
        return f"running, step {step or 0:,}{end}"
    if result:
        whole = not end or step is None or step >= most
        return "finished" if whole else f"ended at step {step:,}{end}"
    if (folder / CONVERSION).is_file():
        return "converted"
    return f"stopped at step {step:,}{end}" if step else "stopped before its first checkpoint"


def _best(folder: Path, result: dict[str, Any], monitor: str) -> tuple[float | None, int | None]:
    if (found := result.get("best_metrics", {}).get(monitor)) is not None:
        return found, result.get("best_step")
    for path in reversed(checkpoints(folder)):  # best-00001200-52.2585.ckpt
        if name := re.fullmatch(r"best-(\d+)-(-?[\d.]+)\.ckpt", path.name):
            return float(name[2]), int(name[1])
    return None, None


def _model(config: dict[str, Any]) -> str:
    """A few words: MLM, linformer, k = 32."""
    words = [str(_of(config, "model.class_path") or "").rpartition(".")[2]]
    words += [str(task)] if (task := _of(config, "data.init_args.task")) else []
    encoder = _of(config, "model.init_args.encoder")
    if isinstance(encoder, dict) and (attention := encoder.get("attention")):
        words.append(str(attention).rpartition(".")[2])
        words += [f"k = {encoder.get('projection_dim')}"] if attention != "full" else []
    return ", ".join(word for word in words if word)


def checkpoint_step(path: Path) -> int | None:
    """The optimiser step of a checkpoint, read from its pickle without running it; None where that does not tell."""
    with contextlib.suppress(OSError, ValueError, zipfile.BadZipFile, KeyError), zipfile.ZipFile(path) as file:
        name = next(name for name in file.namelist() if name.endswith("data.pkl"))
        asked = False
        for operation, argument, _ in pickletools.genops(file.read(name)):
            if argument == "global_step":
                asked = True
            elif asked and isinstance(argument, int) and "PUT" not in operation.name:  # which numbers what was read
                return argument
    return None


def _config(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        found = yaml.load((folder / CONFIG).read_text(encoding="utf-8"), Loader)
        return found if isinstance(found, dict) else {}
    return {}


def _of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _folders(place: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [inner for inner in place.iterdir() if inner.is_dir() and not inner.is_symlink()]
    return []
