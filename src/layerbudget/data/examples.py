"""A labelled task in memory: its rows, and what the answers are called."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TypeVar

from ..errors import InvalidInput

Kept = TypeVar("Kept")


def first_rows(rows: tuple[Kept, ...], n: int | None) -> tuple[Kept, ...]:
    """At most ``n`` rows, the first ones of a fixed shuffle, in their own order; all where ``n`` is None.

    Raises:
        InvalidInput: Fewer than one.
    """
    if n is not None and n < 1:
        raise InvalidInput(f"{n} rows are asked for.", "At least one is needed.", "Leave the limit out for all.")
    if n is None or n >= len(rows):
        return rows
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(f"{i}.{len(rows)}".encode()).digest())
    return tuple(rows[i] for i in sorted(order[:n]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One labelled row.

    Attributes:
        text: What an encoder reads.
        pair: Second sentence, where the task has two.
        label: Index into the task's ``labels``.
        prompt: What a causal LM reads.
        choices: How many of the task's labels are possible answers here (a question may have fewer options than another).
    """

    text: str
    pair: str | None
    label: int
    prompt: str
    choices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A labelled task.

    Attributes:
        name: Name of the task, or the file.
        labels: Label names; an encoder's head has as many outputs.
        answers: What a causal LM must say for each label.
        metric: ``matthews``, ``f1`` or ``accuracy``: the task's own headline.
        train: Training rows.
        evaluation: Held-out rows by split.
    """

    name: str
    labels: tuple[str, ...]
    answers: tuple[str, ...]
    metric: str
    train: tuple[Example, ...]
    evaluation: dict[str, tuple[Example, ...]]

    @property
    def digest(self) -> str:
        """Content hash of all rows."""
        h = hashlib.sha256()
        for name, rows in (("train", self.train), *sorted(self.evaluation.items())):
            h.update(name.encode())
            for row in rows:
                h.update(f"{row.prompt}\0{row.pair}\0{row.label}\0".encode())
        return h.hexdigest()[:16]

    def limited(self, train: int | None, evaluation: int | None = None) -> Task:
        """Return the task with at most so many rows, the first ones of a fixed shuffle.

        Raises:
            InvalidInput: Fewer than one row.
        """
        held = {k: first_rows(v, evaluation) for k, v in self.evaluation.items()}
        return dataclasses.replace(self, train=first_rows(self.train, train), evaluation=held)
