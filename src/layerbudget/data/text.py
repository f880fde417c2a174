"""Text to calibrate, evaluate and fine-tune on: the standard library, local files, hub datasets.

A source becomes one token stream: each document is tokenised as the tokenizer does by default (beginning-of-text
token included), documents follow one another. Calibration draws non-overlapping windows of that stream at
random, seeded; evaluation takes its windows in order. Where the tokenizer puts a token before every text, that
token stands first in every window too, in place of the one there, as in llama.cpp: some models (Gemma) read no
text well without it. Rows of a fine-tuning format become one sample each. The names ``wikitext2`` and ``c4`` are
read as the references of Wanda, SparseGPT and GPTQ read them, whose figures papers compare, without that token
(:class:`Reference`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arguments import checked
from ..errors import InvalidInput, MissingDependency, NotEnoughText, NotFound
from ..storage.hub import check_id
from . import stdlib
from .calibration import CalibrationSet
from .columns import of_every_row
from .dialogues import format_of, text_of
from .encoding import Encoded, check_one_format, encode, learned_tokens, pad_of, padded, shortened, whole_rows
from .files import LONGEST, Row, is_local, parts_of, read_rows
from .folders import say_once
from .table import first_rows

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A text of the papers on pruning and rounding, read as their code reads it.

    The rows of a split, empty ones too, are joined and tokenised once. Where ``within`` is true, calibration takes instead one
    window at a random place of each of some documents that are longer than a window.
    """

    name: str  #: on the hub
    config: str
    train: str  #: split to calibrate on
    test: str  #: split to evaluate on
    joiner: str  #: what stands between two rows
    rows: int | None = None  #: first ones of the split to evaluate on; all where it is None
    windows: int | None = None  #: most windows that are evaluated where nobody says how many
    within: bool = False


_REFERENCES = {
    "c4": Reference(
        name="allenai/c4", config="en", train="train", test="validation", joiner=" ", rows=1100, windows=256, within=True
    ),
    "wikitext2": Reference(name="Salesforce/wikitext", config="wikitext-2-raw-v1", train="train", test="test", joiner="\n\n"),
}
_HELD_OUT = 0.1


def read_documents(source: str, *, group: str = "calibration") -> list[str]:
    """The texts of a source; empty ones are left out.

    A source is ``stdlib`` (or ``stdlib:training`` and so on), ``c4``, ``wikitext2``, one or more local files or folders
    (:mod:`layerbudget.data.files`, :mod:`layerbudget.data.folders`) separated by commas, or a hub dataset
    ``name[:config[:split[:column]]]``. The group, ``calibration`` or ``evaluation``, is one of
    the standard library, or a split.

    Raises:
        NotFound: No such file.
        InvalidInput: A file without text, or of an unknown kind.
        MissingDependency: ``datasets`` or ``pyarrow`` is needed and not installed.
    """
    return [text_of(row, where) for row, where in _written_rows(_read_rows(source, group), source)]


def _check_rows(rows: Sequence[Any]) -> None:
    """Refuse what is neither a text nor a row among one's own, and a list of none."""
    if not rows:
        raise NotEnoughText("The list of texts is empty.", "At least one text is needed.", "Give some, or name a source.")
    for n, row in enumerate(rows, 1):
        if not isinstance(row, str | Mapping):
            problem = f"Row {n} of your list is of type {type(row).__name__}."
            raise InvalidInput(problem, "A row is a text or a dictionary.", "A file is given by its path, without a list.")


def _written_rows(rows: Sequence[tuple[Row, str]], source: str) -> list[tuple[Row, str]]:
    """The rows without plain texts that are blank, which teach nothing; how many those were is said.

    Raises:
        NotEnoughText: All are blank.
    """
    check_one_format(rows)
    texts = of_every_row(rows, lambda row, where: text_of(row, where) if format_of(row) is None else "a dialogue")
    kept = [placed_row for placed_row, text in zip(rows, texts, strict=True) if text.strip()]
    if rows and not kept:
        raise NotEnoughText(
            f"All {len(rows)} rows of {source} are blank.", "At least one text is needed.", "Give another file."
        )
    if len(kept) < len(rows):
        say_once(f"{len(rows) - len(kept)} of {len(rows)} rows of {source} are blank and left out.")
    return kept


