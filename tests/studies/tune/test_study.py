"""A search over real runs: shared by processes, pruned, killed and resumed; and one over runs that have already finished."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from lit_linformer.cli.tune import main
from lit_linformer.runs.folder import write_marker
from lit_linformer.runs.record import RunRecord
from lit_linformer.studies.grid.run import run_jobs
from lit_linformer.studies.tune.page import draw_slices, write_page
from lit_linformer.studies.tune.space import Axis, Space, read_space
from lit_linformer.studies.tune.study import STUDY, Study, _draw, _pruner
from lit_linformer.utils.figures import figure_class
from tests.helpers import HANGS, run_forked

ROOT = Path(__file__).parents[3]
CODE = "import sys; from lit_linformer.cli import main; main(sys.argv[1:])"
SPACE = {
    "space": {
        "model.lr": {"log": [1e-4, 1e-2]},
        "model.warmup_steps": {"range": [1, 9]},
        "model.schedule": ["constant", "cosine"],
    }
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_space(**settings):
    Path("space.yaml").write_text(yaml.safe_dump({**SPACE, **settings}, sort_keys=False))
    return ["--space", "space.yaml"]


def open_study(metric="val/perplexity", mode="min", fit=("fit",), **settings):
    """The study of these settings; if its files are there, as another process opens it."""
    write_space(**settings)
    return Study(read_space(Path("space.yaml"), None, None), [*fit], metric, mode)


def run_one(study, job):
    run_jobs(iter([job]), 1, study.ended, study.watch)


def words(tiny, *more):
    """The arguments of `tune` for a tiny model."""
    return [*tiny[:2], "--arguments", shlex.join([*tiny[2:], *more])]


def trials(name="space"):
    study = optuna.load_study(study_name=STUDY, storage=f"sqlite:///runs/{name}/study.db")
    return study.get_trials()


def finished(folder, value, steps=(10, 20), metric="val/perplexity"):
    """The files of a finished run, whose curve falls to ``value``."""
    folder.mkdir(parents=True)
    rows = [f"{step},{value * (1 + (steps[-1] - step) / 10)}\n" for step in (0, *steps)]
    (folder / "perplexity.csv").write_text("step,perplexity\n" + "".join(rows))
    (folder / "result.json").write_text(json.dumps({"step": steps[-1], "metrics": {metric: value}}))
    (folder / "config.yaml").write_text(f"name: space/{folder.name}\nmodel: {{}}\n")


@pytest.mark.slow
def test_a_study_takes_in_curves_and_results_and_draws_what_it_found():
    """Ten finished runs: perplexity is best at lr 1e-3, whatever the other settings."""
    study = open_study(first=[{"model.lr": 2e-3, "model.schedule": "cosine"}], trials=10)
    for number, job in enumerate(study.todo()):
        settings = dict(zip(job.cell.fit[1::2], job.cell.fit[2::2], strict=True))
        assert list(settings) == ["--model.lr", "--model.warmup_steps", "--model.schedule", "--name"]
        assert 1e-4 <= float(settings["--model.lr"]) <= 1e-2 and settings["--model.warmup_steps"] in "123456789"
        assert number or (settings["--model.lr"], settings["--model.schedule"]) == ("0.002", "cosine")
        finished(job.cell.run_dir, 40 + 100 * abs(float(settings["--model.lr"]) - 1e-3) / 1e-3)
        run_one(study, job)
    assert [one.state for one in study.trials()] == [TrialState.COMPLETE] * 10
    assert list(study.trials()[3].intermediate_values) == [10, 20]  # not the untrained model's
    table = write_page(study, "python run.py tune …").splitlines()
    best = study.optuna.best_trial
    assert len(table) == 12 and table[2].startswith(f"| trial-{best.number:03d} ") and "| finished |" in table[2]
    values = [float(line.split("|")[5]) for line in table[2:]]
    assert values == sorted(values)
    text = Path("runs/space/best.yaml").read_text()
    assert yaml.safe_load(text)["name"] == "space-best" and f"{best.value:.4g}" in text.splitlines()[0]
    for picture in ("slices.png", "importance.png"):
        assert f"({picture})" in Path("runs/space/study.md").read_text()
        assert Path("runs/space", picture).read_bytes().startswith(b"\x89PNG")
    assert list(study.todo()) == []
    study.space = replace(study.space, axes=(*study.space.axes, study.space.axes[0]))  # 4 of 6 panels are used
    panels = draw_slices(figure_class(), study).axes[:6]  # after them comes the colour bar
    assert [panel.axison for panel in panels] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(("metric", "mode", "best"), [("val/perplexity", "min", 1), ("val/accuracy", "max", 2)])
def test_first_values_come_in_their_order_and_the_best_is_the_lowest_or_highest(metric, mode, best):
    rates = [2e-3, 1e-3, 5e-3]
    study = open_study(metric, mode, first=[{"model.lr": rate} for rate in rates], trials=3)
    for rate, job in zip(rates, study.todo(), strict=False):
        assert float(job.cell.fit[2]) == rate
        finished(job.cell.run_dir, rate, metric=metric)
        run_one(study, job)
    table = write_page(study, "python run.py tune …").splitlines()
    assert table[2].startswith(f"| trial-{best:03d} ")
    assert yaml.safe_load(Path("runs/space/best.yaml").read_text())["name"] == "space-best"
    assert Path("runs/space/best.yaml").read_text().startswith(f"# The best of 3 trials, trial-{best:03d}: {metric} ")


def test_a_run_that_diverged_counts_as_ended_early():
    study = open_study(trials=2)
    for value, job in zip([float("nan"), 50.0], study.todo(), strict=False):
        finished(job.cell.run_dir, value)
        run_one(study, job)
    assert [one.state for one in study.trials()] == [TrialState.PRUNED, TrialState.COMPLETE]
    assert study.trials()[0].user_attrs["why"] == "val/perplexity is nan" and study.optuna.best_trial.number == 1


@pytest.mark.parametrize(("status", "state"), [(2, TrialState.PRUNED), (os.EX_IOERR, TrialState.RUNNING)])
def test_a_refused_trial_has_ended_and_one_that_the_machine_failed_is_tried_again(status, state, monkeypatch):
    monkeypatch.setattr("lit_linformer.studies.grid.run.run_command", lambda: [sys.executable, "-c", f"exit({status})"])
    study = open_study(trials=2)
    for number, job in zip(range(2), study.todo(), strict=False):
        if number == 0:
            finished(job.cell.run_dir, 50)
            (job.cell.run_dir / "run.json").write_text('{"project": "lit-linformer"}')
        run_one(study, job)
    assert [one.state for one in study.trials()] == [TrialState.COMPLETE, state]
    job = next(open_study(trials=2).todo(), None)
    assert (job and job.trial.number) == (1 if state == TrialState.RUNNING else None)


@pytest.mark.parametrize("trained_before", [True, False])
def test_a_mistake_beside_the_values_ends_the_study_and_not_its_trials(trained_before, monkeypatch):
    """As a text that has been moved: it refuses a trial that had trained, and one new trial after the other."""
    monkeypatch.setattr("lit_linformer.studies.grid.run.run_command", lambda: [sys.executable, "-c", "exit(2)"])
    study = open_study(trials=20)
    jobs = study.todo()
    first = next(jobs)
    finished(first.cell.run_dir, 50)
    write_marker(first.cell.run_dir)
    run_one(study, first)
    if trained_before:
        write_marker(Path("runs/space/trial-001"))
    with pytest.raises(ValueError, match="exit status 2"):
        for job in jobs:
            run_one(study, job)
    states = [one.state for one in study.trials()]
    assert states == [TrialState.COMPLETE, *[TrialState.PRUNED] * (0 if trained_before else 4), TrialState.RUNNING]


def test_after_its_first_trial_a_study_is_drawn_without_a_warning():
    study = open_study(trials=2)
    job = next(study.todo())
    finished(job.cell.run_dir, 50)
    run_one(study, job)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_slices(figure_class(), study).savefig("slices.png")


@pytest.mark.parametrize(("pruner", "finished", "ended"), [("median", 6, False), ("median", 7, True), ("none", 20, False)])
def test_the_median_needs_as_many_finished_trials_as_the_space_says(pruner, finished, ended):
    space = Space("a", (), 30, (), pruner, prune_after=7)
    study = optuna.create_study(pruner=_pruner(space))
    for _ in range(finished):
        study.add_trial(optuna.trial.create_trial(value=1.0, intermediate_values={10: 1.0}))
    trial = study.ask()
    trial.report(2.0, 10)
    assert bool(trial.should_prune()) is ended


def test_values_are_drawn_on_the_scale_that_the_space_says():
    trial = optuna.create_study().ask()
    ends = {"lr": (1e-4, 1e-2), "k": (16, 256), "dropout": (0.0, 0.3), "warmup": (1, 9)}
    for setting, both in ends.items():
        _draw(trial, Axis(setting, both, log=setting in ("lr", "k")))
    assert {name: found.log for name, found in trial.distributions.items()} == {
        **dict.fromkeys(ends, False),
        "lr": True,
        "k": True,
    }


def test_a_study_draws_the_same_whenever_it_was_interrupted():
    drawn = []
    for name, restarts in (("whole", False), ("parts", True)):
        study = None
        for number in range(4):
            if study is None or restarts:
                study = open_study(name=name, trials=4)
            job = next(study.todo())
            finished(job.cell.run_dir, 50 + number)
            run_one(study, job)
        drawn.append([one.params for one in study.trials()])
    assert drawn[0] == drawn[1] and len({str(values) for values in drawn[0]}) == 4


def test_what_a_killed_process_left_is_taken_up_and_what_another_runs_is_not(capsys):
    one, other = (open_study(trials=2) for _ in range(2))
    first = next(one.todo())
    second = next(others := other.todo())
    assert [job.trial.number for job in (first, second)] == [0, 1]
    finished(second.cell.run_dir, 60)
    run_one(other, second)
    assert next(others) is None and "waiting for trial-000, which other processes run" in capsys.readouterr().out
    first.log.close()  # as the kernel does for a killed process
    taken = next(others)
    assert taken.trial.number == 0 and taken.cell.fit == first.cell.fit
    taken.log.close()


def test_a_trial_that_ends_while_another_process_reaches_for_it_is_left_alone(monkeypatch):
    one, other = (open_study(trials=1) for _ in range(2))
    job = next(one.todo())
    finished(job.cell.run_dir, 60)
    claim = other._claim

    def late(trial):
        run_one(one, job)
        return claim(trial)

    monkeypatch.setattr(other, "_claim", late)
    assert next(other.todo(), "over") == "over"
    assert [trial.state for trial in one.trials()] == [TrialState.COMPLETE]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"space": {**SPACE["space"], "model.lr": {"log": [1e-4, 1e-3]}}}, "space model.lr is {log: [0.0001, 0.001]}, and was"),
        ({"space": {"model.lr": {"log": [1e-4, 1e-2]}}}, "space model.warmup_steps is not varied, and was {range: [1, 9]}"),
        ({"fit": ["fit", "--model.lr_batch_size", "8"]}, "fit is 'fit --model.lr_batch_size 8', and was 'fit'"),
        ({"first": [{"model.lr": 1e-3}]}, "first is [{'model.lr': 0.001}], and was [] when"),
        ({"metric": "val/accuracy"}, "metric is 'val/accuracy min', and was 'val/perplexity min'"),
    ],
)
def test_another_study_of_the_same_name_is_refused(change, words):
    began = open_study()
    job = next(began.todo())
    job.log.close()
    open_study(**change), open_study()  # nothing was trained: it is made anew
    finished(job.cell.run_dir, 50)
    (job.cell.run_dir / "run.json").write_text('{"project": "lit-linformer"}')
    again = open_study()
    run_one(again, next(again.todo()))
    with pytest.raises(ValueError, match="^" + words.replace("[", r"\[").replace("{", r"\{")):
        open_study(**change)
    assert open_study(trials=30).space.trials == 30  # a longer one is the same study


def test_a_study_is_no_run():
    finished(Path("runs/space"), 50)
    (Path("runs/space") / "run.json").write_text('{"project": "lit-linformer"}')
    with pytest.raises(ValueError, match="name is 'space', and runs/space is a run; allowed: another --name"):
        open_study()


@pytest.mark.slow
def test_two_processes_share_the_trials_of_conf_tune(tiny, tmp_path):
    command = [sys.executable, "-c", CODE, "tune", *words(tiny, "--trainer.max_steps", "7")]
    command += ["--space", str(ROOT / "conf/tune/lr.yaml"), "--trials", "2"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    shown = [process.communicate(timeout=HANGS)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], shown
    assert [one.state for one in trials("lr")] == [TrialState.COMPLETE] * 2
    for number in range(2):
        assert Path(f"runs/lr/trial-{number:03d}.log").read_text().count("$ ") == 1  # by one of them
        assert sum(f"[{number + 1}/2] lr " in text and f"fit → runs/lr/trial-{number:03d}.log" in text for text in shown) == 1
    assert all(
        text.count("| finished |") == 2 and "the best: python run.py fit --config runs/lr/best.yaml" in text for text in shown
    )
    best = min(trials("lr"), key=lambda one: one.value)
    assert run_forked(["fit", "--config", "runs/lr/best.yaml"], tmp_path / "best.txt") == 0
    again = json.loads(Path("runs/lr-best/result.json").read_text())
    assert again["best_metrics"]["val/perplexity"] == best.value


@pytest.mark.slow
def test_the_trial_that_falls_behind_is_ended_early_and_its_run_says_so(tiny, tmp_path, capsys):
    """The second would take forever if it were not for the median of the first."""
    space = {"model.lr": ["0.01", "1e-9"], "trainer.max_steps": ["14", "1000000000"]}
    first = [{"model.lr": "0.01", "trainer.max_steps": "14"}, {"model.lr": "1e-9", "trainer.max_steps": "1000000000"}]
    main([*write_space(space=space, first=first, prune_after=1, trials=2), *words(tiny)])
    shown = capsys.readouterr().out
    assert [one.state for one in trials()] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert "[2/2] lr 1e-9 · max_steps 1000000000: ended early" in shown and "is behind the others |" in shown
    run = Path("runs/space/trial-001")
    told = json.loads((run / "pruned.json").read_text())
    assert (told["study"], told["trial"]) == ("space", 1) and "val/perplexity" in told["why"]
    assert RunRecord(run).status().startswith("pruned at step ")
    assert RunRecord(Path("runs/space/trial-000")).status() == "finished"
    again = ["fit", "--config", str(run / "config.yaml"), "--ckpt_path", "last", "--trainer.max_steps", "30"]
    assert run_forked(again, tmp_path / "again.txt") == 0 and not (run / "pruned.json").exists()
    assert run_forked(["report", "--source", "runs/space", "--output", "page"], tmp_path / "report.txt") == 0
    assert "trial-001" in Path("page/report.md").read_text()


@pytest.mark.slow
def test_killed_in_the_middle_of_a_trial_it_goes_on(tiny, tmp_path, capsys):
    """kill -9 of the run at step 9, with a checkpoint of step 5; then of `tune`, while its run continues alone."""
    init = {"marker": str(tmp_path / "killed"), "number": int(signal.SIGKILL), "at": 9}
    kill = json.dumps({"class_path": "tests.helpers.SendSignal", "init_args": init})
    command = [*write_space(trials=2, pruner="none"), *words(tiny, "--trainer.callbacks+", kill)]
    with pytest.raises(ValueError, match="1 of 2 trials failed: trial-000; their output is in runs/space/"):
        main(command)
    assert "failed" in capsys.readouterr().out and [one.state for one in trials()] == [TrialState.RUNNING, TrialState.COMPLETE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    tune = subprocess.Popen([sys.executable, "-c", CODE, "tune", *command], env=environment)
    log, deadline = Path("runs/space/trial-000.log"), time.monotonic() + HANGS
    while log.read_text().count("$ ") < 2:
        assert time.monotonic() < deadline and tune.poll() is None
        time.sleep(0.05)
    tune.kill()
    tune.wait()
    main(command)
    assert "resuming at step 5" in log.read_text() and log.read_text().count("$ ") == 2
    assert [one.state for one in trials()] == [TrialState.COMPLETE] * 2
    assert "| finished |" in capsys.readouterr().out
