"""One page of all that was measured: `python run.py report`."""
