"""What `fit` shows: on a terminal 80 columns wide, as plain lines, and after a run was resumed."""

import fcntl
import io
import json
import math
import os
import pty
import re
import statistics
import struct
import termios
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from rich.console import Console

from lit_linformer.callbacks import RunResult
from lit_linformer.callbacks.checkpoint import best_checkpoint
from lit_linformer.callbacks.header import header, wrapped
from lit_linformer.callbacks.observing import HEADLINE
from lit_linformer.callbacks.pace import Pace
from lit_linformer.callbacks.progress import Progress, _Bar, _fitting
from lit_linformer.utils.amounts import clock, count
from tests.callbacks.test_curves import curves
from tests.helpers import output, run_forked

SHORT = ["--trainer.max_steps", "60", "--progress.every_n_steps", "20"]


def on_a_terminal(argv: list[str], columns: int) -> str:
    """What `python run.py ARGV` writes to a terminal of that width, without cursor movements and colours."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    read: list[bytes] = []

    def drain() -> None:
        try:
            while part := os.read(ours, 1 << 16):
                read.append(part)
        except OSError:  # the terminal is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    status = run_forked(argv, Path(os.ttyname(its)))
    os.close(its)
    reader.join()
    os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(read).decode())
    assert status == 0, shown
    return shown


@pytest.mark.slow
def test_on_a_terminal_of_80_columns_no_line_is_wrapped(tiny, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = on_a_terminal(["fit", *tiny, *SHORT], 80)
    lines = re.split(r"[\r\n]+", shown)
    assert not [line for line in lines if len(line) > 80]
    head = shown[: shown.index("step 0  validation perplexity")]
    told = [
        "model       linformer, k = 8, ",
        "size        2 layers of width 16, ",
        "device   ",
        "60 steps of 4 rows",
        "runs/tiny",
    ]
    assert all(text in head for text in told), head
    assert re.search(r"train +━+\S* +60/60", shown) and re.search(r"\d left", shown)
    assert re.search(r"validate +━+\S* +0/[1-9]\d* ", shown)  # validation batches, not training steps
    assert any(re.fullmatch(r"loss \d.*  perplexity \d+\.\d\d  .*tokens/s.*", line) for line in lines)


def test_a_run_without_an_end_is_back_at_its_steps_after_a_validation():
    bar = _Bar(Console(file=io.StringIO(), force_terminal=True, width=80))
    bar.begin(None, 5)
    (task,) = bar._bar.tasks
    bar.validate(40)
    bar.validated()
    assert (task.description, task.total, task.completed) == ("validate", 40, 1)
    bar.train()
    bar.stop()
    assert (task.description, task.total, task.completed) == ("train", None, 5)


def test_plain_lines_are_short_and_the_table_at_the_end_tells_what_the_curve_has(tiny, tmp_path):
    shown = output(["fit", *tiny, *SHORT], tmp_path)
    shown = shown[shown.index("model  ") :]  # before it comes the data's path, of any length
    assert not [line for line in shown.splitlines() if len(line) > 80]
    left = r"loss \d+\.\d{3}  [\d.]+(?: k)? tokens/s(?:  data wait [\d.]+%)?"
    assert re.findall(rf"^step (\d+)/60  {left}  \d+:\d\d left$", shown, re.M) == ["20", "40"]
    assert re.search(rf"^step 60/60  {left}$", shown, re.M)
    assert re.search(r"^estimated   \d+:\d\d left: 55 steps at [\d.e+]+/s, 9 validations of [\d.]+ s$", shown, re.M), shown
    rows = re.findall(r"^  (first|best|last) +([\d.]+) \(step (\d+)\)$", shown, re.M)
    assert [(name, step) for name, _, step in rows] == [("first", "0"), ("best", "56"), ("last", "56")]
    assert re.search(r"^time        \d+:\d\d, [\d.]+(?: k)? tokens/s, 7\.7 k tokens$", shown, re.M)
    for start, argument in (("done", "runs/tiny/ holds"), ("next", "tensorboard --logdir runs")):
        assert f"{start:<12}{argument}" in shown
    # Resumed in a new process: first and best are those of the whole run, not of this start; time adds up.
    before = json.loads(Path("runs/tiny/result.json").read_text())["seconds"]
    again = output(["fit", *tiny, *SHORT, "--trainer.max_steps", "70", "--ckpt_path", "last"], tmp_path)
    assert rows[0] == re.findall(r"^  (first) +([\d.]+) \(step (\d+)\)$", again, re.M)[0]
    assert [step for _, step in re.findall(r"^  (best|last) +[\d.]+ \(step (\d+)\)$", again, re.M)] == ["70", "70"]
    minutes, seconds = re.search(r"^time        (\d+):(\d\d), ", again, re.M).groups()
    assert int(minutes) * 60 + int(seconds) >= int(before)


@pytest.mark.slow
def test_the_loss_of_a_line_is_the_mean_since_the_one_before(tiny, tmp_path):
    argv = ["fit", *tiny, "--trainer.max_steps", "9", "--progress.every_n_steps", "4", "--trainer.log_every_n_steps", "1"]
    shown = [float(text) for text in re.findall(r"^step \d/9  loss (\S+)", output(argv, tmp_path), re.M)]
    losses = [value for _, value in curves(Path("runs/tiny"))["train/loss"]]
    expected = [statistics.mean(losses[start:stop]) for start, stop in ((0, 4), (4, 8), (8, 9))]
    assert shown == pytest.approx(expected, abs=6e-4)
    assert len({round(value, 3) for value in losses}) > 1
    argv += ["--trainer.max_steps", "12", "--trainer.accumulate_grad_batches", "2", "--name", "accumulated"]
    again = output(argv, tmp_path)
    assert len(re.findall(r"^estimated ", again, re.M)) == 1  # and not one for each micro-batch
    halves = [value for _, value in curves(Path("runs/accumulated"))["train/loss"]]
    (first, *_) = re.findall(r"^step 4/12  loss (\S+)", again, re.M)
    assert float(first) == pytest.approx(statistics.mean(halves[:4]), abs=0.2)  # the last micro-batch of each step


def test_losses_in_bfloat16_are_summed_in_float32(capsys):
    progress = Progress(every_n_steps=500, live=False)
    progress._marked_step, loss = 0, torch.tensor(0.9, dtype=torch.bfloat16)
    for step in range(1, 501):
        progress.on_train_batch_end(SimpleNamespace(global_step=step, accumulate_grad_batches=1), None, {"loss": loss})
    assert capsys.readouterr().out == f"step 500  loss {loss:.3f}\n"


def test_a_command_longer_than_a_line_is_one_that_a_shell_takes(tiny, tmp_path):
    shown = output(["fit", *tiny, "--trainer.max_steps", "1", "--trainer.default_root_dir", "a folder/" + "x" * 40], tmp_path)
    command = shown[shown.index("python run.py predict") :].replace(" \\\n", " ")
    assert " ".join(command.split()) == (
        f"""python run.py predict --config 'a folder/{"x" * 40}/config.yaml' --data.text "The <mask> of a function.\""""
    )


