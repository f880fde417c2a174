"""Text to calibrate, evaluate and fine-tune on: the standard library, local files, hub datasets.

A source becomes one token stream: each document is tokenised as the tokenizer does by default (beginning-of-text
token included), documents follow one another. Calibration draws non-overlapping windows of that stream at
random, seeded; evaluation takes its windows in order. Rows of a fine-tuning format become one sample each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InvalidInput, MissingDependency, NotEnoughText, NotFound
from ..models.loading import check_id
from . import stdlib
from .calibration import CalibrationSet
from .columns import of_every_row
from .dialogues import format_of, text_of
from .encoding import Encoded, encode, learned_tokens, pad_of, padded, shortened, whole_rows
from .files import LONGEST, Row, is_local, read_rows
from .tasks import first_rows

logger = logging.getLogger(__name__)

# name: (dataset, config, split for calibration, split for evaluation, text column)
_HUB_SHORT_NAMES = {
    "c4": ("allenai/c4", "en", "train", "validation", "text"),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "test", "text"),
}
_HELD_OUT = 0.1


def read_documents(source: str, *, group: str = "calibration", limit: int | None = None) -> list[str]:
    """The texts of a source; empty ones are left out.

    A source is ``stdlib`` (or ``stdlib:training`` and so on), ``c4``, ``wikitext2``, one or more local .txt, .md, .py, .jsonl,
    .json or .parquet files or folders of them separated by commas, or a hub dataset ``name[:config[:split[:column]]]`` (at most
    ``limit`` rows of it). The group, ``calibration`` or ``evaluation``, is one of the standard library, or a split.

    Raises:
        NotFound: No such file.
        InvalidInput: A file without text, or of an unknown kind.
        MissingDependency: ``datasets`` or ``pyarrow`` is needed and not installed.
    """
    texts = of_every_row(_read_rows(source, group, limit), text_of)
    return [t for t in texts if t.strip()]


def _read_rows(source: str, group: str, limit: int | None = None) -> list[tuple[Row, str]]:
    """Rows of a source, each with where it comes from; see :func:`read_documents`."""
    if source.partition(":")[0] == "stdlib":
        documents, missing = stdlib.read(source.partition(":")[2] or group)
        if missing:
            logger.warning("This Python has no module %s: skipped.", ", ".join(missing))
        return [(text, source) for _, text in documents]
    if _is_local(source):
        return [found for part in _parts(source) for found in read_rows(part)]
    return [(row, f"row {n} of {source}") for n, row in enumerate(_read_hub(source, group, limit), 1)]


def _parts(source: str) -> list[str]:
    return [p.strip() for p in source.split(",") if p.strip()]


def _is_local(source: str) -> bool:
    return bool(_parts(source)) and all(map(is_local, _parts(source)))


def _read_hub(source: str, group: str, limit: int | None) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(f"The dataset {source} needs the package datasets.", "", "pip install datasets.") from error
    if source in _HUB_SHORT_NAMES:
        name, config, train, held, column = _HUB_SHORT_NAMES[source]
        split = held if group == "evaluation" else train
    else:
        name, config, split, column = [*source.split(":"), "", "", "", ""][:4]
        split = split or ("test" if group == "evaluation" else "train")
    check_id(name, "dataset")
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
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(ids, dtype=np.int64) for ids in encoded)])


def calibration(
    source: str | Sequence[Row],
    tokenizer: Any,
    *,
    samples: int | None = 128,
    length: int = 256,
    seed: int = 0,
    group: str = "calibration",
    shuffle: bool = True,
) -> CalibrationSet:
    """Windows of ``length`` tokens of a source; of conversations and answers rows of their own.

    Rows of a fine-tuning format (:mod:`layerbudget.data.dialogues`) become one sample each, with the loss on the answers only.
    Where there are fewer samples than asked for, all are used, and that is said.

    The source is as in :func:`read_documents`, or a list of texts or rows of your own. ``samples`` windows (``None``: all) are
    drawn at random without overlap, or are the first ones in order (``shuffle=False``).

    Raises:
        NotEnoughText: Not one sample; the message says how much there was.
        InvalidInput, NotFound, MissingDependency: As in :func:`read_documents`.
    """
    if (samples is not None and samples < 1) or length < 2:
        told = f"samples is {samples}, length is {length}."
        raise InvalidInput(told, "At least 1 sample of at least 2 tokens.", "Try 128 and 256.")
    if isinstance(source, str):
        name, rows = source, _read_rows(source, group, None if samples is None else 64 * samples)
    else:
        name, rows = "own texts", [(row, f"row {n} of your list") for n, row in enumerate(source, 1)]
    if any(format_of(row) for row, _ in rows):
        whole = whole_rows(rows, tokenizer)
        found = shortened(whole, length)
        if samples is not None and len(found) < samples:
            logger.warning("%s has %d rows; %d were asked for: all of them are used.", name, len(found), samples)
        made = padded([found[i] for i in _drawn(len(found), seed, shuffle)[:samples]], pad_of(tokenizer))
        limited = isinstance(source, str) and samples is not None and len(whole) >= 64 * samples and not _is_local(name)
        return CalibrationSet(
            input_ids=made["input_ids"],
            attention_mask=made["attention_mask"],
            labels=made["labels"],
            source=name,
            seed=seed,
            rows=None if limited else len(whole),
            completion_tokens=None if limited else learned_tokens(whole, LONGEST),
        )
    texts = of_every_row(rows, text_of)
    stream = token_stream([text for text in texts if text.strip()], tokenizer)
    windows = len(stream) // length
    if not windows:
        told = f"{name} has {len(stream)} tokens, one sample needs {length}."
        raise NotEnoughText(told, "", f"Give more text, or a length up to {len(stream)}.")
    if samples is not None and windows < samples:
        text = "%s has %d tokens: %d samples of %d are used instead of %d."
        logger.warning(text, name, len(stream), windows, length, samples)
    ids = stream[: windows * length].reshape(windows, length)[_drawn(windows, seed, shuffle)[:samples]]
    return CalibrationSet(input_ids=torch.from_numpy(ids), source=name, seed=seed)


def _drawn(count: int, seed: int, shuffle: bool) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count) if shuffle else np.arange(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of text for a language model."""

    name: str  #: what the user named
    train: tuple[Encoded, ...]
    evaluation: dict[str, tuple[Encoded, ...]]  #: held-out rows by split
    metric: str = "loss"  #: nats per learned token

    @property
    def digest(self) -> str:
        """Content hash of all tokens and labels."""
        h = hashlib.sha256()
        for row in (*self.train, Encoded((), ()), *(r for _, rows in sorted(self.evaluation.items()) for r in rows)):
            h.update(repr((row.input_ids, row.labels)).encode())
        return h.hexdigest()[:16]

    def limited(self, train: int | None) -> Texts:
        """The text with at most so many training rows, the first ones of a fixed shuffle."""
        return dataclasses.replace(self, train=first_rows(self.train, train))


