"""Published maps from layer values to sparsities, and the two that need no values (:mod:`layerbudget.solvers.rules`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import InvalidInput
from ..solvers import rules as maps
from ..solvers.inputs import Vector
from .rule import Decision, Problem, rule

_LSA = (0.06, 0.06, 0.02, 0.04, 0.02, 0.04, 0.10, 0.15, 0.12, 0.12)  # published widths at 10 % to 80 %; the ends repeat


def _on_free(problem: Problem, make: Callable[..., Vector], *vectors: Vector, **options: Any) -> Decision:
    """A map on the blocks that are not fixed; options that are None have the map's own default."""
    value, free = problem.low.copy(), ~problem.held
    options = {name: option for name, option in options.items() if option is not None}
    if free.any():
        bounds = {"max_sparsity": problem.high[free], "min_sparsity": problem.low[free]}
        value[free] = make(*(v[free] for v in vectors), problem.amount[free], problem.share, **bounds, **options)
    target = int(round(float(np.dot(value, problem.amount)))) if options.get("parity") else None
    return Decision(value=value, target=target)


@rule("sparsity", "uniform", summary="the same sparsity everywhere, as far as the bounds allow")
def _uniform(problem: Problem) -> Decision:
    return _on_free(problem, maps.uniform_sparsity)


@rule("sparsity", "size", summary="sparsity in proportion to a block's size")
def _size(problem: Problem) -> Decision:
    return _on_free(problem, maps.size_sparsity)


@rule("sparsity", "layerif", summary="LayerIF's map: scores stretched to a band around the target")
@rule("sparsity", "alphapruning", summary="AlphaPruning's map: scores stretched to a band around the target")
def _stretched(problem: Problem, *, damping: float | None = None, width: float | None = None, parity: bool = False) -> Decision:
    return _on_free(problem, maps.stretched_sparsity, -problem.oriented(damping), width=width, parity=parity)


@rule("sparsity", "owl", summary="OWL's map: the more outliers, the fewer zeros")
def _owl(problem: Problem, *, damping: float | None = None, width: float | None = None, parity: bool = False) -> Decision:
    return _on_free(problem, maps.owl_sparsity, problem.oriented(damping), width=width, parity=parity)


@rule("sparsity", "dlp", summary="DLP's map: the larger a layer's mean Wanda score, the more zeros")
def _dlp(problem: Problem, *, damping: float | None = None, width: float | None = None) -> Decision:
    """OWL's map of the importance ``1 - s_i / sum s``, width 0.15."""
    return _on_free(problem, maps.owl_sparsity, problem.oriented(damping), width=0.15 if width is None else width)


@rule("sparsity", "lsa", summary="LSA's map: the larger the removal error, the more zeros")
def _lsa(problem: Problem, *, damping: float | None = None, width: float | None = None) -> Decision:
    """``n_k rho_k = n_k s + (mean d - d_k) mean n``, d the importances stretched to twice the width, of layers or matrices.

    The width is that of the target's tenth by default.
    """
    free, n = ~problem.held, problem.amount
    value = problem.low.copy()
    width = _LSA[min(int(10 * problem.share + 1e-9), 9)] if width is None else width
    importance = problem.oriented(damping)[free]
    spread = np.ptp(importance) if free.any() else 0.0
    d = (importance - importance.min()) / spread * 2.0 * width if spread > 0 else np.zeros(importance.size)
    value[free] = problem.share + ((d.mean() - d) * n[free].mean() / n[free] if spread > 0 else 0.0)
    return Decision(value=value)


@rule("sparsity", "atp", summary="ATP: an arithmetic progression over depth")
def _atp(problem: Problem, *, step: float | None = None) -> Decision:
    """``rho_i = s - step (L - 1) / 2 + step i`` (ICML 2025); its step is found by a grid on perplexity, here it is given."""
    length, share = len(problem.blocks), problem.share
    most = min(2 * share, 2 * (1 - share)) / max(length - 1, 1)
    step = most / 2 if step is None else float(step)
    if not 0 <= step <= most:
        raise InvalidInput(f"step is {step:g}.", f"At sparsity {share:g} and {length} blocks it lies in [0, {most:g}].", "")
    value = share + step * (np.arange(length) - (length - 1) / 2)
    return Decision(value=np.clip(value, problem.low, problem.high))
