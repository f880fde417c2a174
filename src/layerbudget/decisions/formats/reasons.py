"""Why every block has its format: the damage of that format and of the next smaller and larger one. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import CorruptFile
from ...plan import Plan, payload_of
from ...scores import Scores
from .limits import Limits
from .payload import FormatsPayload
from .table import FormatTable


def types_of_blocks(plan: Plan) -> list[str] | None:
    """Return the format of every block of a plan of formats, ``(K,)``; None where it does not name them all."""
    formats = payload_of(plan, FormatsPayload).formats
    if any(not b.modules or b.modules[0] not in formats for b in plan.blocks):
        return None
    return [formats[b.modules[0]] for b in plan.blocks]


def reasons(plan: Plan, scores: Scores | None = None) -> list[dict[str, Any]]:
    """Return a row ``{name, format, bits, bytes}`` by block of a plan of formats, and why it has that format.

    The reasons are ``damage`` (nats per token in the format), ``smaller`` and ``larger``: the next format with fewer bytes and
    the next one with less damage, each ``{format, bytes, damage}`` or None. Plans of bits hold them; plans of
    caches and of both together do not, and their rows have only what is known. No rows where blocks have no format.

    Args:
        plan: The plan.
        scores: What ``plan bits --save-scores`` kept of it; rows then also have ``error``, the standard error of ``damage``.

    Raises:
        ModelMismatch: Scores that the plan was not made from.
        CorruptFile: The plan's reasons are not of its blocks.
    """
    kinds = types_of_blocks(plan)
    if kinds is None:
        return []
    rows = list[dict[str, Any]]()
    for block, kind in zip(plan.blocks, kinds, strict=True):
        rows.append({"name": block.name, "format": kind, "bits": block.value, "bytes": block.count})
    stored = payload_of(plan, FormatsPayload).reasons
    columns = _measured(plan, scores, kinds) if scores is not None else {} if stored is None else vars(stored)
    if not columns:
        return rows
    if any(len(column) != len(rows) for column in columns.values()):
        raise CorruptFile("The reasons of this plan are not of its blocks.", "", "Make the plan again.")
    for k, row in enumerate(rows):
        row |= {name: column[k] for name, column in columns.items()}
        for name in ("smaller", "larger"):
            if (other := row[name]) is not None:
                row[name] = {"format": other[0], "bytes": other[1], "damage": other[2]}
    return rows


def _measured(plan: Plan, scores: Scores, kinds: list[str]) -> dict[str, Any]:
    """The reasons as :meth:`Table.reasons` gives them, with standard errors, by the scores that a plan was made from."""
    plan.check_scores(scores)
    table = Limits.of(plan).restrict(FormatTable.of(scores))
    chosen = np.array([table.formats.index(kind) for kind in kinds])
    error = table.error[np.arange(len(chosen)), chosen]
    return {**vars(table.reasons(chosen)), "error": [float(f"{e:.3g}") for e in error]}
