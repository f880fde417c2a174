"""Finished parts of a long run, so that a run that was stopped continues with what it had.

A part is a file ``NAME.CHECKSUM.SUFFIX`` beside ``resume.json``. The checksum is keyed with the request, which is everything
that changes a number. A part of another request, a truncated one and one with a flipped bit all fail it, and are made again.
Nothing but such files is ever read or removed, and each appears whole, so a run may be killed at any moment.

:class:`Parts` is the store of one run: ``--resume DIR``. :class:`Cells` is a grid of measurements that several processes share,
each with its ``--part I/N``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..canonical import digest, to_jsonable
from ..errors import AlreadyExists, CorruptFile, InvalidInput, ModelMismatch
from . import folders, reading
from .writing import check_writable, new_file, real, sweep, whole, write_text

logger = logging.getLogger(__name__)

STATE = "resume.json"
GRID = "grid.json"  # the cells of a grid
_PART = re.compile(r"([A-Za-z0-9_-]+)\.([0-9a-f]{32})\.(json|npy|npz|safetensors)")


class Parts:
    """The parts of one run, kept in a folder; with ``None`` nothing is.

    ``request`` is everything that changes a number. A ``shared`` folder holds the parts of several requests.
    """

    def __init__(self, folder: Path | str | None, request: Any = None, *, shared: bool = False) -> None:
        self.folder, self._key = None if folder is None else real(folder), digest(request)
        self._checked: set[Path] = set()
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise InvalidInput(f"{folder} is a file.", "Parts of a run are kept in a folder.", "Choose another folder.")
        check_writable(self.folder / STATE)
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep(self.folder)
        if shared:
            return
        if _key_of(self.folder) not in (None, self._key):
            raise ModelMismatch(
                f"{folder} holds a run with another plan, model, data, method, precision or version.",
                "A run continues only with the same ones.",
                "Choose another folder, or remove it.",
            )
        record = {"schema_version": 1, "key": self._key, "request": to_jsonable(request)}
        write_text(self.folder / STATE, reading.dump(record), overwrite=True)

    def names(self) -> list[str]:
        """Names of all parts, whole or not."""
        return [] if self.folder is None else [name for _, name, _ in _parts(self.folder)]

    def find(self, name: str) -> Path | None:
        """The file of a finished part; ``None`` where there is none that is whole. Broken ones are removed."""
        for file, stored, total in [] if self.folder is None else _parts(self.folder):
            if stored != name:
                continue
            if file in self._checked or folders.checksum(file, self._key.encode()) == total:
                self._checked.add(file)
                return file
            logger.warning("%s is broken, or of another run; it is made again.", file)
            file.unlink(missing_ok=True)
        return None

    def put(self, name: str, suffix: str, save: Callable[[Path], Any]) -> None:
        """Keep a part: ``save`` writes it into the file that it is given."""
        if self.folder is None:
            return
        folder = self.folder

        def place(temporary: Path) -> Path:
            file = folder / f"{name}.{folders.checksum(temporary, self._key.encode())}.{suffix}"
            self._checked.add(file)
            return file

        with whole(folder), new_file(folder, name, place) as temporary:
            save(temporary)

    def json(self, name: str, make: Callable[[], Any]) -> Any:
        """A part made of plain values (numbers exactly, also those that are not finite): the stored one, or a new one."""
        file = self.find(name)
        if file is not None:
            return json.loads(file.read_text(encoding="utf-8"))
        text = json.dumps(make(), ensure_ascii=True)
        self.put(name, "json", lambda path: path.write_text(text, encoding="utf-8"))
        return json.loads(text)  # the same types whether it was stored or not

    def drop(self, prefix: str) -> None:
        """Remove the parts whose names begin so, and the folder where it is empty then."""
        if self.folder is None:
            return
        for file, name, _ in _parts(self.folder):
            if name.startswith(prefix):
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def clear(self) -> None:
        """Remove the parts; see :func:`clear`."""
        if self.folder is not None:
            clear(self.folder)


def clear(folder: Path | str) -> None:
    """Remove the parts of a run whose result has been saved, and the folder where nothing else lies in it."""
    folder = real(folder)
    if not folder.is_dir() or _key_of(folder) is None:
        return
    for file, _, _ in _parts(folder):
        file.unlink(missing_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    sweep(folder)
    try:
        folder.rmdir()
    except OSError:
        logger.info("%s holds other files too and stays.", folder)


def _parts(folder: Path) -> list[tuple[Path, str, str]]:
    matches = [(f, _PART.fullmatch(f.name)) for f in sorted(folder.iterdir())]
    return [(f, m[1], m[2]) for f, m in matches if m and f.is_file() and not f.is_symlink()]


def _key_of(folder: Path) -> str | None:
    """Key of the run that a folder holds; ``None`` where that is not known (its parts fail their checksums then)."""
    if not (folder / STATE).exists():
        return None
    try:
        state = reading.read(folder / STATE, "resume", limit=1 << 24)
    except CorruptFile:
        logger.warning("%s is broken; parts that belong to this run are still used.", folder / STATE)
        return None
    key = state.get("key") if isinstance(state, dict) else None
    return key if isinstance(key, str) else None


class Cells:
    """The cells of a grid, each measured by one of several processes and found by all of them.

    They are kept in a folder, with ``None`` in memory. The process of ``part`` ``(i, n)`` measures every n-th cell, beginning
    with the i-th (from 1). ``made`` counts cells that were measured here, ``kept`` those that an earlier run had left. Where
    they are said to be ``complete``, none is measured.
    """

    def __init__(self, folder: Path | str | None, part: tuple[int, int] = (1, 1), *, complete: bool = False) -> None:
        if not 1 <= part[0] <= part[1]:
            raise InvalidInput(f"The part is {part[0]}/{part[1]}.", "It is I/N with 1 <= I <= N.", "Write for example 1/4.")
        self.part, self.made, self.kept, self._complete = part, 0, 0, complete
        self._parts = Parts(folder, "cells", shared=True)
        self._turns: dict[str, int] = {}  # of keys that were missing when they were asked for first
        self._left: set[str] = set()
        self._memory: dict[str, dict[str, Any]] = {}

    def get(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
        """The cell of a key: read, or made and kept; ``None`` where another process is to make it."""
        name = digest(key)
        file = None if name in self._memory else self._parts.find(name)
        if file is not None:
            self._memory[name] = json.loads(file.read_text(encoding="utf-8"))
            self.kept += 1
        if name in self._memory:
            pass
        elif self._complete:
            raise AlreadyExists("The finished run has no such cell.", "", "Choose another folder.")
        elif self._turns.setdefault(name, len(self._turns)) % self.part[1] != self.part[0] - 1:
            self._left.add(name)
            return None
        else:
            self._memory[name] = self._parts.json(name, lambda: _timed(key, make))
            self.made += 1
        self._left.discard(name)
        return dict(self._memory[name]["cell"])

    def expect(self, keys: Iterable[Mapping[str, Any]], command: str = "") -> None:
        """Leave which cells a grid has, and the command that measures them: :func:`standing_of` reads it."""
        if self._parts.folder is None or self._complete:
            return
        file, cells = self._parts.folder / GRID, sorted({digest(key) for key in keys})
        text = reading.dump({"schema_version": 1, "cells": cells, "made_by": command})
        if not file.is_file() or file.read_bytes() != text.encode():
            write_text(file, text, overwrite=True)

    @property
    def missing(self) -> int:
        """Cells that were asked for and left to other parts."""
        return len(self._left)

    @property
    def seconds(self) -> float:
        """Processor time that the cells which were used took, also where they were found."""
        return sum(cell["seconds"] for cell in self._memory.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a grid is: cells that are there, cells in all (None before they are known), and the command that goes on."""

    done: int
    total: int | None
    command: str


def standing_of(folder: Path | str) -> Standing | None:
    """How far the grid in a folder is; None where the folder holds none."""
    folder = Path(folder)
    names = {name for _, name, _ in _parts(folder)} if folder.is_dir() else set[str]()
    if not (folder / GRID).is_file():
        return Standing(done=0, total=None, command="") if names else None
    record = reading.read(folder / GRID, "grid", as_type=dict[str, Any], remedy="Run the same command again.")
    cells = record.get("cells") or []
    return Standing(done=len(names.intersection(cells)), total=len(cells), command=str(record.get("made_by") or ""))


def _timed(key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    started = time.process_time()
    cell = dict(make())
    return {"key": to_jsonable(key), "cell": to_jsonable(cell), "seconds": time.process_time() - started}


def parse_part(text: str) -> tuple[int, int]:
    """``I/N`` as two numbers.

    >>> parse_part("2/4")
    (2, 4)
    """
    first, _, second = text.partition("/")
    if not (first.isdigit() and second.isdigit()):
        raise InvalidInput(f"--part {text} is not I/N.", "", "Write for example 1/4.")
    return int(first), int(second)
