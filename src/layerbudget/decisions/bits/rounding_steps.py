r"""Steps of a plan of formats: damage taken again where the plan has put the model, and the program solved again.

At the dense point the damage of a plan is a sum over blocks. With ``Delta_i`` what the plan makes of block i, the part that the
sum leaves out is the products ``Delta_i' H Delta_k`` of different blocks. At the quantised point they are in the gradient: for
block i going from its present format to j,

    delta_i(j)  =  <dD/dW_i, T_i(j) - T_i(now)>  +  1/2 (1/N) sum_s E_y [ (sum_t b_st' (T_i(j) - T_i(now)) a_st)^2 ],

``D`` the mean KL from the dense model, first term exact on the text (one backward), second by draws and pooled over formats as
at the dense point. The same program is solved with ``d_i(now) + delta_i(j)``; the model goes there and D is measured. Where it
is worse, half and a quarter of the way are tried. ``3 + 2 draws`` passes a step, and one for every trial; quantisers that read
inputs walk the rounded model besides. Embedding and head keep their measured damages.

Products are many and text is short, so they are taken on two halves of it. Of ``c = delta(j) - (d(j) - d(now))``, what the
point says beside the dense one, only the share is kept on which the halves agree: with ``r`` the correlation between them of
``c / ||Delta||``, ``w = 2 r / (1 + r)`` of their mean (Spearman and Brown), nothing where r is not positive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.formats import find_format
from ...compressors.treating import Found, Job, Treating, matrices
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.loss import IGNORE, unlabelled
from ...execution.modes import inference
from ...execution.walk import Walk
from ...models.blocks import weight_of
from ...models.offload import need_settled
from ...plan import Plan
from ...progress import Progress, Steps
from ...records import digest
from ...scores import Scores
from ...sensitivity.directional.directional import forms_along
from ...sensitivity.directional.directions import Written
from ...sensitivity.directional.originals import Originals
from ...sensitivity.directional.point import Reference
from ...sensitivity.directional.pooling import pooled
from ...sensitivity.directional.sums import Unit
from ...storage.parts import Parts
from .items import layer_index
from .plan import Table, plan_bits
from .rounding_bench import has
from .storing import need_data, quantiser_of

LENGTHS = (1.0, 0.5, 0.25)


class Rounded:
    """A model that moves between plans of formats, and is the dense one again after :meth:`restore`.

    Args:
        model: The dense model.
        data: The text that decides.
        table: Blocks and formats.
        batch_size: Sequences per forward.

    Attributes:
        passes: Forward equivalents so far.
    """

    def __init__(self, model: nn.Module, data: CalibrationSet, table: Table, batch_size: int) -> None:
        self.model, self.table = model, table
        self.treating = Treating(model, quantiser_of(table.method))
        need_data(quantiser_of(table.method), data)
        self.formats = [find_format(n) for n in table.formats]
        self.place = [layer_index(model, b) for b in table.blocks]
        self.batch_size = 1 if any(m.copies > 1 for b in table.blocks for m in b.modules) else batch_size
        self.held = Originals(model, table.blocks)
        self.data = data
        self.halves = [Reference(model, data.select(slice(start, None, 2)), self.batch_size) for start in (0, 1)]
        tokens = [sum(int((b.targets != IGNORE).sum()) for b in unlabelled(model, h.data, batch_size)) for h in self.halves]
        self.share = [n / sum(tokens) for n in tokens]
        self.passes = 1.0

    def restore(self) -> None:
        """Put the dense weights back."""
        self.held.restore()

    @torch.no_grad()
    def go(self, chosen: np.ndarray, visit: Callable[[int, Found], None] | None = None) -> None:
        """Round the dense model by a plan as its writer does: ends first, then each layer with the inputs that it is given.

        Args:
            chosen: Format of every block, ``(K,)``.
            visit: Called with every block inside the layers and its statistics, in the place of rounding it; it must round it.
        """
        self.restore()
        visit = visit or (lambda i, found: self.put(i, chosen[i], found))
        for i in (i for i, p in enumerate(self.place) if p is None):
            self.put(i, chosen[i], {})
        if self.treating.treatment.statistic == "none":
            for i in (i for i, p in enumerate(self.place) if p is not None):
                visit(i, {})
            return
        with inference(self.model):
            walk = Walk(self.model, self.data, batch_size=self.batch_size)
            try:
                walk.capture()
                for layer in range(len(walk)):
                    mine = [i for i, p in enumerate(self.place) if p == layer]
                    found = self.treating.collect(walk, [m for i in mine for m in self.table.blocks[i].modules])
                    for i in mine:
                        visit(i, {} if found is None else found.found)
                    if layer + 1 < len(walk):
                        walk.advance()
            finally:
                walk.close()
        self.passes += walk.forwards / (len(walk) * walk.batches)

    def put(self, i: int, j: int, found: Found) -> None:
        """Put one block into a format."""
        block, level = self.table.blocks[i], Level(format=self.formats[j].name)
        self.held.restore([m.name for m in block.modules])
        self.treating.jobs([Job(module=m, level=level) for m in block.modules], found)

    def measure(self, chosen: np.ndarray) -> float:
        """Divergence of a plan, in nats per token."""
        self.go(chosen)
        self.passes += 1.0
        return sum(share * half.measure() for share, half in zip(self.share, self.halves, strict=True))

    def look(self, chosen: np.ndarray, draws: int, seed: int) -> dict[str, Any]:
        """What the plan's point says of every other format of every block.

        Returns:
            ``delta`` beside the present format, ``(K, m)``, its standard ``error``, the ``rest`` of every sequence that the
            error is the norm of, ``divergence``, and ``agreed``, the share.
        """
        units: dict[str, Unit] = {}
        inside = [i for i, p in enumerate(self.place) if p is not None]
        norm = np.zeros((len(inside), len(self.formats)))

        def visit(i: int, found: Found) -> None:
            norm[inside.index(i)] = self._units(i, int(chosen[i]), found, inside.index(i), units)

        self.go(chosen, visit)
        there = np.array([[has(self.table.blocks[i], f) for f in self.formats] for i in inside])
        own = self.table.damage - self.table.damage[np.arange(len(chosen)), chosen][:, None]
        delta = own.copy()
        rest = np.zeros((*own.shape, self.data.samples))
        rest[..., 0] = self.table.error
        if self.table.rest is not None and self.table.rest.shape == rest.shape:
            rest = self.table.rest.copy()
        more: list[np.ndarray] = []
        divergence = 0.0
        for start, (share, half) in enumerate(zip(self.share, self.halves, strict=True)):
            forms = forms_along(
                self.model, half.data, units, clean=half.clean, draws=draws, seed=seed, batch_size=self.batch_size, apart=True
            )
            self.passes += share * forms.passes
            second, _ = pooled(np.where(there, forms.second, np.inf), forms.error, norm)
            more.append(np.where(there, forms.first + second, 0.0) - np.where(there, own[inside], 0.0))
            rest[inside, :, start::2] = share * np.where(there[..., None], forms.rest, 0.0)
            divergence += share * forms.divergence
        agreed = agreement(more[0], more[1], norm)
        delta[inside] += agreed * sum(s * c for s, c in zip(self.share, more, strict=True))
        return {
            "delta": delta, "error": np.linalg.norm(rest, axis=-1), "rest": rest, "divergence": divergence, "agreed": agreed,
        }  # fmt: skip

    def _units(self, i: int, now: int, found: Found, first: int, units: dict[str, Unit]) -> np.ndarray:
        """Directions from the present format of a block to every other one; leaves it in the present one. Squared norms."""
        block = self.table.blocks[i]
        made: dict[str, list[torch.Tensor]] = {m.name: [] for m in block.modules}
        for j in (*range(len(self.formats)), now):
            if has(block, self.formats[j]):
                self.put(i, j, found)
            for name in made:
                made[name].append(torch.cat([v.detach() for v in matrices(*weight_of(self.model, name))]).clone())
        none = [j for j, form in enumerate(self.formats) if not has(block, form)]
        norm = np.zeros(len(self.formats))
        for name, (*held, present) in made.items():
            deltas = [torch.zeros_like(w) if j in none else w - present for j, w in enumerate(held)]
            norm += [float(d.square().sum()) for d in deltas]
            units[name] = Unit(directions=Written(deltas), first=first)
        return norm


def agreement(a: np.ndarray, b: np.ndarray, norm: np.ndarray) -> float:
    """Share of the mean of two halves' corrections that both support.

    >>> x = np.array([[0.0, 1.0, -2.0]])
    >>> agreement(x, x, np.ones((1, 3))), agreement(x, -x, np.ones((1, 3)))
    (1.0, 0.0)
    """
    moved = norm > 0
    x, y = a[moved] / np.sqrt(norm[moved]), b[moved] / np.sqrt(norm[moved])
    size = np.sqrt((x @ x) * (y @ y))
    r = max(0.0, float(x @ y / size)) if size > 0 else 0.0
    return 2.0 * r / (1.0 + r)


def stepped(
    model: nn.Module,
    data: CalibrationSet,
    scores: Scores,
    plan: Plan,
    *,
    steps: int = 2,
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 8,
    kept: Parts | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Take a plan of formats further at the point where it has put the model.

    Args:
        model: The dense model; left as it was.
        data: Calibration tokens.
        scores: What the plan was made from.
        plan: Of kind ``bits`` and rule ``choices``.
        steps: Most steps; it stops where nothing gains.
        draws: Draws of labels of every step.
        seed: Of the draws.
        batch_size: Sequences per forward.
        kept: Where finished steps are kept, and taken from.
        progress: Called with (steps done, most steps).

    Returns:
        The plan; ``extra["steps"]`` has divergence on ``data``, promise and passes of every step, ``extra["passes"]`` all of
        them. Where nothing gained it is the plan that was given.

    Raises:
        InvalidInput: No steps or draws, or a plan that no program made.
        CoverageError: Layers of a streamed model that come and go.
    """
    if steps < 1 or draws < 1 or plan.rule != "choices":
        raise InvalidInput(
            f"{steps} steps with {draws} draws from a plan by {plan.rule}.",
            "Steps and draws are 1 or more, and the rule is choices.",
            "Leave --steps out, or use --rule choices.",
        )  # fmt: skip
    if data.samples < 2:
        raise InvalidInput("Steps compare two halves of the text, and this is one sequence.", "", "Give more samples.")
    need_settled(model, "taking steps")
    point = Rounded(model, data, Table.of(scores), batch_size)
    run = _Run(point=point, scores=scores, kept=kept or Parts(None), draws=draws, seed=seed)
    try:
        return run.descend(plan, steps, progress)
    finally:
        point.restore()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    point: Rounded
    scores: Scores
    kept: Parts
    draws: int
    seed: int

    def descend(self, plan: Plan, steps: int, progress: Progress | None) -> Plan:
        """Go on from a plan for at most so many steps, and stop where none is accepted."""
        spent = 1.0 + float(self.scores.extra["choices"].get("passes", 0.0))
        log: list[dict[str, Any]] = []
        tick = Steps(progress, steps, "steps at the quantised point")
        for step in range(1, steps + 1):
            seen = self._look(plan, self.seed + step)
            log = log or [{"step": 0, "divergence": seen["divergence"], "passes": spent}]
            there, record, passes = self._go(plan, seen)
            spent += seen["passes"] + passes
            tick()
            if there is None:
                break
            plan = there
            log.append({"step": step, **record, "passes": spent})
        return dataclasses.replace(plan, extra={**plan.extra, "steps": log, "passes": spent})

    def _look(self, plan: Plan, seed: int) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            start = self.point.passes
            seen = self.point.look(chosen_of(self.point.table, plan), self.draws, seed)
            rows = [[float(x) if np.isfinite(x) else None for x in row] for row in seen["delta"]]
            kept = {name: seen[name].tolist() for name in ("error", "rest")}
            return {**seen, **kept, "delta": rows, "passes": self.point.passes - start}

        return self._kept(f"look-{seed}", plan, make)

    def _go(self, plan: Plan, seen: Mapping[str, Any]) -> tuple[Plan | None, dict[str, Any], float]:
        """The plan at the first of the lengths where the divergence falls, what is told of it, and passes."""
        spent = 0.0
        tried: list[Mapping[str, str]] = [plan.extra["formats"]]
        for length in LENGTHS:
            wanted = {k: plan.hyperparameters[k] for k in ("bits", "budget")}
            there = plan_bits(self._scores(plan, seen, length), **wanted)
            if there.extra["formats"] in tried:
                continue
            tried.append(there.extra["formats"])
            found = self._kept("step", there, lambda p=there: self._measure(p))  # type: ignore[misc]
            spent += found["passes"]
            change = found["divergence"] - seen["divergence"]
            if change < 0:
                moved = sum(a != b for a, b in zip(tried[0].values(), tried[-1].values(), strict=True))
                promise = there.extra["predicted"] - seen["divergence"]
                record = {"length": length, "agreed": seen["agreed"], "promise": promise, "measured": change, "moved": moved}
                return there, {"divergence": found["divergence"], **record}, spent
        return None, {}, spent

    def _measure(self, plan: Plan) -> dict[str, float]:
        start = self.point.passes
        return {"divergence": self.point.measure(chosen_of(self.point.table, plan)), "passes": self.point.passes - start}

    def _kept(self, what: str, plan: Plan, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = self.kept.json(f"{what}-{digest(plan.extra['formats'])}", make)
        return found

    def _scores(self, plan: Plan, seen: Mapping[str, Any], length: float) -> Scores:
        """The record that the program reads at the plan: a share of what the products of blocks change."""
        table = self.point.table
        now, k = chosen_of(table, plan), np.arange(len(table.blocks))
        delta = np.array(seen["delta"], dtype=np.float64)
        own = np.where(np.isfinite(table.damage), table.damage, np.nan)
        own -= own[k, now][:, None]
        here = np.abs(table.damage[k, now])
        share = here / here.sum() if here.sum() > 0 else np.full(len(here), 1.0 / len(here))
        damage = seen["divergence"] * share[:, None] + own + length * (delta - own)
        rows = [[None if np.isnan(x) else float(x) for x in row] for row in damage]
        held = {**self.scores.extra["choices"], "damage": rows, "measure": "directional, stepped"}
        held |= {name: seen[name] for name in ("error", "rest")}
        return dataclasses.replace(self.scores, extra={"choices": held})


def chosen_of(table: Table, plan: Plan) -> np.ndarray:
    """Index of the format of every block, ``(K,)``."""
    formats = plan.extra["formats"]
    return np.array([table.formats.index(formats[b.modules[0].name]) for b in table.blocks])
