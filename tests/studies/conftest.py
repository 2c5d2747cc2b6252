"""What several tests of the studies stand on."""

from lit_linformer.studies.benchmark.layers import read_settings

SMALL = "--lengths 32 64 --projection_dims 8 64 --hidden_size 16 --num_heads 2 --num_layers 1 --tokens 128 --rounds 3".split()


def settings_of(*argv):
    """Of a benchmark that takes a moment."""
    return read_settings([*SMALL, *argv])


def tables(text):
    """{first cell: cells} of all lines of all tables."""
    lines = ([word.strip() for word in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("|"))
    return {line[0]: line for line in lines}
