"""The spectrum of attention in trained runs (the paper's figure 1): `python run.py spectrum --run runs/small`.

For each run's best checkpoint, on full rows of unmasked text (its validation text, or --source): the cumulative singular values
of the attention maps P by layer and head, normalised for each sentence, then averaged; for each layer the k that holds 90 % of
their sum, as settings for a Linformer; and how close approximations of rank k come to softmax(q kᵀ/√d) v. Written to
RUN/spectrum/:

    spectrum.md, spectrum.json      the tables; what a script reads
    figure1.png                     curves, and layer × head at the index (if matplotlib is installed)
    spectrum.npz, spectrum.csv      every curve: RUN:cumulative (layer, head, index); run, layer, head, index, cumulative

By default the index is a quarter of the singular values: the paper's 128 of 512, or k/4 for a Linformer. The errors of a
model with a projection_dim are at its own k, a Transformer's at the index. Several runs are shown side by side.
A fine-tuned run and an exported folder work too, and need --source. At n = 512 each head of a layer takes 0.1 s per sentence on
one core.
"""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_linformer.utils.amounts import percent
from lit_linformer.utils.arguments import Setting, check_device, listed, number, parse, several, whole, word
from lit_linformer.utils.environment import command_line, environment
from lit_linformer.utils.errors import SettingError
from lit_linformer.utils.files import check_own, write_json, write_text
from lit_linformer.utils.markdown import aligned

if TYPE_CHECKING:  # the help needs no torch
    from lit_linformer.studies.spectrum.measured_run import MeasuredRun

SETTINGS = {
    "run": Setting(several(word("RUN")), "folders of trained runs, such as runs/small, or of exported models", required=True),
    "num_sentences": Setting(whole("N", 1), "rows to average over, spread evenly over the text", 100),
    "source": Setting(word("TEXT"), "text to run on, as for data.source (default: each run's validation text)"),
    "ckpt_path": Setting(word("best|last|FILE"), "checkpoint (default: best, or last if there is no best)"),
    "layers": Setting(listed(whole("LAYER")), "layers to measure, from 0 (default: all)"),
    "heads": Setting(listed(whole("HEAD")), "draw a curve for each of these heads (default: a layer's mean and range)"),
    "index": Setting(
        whole("J", 1), "singular value, from 1, of the heat map, and k of a Transformer's errors (default: below)"
    ),
    "threshold": Setting(number("SHARE", above=0, most=1), "cumulative share that the suggested k holds", 0.9),
    "device": Setting(word("auto|cpu|cuda"), "where to compute", "auto"),
    "output": Setting(
        word("FOLDER"), "where to write (default: RUN/spectrum of the first run; runs/pretrained-… of an export)"
    ),
}
FILES = ("spectrum.md", "spectrum.json", "spectrum.npz", "spectrum.csv", "figure1.png")


def main(argv: list[str]) -> None:
    """Measures, writes and shows the tables; raises ValueError, in one line, for bad input."""
    given = parse("spectrum", __doc__, SETTINGS, argv)
    given["heads"] = given["heads"] and sorted(set(given["heads"]))
    runs = list(dict.fromkeys(map(Path, given["run"])))

    from lit_linformer.runs.exported import check_format, is_exported

    for run in runs:
        if not is_exported(run) and not ((run / "config.yaml").is_file() and (run / "checkpoints").is_dir()):
            check_format(run, "run")
            allowed = "the folder of a trained run, or an export"
            raise SettingError("run", run, allowed, more=", which holds no config.yaml and checkpoints/")
        if is_exported(run) and given["ckpt_path"] is not None:
            allowed = "none, since an export has one set of weights"
            raise SettingError("ckpt_path", given["ckpt_path"], allowed, when=f"with {run}")
    if given["ckpt_path"] not in (None, "best", "last") and len(runs) > 1:
        raise SettingError("ckpt_path", given["ckpt_path"], "best, last", when=f"with {len(runs)} runs")

    first = Path("runs", f"pretrained-{runs[0].resolve().name}") if is_exported(runs[0]) else runs[0]
    folder = Path(given["output"] or first / "spectrum")
    check_own(folder, FILES, "spectrum.json", "spectrum")
    from lit_linformer.studies.spectrum.measured_run import open_run

    device = check_device(given["device"])
    opened = [open_run(run, given) for run in runs]
    for run in opened:
        run.measure(device)
    write(folder, opened, given["threshold"], given["heads"], command_line(["spectrum", *argv]), environment(device))
    print((folder / "spectrum.md").read_text(encoding="utf-8"), end="")
    print(f"\n→ {folder}/", flush=True)


