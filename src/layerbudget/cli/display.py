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
    from ..cost.price import Cost
    from ..cost.work import WorkItem

ROWS = 400  # of a table: drawing a million takes minutes
FEW = 15  # of a table that was not asked for
EVERY = 60.0  # seconds between two lines of progress where nothing can be drawn


def terminal(*, stderr: bool = True) -> Console:
    """Return a console that prints sentences as they are: brackets are no markup, and lines are not broken."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def ending(verdict: str, follows: str | None) -> dict[str, Any]:
    """Return the last two lines of a verb as fields of what it prints."""
    return {"verdict": verdict.removeprefix("Verdict: "), "next": follows}


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Width of every column: lines are broken between words where the room is short, and never inside one."""
    whole = [max(map(len, column)) for column in columns]
    least = [max((len(word) for text in column for word in text.split()), default=1) for column in columns]
    widths, spare = list(least), max(0, room - sum(least))
    for place in sorted(range(len(columns)), key=lambda i: whole[i] - least[i]):
        more = min(spare, whole[place] - least[place])
        widths[place], spare = widths[place] + more, spare - more
    return widths


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


def of_each(part: Share) -> str:
    """Return what one of several processes holds and does, and what takes longest, in a sentence."""
    from ..cost.price import duration

    longest = f"{part.limit}, {duration(part.seconds)}" if part.seconds else part.limit
    return (
        f"Each of {part.machines} processes: {part.sequences} sequences, {part.memory / 2**30:.2g} GiB, "
        f"{part.operations / 1e12:.3g} x 10^12 operations, {part.read / 2**30:.3g} GiB of weights read, "
        f"{part.sent / 2**20:.3g} MiB exchanged. The limit is {longest}."
    )


def named_text(source: str, flag: str = "--data") -> str:
    """Return the name of a text, and what it is where nobody named another."""
    return f"stdlib (Python's standard library; {flag} names another text)" if source == "stdlib" else source


