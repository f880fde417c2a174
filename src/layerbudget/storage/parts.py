"""Finished parts of a long run, so that a run that was stopped continues with what it had.

A part is a file ``NAME.CHECKSUM.SUFFIX`` beside ``resume.json``. The checksum is keyed with the digest of the request, which is
everything that changes a number: a part of another request, a truncated one and one with a flipped bit all fail it, and are
made again. Nothing but such files is ever read or removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CorruptFile, InvalidInput, ModelMismatch
from . import folders, reading
from .writing import check_writable, new_file, real, sweep, whole, write_text

logger = logging.getLogger(__name__)

STATE = "resume.json"
_NONE = "0" * 32
_PART = re.compile(r"([A-Za-z0-9_-]+)\.([0-9a-f]{32})\.(json|npy|npz|safetensors)")


class Parts:
    """The parts of one run.

    Args:
        folder: Where; ``None`` keeps nothing.
        key: Digest of the request.
        told: The request in words, for people who look into the folder.
        shared: Parts of other requests lie there too: nothing says whose the folder is, and parts that fail are left alone.

        passing: The folder goes with this process, so that nothing is found in it later: no checksums are made.

    Raises:
        ModelMismatch: The folder holds another run.
        InvalidInput: It is no folder, or cannot be written to.
    """

    def __init__(
        self, folder: Path | str | None, key: str, told: Mapping[str, Any] | None = None, *, shared: bool = False,
        passing: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.key, self.passing = None if folder is None else real(folder), key, passing
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
        found = _state(self.folder)
        if found is not None and found != key:
            raise ModelMismatch(
                f"{folder} holds a run with another plan, model, data, method, precision or version.",
                "A run continues only with the same ones.",
                "Choose another folder, or remove it.",
            )
        record = {"schema_version": 1, "key": key, "request": json.loads(json.dumps(told or {}, default=str))}
        write_text(self.folder / STATE, reading.dump(record), overwrite=True)

    def find(self, name: str) -> Path | None:
        """The file of a finished part; ``None`` where there is none that is whole. Broken ones are removed."""
        if self.folder is None:
            return None
        for file, found, total in _parts(self.folder):
            if found != name:
                continue
            if self.passing or file in self._checked or folders.checksum(file, self.key.encode()) == total:
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
            total = _NONE if self.passing else folders.checksum(temporary, self.key.encode())
            file = folder / f"{name}.{total}.{suffix}"
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


def _parts(folder: Path) -> list[tuple[Path, str, str]]:
    found = [(f, _PART.fullmatch(f.name)) for f in sorted(folder.iterdir())]
    return [(f, m[1], m[2]) for f, m in found if m and f.is_file() and not f.is_symlink()]


def _state(folder: Path) -> str | None:
    """Key of the run that a folder holds; ``None`` where that is not known (its parts fail their checksums then)."""
    if not (folder / STATE).exists():
        return None
    try:
        found = reading.read(folder / STATE, "resume", limit=1 << 24)
    except CorruptFile:
        logger.warning("%s is broken; parts that belong to this run are still used.", folder / STATE)
        return None
    key = found.get("key") if isinstance(found, dict) else None
    return key if isinstance(key, str) else None


def clear(folder: Path | str) -> None:
    """Remove the parts of a run whose result has been saved, and the folder where nothing else lies in it."""
    folder = real(folder)
    if not folder.is_dir() or _state(folder) is None:
        return
    for file, _, _ in _parts(folder):
        file.unlink(missing_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    sweep(folder)
    try:
        folder.rmdir()
    except OSError:
        logger.info("%s holds other files too and stays.", folder)