class Running:
    """What Pace reads of a Trainer."""

    enable_validation, accumulate_grad_batches = True, 2

    def __init__(self, step, between, epochs=None):
        self.global_step, self.val_check_batch, self.check_val_every_n_epoch = step, between, epochs


@pytest.mark.parametrize(
    ("step", "between", "epochs", "due"),
    [
        (0, 10, None, 20),
        (3, 10, None, 20),
        (5, 10, None, 19),
        (0, 70, None, 3),
        (99, 70, None, 1),
        (0, 50, 2, 2),
        (0, None, 1, 1),
    ],
)
def test_validations_that_are_due(step, between, epochs, due):
    pace = Pace(lambda: 0.0, 100, 0)
    assert pace.validations(Running(step, between, epochs)) == due


def test_time_left_does_not_count_the_first_step():
    seconds = 0.0
    pace = Pace(lambda: seconds, 100, 10)
    pace.validation = 3.0
    for step, now in ((11, 50.0), (12, 52.0), (13, 54.0)):
        seconds = now
        pace.stepped(step)
    assert pace.per_step(13) == 2.0
    assert pace.left(Running(13, 200)) == 2.0 * 87 + 3.0


@pytest.mark.parametrize(("known", "told"), [(None, " (not timed yet)"), (3.0, " of 3.0 s")])
def test_validations_of_which_there_was_none_yet_do_not_take_no_time(known, told, capsys):
    progress = Progress(live=False)
    times = iter((0.0, 8.0))
    progress._pace = Pace(lambda: next(times), 100, 0)
    progress._pace.left, progress._pace.validation = lambda trainer: 60.0, known
    progress._pace.stepped(1)
    progress._tell_time(Running(5, 100))
    assert capsys.readouterr().out.split() == f"estimated 1:00 left: 95 steps at 0.5/s, 2 validations{told}".split()


@pytest.mark.parametrize(("time", "told"), [("00:08:00:00", "for 8:00:00"), (None, "without an end")])
def test_an_end_by_time_is_told_before_training(time, told):
    trainer = Trainer(max_epochs=-1, max_time=time, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert ("training", told) in header(trainer, torch.nn.Linear(1, 1))


def test_a_few_batches_tried_before_training_are_no_validation(capsys):
    progress = Progress(live=True)
    progress._bar = _Bar(Console(file=io.StringIO(), force_terminal=True, width=80))
    progress._bar.validate(2)
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), sanity_checking=True, num_sanity_val_steps=2, callback_metrics={"val/perplexity": 3.0}
    )
    progress.on_validation_end(trainer, SimpleNamespace())
    progress._stop()
    assert progress._marks == {} and capsys.readouterr().out == ""


