"""Receipt of a pruning: zeros recounted per matrix, per block and in total."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...arguments import checked
from ...compressors.select import by_groups
from ...compressors.treating import matrices
from ...errors import CoverageError
from ...models.blocks import weight_of
from ...plan import Plan, PlanBlock
from ...records import Block, Receipt, Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningReceipt(Receipt):
    """The record of one pruning run. Prunable weights are the matrices of the layers: no embeddings, head, norms or biases."""

    method: str
    settings: Mapping[str, Any]  # pattern, batch size and whatever else decided the masks
    data: Mapping[str, Any]  # calibration provenance; empty for magnitude
    blocks: Mapping[str, Mapping[str, Any]]  # {name: {numel, planned, zeros, sparsity}}
    modules: Mapping[str, Mapping[str, Any]]  # {name: {numel, zeros, sparsity}}
    sparsity: float  # zeros over prunable weights, recounted
    planned: float  # the plan's own total, or what a pattern makes of it
    forwards: int  # of one block on one batch
    seconds: float
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # see recount_rows
    made_by: str = ""  # the command that made it; empty where Python did


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recount(Result):
    """Zeros of a model's prunable weights: in total, and ``{name: {numel, zeros, sparsity}}`` of blocks and matrices."""

    numel: int
    zeros: int
    sparsity: float
    blocks: Mapping[str, Mapping[str, Any]]
    modules: Mapping[str, Mapping[str, Any]]


@checked
def recount(model: nn.Module, blocks: Iterable[Block | PlanBlock]) -> Recount:
    """Return the zeros of a model's prunable weights, of the blocks of a partition or of a plan.

    Raises:
        UnknownBlock: The model lacks one of the matrices.
    """
    by_block: dict[str, Any] = {}
    by_module: dict[str, Any] = {}
    for block in blocks:
        counts = {}
        for module in block.modules:
            name = module if isinstance(module, str) else module.name
            weight = weight_of(model, name)[1].detach()
            counts[name] = _counted(weight.numel(), weight.numel() - int(torch.count_nonzero(weight)))
        by_block[block.name] = _summed(counts)
        by_module |= counts
    return Recount(**_summed(by_block), blocks=by_block, modules=by_module)


def _counted(numel: int, zeros: int) -> dict[str, Any]:
    return {"numel": numel, "zeros": zeros, "sparsity": zeros / numel if numel else 0.0}


def _summed(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return _counted(*(sum(part[key] for part in parts.values()) for key in ("numel", "zeros")))


def recount_rows(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return ``{size, groups, exact, digest}`` of a plan that decides rows: how many groups hold exactly what was planned."""
    if plan.rows is None:
        return {}
    size, exact, groups = plan.rows.size, 0, 0
    for name, planned in plan.rows.counts.items():
        per_row = [(view == 0).sum(1) for view in matrices(*weight_of(model, name))]
        zeros = torch.cat([by_groups(rows[:, None], size, 0).sum(1) for rows in per_row]).cpu().numpy()
        if (zeros < planned).any():
            g = int((zeros < planned).argmax())
            raise _too_few(f"The group of rows {g} of {name}", int(zeros[g]), int(planned[g]))
        groups, exact = groups + len(planned), exact + int((zeros == planned).sum())
    return {"size": size, "groups": groups, "exact": exact, "digest": plan.rows.digest}


def check_recount(recounted: Recount, planned: Mapping[str, int]) -> tuple[str, ...]:
    """Return notes about matrices that hold more zeros than planned: they were there before, or rounding made them."""
    zeros = {name: recounted.modules[name]["zeros"] for name in planned}
    for name, count in planned.items():
        if zeros[name] < count:
            raise _too_few(name, zeros[name], count)
    return tuple(f"{n} holds {zeros[n]} zeros, {count} were planned." for n, count in planned.items() if zeros[n] > count)


def _too_few(what: str, zeros: int, planned: int) -> CoverageError:
    message = f"{what} holds {zeros} zeros, {planned} were planned."
    return CoverageError(message, "", "Something restored weights; report this.")
