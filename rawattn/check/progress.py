"""How far a command is, on stderr: a bar on a terminal, a line now and then where there is none."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import Progress

SILENCE = 10.0  # seconds after which a line is due, whatever has ended
SOON = 1.0  # seconds within which no second line is
ENOUGH = 0.05  # share of the work after which the rest can be told


class Steps:
    """Counts steps that end, as a context manager.

    ``weights`` are the seconds that each step is thought to take, or shares of any other unit: what
    is left is told from those of the steps that have ended.
    """

    def __init__(self, label: str, weights: list[float]) -> None:
        self.label, self.weights = label, weights
        self.done, self.weight, self.tenth = 0, 0.0, 0
        self.began = self.said = time.monotonic()
        self.bar = Progress(console=Console(stderr=True), transient=True) if on_terminal() else None

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=sum(self.weights))
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def end(self, step: int) -> None:
        """The step of this index has ended."""
        self.done += 1
        self.weight += self.weights[step]
        if self.bar is not None:
            self.bar.advance(self.task, self.weights[step])
            return
        tenth = 10 * self.done // len(self.weights)
        waited = time.monotonic() - self.said
        if waited > SILENCE or (tenth > self.tenth and waited > SOON):
            self.tenth = tenth
            self._say()

    def wait(self) -> None:
        """Nothing has ended for a while."""
        if self.bar is None and time.monotonic() - self.said > SILENCE:
            self._say()

    def _say(self) -> None:
        self.said = time.monotonic()
        seconds, whole = self.said - self.began, sum(self.weights)
        known = ENOUGH * whole <= self.weight < whole
        left = seconds * (whole / self.weight - 1) if known else 0.0
        rest = f", about {duration(left)} left" if known else ""
        say(f"{self.label}: {self.done} of {len(self.weights)} after {duration(seconds)}{rest}")


def say(text: str) -> None:
    """A line on stderr, seen at once."""
    print(text, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether somebody sees a bar move."""
    return sys.stderr.isatty()


def duration(seconds: float) -> str:
    """95 s as "95 s", 130 s as "2 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def counted(number: int, thing: str) -> str:
    """ "1 build", "2 builds"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
