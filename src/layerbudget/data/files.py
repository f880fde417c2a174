"""Rows of local files and folders: a text, or an object with named columns. What the columns mean is said elsewhere.

A file may be compressed (.gz, .bz2, .xz, .zst). Which files of a folder are rows: :mod:`layerbudget.data.folders`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, MissingDependency, NotFound
from ..storage import reading
from . import folders

LONGEST = 1024  # tokens of a row of text to train on where no cutoff is named, as TRL has it
Row = str | dict[str, Any]
Placed = tuple[str, Any]  # a row and its place in the file
_JSON = json.JSONDecoder(object_pairs_hook=reading.once)
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")


def is_local(name: str) -> bool:
    """Whether a name means a file or folder here, not a hub dataset."""
    path = Path(name).expanduser()
    return path.exists() or name.startswith(("/", "./", "../", "~")) or folders.ending(path)[0] in ENDINGS


def parts_of(source: str) -> list[str]:
    """The names that a source gives: itself where there is such a file or folder, else what stands between its commas."""
    if os.path.exists(os.path.expanduser(source)):  # of a list of many names a Path says that it is too long
        return [source]
    return [part.strip() for part in source.split(",") if part.strip()]


def read_rows(name: str, group: str = "calibration") -> Iterator[tuple[Row, str]]:
    """Rows of a file or of the files of a folder, each with the place where it stands: ``line 7 of chat.jsonl``.

    Of a folder with splits, ``calibration`` reads those to learn from and ``evaluation`` those to test on.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = folders.files_of(path, group)
    elif path.is_file():
        files = [_known(path)]
    else:
        raise NotFound(f"There is no text file {path}.", _endings(), "Check the path.")
    texts = 0
    for file in files:
        rows = rows_of_file(file)
        if not any(r.strip() if isinstance(r, str) else r for _, r in rows):
            if len(files) > 1:
                folders.say_once(f"{file} holds no text and is left out.")
                continue
            raise InvalidInput(f"{file} holds no text.", "At least one non-empty document is needed.", "Give another file.")
        for place, row in rows:
            where = f"{place} of {file}" if place else str(file)
            if not isinstance(row, (str, dict)):
                problem = f"{where[:1].upper()}{where[1:]} is {row!r:.40}."
                raise InvalidInput(problem, "A row is a text or an object with one.", "Correct the file.")
            texts += 1
            yield row, where
    if not texts:
        raise InvalidInput(f"{path} holds no text.", "At least one non-empty document is needed.", "Give another folder.")


def rows_of_file(file: Path) -> list[Placed]:
    """The rows of one file, by its ending."""
    return ENDINGS[folders.ending(_known(file))[0]](file)


def _endings() -> str:
    return f"Known endings are {', '.join(ENDINGS)}, also compressed ({', '.join(folders.COMPRESSED)})."


def _known(path: Path) -> Path:
    end, packed = folders.ending(path)
    if end in ENDINGS:
        return path
    if path.suffix.lower() in _ARCHIVES or ".tar" in path.suffixes:
        raise InvalidInput(f"{path} is an archive.", "Files and folders are read, and files that are compressed.", "Unpack it.")
    raise InvalidInput(f"{path} ends with {end + packed!r}.", _endings(), "Convert it.")


# --- bytes and text ---------------------------------------------------------------------------------------------------------


def _bytes(path: Path) -> bytes:
    """The bytes of a file, unpacked where it is compressed."""
    packed = folders.ending(path)[1]
    try:
        return _UNPACKED[packed](path.read_bytes()) if packed else path.read_bytes()
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        problem = f"{path} does not unpack ({error})." if packed else f"{path} does not read ({error})."
        raise InvalidInput(problem, "", "Write the file again.") from error


def _zstd(packed: bytes) -> bytes:
    pyarrow = _pyarrow("Files compressed by zstd (.zst)")
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream:
        return bytes(stream.read())


_UNPACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _zstd,
}


