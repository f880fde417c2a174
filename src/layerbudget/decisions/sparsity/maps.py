"""Published maps from layer values to sparsities, and the two that need no values.

Caps hold and the budget is met: what a map would give beyond a cap is divided over the other blocks, which the originals leave
out. Fixed blocks keep what they have; the map is made on the others.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput
from ...solvers.dual import piecewise_root
from ...solvers.inputs import Vector, number
from ..rules import Problem, RuleResult, rule


@rule("sparsity", "uniform", summary="the same sparsity everywhere, as far as the bounds allow")
def _uniform(problem: Problem) -> RuleResult:
    return _scaled(problem, np.ones(len(problem.blocks)))


@rule("sparsity", "size", summary="sparsity in proportion to a block's size")
def _size(problem: Problem) -> RuleResult:
    return _scaled(problem, problem.amount / problem.amount.mean())


@rule("sparsity", "layerif", summary="LayerIF's map: scores stretched to a band around the target")
@rule("sparsity", "alphapruning", summary="AlphaPruning's map: scores stretched to a band around the target")
def _stretched(
    problem: Problem,
    *,
    damping: float | None = None,
    width: Annotated[float | None, "default: 0.3; sparsities are stretched to 1 - width ... 1 + width of the target"] = None,
) -> RuleResult:
    """The metric stretched to ``[1 - width, 1 + width]`` and rescaled to the budget; published scripts use 0.1 to 0.3.

    A larger metric means more pruning; a flat one gives the uniform plan (the originals divide 0 by 0).
    """
    width = 0.3 if width is None else number(width, "width")
    r = _span(problem, -problem.oriented(damping)) * 2.0 * width
    return _scaled(problem, np.maximum(r + (1.0 - width), 0.0) if r.any() else np.ones(r.size))


@rule("sparsity", "owl", summary="OWL's map: the more outliers, the fewer zeros")
def _owl(
    problem: Problem,
    *,
    damping: float | None = None,
    width: Annotated[float | None, "default: 0.08; OWL's lambda: half of the span of the sparsities"] = None,
) -> RuleResult:
    """``d = (o - min o) / (max o - min o) 2 width``, ``rho = s + mean(d) - d``, the mean over blocks.

    All are shifted by one number until the budget, which counts parameters, is met under the caps.
    """
    d = _span(problem, problem.oriented(damping)) * 2.0 * (0.08 if width is None else number(width, "width"))
    free, n = ~problem.held, problem.amount
    rho = problem.share + (d[free].mean() if free.any() else 0.0) - d
    return _filled(problem, np.ones(n.size), rho)


@rule("sparsity", "atp", summary="ATP: an arithmetic progression over depth")
def _atp(
    problem: Problem, *, step: Annotated[float | None, "default: half of the largest; zeros more from block to block"] = None
) -> RuleResult:
    """``rho_i = s - step (L - 1) / 2 + step i`` (ICML 2025); its step is found by a grid on perplexity, here it is given."""
    length, share = len(problem.blocks), problem.share
    most = min(2 * share, 2 * (1 - share)) / max(length - 1, 1)
    step = most / 2 if step is None else float(step)
    if not 0 <= step <= most:
        raise InvalidInput(f"step is {step:g}.", f"At sparsity {share:g} and {length} blocks it lies in [0, {most:g}].", "")
    value = share + step * (np.arange(length) - (length - 1) / 2)
    return RuleResult(value=np.clip(value, problem.low, problem.high))


def _span(problem: Problem, metric: Vector) -> Vector:
    """The metric moved to ``[0, 1]`` by the smallest and largest of the blocks that are not fixed; zeros where it is flat."""
    free = metric[~problem.held]
    spread = np.ptp(free) if free.size else 0.0
    return (metric - free.min()) / spread if spread > 0 else np.zeros(metric.size)


def _scaled(problem: Problem, ratio: Vector) -> RuleResult:
    """Sparsities in proportion to ``ratio``, as far as the bounds allow."""
    largest = ratio[~problem.held].max(initial=0.0)
    return _filled(problem, np.maximum(ratio, 1e-12 * largest), np.zeros(ratio.size))


def _filled(problem: Problem, slope: Vector, offset: Vector) -> RuleResult:
    """``clip(t slope + offset)`` with the ``t`` at which the parameter-weighted mean of the free blocks is their share."""
    value, free = problem.low.copy(), ~problem.held
    if not free.any():
        return RuleResult(value=value)
    n, a, b, low, high = (v[free] for v in (problem.amount, slope, offset, problem.low, problem.high))
    least, most = float(np.dot(n, low) / n.sum()), float(np.dot(n, high) / n.sum())
    if not least - 1e-12 <= problem.share <= most + 1e-12:
        raise InfeasibleBudget(
            f"The global sparsity {problem.share:g} does not fit the caps.",
            f"It must lie in [{least:.4g}, {most:.4g}].",
            f"Raise max_sparsity to at least {problem.share:g}, or prune less.",
        )
    t, _, _ = piecewise_root(n * a, n * b, n * low, n * high, problem.share * float(n.sum()))
    value[free] = np.minimum(np.maximum(t * a + b, low), high)
    return RuleResult(value=value)
