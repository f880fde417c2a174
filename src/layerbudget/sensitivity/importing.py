"""Scores that someone else computed, from CSV or JSON: for the blocks of a model, or with their own shapes. No torch."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import checked
from ..errors import CorruptFile, InvalidInput, NotFound
from ..records import Block, Module
from ..scores import Scores
from ..storage import reading

COLUMNS = ("name", "score", "d_in", "d_out")
_NAMES, _SCORES = ("name", "block", "layer", "module"), ("score", "gain", "value")
_BESIDE = (*COLUMNS[2:], "standard_error", "noise_floor", "status", "numel", "")  # passed over: Scores.to_pandas() has them
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")
Row = Mapping[str, Any]


@checked
def import_scores(
    path: Path | str,
    blocks: Sequence[Block],
    *,
    orientation: str = "gain",
    estimator: str = "imported",
    model: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores that someone else computed for the blocks of a model.

    Args:
        path: ``.csv`` with the columns ``name`` and ``score``, ``.json`` with ``{name: value}`` or a list of
            ``{name, score}``, or a scores file of this package. Numbers of layers are names too. Columns of shapes, and
            those that :meth:`Scores.to_pandas` has beside the gain, are passed over.
        blocks: The blocks they are meant for. Scores for every single matrix are averaged over each block.
        orientation: ``gain`` (larger = deserves more capacity) or ``redundancy`` (larger = prune more).
        estimator: What to call them.
        model: ``{id, revision, digest}`` of the model they belong to, where known.

    Raises:
        NotFound: No such file.
        CorruptFile: It does not parse, or has a key or a column twice.
        InvalidInput: Another file type, a column that is not read, names missing, doubled or unknown, or values that are not
            finite.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFound(f"There is no scores file at {path}.", "", "Check the path.")
    if path.suffix.lower() == ".json" and '"schema_version"' in path.read_text(encoding="utf-8", errors="replace"):
        return _of_these(Scores.load(path), blocks, path)
    rows = _rows(path)
    name_key, score_key = _column(rows[0], "name", _NAMES, path), _column(rows[0], "score", _SCORES, path)
    _check_columns(rows, (name_key, score_key), path, "Take it out")
    names = [str(row.get(name_key)) for row in rows]
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise InvalidInput(f"{path} scores {name} {times} times.", "", "Give one score per name.")
    values = {n: _number(row.get(score_key), f"score of {n}", path) for n, row in zip(names, rows, strict=True)}
    values = _by_layer(values, blocks, path)
    if set(values) == {m.name for b in blocks for m in b.modules} != {b.name for b in blocks}:  # as AlphaPruning averages
        values = {b.name: float(np.mean([values[m.name] for m in b.modules])) for b in blocks}
    return Scores.from_values(
        blocks,
        values,
        estimator=estimator,
        orientation=orientation,
        unit="arbitrary",
        model=dict(model or {}),
        extra={"file": path.name},
    )


def scores_with_shapes(path: Path | str) -> Scores:
    """Scores of weight matrices that come with their shapes, each a block of its own, so that no model is needed.

    The file is a ``.csv`` with the columns ``name, score, d_in, d_out``, or ``.json`` with a list of such objects. Others are
    refused, but for those that :meth:`Scores.to_pandas` has. A larger score deserves more capacity. Plans from it are not
    checked against a model.
    """
    path = Path(path)
    reading.check_ordinary(path, "scores")
    rows = _rows(path)
    missing = [name for name in COLUMNS if name not in rows[0]]
    if missing:
        raise CorruptFile(
            f"{path} has no column {', '.join(missing)} ({', '.join(map(str, rows[0]))}).",
            f"Without a model, scores come with shapes: {', '.join(COLUMNS)}.",
            "Add it, or bring the scores to a model: layerbudget score MODEL --import FILE.",
        )
    _check_columns(rows, COLUMNS, path, "Take it out, or bring the scores to a model: layerbudget score MODEL --import FILE")
    gain, blocks = [], []
    for row in rows:
        name, score, *sides = (row.get(column) for column in COLUMNS)
        if not name or not isinstance(name, str):
            raise InvalidInput(f"{path} has a row without a name.", "Every matrix has one.", "Name it.")
        gain.append(_number(score, f"score of {name}", path))
        d_in, d_out = (_size(value, f"{side} of {name}", path) for side, value in zip(COLUMNS[2:], sides, strict=True))
        blocks.append(Block(name=name, modules=(Module(name=name, d_in=d_in, d_out=d_out),)))
    return Scores(estimator="imported", unit="arbitrary", gain=(tuple(gain),), extra={"file": path.name}, blocks=tuple(blocks))


def _number(value: Any, what: str, path: Path) -> float:
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise InvalidInput(f"The {what} in {path} is {value!r}.", "Scores are finite numbers.", "Correct it.")
    return number


def _size(value: Any, what: str, path: Path) -> int:
    size = _number(value, what, path)
    if not 1 <= size <= 1 << 31 or size != int(size):
        raise InvalidInput(f"The {what} in {path} is {value}.", "A size is a whole number from 1.", "Correct it.")
    return int(size)


def _rows(path: Path) -> Sequence[Row]:
    """Rows of a CSV or JSON file, one or more, as mappings."""
    suffix, rows = path.suffix.lower(), []
    if suffix == ".csv":
        try:
            with path.open(newline="", encoding="utf-8-sig") as handle:  # spreadsheets put a byte order mark first
                table = csv.DictReader(handle)
                rows = list(table)
        except (UnicodeDecodeError, csv.Error) as error:
            raise CorruptFile(f"{path} does not read as CSV ({error}).", "", "Save it as UTF-8 CSV.") from error
        doubled = [name for name, times in Counter(table.fieldnames or ()).items() if name and times > 1]
        if doubled:
            raise CorruptFile(f"{path} has the column {doubled[0]} twice.", "", "Keep one of the two.")
    elif suffix == ".json":
        content = reading.read_bytes(path, "scores").removeprefix(b"\xef\xbb\xbf")  # editors put one first, too
        rows = reading.parse(content, str(path), "scores", remedy="Repair it.")
        reading.keys_of(content, str(path), "scores")
        if isinstance(rows, Mapping):
            rows = [{"name": name, "score": score} for name, score in rows.items()]
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise InvalidInput(
                f"{path} holds a {type(rows).__name__} without names.",
                'Scores are {"name": value, ...} or [{"name": ..., "score": ...}, ...].',
                "Add the block names.",
            )
    else:
        raise InvalidInput(f"{path} ends with {suffix!r}.", "Scores come as .csv or .json.", "Convert it to one of these.")
    if not rows:
        raise CorruptFile(f"{path} has no rows.", "", "Give one row per block, and a CSV its header.")
    return rows


def _column(row: Row, what: str, known: Sequence[str], path: Path) -> str:
    key = next((k for k in known if k in row), None)
    if key is None:
        raise InvalidInput(
            f"{path} has no {what} column among {', '.join(map(str, row))}.", f"It is called {', '.join(known)}.", "Rename it."
        )
    return key


def _check_columns(rows: Sequence[Row], read: Sequence[str], path: Path, remedy: str) -> None:
    """Refuse a column that is neither read nor among those that are passed over, and cells without a column."""
    for row in rows:
        for name in row:
            if name is None:  # what csv calls the rest of a row
                raise CorruptFile(f"A row of {path} has more cells than there are columns.", "", "Put its cells into quotes.")
            if name not in read and name not in _BESIDE:
                way = f"--orientation redundancy says it. {remedy}" if name == "orientation" else remedy
                raise InvalidInput(
                    f"{path} has the column {name}, which is not read.", f"Read are {', '.join(read)}.", f"{way}."
                )


def _of_these(scores: Scores, blocks: Sequence[Block], path: Path) -> Scores:
    if scores.names != [b.name for b in blocks]:
        raise InvalidInput(
            f"{path} scores {len(scores.names)} blocks ({scores.names[0]}, ...), the model has {len(blocks)} "
            f"({blocks[0].name}, ...).",
            "A scores file is imported for the blocks that it was made for.",
            "Use the partition (--by, --include, --exclude) of the file.",
        )
    return scores


def _by_layer(values: dict[str, float], blocks: Sequence[Block], path: Path) -> dict[str, float]:
    """Numbers of layers as names of blocks: ``3`` is the block whose layer has that number."""
    if not all(name.strip().isdigit() for name in values):
        return values
    places: dict[int, list[str]] = {}
    for block in blocks:
        match = _LAYER.search(block.name)
        if match:
            places.setdefault(int(match[1]), []).append(block.name)
    named = {}
    for number, value in values.items():
        owners = places.get(int(number), [])
        if len(owners) != 1:
            known = f"Blocks have the layers {min(places)} to {max(places)}." if places else "No block has a layer's number."
            said = "no block" if not owners else f"{len(owners)} blocks"
            raise InvalidInput(
                f"{path} scores layer {number}, which is {said}.", known, "Name the blocks in full, or use --by layer."
            )
        named[owners[0]] = value
    return named
