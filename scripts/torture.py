"""Kills training with kill -9, again and again, and compares the result bit for bit with a run that was left alone.

    python scripts/torture.py --kills 100 --minutes 10
    python scripts/torture.py --only sharded-2:17                # repeats a round exactly

A round is a new run of a tiny model with a cache of its own. It is killed up to three times, each time restarted with the
same command (`--ckpt_path auto`), and then left to finish. Three in four kills are at points that the undisturbed run passed:
before a file is opened, renamed or removed, or before a hook of Lightning; some of the files being written are truncated at a
random size. The other kills are at a random time. With two processes (as torchrun starts them) either both are killed, or one,
and the other must end by itself. The processes are forks of this one, which has imported everything, so they start quickly.

It compares weights, optimiser, schedules and counters, perplexity.csv, the curves as TensorBoard reads them, the token files
and the contents of folders. It writes report.md and torture.json to --output, and keeps the folder of each failed round.
"""

import argparse
import importlib
import itertools
import json
import math
import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # two processes on two cores; forks
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # it works without installing the project, as run.py does

from torture_compare import compare  # noqa: E402
from torture_points import (  # noqa: E402
    BEFORE,
    END,
    FILES,
    GOING_ON,
    PHASES,
    PREPARATION,
    RENAMES,
    START,
    TRAINING,
    VALIDATION,
    Kill,
    Point,
)
from torture_runs import ALONE, CASES, CONFIG, launch  # noqa: E402

from lit_linformer.data import pieces  # noqa: E402
from lit_linformer.data.pretraining import token_files  # noqa: E402
from lit_linformer.utils.environment import environment, without_folders  # noqa: E402
from lit_linformer.utils.files import write_text  # noqa: E402

