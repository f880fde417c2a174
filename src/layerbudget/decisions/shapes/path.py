"""The way from the dense model to a plan of smaller shapes: the budget in a few strides, then steps within a trust region."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.calibration import CalibrationSet
from ...errors import InfeasibleBudget, InvalidInput
from ...progress import Steps
from ...sensitivity.directional.terms import QuadraticTerms
from ...solvers.choices import Choice
from ...solvers.steps import Proposal, descend
from ...storage.parts import Parts
from ..describe import EvenUneven
from .point import LazyMoments, ShapeEvaluation, ShapePoint
from .program import GONE, PASSES, ShapeSpace

if TYPE_CHECKING:
    from torch import nn

LEVELS = 7
_KEPT = ("first", "second", "rest", "tokens", "passes", "divergence")  # of an evaluation, under resume


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """How far and how finely a plan is searched for; see :func:`~layerbudget.decisions.shapes.plan.plan_shapes`."""

    strides: int
    trust: float
    draws: int
    passes: float
    damping: float
    seed: int
    batch_size: int

    def check(self, depth: int, last: float, starts: int) -> None:
        """Refuse what allows no step.

        Args:
            depth: Layers that may go.
            last: Forward equivalents that are kept for measuring the result.
            starts: Units of heads that are looked at.

        Raises:
            InvalidInput: It allows none.
        """
        draws, strides, trust, passes = self.draws, self.strides, self.trust, self.passes
        least = (2.0 + 2.0 * draws) * starts + strides * (3.0 + 2.0 * draws) + last
        if min(draws, strides) < 1 or not 0 < trust <= 1 or depth < 0:
            raise InvalidInput(
                f"draws is {draws}, strides {strides}, trust {trust:g}, depth {depth}.",
                "Draws and strides are 1 or more, trust lies in (0, 1], depth is 0 or more.",
                "Use draws=2, strides=2, trust=0.12, depth=0.",
            )
        if passes < least:
            raise InvalidInput(
                f"{passes:g} forward equivalents are too few.",
                f"With draws={draws} and strides={strides}, {least:g} forward equivalents are needed, "
                f"{last:g} of them for the end.",
                f"Give more (--passes {least:g}; {PASSES:g} is usual), or take fewer draws or strides (--strides 1).",
            )


def best_start(
    model: nn.Module, data: CalibrationSet, spaces: Sequence[ShapeSpace], search: Search, tick: Steps, parts: Parts
) -> ShapePath:
    """Return the path whose first plan is predicted to do least damage; what the others spent counts as its own."""
    points = (ShapePoint(model, data, space, search.damping, search.batch_size) for space in spaces)
    paths = [ShapePath(point, search, tick, parts, f"start-{i}") for i, point in enumerate(points)]
    path = min(paths, key=ShapePath.promise) if len(paths) > 1 else paths[0]
    path.point.passes, path.spent_elsewhere = sum(p.point.passes for p in paths), 0
    return path


class ShapePath:
    """The way from the dense model to a plan, with divergence, predictions and passes of every accepted point in ``log``."""

    def __init__(self, point: ShapePoint, search: Search, tick: Steps, parts: Parts, name: str) -> None:
        self.point, self.space, self.search, self.tick, self.parts, self.name = point, point.space, search, tick, parts, name
        self.tried, self.log, self.spent_elsewhere = 0, list[dict[str, Any]](), tick.done  # what other paths spent
        self.here = self._evaluate(self.space.start(), 1.0, LazyMoments(lambda: point.dense))

    def _evaluate(self, state: np.ndarray, trust: float, before: LazyMoments) -> ShapeEvaluation:
        """Measure at a state, by the moments of the one before, or find what was measured there.

        Second moments are too large to be kept. Those of a state that was found are made again if something has to be
        measured behind it: one forward for every state on the way there.
        """
        around, measured = self.space.around(state, trust, LEVELS), list[ShapeEvaluation]()

        def measure() -> dict[str, Any]:
            seed = self.search.seed + self.tried
            measured.append(self.point.evaluate(state, around, before(), draws=self.search.draws, seed=seed, spent=self._spent))
            forms = measured[0].forms
            return {name: np.asarray(getattr(forms, name)).tolist() for name in _KEPT}

        kept = self.parts.json(f"{self.name}-{self.tried}", measure)
        self.tried += 1
        if measured:
            evaluation = measured[0]
        else:
            forms = QuadraticTerms(**{**kept, **{name: np.array(kept[name]) for name in ("first", "second", "rest")}})
            self.point.passes += forms.passes
            evaluation = ShapeEvaluation(
                state=state, around=around, forms=forms, moments=LazyMoments(lambda: self.point.look(state, before()))
            )
        self._spent(self.point.passes)
        return evaluation

    def _spent(self, passes: float) -> None:
        """Tell of whole forward equivalents, where there are more than before."""
        more = self.spent_elsewhere + int(passes) - self.tick.done
        if more > 0:
            self.tick(more)

    def promise(self) -> float:
        """Damage of the budget as the dense model sees it."""
        return self.space.step(*every_width(self.space, self.here.around, self.here.forms.total))[1].damage

    def even_and_uneven(self) -> EvenUneven | None:
        """Damage of the budget as the dense model sees it, with layers that stay alike and with any; None where they cannot."""
        damages = dict[str, float]()
        for even in (True, False):
            try:
                space = self.space.evened(even)
                damage = space.step(*every_width(space, self.here.around, self.here.forms.total))[1].damage
            except InfeasibleBudget:
                return None
            damages["even" if even else "uneven"] = float(damage)
        return EvenUneven(**damages)

    def run(self, passes: float) -> tuple[ShapeEvaluation, Choice]:
        """Reach the budget, a part of it at a time, and go on down while that can be paid; the end, and the program there."""
        here, moments = self.here, LazyMoments(lambda: self.point.dense)
        for number in range(1, self.search.strides + 1):
            share = number / self.search.strides
            state, solution = self.space.step(*every_width(self.space, here.around, here.forms.total), share)
            predicted = here.divergence + solution.damage
            here = self._evaluate(state, self.search.trust if number == self.search.strides else 1.0, moments)
            moments = here.moments
            self._note(here, step=0, share=share, predicted=predicted)

        def evaluate(last: ShapeEvaluation, proposal: Proposal) -> ShapeEvaluation:
            return self._evaluate(proposal.state[0], proposal.trust, last.moments)

        def affords() -> bool:
            return self.point.passes + 3.0 + 2.0 * self.search.draws <= passes

        settled = np.zeros(len(here.state), dtype=bool)
        for step in descend(here, self.search.trust, partial(self._proposals, settled), evaluate, affords):
            here, solution = step.point, step.proposal.state[1]
            fields = {"predicted": step.proposal.promise, "measured": step.change, "trust": step.trust}
            self._note(here, step=len(self.log), **fields)
        return here, solution

    def _note(self, here: ShapeEvaluation, **fields: float) -> None:
        values = [gone / part.parameters for gone, part in zip(self.space.removed(here.state), self.space.parts, strict=True)]
        self.log.append({"divergence": here.divergence, "passes": self.point.passes, **fields, "values": values})

    def _proposals(self, settled: np.ndarray, here: ShapeEvaluation, trust: float) -> Iterator[Proposal]:
        """The best plans within reach; a layer whose going or coming back has not gained is settled from then on."""
        state, around = here.state, here.around
        while trust * self.space.units.max() >= 1:
            radius = np.maximum(np.rint(trust * self.space.units), 1)
            stays = (around[:, :, GONE] == state[:, None, GONE]) | ~settled[:, None]
            near = (np.abs(around[:, :, :2] - state[:, None, :2]) <= radius[:, None, :]).all(2)
            within = (near | (around[:, :, GONE] == 1)) & stays
            goal, choice = self.space.step(around, np.where(within, here.forms.total, np.inf))
            if (goal == state).all() or choice.damage >= 0:
                return
            yield Proposal(state=(goal, choice), promise=choice.damage, trust=trust)
            flips = goal[:, GONE] != state[:, GONE]
            settled |= flips
            trust = trust if flips.any() else trust / 2


def every_width(space: ShapeSpace, around: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Alternatives with every number of MLP units between those that were looked at, and their damage, by straight lines."""
    layer_rows = []
    for rows, damage in zip(around, seen, strict=True):
        made, gone = list[tuple[int, int, int, float]](), rows[:, GONE] == 1
        for heads in np.unique(rows[~gone, 0]):
            same_heads = (rows[:, 0] == heads) & ~gone
            units, where = np.unique(rows[same_heads, 1], return_index=True)
            every = np.arange(units[0], units[-1] + 1)
            every = every[np.isin(every, space.allowed.get("mlp", every))]
            between = np.interp(every, units, damage[same_heads][where])
            made += [(int(heads), int(u), 0, float(d)) for u, d in zip(every, between, strict=True)]
        layer_rows.append([*made, *((0, 0, 1, float(d)) for d in damage[gone][:1])])
    longest = max(map(len, layer_rows))
    table = np.array([made + made[:1] * (longest - len(made)) for made in layer_rows])
    return table[:, :, :3].astype(np.int64), table[:, :, 3]
