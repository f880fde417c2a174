"""Rows of local files: a text, or an object with named columns. What the columns mean is said elsewhere.

A folder that ``datasets`` saved (``save_to_disk``) is read as what it is; of any other folder, every file with a known ending.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, LayerbudgetError, MissingDependency, NotFound

logger = logging.getLogger(__name__)

Row = str | dict[str, Any]
_SAVED = ("state.json", "dataset_dict.json")


class BadRows:
    """Treatment of rows that cannot be read: they are refused, or left out (``skip``) and counted."""

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.found: list[LayerbudgetError] = []

    def refuse(self, error: LayerbudgetError) -> None:
        """Raise the error, which then names the way around it, or keep it."""
        if not self.skip:
            remedy = f"{error.remedy} Or leave such rows out: --skip-bad-rows.".strip()
            raise type(error)(error.what, error.feasible, remedy) from error.__cause__
        self.found.append(error)

    def say(self, kept: int) -> None:
        """Say how many rows were left out, and why the first one was."""
        if self.found:
            total = kept + len(self.found)
            logger.warning(
                "%d of %d rows cannot be read and are left out. The first: %s", len(self.found), total, self.found[0].what
            )


def is_local(name: str) -> bool:
    """Whether a name means a file or folder here, not a hub dataset."""
    return Path(name).expanduser().exists() or name.startswith(("/", "./", "../", "~")) or Path(name).suffix in _READERS


def read_rows(name: str, *, group: str = "calibration", bad: BadRows | None = None) -> Iterator[tuple[Row, str]]:
    """Rows of a file or folder, each with the name of its file.

    Args:
        name: A file, a folder of files, or a folder that ``datasets`` saved.
        group: ``calibration`` or ``evaluation``: which split of a saved dataset that has several.
        bad: What happens to a row that does not parse (default: it is refused).

    Raises:
        NotFound: Nothing is there.
        InvalidInput: An unknown ending, or content that does not parse.
        MissingDependency: ``datasets`` or ``pyarrow`` is needed and not installed.
    """
    path = Path(name).expanduser()
    if path.is_dir() and any((path / f).is_file() for f in _SAVED):
        yield from ((row, str(path)) for row in _saved(path, group))
        return
    known = f"Known endings are {', '.join(_READERS)}."
    files = sorted(f for f in path.rglob("*") if f.suffix in _READERS and f.is_file()) if path.is_dir() else [path]
    if not files:
        raise NotFound(f"{path} holds no text file.", known, "Name a file.")
    if not files[0].is_file():
        raise NotFound(f"There is no text file {path}.", known, "Check the path.")
    if files[0].suffix not in _READERS:
        raise InvalidInput(f"{path} ends with {path.suffix!r}.", known, "Convert it.")
    for file in files:
        rows = _READERS[file.suffix](file, bad or BadRows())
        if not any(r.strip() if isinstance(r, str) else r for r in rows):
            raise InvalidInput(f"{file} holds no text.", "At least one non-empty document is needed.", "Give another file.")
        yield from ((row, str(file)) for row in rows)


def _saved(path: Path, group: str) -> list[dict[str, Any]]:
    """Rows of a dataset that ``save_to_disk`` wrote; of several splits the one that fits the purpose."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(f"{path} needs the package datasets.", "", "pip install datasets.") from error
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} does not read as a saved dataset ({error}).", "", "Save it again.") from error
    if isinstance(found, datasets.DatasetDict):
        order = ("test", "validation", "train") if group == "evaluation" else ("train", "validation", "test")
        found = found[next((s for s in order if s in found), next(iter(found)))]
    return list(found.to_list())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 ({error}).", "", "Convert it to UTF-8.") from error


def _plain(path: Path, _: BadRows) -> list[Row]:
    return [path.read_text(encoding="utf-8", errors="replace")]


def _row(row: Any, path: Path) -> Row:
    if not isinstance(row, (str, dict)):
        raise InvalidInput(f"A row of {path} is {row!r:.40}.", "A row is a text or an object with one.", "Correct the file.")
    return row


def _json_lines(path: Path, bad: BadRows) -> list[Row]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), 1):  # JSON strings may hold U+2028, at which splitlines() cuts
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line), path))
        except InvalidInput as error:
            bad.refuse(error)
        except (ValueError, RecursionError) as error:
            bad.refuse(InvalidInput(f"Line {number} of {path} is not JSON ({error}).", "", "Correct or drop the line."))
    return rows


def _json(path: Path, bad: BadRows) -> list[Row]:
    try:
        rows = json.loads(_text(path))
    except (ValueError, RecursionError):
        return _json_lines(path, bad)
    return [_row(row, path) for row in (rows if isinstance(rows, list) else [rows])]


def _parquet(path: Path, _: BadRows) -> list[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependency("Parquet files need pyarrow.", "", "pip install pyarrow (datasets brings it).") from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} does not read as Parquet ({error}).", "", "Write the file again.") from error


_READERS = {
    **dict.fromkeys((".txt", ".md", ".py", ".raw", ".tokens"), _plain),
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}
