"""The progress bar of a preparation, on a terminal."""

import io
import sys

from lit_linformer.data.progress_bar import Preparing


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pattern_is_shown_as_it_is(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with Preparing("Tokenising texts/[ab]*.txt"):  # must not be read as a rich style named ab
        pass
    assert "texts/[ab]*.txt" in screen.getvalue()
