"""The processes that measure: a command that a test has forked starts its own, whatever pytest's process has started."""

import multiprocessing
import sys
from multiprocessing import forkserver

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
