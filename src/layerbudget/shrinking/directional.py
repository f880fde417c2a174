r"""Smaller shapes by directional damage: heads and MLP channels as treatments of the matrix that reads them.

Removing units of a part is, as far as the output goes, a change of one matrix: the columns that belong to them become zero and
those that stay are refitted,

    T(u) = W H_{:S} H_{SS}^-1  on S,   0 elsewhere,      H = sum x x' at the present point.

So the damage of a step is predicted as for any treatment (:mod:`layerbudget.damage.directional`): by the second term at the
dense model, from where the first plan comes, then by the gradient at treated points. Every step is an exact program over whole
units (:mod:`layerbudget.planning.shape_steps`), and is taken only where the measured divergence falls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..blocks import check_finite, describe, matrix_of, partition, weight_of
from ..damage.directional import forms_along
from ..damage.directions import Directions, Written
from ..damage.ledger import Candidates, Forms
from ..damage.originals import Originals
from ..damage.point import Reference
from ..data.calibration import CalibrationSet
from ..errors import CoverageError, InvalidInput
from ..mapped import need_settled
from ..plan import Plan
from ..planning.parts import KINDS, Part
from ..planning.shape_steps import ShapeSpace
from ..program.choices import Choice
from ..progress import Progress, Steps
from ..records import to_jsonable
from ..running.inputs import InputStatistics, Statistic
from ..running.loss import Batch
from ..running.shares import team
from ..running.sites import Site
from ..treatments.treating import matrices
from .attention import Attention, channels
from .heads import choose_heads
from .mlp import Mlp
from .parts import find_parts, where_is
from .shrink import measure_plan
from .width import damped, refitted, removal_order

PASSES, LEVELS = 24.0, 7
MEASURING = 4.0  # dense, twice through every layer to cut it, and the smaller model


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Seen:
    """Divergence and derivatives at a point, and the second moments there."""

    divergence: float
    forms: Forms
    grams: dict[str, Statistic]


class _Shapes:
    """A model whose units are masked, not cut, so that they may come back.

    Attributes:
        passes: Forward equivalents so far: forward 1, backward 2.
    """

    def __init__(self, model: nn.Module, data: CalibrationSet, parts: Sequence[Part], damping: float, size: int) -> None:
        self.model, self.parts, self.damping, self.size = model, list(parts), damping, size
        self.where = [where_is(model.get_submodule(p.layer), p) for p in parts]
        self.names = [w.consumer for w in self.where]
        known = {b.name: b for b in partition(model, "linear")}
        self.blocks = [known[name] for name in self.names]
        self.held = Originals(model, self.blocks)
        listen = InputStatistics(model, [m for b in self.blocks for m in b.modules], "gram")
        self.reference = Reference(model, data, size, listen)
        self.dense = {name: listen.found[name][0] for name in self.names}
        self.passes = 1.0

    def become(self, k: int, gram: Statistic, levels: Sequence[int]) -> list[torch.Tensor]:
        """The matrix behind part k when so many of its units are gone."""
        where, part = self.where[k], self.parts[k]
        dense = self._dense(k).double()
        h = damped(torch.as_tensor(gram.value), self.damping)
        each = 1 if isinstance(where, Attention) else int(part.by.split()[0])
        order = removal_order(dense, h, max(levels) * each) if isinstance(where, Mlp) else None
        made = []
        for units in levels:
            keep = self._keep(dense, h, where, part, units, None if order is None else order[: units * each])
            weight = torch.zeros_like(dense)
            weight[:, keep] = refitted(dense, h, keep) if units else dense
            made.append(weight.to(matrix_of(self.model.get_submodule(self.names[k])).dtype))
        return made

    def _keep(
        self, dense: torch.Tensor, h: torch.Tensor, where: Attention | Mlp, part: Part, units: int, gone: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        if isinstance(where, Attention):
            return channels(choose_heads(dense, h, where, units, by=part.by), where.head_dim)
        alive = torch.ones(len(h), dtype=torch.bool, device=h.device)
        alive[gone] = False
        return torch.nonzero(alive).flatten()

    def _dense(self, k: int) -> torch.Tensor:
        owner = self.model.get_submodule(self.names[k])
        return matrices(owner, nn.Parameter(self.held.held[self.blocks[k].modules[0].name], requires_grad=False))[0]

    @torch.no_grad()
    def move(self, counts: np.ndarray, grams: dict[str, Statistic]) -> None:
        """Mask and refit, from the dense weights."""
        self.held.restore()
        for k, units in enumerate(counts.tolist()):
            if units:
                view = matrices(*weight_of(self.model, self.blocks[k].modules[0].name))[0]
                view.copy_(self.become(k, grams[self.names[k]], [units])[0])

    def look(self, levels: np.ndarray, grams: dict[str, Statistic], *, draws: int, seed: int, dense: bool = False) -> _Seen:
        """Both terms along the way to every level; at the dense model the first one vanishes."""
        gathered = dict[str, Statistic]()
        place = {block.modules[0].name: k for k, block in enumerate(self.blocks)}

        def make(name: str) -> Directions:
            k = place[name]
            present = matrices(*weight_of(self.model, name))[0]
            return Written([w - present for w in self.become(k, grams[self.names[k]], levels[k].tolist())])

        def listen(site: Site, batch: Batch) -> None:
            mask, x = batch.kwargs.get("attention_mask"), site.a
            rows = x.flatten(0, 1) if mask is None or mask.shape != x.shape[:2] else x[mask.bool()]
            for name in site.names:
                gathered.setdefault(name, Statistic("gram")).add(rows)

        forms = forms_along(
            self.model, self.reference.data, Candidates(place, make, *levels.shape),
            clean=None if dense else self.reference.clean, draws=draws, seed=seed, batch_size=self.size, listen=listen,
        )  # fmt: skip
        self.passes += forms.passes
        return _Seen(divergence=forms.divergence, forms=forms, grams=gathered)


def plan_shapes_directional(
    model: nn.Module,
    data: CalibrationSet,
    budget: str | float,
    *,
    kinds: Sequence[str] = KINDS,
    by: str = "auto",
    multiple: int = 8,
    max_removed: float = 0.75,
    context: int = 0,
    passes: float = PASSES,
    trust: float = 0.12,
    draws: int = 2,
    damping: float = 0.01,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Decide heads and MLP widths together by directional damage: at least ``budget`` is saved.

    Args:
        model: The model; left as it was.
        data: Calibration tokens.
        budget: What is to be saved: ``"25% flops"``, ``"100 MB"``, ``"2M params"`` (of the layers' matrices).
        kinds: ``heads``, ``mlp`` or both.
        by: Units of heads, see :func:`layerbudget.shrinking.parts.find_parts`.
        multiple: Channels of one MLP unit.
        max_removed: Largest share of the units of one part.
        context: Mean number of tokens attended to, where attention scores shall count in the FLOPs.
        passes: Most forward equivalents of the whole text, the last measurement included.
        trust: Largest change of a part, as a share of its units, in the first step at a treated point.
        draws: Draws of labels at the dense model.
        damping: Relative to the mean of the second moments' diagonal.
        batch_size: Sequences per forward.
        seed: Of the draws.
        progress: Called with (forward equivalents spent, most).

    Returns:
        A plan of kind ``structured`` and rule ``directional``; ``extra`` has the ``path``, ``forward_passes``, ``predicted``
        damage and what was ``measured`` on the model that was really cut, in nats per token.

    Raises:
        UnknownStructure: A layer without heads or MLP of a known layout.
        InfeasibleBudget: The caps do not allow it.
        InvalidInput: Passes that allow no step, or an option outside its domain.
        CoverageError: Layers of a streamed model that come and go, or several processes.
    """
    need_settled(model, "measuring")
    check_finite(model)
    if team() is not None:
        raise CoverageError("Shapes by directional damage are planned in one process.", "", "Use one, or --search curves.")
    least = 1.0 + (1.0 + 2.0 * draws) + (3.0 + 2.0 * draws) + MEASURING
    if draws < 1 or not 0 < trust <= 1 or passes < least:
        raise InvalidInput(
            f"draws is {draws}, trust {trust}, passes {passes:g}.",
            f"Draws are 1 or more, trust lies in (0, 1], and one step needs {least:g} forward equivalents.",
            f"Use draws=2, trust=0.12, passes={max(PASSES, least):g}.",
        )
    parts = find_parts(model, kinds=kinds, by=by, multiple=multiple)
    size = float(next(model.parameters()).element_size())
    space = ShapeSpace(parts, budget, kinds=kinds, max_removed=max_removed, context=context, bytes_per_parameter=size)
    by = next((p.by for p in parts if p.kind == "heads"), by)
    hyper = {"by": by, "multiple": multiple, "depth": 0, "trust": trust, "draws": draws, "passes": passes, "seed": seed}
    shapes = _Shapes(model, data, space.free, damping, batch_size)
    tick = Steps(progress, int(passes), "forward equivalents")

    def tell() -> None:
        tick(int(shapes.passes) - tick.done)

    try:
        counts, log, solution = _descend(shapes, space, passes - MEASURING, trust, draws, seed, tell)
    finally:
        shapes.held.restore()
    plan = space.plan(counts, log[-1]["divergence"], solution, hyper, describe(model))
    measured = measure_plan(model, plan, data, damping=damping, batch_size=batch_size)
    extra = {"path": log, "forward_passes": shapes.passes + MEASURING, "measured": measured}
    return dataclasses.replace(plan, extra={**plan.extra, **to_jsonable(extra)})


