"""One descent: steps of a sparsity plan down the measured divergence, each as far as a model of the damage is trusted.

At every point the damage of all units at levels within reach is predicted
(:mod:`layerbudget.sensitivity.directional.directional`) and the best
plan within reach solved for exactly (:mod:`layerbudget.solvers.steps`). The model goes there and is measured; where worse,
half and a quarter of the way. Where less than half of the promise came, the next step is shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ...compressors.treating import Found
from ...progress import Progress, Steps, say
from ...sensitivity.directional.journal import Journal, Trajectory
from ...sensitivity.directional.point import PointEvaluation, Reference, TrustRegion
from ...solvers.counts import round_parameters
from ...solvers.steps import curves_at, damage_at, reach, step_within

STEPS = (1.0, 0.5, 0.25)
SHRINK, LEAST_TRUST, HELD = 0.8, 0.01, 0.5
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
    """An accepted point: what was seen there within ``reach``, and how far of it is trusted by now."""

    counts: np.ndarray
    found: Found
    look: PointEvaluation
    levels: np.ndarray
    reach: float
    trust: float


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
    held = journal.resume(point.treating.treatment.statistic)
    path = held.path if held else Trajectory(counts=[start], log=[])
    found, reached = (held.found, held.reach) if held else (point.dense, settings.trust)
    point.move(path.counts[-1], found)
    here = _arrive(point, path.counts[-1], found, reached, settings, max(len(path.log) - 1, 0))
    if held:
        here.trust, point.passes = held.trust, path.log[-1]["passes"]
    else:
        path.log.append(_entry(point, here, judge, step=0))
        journal.keep(path, found, here.reach, here.trust)
    while len(path.log) <= settings.steps - settings.leap and _affords(point, settings):
        gone = _go(point, here, path, settings)
        if gone is None:
            break
        here, record = gone
        path.counts.append(here.counts)
        path.log.append({**_entry(point, here, judge, step=len(path.log)), **record})
        journal.keep(path, here.found, here.reach, here.trust)
        say(progress, f"damage {path.log[-1]['divergence']:.3g}")
        tick(len(path.log) - 1 - tick.done)
    if settings.leap and len(path.log) <= settings.steps:
        _, _, path.goal, path.promise = _goal(point, here, path, settings)
    return path


def _affords(point: TrustRegion, settings: Settings) -> bool:
    """Whether another point with its backwards can be paid."""
    return point.passes + _price(settings) <= settings.passes


def _price(settings: Settings) -> float:
    return 1.0 + 2.0 * (1 + settings.draws)


def _arrive(point: TrustRegion, counts: np.ndarray, found: Found, trust: float, settings: Settings, step: int) -> _Here:
    """Look around at the point where the model is."""
    count = NESTED_LEVELS if point.treating.treatment.nested else WRITTEN_LEVELS
    levels = reach(counts / point.decisions.numel, trust, settings.cap, count)
    look = point.look(counts, found, levels, draws=settings.draws, seed=settings.seed + step)
    return _Here(counts=counts, found=found, look=look, levels=levels, reach=trust, trust=trust)


def _go(point: TrustRegion, here: _Here, path: Trajectory, settings: Settings) -> tuple[_Here, dict[str, Any]] | None:
    """One step: the program, then the whole of the way, half or a quarter; None where nothing gains."""
    numel = point.decisions.numel
    levels, damage, goal, _ = _goal(point, here, path, settings)
    if goal is None:
        return None
    for length in STEPS:
        if length < 1.0 and not _affords(point, settings):
            return None
        counts = goal if length == 1.0 else _between(here.counts, goal, length, numel, settings.total)
        predicted = damage_at(levels, damage, counts / numel)
        point.move(counts, here.look.found)
        trust = here.trust * length
        there = _arrive(point, counts, here.look.found, trust, settings, len(path.log))
        measured = there.look.divergence - here.look.divergence
        if measured < 0:
            there.trust = max(LEAST_TRUST, trust * SHRINK) if measured > HELD * predicted else trust
            moved = float(np.abs(counts - here.counts).sum() / numel.sum())
            return there, {
                "length": length, "trust": trust, "moved": moved, "predicted": predicted, "measured": measured,
            }  # fmt: skip
    return None


def _goal(
    point: TrustRegion, here: _Here, path: Trajectory, settings: Settings
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float]:
    """Levels within reach, damage there, the best plan and what it promises; no plan where nothing gains."""
    numel = point.decisions.numel
    levels = reach(here.counts / numel, here.trust, settings.cap, here.levels.shape[1])
    damage = curves_at(here.levels, TERMS[settings.terms](here.look), levels)
    goal, path.solution = step_within(levels, damage, numel, settings.total)
    promise = damage_at(levels, damage, goal / numel)
    gains = promise < 0 and not (goal == here.counts).all()
    return levels, damage, goal if gains else None, promise


def _between(here: np.ndarray, goal: np.ndarray, length: float, numel: np.ndarray, total: int) -> np.ndarray:
    return round_parameters(((1 - length) * here + length * goal) / numel, numel, total)


def _entry(point: TrustRegion, here: _Here, judge: Reference | None, **record: Any) -> dict[str, Any]:
    found = {**record, "divergence": here.look.divergence, "passes": point.passes}
    return found if judge is None else {**found, "held_out": judge.measure()}
