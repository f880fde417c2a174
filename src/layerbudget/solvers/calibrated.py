r"""Penalties measured on the model: one convex piecewise linear curve per block.

``psi_k`` runs through the measured points (sparsity, damage) of block k; damage is loss or KL after pruning that block alone.
The program is then a merge of slopes: segments are taken in the order of damage per parameter until the budget is met,
which is exact. Measured points that are not convex are replaced by their lower convex hull, and the change is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput, LengthMismatch, UnknownBlock
from .inputs import Vector

if TYPE_CHECKING:
    from .separable import Program

_AT_KNOT = 1e-12


class CalibratedPenalty:
    """Convex piecewise linear penalties, one per block.

    Args:
        ratios: Sparsities at which damage was measured, increasing, shape ``(M,)`` or ``(K, M)``; 0 (no damage) is added
            where it is missing. The largest one is a cap: nothing is assumed beyond what was measured.
        losses: Damage at those sparsities, shape ``(K, M)``, in any unit common to all blocks. Subtract the dense model's
            loss first.

    Attributes:
        change: Largest distance between measured points and the convex curve per block, shape ``(K,)``.
        knots: Sparsities of the hull's corners, shape ``(K, J)``, padded with the last one.
        slopes: Damage per unit of sparsity between corners, shape ``(K, J - 1)``, padded with ``inf``.

    Raises:
        LengthMismatch: The shapes do not fit together.
        InvalidInput: Ratios outside [0, 1], not increasing, or values that are not finite.

    >>> curves = CalibratedPenalty([0.25, 0.5], [[1.0, 3.0], [2.0, 3.0]])
    >>> curves.slopes.tolist(), curves.change.tolist()
    ([[4.0, 8.0], [6.0, inf]], [0.0, 0.5])
    """

    name, concave, exact = "calibrated", False, False

    def __init__(self, ratios: ArrayLike, losses: ArrayLike) -> None:
        damage = np.array(losses, dtype=np.float64)
        x = np.array(ratios, dtype=np.float64)
        if damage.ndim != 2 or x.shape not in ((damage.shape[1:]), damage.shape) or damage.size == 0:
            raise LengthMismatch(
                f"ratios have shape {x.shape} and losses {damage.shape}.",
                "They need (M,) or (K, M), and (K, M).",
                "Give one row of losses per block.",
            )
        x = np.broadcast_to(x, damage.shape)
        if not (
            np.isfinite(damage).all() and np.isfinite(x).all() and (np.diff(x) > 0).all() and x.min() >= 0 and x.max() <= 1
        ):
            raise InvalidInput(
                "The measured curves hold values that are not finite, or ratios that do not increase within [0, 1].",
                "Every block needs finite losses at increasing sparsities in [0, 1].",
                "Measure again, or drop the faulty points.",
            )
        corners, values = _anchored(x, damage)
        self.knots, self.values = _hulls(corners, values)
        steps = np.diff(self.knots)
        with np.errstate(all="ignore"):
            self.slopes = np.where(steps > 0, np.diff(self.values) / steps, np.inf)
        self.blocks = len(self.knots)
        self.change = np.abs(np.array([self.value(v) for v in corners.T]) - values.T).max(0)

    @classmethod
    def from_curves(
        cls, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], names: Sequence[str]
    ) -> CalibratedPenalty:
        """Build from ``{block name: (ratios, losses)}``, in the order of ``names``; all blocks need the same number of points.

        Raises:
            UnknownBlock: A block has no curve, or a curve names no block.
            LengthMismatch: Curves with different numbers of points.
        """
        missing, unknown = [n for n in names if n not in curves], [n for n in curves if n not in names]
        if missing or unknown:
            raise UnknownBlock(
                f"Curves are missing for {missing[:3]} and given for unknown blocks {unknown[:3]}.",
                f"The {len(names)} blocks are {list(names[:3])}, ...",
                "Measure one curve per block.",
            )
        points = {len(curves[n][i]) for n in names for i in (0, 1)}
        if len(points) != 1:
            raise LengthMismatch(
                f"The curves have {sorted(points)} points.", "All need the same number.", "Measure the same ratios."
            )
        return cls([curves[n][0] for n in names], [curves[n][1] for n in names])

    @property
    def limit(self) -> Vector:
        """Largest measured sparsity per block, shape ``(K,)``."""
        return self.knots[:, -1]

    def value(self, x: Vector) -> Vector:
        """Damage at sparsity ``x_k`` of block k, shape ``(K,)``."""
        rows = np.arange(self.blocks)
        left = np.clip((self.knots <= np.asarray(x)[:, None]).sum(1) - 1, 0, max(self.slopes.shape[1] - 1, 0))
        start, slope = self.knots[rows, left], self.slopes[rows, left] if self.slopes.shape[1] else np.zeros(self.blocks)
        step = np.clip(x, self.knots[:, 0], self.knots[:, -1]) - start
        return self.values[rows, left] + np.where(np.isfinite(slope), slope, 0.0) * step

    def derivative(self, x: Vector) -> Vector:
        """Slope to the right of ``x`` (to the left at the last knot)."""
        left, right = self.subgradient(x)
        return np.where(np.isfinite(right), right, left)

    def subgradient(self, x: Vector) -> tuple[Vector, Vector]:
        """Slopes to the left and right of ``x``, shape ``(K,)`` each; ``-inf`` and ``inf`` beyond the ends."""
        rows = np.arange(self.blocks)
        ends = np.full((self.blocks, 1), np.inf)
        slopes = np.hstack((-ends, self.slopes, ends))
        left = (self.knots < (x - _AT_KNOT)[:, None]).sum(1)
        right = (self.knots <= (x + _AT_KNOT)[:, None]).sum(1)
        return slopes[rows, left], slopes[rows, right]

    def inverse(self, p: Vector) -> Vector:
        """The knot at which slopes pass ``p_k``: everything cheaper is pruned, shape ``(K,)``."""
        below = (self.slopes < np.asarray(p)[:, None]).sum(1)
        return self.knots[np.arange(self.blocks), below]

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """Zero: a piecewise linear curve is convex and nowhere strongly so, and no finite transfer bound follows."""
        return np.zeros(self.blocks)

    def fill(self, program: Program) -> tuple[Vector, float, float, float]:
        """Merge the slopes of all blocks until the target is met: ``(x, price, lowest price, highest price)``.

        Segments of equal slope are filled in proportion to their length, so that the answer does not depend on order.
        """
        n, scale = program.amount, program.scale
        low, high = program.low[:, None], program.high[:, None]
        length = (np.clip(self.knots[:, 1:], low, high) - np.clip(self.knots[:, :-1], low, high)) * n[:, None]
        price = self.slopes * (scale / n)[:, None]
        used = length > 0
        prices, where = np.unique(price[used], return_inverse=True)
        need = program.target - float(np.dot(n, program.low))
        if not prices.size:
            return program.low.copy(), 0.0, -np.inf, np.inf
        filled = np.cumsum(np.bincount(where, weights=length[used], minlength=prices.size))
        at = min(int(np.searchsorted(filled, need * (1 - 1e-15))), prices.size - 1)
        before = float(filled[at - 1]) if at else 0.0
        fraction = min(max((need - before) / (filled[at] - before), 0.0), 1.0)
        partial = np.where((price == prices[at]) & used, length * fraction, np.where(price < prices[at], length, 0.0))
        x = np.clip(program.low + partial.sum(1) / n, program.low, program.high)
        ends = (float(prices[at]),) * 2
        if fraction == 1.0:
            ends = (float(prices[at]), float(prices[at + 1]) if at + 1 < prices.size else np.inf)
        elif fraction == 0.0:
            ends = (float(prices[at - 1]) if at else -np.inf, float(prices[at]))
        return x, float(prices[at]), *ends


def _anchored(ratios: Vector, losses: Vector) -> tuple[Vector, Vector]:
    """Curves that begin at (0, 0), shape ``(K, M)`` or, where some began later, ``(K, 1 + M)``."""
    begins = ratios[:, :1] == 0.0
    losses = losses - np.where(begins, losses[:, :1], 0.0)
    if begins.all():
        return np.array(ratios), losses
    zeros = np.zeros((len(ratios), 1))
    return np.hstack((zeros, ratios)), np.hstack((zeros, losses))


def _hulls(x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """Lower convex hulls of K curves with increasing x, collinear points dropped, padded with their last corner.

    Andrew's chain with one stack per curve: a point is pushed after all corners above the chord to it are popped.
    """
    count, points = x.shape
    stack = np.zeros((count, points), dtype=np.intp)
    size = np.zeros(count, dtype=np.intp)
    for i in range(points):
        active = np.flatnonzero(size > 1)
        while active.size:
            a, b = stack[active, size[active] - 2], stack[active, size[active] - 1]
            (xa, ya), (xb, yb) = ((x[active, c], y[active, c]) for c in (a, b))
            above = (yb - ya) * (x[active, i] - xb) >= (y[active, i] - yb) * (xb - xa)
            active = active[above]
            size[active] -= 1
            active = active[size[active] > 1]
        stack[np.arange(count), size] = i
        size += 1
    width = int(size.max())
    last = np.take_along_axis(stack, size[:, None] - 1, 1)
    corners = np.where(np.arange(width) < size[:, None], stack[:, :width], last)
    return np.take_along_axis(x, corners, 1), np.take_along_axis(y, corners, 1)
