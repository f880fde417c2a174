"""Output of a command: sentences and tables, progress, and what a long run costs before it starts and when it ended."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from ..doctor.cost import Cost, Part, Shape, Text
    from ..doctor.watch import MemoryMonitor

ROWS = 400  # of a table: nobody reads more, and drawing a million takes minutes
EVERY = 30.0  # seconds between two lines of progress where nothing can be drawn


def wrapped(text: str, width: int) -> str:
    """Return lines of whole words; a word that is longer than a line keeps its own.

    >>> wrapped("the path is /a/very/long/path indeed", 12).splitlines()
    ['the path is', '/a/very/long/path', 'indeed']
    """
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in text.split("\n"))
    return "\n".join(part for line in lines for part in line)


class Terminal(Console):
    """A console that prints sentences as they are, and is no markup.

    On a terminal they break between words, so that a path without blanks can be copied whole; in a file or a pipe they do not.
    """

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a plain string is not read as markup."""
        if all(isinstance(o, str) for o in objects):
            options = {"soft_wrap": True, "markup": False, **options}
            if self.is_terminal:
                objects = tuple(wrapped(str(o), self.width) for o in objects)
        super().print(*objects, **options)


def say(a: argparse.Namespace, sentences: Iterable[str]) -> None:
    """Print sentences, one a line."""
    for sentence in sentences:
        a.console.print(sentence)


def announce(a: argparse.Namespace, sentence: str) -> None:
    """Print on stderr what is about to run, unless ``--quiet``."""
    if not a.quiet:
        Terminal(stderr=True).print(sentence, style="dim")


