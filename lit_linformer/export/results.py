"""What other runs found with a model, for its card: fine-tunings of it, and perplexities on texts."""

from pathlib import Path
from typing import Any

from lit_linformer.runs.record import RunRecord
from lit_linformer.utils.errors import SettingError

LEFT_OUT = ("train/", "val/loss", "val/score", "test/loss", "test/score")  # score is the mean of the others


def read_results(folder: Path) -> dict[str, Any]:
    """{"run", "metrics", "commands"} of a run; ValueError, in one line, for a folder without results."""
    metrics: dict[str, float] = {}
    commands, run = [], RunRecord(folder)
    for found, key in ((run.result, "best_metrics"), (run.validated, "metrics"), (run.tested, "metrics")):
        metrics |= {k: v for k, v in (found.get(key) or {}).items() if not k.startswith(LEFT_OUT) and isinstance(v, float)}
        commands += [found["command"]] if found.get("command") else []
    if not metrics:
        raise SettingError(
            "results", folder, "the folder of a run that fit, validate or test has ended in", more=", which holds no metrics"
        )
    return {"run": folder.resolve().name, "metrics": metrics, "commands": commands}