class Display:
    """Output of one command, by the options of its request: what it says, and what it takes.

    Attributes:
        request: Options of the command.
        verb: Its first word.
        console: Where sentences and tables go.
        expected: What it is expected to cost; None where nobody knows it.
        each: What each of several processes would do of it, where that is asked.
        expectation: What a dry run says.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.verb: str = request.command.split()[0]
        self.console = terminal(stderr=request.json)
        self.expected: Cost | None = None
        self.each: Share | None = None
        self.expectation: dict[str, Any] | None = None
        self._began: float | None = None  # when the work began
        self._processor = 0.0  # seconds of the processor until then
        self._loaded = False  # whether the expected cost is without the loading of a model

    def say(self, *sentences: str) -> None:
        """Print sentences, one a line."""
        for sentence in sentences:
            self.console.print(sentence)

    def announce(self, sentence: str) -> None:
        """Print on stderr what is about to run, unless ``--quiet``."""
        if not self.request.quiet:
            terminal().print(sentence, style="dim")

    def command(self, *words: str) -> str:
        """Return another command as it is typed; what this one ran first, that one has too."""
        plugins = [word for file in self.request.plugin for word in ("--plugin", file)]
        return shlex.join(["layerbudget", *map(str, words), *plugins])

    def follow(self, *words: str) -> str:
        """Print the command that follows, the last line of a verb, and return it."""
        command = self.command(*words)
        self.say(f"Next: {command}")
        return command

    def show(self, title: str, head: Sequence[str], rows: Iterable[Any], cells: Callable[[Any], Sequence[Any]] = tuple) -> None:
        """Print a table that a person may read; a long one loses its middle, and ``--table`` shows it."""
        if self.request.json and not self.console.is_terminal:
            return
        from rich.table import Table

        rows = rows if isinstance(rows, Sequence) else list(rows)
        most = ROWS if self.request.table else FEW
        left_out = len(rows) - most
        shown = [cells(row) for row in (rows if left_out <= 0 else [*rows[: most // 2], *rows[-(most // 2) :]])]
        if left_out > 0:
            left_out = len(rows) - len(shown)
            note = f"... {left_out:,} more" + ("" if most == ROWS else ": --table")
            shown.insert(most // 2, (note, *[""] * (len(head) - 1)))
        texts = [
            [f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v) for v in row] for row in shown
        ]
        columns = [(name, *(row[place] for row in texts)) for place, name in enumerate(head)]
        table = Table(title=title, title_justify="left")
        for name, width in zip(head, _widths(columns, self.console.width - 3 * len(head) - 1), strict=True):
            table.add_column(name, min_width=width, max_width=width)
        for row in texts:
            table.add_row(*row)
        self.console.print(table)

    def share(self, model: Any, blocks: Sequence[Any]) -> None:
        """Say which share of the matrices the blocks hold, where that is not nearly all."""
        from ..models.blocks import ENOUGH, left_out, share_held

        share = share_held(model, blocks)
        if share < ENOUGH:
            rest = left_out(model, blocks)
            self.say(
                f"The blocks hold {share:.1%} of the matrices' weights (embeddings and output head aside). Left as they are: "
                f"{len(rest)} tensors, first {next(iter(rest))}.",
            )

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[Callable[..., None] | None]:
        """Yield a callback ``(done, total, phase)`` that shows how far a command is, or nothing with ``--quiet``.

        It is told of zero steps when everything was checked and the work begins: there ``--dry-run`` ends.
        """
        if self.request.dry_run:
            yield lambda *_: self._end_dry_run()
            return
        if self.request.quiet:
            yield None
            return
        shown = Progress(text)
        with shown.bar:
            yield shown

    # --- what it takes ---

    def expect(self, what: str, model: Any = None, parts: Sequence[WorkItem] = ()) -> None:
        """Say model, device, precision, expected time and memory in one line on stderr, and begin the clock.

        Called once the model is loaded, before the work. A second call (another model of the same run) says only what was
        loaded.

        Args:
            what: What will be done, and on which text.
            model: As it was loaded; None where each part of the work loads its own.
            parts: What the command does, of :mod:`layerbudget.cost.work`; none where nobody knows what it costs.
        """
        from ..cost.machines import share_of
        from ..cost.price import HOWS, duration, place_of, price
        from ..errors import UnknownStructure
        from ..models.precision import describe_place

        request = self.request
        if request.quiet and not request.json and not request.dry_run:
            return
        place = request.model if model is None else f"{request.model}: {describe_place(model)}."
        if self._began is not None:
            self.announce(place)
            return
        said = ""
        with contextlib.suppress(UnknownStructure):  # no layers that could be counted
            if parts:
                text = max((p.text for p in parts), key=lambda t: t.batch)
                where = place_of(model, text)
                self.expected = price(self.verb, parts, *where)
                if request.machines is not None:
                    self.each = share_of(self.verb, parts, where[0], where[1], where[2], request.machines, where[3])
                said = f": about {duration(self.expected.seconds)} and {self.expected.memory / 2**30:.2g} GiB"
                said += f"{'' if self.expected.fits else ', more than is free here'}, {HOWS[self.expected.how]}"
        self._began, self._processor, self._loaded = time.perf_counter(), time.process_time(), model is not None
        if request.dry_run:
            self.expectation = {"model": place.removesuffix("."), "runs": what, "expected": self._expected_record()}
        else:
            self.announce(f"{place} {what}{said}.")

    def conclude(self, result: dict[str, Any]) -> dict[str, Any]:
        """Say how long it took beside what was expected, and return the result with both as fields."""
        if self._began is None:
            return result
        from ..cost.price import duration
        from ..execution.processes import EXCHANGED

        seconds, processor = time.perf_counter() - self._began, time.process_time() - self._processor
        comparison = "" if self.expected is None else f"; expected {duration(self.expected.seconds)}"
        loaded = " and the loading of the model" if self._loaded else ""
        self.announce(f"took {duration(seconds)} without the start of the program{loaded}{comparison}.")
        before = self._expected_record()
        before = before and {name: value for name, value in before.items() if name != "fits"}
        return {**result, "expected": before, "took": {"seconds": seconds, "processor": processor, "sent": EXCHANGED.bytes}}

    def _expected_record(self) -> dict[str, Any] | None:
        """The expected cost as fields; None where nobody knows it."""
        names = ("seconds", "memory", "how", "forwards", "fits")
        return None if self.expected is None else {name: getattr(self.expected, name) for name in names}

    # --- a dry run ---

    def _end_dry_run(self) -> None:
        """End the command: say what would be read, run and written."""
        request = self.request
        expectation = self.expectation or {"model": request.model, "runs": self.verb, "expected": None}
        writes = [path for name in ("out", "save_scores", "resume") if (path := getattr(request, name, None))]
        files = request.reads()
        known, cost = expectation["expected"], "its cost is not known"
        if known is not None:
            from ..cost.price import HOWS, duration

            memory = f"{known['memory'] / 2**30:.2g} GiB{'' if known['fits'] else ', more than is free here'}"
            passes = f"{known['forwards']:.3g} forward equivalents, about {duration(known['seconds'])}"
            cost = f"{passes} and {memory}, {HOWS[known['how']]} (expect a factor of two)"
        self.say(
            f"Would read: {', '.join([expectation['model'], *files])}.",
            f"Would run: {expectation['runs']}: {cost}.",
            *([of_each(self.each)] if self.each is not None else []),
            f"Would write: {', '.join(writes) or 'nothing'}.",
            "Nothing was run or written: the same command without --dry-run does it.",
        )
        result = {"reads": [expectation["model"], *files], "runs": expectation["runs"], "writes": writes, "expected": known}
        if self.each is not None:
            result["share"] = dataclasses.asdict(self.each)
        raise DryRun({"dry_run": True, **result})

    @contextlib.contextmanager
    def nothing_written(self) -> Iterator[None]:
        """Remove what a dry run has begun to write, and empty folders of a refused run: both are made before the work."""
        paths = [Path(path) for name in ("out", "resume") if (path := getattr(self.request, name, None))]
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
            for path in new if self.request.dry_run else ():
                if path.is_dir():
                    shutil.rmtree(path)
