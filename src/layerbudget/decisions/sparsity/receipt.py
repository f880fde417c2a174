"""Receipt of a pruning: zeros recounted per matrix, per block and in total."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ...compressors.select import by_groups
from ...compressors.treating import matrices
from ...errors import CoverageError
from ...models.blocks import weight_of
from ...plan import Plan, PlanBlock
from ...records import Block, Record, Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt(Record):
    """The record of one pruning run.

    Attributes:
        method: ``magnitude``, ``wanda``, ``sparsegpt``, ...
        settings: Pattern, parity, batch size and whatever else decided the masks.
        plan_digest: Content hash of the plan.
        model: ``{id, revision, digest}`` before pruning.
        data: Calibration provenance; empty for magnitude.
        blocks: ``{name: {numel, planned, zeros, sparsity}}``.
        modules: ``{name: {numel, zeros, sparsity}}``.
        sparsity: Zeros over prunable weights, recounted (embeddings, head, norms and biases are not prunable weights).
        planned: The plan's own total.
        forwards: Forwards of one block on one batch that were run.
        seconds: Wall time.
        notes: Everything that deserves a sentence.
        versions: Of Python, torch and transformers.
        rows: ``{size, groups, exact, digest}`` of a plan that decides groups of rows: how many hold exactly what was planned.
        made_by: The command that made it; empty where Python did.
    """

    what: ClassVar[str] = "receipt"
    command: ClassVar[str] = "apply"

    method: str
    settings: Mapping[str, Any]
    plan_digest: str
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    blocks: Mapping[str, Mapping[str, Any]]
    modules: Mapping[str, Mapping[str, Any]]
    sparsity: float
    planned: float
    forwards: int
    seconds: float
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    made_by: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recount(Result):
    """Zeros of a model's prunable weights.

    Attributes:
        numel, zeros, sparsity: In total.
        blocks, modules: ``{name: {numel, zeros, sparsity}}``.
    """

    numel: int
    zeros: int
    sparsity: float
    blocks: Mapping[str, Mapping[str, Any]]
    modules: Mapping[str, Mapping[str, Any]]


def recount(model: nn.Module, blocks: Iterable[Block | PlanBlock]) -> Recount:
    """Return the zeros of a model's prunable weights, of the blocks of a partition or of a plan.

    Raises:
        UnknownBlock: The model lacks one of the matrices.
    """
    by_block: dict[str, Any] = {}
    by_module: dict[str, Any] = {}
    for block in blocks:
        for module in block.modules:
            name = module if isinstance(module, str) else module.name
            weight = weight_of(model, name)[1]
            by_module[name] = _count(int(weight.numel()), _zeros(weight.detach()))
        names = [m if isinstance(m, str) else m.name for m in block.modules]
        by_block[block.name] = _count(*(sum(by_module[n][k] for n in names) for k in ("numel", "zeros")))
    total = _count(*(sum(b[k] for b in by_block.values()) for k in ("numel", "zeros")))
    return Recount(**total, blocks=by_block, modules=by_module)


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18  # entries that stay in the cache


def _zeros(weight: torch.Tensor) -> int:
    """Entries that are zero, of either sign; on a processor counted as whole numbers, which is several times faster.

    >>> _zeros(torch.tensor([0.0, -0.0, 1.0, float("nan")], dtype=torch.bfloat16))
    2
    """
    whole = _WHOLE.get(weight.element_size())
    if weight.device.type != "cpu" or whole is None or not weight.is_floating_point() or not weight.is_contiguous():
        return int(weight.numel() - torch.count_nonzero(weight))
    found, flat = 0, weight.view(whole).reshape(-1).numpy()
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        found += part.size - int(np.count_nonzero(part + part))  # twice a number: its sign is gone, nothing else
    return found


def _count(numel: int, zeros: int) -> dict[str, Any]:
    return {"numel": numel, "zeros": zeros, "sparsity": zeros / numel if numel else 0.0}


def recount_rows(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return ``{size, groups, exact, digest}`` of a plan that decides rows: how many groups hold exactly what was planned.

    Raises:
        CoverageError: A group holds fewer zeros than planned.
    """
    if plan.rows is None:
        return {}
    size, exact, groups = plan.rows.size, 0, 0
    for name, planned in plan.rows.counts.items():
        owner, parameter = weight_of(model, name)
        per_row = [(view == 0).sum(1) for view in matrices(owner, parameter)]
        zeros = torch.cat([by_groups(rows[:, None], size, 0).sum(1) for rows in per_row]).cpu().numpy()
        if (zeros < planned).any():
            g = int((zeros < planned).argmax())
            raise CoverageError(
                f"Rows {g * size} and following of {name} hold {zeros[g]} zeros, {planned[g]} were planned.",
                "",
                "Something restored weights; report this.",
            )
        groups, exact = groups + len(planned), exact + int((zeros == planned).sum())
    return {"size": size, "groups": groups, "exact": exact, "digest": plan.rows.digest}


def check_recount(found: Mapping[str, Any], planned: Mapping[str, int]) -> tuple[str, ...]:
    """Return notes about matrices that hold more zeros than planned: they were there before, or rounding made them.

    Raises:
        CoverageError: A matrix holds fewer zeros than planned.
    """
    notes = []
    for name, count in planned.items():
        zeros = found["modules"][name]["zeros"]
        if zeros < count:
            raise CoverageError(
                f"{name} holds {zeros} zeros, {count} were planned.", "", "Something restored weights; report this."
            )
        if zeros > count:
            notes.append(f"{name} holds {zeros} zeros, {count} were planned.")
    return tuple(notes)
