"""Penalties calibrated to the pruner: prune one block at a time and look at the model's output.

The clean prefix of every block is kept, so a measurement runs only the blocks from the pruned one to the end. Block
errors do not add up; :func:`layerbudget.decisions.sparsity.by_curves.plan_by_curves` therefore measures again around the first
plan, with
every other block pruned as planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...compressors.base import Level, find_treatment
from ...compressors.select import share
from ...compressors.treating import Found, Job, Treating
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.divergence import Meter
from ...execution.inputs import InputMoments
from ...execution.modes import inference
from ...execution.shares import mine
from ...execution.walk import Walk
from ...models.blocks import partition
from ...models.offload import need_settled
from ...plan import Plan
from ...progress import Progress, Steps
from ...records import Block
from ...sensitivity.directional.originals import Originals
from .curves import Curves


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
        blocks: From :func:`layerbudget.models.blocks.partition`; layers by default.
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
        CoverageError: Layers of a streamed model that come and go.
        InvalidInput: Unknown method or metric, ratios that do not increase within [0, 1], or a block that spans layers.
    """
    need_settled(model, "measuring")
    treating = Treating(model, find_treatment(method))
    treating.begin(data, batch_size)
    blocks = tuple(blocks) if blocks is not None else partition(model)
    wanted = {b.name: tuple(ratios[b.name] if isinstance(ratios, Mapping) else ratios) for b in blocks}
    for name, chosen in wanted.items():
        _check_ratios(name, chosen)
    others = _counts(around) if around is not None else {}
    damage: dict[str, tuple[float, ...]] = {}
    with inference(model):
        walk = Walk(model, mine(data), batch_size=batch_size)
        check_places(blocks, [name for name, _ in walk.layers])
        walk.capture()
        meter = Meter(walk, metric, measure_batches)
        held = Originals(model, blocks if around is not None else [])
        try:
            if around is not None:
                treat_all(walk, treating, blocks, others)
                walk.capture()
            tick = Steps(progress, len(walk))
            for i, (name, _) in enumerate(walk.layers):
                inside = _in_layer(blocks, name)
                own = held if around is not None else Originals(model, inside)
                bench = _Bench(walk=walk, meter=meter, treating=treating, held=own, others=others)
                damage |= bench.curves(i, inside, wanted)
                walk.position = i
                walk.advance()
                tick()
        finally:
            held.restore()
            walk.close()
    ordered = {b.name: damage[b.name] for b in blocks}
    return Curves(
        ratios=wanted, damage=ordered, metric=metric, method=method, relative=around is not None, forwards=walk.forwards
    )


def _check_ratios(name: str, ratios: Sequence[float]) -> None:
    rising = all(a < b for a, b in zip(ratios, ratios[1:], strict=False))
    if not ratios or not rising or not (0.0 <= ratios[0] and ratios[-1] <= 1.0):
        raise InvalidInput(f"{name} is to be measured at {list(ratios)}.", "Ratios increase within [0, 1].", "Sort them.")


def check_places(blocks: Sequence[Block], names: Sequence[str]) -> None:
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


def _counts(plan: Plan) -> dict[str, int]:
    return {b.name: b.count for b in plan.blocks}


def _in_layer(blocks: Sequence[Block], name: str) -> list[Block]:
    """Blocks that lie in a layer."""
    return [b for b in blocks if b.modules[0].name.startswith(f"{name}.")]


def jobs_of(blocks: Sequence[Block], counts: Mapping[str, int]) -> list[Job]:
    """What the matrices of some blocks lose, in proportion to their size."""
    return [
        Job(module=m, level=Level(zeros=c))
        for b in blocks
        for m, c in zip(b.modules, share(counts[b.name], [m.numel for m in b.modules]), strict=True)
    ]


def treat_all(walk: Walk, treating: Treating, blocks: Sequence[Block], counts: Mapping[str, int]) -> None:
    """Treat the whole model, each layer with the inputs that the treated layers below it give."""
    for i, (name, _) in enumerate(walk.layers):
        walk.position = i
        treating.layer(walk, jobs_of(_in_layer(blocks, name), counts))
        walk.advance()


@dataclasses.dataclass(kw_only=True)
class _Bench:
    """A layer under trial: damage of its blocks one by one.

    Attributes:
        others: What the other blocks lose meanwhile; empty: they are dense.
    """

    walk: Walk
    meter: Meter
    treating: Treating
    held: Originals
    others: Mapping[str, int]

    def curves(
        self, index: int, blocks: Sequence[Block], wanted: Mapping[str, Sequence[float]]
    ) -> dict[str, tuple[float, ...]]:
        """Damage of every block of layer ``index`` at its ratios. Statistics are those of the dense layer."""
        self.walk.position = index
        names = [m.name for b in blocks for m in b.modules]
        self.held.restore(names)
        statistics = self.treating.collect(self.walk, [m for b in blocks for m in b.modules])
        found = {} if statistics is None else statistics.found
        made: dict[InputMoments, Any] = {}
        out: dict[str, tuple[float, ...]] = {}
        try:
            for block in blocks:
                rest = [b for b in blocks if b is not block] if self.others else []
                self.held.restore(names)
                self.treating.jobs(jobs_of(rest, self.others), found, made)
                out[block.name] = tuple(self._trial(index, block, ratio, found, made) for ratio in wanted[block.name])
        finally:
            self.held.restore(names)
        if self.others:
            self.treating.jobs(jobs_of(blocks, self.others), found, made)
        return out

    def _trial(self, index: int, block: Block, ratio: float, found: Found, made: dict[InputMoments, Any]) -> float:
        self.held.restore([m.name for m in block.modules])
        self.treating.jobs(jobs_of([block], {block.name: round(ratio * block.numel)}), found, made)
        return self.meter.damage(index)


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
    treating, values = Treating(model, find_treatment(method)), []
    treating.begin(data, batch_size)
    with inference(model):
        walk = Walk(model, mine(data), batch_size=batch_size)
        held = Originals(model, blocks)
        try:
            walk.capture()
            meter = Meter(walk, metric, measure_batches)
            for plan in plans:
                walk.capture()
                treat_all(walk, treating, blocks, _counts(plan))
                values.append(meter.reached())
                held.restore()
        finally:
            held.restore()
            walk.close()
    return values, walk.forwards
