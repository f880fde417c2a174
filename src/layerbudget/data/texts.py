"""Text to fine-tune a language model on: training rows and held-out rows, as tokens with their mask."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from ..errors import InvalidInput, NotEnoughText
from .encoding import Encoded, digest_of, encode
from .examples import first_rows
from .files import BadRows, Row
from .text import read_documents, read_source

HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of text for a language model.

    Attributes:
        name: What the user named.
        train: Training rows.
        evaluation: Held-out rows by split.
        metric: ``loss``: nats per learned token.
    """

    name: str
    train: tuple[Encoded, ...]
    evaluation: dict[str, tuple[Encoded, ...]]
    metric: str = "loss"

    @property
    def digest(self) -> str:
        """Content hash of all tokens and labels."""
        held = [row for _, rows in sorted(self.evaluation.items()) for row in rows]
        return digest_of([*self.train, Encoded((), ()), *held])

    def limited(self, train: int | None) -> Texts:
        """Return the text with at most so many training rows, the first ones of a fixed shuffle.

        Raises:
            InvalidInput: Fewer than one.
        """
        return dataclasses.replace(self, train=first_rows(self.train, train))


def read_texts(
    source: str,
    tokenizer: Any,
    *,
    limit: int,
    everything: bool = False,
    held_out: str | None = None,
    skip_bad_rows: bool = False,
) -> Texts:
    """Read rows of text to train on, and rows that are held out.

    Conversations, completions and instructions are learned on their answers; plain texts whole, long ones in pieces.

    Args:
        source: As in :func:`layerbudget.data.text.calibration`.
        tokenizer: The model's tokenizer.
        limit: Longest row in tokens.
        everything: Learn prompts as well.
        held_out: Another source of held-out rows; by default a tenth of the rows, chosen by a hash of their content (of the
            standard library its evaluation modules).
        skip_bad_rows: Leave out rows that cannot be read and say how many, instead of refusing the first.

    Raises:
        InvalidInput, NotFound, MissingDependency: As reading the source does.
        NotEnoughText: Fewer than two rows.
    """
    bads = BadRows(skip_bad_rows), BadRows(skip_bad_rows)
    rows = _rows(source, "calibration", bads[0])
    if held_out is None and source == "stdlib":
        held_out = source
    if held_out is not None:
        train, held = rows, _rows(held_out, "evaluation", bads[1])
    else:
        train, held = _split(rows, source)
    sides = [
        tuple(encode(part, tokenizer, limit=limit, everything=everything, bad=bad))
        for part, bad in zip((train, held), bads, strict=True)
    ]
    return Texts(name=source, train=sides[0], evaluation={"held_out": sides[1]})


def _rows(source: str, group: str, bad: BadRows) -> list[tuple[Row, str]]:
    if source == "stdlib" or source.startswith("stdlib:"):
        return [(text, source) for text in read_documents(source, group=group)[0]]
    return read_source(source, group, None, bad)


def _split(rows: list[tuple[Row, str]], source: str) -> tuple[list[tuple[Row, str]], list[tuple[Row, str]]]:
    """Hold out the tenth with the smallest hashes: equal rows fall on one side, and the order of the file does not matter."""
    if len(rows) < 2:
        raise NotEnoughText(f"{source} has {len(rows)} rows.", "One is held out, so two are needed.", "Give more rows.")
    keys = [hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest() for row, _ in rows]
    last = sorted(keys)[max(1, round(HELD_OUT * len(rows))) - 1]
    sides = [[r for r, k in zip(rows, keys, strict=True) if (k <= last) is held] for held in (False, True)]
    if not sides[0]:
        raise InvalidInput(f"All rows of {source} are equal.", "A row is held out, another trained on.", "Give other rows.")
    return sides[0], sides[1]
