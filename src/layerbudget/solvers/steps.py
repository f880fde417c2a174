r"""One step of a sequential plan: the best plan within reach of the present one, by a model of the damage.

Minimises ``sum_k f_k(rho_k)`` subject to ``sum_k n_k rho_k = S`` and ``l_k <= rho_k <= u_k``, ``f_k`` the lower convex hull of
the damage at a few levels of unit k between its bounds. Hulls are piecewise linear: segments are taken in the order of damage
per parameter: exact, for any number of units (:mod:`layerbudget.solvers.calibrated`).
"""

from __future__ import annotations

import numpy as np

from ..errors import InfeasibleBudget
from .calibrated import CalibratedPenalty
from .counts import round_parameters
from .inputs import Vector
from .solution import Solution
from .sparsity import sparsify


def reach(present: Vector, trust: float, cap: float, count: int) -> np.ndarray:
    """Levels around a plan, evenly spaced within ``trust`` of it and within ``[0, cap]``, shape ``(K, count)``.

    >>> reach(np.array([0.5, 0.95]), 0.1, 0.9, 3).round(3).tolist()
    [[0.4, 0.5, 0.6], [0.85, 0.9, 0.95]]
    """
    high = np.minimum(present + trust, np.maximum(cap, present))
    low = np.maximum(np.minimum(present, high) - trust, 0.0)
    return low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, count)


def step_within(levels: np.ndarray, damage: np.ndarray, numel: np.ndarray, total: int) -> tuple[np.ndarray, Solution]:
    """Whole parameters of every unit, summing to ``total``, with the least damage by the model.

    Args:
        levels: Sparsities, increasing, shape ``(K, L)``; the first and the last are the bounds.
        damage: Damage there, in nats, relative to any common point of a unit, shape ``(K, L)``.
        numel: Prunable parameters, shape ``(K,)``.
        total: Sum of the counts.

    Returns:
        Counts, shape ``(K,)``, and the certified solution, whose values are sparsities above the first level.

    Raises:
        InfeasibleBudget: The total lies outside of what the bounds allow.
    """
    low, n = levels[:, 0], numel.astype(np.float64)
    least, most = float(low @ n), float(levels[:, -1] @ n)
    if not least - 1.0 <= total <= most + 1.0:
        raise InfeasibleBudget(
            f"{total} parameters are to go; the bounds allow {least:.0f} to {most:.0f}.", "",
            "Raise max_sparsity, or trust the model further.",
        )  # fmt: skip
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
