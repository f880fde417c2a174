"""Finished cells of a grid: one file each, written atomically, so that a run that was stopped goes on.

Several processes may share a folder: each takes the cells of its part, and whoever comes last finds all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CorruptFile, InvalidInput
from ..records import digest, dumps, write_text

T = TypeVar("T")


class NotThisWorker(Exception):
    """Another part of the grid makes this cell."""


class Cells:
    """A folder of cells.

    Args:
        folder: Where they lie; None keeps them in memory.
        part: ``(i, n)``: this process measures every n-th cell, beginning with the i-th (from 1).
    """

    def __init__(self, folder: Path | str | None, part: tuple[int, int] = (1, 1)) -> None:
        if not 1 <= part[0] <= part[1]:
            raise InvalidInput(f"The part is {part[0]}/{part[1]}.", "It is I/N with 1 <= I <= N.", "Write for example 1/4.")
        self.folder = None if folder is None else Path(folder)
        self.part, self.made, self.kept = part, 0, 0
        self._turns: dict[str, int] = {}  # of keys that were missing when they were asked for first
        self._left: set[str] = set()
        self._memory: dict[str, dict[str, Any]] = {}
        self._took: dict[str, float] = {}

    def get(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
        """The cell of a key: read, or made and kept; None where another process is to make it.

        Raises:
            CorruptFile: A file that is not the cell of this key.
        """
        name = digest(key)
        found = self._memory.get(name) or self._read(name, key)
        if found is not None:
            self.kept += 1
            self._left.discard(name)
            return found
        if self._turns.setdefault(name, len(self._turns)) % self.part[1] != self.part[0] - 1:
            self._left.add(name)
            return None
        started = time.process_time()
        found = dict(make())
        self._memory[name], self._took[name] = found, time.process_time() - started
        self.made += 1
        self._left.discard(name)
        if self.folder is not None:
            write_text(
                self.folder / f"{name}.json", dumps({"key": key, "cell": found, "seconds": self._took[name]}), overwrite=True
            )
        return found

    @property
    def missing(self) -> int:
        """Cells that were asked for and left to other parts."""
        return len(self._left)

    @property
    def seconds(self) -> float:
        """Processor time that the cells which were used took, also where they were found."""
        return sum(self._took.values())

    def own(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The cell of a key: read, or made and kept.

        Raises:
            NotThisWorker: Another part makes it.
            CorruptFile: A file that is not the cell of this key.
        """
        found = self.get(key, make)
        if found is None:
            raise NotThisWorker(f"{self.part[0]}/{self.part[1]}")
        return found

    def here(self, make: Callable[[], T]) -> T | None:
        """What is made of cells; None where another part makes one of them."""
        try:
            return make()
        except NotThisWorker:
            return None

    def check(self) -> None:
        """Go on where every cell that was asked for is there.

        Raises:
            NotThisWorker: Another part makes one of them.
        """
        if self.missing:
            raise NotThisWorker(f"{self.made} cells made, {self.kept} found, {self.missing} left to other parts")

    def need(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The cell of a key, made here in any case.

        Raises:
            CorruptFile: A file that is not the cell of this key.
        """
        part, self.part = self.part, (1, 1)
        try:
            return self.get(key, make) or {}
        finally:
            self.part = part

    def _read(self, name: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        path = None if self.folder is None else self.folder / f"{name}.json"
        if path is None or not path.is_file():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["key"] != json.loads(dumps(key)):
                raise CorruptFile(f"{path} is the cell of something else.", "", "Remove it.")
            self._memory[name], self._took[name] = record["cell"], float(record.get("seconds", 0.0))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFile(f"{path} is not a cell ({error!r}).", "", "Remove it; it is measured again.") from error
        return self._memory[name]


def parse_part(text: str) -> tuple[int, int]:
    """``I/N`` as two numbers.

    Raises:
        InvalidInput: It does not parse.

    >>> parse_part("2/4")
    (2, 4)
    """
    first, _, second = text.partition("/")
    if not (first.isdigit() and second.isdigit()):
        raise InvalidInput(f"--part {text} is not I/N.", "", "Write for example 1/4.")
    return int(first), int(second)
