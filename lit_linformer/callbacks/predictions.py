"""Shows what `predict` found: a table on the terminal, and predictions.jsonl in the run directory."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_linformer.utils.files import json_text


class PredictionWriter(Callback):
    """Prints each text with its most probable fillings or labels, and writes them as JSON lines.

    A task's predict_step gives a list of records: {text, mask?, top: [{token or label, probability}, …]} or {text, value}. What
    a module of your own gives otherwise, a tensor say, is written a row a line, and not printed.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.records += _records(outputs)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        path = Path(trainer.default_root_dir) / "predictions.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json_text(record) + "\n" for record in self.records), encoding="utf-8")
        console = Console()
        if not all("text" in record and record.keys() & {"top", "value"} for record in self.records):
            console.print(f"{len(self.records)} predictions → {path}", highlight=False)
            return
        of_masks, shown = "mask" in self.records[0], len(self.records[0].get("top", ())[:5])
        heads = ["mask"] * of_masks + [f"{rank}." for rank in range(1, shown + 1)] + ["value"] * (shown == 0)
        table = Table("text", *heads, show_lines=True)
        for record in self.records:
            text = record["text"] if isinstance(record["text"], str) else "\n".join(record["text"])
            cells = [str(record["mask"])] if of_masks else []
            cells += [f"{_name(found)}\n{found['probability']:.1%}" for found in record.get("top", ())[:5]]
            cells += [f"{record['value']:.3f}"] if "value" in record else []
            table.add_row(*(Text(cell) for cell in (text, *cells)))
        console.print(table)
        console.print(f"{len(self.records)} {'masks' if of_masks else 'texts'} → {path}", highlight=False)


def _records(outputs: Any) -> list[dict[str, Any]]:
    rows = outputs.tolist() if isinstance(outputs, Tensor) else outputs if isinstance(outputs, list) else [outputs]
    rows = [row if isinstance(row, dict) else {"prediction": row} for row in rows if row is not None]
    return [{key: value.tolist() if isinstance(value, Tensor) else value for key, value in row.items()} for row in rows]


def _name(found: dict[str, Any]) -> str:
    """A label, or a token; one of white space only, a line feed say, as it is written in Python."""
    return found["label"] if "label" in found else found["token"].strip() or repr(found["token"])
