"""Text for calibration and evaluation: the standard library, local files, hub datasets.

A source becomes one token stream: each document is tokenised as the tokenizer does by default (beginning-of-text
token included), documents follow one another. Calibration draws non-overlapping windows of that stream at
random, seeded; evaluation takes its windows in order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InvalidInput, MissingDependency, NotEnoughText, NotFound
from ..storage import hub
from . import stdlib
from .calibration import CalibrationSet
from .dialogues import format_of
from .encoding import encoded_set, text_of, texts_of
from .files import BadRows, Row, is_local, read_rows

logger = logging.getLogger(__name__)

# name: (dataset, config, split for calibration, split for evaluation, text column)
HUB_SHORT_NAMES = {
    "c4": ("allenai/c4", "en", "train", "validation", "text"),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "test", "text"),
}


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
    if _is_stdlib(source):
        chosen = source.partition(":")[2] or group
        try:
            documents, missing = stdlib.read(chosen)
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        if missing:
            logger.warning("This Python has no module %s: skipped.", ", ".join(missing))
        return [text for _, text in documents], tuple(missing)
    rows = read_source(source, group, limit)
    texts = [row if isinstance(row, str) else text_of(row, where) for row, where in rows]
    return [t for t in texts if t.strip()], ()


def _is_stdlib(source: str) -> bool:
    return source == "stdlib" or source.startswith("stdlib:")


def read_source(source: str, group: str, limit: int | None, bad: BadRows | None = None) -> list[tuple[Row, str]]:
    """Rows of local files, folders or a hub dataset, each with where it comes from.

    Raises:
        NotFound, InvalidInput, MissingDependency: As :func:`read_documents`.
    """
    parts = [p.strip() for p in source.split(",") if p.strip()]
    if parts and all(is_local(p) for p in parts):
        return [found for part in parts for found in read_rows(part, group=group, bad=bad)]
    return [(row, source) for row in _read_hub(source, group, limit)]


def _read_hub(source: str, group: str, limit: int | None) -> list[Row]:
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
    hub.check_id(name, "dataset")
    try:
        rows = datasets.load_dataset(name, config or None, split=split, streaming=limit is not None)
    except Exception as error:  # datasets raises many unrelated kinds for an unreachable hub or an unknown name
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(
            f"The dataset {source} could not be loaded: {first}",
            "DATA is stdlib, c4, wikitext2, a hub dataset name[:config[:split[:column]]] or local files.",
            "Check the name, or give local .txt, .jsonl or .parquet files.",
        ) from error
    return column_rows(rows, column, source, limit)


def column_rows(rows: Iterable[dict[str, Any]], column: str, source: str, limit: int | None) -> list[Row]:
    """Conversations and the like as they are, else the texts of one column (of the usual text column where none is named).

    Empty and missing texts are left out.

    Raises:
        InvalidInput: There is no such column.
    """
    found: list[Row] = []
    for row in rows:
        if not column and format_of(row) is not None:
            found.append(row)
        else:
            text = text_of(row, source, column)
            found.extend([text] if text.strip() else [])
        if limit is not None and len(found) >= limit:
            break
    return found


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
    source: str | Sequence[Row],
    tokenizer: Any,
    *,
    samples: int | None = 128,
    length: int = 256,
    seed: int = 0,
    group: str = "calibration",
    shuffle: bool = True,
    skip_bad_rows: bool = False,
) -> CalibrationSet:
    """Cut a source into ``samples`` windows of ``length`` tokens; conversations and answers into rows of their own.

    Rows of a fine-tuning format (:mod:`layerbudget.data.dialogues`) become one sample each, with the loss on the answers only.
    Where there are fewer samples than asked for, all are used, and that is said.

    Args:
        source: As in :func:`read_documents`, or a list of texts or rows of your own.
        tokenizer: A transformers tokenizer.
        samples: Number of windows; ``None`` for all there are.
        length: Tokens per window.
        seed: Seed of the draw (without replacement, windows do not overlap).
        group: ``calibration`` or ``evaluation``.
        shuffle: Draw at random; otherwise take the first windows in order.
        skip_bad_rows: Leave out rows that cannot be read and say how many, instead of refusing the first.

    Raises:
        NotEnoughText: Not one sample; the message says how much there was.
        InvalidInput, NotFound, MissingDependency: As in :func:`read_documents`.
    """
    check_sizes(1 if samples is None else samples, length)
    name: str = source if isinstance(source, str) else "own texts"
    missing: tuple[str, ...] = ()
    bad = BadRows(skip_bad_rows)
    if not isinstance(source, str):
        rows: list[tuple[Row, str]] = [(row, name) for row in source]
    elif _is_stdlib(source):
        documents, missing = read_documents(source, group=group)
        rows = [(text, name) for text in documents]
    else:
        rows = read_source(source, group, None if samples is None else 64 * samples, bad)
    if any(format_of(row) for row, _ in rows):
        return encoded_set(rows, tokenizer, source=name, samples=samples, length=length, seed=seed, shuffle=shuffle, bad=bad)
    documents = [text for text in texts_of(rows, bad) if text.strip()]
    return _windows(token_stream(documents, tokenizer), name, samples, length, seed=seed, shuffle=shuffle, missing=missing)


def _windows(
    stream: np.ndarray, name: str, samples: int | None, length: int, *, seed: int, shuffle: bool, missing: tuple[str, ...]
) -> CalibrationSet:
    """Windows of a token stream; fewer than asked where there is no more text, which is said."""
    windows = len(stream) // length
    if not windows:
        raise NotEnoughText(
            f"{name} has {len(stream)} tokens, one sample needs {length}.", "",
            f"Give more text, or a length up to {len(stream)}.",
        )  # fmt: skip
    if samples is not None and windows < samples:
        logger.warning(
            "%s has %d tokens: %d samples of %d are used instead of %d.", name, len(stream), windows, length, samples
        )
    order = np.random.default_rng(seed).permutation(windows) if shuffle else np.arange(windows)
    ids = torch.from_numpy(stream[: windows * length].reshape(windows, length)[order[:samples]])
    return CalibrationSet(input_ids=ids, source=name, seed=seed, missing=missing)
