"""The gain of every further rank, as ``rank-gain`` measures it: what it says of ranks, and of uniform ones. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import InvalidInput
from ...scores import Scores
from ...solvers.inputs import Vector
from ...storage import reading
from ..rules import Problem

FEW = 64  # scored rows below which gains by rank are those of these rows alone
TAKE_UNIFORM = 0.95  # share of the gain from which on uniform ranks are advised


def measured(scores: object) -> bool:
    """Return whether scores have the gain of every further rank."""
    return isinstance(scores, Scores) and "increments" in scores.extra


def increments_of(scores: Scores, damping: float | None) -> list[list[float]]:
    """Return the gain of the first, second, ... rank of every block."""
    if not measured(scores):
        raise InvalidInput(
            "The rule by-rank needs the gain of every further rank.",
            f"The scores of {scores.estimator} have one number per block.",
            "Score with --estimator rank-gain --by linear.",
        )
    return _table_of(scores, "increments", damping)


def _table_of(scores: Scores, name: str, damping: float | None) -> list[list[float]]:
    """Return numbers of scores, dampings x blocks x ranks, at one damping: ``(blocks, ranks)``."""
    try:
        rows: list[list[list[float]]] = reading.converted(scores.extra[name], list[list[list[float]]])
    except ValueError as error:
        raise InvalidInput(f"The {name} of these scores do not read ({error}).", "", "Score again.") from error
    if (len(rows), {len(row) for row in rows}) != (len(scores.damping), {len(scores.blocks)}):
        raise InvalidInput(
            f"The {name} of these scores are of another shape than the scores.",
            f"They are {len(scores.damping)} dampings x {len(scores.blocks)} blocks x ranks.",
            "Score again.",
        )
    return rows[scores.index(damping)]


def gain_of(rows: Sequence[Sequence[float]], counts: Iterable[int]) -> float:
    """Return the gain of ranks, as far as it was measured."""
    return float(sum(sum(row[: int(n)]) for row, n in zip(rows, counts, strict=True)))


def noise_share(scores: Scores, counts: Iterable[int], value: float, damping: float | None = None) -> float | None:
    """Share of a gain that noise alone gives the same ranks; None where the scores have no floor or nothing is gained."""
    if "increments_floor" not in scores.extra or value <= 0:
        return None
    return gain_of(_table_of(scores, "increments_floor", damping), counts) / value


def uniform_share(problem: Problem, rows: Sequence[Sequence[float]], value: float, high: Vector) -> float | None:
    """Gain of the same rank everywhere over the plan's: what there is to win.

    The rank is as large as the budget allows within the floors, the caps ``high`` and the fixed ranks, which the others pay for
    or are left; a fraction of a rank earns in proportion.
    """
    step = problem.multiple
    floor, cap = np.ceil(problem.low / step - 1e-9) * step, np.floor(high / step + 1e-9) * step
    levels = np.unique(np.concatenate([floor, cap]))  # what is spent is a straight line between these
    spent = [float(problem.amount @ np.clip(level, floor, cap)) for level in levels]
    rank: Vector = np.clip(np.interp(problem.target, spent, levels), floor, cap)
    curves = (np.concatenate([[0.0], np.cumsum(row)]) for row in rows)
    worth = sum(float(np.interp(r, np.arange(len(c)), c)) for r, c in zip(rank, curves, strict=True))
    return worth / value if value > 0 else None


def on_gains(problem: Problem, counts: np.ndarray, damping: float | None) -> dict[str, Any]:
    """Return what measured gains say of the ranks of any rule: fields of :class:`~.payload.RanksPayload`.

    ``uniform_share`` is not known where a block has more ranks than were measured.
    """
    scores = problem.need_scores()
    rows: Sequence[Sequence[float]] = increments_of(scores, damping)
    ends = {
        block.name: len(row)
        for block, row, count, cap in zip(problem.blocks, rows, counts, problem.high, strict=True)
        if row and row[-1] > 0 and (len(row) < count or len(row) == count < cap)
    }
    beyond = any(len(row) < count for row, count in zip(rows, counts, strict=True))
    value = gain_of(rows, counts)
    said: dict[str, Any] = {
        "uniform_share": None if beyond else uniform_share(problem, rows, value, problem.high),
        "noise_share": noise_share(scores, counts, value, damping),
    }
    said |= {"at_measured": ends} if ends else {}
    scored = scores.data.get("samples", FEW)
    return {**said, "scored_rows": scored} if scored < FEW else said
