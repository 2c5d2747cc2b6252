"""Progress of a long preparation: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time

SECONDS_BETWEEN = {True: 0.1, False: 10.0}  # between updates of a bar; between lines


class Preparing:
    """Counts bytes of processed text, and shows progress and speed unless `show` is false."""

    def __init__(self, title: str, show: bool = True):
        self.title, self.show = title, show
        self.bytes, self.fraction = 0, 0.0
        self.bar = self.task = None

    def __enter__(self):
        self.started = self.told = time.monotonic()
        if self.show and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = [TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f} %")]
            columns += [TextColumn("{task.fields[speed]}"), TimeRemainingColumn()]
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=1.0, speed="")
        return self

    def update(self, new_bytes: int, fraction: float) -> None:
        """new_bytes: bytes processed since the last call; fraction: share of the whole processed so far, 0 to 1."""
        self.bytes, self.fraction = self.bytes + new_bytes, fraction
        if not self.show or time.monotonic() - self.told < SECONDS_BETWEEN[self.bar is not None]:
            return
        self.told = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=fraction, speed=self._speed())
        else:
            print(f"{self.title}: {fraction:.0%}, {self._speed()}", file=sys.stderr, flush=True)

    def __exit__(self, kind, *_):
        if self.bar is not None:
            if kind is None:
                self.bar.update(self.task, completed=1.0, speed=self._speed())
            self.bar.stop()
        elif self.show and kind is None:
            print(f"{self.title}: done, {self._speed()}", file=sys.stderr, flush=True)

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        return f"{self.bytes / 1e6:,.1f} MB, {self.bytes / 1e6 / seconds:.1f} MB/s"