def _read_rows(source: str, group: str, limit: int | None = None) -> list[tuple[Row, str]]:
    """Rows of a source, each with where it comes from; see :func:`read_documents`."""
    if source.partition(":")[0] == "stdlib":
        documents, missing = stdlib.read(source.partition(":")[2] or group)
        if missing:
            logger.warning("This Python has no module %s: skipped.", ", ".join(missing))
        return [(text, source) for _, text in documents]
    if _is_local(source):
        return [placed_row for part in parts_of(source) for placed_row in read_rows(part, group)]
    return [(row, f"row {n} of {source}") for n, row in enumerate(_read_hub(source, group, limit), 1)]


def _named_rows(source: Path | str | Sequence[Row], group: str, limit: int | None = None) -> tuple[str, list[tuple[Row, str]]]:
    """The name and the rows of a source, or of a list of one's own."""
    if isinstance(source, Path | str):
        return str(source), _read_rows(str(source), group, limit)
    if not isinstance(source, Sequence):
        problem = f"source is {source!r}, of type {type(source).__name__}."
        raise InvalidInput(problem, "It is a name, a path, or a list of texts or rows.", "Name one, for example 'stdlib'.")
    _check_rows(source)
    return "own texts", [(row, f"row {n} of your list") for n, row in enumerate(source, 1)]


def _is_local(source: str) -> bool:
    return bool(parts_of(source)) and all(map(is_local, parts_of(source)))


def _read_hub(source: str, group: str, limit: int | None) -> list[Row]:
    if source in _REFERENCES:
        known, column = _REFERENCES[source], "text"
        rows = _load(source, known.name, known.config, known.test if group == "evaluation" else known.train, limit)
    else:
        name, config, split, column = [*source.split(":"), "", "", "", ""][:4]
        rows = _load(source, name, config, split or ("test" if group == "evaluation" else "train"), limit)
    return column_rows(rows, column, source, limit)


