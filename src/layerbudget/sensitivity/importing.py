"""Bring a user's own layer scores into the record: JSON, CSV or npy, with names of blocks or numbers of layers."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptFile, InvalidInput, NotFound
from ..records import Block
from ..scores import Scores
from ..storage import reading

_NAME_KEYS = ("name", "block", "layer", "module")
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")
_VALUE_KEYS = ("score", "gain", "value")


def _number(value: Any, name: str, path: Path) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"The score of {name} in {path} is {value!r}.", "Scores are finite numbers.", "Correct it."
        ) from error


def _collect(pairs: Sequence[tuple[str, Any]], path: Path) -> dict[str, float]:
    times = Counter(name for name, _ in pairs)
    twice = min((name for name, count in times.items() if count > 1), default=None)
    if twice is not None:
        raise InvalidInput(f"{path} scores {twice} {times[twice]} times.", "", "Give one score per name.")
    return {name: _number(value, name, path) for name, value in pairs}


def _pick(record: Mapping[str, Any], keys: Sequence[str], what: str, path: Path) -> str:
    for key in keys:
        if key in record:
            return key
    raise InvalidInput(
        f"{path} has no {what} among {', '.join(map(str, record))}.",
        f"It is called {', '.join(keys)}.",
        "Name it with column=.",
    )


def _from_json(path: Path, column: str | None) -> dict[str, float]:
    content = reading.read_bytes(path, "scores").removeprefix(b"\xef\xbb\xbf")  # editors put a byte order mark first
    record = reading.parse(content, str(path), "scores", remedy="Repair it.")
    if isinstance(record, Mapping) and isinstance(record.get("scores"), (Mapping, list)):
        record = record["scores"]
    if isinstance(record, Mapping):
        return _collect(list(record.items()), path)
    if isinstance(record, list) and record and all(isinstance(row, Mapping) for row in record):
        name = _pick(record[0], _NAME_KEYS, "name", path)
        value = column or _pick(record[0], _VALUE_KEYS, "score", path)
        return _collect([(str(row.get(name)), row.get(value)) for row in record], path)
    raise InvalidInput(
        f"{path} holds a {type(record).__name__} without names.",
        'Scores are {"name": value, ...} or [{"name": ..., "score": ...}, ...].',
        "Add the block names.",
    )


def _from_csv(path: Path, column: str | None) -> dict[str, float]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:  # spreadsheets put a byte order mark first
            rows = list(csv.DictReader(handle))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CorruptFile(f"{path} does not read as CSV ({error}).", "", "Save it as UTF-8 CSV.") from error
    if not rows:
        raise CorruptFile(f"{path} has no rows below its header.", "", "Give a header and one row per block.")
    name = _pick(rows[0], _NAME_KEYS, "name column", path)
    value = column or _pick(rows[0], _VALUE_KEYS, "score column", path)
    if value not in rows[0]:
        raise InvalidInput(f"{path} has no column {value!r}.", f"It has {', '.join(rows[0])}.", "Choose one of those.")
    return _collect([(row[name], row[value]) for row in rows], path)


def _from_npy(path: Path, names: Sequence[str] | None) -> dict[str, float]:
    values = reading.read_array(path, "scores")
    if names is None:
        raise InvalidInput(
            f"{path} holds {values.size} numbers and no names.",
            "An npy file needs names (--names FILE), one per number; numbers of layers are names too.",
            "Write the names of the blocks, or 0, 1, 2, ..., in the order of the numbers, one per line.",
        )
    if values.size != len(names):
        raise InvalidInput(f"{path} holds {values.size} numbers for {len(names)} names.", "", "Give one name per number.")
    return _collect(list(zip(names, values.reshape(-1).tolist(), strict=True)), path)


def _of_these(scores: Scores, blocks: Sequence[Block], path: Path) -> Scores:
    """A scores file of this package, if it is for these blocks."""
    if scores.names != [b.name for b in blocks]:
        raise InvalidInput(
            f"{path} scores {len(scores.names)} blocks ({scores.names[0]}, ...), the model has {len(blocks)} "
            f"({blocks[0].name}, ...).",
            "A scores file is imported for the blocks that it was made for.",
            "Use the partition (--by, --include, --exclude) of the file.",
        )
    return scores


def _named(values: dict[str, float], blocks: Sequence[Block], path: Path) -> dict[str, float]:
    """Numbers of layers as names of blocks: ``3`` is the block whose layer has that number.

    Raises:
        InvalidInput: A number that no block has, or that several have.
    """
    if not values or not all(name.strip().isdigit() for name in values):
        return values
    places: dict[int, list[str]] = {}
    for block in blocks:
        found = _LAYER.search(block.name)
        if found:
            places.setdefault(int(found[1]), []).append(block.name)
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


def _by_block(values: dict[str, float], blocks: Sequence[Block]) -> dict[str, float]:
    """Average scores given per matrix over each block (as AlphaPruning's ``block_wise`` does)."""
    modules = {m.name for b in blocks for m in b.modules}
    if set(values) != modules or set(values) == {b.name for b in blocks}:
        return values
    return {b.name: float(np.mean([values[m.name] for m in b.modules])) for b in blocks}


def import_scores(
    path: Path | str,
    blocks: Sequence[Block],
    *,
    names: Sequence[str] | None = None,
    column: str | None = None,
    orientation: str = "gain",
    estimator: str = "imported",
    unit: str = "arbitrary",
    model: Mapping[str, Any] | None = None,
) -> Scores:
    """Read scores that someone else computed.

    Args:
        path: ``.json`` (``{name: value}``, also below a key ``scores``, or a list of ``{name, score}``; or a scores file
            of this package), ``.csv`` (columns ``name`` and ``score``) or ``.npy`` (numbers; needs ``names``).
        blocks: The blocks they are meant for. Scores for every single matrix are averaged over each block.
        names: Block or matrix names, or numbers of layers, in the order of an npy file.
        column: Name of the value column or key, where it is not ``score``, ``gain`` or ``value``.
        orientation: ``gain`` (larger = deserves more capacity) or ``redundancy`` (larger = prune more).
        estimator: What to call them.
        unit: Their unit.
        model: ``{id, revision, digest}`` of the model they belong to, where known.

    Raises:
        NotFound: No such file.
        CorruptFile: It does not parse.
        InvalidInput: Another file type, names missing, doubled or unknown, or values that are not finite.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFound(f"There is no scores file at {path}.", "", "Check the path.")
    suffix = path.suffix.lower()
    if suffix == ".json":
        if '"schema_version"' in path.read_text(encoding="utf-8", errors="replace"):
            return _of_these(Scores.load(path), blocks, path)
        values = _from_json(path, column)
    elif suffix == ".csv":
        values = _from_csv(path, column)
    elif suffix == ".npy":
        values = _from_npy(path, names)
    else:
        raise InvalidInput(
            f"{path} ends with {suffix!r}.", "Scores come as .json, .csv or .npy.", "Convert it to one of these."
        )
    return Scores.from_values(
        blocks,
        _by_block(_named(values, blocks, path), blocks),
        estimator=estimator,
        orientation=orientation,
        unit=unit,
        model=dict(model or {}),
        extra={"file": path.name},
    )
