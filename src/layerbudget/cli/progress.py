"""Progress of long verbs: phase, step of total and time left; a bar on a terminal, a line now and then in a file or a pipe."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

EVERY = 30.0  # seconds between two lines where nothing can be drawn


def progress_console() -> Console:
    """Where progress is drawn."""
    return Console(stderr=True)


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds.

    >>> clock(75.2), clock(7260)
    ('1:15', '2:01:00')
    """
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class Notes:
    """What a run has told of itself: how far it is, in which phase, and how long the rest will take.

    Args:
        text: What runs.
        expected: Seconds that it is expected to take, which say the time left before the first step is done.
    """

    def __init__(self, text: str, expected: float | None = None) -> None:
        self.text, self.phase, self.done, self.total = text, "", 0, 0
        self.began = self.since = time.monotonic()
        self.expected = expected

    def __call__(self, done: int, total: int, phase: str | None = None) -> None:
        """Steps done, of a total."""
        if (self.total and total != self.total) or done < self.done:
            self.since = time.monotonic()  # other steps: their speed is not that of the ones before
        self.done, self.total = done, total
        if phase:
            self.phase = phase
        self.show()

    def say(self, phase: str) -> None:
        """Name what is being done."""
        self.phase = phase

    @property
    def title(self) -> str:
        """What runs, with its phase."""
        return ", ".join(filter(None, (self.text, self.phase)))

    @property
    def count(self) -> str:
        """Steps done of their total."""
        return f"{self.done}/{self.total}" if self.total else "starting"

    @property
    def left(self) -> str:
        """Time left, from the steps that are done, or from what was expected before there is one."""
        now = time.monotonic()
        if self.done and self.total:
            return clock((now - self.since) * max(self.total - self.done, 0) / self.done)
        return "" if self.expected is None else clock(max(self.expected - (now - self.began), 0.0))

    def show(self) -> None:
        """Draw."""


class Lines(Notes):
    """A line on stderr every half minute."""

    def __init__(self, text: str, expected: float | None = None) -> None:
        super().__init__(text, expected)
        self._last = self.began

    def show(self) -> None:
        """Print a line where the last one is old enough."""
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            left = f", {self.left} left" if self.left else ""
            progress_console().print(f"{self.title}: {self.count}{left}", soft_wrap=True, markup=False, highlight=False)


class Bar(Notes):
    """A bar that is drawn anew several times a second."""

    def __init__(self, text: str, expected: float | None, drawn: Any) -> None:
        super().__init__(text, expected)
        self.drawn, self.task = drawn, drawn.add_task(text, total=None, told=self)

    def show(self) -> None:
        """Move the bar."""
        self.drawn.update(self.task, completed=self.done, total=self.total or None)


@contextlib.contextmanager
def progress_bar(arguments: argparse.Namespace, text: str) -> Iterator[Notes | None]:
    """Yield a callback ``(done, total, phase)`` that shows how far a verb is, or nothing with ``--quiet``."""
    if getattr(arguments, "quiet", False):
        yield None
        return
    outlook = getattr(arguments, "outlook", None)
    forecast = None if outlook is None else outlook.expected
    expected, console = None if forecast is None else forecast.seconds, progress_console()
    if not console.is_terminal:
        yield Lines(text, expected)
        return
    with _drawing(console) as drawn:
        yield Bar(text, expected, drawn)


def _drawing(console: Console) -> Any:
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn
    from rich.text import Text

    class Said(ProgressColumn):
        """One thing that the run tells, as text."""

        max_refresh = 0.2

        def __init__(self, name: str, before: str = "") -> None:
            super().__init__()
            self.name, self.before = name, before

        def render(self, task: Any) -> Text:
            """Its text now."""
            found = getattr(task.fields["told"], self.name)
            return Text(f"{self.before}{found}" if found else "")

    columns = (
        SpinnerColumn(), Said("title"), BarColumn(bar_width=20), Said("count"), TimeElapsedColumn(), Said("left", "left "),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True)