def _load(source: str, name: str, config: str, split: str, limit: int | None) -> Any:
    """Rows of a split of a data set of the hub; those that are used are streamed where there is a limit."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(f"The dataset {source} needs the package datasets.", "", "pip install datasets.") from error
    check_id(name, "dataset")
    try:
        return datasets.load_dataset(name, config or None, split=split, streaming=limit is not None)
    except Exception as error:  # datasets raises many unrelated kinds for an unreachable hub or an unknown name
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(
            f"The dataset {source} could not be loaded: {first}",
            "DATA is stdlib, c4, wikitext2, a hub dataset name[:config[:split[:column]]] or local files.",
            "Check the name, or give local .txt, .jsonl or .parquet files.",
        ) from error


def column_rows(rows: Iterable[dict[str, Any]], column: str, source: str, limit: int | None) -> list[Row]:
    """Conversations and the like as they are, else the texts of one column (of the usual text column where none is named).

    Empty and missing texts are left out.
    """
    kept: list[Row] = []
    for row in rows:
        if not column and format_of(row) is not None:
            kept.append(row)
        else:
            text = text_of(row, source, column)
            kept.extend([text] if text.strip() else [])
        if limit is not None and len(kept) >= limit:
            break
    return kept


def token_stream(documents: Iterable[str], tokenizer: Any) -> np.ndarray:
    """Token ids of all documents, one after the other, int64."""
    encoded = tokenizer(list(documents), return_attention_mask=False, verbose=False)["input_ids"]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(ids, dtype=np.int64) for ids in encoded)])


def beginning(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before every text; None where it puts none."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos] else None


@checked
def calibration(
    source: Path | str | Sequence[Row],
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

    Args:
        source: As in :func:`read_documents`, a path, or a list of texts or rows of your own.
        tokenizer: The model's tokenizer.
        samples: How many windows; None for all.
        length: Tokens of a window.
        seed: Of the draw.
        group: Which part of the source: ``calibration`` or ``evaluation``.
        shuffle: Draw the windows at random without overlap; else take the first ones in order.

    Raises:
        NotEnoughText: Not one sample; the message says how much there was.
        InvalidInput, NotFound, MissingDependency: As in :func:`read_documents`.
    """
    if (samples is not None and samples < 1) or length < 2:
        problem = f"samples is {samples}, length is {length}."
        raise InvalidInput(problem, "At least 1 sample of at least 2 tokens.", "Try 128 and 256.")
    if seed < 0:
        raise InvalidInput(f"seed is {seed}.", "It must be 0 or more.", "Use 0.")
    if tokenizer is None:
        make = "Make it with layerbudget.load_tokenizer(NAME)."
        raise InvalidInput("tokenizer is None.", "It should be a loaded tokenizer.", make)
    order = np.random.default_rng(seed)
    if isinstance(source, str) and source in _REFERENCES and shuffle == (group != "evaluation"):
        return _of_reference(source, tokenizer, samples, length, seed, group)
    name, rows = _named_rows(source, group, None if samples is None else 64 * samples)
    rows = _written_rows(rows, name)
    text = digest_of(row for row, _ in rows)
    if any(format_of(row) for row, _ in rows):
        whole = whole_rows(rows, tokenizer)
        encoded = shortened(whole, length)
        if samples is not None and len(encoded) < samples:
            logger.warning("%s has %d rows; %d were asked for: all of them are used.", name, len(encoded), samples)
        drawn = order.permutation(len(encoded)) if shuffle else np.arange(len(encoded))
        made = padded([encoded[i] for i in drawn[:samples]], pad_of(tokenizer))
        limited = isinstance(source, str) and samples is not None and len(whole) >= 64 * samples and not _is_local(name)
        return CalibrationSet(
            input_ids=made["input_ids"],
            attention_mask=made["attention_mask"],
            labels=made["labels"],
            source=name,
            seed=seed,
            text=text,
            rows=None if limited else len(whole),
            completion_tokens=None if limited else learned_tokens(whole, LONGEST),
        )
    stream = token_stream([text_of(row, where) for row, where in rows], tokenizer)
    ids = _windows(stream, samples, length, name, order if shuffle else None)
    begin = beginning(tokenizer)
    if begin is not None:
        ids[ids[:, 1] != begin, 0] = begin  # once, also where a document begins behind the first token
    return CalibrationSet(input_ids=ids, source=name, seed=seed, text=text)


def digest_of(rows: Iterable[Any]) -> str:
    """Content hash of rows, in their order: whether two sources are one text."""
    h = hashlib.sha256()
    for row in rows:
        h.update(json.dumps(row, sort_keys=True, default=str).encode())
    return h.hexdigest()[:16]


def _windows(
    stream: np.ndarray, samples: int | None, length: int, name: str, order: np.random.Generator | None
) -> torch.Tensor:
    """Windows of a stream that do not overlap, in a random order or the first ones, ``(samples, length)``."""
    count = len(stream) // length
    if not count:
        problem = f"{name} has {len(stream)} tokens, one sample needs {length}."
        raise NotEnoughText(problem, "", f"Give more text, or a length up to {len(stream)}.")
    if samples is not None and count < samples:
        text = "%s has %d tokens: %d samples of %d are used instead of %d."
        logger.warning(text, name, len(stream), count, length, samples)
    drawn = np.arange(count) if order is None else order.permutation(count)
    return torch.from_numpy(stream[: count * length].reshape(count, length)[drawn[:samples]])


