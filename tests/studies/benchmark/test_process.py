"""The processes that measure: a command that a test has forked starts its own, whatever pytest's process has started."""

import multiprocessing
import sys
from multiprocessing import forkserver

import pytest

from lit_linformer.studies.benchmark.process import Job, Reporter, take_turns
from tests.helpers import HANGS


def forked(work) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(HANGS)
    return process.exitcode


def start() -> None:
    forkserver.set_forkserver_preload([])
    forkserver.ensure_running()


def test_a_fork_of_what_has_such_a_server_starts_its_own():
    def begun() -> None:
        start()
        sys.exit(forked(start))

    assert forked(begun) == 0


@pytest.mark.parametrize("steps, status", [(1, "ok"), (9, "over limit")])
def test_a_time_limit_counts_every_step_of_a_turn(steps, status):
    """A round of training reports the seconds of one step: nine steps of 0.1 s, three times, exceed 2 s."""
    settings = {"warmup": 1, "rounds": 2, "cell_seconds": 2.0, "steps": steps}
    sent = []
    take_turns({"model": lambda: 0.1}, Job(take_turns, settings), Reporter(sent.append))
    assert [message[2]["status"] for message in sent if message[0] == "ended"] == [status]


def test_models_take_turns_in_another_order_each_round_and_the_first_rounds_do_not_count():
    ran, sent = [], []
    passes = {name: lambda name=name: ran.append(name) or len(ran) / 1000 for name in "abc"}
    take_turns(passes, Job(take_turns, {"warmup": 1, "rounds": 2, "cell_seconds": 9.0}), Reporter(sent.append))
    assert "".join(ran) == "abcbcacab"
    seconds = {message[1]: message[2]["seconds"] for message in sent if message[0] == "ended"}
    assert seconds == {"a": [0.006, 0.008], "b": [0.004, 0.009], "c": [0.005, 0.007]}
