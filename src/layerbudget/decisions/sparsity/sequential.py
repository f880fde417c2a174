r"""Plans of sparsity by directional damage: predict along the pruner's own change, solve exactly, go there, look again.

Half of the text may decide and the other half judge (cross-fitting): a descent on the first half is measured on the second at
every step, which says how fine the units may be and when to stop; then all of the text decides, that far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ...compressors.base import Treatment, find_treatment
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.processes import is_main
from ...models.blocks import check_finite, describe
from ...models.provenance import computation, versions
from ...plan import Plan
from ...records import check_fraction
from ...sensitivity.directional.decisions import Decisions
from ...sensitivity.directional.journal import Journal, Trajectory
from ...sensitivity.directional.point import Reference, TrustRegion
from ...solvers.rounding import round_parameters
from ...storage.parts import Parts
from .descent import TERMS, Settings, descend

Progress = Callable[[int, int], None]
PASSES, MANY = 24.0, 64
APPLYING = 2.0  # a plan treated by the pruner itself: every layer runs for its statistics and again treated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """What the judging half of the text chose."""

    by: str
    steps: int
    held_out: float
    tried: Mapping[str, Sequence[float]]
    passes: float


def plan_directional(
    model: nn.Module,
    data: CalibrationSet,
    *,
    sparsity: float = 0.5,
    max_sparsity: float = 0.95,
    by: str | Sequence[str] = "linear",
    method: str = "wanda",
    passes: float = PASSES,
    steps: int | None = None,
    crossfit: bool | None = None,
    trust: float = 0.06,
    draws: int = 0,
    terms: str | None = None,
    batch_size: int = 8,
    seed: int = 0,
    resume: Path | str | None = None,
    progress: Progress | None = None,
    **own: Any,
) -> Plan:
    """Plan the sparsity of every layer, matrix or group of rows by directional damage.

    Args:
        model: The dense model; left as it was.
        data: Calibration tokens.
        sparsity: Target.
        max_sparsity: Cap of one unit.
        by: ``layer``, ``linear``, ``rows:G``, or a regular expression; several of them are tried on one half of the text and
            judged on the other.
        method: Pruner.
        passes: Most forward equivalents of the whole text (forward 1, backward 2) that may be spent, judging and the last
            measurement included; two more are where the last step is measured by the pruner itself and refused.
        steps: Most steps; as many as ``passes`` allow by default.
        crossfit: Let half of the text judge when to stop; by default where several ``by`` are given. It takes more than half
            of the passes.
        trust: Largest change of one unit's sparsity in the first step.
        draws: Draws of labels per step for the second term: two more passes each. At treated points the first term and the
            line search do as well, at fewer.
        terms: ``first``, ``second`` or ``both``; by default what ``draws`` gives.
        batch_size: Sequences per forward.
        seed: Of the draws.
        resume: Folder that keeps finished steps; an interrupted run continues from it.
        progress: Called with (steps done, most steps).
        **own: Options of the method.

    Returns:
        A plan of rule ``directional``; ``extra`` has the ``path``, ``forward_passes``, ``predicted`` and ``measured`` damage in
        nats per token (by the pruner itself), ``held_out`` (of the plan that half the text made, on the other half), and
        ``rows`` where they are decided.

    Raises:
        CoverageError: Layers of a streamed model that come and go.
        InvalidInput: An option outside its domain, or passes that allow no step.
        InfeasibleBudget: Caps below the target.
    """
    check_fraction(sparsity, "sparsity")
    check_fraction(max_sparsity, "max_sparsity", low=sparsity)
    check_finite(model)
    names = [by] if isinstance(by, str) else list(by)
    crossfit = len(names) > 1 if crossfit is None else crossfit
    treatment = find_treatment(method)
    plain = _Plain(
        sparsity=sparsity, cap=max_sparsity, trust=trust, draws=draws, terms=terms or ("both" if draws else "first"), seed=seed
    )
    _check(names, crossfit, data, plain, passes, steps)
    identity = describe(model)
    key = {
        "model": identity["digest"], "data": data.digest, "method": method, "own": own, "passes": passes, "steps": steps,
        "batch_size": batch_size, "max_sparsity": max_sparsity, **dataclasses.asdict(plain), "versions": versions(),
        "computation": computation(model),
    }  # fmt: skip
    parts = Parts(resume if is_main() else None, {**key, "by": names})
    run = _Run(model=model, treatment=treatment, own=own, batch_size=batch_size, plain=plain, parts=parts, progress=progress)
    chosen = run.choose(names, data, passes, steps) if crossfit else None
    point, path, measured = run.decide(chosen.by if chosen else names[0], data, passes, chosen, steps)
    return _plan(identity, point, path, measured, chosen, {**key, "by": chosen.by if chosen else names[0]})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plain:
    """Settings that all descents of a run share."""

    sparsity: float
    cap: float
    trust: float
    draws: int
    terms: str
    seed: int

    @property
    def price(self) -> float:
        """Forward equivalents of one step."""
        return 3.0 + 2.0 * self.draws

    def settings(self, decisions: Decisions, steps: int, passes: float, *, leap: bool) -> Settings:
        """Of one descent."""
        total = round(self.sparsity * int(decisions.numel.sum()))
        return Settings(
            total=total, cap=self.cap, steps=steps, passes=passes, trust=self.trust, draws=self.draws, terms=self.terms,
            seed=self.seed, leap=leap,
        )  # fmt: skip


def _check(names: Sequence[str], crossfit: bool, data: CalibrationSet, plain: _Plain, passes: float, steps: int | None) -> None:
    if not names or plain.draws < 0 or plain.terms not in TERMS or (plain.terms != "first" and not plain.draws):
        raise InvalidInput(
            f"terms is {plain.terms!r} with {plain.draws} draws.", f"Terms are {', '.join(TERMS)}; all but first need draws.",
            "Use draws=2.",
        )  # fmt: skip
    if not 0 < plain.trust <= 1 or (steps is not None and steps < 1):
        raise InvalidInput(f"trust is {plain.trust}, steps {steps}.", "Trust lies in (0, 1], steps are 1 or more.", "")
    if len(names) > 1 and not crossfit:
        raise InvalidInput(f"{len(names)} granularities and no judge.", "Cross-fitting chooses one of them.", "Name one.")
    if crossfit and data.samples < 2:
        raise InvalidInput("One sequence cannot both decide and judge.", "Cross-fitting needs two.", "Give more text.")
    least = _least(plain, len(names) if crossfit else 0)
    if passes < least:
        raise InvalidInput(
            f"passes is {passes:g}.", f"One step of this kind needs {least:g} forward equivalents.", f"Use passes={least:g}."
        )


def _least(plain: _Plain, trials: int) -> float:
    """Forward equivalents of a single step: dense forward, start, last measurement; and the same on half the text."""
    return 1.0 + plain.price + APPLYING + trials * (plain.price + 2.5)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """Descents of one model and pruner."""

    model: nn.Module
    treatment: Treatment
    own: Mapping[str, Any]
    batch_size: int
    plain: _Plain
    parts: Parts
    progress: Progress | None

    def _descend(
        self, by: str, data: CalibrationSet, name: str, passes: float, steps: int, judge: Reference | None = None
    ) -> tuple[TrustRegion, Trajectory]:
        decisions = Decisions.by(self.model, by)
        settings = self.plain.settings(decisions, steps, passes, leap=judge is None)
        self.treatment.begin(self.model, data, batch_size=self.batch_size, **self.own)
        point = TrustRegion(
            self.model, data, decisions, self.treatment, self.own, batch_size=self.batch_size, draws=self.plain.draws
        )
        point.passes += self.treatment.price
        share = np.full(len(decisions), self.plain.sparsity)
        start = round_parameters(share, decisions.numel, settings.total, self.plain.cap)
        journal = Journal(self.parts, f"{name} {by}")
        try:
            path = descend(point, start, settings, judge=judge, journal=journal, progress=self.progress)
        except BaseException:
            point.restore()
            raise
        return point, path

    def choose(self, names: Sequence[str], data: CalibrationSet, passes: float, steps: int | None) -> Chosen:
        """Descend on one half of the text by every granularity, and judge on the other."""
        places = np.arange(data.samples)
        halves = [data.select(places[places % 2 == i].tolist()) for i in (0, 1)]
        judge = Reference(self.model, halves[1], self.batch_size)
        most = self._trial_steps(len(names), passes) if steps is None else steps
        tried: dict[str, list[float]] = {}
        spent = judged = 0.0
        for by in names:
            point, path = self._descend(by, halves[0], "half", 1.0 + (most + 1.0) * self.plain.price, most, judge)
            point.restore()
            tried[by] = [float(entry["held_out"]) for entry in path.log]
            spent, judged = spent + point.passes, judged + len(path.log)
        best = min(tried, key=lambda by: min(tried[by]))
        return Chosen(
            by=best, steps=int(np.argmin(tried[best])), held_out=min(tried[best]), tried=tried,
            passes=(spent * halves[0].samples + (1.0 + judged) * halves[1].samples) / data.samples,
        )  # fmt: skip

    def _trial_steps(self, trials: int, passes: float) -> int:
        """Steps of a trial such that as many are left for the whole text: a trial's step costs half, and half a judgement."""
        each = self.plain.price + trials * (self.plain.price + 1.0) / 2.0
        spare = passes - 1.0 - APPLYING - 0.5 - trials * (self.plain.price + 2.0) / 2.0
        return max(1, int(spare / each))

    def decide(
        self, by: str, data: CalibrationSet, passes: float, chosen: Chosen | None, steps: int | None
    ) -> tuple[TrustRegion, Trajectory, float]:
        """Descend on all of the text, and measure the plan as the pruner applies it."""
        left = passes - APPLYING - (chosen.passes if chosen else 0.0)
        most = chosen.steps if chosen else max(1, int((left - 1.0) / self.plain.price)) if steps is None else steps
        point, path = self._descend(by, data, "all", left, most)
        try:
            return point, path, self._land(point, path)
        finally:
            point.restore()

    @staticmethod
    def _land(point: TrustRegion, path: Trajectory) -> float:
        """Take the last step if the pruner itself finds it better; the divergence of the plan as it applies it."""
        if path.goal is None:
            return point.applied(path.counts[-1])
        measured, last = point.applied(path.goal), path.log[-1]
        if measured >= last["divergence"]:
            return point.applied(path.counts[-1])
        moved = float(np.abs(path.goal - path.counts[-1]).sum() / point.decisions.numel.sum())
        path.counts.append(path.goal)
        path.log.append(
            {"step": last["step"] + 1, "divergence": measured, "passes": point.passes, "length": 1.0, "moved": moved,
             "predicted": path.promise, "measured": measured - last["divergence"]}
        )  # fmt: skip
        return measured


def _plan(
    identity: Mapping[str, Any],
    point: TrustRegion,
    path: Trajectory,
    measured: float,
    chosen: Chosen | None,
    hyper: Mapping[str, Any],
) -> Plan:
    counts, last = path.counts[-1], path.log[-1]
    total, rows = int(counts.sum()), point.decisions.row_groups(counts)
    before = path.log[-2]["divergence"] if len(path.log) > 1 else last["divergence"]
    extra: dict[str, Any] = {
        "forward_passes": point.passes + (chosen.passes if chosen else 0.0),
        "predicted": before + last.get("predicted", 0.0),
        "measured": measured,
        "held_out": chosen.held_out if chosen else None,
        "path": path.log,
    }
    if chosen:
        extra["tried"] = dict(chosen.tried)
    if rows is not None:
        extra["rows"] = rows
    dropped = ("model", "data", "versions", "computation")
    return Plan(
        kind="sparsity", rule="directional", model=dict(identity), blocks=point.decisions.plan_blocks(counts),
        budget={"unit": "parameters", "limit": total, "spent": total},
        hyperparameters={k: v for k, v in hyper.items() if k not in dropped},
        certificate=path.solution.certificate() if path.solution is not None else {}, extra=extra,
    )  # fmt: skip
