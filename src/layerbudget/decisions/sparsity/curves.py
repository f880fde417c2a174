"""Damage as a function of sparsity, per block: measured, predicted, smoothed. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ...errors import InvalidInput

_TINY = 1e-12
_POINTS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """What pruning one block costs, at a few ratios.

    Attributes:
        ratios: ``{block: (M,)}`` sparsities, increasing.
        damage: ``{block: (M,)}`` damage in nats per token (KL from the dense model, or loss minus the dense loss).
        metric: ``kl``, ``loss`` or ``second-order``.
        method: Pruner that was measured.
        relative: Curves around a plan, all other blocks pruned: only differences within a curve mean anything.
        forwards: Forwards of one block on one batch that it took.

    Raises:
        InvalidInput: Ratios that do not increase within [0, 1], or damages of another number.
    """

    ratios: Mapping[str, tuple[float, ...]]
    damage: Mapping[str, tuple[float, ...]]
    metric: str
    method: str
    relative: bool = False
    forwards: int = 0

    def __post_init__(self) -> None:
        for name, ratios in self.ratios.items():
            x = np.asarray(ratios, dtype=np.float64)
            if not x.size or not (np.diff(x) > 0).all() or not (x[0] >= 0 and x[-1] <= 1):
                raise InvalidInput(f"{name} has the ratios {list(ratios)}.", "They increase within [0, 1].", "Sort them.")
            if len(self.damage.get(name, ())) != x.size:
                raise InvalidInput(f"{name} has {x.size} ratios and other damages.", "", "Give one damage per ratio.")

    @property
    def names(self) -> list[str]:
        """Blocks, in order."""
        return list(self.ratios)

    def penalty(self, step: float = 0.01) -> dict[str, tuple[list[float], list[float]]]:
        """Curves on a fine grid, as ``plan_sparsity(penalty=...)`` takes them.

        Between measured points damage grows exponentially (log-linear interpolation), below the first one
        quadratically; curves around a plan are parabolas. Without this the piecewise linear program would put every block
        on a measured ratio.

        Args:
            step: Grid of sparsity, of the curve that goes furthest.
        """
        if self.relative:
            return {name: _parabola(np.array(self.ratios[name]), np.array(self.damage[name])) for name in self.names}
        last = max(ratios[-1] for ratios in self.ratios.values())
        count = max(2, int(np.ceil(last / step - 1e-9)) + 1)  # one number of points for all, wherever a curve ends
        return {name: _exponential(np.array(self.ratios[name]), np.array(self.damage[name]), count) for name in self.names}

    def total(self, sparsity: Mapping[str, float]) -> float:
        """Damage of all blocks at these sparsities, as if it added up, in nats per token.

        >>> one = {"ratios": {"a": (0.4, 0.8)}, "damage": {"a": (0.1, 0.4)}}
        >>> round(Curves(**one, metric="kl", method="wanda").total({"a": 0.4}), 6)
        0.1
        """
        return float(sum(np.interp(sparsity[name], *points) for name, points in self.penalty().items()))


def _exponential(x: np.ndarray, y: np.ndarray, count: int) -> tuple[list[float], list[float]]:
    y = np.maximum.accumulate(np.maximum(y, _TINY))
    grid = np.linspace(0.0, float(x[-1]), count)
    value = np.exp(np.interp(grid, x, np.log(y)))
    below = grid < x[0]
    value[below] = y[0] * (grid[below] / x[0]) ** 2
    return grid.tolist(), value.tolist()


def _parabola(x: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """Convex parabola through the points, shifted to zero at the first; flat below it, so that its slopes all count."""
    curvature, slope, _ = np.polyfit(x - x[0], y - y[0], 2) if len(x) > 2 else (0.0, np.polyfit(x, y, 1)[0], 0.0)
    if curvature < 0:
        curvature, slope = 0.0, (y[-1] - y[0]) / (x[-1] - x[0])
    grid = np.linspace(float(x[0]), float(x[-1]), _POINTS if x[0] > 0 else _POINTS + 1)
    value = curvature * (grid - x[0]) ** 2 + slope * (grid - x[0])
    if x[0] > 0:
        grid, value = np.concatenate(([0.0], grid)), np.concatenate(([min(0.0, -slope * x[0])], value))
        value = value - value[0]
    return grid.tolist(), value.tolist()