def _descend(
    shapes: _Shapes, space: ShapeSpace, passes: float, trust: float, draws: int, seed: int, tell: Callable[[], None]
) -> tuple[np.ndarray, list[dict[str, Any]], Choice]:
    """Steps while they can be paid and gain."""
    zero = np.zeros(len(space.free), dtype=np.int64)
    levels = space.reach(zero, 1.0, LEVELS)
    seen = shapes.look(levels, shapes.dense, draws=draws, seed=seed, dense=True)
    counts, solution = space.step(levels, seen.forms.second)
    grams, log = shapes.dense, list[dict[str, Any]]()
    shapes.move(counts, grams)
    levels = space.reach(counts, trust, LEVELS)
    here = shapes.look(levels, grams, draws=draws, seed=seed + 1)
    log.append({"step": 0, "divergence": here.divergence, "passes": shapes.passes, "predicted": solution.damage})
    price = 3.0 + 2.0 * draws
    while shapes.passes + price <= passes and trust * space.units.max() >= 1:
        radius = np.maximum(np.rint(trust * space.units), 1)[:, None]
        within = np.abs(levels - counts[:, None]) <= radius
        goal, found = space.step(levels, np.where(within, here.forms.total, np.inf))
        if (goal == counts).all() or found.damage >= 0:
            break
        shapes.move(goal, here.grams)
        around = space.reach(goal, trust, LEVELS)
        there = shapes.look(around, here.grams, draws=draws, seed=seed + 1 + len(log))
        gained = there.divergence - here.divergence
        tell()
        if gained >= 0:
            trust /= 2
            continue
        if gained > 0.5 * found.damage:
            trust *= 0.8
        log.append({
            "step": len(log), "divergence": there.divergence, "passes": shapes.passes, "predicted": found.damage,
            "measured": gained, "trust": trust,
        })  # fmt: skip
        counts, solution, here, levels = goal, found, there, around
    return counts, log, solution
