"""Penalties calibrated to the pruner: prune one block at a time and look at the model's output.

The clean prefix of every block is kept, so a measurement runs only the blocks from the pruned one to the end. Block
errors do not add up; :func:`layerbudget.pruning.calibrate.calibrate` therefore measures again around the first plan, with
every other block pruned as planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..blocks import partition
from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..plan import Plan
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
        InvalidInput: Unknown method or metric, ratios that do not increase within [0, 1], or a block that spans layers.
    """
    if metric not in METRICS or method not in ("magnitude", "wanda", "sparsegpt"):
        raise InvalidInput(f"There is no metric {metric!r} with method {method!r}.", f"Metrics are {', '.join(METRICS)}.", "")
    blocks = tuple(blocks) if blocks is not None else partition(model)
    wanted = {b.name: tuple(ratios[b.name] if isinstance(ratios, Mapping) else ratios) for b in blocks}
    for name, chosen in wanted.items():
        _check_ratios(name, chosen)
    options = _options(method, batch_size)
    damage: dict[str, tuple[float, ...]] = {}
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        _check_places(blocks, [name for name, _ in walk.layers])
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


def _check_ratios(name: str, ratios: Sequence[float]) -> None:
    rising = all(a < b for a, b in zip(ratios, ratios[1:], strict=False))
    if not ratios or not rising or not (0.0 <= ratios[0] and ratios[-1] <= 1.0):
        raise InvalidInput(f"{name} is to be measured at {list(ratios)}.", "Ratios increase within [0, 1].", "Sort them.")


def _check_places(blocks: Sequence[Block], names: Sequence[str]) -> None:
    """Refuse blocks that do not lie within one layer each: damage is measured layer by layer.

    Raises:
        InvalidInput: Names the first.
    """
    for block in blocks:
        if not any(all(m.name.startswith(f"{n}.") for m in block.modules) for n in names):
            raise InvalidInput(
                f"{block.name} does not lie within one layer.",
                "Damage is measured for layers and parts of layers.",
                "Partition by layer or by linear.",
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
    try:
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
    finally:
        held.restore(names)
    if dense is not None:
        _prune_blocks(model, blocks, planned, found, options, cache)
    return out


def plan_damage(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block],
    plans: Sequence[Plan],
    *,
    method: str = "wanda",
    metric: str = "kl",
    batch_size: int = 8,
    measure_batches: int | None = None,
) -> tuple[list[float], int]:
    """Damage of whole plans: every block pruned, the output compared with the dense model's; the model is left as it was.

    Args:
        model: The dense model.
        data: Calibration tokens.
        blocks: The blocks of the plans.
        plans: What to try.
        method: Pruner.
        metric: ``kl`` or ``loss``.
        batch_size: Sequences per forward.
        measure_batches: See :func:`damage_curves`.

    Returns:
        Damage per plan in nats per token, and the forwards of one block on one batch that it took.
    """
    options, values = _options(method, batch_size), []
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        held = Originals(model, blocks)
        try:
            walk.capture()
            meter = Meter(walk, metric, measure_batches)
            for plan in plans:
                walk.capture()
                _prune_all(model, walk, blocks, _counts(plan), options)
                values.append(meter.reached())
                held.restore([m.name for b in blocks for m in b.modules])
        finally:
            held.restore([m.name for b in blocks for m in b.modules])
            walk.close()
    return values, walk.forwards
