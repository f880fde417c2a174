"""What each weight matrix loses: a plan split over the model's matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ...compressors.base import Level, Treatment
from ...compressors.select import check_group, parse_pattern, share
from ...compressors.treating import Job
from ...errors import InvalidInput, ModelMismatch, UnknownBlock
from ...models.blocks import partition
from ...plan import Plan, PlanBlock, members
from ...records import Module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Everything beside plan and data that decides the masks, or where the work happens."""

    treatment: Treatment
    own: Mapping[str, Any]
    batch_size: int
    parity: bool
    pattern: str | None
    true_sequential: bool
    store: str
    folder: Path | None
    autocast: str | None = None

    def settings(self) -> dict[str, Any]:
        """The part that belongs into a receipt."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("treatment", "own", "folder"):
            del shared[name]
        return {"method": self.treatment.name, **shared, **self.own}


def plan_jobs(model: nn.Module, plan: Plan, options: Options) -> dict[str, Job]:
    """Split the plan over the model's matrices.

    Raises:
        UnknownBlock: A matrix of the plan is not in the model.
        ModelMismatch: A block of the plan has another size in the model.
        InvalidInput: Counts or a pattern that do not fit.
    """
    known = {m.name: m for b in partition(model, "linear") for m in b.modules}
    _check_rows(plan, options)
    zeroed, group = parse_pattern(options.pattern) if options.pattern else (None, 0)
    per_block = _zeroed_per_block(plan, zeroed, group) if group else {}
    jobs: dict[str, Job] = {}
    for block in plan.blocks:
        missing = [m for m in block.modules if m not in known]
        if missing:
            raise UnknownBlock(
                f"The plan's {block.name} names {missing[0]!r}, which the model does not have.", "", "Plan again."
            )
        modules = [known[m] for m in block.modules]
        if sum(m.numel for m in modules) != block.numel:
            raise ModelMismatch(
                f"{block.name} has {block.numel} weights in the plan and {sum(m.numel for m in modules)} in the model.", "",
                "Plan this model.",
            )  # fmt: skip
        if group:
            for m in modules:
                check_group(m.d_in, group, m.name)
            n = per_block[block.name]
            counts = [m.numel // group * n for m in modules]
        else:
            counts = share(block.count, [m.numel for m in modules])
        for m, count in zip(modules, counts, strict=True):
            level = Level(
                zeros=count,
                ratio=block.value if options.parity and not group else None,
                pattern=(per_block[block.name], group) if group else None,
                rows=_rows_of(plan, m, count),
            )
            jobs[m.name] = Job(module=m, level=level)
    return jobs


def _check_rows(plan: Plan, options: Options) -> None:
    """Refuse what a plan of groups of rows leaves no room for.

    Raises:
        InvalidInput: Parity or a pattern.
        NotFound: The counts are not at hand.
    """
    if plan.rows is None:
        return
    plan.rows.require()
    for name, given in (("parity", options.parity), ("pattern", options.pattern)):
        if given:
            raise InvalidInput(
                f"The plan decides groups of {plan.rows.size} rows, and {name} was given.", "It fixes every group's count.",
                "Leave it out, or plan by linear.",
            )  # fmt: skip


def _rows_of(plan: Plan, module: Module, count: int) -> tuple[int, np.ndarray] | None:
    """What every group of rows of a matrix loses, where the plan says so.

    Raises:
        UnknownBlock: The plan has no counts for the matrix.
        InvalidInput: They do not fit the matrix or its count.
    """
    if plan.rows is None:
        return None
    size, zeros = plan.rows.size, plan.rows.counts.get(module.name)
    if zeros is None:
        raise UnknownBlock(f"The plan has no counts for the rows of {module.name}.", "", "Plan again.")
    room = np.tile(members(module.d_out, size) * module.d_in, module.copies)
    groups = room.size
    if zeros.shape != (groups,) or (zeros < 0).any() or (zeros > room).any() or int(zeros.sum()) != count:
        raise InvalidInput(
            f"The counts of the rows of {module.name} do not fit: {zeros.size} groups, {int(zeros.sum())} entries.",
            f"It has {groups} groups of {size} rows and loses {count} entries.", "Plan again.",
        )  # fmt: skip
    return size, zeros


def _zeroed_per_block(plan: Plan, zeroed: int | None, group: int) -> dict[str, int]:
    """N of every block: given, or the nearest to the plan with the total kept as near as whole numbers allow."""
    if zeroed is not None:
        off = [b for b in plan.blocks if abs(b.count / b.numel - zeroed / group) > 0.5 / group]
        if off:
            raise InvalidInput(
                f"The plan asks {off[0].name} for {off[0].count / off[0].numel:.3f}, the pattern gives {zeroed / group:.3f}.",
                f"With {zeroed}:{group} every block is pruned to {zeroed / group:.3f}.",
                f"Plan uniformly at {zeroed / group:g}, or use the pattern n:{group} to follow the plan.",
            )
        return {b.name: zeroed for b in plan.blocks}
    chosen = {b.name: b.count * group // b.numel for b in plan.blocks}
    missing = sum(b.count for b in plan.blocks) - sum(chosen[b.name] * b.numel / group for b in plan.blocks)
    order = sorted(plan.blocks, key=lambda b: -(b.count * group / b.numel % 1))
    for block in _raised(order, missing, group):
        chosen[block.name] += 1
    return chosen


def _raised(order: list[PlanBlock], missing: float, group: int) -> list[PlanBlock]:
    raised = []
    for block in order:
        step = block.numel / group
        if missing >= step / 2 and block.count * group % block.numel:
            raised.append(block)
            missing -= step
    return raised
