"""Zeros in what remains of a part, as a plan of smaller shapes says, and counting them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.select import share
from ...compressors.treating import Job, Treating, matrices
from ...compressors.wanda import Wanda
from ...errors import CoverageError
from ...execution.walk import Walk
from ...models.blocks import weight_of
from ...records import Module
from .parts import Part
from .zeros import ZEROS, left

Planned = Mapping[str, Any]


def _modules(model: nn.Module, names: Sequence[str]) -> list[Module]:
    """Matrices as they are now."""
    shapes = [matrices(*weight_of(model, name))[0].shape for name in names]
    return [Module(name=n, d_in=int(s[1]), d_out=int(s[0])) for n, s in zip(names, shapes, strict=True)]


def put_zeros(model: nn.Module, walk: Walk, part: Part, planned: Planned) -> None:
    """Put the planned zeros of one part into its matrices, by Wanda on the inputs that they get now.

    Args:
        model: The model, changed in place.
        walk: At the part's layer.
        part: The part.
        planned: ``extra["zeros"]`` of the plan.
    """
    mine = planned.get("parts", {}).get(part.name)
    if mine is None:
        return
    for name in part.modules:  # parameters are replaced, never changed, so that the model can be put back
        owner, parameter = weight_of(model, name)
        owner.weight = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    modules = _modules(model, part.modules)
    counts = share(int(mine["zeros"]), [m.numel for m in modules])
    pattern = ZEROS[planned["pattern"]].pattern
    jobs = [Job(module=m, level=Level(zeros=c, pattern=pattern)) for m, c in zip(modules, counts, strict=True)]
    Treating(model, Wanda()).layer(walk, jobs)


def saved_by_zeros(
    model: nn.Module, parts: Sequence[Part], planned: Planned, unit: str, *, context: int, bytes_per_parameter: float
) -> float:
    """What the zeros of a smaller model save, counted on its matrices.

    Args:
        model: The smaller model.
        parts: Its parts, under the names that the plan has for them.
        planned: ``extra["zeros"]`` of the plan.
        unit: ``flops`` or ``bytes``.
        context: See :func:`layerbudget.decisions.shapes.parts.amount`.
        bytes_per_parameter: See there.

    Raises:
        CoverageError: Fewer zeros than planned, or in other places than the pattern allows.
    """
    if not planned:
        return 0.0
    zeros, total = ZEROS[planned["pattern"]], 0.0
    options: dict[str, Any] = {"context": context, "bytes_per_parameter": bytes_per_parameter}
    for part in parts:
        mine = planned["parts"].get(part.name)
        if mine is None:
            continue
        weights = [matrices(*weight_of(model, n))[0] for n in part.modules]
        found = sum(int((w == 0).sum()) for w in weights)
        if found < mine["zeros"] or not all(_fits(w, zeros.pattern) for w in weights):
            raise CoverageError(
                f"{part.name} holds {found} zeros, {mine['zeros']} were planned ({zeros.name}).", "", "Report this."
            )
        level = zeros.shares.index(mine["share"])
        total += left(part, unit, 0, zeros, 0, **options) - left(part, unit, 0, zeros, level, **options)
    return total


def _fits(weight: torch.Tensor, pattern: tuple[int, int] | None) -> bool:
    if pattern is None:
        return True
    gone, group = pattern
    return bool(((weight.unflatten(1, (-1, group)) == 0).sum(2) >= gone).all())
