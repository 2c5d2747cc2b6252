"""Runs `convert`, and checks what it refuses."""

import re

from tests.cli.test_errors import complaint
from tests.helpers import output


def convert(source, tmp_path, *extra, name="new", status=0):
    return output(["convert", "--from", str(source), "--name", name, *extra], tmp_path, status)


def refused(argv, tmp_path, pattern):
    """The command ends with one line that matches, and writes nothing."""
    line = complaint(argv, tmp_path)
    assert re.search(pattern, line), line
