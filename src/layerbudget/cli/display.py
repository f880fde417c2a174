"""Output of a command: sentences and tables, progress, and what a long run costs before it starts and when it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import LayerbudgetError

if TYPE_CHECKING:
    from ..cost.machines import Share
    from ..cost.work import WorkItem
    from .session import Session

ROWS = 400  # of a table: drawing a million takes minutes
FEW = 15  # of a table that was not asked for
EVERY = 60.0  # seconds between two lines of progress where nothing can be drawn


def terminal(*, stderr: bool = True) -> Console:
    """Return a console that prints sentences as they are: brackets are no markup, and lines are not broken."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def say(a: Session, *sentences: str) -> None:
    """Print sentences, one a line."""
    for sentence in sentences:
        a.console.print(sentence)


def announce(a: Session, sentence: str) -> None:
    """Print on stderr what is about to run, unless ``--quiet``."""
    if not a.quiet:
        terminal().print(sentence, style="dim")


def say_next(a: Session, *words: str) -> str:
    """Print the command that follows, the last line of a verb, and return it."""
    command = shlex.join(["layerbudget", *map(str, words)])
    say(a, f"Next: {command}")
    return command


def ending(verdict: str, follows: str | None) -> dict[str, Any]:
    """Return the last two lines of a verb as fields of what it prints."""
    return {"verdict": verdict.removeprefix("Verdict: "), "next": follows}


def most_rows(a: Session) -> int:
    """Return how many rows of a table are shown: few, or with ``--table`` as many as can be drawn."""
    return ROWS if getattr(a, "table", False) else FEW