def text_of_file(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    try:
        text = _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 ({error}).", "", "Convert it to UTF-8.") from error
    if (count := text.count("\0")) > 0:
        problem = f"{path} has the character NUL {count:,} times, as UTF-16 without a mark and binary files do."
        raise InvalidInput(problem, "No text has any.", "Convert it to UTF-8, or delete them.")
    return text


def _plain(path: Path) -> list[Placed]:
    return [("", text_of_file(path).replace("\r\n", "\n"))]


# --- tables -----------------------------------------------------------------------------------------------------------------


def json_lines(path: Path) -> list[Any]:
    """The values of a file with one JSON value a line; empty lines are left out."""
    return [row for _, row in _lines(path)]


def _lines(path: Path) -> list[Placed]:
    """The same, each with its line."""
    rows = list[Placed]()
    for number, line in enumerate(text_of_file(path).split("\n"), 1):  # JSON strings may hold U+2028: splitlines() cuts there
        if line.strip():
            try:
                rows.append((f"line {number}", _JSON.decode(line)))
            except reading.DoubledKey as error:
                problem = f"Line {number} of {path} has the key {error.key} twice."
                raise InvalidInput(problem, "", "Keep one of the two.") from error
            except (ValueError, RecursionError) as error:
                problem = f"Line {number} of {path} is not JSON ({error})."
                raise InvalidInput(problem, "", "Correct or drop the line.") from error
    return rows


def _json(path: Path) -> list[Placed]:
    try:
        rows = _JSON.decode(text_of_file(path))
    except InvalidInput:
        raise
    except reading.DoubledKey as error:
        raise InvalidInput(f"{path} has the key {error.key} twice.", "", "Keep one of the two.") from error
    except (ValueError, RecursionError):
        return _lines(path)
    return _counted(rows) if isinstance(rows, list) else [("", rows)]


def _counted(rows: list[Any]) -> list[Placed]:
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def _table(path: Path) -> list[Placed]:
    """Rows of a table with a line of names; a cell that is not there is null."""
    tabs = folders.ending(path)[0] == ".tsv"
    csv.field_size_limit(1 << 30)
    table = csv.DictReader(io.StringIO(text_of_file(path), newline=""), delimiter="\t" if tabs else ",", strict=True)
    try:
        rows = [(f"line {table.line_num}", row) for row in table]
    except csv.Error as error:
        problem = f"Line {table.line_num} of {path} does not parse ({error})."
        raise InvalidInput(problem, "Cells with quotes or line breaks stand in quotes.", "Write the file again.") from error
    names = table.fieldnames or []
    if len(names) == 1 and not tabs and ";" in names[0]:
        raise InvalidInput(f"{path} is separated by semicolons.", "A .csv file has commas.", "Write it with commas.")
    if len(set(names)) < len(names):
        raise InvalidInput(f"{path} has two columns of one name: {', '.join(names)}.", "", "Rename one.")
    wide = next((place for place, row in rows if None in row), None)
    if wide is not None:
        raise InvalidInput(f"{wide[:1].upper()}{wide[1:]} of {path} has more cells than names.", "", "Put it into quotes.")
    return list(rows)


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependency(f"{what} need pyarrow.", "", "pip install pyarrow (datasets brings it).") from error
    return pyarrow


def _parquet(path: Path) -> list[Placed]:
    pyarrow = _pyarrow("Parquet files")
    import pyarrow.parquet as parquet

    return _arrow_rows(path, "Parquet", lambda: parquet.read_table(pyarrow.BufferReader(_bytes(path))))


def _arrow(path: Path) -> list[Placed]:
    """An Arrow file: a stream, as ``datasets`` writes it, or a file that can be read at any place."""
    pyarrow = _pyarrow("Arrow files")

    def read() -> Any:
        packed = _bytes(path)
        opened = pyarrow.ipc.open_file if packed.startswith(b"ARROW1") else pyarrow.ipc.open_stream
        return opened(pyarrow.BufferReader(packed)).read_all()

    return _arrow_rows(path, "Arrow", read)


def _arrow_rows(path: Path, what: str, read: Callable[[], Any]) -> list[Placed]:
    try:
        table = read()
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} does not read as {what} ({error}).", "", "Write the file again.") from error
    rows, names = table.to_pylist(), _class_names(table.schema.metadata)
    for column in names.keys() & set(table.column_names):
        known = names[column]
        for row in rows:
            if isinstance(row[column], int) and 0 <= row[column] < len(known):
                row[column] = known[row[column]]
    return _counted(rows)


def _class_names(metadata: Any) -> dict[str, list[str]]:
    """Names of the labels by column, as ``datasets`` writes its ClassLabel into a table."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    except ValueError:
        return {}
    return {
        k: f["names"] for k, f in features.items() if isinstance(f, dict) and f.get("_type") == "ClassLabel" and f.get("names")
    }


ENDINGS: dict[str, Callable[[Path], list[Placed]]] = {
    **dict.fromkeys(folders.TEXTS, _plain),
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
