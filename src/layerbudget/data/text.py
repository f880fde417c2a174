"""Text for calibration and evaluation: the standard library, local files, hub datasets.

A source becomes one token stream: each document is tokenised as the tokenizer does by default (beginning-of-text
token included), documents follow one another. Calibration draws non-overlapping windows of that stream at
random, seeded; evaluation takes its windows in order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import InvalidInput, MissingDependency, NotEnoughText, NotFound
from . import stdlib
from .calibration import CalibrationSet

logger = logging.getLogger(__name__)

# name: (dataset, config, split for calibration, split for evaluation, text column)
HUB_SHORT_NAMES = {
    "c4": ("allenai/c4", "en", "train", "validation", "text"),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "test", "text"),
}
TEXT_COLUMNS = ("text", "content", "document", "sentence", "question")


def read_documents(source: str, *, group: str = "calibration", limit: int | None = None) -> tuple[list[str], tuple[str, ...]]:
    """Read the documents of a source.

    Args:
        source: ``stdlib`` (or ``stdlib:training`` and so on), ``c4``, ``wikitext2``, one or more local .txt, .md, .py,
            .jsonl, .json or .parquet files or folders of them separated by commas, or a hub dataset
            ``name[:config[:split[:column]]]``.
        group: ``calibration`` or ``evaluation``: which group of the standard library, which split of a hub dataset.
        limit: Stop after so many documents of a hub dataset.

    Returns:
        The texts, and the standard-library modules that this Python does not have.

    Raises:
        NotFound: No such file.
        InvalidInput: A file without text, or of an unknown kind.
        MissingDependency: ``datasets`` or ``pyarrow`` is needed and not installed.
    """
    if source == "stdlib" or source.startswith("stdlib:"):
        chosen = source.partition(":")[2] or group
        try:
            documents, missing = stdlib.read(chosen)
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        if missing:
            logger.warning("This Python has no module %s: skipped.", ", ".join(missing))
        return [text for _, text in documents], tuple(missing)
    parts = [p.strip() for p in source.split(",") if p.strip()]
    if parts and all(_is_local(p) for p in parts):
        return [text for part in parts for file in _expand(Path(part).expanduser()) for text in _read_file(file)], ()
    return _read_hub(source, group, limit), ()


def _is_local(name: str) -> bool:
    return Path(name).expanduser().exists() or name.startswith(("/", "./", "../", "~")) or Path(name).suffix in _READERS


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in _READERS and f.is_file())
        if not files:
            raise NotFound(f"{path} holds no text file.", f"Known endings are {', '.join(_READERS)}.", "Name a file.")
        return files
    if not path.is_file():
        raise NotFound(f"There is no text file {path}.", f"Known endings are {', '.join(_READERS)}.", "Check the path.")
    if path.suffix not in _READERS:
        raise InvalidInput(f"{path} ends with {path.suffix!r}.", f"Known endings are {', '.join(_READERS)}.", "Convert it.")
    return [path]


def _read_file(path: Path) -> list[str]:
    texts = [t for t in _READERS[path.suffix](path) if t.strip()]
    if not texts:
        raise InvalidInput(f"{path} holds no text.", "At least one non-empty document is needed.", "Give another file.")
    return texts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 ({error}).", "", "Convert it to UTF-8.") from error


def _plain(path: Path) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace")]


def _column(row: Any, path: object) -> str:
    if not isinstance(row, dict):
        raise InvalidInput(f"A row of {path} is {row!r:.40}.", "A row is a text or an object with one.", "Correct the file.")
    for name in TEXT_COLUMNS:
        if isinstance(row.get(name), str):
            return row[name]
    strings = [v for v in row.values() if isinstance(v, str)]
    if strings:
        return max(strings, key=len)
    raise InvalidInput(f"A row of {path} has no text column.", f"Known names are {', '.join(TEXT_COLUMNS)}.", "Rename one.")


def _json_lines(path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(_text(path).split("\n"), 1):  # JSON strings may hold U+2028, at which splitlines() cuts
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInput(f"Line {number} of {path} is not JSON ({error}).", "", "Correct or drop the line.") from error
        texts.append(row if isinstance(row, str) else _column(row, path))
    return texts


def _json(path: Path) -> list[str]:
    try:
        rows = json.loads(_text(path))
    except json.JSONDecodeError:
        return _json_lines(path)
    rows = rows if isinstance(rows, list) else [rows]
    return [row if isinstance(row, str) else _column(row, path) for row in rows]


def _parquet(path: Path) -> list[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependency("Parquet files need pyarrow.", "", "pip install pyarrow (datasets brings it).") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} does not read as Parquet ({error}).", "", "Write the file again.") from error
    return [_column(row, path) for row in rows]


_READERS = {
    ".txt": _plain, ".md": _plain, ".py": _plain, ".raw": _plain, ".tokens": _plain,
    ".jsonl": _json_lines, ".json": _json, ".parquet": _parquet,
}  # fmt: skip


def _read_hub(source: str, group: str, limit: int | None) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(f"The dataset {source} needs the package datasets.", "", "pip install datasets.") from error
    if source in HUB_SHORT_NAMES:
        name, config, train, held, column = HUB_SHORT_NAMES[source]
        split = held if group == "evaluation" else train
    else:
        name, config, split, column = [*source.split(":"), "", "", "", ""][:4]
        split = split or ("test" if group == "evaluation" else "train")
    try:
        rows = datasets.load_dataset(name, config or None, split=split, streaming=limit is not None)
    except Exception as error:  # datasets raises many unrelated kinds for an unreachable hub or an unknown name
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(
            f"The dataset {source} could not be loaded: {first}",
            "DATA is stdlib, c4, wikitext2, a hub dataset name[:config[:split[:column]]] or local files.",
            "Check the name, or give local .txt, .jsonl or .parquet files.",
        ) from error
    return column_texts(rows, column, source, limit)


def column_texts(rows: Iterable[dict[str, Any]], column: str, source: str, limit: int | None) -> list[str]:
    """Texts of one column (of the usual text column where none is named); empty and missing ones are left out.

    Raises:
        InvalidInput: There is no such column.
    """
    texts: list[str] = []
    for row in rows:
        if column and column not in row:
            raise InvalidInput(f"{source} has no column {column!r}.", f"It has {', '.join(row)}.", "Name one of those.")
        text = row[column] if column else _column(row, source)
        if isinstance(text, str) and text.strip():
            texts.append(text)
        if limit is not None and len(texts) >= limit:
            break
    return texts


def token_stream(documents: Iterable[str], tokenizer: Any) -> np.ndarray:
    """Token ids of all documents, one after the other, int64."""
    encoded = tokenizer(list(documents), return_attention_mask=False, verbose=False)["input_ids"]
    if not encoded:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])


def check_sizes(samples: int, length: int) -> None:
    """Refuse sample counts and lengths below one and two.

    Raises:
        InvalidInput: They are.
    """
    if samples < 1 or length < 2:
        raise InvalidInput(
            f"samples is {samples}, length is {length}.", "At least 1 sample of at least 2 tokens.", "Try 128 and 256."
        )


def calibration(
    source: str | Sequence[str],
    tokenizer: Any,
    *,
    samples: int = 128,
    length: int = 256,
    seed: int = 0,
    group: str = "calibration",
    shuffle: bool = True,
) -> CalibrationSet:
    """Cut a source into ``samples`` windows of ``length`` tokens.

    Args:
        source: As in :func:`read_documents`, or a list of texts of your own.
        tokenizer: A transformers tokenizer.
        samples: Number of windows.
        length: Tokens per window.
        seed: Seed of the draw (without replacement, windows do not overlap).
        group: ``calibration`` or ``evaluation``.
        shuffle: Draw at random; otherwise take the first windows in order.

    Raises:
        NotEnoughText: The message says how much there was and is needed.
        InvalidInput, NotFound, MissingDependency: As in :func:`read_documents`.
    """
    check_sizes(samples, length)
    if isinstance(source, str):
        limit = 64 * samples if source not in ("stdlib",) else None
        documents, missing = read_documents(source, group=group, limit=limit)
        name = source
    else:
        documents, missing, name = list(source), (), "own texts"
    stream = token_stream(documents, tokenizer)
    windows = len(stream) // length
    if windows < samples:
        raise NotEnoughText(
            f"{name} has {len(stream)} tokens, {samples} samples of {length} tokens need {samples * length}.",
            f"At most {windows} samples of that length fit.",
            f"Give more text, or --samples {max(1, windows)}."
            if windows
            else f"Give more text, or a length up to {len(stream) // samples} for {samples} samples.",
        )
    rows = np.arange(windows)
    if shuffle:
        rows = np.random.default_rng(seed).permutation(windows)
    rows = rows[:samples]
    ids = torch.from_numpy(stream[: windows * length].reshape(windows, length)[rows])
    return CalibrationSet(input_ids=ids, source=name, seed=seed, missing=missing)