def _of_reference(source: str, tokenizer: Any, samples: int | None, length: int, seed: int, group: str) -> CalibrationSet:
    """Windows of a text of the papers, cut as their code cuts it; see :class:`Reference`."""
    known, order = _REFERENCES[source], np.random.default_rng(seed)
    if beginning(tokenizer) is not None:
        say_once(
            f"The windows of {source} do not begin with {tokenizer.bos_token}, as in the code of the papers. Models that "
            "need it (Gemma) seem worse than they are. Give the text as a file to have it."
        )
    if group == "evaluation":  # in order, as all evaluation
        texts = _texts(source, known.test, known.rows)
        stream = token_stream([known.joiner.join(texts)], tokenizer)
        ids = _windows(stream, samples or known.windows, length, source, None)
    elif known.within:
        if samples is None:
            raise InvalidInput(f"{source} is too large to be used as a whole.", "", "Say how many samples.")
        texts = _texts(source, known.train, 64 * samples * max(1, length // 1024))
        ids = _within(texts, tokenizer, samples, length, source, order)
    else:
        texts = _texts(source, known.train, None)
        ids = _windows(token_stream([known.joiner.join(texts)], tokenizer), samples, length, source, order)
    return CalibrationSet(input_ids=ids, source=source, seed=seed, text=digest_of(texts))


def _texts(source: str, split: str, limit: int | None) -> list[str]:
    """The first texts of a split of a reference, empty ones too."""
    known = _REFERENCES[source]
    return [row["text"] for row in itertools.islice(_load(source, known.name, known.config, split, limit), limit)]


def _within(
    texts: Sequence[str], tokenizer: Any, samples: int, length: int, name: str, order: np.random.Generator
) -> torch.Tensor:
    """One window at a random place of each of ``samples`` random documents that are longer than a window."""
    windows: list[np.ndarray] = []
    for i in order.permutation(len(texts)):
        stream = token_stream([texts[i]], tokenizer)
        if len(stream) > length:
            start = int(order.integers(len(stream) - length))
            windows.append(stream[start : start + length])
        if len(windows) == samples:
            break
    if not windows:
        problem = f"None of {len(texts)} documents of {name} has more than {length} tokens."
        raise NotEnoughText(problem, "A window lies within one document.", "Use a smaller length.")
    if len(windows) < samples:
        text = "%d documents of %s have more than %d tokens: %d samples are used instead of %d."
        logger.warning(text, len(windows), name, length, len(windows), samples)
    return torch.from_numpy(np.stack(windows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of text for a language model."""

    name: str  #: what the user named
    train: tuple[Encoded, ...]
    evaluation: dict[str, tuple[Encoded, ...]]  #: held-out rows by split
    metric: str = "loss"  #: nats per learned token
    text: str | None = None  #: content hash of the whole source of the rows to train on, as that of a ``CalibrationSet``

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
    source: Path | str | Sequence[Row],
    tokenizer: Any,
    *,
    limit: int,
    everything: bool = False,
    held_out: str | None = None,
) -> Texts:
    """Rows of text to train on, and rows that are held out, of a source as in :func:`calibration`.

    Conversations, completions and instructions are learned on their answers (``everything``: also their prompts), plain texts
    whole; a row has at most ``limit`` tokens. ``held_out`` is another source of held-out rows; by default they are a tenth of
    the rows, chosen by a hash of their content (of the standard library its evaluation modules).
    """
    name, rows = _named_rows(source, "calibration")
    rows = _written_rows(rows, name)
    if held_out is None and name == "stdlib":
        held_out = name
    if held_out is None:
        sides = _split(rows, name)
    else:
        sides = rows, _written_rows(_read_rows(held_out, "evaluation"), held_out)
    train, held_out_rows = (tuple(encode(part, tokenizer, limit=limit, everything=everything)) for part in sides)
    return Texts(name=name, train=train, evaluation={"held_out": held_out_rows}, text=digest_of(row for row, _ in rows))


def _split(rows: list[tuple[Row, str]], source: str) -> tuple[list[tuple[Row, str]], list[tuple[Row, str]]]:
    """Hold out the tenth with the smallest hashes: equal rows fall on one side, and the order of the file does not matter."""
    if len(rows) < 2:
        raise NotEnoughText(f"{source} has {len(rows)} rows.", "One is held out, so two are needed.", "Give more rows.")
    keys = [hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest() for row, _ in rows]
    last = sorted(keys)[max(1, round(_HELD_OUT * len(rows))) - 1]
    sides = [[r for r, k in zip(rows, keys, strict=True) if (k <= last) is is_held_out] for is_held_out in (False, True)]
    if not sides[0]:
        raise InvalidInput(f"All rows of {source} are equal.", "A row is held out, another trained on.", "Give other rows.")
    return sides[0], sides[1]
