"""One descent of a sparsity plan by the trust-region loop (:func:`layerbudget.solvers.steps.descend`).

At every point the damage of all units at levels within reach is predicted
(:mod:`layerbudget.sensitivity.directional.directional`). Proposed are the best plan
within reach, then half and a quarter of the way to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...compressors.treating import Found
from ...progress import Progress, Steps, say
from ...sensitivity.directional.journal import Journal, Trajectory
from ...sensitivity.directional.point import PointEvaluation, Reference, TrustRegion
from ...solvers import steps
from ...solvers.rounding import round_parameters
from ...solvers.steps import Proposal, curves_at, damage_at, reach, step_within

LENGTHS, LEAST_TRUST = (1.0, 0.5, 0.25), 0.01
NESTED_LEVELS, WRITTEN_LEVELS = 17, 7
TERMS: dict[str, Callable[[PointEvaluation], np.ndarray]] = {
    "first": lambda look: look.forms.first,
    "second": lambda look: look.forms.second,
    "both": lambda look: look.forms.total,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to descend.

    Attributes:
        total: Parameters that go.
        cap: Largest sparsity of one unit.
        steps: Most steps.
        passes: Most forward equivalents of the deciding text, those of making the point included.
        trust: Largest change of one unit's sparsity in the first step.
        draws: Draws of labels per point: 0 for the first term only.
        terms: ``first``, ``second`` or ``both``.
        seed: Of the draws.
        leap: Leave the last step to the caller, who measures it in a way of its own.
    """

    total: int
    cap: float
    steps: int
    passes: float
    trust: float
    draws: int
    terms: str
    seed: int
    leap: bool = False


@dataclasses.dataclass(kw_only=True, eq=False)
class _Here:
    """What was seen at a point within ``reach``."""

    counts: np.ndarray
    found: Found
    look: PointEvaluation
    levels: np.ndarray
    reach: float

    @property
    def divergence(self) -> float:
        return self.look.divergence


def descend(
    point: TrustRegion, start: np.ndarray, settings: Settings, *, judge: Reference | None = None,
    journal: Journal | None = None, progress: Progress | None = None,
) -> Trajectory:  # fmt: skip
    """Descend from a plan until nothing is gained, or steps or passes are spent.

    Args:
        point: The model with the deciding text.
        start: Counts of every unit.
        settings: How.
        judge: The dense model's output on other text: its divergence is logged at every accepted point, and decides nothing
            here.
        journal: Where finished steps are kept, and taken from.
        progress: Called with (steps done, most steps).

    Returns:
        The path; the model is left wherever it was last.
    """
    journal = journal or Journal(None, "")
    tick = Steps(progress, settings.steps)
    numel = point.decisions.numel
    held = journal.resume(point.treating.treatment.statistic)
    path = held.path if held else Trajectory(counts=[start], log=[])
    found, reached, trust = (held.found, held.reach, held.trust) if held else (point.dense, settings.trust, settings.trust)
    here = _arrive(point, path.counts[-1], found, reached, settings, max(len(path.log) - 1, 0))
    if held:
        point.passes = path.log[-1]["passes"]
    else:
        path.log.append(_entry(point, here, judge, step=0))
        journal.keep(path, found, here.reach, trust)

    def proposals(here: _Here, trust: float) -> Iterator[Proposal]:
        levels, damage, goal, _ = _goal(point, here, trust, path, settings)
        if goal is None:
            return
        for length in LENGTHS:
            counts = goal if length == 1.0 else _between(here.counts, goal, length, numel, settings.total)
            promise = damage_at(levels, damage, counts / numel)
            yield Proposal(state=counts, promise=promise, trust=trust * length, length=length)

    def evaluate(here: _Here, proposal: Proposal) -> _Here:
        return _arrive(point, proposal.state, here.look.found, proposal.trust, settings, len(path.log))

    def affords() -> bool:
        price = 1.0 + 2.0 * (1 + settings.draws)
        return len(path.log) <= settings.steps - settings.leap and point.passes + price <= settings.passes

    for step in steps.descend(here, trust, proposals, evaluate, affords, least=LEAST_TRUST):
        here, trust, proposal = step.point, step.trust, step.proposal
        moved = float(np.abs(here.counts - path.counts[-1]).sum() / numel.sum())
        path.counts.append(here.counts)
        path.log.append({
            **_entry(point, here, judge, step=len(path.log)), "length": proposal.length, "trust": proposal.trust,
            "moved": moved, "predicted": proposal.promise, "measured": step.change,
        })  # fmt: skip
        journal.keep(path, here.found, here.reach, trust)
        say(progress, f"damage {path.log[-1]['divergence']:.3g}")
        tick(len(path.log) - 1 - tick.done)
    if settings.leap and len(path.log) <= settings.steps:
        _, _, path.goal, path.promise = _goal(point, here, trust, path, settings)
    return path


def _arrive(point: TrustRegion, counts: np.ndarray, found: Found, trust: float, settings: Settings, step: int) -> _Here:
    """Go there and look around."""
    point.move(counts, found)
    count = NESTED_LEVELS if point.treating.treatment.nested else WRITTEN_LEVELS
    levels = reach(counts / point.decisions.numel, trust, settings.cap, count)
    look = point.look(counts, found, levels, draws=settings.draws, seed=settings.seed + step)
    return _Here(counts=counts, found=found, look=look, levels=levels, reach=trust)


def _goal(
    point: TrustRegion, here: _Here, trust: float, path: Trajectory, settings: Settings
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float]:
    """Levels within reach, damage there, the best plan and what it promises; no plan where nothing gains."""
    numel = point.decisions.numel
    levels = reach(here.counts / numel, trust, settings.cap, here.levels.shape[1])
    damage = curves_at(here.levels, TERMS[settings.terms](here.look), levels)
    goal, path.solution = step_within(levels, damage, numel, settings.total)
    promise = damage_at(levels, damage, goal / numel)
    gains = promise < 0 and not (goal == here.counts).all()
    return levels, damage, goal if gains else None, promise


def _between(here: np.ndarray, goal: np.ndarray, length: float, numel: np.ndarray, total: int) -> np.ndarray:
    return round_parameters(((1 - length) * here + length * goal) / numel, numel, total)


def _entry(point: TrustRegion, here: _Here, judge: Reference | None, **record: Any) -> dict[str, Any]:
    found = {**record, "divergence": here.divergence, "passes": point.passes}
    return found if judge is None else {**found, "held_out": judge.measure()}