# What each start would otherwise import.
IMPORTED = "lit_linformer.cli.app omegaconf attr torch.utils.tensorboard torch.profiler torch.distributed.fsdp".split()
IMPORTED += ["torch.distributed.checkpoint.state_dict"]
ANY_TIME = "any time"
DIFFERENCES = 5  # listed per round
# The phases of a round's kills; rounds cycle through these.
MIX = (
    (START, FILES, GOING_ON),
    (PREPARATION, VALIDATION, RENAMES),
    (BEFORE, TRAINING, END),
    (RENAMES, FILES, ANY_TIME),
    (ANY_TIME, ANY_TIME, ANY_TIME),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=100, help="kills of each case, at least; its last round is finished (default 100)"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="no new round after that many (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="seed of where and when runs are killed (default 0)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is killed (default: all)")
    parser.add_argument("--only", metavar="CASE:ROUND", help="this round alone, as it was with the same --seed")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all rounds, not only of those that failed")
    parser.add_argument("--output", default="runs/torture", help="folder of report.md and torture.json (default runs/torture)")
    args = parser.parse_args()
    case, _, number = (args.only or "").partition(":")
    if args.only and (case not in CASES or not number.isdecimal()):
        sys.exit(f"error: --only is {args.only}; allowed: CASE:ROUND, {', '.join(CASES)} and a number")
    if args.kills < 1 or not args.minutes > 0:
        sys.exit(f"error: --kills is {args.kills} and --minutes {args.minutes}; allowed: 1 or more, and more than 0")
    work = Path(args.output).resolve() / "rounds"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_corpus(work / "text.txt")
    write_text(work / "torture.yaml", CONFIG)
    for name in IMPORTED:
        importlib.import_module(name)
    # So that this text makes several batches and shards, and a killed preparation resumes in the middle.
    pieces.BATCH_BYTES, token_files.SHARD_BYTES = 4000, 8000
    began, rounds = time.monotonic(), []
    plans = {name: plan(name, work, args.seed) for name in ([case] if args.only else args.cases)}
    if args.only:
        kills = next(kills for at, kills in enumerate(plans[case]) if at == int(number))
        rounds.append(play(case, int(number), kills, work, args.keep))
    else:
        rounds = play_all(plans, work, args.kills, began + 60 * args.minutes, args.keep)
    content = {
        "command": without_folders(shlex.join(["python", "scripts/torture.py", *sys.argv[1:]])),
        "environment": environment(),
        "seconds": round(time.monotonic() - began),
        "rounds": rounds,
    }
    shown = report(content)
    write_text(Path(args.output) / "torture.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_text(Path(args.output) / "report.md", shown)
    print(shown.partition("\n- **")[0].rstrip())  # failures were printed as they happened
    if any(failed(done) for done in rounds):
        sys.exit(1)
    if not args.keep:
        shutil.rmtree(work)


def write_corpus(path: Path) -> None:
    """Sixty documents of words drawn from 200 by Zipf's law."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(200)]
    shares = [1 / rank for rank in range(1, 201)]
    write_text(path, "\n\n".join(" ".join(draw.choices(words, shares, k=draw.randint(20, 60))) for _ in range(60)) + "\n")


def plan(case: str, work: Path, seed: int) -> Iterator[list[Kill]]:
    """The kills of rounds 0, 1, …, drawn from the points that a run passes if left alone (which is done first)."""
    points = {phase: [] for phase in PHASES}
    alone = launch(case, work / f"{case}-alone", 0, None)
    middle = Kill(Point("step 7: on_train_batch_start", 1, "", 0, 0.0), True)
    starts = [alone, launch(case, work / f"{case}-probe", 0, middle), launch(case, work / f"{case}-probe", 1, None)]
    for start in (alone, starts[2]):
        if any(start.statuses):
            sys.exit(f"error: {case}: a start that nobody killed ended with {start.statuses}:\n{start.log[-2000:]}")
        for point in start.points:
            if start is alone or point.phase == GOING_ON:
                points[point.phase].append(point)
    shutil.rmtree(work / f"{case}-probe")
    return _rounds(case, points, alone.seconds, seed)


def _rounds(case: str, points: dict[str, list[Point]], seconds: float, seed: int) -> Iterator[list[Kill]]:
    used = dict.fromkeys(points, 0)
    for phase, pool in points.items():
        pool.sort(key=lambda point: (point.label, point.count, point.rank))
        random.Random(f"{seed} {case} {phase}").shuffle(pool)
    for number in itertools.count():
        draw, kills = random.Random(f"{seed} {case} {number}"), []
        for phase in MIX[number % len(MIX)]:
            everyone = CASES[case][0] == 1 or phase in ALONE or draw.random() < 0.5
            if phase == ANY_TIME:
                point = Point("", 0, phase, draw.randrange(CASES[case][0]), draw.random() * seconds)
            else:
                point = points[phase][used[phase] % len(points[phase])]
                used[phase] += 1
            writes = phase in (FILES, PREPARATION) and "write " in point.label
            kills.append(Kill(point, everyone, int(2 ** draw.uniform(0, 17)) if writes and draw.random() < 0.6 else None))
        # In the order in which a run passes them, so that each start reaches the next one.
        yield sorted(kills, key=lambda kill: math.inf if kill.point.phase == GOING_ON else kill.point.seconds)


def play_all(plans: dict[str, Iterator[list[Kill]]], work: Path, wanted: int, until: float, keep: bool) -> list[dict]:
    """Rounds of all cases in turn, until each has had its kills or the time is over."""
    rounds, kills = [], dict.fromkeys(plans, 0)
    for number in itertools.count():
        for case in [case for case in plans if kills[case] < wanted]:
            if time.monotonic() > until:
                return rounds
            rounds.append(play(case, number, next(plans[case]), work, keep))
            kills[case] += len(rounds[-1]["kills"])
        if all(count >= wanted for count in kills.values()):
            return rounds


def play(case: str, number: int, kills: list[Kill], work: Path, keep: bool) -> dict:
    """A round: started and killed in turn, then left to finish and compared. A kill that no start reached is left out."""
    folder, done, stuck, found = work / f"{case}-{number}", [], [], {"bits": [], "curves": []}
    for at, kill in enumerate([*kills, None]):
        start = launch(case, folder, at, kill)
        if start.hung:
            stuck.append(f"start {at} did not end, {kill or 'not killed'}")
        elif start.killed:
            done.append({"kill": str(kill), "phase": start.phase})
            if "Traceback" not in start.log:
                continue
            stuck.append(f"start {at}: a process that was not killed ended with a traceback")
        elif any(start.statuses):
            last = [line for line in start.log.splitlines() if line.strip()][-1:]
            stuck.append(f"start {at} ended with {start.statuses}: {' '.join(last)}")
        break
    if not stuck:
        found = compare(work / f"{case}-alone", folder)
    result = {"case": case, "round": number, "kills": done, "went on": stuck, **found}
    told = "; ".join(f"{kill['phase']} ({kill['kill']})" for kill in done) or "no kill"
    print(f"{case}:{number}  {'FAILED' if failed(result) else 'ok'}  {told}", flush=True)
    for line in failed(result):
        print(f"    {line}", flush=True)
    if not failed(result) and not keep:
        shutil.rmtree(folder)
    return result


def failed(result: dict) -> list[str]:
    return [line for part in ("went on", "bits", "curves") for line in result[part]]


def report(content: dict) -> str:
    """The table, case × phase, and what failed, in Markdown."""
    place, rounds = content["environment"], content["rounds"]
    versions = ", ".join(f"{name} {place[name]}" for name in ("python", "torch", "lightning") if name in place)
    kills = sum(len(done["kills"]) for done in rounds)
    machine = f"{place['hardware']}, {place['cores']} cores, {versions}, commit {place.get('commit', 'unknown')}"
    amount = f"{kills} kills in {len(rounds)} rounds, {content['seconds'] / 60:.1f} minutes."
    lines = ["# Killed and continued", "", f"`{content['command']}`", "", f"{machine}: {amount}"]
    lines += ["", "| case | killed in | kills | continued | same bits | same curves |", "|---|---|---|---|---|---|"]
    total = [0, 0, 0, 0]
    for case in CASES:
        for phase in PHASES:
            row = [0, 0, 0, 0]
            for done in (done for done in rounds if done["case"] == case):
                for at, kill in enumerate(done["kills"]):
                    if kill["phase"] != phase:
                        continue
                    ended = not done["went on"]
                    went_on = ended or at < len(done["kills"]) - 1
                    good = (True, went_on, ended and not done["bits"], ended and not done["curves"])
                    row = [count + right for count, right in zip(row, good, strict=True)]
            if row[0]:
                lines.append(f"| {case} | {phase} | {' | '.join(map(str, row))} |")
            total = [a + b for a, b in zip(total, row, strict=True)]
    lines += [f"| all | | {' | '.join(map(str, total))} |", ""]
    for done in filter(failed, rounds):
        lines.append(f"- **{done['case']}:{done['round']}**, killed: {'; '.join(kill['kill'] for kill in done['kills'])}")
        wrong = failed(done)
        lines += [f"  - {line}" for line in wrong[:DIFFERENCES]]
        lines += [f"  - … and {len(wrong) - DIFFERENCES} more"] * (len(wrong) > DIFFERENCES)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
