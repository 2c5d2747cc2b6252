"""Signals at any moment: the exit status is theirs, one line tells how to resume, and no finished work is lost."""

import multiprocessing.connection
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch.loops import _EvaluationLoop

from lit_linformer.callbacks import Preemption
from lit_linformer.cli import main
from lit_linformer.cli.app import LinformerCLI
from lit_linformer.data import PretrainingData
from lit_linformer.tasks import MLM
from lit_linformer.utils import signals
from tests.helpers import after, assert_same_runs, fit, load, output, read_log, run_forked, slow
from tests.test_distributed import FORKED

BEFORE = "before training began: nothing was trained in this start; the same command starts it again"


def send(number, when=lambda *_: True, group=False):
    """A hook that sends a signal to this process, or to all of the run, once."""
    sent = []

    def then(*arguments):
        if when(*arguments) and not sent:
            sent.append(True)
            os.killpg(0, number) if group else os.kill(os.getpid(), number)

    return then


def validating(loop):
    return loop.trainer.sanity_checking


def test_a_signal_before_training_ends_the_run_at_once_and_the_same_command_starts_it_again(tiny, tmp_path, monkeypatch):
    command = ["fit", *tiny, "--trainer.max_steps", "1", "--ckpt_path", "auto"]
    for owner, name, when, number in (
        (LinformerCLI, "before_instantiate_classes", lambda _: True, signal.SIGINT),
        (PretrainingData, "prepare_data", lambda _: True, signal.SIGHUP),
        (_EvaluationLoop, "reset", validating, signal.SIGTERM),
        (_EvaluationLoop, "reset", validating, signal.SIGINT),
    ):
        with monkeypatch.context() as patched:
            after(patched, owner, name, send(number, when))
            shown = output(command, tmp_path, status=128 + number)
        assert shown.splitlines()[-1] == f"stopped by {signal.Signals(number).name} {BEFORE}", name
        assert not [*(tmp_path / "runs").rglob("*.ckpt")] and "Traceback" not in shown, shown
    output(command, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGHUP)])
def test_ctrl_c_and_sighup_save_the_step_and_the_run_goes_on_exactly(number, put, tiny, tmp_path, monkeypatch):
    put("whole")
    with monkeypatch.context() as patched:
        after(patched, MLM, "on_train_batch_start", send(number, lambda module, *_: module.batches_seen == 9))
        assert fit(tiny, "stopped", tmp_path / "stopped") == 128 + number
    assert f"stopped by {number.name} at step 9; --ckpt_path last continues the run" in (tmp_path / "stopped.out").read_text()
    assert fit(tiny, "stopped", tmp_path / "stopped", "--ckpt_path", "last") == 0
    assert_same_runs(tmp_path, "whole", "stopped")


def test_a_keyboard_interrupt_of_ones_own_code_ends_like_ctrl_c(put, tiny, tmp_path, monkeypatch):
    put("whole")

    def raises(module, *_):
        if module.batches_seen == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        after(patched, MLM, "on_train_batch_start", raises)
        assert fit(tiny, "stopped", tmp_path / "stopped") == 130
    said = (tmp_path / "stopped.out").read_text().splitlines()
    assert said[-1] == "stopped by a KeyboardInterrupt at step 8; --ckpt_path last continues from step 5"
    assert fit(tiny, "stopped", tmp_path / "stopped", "--ckpt_path", "last") == 0
    assert_same_runs(tmp_path, "whole", "stopped")


@pytest.mark.slow
def test_ctrl_c_reaches_all_processes_and_their_workers_at_once(tiny, tmp_path, monkeypatch):
    tiny = [*tiny, *FORKED, "--data.num_workers", "1"]
    first = send(signal.SIGINT, lambda module, *_: module.batches_seen == 4 and module.global_rank == 0, group=True)
    with monkeypatch.context() as patched:
        after(patched, MLM, "on_train_batch_start", first)
        assert fit(tiny, "run", tmp_path / "run") == 130
    shown = (tmp_path / "run.out").read_text()
    # The signal may reach the other process a step earlier or later.
    assert "Traceback" not in shown and len(re.findall("stopped by SIGINT at step [3456];", shown)) == 1
    assert fit(tiny, "run", tmp_path / "run", "--ckpt_path", "last") == 0
    assert len(read_log(tmp_path / "run.1")) == 12


def test_a_sigterm_for_the_whole_group_leaves_the_step_its_workers(tiny, tmp_path, monkeypatch):
    """As `timeout` sends it: to the process and to all that it has started."""
    both = [send(signal.SIGTERM, lambda module, *_: module.batches_seen == 34, group=group) for group in (False, True)]
    assert_ends_after_step_2(lambda *of: [one(*of) for one in both], tiny, tmp_path, monkeypatch)


