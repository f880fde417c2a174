"""Scores that come with the shapes of their blocks, so that no model is needed: CSV, JSON or npy.

Every row is one weight matrix: ``name``, ``score``, ``d_in``, ``d_out``. No torch.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import CorruptFile, InvalidInput
from ..records import Block, Module
from ..scores import Scores
from ..storage import reading

COLUMNS = ("name", "score", "d_in", "d_out")
_AT_ONCE = 1 << 15


class _Row(msgspec.Struct, gc=False):
    name: reading.Name
    score: float
    d_in: reading.Size
    d_out: reading.Size


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    name: list[reading.Name]
    score: list[float]
    d_in: list[reading.Size]
    d_out: list[reading.Size]


def scores_with_shapes(path: Path | str) -> Scores:
    """Read scores and shapes of weight matrices, each a block of its own.

    Args:
        path: ``.csv`` with the columns ``name, score, d_in, d_out`` (others are left out), ``.npy`` with an array of these four
            fields (names as text), or ``.json``: a list of ``{name, score, d_in, d_out}`` or one object of four lists.

    Returns:
        Scores, larger = deserves more capacity, in arbitrary units. They name no model, so plans from them are not checked
        against one.

    Raises:
        NotFound: No such file.
        CorruptFile: It does not parse, or a column is missing.
        InvalidInput: A name that comes twice, a score that is not finite, or a size that is no whole number of at least 1.
    """
    path = Path(path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise InvalidInput(f"{path} ends with {path.suffix!r}.", f"It is {', '.join(_READERS)}.", "Convert it to one of these.")
    reading.check_ordinary(path, "scores")
    names, columns = read(path)
    lengths = {len(names), *(len(c) for c in columns.values())}
    if lengths == {0} or len(lengths) != 1:
        raise CorruptFile(f"{path} has columns of {sorted(lengths)} rows.", "Each has the same number.", "Repair it.")
    if not all(names):
        raise InvalidInput(f"{path} has a row without a name.", "Every matrix has one.", "Name it.")
    score = columns["score"]
    if not np.isfinite(score).all():
        k = int(np.argmin(np.isfinite(score)))
        raise InvalidInput(f"The score of {names[k]} in {path} is {score[k]}.", "Scores are finite.", "Correct or drop it.")
    sides = {side: _whole(columns[side], names, side, path) for side in ("d_in", "d_out")}
    blocks = tuple(
        Block(name=n, modules=(Module(name=n, d_in=d_in, d_out=d_out),))
        for n, d_in, d_out in zip(names, sides["d_in"].tolist(), sides["d_out"].tolist(), strict=True)
    )
    return Scores(
        estimator="imported", unit="arbitrary", gain=(tuple(score.tolist()),), extra={"file": path.name}, blocks=blocks
    )


def _whole(column: np.ndarray, names: list[str], side: str, path: Path) -> np.ndarray:
    """A column of sizes.

    Raises:
        InvalidInput: Says which is none.
    """
    good = (column >= 1) & (column <= 1 << 31) & (column == np.floor(column))
    if not good.all():
        k = int(np.argmin(good))
        raise InvalidInput(f"{side} of {names[k]} in {path} is {column[k]}.", "A size is a whole number from 1.", "Correct it.")
    return column.astype(np.int64)


def _from_csv(path: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    names: list[str] = []
    parts: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS[1:]}
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:  # spreadsheets put a byte order mark first
            rows = csv.reader(handle)
            head = next(rows, [])
            _check_columns(head, path)
            places = [head.index(name) for name in COLUMNS]
            while some := [row for row in itertools.islice(rows, _AT_ONCE) if row]:
                names.extend(row[places[0]] for row in some)
                for name, place in zip(COLUMNS[1:], places[1:], strict=True):
                    parts[name].append(np.array([float(row[place]) for row in some]))
    except (UnicodeDecodeError, csv.Error, ValueError, IndexError) as error:
        raise CorruptFile(f"{path} does not read as CSV of names and numbers ({error}).", "", "Repair it.") from error
    return names, {name: np.concatenate(found) if found else np.zeros(0) for name, found in parts.items()}


def _from_json(path: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    found: Any = reading.read(path, "scores", as_type=list[_Row] | _Table, remedy="Give name, score, d_in and d_out.")
    if isinstance(found, _Table):
        return found.name, {name: np.array(getattr(found, name), dtype=np.float64) for name in COLUMNS[1:]}
    return [r.name for r in found], {
        name: np.array([getattr(r, name) for r in found], dtype=np.float64) for name in COLUMNS[1:]
    }


def _from_npy(path: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    found = reading.read_array(path, "scores")
    _check_columns(found.dtype.names or (), path)
    if found["name"].dtype.kind not in "SU" or any(found[n].dtype.kind not in "fiu" for n in COLUMNS[1:]):
        raise CorruptFile(f"{path} has fields of {found.dtype}.", "name is text, the others are numbers.", "Save it so.")
    names = found["name"].reshape(-1)
    texts = np.char.decode(names, "utf-8", "replace") if names.dtype.kind == "S" else names
    return texts.tolist(), {name: np.array(found[name], dtype=np.float64).reshape(-1) for name in COLUMNS[1:]}


def _check_columns(found: Any, path: Path) -> None:
    """Refuse a table without one of the four columns.

    Raises:
        CorruptFile: Says which.
    """
    missing = [name for name in COLUMNS if name not in found]
    if missing:
        raise CorruptFile(
            f"{path} has no column {', '.join(missing)} ({', '.join(found) or 'none at all'}).",
            f"Without a model, scores come with shapes: {', '.join(COLUMNS)}.",
            "Add it, or bring the scores to a model: layerbudget score MODEL --import FILE.",
        )  # fmt: skip


_READERS: Mapping[str, Callable[[Path], tuple[list[str], dict[str, np.ndarray]]]] = {
    ".csv": _from_csv, ".json": _from_json, ".npy": _from_npy,
}  # fmt: skip
