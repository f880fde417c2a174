r"""What n:m costs: every block loses n of every m consecutive inputs, beside the same share lost wherever the pruner likes.

With a number n all blocks have the ratio n/m: nothing is left to decide, and the question is what the pattern itself costs.
Both plans are treated by the pruner, layer after layer, and their changes ``Delta_k`` of the matrices kept, so that

    measured    D = mean over tokens of KL(p_0 || p with all Delta_k), of the whole treated model;
    predicted   sum_k 1/2 (1/N) sum_s E_y [ (sum_t b_st(y)' Delta_k a_st)^2 ], the Fisher form along the same changes at the
                dense point, which knows nothing of products between matrices and of how far the quadratic reaches

(:mod:`layerbudget.sensitivity.directional.directional`). The difference of the two measured damages is the price of the
pattern.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compressors.base import Level, find_treatment
from ...compressors.select import check_group, parse_pattern, share
from ...compressors.treating import Job, Treating, matrices
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.divergence import Meter
from ...execution.modes import inference
from ...execution.processes import shard
from ...execution.walk import Walk
from ...models.blocks import check_finite, describe, layers, partition, weight_of
from ...plan import Plan
from ...progress import Progress, Steps
from ...records import Block
from ...sensitivity.directional.directional import fisher_along
from ...sensitivity.directional.originals import Originals
from .plan import plan_sparsity

KINDS = ("pattern", "unstructured")


def plan_pattern(
    model: nn.Module,
    data: CalibrationSet,
    pattern: str,
    *,
    by: str = "linear",
    method: str = "wanda",
    draws: int = 2,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    **own: Any,
) -> Plan:
    """The plan of n:m, with its predicted and measured damage and those of the same share without a pattern.

    Args:
        model: The dense model; left as it was. Two more copies of its matrices are held meanwhile, and the originals.
        data: Calibration tokens: statistics of the pruner, and the text on which damage is measured.
        pattern: ``n:m`` with a number n.
        by: Blocks of the plan, see :func:`layerbudget.models.blocks.partition`; within one layer each.
        method: The pruner that orders the weights.
        draws: Draws of labels of the prediction; it takes ``1 + 2 draws`` forward equivalents.
        batch_size: Sequences per forward.
        seed: Of the draws.
        progress: Called with (steps done, steps).
        **own: Options of the pruner.

    Returns:
        A uniform plan of sparsity that ``prune`` accepts with the same pattern; ``extra`` has ``pattern``, and ``predicted``
        and ``measured`` damage of ``pattern`` and ``unstructured``, in nats per token.

    Raises:
        CoverageError: Layers of a streamed model that come and go.
        InvalidInput: No such pattern, a literal ``n``, a matrix that does not split into groups, or a pruner that knows none.
    """
    zeroed, group = check_pattern(pattern, method, draws)
    check_finite(model)
    blocks = partition(model, by)
    for module in (m for b in blocks for m in b.modules):
        check_group(module.d_in, group, module.name)
    _check_places(blocks, [name for name, _ in layers(model)])
    plan = plan_sparsity(blocks, sparsity=zeroed / group, max_sparsity=1.0, rule="uniform")
    treating = Treating(model, find_treatment(method), own)
    treating.begin(data, batch_size)
    trial = _Trial(model, data, blocks, treating, batch_size, progress)
    work = {"pattern": _grouped(blocks, zeroed, group), "unstructured": _unstructured(blocks, plan)}
    measured, changes = trial.run(work)
    found = fisher_along(model, data, changes, draws=draws, seed=seed, batch_size=batch_size)
    predicted = {kind: float(sum(a.damage[i] for a in found.values())) for i, kind in enumerate(KINDS)}
    extra = {"pattern": pattern, "method": method, "predicted": predicted, "measured": measured, "own": own}
    return dataclasses.replace(
        plan, model=describe(model), extra={**plan.extra, **extra},
        hyperparameters={**plan.hyperparameters, "pattern": pattern, "method": method, "draws": draws, "seed": seed},
    )  # fmt: skip


def check_pattern(pattern: str, method: str, draws: int) -> tuple[int, int]:
    """``(n, m)`` of a pattern that can be measured.

    Raises:
        InvalidInput: No such pattern, a literal ``n``, a pruner that is a pattern itself, or no draws.
    """
    zeroed, group = parse_pattern(pattern)
    if zeroed is None:
        raise InvalidInput(
            f"{pattern} leaves n to every block, and measure does not search among patterns.",
            "A pattern is measured with a number n, the same for all blocks.",
            f"Measure a sparsity without --pattern, then prune --pattern {pattern}: every block takes the nearest n.",
        )
    if find_treatment(method).name == "n:m":
        raise InvalidInput(
            "The method n:m has a pattern of its own.", "The method orders the weights within the groups.",
            "Use wanda, sparsegpt or magnitude.",
        )  # fmt: skip
    if draws < 1:
        raise InvalidInput(f"draws is {draws}.", "The prediction needs 1 or more.", "Use draws=2.")
    return zeroed, group


def _check_places(blocks: Sequence[Block], names: Sequence[str]) -> None:
    for block in blocks:
        if not any(all(m.name.startswith(f"{n}.") for m in block.modules) for n in names):
            raise InvalidInput(
                f"{block.name} does not lie within one layer.",
                "Damage is measured for layers and parts of layers.",
                "Partition by layer or by linear.",
            )


def _unstructured(blocks: Sequence[Block], plan: Plan) -> list[Job]:
    return [
        Job(module=m, level=Level(zeros=c))
        for b, planned in zip(blocks, plan.blocks, strict=True)
        for m, c in zip(b.modules, share(planned.count, [m.numel for m in b.modules]), strict=True)
    ]


def _grouped(blocks: Sequence[Block], zeroed: int, group: int) -> list[Job]:
    return [
        Job(module=m, level=Level(zeros=m.numel // group * zeroed, pattern=(zeroed, group))) for b in blocks for m in b.modules
    ]


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Treats the whole model, measures, takes back."""

    model: nn.Module
    data: CalibrationSet
    blocks: Sequence[Block]
    treating: Treating
    batch_size: int
    progress: Progress | None

    def run(self, work: Mapping[str, Sequence[Job]]) -> tuple[dict[str, float], dict[str, list[torch.Tensor]]]:
        """Measured damage by kind, and the changes of every matrix in the order of the kinds."""
        damage: dict[str, float] = {}
        changes: dict[str, list[torch.Tensor]] = {m.name: [] for b in self.blocks for m in b.modules}
        with inference(self.model):
            walk = Walk(self.model, shard(self.data), batch_size=self.batch_size)
            held = Originals(self.model, self.blocks)
            dense = {n: torch.cat([v.clone() for v in self._views(n)]) for n in changes}
            try:
                tick = Steps(self.progress, len(KINDS) * len(walk), "treating layers")
                walk.capture()
                meter = Meter(walk)
                for kind in KINDS:
                    walk.capture()
                    self._treat(walk, work[kind], tick)
                    damage[kind] = meter.reached()
                    for name, found in changes.items():
                        found.append(torch.cat([v.clone() for v in self._views(name)]) - dense[name])
                    held.restore()
            finally:
                held.restore()
                walk.close()
        return damage, changes

    def _treat(self, walk: Walk, work: Sequence[Job], tick: Steps) -> None:
        for i, (name, _) in enumerate(walk.layers):
            walk.position = i
            self.treating.layer(walk, [j for j in work if j.module.name.startswith(f"{name}.")])
            walk.advance()
            tick()

    def _views(self, name: str) -> list[torch.Tensor]:
        return [v.detach() for v in matrices(*weight_of(self.model, name))]
