"""Rows of text as tokens with a mask of what is learned: one reading for scoring, measuring, fine-tuning and evaluating.

A row is tokenised whole, so that no boundary changes its tokens; a token is learned where it reaches into an answer. Rows
longer than the limit lose their end, as in TRL; rows that keep no answer are left out, and both are counted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidInput, NotEnoughText
from .columns import COLUMNS, of_every_row, suggestion, whole_text
from .dialogues import dialogue, format_of, text_of
from .files import Row
from .templates import Dialogue, said_of_rows

logger = logging.getLogger(__name__)

IGNORE = -100


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One row as tokens; its labels are the same, -100 where no loss is taken."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


def encode(rows: Sequence[tuple[Row, str]], tokenizer: Any, *, limit: int, everything: bool = False) -> list[Encoded]:
    """Rows of one format, each with the name of its file, as at most ``limit`` tokens; ``everything`` learns prompts too.

    Rows that keep nothing to learn are left out, and said to be.
    """
    return shortened(whole_rows(rows, tokenizer, everything=everything), limit)


def whole_rows(rows: Sequence[tuple[Row, str]], tokenizer: Any, *, everything: bool = False) -> list[Encoded]:
    """Rows of one format as all of their tokens; what a chat template leaves out of them is refused, or said."""
    check_one_format(rows)
    dialogues = of_every_row(rows, lambda row, where: _dialogue(row, where, tokenizer))
    said_of_rows(dialogues)
    return [_tokens(made, tokenizer, everything) for made in dialogues]


def learned_tokens(rows: Sequence[Encoded], limit: int) -> int:
    """How many of the first ``limit`` tokens of every row are learned; no loss is taken on the first one."""
    return sum(label != IGNORE for row in rows for label in row.labels[1:limit])


def shortened(rows: Sequence[Encoded], limit: int) -> list[Encoded]:
    """Rows of at most ``limit`` tokens; those that keep nothing to learn are left out, and said to be."""
    short_rows, cut = [], 0
    for whole in rows:
        cut += len(whole.input_ids) > limit
        kept = Encoded(whole.input_ids[:limit], whole.labels[:limit])
        if any(v != IGNORE for v in kept.labels[1:]):
            short_rows.append(kept)
    if not short_rows:
        raise NotEnoughText(
            f"None of {len(rows)} rows keeps an answer within {limit} tokens.", "", "Allow longer rows, or shorten the prompts."
        )
    if cut:
        gone = f"; {len(rows) - len(short_rows)} of them kept no answer and are left out" if len(rows) > len(short_rows) else ""
        logger.warning("%d of %d rows are longer than %d tokens and lose their end%s.", cut, len(rows), limit, gone)
    return short_rows


def check_one_format(rows: Sequence[tuple[Row, str]]) -> None:
    """Refuse rows of several formats; the first of each is named, with what its columns may have meant."""
    first: dict[str | None, tuple[Row, str]] = {}
    for row, where in rows:
        first.setdefault(format_of(row), (row, where))
    if len(first) > 1:
        named = " and ".join(f"{kind or 'text'} in {where}" for kind, (_, where) in first.items())
        guess = suggestion(first[None][0], COLUMNS) if None in first and isinstance(first[None][0], dict) else ""
        what = f"The rows are of several formats: {named}."
        raise InvalidInput(what, "All rows of one source have one.", guess or "Correct those rows, or split them.")


def _dialogue(row: Row, where: str, tokenizer: Any) -> Dialogue:
    """A row with its learned spans; a plain text is learned whole."""
    kind = format_of(row)
    if kind is not None and isinstance(row, dict):
        made = dialogue(row, kind, tokenizer, where)
        whole_text(made.text, f"A conversation in {where}")  # what is read beside messages: tools, a history
        return made
    text = text_of(row, where)
    return Dialogue(text, ((0, len(text)),), special=True, ended=True)


def _tokens(made: Dialogue, tokenizer: Any, everything: bool) -> Encoded:
    """Tokens of a text and the labels of those that reach into a learned span, with the end of text where it needs one."""
    if not getattr(tokenizer, "is_fast", False):
        what = f"{type(tokenizer).__name__} does not say where its tokens stand in the text."
        raise InvalidInput(what, "The mask of the answers needs that.", "Use the model's fast tokenizer (tokenizer.json).")
    coded = tokenizer(made.text, add_special_tokens=made.special, return_offsets_mapping=True, verbose=False)
    ids, places = list(coded["input_ids"]), _untrimmed(coded["offset_mapping"], coded.tokens(), made.text)
    end = tokenizer.eos_token_id
    if made.special and len(ids) > 1 and ids[-1] == end and places[-1][0] == places[-1][1]:
        ids, places = ids[:-1], places[:-1]
    learned = [everything or any(a < high and low < b for low, high in made.learned) for a, b in places]
    if made.ended and end is not None and ids[-1:] != [end]:
        ids, learned = [*ids, end], [*learned, True]
    return Encoded(tuple(ids), tuple(i if on else IGNORE for i, on in zip(ids, learned, strict=True)))


def _untrimmed(places: Sequence[tuple[int, int]], words: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Places of tokens with the spaces that they begin with: ``ByteLevel(trim_offsets=True)`` leaves those out."""
    spans, end = [], 0
    for (low, high), word in zip(places, words, strict=True):
        cut = word.startswith("Ġ") and end < low and not text[end:low].strip(" ")
        spans.append((end if cut else low, high))
        end = max(end, high)
    return spans


def padded(rows: Sequence[Encoded], pad: int) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` of shape ``(rows, length)``, padding behind the tokens.

    >>> padded([Encoded((5, 6), (-100, 6)), Encoded((7,), (7,))], pad=0)["input_ids"].tolist()
    [[5, 6], [7, 0]]
    """
    length = max(len(r.input_ids) for r in rows)

    def filled(values: Sequence[int], fill: int) -> list[int]:
        return [*values, *[fill] * (length - len(values))]

    return {
        "input_ids": torch.tensor([filled(r.input_ids, pad) for r in rows]),
        "attention_mask": torch.tensor([filled([1] * len(r.input_ids), 0) for r in rows]),
        "labels": torch.tensor([filled(r.labels, IGNORE) for r in rows]),
    }


def pad_of(tokenizer: Any) -> int:
    """The token that padding is written with; it is masked, so any will do.

    A pad token that was added to the tokenizer is not used: the model may have no embedding for it.
    """
    pad = tokenizer.pad_token_id
    added = pad is None or pad >= getattr(tokenizer, "vocab_size", pad + 1)
    return int((tokenizer.eos_token_id or 0) if added else pad)
