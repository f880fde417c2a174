"""Rows of local files: a text, or an object with named columns. What the columns mean is said elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, MissingDependency, NotFound

LONGEST = 1024  # tokens of a row of text to train on where no cutoff is named, as TRL has it
Row = str | dict[str, Any]
Placed = tuple[str, Any]  # a row and its place in the file


def is_local(name: str) -> bool:
    """Whether a name means a file or folder here, not a hub dataset."""
    return Path(name).expanduser().exists() or name.startswith(("/", "./", "../", "~")) or Path(name).suffix in _READERS


def read_rows(name: str) -> Iterator[tuple[Row, str]]:
    """Rows of a file or of all files of a folder, each with the place where it stands: ``line 7 of chat.jsonl``."""
    path = Path(name).expanduser()
    known = f"Known endings are {', '.join(_READERS)}."
    files = sorted(f for f in path.rglob("*") if f.suffix in _READERS and f.is_file()) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        missing = f"{path} holds no text file." if path.is_dir() else f"There is no text file {path}."
        raise NotFound(missing, known, "Check the path.")
    if files[0].suffix not in _READERS:
        raise InvalidInput(f"{path} ends with {path.suffix!r}.", known, "Convert it.")
    for file in files:
        rows = _READERS[file.suffix](file)
        if not any(r.strip() if isinstance(r, str) else r for _, r in rows):
            raise InvalidInput(f"{file} holds no text.", "At least one non-empty document is needed.", "Give another file.")
        for place, row in rows:
            where = f"{place} of {file}" if place else str(file)
            if not isinstance(row, (str, dict)):
                told = f"{where[:1].upper()}{where[1:]} is {row!r:.40}."
                raise InvalidInput(told, "A row is a text or an object with one.", "Correct the file.")
            yield row, where


def _plain(path: Path) -> list[Placed]:
    return [("", path.read_text(encoding="utf-8", errors="replace"))]


def text_of_file(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 ({error}).", "", "Convert it to UTF-8.") from error


def json_lines(path: Path) -> list[Any]:
    """The values of a file with one JSON value a line; empty lines are left out."""
    return [row for _, row in _lines(path)]


def _lines(path: Path) -> list[Placed]:
    """The same, each with its line."""
    rows = list[Placed]()
    for number, line in enumerate(text_of_file(path).split("\n"), 1):  # JSON strings may hold U+2028: splitlines() cuts there
        if line.strip():
            try:
                rows.append((f"line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                told = f"Line {number} of {path} is not JSON ({error})."
                raise InvalidInput(told, "", "Correct or drop the line.") from error
    return rows


def _json(path: Path) -> list[Placed]:
    try:
        rows = json.loads(text_of_file(path))
    except (ValueError, RecursionError):
        return _lines(path)
    return _counted(rows) if isinstance(rows, list) else [("", rows)]


def _counted(rows: list[Any]) -> list[Placed]:
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def _parquet(path: Path) -> list[Placed]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependency("Parquet files need pyarrow.", "", "pip install pyarrow (datasets brings it).") from error
    try:
        return _counted(parquet.read_table(path).to_pylist())
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} does not read as Parquet ({error}).", "", "Write the file again.") from error


_READERS = {
    **dict.fromkeys((".txt", ".md", ".py", ".raw", ".tokens"), _plain),
    ".jsonl": _lines,
    ".json": _json,
    ".parquet": _parquet,
}
