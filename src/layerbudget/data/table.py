"""A labelled table of one's own: which columns are texts, which one is the label, and which rows are held out.

Every column is part of the text, is the label, says the label again, is passed over by its name (an id, a URL, a source), or is
refused by name.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CorruptFile, InvalidInput, NotEnoughText, NotFound
from . import folders
from .columns import is_harmless, whole_text
from .files import rows_of_file

Kept = TypeVar("Kept")
Named = tuple[dict[str, Any], str]  # a row and its place
MOST_LABELS = 50
_LABELS = ("label", "labels", "target", "class", "answer", "output", "completion", "response")
_TEXTS = tuple(
    "text sentence sentence1 prompt instruction question question1 premise context passage paragraph title headline "
    "description content document body subject review tweet query input sentence2 question2 hypothesis pair answer "
    "choice system".split()
)


@dataclasses.dataclass(frozen=True)
class Labelled:
    """One row: a text, what stands behind it, and the index of its label."""

    text: str
    pair: str | None
    label: int


def first_rows(rows: tuple[Kept, ...], n: int | None) -> tuple[Kept, ...]:
    """At most ``n`` rows, the first ones of a fixed shuffle, in their own order; all where ``n`` is None."""
    if n is not None and n < 1:
        raise InvalidInput(f"{n} rows are asked for.", "At least one is needed.", "Leave the limit out for all.")
    if n is None or n >= len(rows):
        return rows
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(f"{i}.{len(rows)}".encode()).digest())
    return tuple(rows[i] for i in sorted(order[:n]))


def read_table(path: Path) -> tuple[tuple[str, ...], dict[str, list[Labelled]]]:
    """The labels of a file or a folder, and its rows by split: ``train``, and the splits that are held out.

    Where there is no other split than that to train on, a tenth of it is held out.
    """
    splits = _splits(path)
    rows = [row for part in splits.values() for row in part]
    label, texts = _columns(rows, path)
    for name in [n for n, part in splits.items() if n != "train" and all(_is_hidden(row[label]) for row, _ in part)]:
        folders.say_once(f"The labels of {name} in {path} are hidden (-1): it is left out.")
        del splits[name]
    rows = [row for part in splits.values() for row in part]
    _check_labels(rows, label, path)
    known, shown = _spellings([row[label] for row, _ in rows], path)
    if not 2 <= len(shown) <= MOST_LABELS:
        problem = f"{path} has {len(shown)} distinct labels in its column {label}."
        raise InvalidInput(
            problem, f"Between 2 and {MOST_LABELS} can be told apart.", "Group them, or learn answers by --data."
        )
    made = {
        name: [_labelled(row, where, texts, known[_key(row[label])]) for row, where in part] for name, part in splits.items()
    }
    if len(made) == 1:
        train = made["train"]
        made["train"], made["held_out"] = _tenth(train, path)
    return shown, made


def _tenth(rows: Sequence[Labelled], path: Path) -> tuple[list[Labelled], list[Labelled]]:
    """The rows to train on, and every tenth text by its hash; of a small file that with the smallest hash."""
    texts = ["\n".join(filter(None, (row.text, row.pair))) for row in rows]
    hashes = {text: int(hashlib.sha256(text.encode()).hexdigest(), 16) for text in texts}
    held_out = {text for text, number in hashes.items() if number % 10 == 0} or {min(hashes, key=hashes.__getitem__)}
    if len(held_out) == len(hashes):
        raise NotEnoughText(f"{path} has {len(hashes)} texts.", "One is held out, so two are needed.", "Give more rows.")
    sides = [[row for row, text in zip(rows, texts, strict=True) if (text in held_out) is side] for side in (False, True)]
    return sides[0], sides[1]


def _splits(path: Path) -> dict[str, list[Named]]:
    """Rows by split; the split to train on is called ``train``."""
    if path.is_dir():
        files = folders.splits_of(path)
        train = folders.split_for(path, files, "calibration")
        files = {"train" if name == train else name: part for name, part in files.items()}
    elif path.is_file():
        files = {"train": [path]}
    else:
        raise NotFound(f"There is no file {path}.", "", "Check the path.")
    read = {name: [(at, row, f) for f in part for at, row in rows_of_file(f)] for name, part in files.items()}
    splits = {name: [(row, f"{at} of {file}") for at, row, file in part] for name, part in read.items()}
    for rows in read.values():
        if not all(at and isinstance(row, dict) for at, row, _ in rows):  # one object is a file without rows
            raise CorruptFile(f"{path} does not hold a list of rows with names.", "", "Write one object per row.")
    return {name: rows for name, rows in splits.items() if rows or name == "train"}


def _columns(rows: Sequence[Named], path: Path) -> tuple[str, list[str]]:
    """The column of the label, and those of the text in the order of the file."""
    columns = list(dict.fromkeys(name for row, _ in rows for name in row))
    label = next((c for c in _LABELS if c in columns), None)
    texts = [c for c in columns if c in _TEXTS and c != label]
    if label is None or not texts:
        raise (InvalidInput if columns else CorruptFile)(
            f"{path} has the columns {', '.join(columns) or 'none'}.",
            f"It needs a text ({', '.join(_TEXTS[:6])}, ...) and a label ({', '.join(_LABELS)}).",
            "Rename the columns.",
        )
    left = [c for c in columns if c != label and c not in texts and not _passed(c, rows, label)]
    if left:
        what = f"{path} has the column{'s' * (len(left) > 1)} {', '.join(left)}, which would not be read."
        known = f"Texts are {', '.join(_TEXTS)}; ids, URLs, sources and dates are passed over."
        raise InvalidInput(what, known, "Rename a text that the answer needs; drop another column.")
    return label, texts


def _passed(name: str, rows: Sequence[Named], label: str) -> bool:
    """Whether a column is no part of the text: by its name, because it is empty, or because it says the label again."""
    if is_harmless(name):
        return True
    cells: dict[str, set[str]] = {}
    for row, _ in rows:
        if not _is_blank(row.get(name)):
            cells.setdefault(_key(row.get(label)), set()).add(str(row[name]))
    alone = all(len(values) == 1 for values in cells.values()) and len(set().union(*cells.values())) == len(cells)
    return not cells or (len(cells) > 1 and alone)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and math.isnan(value))


def _is_hidden(value: Any) -> bool:
    return not isinstance(value, bool) and _shown(value) == "-1"


def _check_labels(rows: Sequence[Named], label: str, path: Path) -> None:
    """Refuse rows without a label, and labels that published files write where the answer is hidden."""
    lacking = next((where for row, where in rows if _is_blank(row.get(label))), None)
    if lacking is not None:
        raise CorruptFile(f"{_upper(lacking)} has no {label}.", "Every row needs one.", "Complete or drop it.")
    nested = next((where for row, where in rows if isinstance(row[label], (list, dict))), None)
    if nested is not None:
        raise CorruptFile(f"{_upper(nested)} has several labels.", "A row has one.", "Write one label per row.")
    hidden = [where for row, where in rows if _is_hidden(row[label])]
    if hidden:
        problem = f"{len(hidden)} of {len(rows)} rows of {path} have the label -1, the first is {hidden[0]}."
        raise InvalidInput(
            problem, "Published files write it where the answer is hidden.", "Drop them, or write labels as words."
        )


def _shown(value: Any) -> str:
    """A label as text; 1.0 is 1, as spreadsheets write it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _key(value: Any) -> str:
    """Return the key that the spellings of one label share: neither case nor spaces make another one."""
    return " ".join(_shown(value).casefold().split())


def _spellings(values: Sequence[Any], path: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """The index of every label, and how it is written most often; other spellings are said."""
    written: dict[str, collections.Counter[str]] = {}
    for value in values:
        written.setdefault(_key(value), collections.Counter())[_shown(value)] += 1
    chosen = {key: min(times, key=lambda word: (-times[word], word)) for key, times in written.items()}
    for key, times in written.items():
        if len(times) > 1:
            others = ", ".join(sorted(set(times) - {chosen[key]}))
            folders.say_once(f"{path} writes the label {chosen[key]} also as {others}: they are one.")
    order = sorted(chosen, key=lambda key: chosen[key])
    return {key: i for i, key in enumerate(order)}, tuple(chosen[key] for key in order)


def _labelled(row: Mapping[str, Any], where: str, texts: Sequence[str], label: int) -> Labelled:
    cells = {name: str(row[name]) for name in texts if not _is_blank(row.get(name))}
    parts = [whole_text(cell, f"The column {name} in {where}") for name, cell in cells.items()]
    if not parts:
        raise CorruptFile(
            f"{_upper(where)} has no {' and no '.join(texts)}.", "Every row needs a text.", "Complete or drop it."
        )
    return Labelled(parts[0], "\n".join(parts[1:]) or None, label)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
