"""Records how a fine-tuning run scores: scores.csv, the confusion matrix, and GLUE's submission files."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lit_linformer.callbacks.loggers import Writer, writers
from lit_linformer.callbacks.observing import metrics, write_csv
from lit_linformer.runs.folder import SCORES
from lit_linformer.utils.errors import UserError
from lit_linformer.utils.figures import figure_class, literal

MOST_COUNTED, MOST_NAMED = 20, 80  # classes in the figure: for 77, with all counts as text, it took 40 s and 2 GB


class TaskScores(Callback):
    """Writes scores.csv, one row for each validation; draws the confusion matrix; `test` writes predictions to submission/."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state_dict["rows"]]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(pl_module, "results"):
            what = f"trainer.callbacks holds TaskScores, but model is {type(pl_module).__name__}"
            raise UserError(what, "SequenceClassification")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.rows.append({"step": trainer.global_step, "epoch": trainer.current_epoch, **metrics(trainer, "val")})
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        write_csv(Path(trainer.default_root_dir) / SCORES, self.rows)
        labels = pl_module.text_task.labels
        shown = writers(trainer)
        confused = labels is not None and not pl_module.text_task.several_labels
        for name, result in pl_module.results.items() if confused and shown else ():
            tag = f"val/{name}/confusion_matrix" if name else "val/confusion_matrix"
            counts = multiclass_confusion_matrix(result["predictions"].long(), result["targets"].long(), len(labels))
            show(shown, trainer.global_step, tag, counts, labels)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        task, root = pl_module.text_task, Path(trainer.default_root_dir)
        for file, result in zip(task.submission, pl_module.results.values(), strict=True):
            path = root / "submission" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            words = zip(result["index"].tolist(), submission(result["predictions"], task), strict=True)
            lines = [f"{row}\t{word}\n" for row, word in words]
            path.write_text("index\tprediction\n" + "".join(lines), encoding="utf-8")
            note = "" if result["scores"] else " (the test set has no labels: no scores here)"
            print(f"{len(lines)} predictions → {path}{note}", flush=True)


def show(loggers: list[Writer], step: int, tag: str, counts: Tensor, labels: tuple[str, ...]) -> None:
    """The confusion matrix as a table and, where matplotlib is installed, as a figure."""
    rows = [[label, *row] for label, row in zip(labels, counts.tolist(), strict=True)]
    figure = figure_class()
    for logger in loggers:
        logger.table(tag, ["true ＼ predicted", *labels], rows, step)
        if figure is not None:
            logger.figure(tag, draw_confusion_matrix(figure, counts, labels), step)


def draw_confusion_matrix(figure_class: Any, counts: Tensor, labels: tuple[str, ...]) -> Any:
    """Draws shares of each true class as shades and, for up to MOST_COUNTED classes, counts as text.

    counts: (C, C), true class × predicted class.
    """
    counted = len(labels) <= MOST_COUNTED
    side = 1.6 + 0.9 * min(len(labels), MOST_COUNTED)
    figure = figure_class(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.add_subplot()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    for row, line in enumerate(counts.tolist() if counted else ()):
        for column, count in enumerate(line):
            shade = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count}\n{shares[row, column]:.1%}", ha="center", va="center", color=shade)
    axes.set(xlabel="predicted", ylabel="true")
    ticks = range(0, len(labels), -(-len(labels) // MOST_NAMED))
    names = [literal(labels[place]) for place in ticks]
    axes.set_xticks(ticks, names, rotation=90 if not counted else 30 if max(map(len, labels)) > 8 else 0)
    axes.set_yticks(ticks, names)
    return figure


def submission(predictions: Tensor, task: Any) -> list[str]:
    """Predictions as GLUE's site expects them: class names for MNLI, QNLI and RTE, else numbers; STS-B's within its range.

    Several labels a row stand in one cell, as in a table of training.
    """
    if task.several_labels:
        return [task.label_separator.join(task.label_name(row)) for row in predictions.tolist()]
    if task.labels is None and task.label_range is None:  # a user's own regression, of values however small
        return [f"{value:.6g}" for value in predictions.tolist()]
    if task.labels is None:
        return [f"{value:.3f}" for value in predictions.clamp(*task.label_range).tolist()]
    if task.submits_names:
        return [task.labels[int(number)] for number in predictions]
    return [str(int(number)) for number in predictions]