def write(
    folder: Path, runs: "list[MeasuredRun]", threshold: float, heads: list[int] | None, command: str, where: dict[str, Any]
) -> None:
    """Writes spectrum.md, spectrum.json, spectrum.npz, spectrum.csv and figure1.png."""
    import numpy as np

    from lit_linformer.utils.figures import draw_spectra, figure_class

    write_text(folder / "spectrum.md", markdown(runs, threshold, command))
    content = {"command": command, "environment": where, "threshold": threshold}
    content["runs"] = [_plain(run, threshold) for run in runs]
    write_json(folder / "spectrum.json", content)
    np.savez_compressed(folder / "spectrum.npz", **{f"{run.path}:cumulative": run.measured.curves.numpy() for run in runs})
    with open(folder / "spectrum.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "layer", "head", "index", "cumulative"])
        for run in runs:
            for layer, of_layer in zip(run.layers, run.measured.curves.tolist(), strict=True):
                for head, curve in enumerate(of_layer):
                    writer.writerows([run.path, layer, head, j, f"{share:.6f}"] for j, share in enumerate(curve, 1))
    if (figure := figure_class()) is not None:
        named = [(run.name, run.measured) for run in runs]
        drawn = draw_spectra(figure, named, [run.index for run in runs], threshold, heads)
        drawn.savefig(folder / "figure1.png", dpi=150)


def _plain(run: "MeasuredRun", threshold: float) -> dict[str, Any]:
    from lit_linformer.model.lowrank import rank_holding

    found = run.measured

    def rounded(tensor: Any) -> Any:
        return tensor.numpy().round(6).tolist()

    return {
        "run": str(run.path),
        "checkpoint": str(run.checkpoint),
        "name": run.name,
        "step": run.step,
        "attention": run.encoder.attention,
        "text": run.text,
        "sentences": found.sentences,
        "length": found.length,
        "layers": found.layers,
        "columns": found.columns,
        "index": run.index,
        "share_at_index": rounded(found.at(run.index)),
        "k_holding_threshold": rank_holding(found.curves, threshold).tolist(),
        "suggested_k": found.suggested(threshold),
        "suggestion": run.suggestion(threshold),
        "cumulative_by_layer": rounded(found.curves.mean(1)),
        "errors": {"k": found.ranks, **{name: rounded(values) for name, values in found.errors.items()}},
    }


def markdown(runs: "list[MeasuredRun]", threshold: float, command: str) -> str:
    """The tables: spectrum and errors of each run, a line per layer."""
    from lit_linformer.model.lowrank import ERRORS, rank_holding

    lines = ["# Spectrum of attention", "", f"`{command}`", ""]
    for run in runs:
        found, share = run.measured, run.measured.at(run.index)
        held, holds = rank_holding(found.curves, threshold), percent(threshold)
        names = list(found.errors)
        lines += [
            f"## {run.name}",
            "",
            f"Step {run.step}, {found.sentences} rows of {found.length} tokens, {run.text}. Shares and errors are "
            "means over the layer's heads (lowest to highest head).",
            "",
        ]
        table = [["layer", f"share at index {run.index}", f"k for {holds}", "suggested k", "k of the errors", *names]]
        for place, (layer, k, rank) in enumerate(zip(found.layers, found.suggested(threshold), found.ranks, strict=True)):
            cells = [str(layer), _range(share[place], ".3f"), _range(held[place].double(), ".0f"), str(k), str(rank)]
            table.append(cells + [f"{found.errors[name][place].mean():.3f}" for name in names])
        error = f"‖approximation − P V‖ / ‖P V‖ (Frobenius), P = softmax(q Kᵀ/√d) over all {found.length} tokens"
        lines += [aligned(table, right=True, words=1), f"Error: {error}:", ""]
        lines += [f"- {name}: {ERRORS[name]}" for name in names]
        suggestion = run.suggestion(threshold)
        why = f"`{suggestion}`" if suggestion else "only where all layers are measured"
        lines += ["", f"A Linformer whose k holds {holds} of each layer's spectrum: {why}", ""]
    return "\n".join(lines)


def _range(values: Any, form: str) -> str:
    return f"{values.mean():{form}} ({values.min():{form}}–{values.max():{form}})"