def test_a_sigterm_for_each_process_leaves_the_step_its_workers(tiny, tmp_path, monkeypatch):
    """As Slurm, systemd and `pkill -f` send it."""

    def each(module, *_):
        if module.batches_seen == 34:
            workers = multiprocessing.active_children()  # two for training, two for validation
            subprocess.run(
                ["kill", *(str(process) for process in [os.getpid(), *(worker.pid for worker in workers)])], check=True
            )
            assert len(workers) == 4 and not multiprocessing.connection.wait([worker.sentinel for worker in workers], 1)

    assert_ends_after_step_2(each, tiny, tmp_path, monkeypatch)


def assert_ends_after_step_2(signals_sent, tiny, tmp_path, monkeypatch):
    after(monkeypatch, MLM, "on_train_batch_start", signals_sent)
    many = ["--data.num_workers", "2", "--trainer.accumulate_grad_batches", "32", "--trainer.val_check_interval", "1000"]
    assert fit([*tiny, *many], "run", tmp_path / "run") == 143
    assert load(tmp_path / "runs/run/checkpoints/last.ckpt")["global_step"] == 2


def test_a_second_ctrl_c_ends_the_run_at_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "TWICE", 0.0)
    again = [send(signal.SIGINT, lambda module, *_: module.batches_seen == 4) for _ in range(2)]
    after(monkeypatch, MLM, "on_train_batch_start", lambda *of: [one(*of) for one in again])
    shown = output(["fit", *tiny], tmp_path, status=130)
    assert shown.splitlines()[-1].endswith("a second Ctrl-C ends it now")
    assert not [*(tmp_path / "runs").rglob("*.ckpt")] and "Traceback" not in shown


def test_a_signal_during_a_validation_ends_the_run_after_it(tiny, tmp_path, monkeypatch):
    after(monkeypatch, _EvaluationLoop, "reset", send(signal.SIGTERM, lambda loop: loop.trainer.global_step == 7))
    assert "stopped by SIGTERM at step 7" in output(["fit", *tiny], tmp_path, status=143)
    assert load(tmp_path / "runs/tiny/checkpoints/last.ckpt")["global_step"] == 7
    assert len((tmp_path / "runs/tiny/perplexity.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("live", ["true", "false"])
def test_a_terminal_closed_during_a_validation_loses_no_step(live, tiny, tmp_path, monkeypatch):
    def wait(loop, *_):
        if loop.trainer.global_step == 7:
            (tmp_path / "validating").touch()
            while not signals.watch.received:
                time.sleep(0.01)

    after(monkeypatch, _EvaluationLoop, "reset", wait)
    child, terminal = pty.fork()
    if child == 0:
        try:
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not pytest's
            torch.set_num_threads(torch.get_num_threads())
            main(["fit", *tiny, "--progress.live", live])
            os._exit(0)
        except SystemExit as end:
            os._exit(end.code)
        except BaseException:
            os._exit(1)
    shown = b""
    while not (tmp_path / "validating").exists():
        shown += os.read(terminal, 1 << 16) if select.select([terminal], [], [], 0.05)[0] else b""
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP, shown.decode()
    assert load(tmp_path / "runs/tiny/checkpoints/last.ckpt")["global_step"] == 7


def test_a_run_whose_last_step_is_done_ends_as_it_would(tiny, tmp_path, monkeypatch):
    after(monkeypatch, MLM, "on_train_batch_start", send(signal.SIGTERM, lambda module, *_: module.batches_seen == 12))
    output(["fit", *tiny], tmp_path)
    assert (tmp_path / "runs/tiny/result.json").is_file()


def test_slurms_sigusr1_before_training_has_the_job_queued_again(tiny, tmp_path, monkeypatch):
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/asked"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    after(monkeypatch, PretrainingData, "prepare_data", send(signal.SIGUSR1))
    output(["fit", *tiny], tmp_path, status=138)
    assert (tmp_path / "asked").read_text() == "requeue 9\n"


@pytest.mark.parametrize("command", ["prepare", "validate"])
def test_other_commands_end_at_once_with_a_line(command, put, tiny, tmp_path, monkeypatch):
    if command == "validate":
        put("tiny")
    after(monkeypatch, PretrainingData, "prepare_data", send(signal.SIGINT))
    lines = output([command, *tiny], tmp_path, status=130).splitlines()
    assert lines[-1] == "stopped by SIGINT" + "; the same command continues where it stopped" * (command == "prepare")


def test_what_is_ignored_stays_ignored():
    """nohup ignores SIGHUP; in a script, `… &` ignores Ctrl-C."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals.watch.begin("fit")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signals.watch._receive
    finally:
        signals.watch.end()
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) != signals.watch._receive


def test_a_signal_that_no_exception_told_of_ends_the_run_before_its_first_step(tiny, tmp_path, monkeypatch):
    """As one that arrives in a destructor, which lets no exception out."""

    def unheard(*_):
        signals.watch.received = signal.SIGTERM

    before = Preemption.on_train_start
    monkeypatch.setattr(Preemption, "on_train_start", lambda self, *of: (unheard(), before(self, *of)))
    assert run_forked(["fit", *tiny], tmp_path / "log") == 143
    assert not [*(tmp_path / "runs").rglob("*.ckpt")]