def show_table(
    a: Session, title: str, head: Sequence[str], rows: Iterable[Any], cells: Callable[[Any], Sequence[Any]] = tuple
) -> None:
    """Print a table that a person may read; a long one loses its middle, and ``--table`` shows it."""
    if a.json and not a.console.is_terminal:
        return
    from rich.table import Table

    rows = rows if isinstance(rows, Sequence) else list(rows)
    most = most_rows(a)
    left_out = len(rows) - most
    shown = [cells(row) for row in (rows if left_out <= 0 else [*rows[: most // 2], *rows[-(most // 2) :]])]
    if left_out > 0:
        left_out = len(rows) - len(shown)
        note = f"... {left_out:,} more" + ("" if most == ROWS else ": --table")
        shown.insert(most // 2, (note, *[""] * (len(head) - 1)))
    texts = [[f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v) for v in row] for row in shown]
    columns = [(name, *(row[place] for row in texts)) for place, name in enumerate(head)]
    table = Table(title=title, title_justify="left")
    for name, width in zip(head, _widths(columns, a.console.width - 3 * len(head) - 1), strict=True):
        table.add_column(name, min_width=width, max_width=width)
    for row in texts:
        table.add_row(*row)
    a.console.print(table)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Width of every column: lines are broken between words where the room is short, and never inside one."""
    whole = [max(map(len, column)) for column in columns]
    least = [max((len(word) for text in column for word in text.split()), default=1) for column in columns]
    widths, spare = list(least), max(0, room - sum(least))
    for place in sorted(range(len(columns)), key=lambda i: whole[i] - least[i]):
        more = min(spare, whole[place] - least[place])
        widths[place], spare = widths[place] + more, spare - more
    return widths


def say_share(a: Session, model: Any, blocks: Sequence[Any]) -> None:
    """Say which share of the matrices the blocks hold, where that is not nearly all."""
    from ..models.blocks import ENOUGH, left_out, share_held

    share = share_held(model, blocks)
    if share < ENOUGH:
        rest = left_out(model, blocks)
        say(
            a,
            f"The blocks hold {share:.1%} of the matrices' weights (embeddings and output head aside). Left as they are: "
            f"{len(rest)} tensors, first {next(iter(rest))}.",
        )


# --- progress ---------------------------------------------------------------------------------------------------------------


def progress_console() -> Console:
    """Return where progress is drawn."""
    return Console(stderr=True)


class Progress:
    """How far a run is, in which phase, and how long the rest will take: a bar, or a line a minute in a pipe."""

    def __init__(self, text: str) -> None:
        from rich import progress as shown

        self.console, self.text, self._last = progress_console(), text, time.monotonic()
        columns = (
            shown.SpinnerColumn(),
            shown.TextColumn("{task.description}", markup=False),
            shown.BarColumn(20),
            shown.MofNCompleteColumn(),
            shown.TimeElapsedColumn(),
            shown.TimeRemainingColumn(),
        )
        drawn = self.console.is_terminal
        self.bar = shown.Progress(*columns, console=self.console, transient=True, disable=not drawn)
        self.bar.add_task(text, total=None, visible=False)
        self.task = self.bar.tasks[0]

    def __call__(self, done: int, total: int, phase: str | None = None) -> None:
        """Take steps done, of a total."""
        if phase:
            self.say(phase)
        if total != self.task.total or done < self.task.completed:  # other steps: their speed is not that of the ones before
            self.bar.reset(self.task.id, total=total, completed=done, visible=True)
        self.bar.update(self.task.id, completed=done)
        if self.bar.disable and time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            seconds = self.task.time_remaining
            left = "" if seconds is None or done >= total else f", {round(seconds)} s left"
            terminal().print(f"{self.task.description}: {done}/{total}{left}")

    def say(self, phase: str) -> None:
        """Name what is being done."""
        self.bar.update(self.task.id, description=f"{self.text}, {phase}")


class DryRun(Exception):
    """The end of a command that was only asked what it would do; ``result`` says it."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("dry run")
        self.result = result


@contextlib.contextmanager
def nothing_written(a: Session) -> Iterator[None]:
    """Remove what a dry run has begun to write, and empty folders of a run that was refused: both are made before the work."""
    paths = [Path(path) for name in ("out", "resume") if (path := getattr(a, name, None))]
    new = [path for path in paths if not path.exists()]
    try:
        yield
    except LayerbudgetError:
        for path in new:
            for folder in [*sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True), path]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise
    finally:
        for path in new if a.dry_run else ():
            if path.is_dir():
                shutil.rmtree(path)


def end_dry_run(a: Session) -> None:
    """End the command where ``--dry-run`` was given: say what would be read, run and written."""
    if not a.dry_run:
        return
    expectation = a.expectation or {"model": a.model, "runs": a.verb, "expected": None}
    writes = [path for name in ("out", "save_scores", "resume") if (path := getattr(a, name, None))]
    names = ("plan", "scores", "adapter", "held_out", "against")
    files = [path for name in names if isinstance(path := getattr(a, name, None), str)]
    files += [text] if (text := expectation.get("data") or getattr(a, "data", None)) else []
    files += getattr(a, "perplexity", None) or []
    known, cost = expectation["expected"], "its cost is not known"
    if known is not None:
        from ..cost.price import HOWS, duration

        memory = f"{known['memory'] / 2**30:.2g} GiB{'' if known['fits'] else ', more than is free here'}"
        passes = f"{known['forwards']:.3g} forward equivalents, about {duration(known['seconds'])}"
        cost = f"{passes} and {memory}, {HOWS[known['how']]} (expect a factor of two)"
    say(
        a,
        f"Would read: {', '.join([expectation['model'], *files])}.",
        f"Would run: {expectation['runs']}: {cost}.",
        *([of_each(a.each)] if a.each is not None else []),
        f"Would write: {', '.join(writes) or 'nothing'}.",
        "Nothing was run or written: the same command without --dry-run does it.",
    )
    result = {"reads": [expectation["model"], *files], "runs": expectation["runs"], "writes": writes, "expected": known}
    if a.each is not None:
        result["share"] = dataclasses.asdict(a.each)
    raise DryRun({"dry_run": True, **result})


def of_each(part: Share) -> str:
    """Return what one of several processes holds and does, and what takes longest, in a sentence."""
    from ..cost.price import duration

    longest = f"{part.limit}, {duration(part.seconds)}" if part.seconds else part.limit
    return (
        f"Each of {part.machines} processes: {part.sequences} sequences, {part.memory / 2**30:.2g} GiB, "
        f"{part.operations / 1e12:.3g} x 10^12 operations, {part.read / 2**30:.3g} GiB of weights read, "
        f"{part.sent / 2**20:.3g} MiB exchanged. The limit is {longest}."
    )


@contextlib.contextmanager
def progress_bar(a: Session, text: str) -> Iterator[Callable[..., None] | None]:
    """Yield a callback ``(done, total, phase)`` that shows how far a command is, or nothing with ``--quiet``.

    It is told of zero steps when everything was checked and the work begins: there ``--dry-run`` ends.
    """
    if getattr(a, "dry_run", False):
        yield lambda *_: end_dry_run(a)
        return
    if a.quiet:
        yield None
        return
    shown = Progress(text)
    with shown.bar:
        yield shown


# --- cost -------------------------------------------------------------------------------------------------------------------


def named_text(source: str, flag: str = "--data") -> str:
    """Return the name of a text, and what it is where nobody named another."""
    return f"stdlib (Python's standard library; {flag} names another text)" if source == "stdlib" else source


def expect(a: Session, what: str, model: Any = None, parts: Sequence[WorkItem] = ()) -> None:
    """Say model, device, precision, expected time and memory in one line on stderr, and begin the clock.

    Called once the model is loaded, before the work. A second call (another model of the same run) says only what was loaded.

    Args:
        a: Arguments of the command; estimate and clock are left on it for :func:`conclude`.
        what: What will be done, and on which text.
        model: As it was loaded; None where each part of the work loads its own.
        parts: What the command does, of :mod:`layerbudget.cost.work`; none where nobody knows what it costs.
    """
    from ..cost.machines import share_of
    from ..cost.price import HOWS, duration, place_of, price
    from ..errors import UnknownStructure
    from ..models.loading import describe_place

    if a.quiet and not a.json and not a.dry_run:
        return
    place = a.model if model is None else f"{a.model}: {describe_place(model)}."
    if a.began is not None:
        announce(a, place)
        return
    a.expected, said = None, ""
    with contextlib.suppress(UnknownStructure):  # no layers that could be counted
        if parts:
            text = max((p.text for p in parts), key=lambda t: t.batch)
            where = place_of(model, text)
            a.expected = price(a.verb, parts, *where)
            if a.machines is not None:
                a.each = share_of(a.verb, parts, where[0], where[1], where[2], a.machines, where[3])
            said = f": about {duration(a.expected.seconds)} and {a.expected.memory / 2**30:.2g} GiB"
            said += f"{'' if a.expected.fits else ', more than is free here'}, {HOWS[a.expected.how]}"
    a.began, a.processor, a.loaded = time.perf_counter(), time.process_time(), model is not None
    if a.dry_run:
        a.expectation = {"model": place.removesuffix("."), "runs": what, "expected": expected_record(a)}
    else:
        announce(a, f"{place} {what}{said}.")


def conclude(a: Session, result: dict[str, Any]) -> dict[str, Any]:
    """Say how long it took beside what was expected, and return the result with both as fields."""
    if a.began is None:
        return result
    from ..cost.price import duration

    seconds, processor, expected = time.perf_counter() - a.began, time.process_time() - a.processor, a.expected
    comparison = "" if expected is None else f"; expected {duration(expected.seconds)}"
    loaded = " and the loading of the model" if a.loaded else ""
    announce(a, f"took {duration(seconds)} without the start of the program{loaded}{comparison}.")
    before = expected_record(a)
    before = before and {name: value for name, value in before.items() if name != "fits"}
    from ..execution.processes import EXCHANGED

    return {**result, "expected": before, "took": {"seconds": seconds, "processor": processor, "sent": EXCHANGED.bytes}}


def expected_record(a: Session) -> dict[str, Any] | None:
    """Return the expected cost as fields; None where nobody knows it."""
    names = ("seconds", "memory", "how", "forwards", "fits")
    return None if a.expected is None else {name: getattr(a.expected, name) for name in names}
