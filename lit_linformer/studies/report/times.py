"""Perplexity against training time: which clock to use, and what each model reached in the Transformer's time."""

from lit_linformer.studies.report.sources import Group
from lit_linformer.studies.report.tables import millions, of_any_size
from lit_linformer.utils.markdown import aligned, plain

CLOCKS = {"cpu_seconds": "processor time in training", "training_seconds": "training time"}
HOURS = 2 * 3600  # seconds from which times are shown in hours


def clock_of(groups: list[Group]) -> str | None:
    """The column of perplexity.csv to compare these runs by; None if too few have recorded it.

    CPU time if each ran in one thread on a CPU, since a busy machine does not stretch it.
    """
    runs = [run for group in groups for run in group.used]
    places = [run.result["environment"] for run in runs if run.result.get("environment")]
    one_thread = places and all(
        place.get("threads") == 1 and place.get("processes", 1) == 1 and "cpu" not in place for place in places
    )
    if len({tuple(place.get(key, 1) for key in ("hardware", "processes")) for place in places}) > 1:
        return None
    for clock in CLOCKS if one_thread else ["training_seconds"]:
        if sum(any(group.median(clock)) for group in groups) > 1:
            return clock
    return None


def axis_of(clock: str, groups: list[Group]) -> tuple[float, str]:
    """The axis's unit in seconds, and its label."""
    longest = max((seconds for group in groups for run in group.runs for seconds in run.points(clock)), default=0.0)
    unit, name = (3600.0, "hours") if longest >= HOURS else (60.0, "minutes")
    return unit, f"{CLOCKS[clock]} ({name})"


def time_table(groups: list[Group], clock: str) -> str:
    """A table for each panel, with one line per group: its last validation within the time of the panel's best Transformer.

    The Transformer is taken at its end, when its learning rate has fallen; the others wherever they are by then. A panel
    without a Transformer, such as one where columns are attentions, is compared with the best Transformer of other panels.
    """
    timed = [group for group in groups if any(group.median(clock))]
    panels = dict.fromkeys(group.panel for group in timed)
    return "\n".join(filter(None, (_panel_table(panel, timed, clock) for panel in panels)))


def _panel_table(panel: str, groups: list[Group], clock: str) -> str:
    here = [group for group in groups if group.panel == panel]
    full = [group for group in groups if group.transformer and any(group.comparable(one) for one in here)]
    full = [group for group in full if group.panel == panel] or full
    if not full or all(group.transformer for group in here):
        return ""
    against = min(full, key=lambda group: list(group.median(clock).values())[-1])
    name = plain(against.label if against in here else f"{against.label} · {against.panel}")
    end, theirs = list(against.median(clock).items())[-1]
    unit, label = axis_of(clock, groups)
    lines = [["run", label.partition("(")[2].rstrip(")"), "tokens, millions", "perplexity", f"÷ {name}"]]
    for group in here if against in here else [against, *here]:
        within = {seconds: value for seconds, value in group.median(clock).items() if seconds <= end}
        if not group.comparable(against) or not within:
            continue
        seconds, value = list(within.items())[-1]
        tokens = max(tokens for tokens, at in group.at(clock).items() if at <= seconds)
        cells = [f"{seconds / unit:.1f}", millions(tokens), of_any_size(value)]
        lines.append([name if group is against else plain(group.label), *cells])
        lines[-1].append("–" if group is against else of_any_size(value / theirs, 3))
    of = f"{plain(panel)}, at" if len({group.panel for group in groups}) > 1 else "At"
    told = f"{of} equal {CLOCKS[clock]}, that of the best Transformer ({name}, {end / unit:.1f} {lines[0][1]})"
    return f"{told}:\n\n{aligned(lines, right=True, words=1)}"
