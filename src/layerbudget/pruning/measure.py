"""Penalties calibrated to the pruner: prune one block at a time and look at the model's output.

The clean prefix of every block is kept, so a measurement runs only the blocks from the pruned one to the end. Block
errors do not add up; :func:`calibrate` therefore measures again around the first plan, with every other block pruned
as planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..blocks import describe, partition
from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..plan import Plan
from ..planning import plan_sparsity
from ..records import Block
from .curves import Curves
from .meter import Meter, Originals
from .prune import apply_task
from .select import share
from .statistics import Collector, Statistic
from .tasks import Options, Task
from .walk import Walk, inference

METRICS = ("kl", "loss")
Progress = Callable[[int, int], None]


def damage_curves(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block] | None = None,
    *,
    ratios: Sequence[float] | Mapping[str, Sequence[float]] = (0.3, 0.5, 0.7, 0.85),
    method: str = "wanda",
    metric: str = "kl",
    around: Plan | None = None,
    batch_size: int = 8,
    measure_batches: int | None = None,
    progress: Progress | None = None,
) -> Curves:
    """Measure, for every block, what pruning it costs; the model is left as it was.

    Args:
        model: Any transformers model with one list of layers; a causal LM for ``metric="loss"``.
        data: Calibration tokens: statistics of the pruner, and the text on which damage is measured.
        blocks: From :func:`layerbudget.blocks.partition`; layers by default.
        ratios: Sparsities to measure, for all blocks or per block.
        method: ``magnitude``, ``wanda`` or ``sparsegpt``.
        metric: ``kl`` (mean KL divergence per token from the dense model's distribution, nats) or ``loss`` (difference of
            the next-token loss).
        around: Measure with every other block pruned by this plan instead of dense.
        batch_size: Sequences per forward.
        measure_batches: Measure damage on the first so many batches only (statistics use all).
        progress: Called with (blocks done, blocks).

    Returns:
        The curves.

    Raises:
        InvalidInput: Unknown method or metric.
    """
    if metric not in METRICS or method not in ("magnitude", "wanda", "sparsegpt"):
        raise InvalidInput(f"There is no metric {metric!r} with method {method!r}.", f"Metrics are {', '.join(METRICS)}.", "")
    blocks = tuple(blocks) if blocks is not None else partition(model)
    wanted = {b.name: tuple(ratios[b.name] if isinstance(ratios, Mapping) else ratios) for b in blocks}
    options = _options(method, batch_size)
    damage: dict[str, tuple[float, ...]] = {}
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        walk.capture()
        meter = Meter(walk, metric, measure_batches)
        dense = Originals(model, blocks) if around is not None else None
        try:
            if around is not None:
                _prune_all(model, walk, blocks, _counts(around), options)
                walk.capture()
            for i, (name, _) in enumerate(walk.layers):
                mine = [b for b in blocks if b.modules[0].name.startswith(f"{name}.")]
                damage |= _one_layer(model, walk, meter, mine, wanted, options, dense, _counts(around) if around else {})
                walk.position = i
                walk.advance()
                if progress:
                    progress(i + 1, len(walk))
        finally:
            if dense is not None:
                dense.restore([m.name for b in blocks for m in b.modules])
            walk.close()
    ordered = {b.name: damage[b.name] for b in blocks}
    return Curves(
        ratios=wanted, damage=ordered, metric=metric, method=method, relative=around is not None, forwards=walk.forwards
    )


def _options(method: str, batch_size: int) -> Options:
    return Options(
        method=method, batch_size=batch_size, parity=False, pattern=None, true_sequential=False, damping=0.01,
        store="device", folder=None,
    )  # fmt: skip


def _counts(plan: Plan) -> dict[str, int]:
    return {b.name: b.count for b in plan.blocks}


def _tasks(block: Block, count: int) -> list[Task]:
    counts = share(count, [m.numel for m in block.modules])
    return [Task(module=m, count=c, ratio=None, pattern=None) for m, c in zip(block.modules, counts, strict=True)]


def _collect(model: nn.Module, walk: Walk, blocks: Sequence[Block], options: Options) -> dict[str, list[Statistic]]:
    if options.method == "magnitude" or not blocks:
        return {}
    kind = "diagonal" if options.method == "wanda" else "gram"
    collector = Collector(model, [m for b in blocks for m in b.modules], kind)
    collector.run(walk)
    return collector.found


def _prune_all(model: nn.Module, walk: Walk, blocks: Sequence[Block], counts: Mapping[str, int], options: Options) -> None:
    for i, (name, _) in enumerate(walk.layers):
        mine = [b for b in blocks if b.modules[0].name.startswith(f"{name}.")]
        walk.position = i
        _prune_blocks(model, mine, counts, _collect(model, walk, mine, options), options, {})
        walk.advance()


def _prune_blocks(
    model: nn.Module,
    blocks: Sequence[Block],
    counts: Mapping[str, int],
    found: Mapping[str, list[Statistic]],
    options: Options,
    cache: dict[Statistic, Any],
) -> None:
    for block in blocks:
        for task in _tasks(block, counts[block.name]):
            if not task.idle:
                apply_task(model, task, found.get(task.module.name), options, cache)


def _one_layer(
    model: nn.Module,
    walk: Walk,
    meter: Meter,
    blocks: Sequence[Block],
    wanted: Mapping[str, Sequence[float]],
    options: Options,
    dense: Originals | None,
    planned: Mapping[str, int],
) -> dict[str, tuple[float, ...]]:
    """Curves of the blocks of one layer. With a plan around, the layer is dense for statistics and pruned otherwise."""
    index = next((i for i, (n, _) in enumerate(walk.layers) if blocks and blocks[0].modules[0].name.startswith(f"{n}.")), 0)
    walk.position = index
    names = [m.name for b in blocks for m in b.modules]
    held = dense or Originals(model, blocks)
    held.restore(names)
    found = _collect(model, walk, blocks, options)
    out: dict[str, tuple[float, ...]] = {}
    cache: dict[Statistic, Any] = {}
    for block in blocks:
        own = [m.name for m in block.modules]
        if dense is not None:
            others = [b for b in blocks if b is not block]
            held.restore(names)
            _prune_blocks(model, others, planned, found, options, cache)
        rows = []
        for ratio in wanted[block.name]:
            held.restore(own)
            _prune_blocks(model, [block], {block.name: round(ratio * block.numel)}, found, options, cache)
            rows.append(meter.damage(index))
        held.restore(own)
        out[block.name] = tuple(rows)
    if dense is not None:
        held.restore(names)
        _prune_blocks(model, blocks, planned, found, options, cache)
    return out


def calibrate(
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
        iterations: How often to measure again around the plan and move it by at most ``trust``.
        trust: Largest move of one block per iteration.
        batch_size: Sequences per forward.
        measure_batches: See :func:`damage_curves`.
        start: Curves of the dense model that were measured before (one measurement serves every target).
        progress: Called with (blocks done, blocks) of each measurement.

    Returns:
        The plan and the curves of every round.
    """
    blocks = tuple(blocks) if blocks is not None else partition(model)
    ratios = sorted({min(max_sparsity, max(0.02, round(sparsity + s, 4))) for s in spread})
    common = {
        "method": method, "metric": metric, "batch_size": batch_size, "measure_batches": measure_batches, "progress": progress,
    }  # fmt: skip
    curves = [start or damage_curves(model, data, blocks, ratios=ratios, **common)]
    measured = [min(max_sparsity, curves[0].ratios[b.name][-1]) for b in blocks]
    plan = _solve(model, blocks, sparsity, 0.0, measured, curves[0])
    for _ in range(iterations):
        low = {b.name: max(0.0, b.value - trust) for b in plan.blocks}
        high = {b.name: min(max_sparsity, b.value + trust) for b in plan.blocks}
        points = {b.name: (low[b.name], (low[b.name] + high[b.name]) / 2, high[b.name]) for b in plan.blocks}
        curves.append(damage_curves(model, data, blocks, ratios=points, around=plan, **common))
        plan = _solve(model, blocks, sparsity, list(low.values()), list(high.values()), curves[-1])
    return plan, curves


def _solve(model, blocks, sparsity, low, high, curves) -> Plan:  # type: ignore[no-untyped-def]
    plan = plan_sparsity(blocks, sparsity=sparsity, min_sparsity=low, max_sparsity=high, penalty=curves.penalty())
    return dataclasses.replace(plan, rule="calibrated", model=describe(model))
