"""One page of everything that was measured, next to the paper's values: `python run.py report --source runs/table2`.

Folders are recognised by what they hold: a grid (figure 3 if its runs pretrain, Table 2 if they fine-tune), a benchmark
(figure 2, Table 3), a spectrum (figure 1), or a run. Other folders are searched two levels deep. Each part comes with the
command that made it, hardware, versions, commit and budget. Unfinished and failed runs are listed as such, with their curves as
far as they go. Written to the folder:

    report.md, *.png        the page in Markdown, and its figures (if matplotlib is installed)
    report.html             the same in a single file, to send or print

The same input gives the same bytes. Nothing is trained or measured.
"""

from pathlib import Path

from lit_linformer.runs.record import of_class
from lit_linformer.utils.arguments import Setting, parse, several, word
from lit_linformer.utils.environment import command_line, without_folders
from lit_linformer.utils.errors import SettingError, UserError

SETTINGS = {
    "source": Setting(several(word("FOLDER")), "what to report on; runs/ stands for everything in it", ["runs"]),
    "title": Setting(word("TEXT"), "the page's title", "The Linformer, measured"),
    "output": Setting(word("FOLDER"), "where to write", "runs/report"),
}


def main(argv: list[str]) -> None:
    """Reads, draws, then writes; ValueError, in one line and before anything is written, for bad input."""
    given = parse("report", __doc__, SETTINGS, argv)
    output = Path(given["output"])
    if output.exists() and not output.is_dir():
        raise SettingError("output", output, "a folder, or a name that is free", more=", which is no folder")

    from lit_linformer.studies.report import sections
    from lit_linformer.studies.report.page import Page
    from lit_linformer.studies.report.sources import find
    from lit_linformer.utils.figures import figure_class
    from lit_linformer.utils.files import check_own, write_bytes, write_text
    from lit_linformer.utils.markdown import plain

    sources, unread = find(given["source"])
    if not any(source.finished for source in sources):
        told = f"source is {', '.join(given['source'])}, which holds no finished run"
        raise UserError(told, "at least one that is finished")

    page = Page(given["title"])
    page.add(f"`{command_line(['report', *argv])}`")
    if figure_class() is None:
        page.add("Without figures: matplotlib is not installed (`pip install matplotlib`).")
    if unread:
        page.add("Left out:", "\n".join(f"- {plain(line)}" for line in unread))
    by_kind = {kind: [source for source in sources if source.kind == kind] for kind in ("spectrum", "benchmark", "grid", "run")}
    for source in by_kind["spectrum"]:
        sections.spectrum(page, source)
    for source in by_kind["benchmark"]:
        sections.benchmark(page, source)
    for pretraining, section in ((True, sections.pretraining_grid), (False, sections.finetuning_grid)):
        for source in by_kind["grid"]:
            if source.pretraining == pretraining:
                section(page, source)
    runs = [run for source in by_kind["run"] for run in source.runs]
    if converted := [run for run in runs if of_class(run.setting("model.class_path"), "Distillation")]:
        sections.conversions(page, converted)
        runs = [run for run in runs if run not in converted]
    for pretraining, section in ((True, sections.pretraining_runs), (False, sections.finetuning_runs)):
        if chosen := [run for run in runs if run.pretraining == pretraining]:
            section(page, chosen)

    page.parts = [without_folders(part) for part in page.parts]
    files = {"report.md": page.markdown(), "report.html": page.html()}
    check_own(output, [*files, *page.images], "report.md", "report")
    for name, content in page.images.items():
        write_bytes(output / name, content)
    for name, text in files.items():
        write_text(output / name, text)
    for source in sources:
        of = f", {source.finished} of {len(source.runs)} runs finished" if source.runs else ""
        print(f"{source.kind}: {source.folder}{of}")
    note = "; for figures `pip install matplotlib`, then again" if figure_class() is None else ""
    names = ", ".join([*files, *page.images])
    print("".join(f"left out: {line}\n" for line in unread) + f"→ {output}/: {names}{note}", flush=True)