def test_a_trial_of_one_batch_leaves_the_result_of_an_earlier_run(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    trainer = SimpleNamespace(is_global_zero=True, fast_dev_run=1, default_root_dir=tmp_path, callbacks=[])
    RunResult().on_fit_start(trainer, SimpleNamespace())
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize(("fast_dev_run", "perplexity", "left"), [(0, 9.0, 0), (0, 21.0, 2), (1, 9.0, 2)])
def test_a_better_model_makes_scores_of_the_one_before_untrue(fast_dev_run, perplexity, left, tmp_path):
    for name in ("validate.json", "test.json"):
        (tmp_path / name).write_text("{}")
    result = RunResult()
    result.load_state_dict({"seconds": 0.0, "best": {"step": 1000, "metrics": {"val/perplexity": 20.0}}})
    trainer = SimpleNamespace(is_global_zero=True, fast_dev_run=fast_dev_run, default_root_dir=tmp_path, global_step=4000)
    trainer.state, trainer.sanity_checking = SimpleNamespace(fn="fit"), False
    trainer.callback_metrics = {"val/perplexity": perplexity}
    result.on_validation_end(trainer, SimpleNamespace())
    assert len(list(tmp_path.iterdir())) == left


@pytest.mark.parametrize(("keep", "path", "best_step", "left"), [(1, "", 4000, 0), (1, "best.ckpt", 1000, 2), (0, "", 1000, 0)])
def test_a_worse_model_is_the_best_where_the_better_one_did_not_come_along(keep, path, best_step, left, tmp_path):
    """keep 0: evaluations read the last one, so that their scores are of an earlier model after each validation."""
    result, kept = RunResult(), best_checkpoint("val/perplexity", "min", keep)
    result.load_state_dict({"seconds": 0.0, "best": {"step": 1000, "metrics": {"val/perplexity": 20.0}}})
    kept.best_model_path = path
    for name in ("validate.json", "test.json"):
        (tmp_path / name).write_text("{}")
    trainer = SimpleNamespace(is_global_zero=True, fast_dev_run=0, default_root_dir=tmp_path, global_step=4000, world_size=1)
    trainer.callbacks, trainer.strategy = [result, kept], SimpleNamespace(root_device="cpu")
    trainer.state, trainer.sanity_checking = SimpleNamespace(fn="fit"), False
    trainer.callback_metrics = {"val/perplexity": 21.0}
    result.on_fit_start(trainer, SimpleNamespace())
    result.on_validation_end(trainer, SimpleNamespace())
    assert result.best["step"] == best_step and len(list(tmp_path.iterdir())) == left


def test_a_metric_that_is_nan_is_not_the_best():
    progress = Progress(live=False)
    for step, value in enumerate((5.0, math.nan, 6.0)):
        progress._mark(value, step, min)
    assert progress._marks == {"first": (5.0, 0), "best": (5.0, 0), "last": (6.0, 2)}


def test_a_run_that_goes_on_after_its_end_tells_what_it_knows(capsys):
    before, again = Progress(live=False), Progress(live=False)
    before._mark(5.0, 0, min)
    before._mark(math.inf, 12, min)
    again.load_state_dict(before.state_dict())
    trainer = SimpleNamespace(global_step=12, callbacks=[], early_stopping_callbacks=[])
    again.on_fit_end(trainer, SimpleNamespace(headline=HEADLINE))
    assert re.findall(r"^  (\w+) +5.00 \(step 0\)$", capsys.readouterr().out, re.M) == ["first", "best"]


def test_times_counts_and_lines():
    assert [clock(0.4), clock(61), clock(3599.6), clock(36_061)] == ["0:00", "1:01", "1:00:00", "10:01:01"]
    assert [count(355), count(14_710), count(1_400_000), count(2.5e9)] == ["355", "14.7 k", "1.4 M", "2.5 G"]
    assert [count(999), count(999_949), count(999_960)] == ["999", "999.9 k", "1.0 M"]
    assert wrapped([("a", "one, two, three")], 22) == [("a           ", "one, two,"), ("            ", "three")]
    assert wrapped([("run", "x" * 99)]) == [("run         ", "x" * 99)]  # a path is not split
    assert _fitting(["loss 1", "perplexity 2", "3 tokens/s"], 22) == "loss 1  perplexity 2"
