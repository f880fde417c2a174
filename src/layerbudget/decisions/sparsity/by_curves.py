"""The plan calibrated to the pruner: measured curves, the program, and a step taken only as far as it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from ...data.calibration import CalibrationSet
from ...models.blocks import describe, partition
from ...plan import Plan
from ...records import Block
from ...solvers.counts import round_parameters
from .curves import Curves
from .measure import damage_curves, plan_damage
from .plan import plan_sparsity

Progress = Callable[[int, int], None]
STEPS = (0.0, 0.5, 1.0)


def plan_by_curves(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block] | None = None,
    *,
    sparsity: float = 0.5,
    max_sparsity: float = 0.9,
    method: str = "wanda",
    metric: str = "kl",
    spread: Sequence[float] = (-0.2, -0.1, 0.0, 0.1, 0.2),
    iterations: int = 1,
    trust: float = 0.08,
    batch_size: int = 8,
    measure_batches: int | None = None,
    start: Curves | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, list[Curves]]:
    """Plan with penalties measured on this model, this pruner and this text.

    Args:
        model: The dense model; left as it was.
        data: Calibration tokens.
        blocks: Layers by default.
        sparsity: Target.
        max_sparsity: Cap.
        method: Pruner.
        metric: ``kl`` or ``loss``.
        spread: Measured ratios, relative to the target.
        iterations: How often to measure again around the plan and move it. All blocks move at once, so the whole step may be
            too long: the old plan, half of the step and the step are pruned and measured on all of ``data``, and the best is
            taken.
        trust: Largest move of one block per iteration.
        batch_size: Sequences per forward.
        measure_batches: See :func:`damage_curves`.
        start: Curves of the dense model that were measured before (one measurement serves every target).
        progress: Called with (blocks done, blocks) of each measurement.

    Returns:
        The plan (``extra`` has its measured ``damage``, and ``search_forwards``) and the curves of every round.
    """
    blocks = tuple(blocks) if blocks is not None else partition(model)
    ratios = sorted({min(max_sparsity, max(0.02, round(sparsity + s, 4))) for s in spread})
    common: dict[str, Any] = {
        "method": method, "metric": metric, "batch_size": batch_size, "measure_batches": measure_batches, "progress": progress,
    }  # fmt: skip
    curves = [start or damage_curves(model, data, blocks, ratios=ratios, **common)]
    measured = [min(max_sparsity, curves[0].ratios[b.name][-1]) for b in blocks]
    plan = _solve(model, blocks, sparsity, 0.0, measured, curves[0], method)
    extra = 0
    for _ in range(iterations):
        low = {b.name: max(0.0, b.value - trust) for b in plan.blocks}
        high = {b.name: min(max_sparsity, b.value + trust) for b in plan.blocks}
        points = {b.name: (low[b.name], (low[b.name] + high[b.name]) / 2, high[b.name]) for b in plan.blocks}
        curves.append(damage_curves(model, data, blocks, ratios=points, around=plan, **common))
        there = _solve(model, blocks, sparsity, list(low.values()), list(high.values()), curves[-1], method)
        ways = [_between(plan, there, step) for step in STEPS]
        damage, spent = plan_damage(model, data, blocks, ways, method=method, metric=metric, batch_size=batch_size)
        extra += spent
        best = int(np.argmin(np.where(np.isfinite(damage), damage, np.inf)))
        plan = dataclasses.replace(ways[best], extra={**ways[best].extra, "damage": damage[best], "search_forwards": extra})
        if best == 0:
            break
    return plan, curves


def _between(here: Plan, there: Plan, step: float) -> Plan:
    """Convex combination of two plans of one budget, rounded to whole weights."""
    if step in (0.0, 1.0):
        return there if step else here
    value = (1 - step) * here.values + step * there.values
    numel = np.array([b.numel for b in here.blocks])
    counts = round_parameters(value, numel, sum(b.count for b in here.blocks))
    blocks = (dataclasses.replace(b, value=float(v), count=int(c)) for b, v, c in zip(here.blocks, value, counts, strict=True))
    return dataclasses.replace(here, blocks=tuple(blocks), certificate={})


def _solve(
    model: nn.Module, blocks: Sequence[Block], sparsity: float, low: ArrayLike, high: ArrayLike, curves: Curves, method: str
) -> Plan:
    plan = plan_sparsity(blocks, sparsity=sparsity, min_sparsity=low, max_sparsity=high, penalty=curves.penalty())
    settings = {**plan.hyperparameters, "method": method}
    return dataclasses.replace(plan, rule="calibrated", model=describe(model), hyperparameters=settings)