def show_table(
    a: argparse.Namespace, title: str, head: Sequence[str], rows: Iterable[Any], cells: Callable[[Any], Sequence[Any]] = tuple
) -> None:
    """Print a table that a person may read; a long one loses its middle."""
    if a.json and not a.console.is_terminal:
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, no_wrap=name == "block")  # cut names of layers would all look alike
    rows = rows if isinstance(rows, Sequence) else list(rows)
    left_out = len(rows) - ROWS
    shown = [cells(row) for row in (rows if left_out <= 0 else [*rows[: ROWS // 2], *rows[-(ROWS // 2) :]])]
    if left_out > 0:
        shown.insert(ROWS // 2, (f"... {left_out:,} more", *[""] * (len(head) - 1)))
    for row in shown:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v) for v in row))
    a.console.print(table)


# --- progress ---------------------------------------------------------------------------------------------------------------


def progress_console() -> Console:
    """Return where progress is drawn."""
    return Console(stderr=True)


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds.

    >>> clock(75.2), clock(7260)
    ('1:15', '2:01:00')
    """
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class Progress:
    """How far a run is, in which phase, and how long the rest will take: a bar, or a line on stderr every half minute.

    Args:
        text: What runs.
        expected: Seconds that it is expected to take, which say the time left before the first step is done.
        drawing: The ``rich`` progress that draws a bar; lines without it.
    """

    def __init__(self, text: str, expected: float | None = None, drawing: Any = None) -> None:
        self.text, self.phase, self.done, self.total = text, "", 0, 0
        self.began = self.since = self._last = time.monotonic()
        self.expected, self.drawing = expected, drawing
        self._task = drawing.add_task(text, total=None, told=self) if drawing is not None else None

    def __call__(self, done: int, total: int, phase: str | None = None) -> None:
        """Take steps done, of a total."""
        if (self.total and total != self.total) or done < self.done:
            self.since = time.monotonic()  # other steps: their speed is not that of the ones before
        self.done, self.total, self.phase = done, total, phase or self.phase
        self.show()

    def say(self, phase: str) -> None:
        """Name what is being done."""
        self.phase = phase

    @property
    def title(self) -> str:
        """Name of what runs, with its phase."""
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
        """Move the bar, or print a line where the last one is old enough."""
        if self.drawing is not None:
            self.drawing.update(self._task, completed=self.done, total=self.total or None)
        elif time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            left = f", {self.left} left" if self.left else ""
            progress_console().print(f"{self.title}: {self.count}{left}", soft_wrap=True, markup=False, highlight=False)


@contextlib.contextmanager
def progress_bar(a: argparse.Namespace, text: str) -> Iterator[Progress | None]:
    """Yield a callback ``(done, total, phase)`` that shows how far a command is, or nothing with ``--quiet``."""
    if a.quiet:
        yield None
        return
    cost: CostEstimate | None = getattr(a, "cost", None)
    expected = cost.expected.seconds if cost is not None and cost.expected is not None else None
    console = progress_console()
    if not console.is_terminal:
        yield Progress(text, expected)
        return
    with _drawing(console) as drawing:
        yield Progress(text, expected, drawing)


def _drawing(console: Console) -> Any:
    from rich import progress
    from rich.text import Text

    class Told(progress.ProgressColumn):
        max_refresh = 0.2

        def __init__(self, name: str, before: str = "") -> None:
            super().__init__()
            self.name, self.before = name, before

        def render(self, task: Any) -> Text:
            found = getattr(task.fields["told"], self.name)
            return Text(f"{self.before}{found}" if found else "")

    bar, elapsed = progress.BarColumn(bar_width=20), progress.TimeElapsedColumn()
    columns = (progress.SpinnerColumn(), Told("title"), bar, Told("count"), elapsed, Told("left", "left "))
    return progress.Progress(*columns, console=console, transient=True)


# --- cost -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class CostEstimate:
    """One run: what it is expected to take, where that is known, and what watches its memory."""

    expected: Cost | None
    monitor: MemoryMonitor


def text_of(data: Any, a: argparse.Namespace) -> Text:
    """Return how much text a command reads: of a calibration set, in the batches that are named; one token of none."""
    from ..doctor.cost import Text
    from .options import batch_of

    if data is None:
        return Text(samples=1, length=1, batch=1)
    return Text(samples=data.samples, length=data.length, batch=min(batch_of(a), data.samples))


def words_of(data: Any) -> str:
    """Return what a calibration set is, in words."""
    return f"{data.samples} samples of {data.length} tokens of {data.source}"


def expect(a: argparse.Namespace, what: str, model: Any, parts: Callable[[Shape], Sequence[Part]]) -> None:
    """Say model, device, precision, expected time and memory in one line on stderr, and watch the memory from here on.

    Called once the model is loaded, before the work. A second call (another model of the same run) says only what was loaded.

    Args:
        a: Of the command; the estimate is left on it for :func:`conclude`.
        what: What will be done, and on which text.
        model: As it was loaded.
        parts: Prices the command on a model of these sizes; none where nobody knows what it costs.
    """
    from ..models.loading import describe_place

    if a.quiet and not a.json:
        return
    place = f"{a.model}: {describe_place(model)}."
    if getattr(a, "cost", None) is not None:
        announce(a, place)
    else:
        begin(a, f"{place} {what}", _priced(a.verb, model, parts), next(model.parameters()).device)


def begin(a: argparse.Namespace, sentence: str, found: Cost | None, device: Any = "cpu") -> None:
    """Say a sentence with what is expected, and watch the memory."""
    from ..doctor.cost import HOWS
    from ..doctor.watch import MemoryMonitor

    said = ""
    if found is not None:
        short = "" if found.fits else ", more than is free here"
        said = f": about {_cost(found.seconds, found.memory)}{short}, {HOWS[found.how]}"
    announce(a, f"{sentence}{said}.")
    a.cost = CostEstimate(expected=found, monitor=MemoryMonitor(device))


def conclude(a: argparse.Namespace, result: Any) -> Any:
    """Say what was taken beside what was expected, and return the result with both as fields."""
    cost: CostEstimate | None = getattr(a, "cost", None)
    if cost is None:
        return result
    (seconds, memory), expected = cost.monitor.end(), cost.expected
    beside = f"; expected {_cost(expected.seconds, expected.memory)}" if expected is not None else ""
    announce(a, f"took {_cost(seconds, memory)}{beside}.")
    if not isinstance(result, dict):
        return result
    before = None if expected is None else {n: getattr(expected, n) for n in ("seconds", "memory", "how", "forwards")}
    return {**result, "expected": before, "took": {"seconds": seconds, "memory": memory}}


def dismiss(a: argparse.Namespace) -> None:
    """Stop watching the memory, however the command ended."""
    cost: CostEstimate | None = getattr(a, "cost", None)
    if cost is not None:
        cost.monitor.end()


def _cost(seconds: float, memory: int) -> str:
    from ..doctor.cost import duration

    return f"{duration(seconds)} and {memory / 2**30:.2g} GiB"


def _priced(verb: str, model: Any, parts: Callable[[Shape], Sequence[Part]]) -> Cost | None:
    """The cost on a loaded model; None where it has no layers that could be counted."""
    from ..doctor.cost import price, shape_in_memory, time_token
    from ..errors import UnknownStructure
    from ..models.machine import free_bytes
    from ..models.offload import mapped

    try:
        shape = shape_in_memory(model)
    except UnknownStructure:
        return None
    found = parts(shape)
    if not found:
        return None
    lies = mapped(model)
    home = next(model.parameters()) if lies is None else lies
    text = max((p.text for p in found), key=lambda t: t.batch)
    token = time_token(shape, home.dtype, home.device, model=model if lies is None else None, text=text)
    machine = free_bytes(home.device) + (shape.weights if lies is None else 0)  # which has the model already
    priced = price(verb, found, shape, token, machine)
    if lies is None and priced.how == "streamed":  # it was asked for in memory, and is there
        return dataclasses.replace(priced, how="layers", memory=priced.memory + shape.weights)
    if lies is not None and priced.how != "streamed":
        return dataclasses.replace(priced, how="streamed", memory=max(priced.memory - shape.weights, 0))
    return priced


def say_share(a: argparse.Namespace, model: Any, blocks: Sequence[Any]) -> None:
    """Say which share of the matrices the blocks hold, where that is not nearly all."""
    from ..models.blocks import ENOUGH, left_out, share_held

    share = share_held(model, blocks)
    if share < ENOUGH:
        rest = left_out(model, blocks)
        a.console.print(
            f"The blocks hold {share:.1%} of the matrices' weights (embeddings and output head aside). Left as they are: "
            f"{len(rest)} tensors, first {next(iter(rest))}."
        )
