r"""Steps down a measured damage: the one trust-region loop, and the program of one step of sparsities. No torch.

**The loop** (:func:`descend`). Let ``D`` be the damage that can only be measured, and ``m_x(y)`` a model of ``D(y) - D(x)``
around the present state ``x`` that is trusted within a radius ``r``.

    1. propose   y of the region of radius r with ``m_x(y) < 0``: the least by an exact program, then states nearer to x
    2. measure   D(y)
    3. accept    the first y with ``D(y) < D(x)``: x = y, and r is the radius that y came from, ``SHRINK`` times it where less
                 than the share ``HELD`` of the promise ``m_x(y)`` came
    4. stop      where no proposal is left, or where the next one cannot be paid

Every accepted state has less damage than the one before, so the last one is the best of all that were measured. Where ``m_x``
is exact to first order and the nearer proposals tend to x, some proposal is accepted unless x is stationary.

**One step of sparsities** (:func:`step_within`). Minimises ``sum_k f_k(rho_k)`` subject to ``sum_k n_k rho_k = S`` and
``l_k <= rho_k <= u_k``, ``f_k`` the lower convex hull of the damage at a few levels of unit k between its bounds. Hulls are
piecewise linear: segments are taken in the order of damage per parameter: exact, for any number of units
(:mod:`layerbudget.solvers.utilities`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ..errors import InfeasibleBudget
from .inputs import Vector
from .programs import sparsify
from .rounding import round_parameters
from .separable import Solution
from .utilities import CalibratedPenalty

SHRINK, HELD = 0.8, 0.5


class Evaluation(Protocol):
    """Measurement at a state."""

    @property
    def divergence(self) -> float:
        """The damage there."""


Point = TypeVar("Point", bound=Evaluation)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """A state to try.

    ``promise`` is the model's change of the damage, below zero; ``trust`` is the radius of the region that it came from, and
    ``length`` its share of the way to the best state of that region.
    """

    state: Any
    promise: float
    trust: float
    length: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step(Generic[Point]):
    """An accepted proposal: what was measured there, the measured change (below zero), and the radius of the next step."""

    point: Point
    proposal: Proposal
    change: float
    trust: float


def descend(
    point: Point,
    trust: float,
    proposals: Callable[[Point, float], Iterable[Proposal]],
    evaluate: Callable[[Point, Proposal], Point],
    affords: Callable[[], bool],
    *,
    least: float = 0.0,
) -> Iterator[Step[Point]]:
    """Yield accepted steps from an evaluated point and a first radius, as they are made.

    Args:
        point: Where the search starts, evaluated.
        trust: The first radius.
        proposals: Gives those from a point within a radius, the best one first. It is resumed only where the last one has not
            gained, so that a generator can shorten the next one, or leave out what did not help.
        evaluate: Goes from the last accepted point to a proposal and measures there.
        affords: Says whether one more evaluation can be paid.
        least: The radius never shrinks below it by itself.
    """
    while True:
        for proposal in proposals(point, trust):
            if not affords():
                return
            candidate = evaluate(point, proposal)
            change = candidate.divergence - point.divergence
            if change < 0:
                break
        else:
            return
        point, trust = candidate, proposal.trust
        if change > HELD * proposal.promise:
            trust = max(least, trust * SHRINK)
        yield Step(point=point, proposal=proposal, change=change, trust=trust)


def reach(present: Vector, trust: float, cap: float, count: int) -> np.ndarray:
    """Levels around a plan, evenly spaced within ``trust`` of it and within ``[0, cap]``, shape ``(K, count)``.

    >>> reach(np.array([0.5, 0.95]), 0.1, 0.9, 3).round(3).tolist()
    [[0.4, 0.5, 0.6], [0.85, 0.9, 0.95]]
    """
    high = np.minimum(present + trust, np.maximum(cap, present))
    low = np.maximum(np.minimum(present, high) - trust, 0.0)
    return low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, count)


def step_within(levels: np.ndarray, damage: np.ndarray, numel: np.ndarray, total: int) -> tuple[np.ndarray, Solution]:
    """Return whole parameters of every unit that sum to ``total``, with the least damage by the model, and the solution.

    ``levels`` are increasing sparsities, shape ``(K, L)``, of which the first and the last are the bounds, and ``damage`` is
    that of every level in nats, relative to any common point of a unit. Values of the solution are sparsities above the first
    level.
    """
    low, n = levels[:, 0], numel.astype(np.float64)
    least, most = float(low @ n), float(levels[:, -1] @ n)
    if not least - 1.0 <= total <= most + 1.0:
        raise InfeasibleBudget(
            f"{total} parameters are to go; the bounds allow {least:.0f} to {most:.0f}.",
            "",
            "Raise max_sparsity, or trust the model further.",
        )
    penalty = CalibratedPenalty(levels - low[:, None], damage - damage[:, :1])
    goal = min(max(total - least, 0.0), most - least)
    solution = sparsify(np.ones(len(n)), n, goal, max_sparsity=penalty.limit, penalty=penalty, spend="exactly")
    return round_parameters(low + solution.value, numel, total), solution


def curves_at(levels: np.ndarray, damage: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Curves at other sparsities between their levels, ``(K, M)``; levels are evenly spaced within each row."""
    rows, width = np.arange(len(levels))[:, None], levels[:, -1:] - levels[:, :1]
    place = np.clip((wanted - levels[:, :1]) / np.where(width > 0, width, 1.0), 0.0, 1.0) * (levels.shape[1] - 1)
    left = np.minimum(place.astype(int), levels.shape[1] - 2)
    share = place - left
    return damage[rows, left] * (1 - share) + damage[rows, left + 1] * share


def damage_at(levels: np.ndarray, damage: np.ndarray, value: Vector) -> float:
    """Damage of a plan by the model: all units' curves at their values, added up."""
    return float(curves_at(levels, damage, value[:, None]).sum())
