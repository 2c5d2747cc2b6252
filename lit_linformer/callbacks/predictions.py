"""Shows what `predict` found: a table on the terminal, and predictions.jsonl in the run directory."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class PredictionWriter(Callback):
    """Prints the most probable fillings of each mask as a table and writes them as JSON lines, one line a mask."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        tokenizer = trainer.datamodule.tokenizer
        for found in outputs:
            words = [
                {"token": tokenizer.decode([token]), "id": token, "probability": probability}
                for token, probability in zip(found["ids"], found["probabilities"], strict=True)
            ]
            self.records.append({"text": found["text"], "mask": found["mask"], "top": words})

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        path = Path(trainer.default_root_dir) / "predictions.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in self.records), encoding="utf-8")
        table = Table("text", "mask", *(f"{rank}." for rank in range(1, 6)), show_lines=True)
        for record in self.records:
            # A token of white space only, a line feed say, is shown as it is written in Python.
            shown = [word["token"].strip() or repr(word["token"]) for word in record["top"]]
            cells = [Text(f"{token}\n{word['probability']:.1%}") for token, word in zip(shown, record["top"], strict=True)]
            table.add_row(Text(record["text"]), str(record["mask"]), *cells)
        console = Console()
        console.print(table)
        console.print(f"{len(self.records)} masks → {path}", highlight=False)
