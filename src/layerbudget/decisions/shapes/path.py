"""The way from the dense model to a plan of smaller shapes: the budget in a few strides, then steps within a trust region.

Where layers may go, that is done with all of them first, if the budget can be met so, and its end is what plans without some of
them have to beat. These are planned at the points whose terms reach every width, the dense model and the first strides: there
nothing goes that the budget does not need. One forward measures each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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

    @property
    def each(self) -> float:
        """Forward equivalents of a point whose terms are measured."""
        return 3.0 + 2.0 * self.draws

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
        least = (2.0 + 2.0 * draws) * starts + strides * self.each + (depth > 0) + last
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
                f"Give more (--passes {least:g}; {PASSES:g} is usual)"
                + (", or take fewer draws or strides (--draws 1, --strides 1)." if max(draws, strides) > 1 else "."),
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
        self.wide, self.seen = list[ShapeEvaluation](), set[bytes]()  # points whose terms reach every width, states measured
        self.here = self._evaluate(self.space.start(), 1.0, LazyMoments(lambda: point.dense))

    def _evaluate(self, state: np.ndarray, trust: float, before: LazyMoments) -> ShapeEvaluation:
        """Measure at a state, by the moments of the one before, or find what was measured there.

        Second moments are too large to be kept. Those of a state that was found are made again if something has to be
        measured behind it: one forward for every state on the way there. Without trust there is no alternative to the state,
        and it takes one forward.
        """
        around = self.space.around(state, trust, LEVELS) if trust else state[:, None]
        measured = list[ShapeEvaluation]()

        def measure() -> dict[str, Any]:
            if not trust:
                forms = self.point.measure(state, before())
                return {name: np.asarray(getattr(forms, name)).tolist() for name in _KEPT}
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
        self.seen.add(state.tobytes())
        if trust == 1.0:
            self.wide.append(evaluation)
        return evaluation

    def _spent(self, passes: float) -> None:
        """Tell of whole forward equivalents, where there are more than before."""
        more = self.spent_elsewhere + int(passes) - self.tick.done
        if more > 0:
            self.tick(more)

    def promise(self) -> tuple[int, float]:
        """Layers that may go in the first plan, none where that meets the budget, and its damage as the dense model sees it."""
        for depth in (0, self.space.depth):
            with contextlib.suppress(InfeasibleBudget):
                return depth, self.space.within(depth).step(*every_width(self.space, self.here))[1].damage
        return self.space.depth, np.inf

    def even_and_uneven(self) -> EvenUneven | None:
        """Damage of the budget as the dense model sees it, with layers that stay alike and with any; None where they cannot."""
        damages = dict[str, float]()
        for even in (True, False):
            try:
                space = self.space.evened(even)
                damage = space.step(*every_width(space, self.here))[1].damage
            except InfeasibleBudget:
                return None
            damages["even" if even else "uneven"] = float(damage)
        return EvenUneven(**damages)

    def run(self, passes: float) -> tuple[ShapeEvaluation, Choice]:
        """Reach the budget, a part of it at a time, and go on down while that can be paid; the end, and the program there.

        Where layers may go, the end is no worse than that of the same passes with all layers, where these can meet the budget.
        """
        depth, _ = self.promise()
        space = self.space.within(depth)
        here, solution = self._stride(space)
        if depth < self.space.depth or not depth:
            here, solution = self._descend(space, here, solution, passes)
        if not self.space.depth:
            return here, solution
        start, mark = (here, solution), len(self.log)
        tried = self._drop(here, passes)
        if tried is not None and (depth < self.space.depth or tried[0].divergence < here.divergence):
            start = tried
        end = self._descend(self.space, *start, passes)
        if end[0].divergence < here.divergence:
            return end
        del self.log[mark:]
        return here, solution

    def _stride(self, space: ShapeSpace) -> tuple[ShapeEvaluation, Choice]:
        """The best of the strides' ends that save enough."""
        here, moments, enough = self.here, LazyMoments(lambda: self.point.dense), list[tuple[ShapeEvaluation, Choice]]()
        for number in range(1, self.search.strides + 1):
            share = number / self.search.strides
            state, solution = space.step(*every_width(space, here), share)
            predicted = here.divergence + solution.damage
            here = self._evaluate(state, self.search.trust if number == self.search.strides else 1.0, moments)
            moments = here.moments
            self._note(here, step=0, share=share, predicted=predicted)
            if space.saved(state[:, None]).sum() >= space.need:
                enough.append((here, solution))
        best = min(enough, key=lambda end: end[0].divergence)
        if best[0] is not here:
            change = best[0].divergence - here.divergence
            self._note(best[0], step=len(self.log), predicted=change, measured=change)
        return best

    def _descend(
        self, space: ShapeSpace, here: ShapeEvaluation, solution: Choice, passes: float
    ) -> tuple[ShapeEvaluation, Choice]:
        """Steps that gain; where layers are tried behind them, the last one that can be paid is measured without its terms."""
        spare = self.search.each if space.depth < self.space.depth else 0.0

        def evaluate(last: ShapeEvaluation, proposal: Proposal) -> ShapeEvaluation:
            goes_on = self.point.passes + self.search.each + spare <= passes
            return self._evaluate(proposal.state[0], proposal.trust if goes_on else 0.0, last.moments)

        def affords() -> bool:
            return self.point.passes + self.search.each <= passes

        settled = np.zeros(len(here.state), dtype=bool)
        for step in descend(here, self.search.trust, partial(self._proposals, space, settled), evaluate, affords):
            here, solution = step.point, step.proposal.state[1]
            fields = {"predicted": step.proposal.promise, "measured": step.change, "trust": step.trust}
            self._note(here, step=len(self.log), **fields)
        return here, solution

    def _drop(self, here: ShapeEvaluation, passes: float) -> tuple[ShapeEvaluation, Choice] | None:
        """The best of plans without some layers that were not measured; at most the passes of one point with terms find it."""
        most, dense = min(passes, self.point.passes + self.search.each), LazyMoments(lambda: self.point.dense)
        best: tuple[ShapeEvaluation, Choice, float] | None = None
        for state, choice, damage in self._without_layers(here.state):
            if self.point.passes + 1.0 > most:
                break
            tried = self._evaluate(state, 0.0, dense)
            if best is None or tried.divergence < best[0].divergence:
                best = tried, choice, damage
        if best is None:
            return None
        tried, choice, damage = best
        if self.search.trust * self.space.units.max() >= 1 and self.point.passes + 2 * self.search.each <= passes:
            tried = self._evaluate(tried.state, self.search.trust, dense)
        change = tried.divergence - here.divergence
        self._note(tried, step=len(self.log), predicted=damage - here.divergence, measured=change)
        return tried, choice

    def _without_layers(self, present: np.ndarray) -> Iterator[tuple[np.ndarray, Choice, float]]:
        """States without layers that were not measured, with the program of each and its damage by it.

        First those that are gone at present go, then those of the best program; the dearest of these then stays, and so on.
        """
        tables = [(point, *every_width(self.space, point)) for point in self.wide]
        stays = [np.zeros(len(present), dtype=bool) for _ in tables]
        for round_ in itertools.count():
            found = False
            for (point, around, seen), kept in zip(tables, stays, strict=True):
                gone = around[:, :, GONE]
                allowed = gone <= ~kept[:, None] if round_ or not present[:, GONE].any() else gone == present[:, None, GONE]
                with contextlib.suppress(InfeasibleBudget):
                    state, choice = self.space.step(around, np.where(allowed, seen, np.inf))
                    going = np.flatnonzero(state[:, GONE])
                    if not len(going):
                        continue
                    found = True
                    if round_ or not present[:, GONE].any():
                        kept[max(going, key=lambda k: seen[k][gone[k] == 1][0])] = True
                    if state.tobytes() not in self.seen:
                        yield state, choice, point.divergence + choice.damage
            if not found:
                return

    def _note(self, here: ShapeEvaluation, **fields: float) -> None:
        values = [gone / part.parameters for gone, part in zip(self.space.removed(here.state), self.space.parts, strict=True)]
        self.log.append({"divergence": here.divergence, "passes": self.point.passes, **fields, "values": values})

    def _proposals(self, space: ShapeSpace, settled: np.ndarray, here: ShapeEvaluation, trust: float) -> Iterator[Proposal]:
        """The best plans within reach; a layer whose going or coming back has not gained is settled from then on."""
        state, around = here.state, here.around
        while trust * self.space.units.max() >= 1:
            radius = np.maximum(np.rint(trust * self.space.units), 1)
            stays = (around[:, :, GONE] == state[:, None, GONE]) | ~settled[:, None]
            near = (np.abs(around[:, :, :2] - state[:, None, :2]) <= radius[:, None, :]).all(2)
            within = (near | (around[:, :, GONE] == 1)) & stays
            goal, choice = space.step(around, np.where(within, here.forms.total, np.inf))
            if (goal == state).all() or choice.damage >= 0:
                return
            yield Proposal(state=(goal, choice), promise=choice.damage, trust=trust)
            flips = goal[:, GONE] != state[:, GONE]
            settled |= flips
            trust = trust if flips.any() else trust / 2


def every_width(space: ShapeSpace, point: ShapeEvaluation) -> tuple[np.ndarray, np.ndarray]:
    """Alternatives with every number of MLP units between those that were looked at, and their damage, by straight lines."""
    layer_rows = []
    for rows, damage in zip(point.around, point.forms.total, strict=True):
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