def read_texts(
    source: str,
    tokenizer: Any,
    *,
    limit: int,
    everything: bool = False,
    held_out: str | None = None,
) -> Texts:
    """Rows of text to train on, and rows that are held out.

    Conversations, completions and instructions are learned on their answers (``everything``: also their prompts), plain texts
    whole; a row has at most ``limit`` tokens. ``held_out`` is another source of held-out rows; by default they are a tenth of
    the rows, chosen by a hash of their content (of the standard library its evaluation modules).
    """
    rows = _read_rows(source, "calibration")
    if held_out is None and source == "stdlib":
        held_out = source
    sides = _split(rows, source) if held_out is None else (rows, _read_rows(held_out, "evaluation"))
    train, held = (tuple(encode(part, tokenizer, limit=limit, everything=everything)) for part in sides)
    return Texts(name=source, train=train, evaluation={"held_out": held})


def _split(rows: list[tuple[Row, str]], source: str) -> tuple[list[tuple[Row, str]], list[tuple[Row, str]]]:
    """Hold out the tenth with the smallest hashes: equal rows fall on one side, and the order of the file does not matter."""
    if len(rows) < 2:
        raise NotEnoughText(f"{source} has {len(rows)} rows.", "One is held out, so two are needed.", "Give more rows.")
    keys = [hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest() for row, _ in rows]
    last = sorted(keys)[max(1, round(_HELD_OUT * len(rows))) - 1]
    sides = [[r for r, k in zip(rows, keys, strict=True) if (k <= last) is held] for held in (False, True)]
    if not sides[0]:
        raise InvalidInput(f"All rows of {source} are equal.", "A row is held out, another trained on.", "Give other rows.")
    return sides[0], sides[1]
