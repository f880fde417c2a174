r"""Plans of sparsity by directional damage: predict along the pruner's own change, solve exactly, go there, look again.

From the plan that gives every unit the same sparsity, the trust-region loop (:func:`layerbudget.solvers.steps.descend`) goes
down the measured divergence. At every point the damage of all units at levels within reach is predicted to first order
(:mod:`layerbudget.sensitivity.directional.terms`); proposed are the best plan within reach, by an exact program, then half and
a quarter of the way to it. The last step is measured by the pruner itself, and taken where that is better.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import find_treatment
from ...compressors.treating import InputStats
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.inputs import InputMoments, check_experts
from ...execution.processes import broadcast, is_main
from ...models.blocks import check_finite, describe
from ...models.machine import computation, versions
from ...plan import Plan
from ...progress import Progress, Steps, say
from ...records import check_fraction
from ...solvers import steps as loop
from ...solvers.rounding import round_parameters
from ...solvers.separable import Solution
from ...storage.parts import Parts
from .payload import SparsityPayload
from .treated import Point, TreatedModel, Units

PASSES = 24.0
PRICE, APPLYING = 3.0, 2.0  # forward equivalents of a step, and of a plan treated by the pruner itself
LENGTHS, LEAST_TRUST = (1.0, 0.5, 0.25), 0.01
NESTED_LEVELS, WRITTEN_LEVELS = 17, 7
KEPT = 400  # blocks; of larger plans the steps are kept without their values


def plan_by_damage(
    model: nn.Module,
    data: CalibrationSet,
    *,
    sparsity: float = 0.5,
    max_sparsity: float = 0.95,
    by: str = "linear",
    method: str = "wanda",
    passes: float = PASSES,
    trust: float = 0.06,
    batch_size: int = 8,
    resume: Path | str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Plan:
    """Return a plan of the sparsity of every layer, matrix or group of rows, by directional damage.

    Args:
        model: The dense model; left as it was.
        data: Calibration tokens.
        sparsity: Target.
        max_sparsity: Cap of one unit.
        by: ``layer``, ``linear``, ``rows:G``, or a regular expression.
        method: The pruner.
        passes: Most forward equivalents of the text (forward 1, backward 2) that may be spent, the last measurement included;
            two more are where the last step is measured by the pruner itself and refused.
        trust: Largest change of one unit's sparsity in the first step.
        batch_size: Sequences per forward.
        resume: Folder that keeps finished steps; an interrupted run continues from it.
        progress: Called with (steps done, most steps).
        **options: Options of the method.

    Its payload has the ``path``, ``forward_passes``, ``predicted`` and ``measured`` damage in nats per token (by the pruner
    itself).
    """
    check_fraction(sparsity, "sparsity")
    if check_fraction(max_sparsity, "max_sparsity") < sparsity:
        what = f"sparsity is {sparsity:g}, and no matrix may lose more than max_sparsity, {max_sparsity:g}."
        raise InvalidInput(
            what, f"max_sparsity lies in [{sparsity:g}, 1] then.", f"Use max_sparsity={(1.0 + sparsity) / 2.0:g}."
        )
    if not 0 < trust <= 1:
        raise InvalidInput(f"trust is {trust}.", "It lies in (0, 1].", "Use trust=0.06.")
    least = 1.0 + PRICE + APPLYING  # dense forward, start, last measurement
    if passes < least:
        raise InvalidInput(f"passes is {passes:g}.", f"One step needs {least:g} forward equivalents.", f"Use passes={least:g}.")
    check_finite(model)
    identity, treatment = describe(model), find_treatment(method).with_options(options)
    settings = {"method": method, "own": options, "passes": passes, "batch_size": batch_size, "max_sparsity": max_sparsity}
    settings |= {"sparsity": sparsity, "trust": trust, "by": by}
    request = {**settings, "model": identity["digest"], "data": data.digest}
    request |= {"versions": versions(), "computation": computation(model)}
    parts = Parts(resume if is_main() else None, request)
    units = Units.by(model, by)
    if treatment.statistic != "none":
        check_experts(model, [m.name for m in units.modules])
    tick = Steps(progress, max(1, int((passes - APPLYING - 1.0) / PRICE)))
    treated = TreatedModel(model, data, units, treatment, batch_size=batch_size)
    try:
        path = _descend(treated, sparsity, max_sparsity, trust, passes - APPLYING, parts, tick)
        measured = _last_step(treated, path)
    finally:
        treated.restore()
    return _plan(identity, treated, path, settings, measured)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Path:
    """Where a descent went, and what the model at the last point wants."""

    counts: list[np.ndarray]  # accepted plans
    log: list[dict[str, Any]]  # a record of each
    solution: Solution | None = None
    goal: np.ndarray | None = None  # the plan that it wants, not visited; None where it wants nothing
    promise: float = 0.0  # what that would change, by the model


def _descend(
    treated: TreatedModel, sparsity: float, cap: float, radius: float, passes: float, parts: Parts, tick: Steps
) -> _Path:
    """A descent until nothing is gained or the passes are spent. Its last step is left to the caller, who measures it."""
    numel = treated.units.numel
    total = round(sparsity * int(numel.sum()))
    levels = NESTED_LEVELS if treated.treatment.nested else WRITTEN_LEVELS

    def levels_at(counts: np.ndarray, trust: float) -> np.ndarray:
        return loop.reach(counts / numel, trust, cap, levels)

    def evaluate(point: Point, proposal: loop.Proposal) -> Point:
        return treated.evaluate(proposal.state, point.moments, levels_at(proposal.state, proposal.trust))

    def proposals(point: Point, trust: float) -> Iterator[loop.Proposal]:
        """Steps of several lengths from a point towards its program's plan."""
        around = levels_at(point.counts, trust)
        damage = loop.curves_at(point.levels, point.first, around)
        goal, path.solution = loop.step_within(around, damage, numel, total)
        if (goal == point.counts).all() or loop.damage_at(around, damage, goal / numel) >= 0:
            return
        for length in LENGTHS:
            way = ((1 - length) * point.counts + length * goal) / numel
            counts = goal if length == 1.0 else round_parameters(way, numel, total)
            promise = loop.damage_at(around, damage, counts / numel)
            yield loop.Proposal(state=counts, promise=promise, trust=trust * length, length=length)

    def affords() -> bool:
        return len(path.log) < tick.total and treated.passes + PRICE <= passes

    def record(point: Point, **more: Any) -> None:
        path.counts.append(point.counts)
        path.log.append({"step": len(path.log), "divergence": point.divergence, "passes": treated.passes, **more})
        _keep(parts, path, point, trust)

    stored = broadcast(lambda: _kept(parts, treated.treatment.statistic))
    path, statistics, trust = stored or (_Path(counts=[], log=[]), treated.dense, radius)
    start = path.counts[-1] if stored else round_parameters(np.full(len(numel), sparsity), numel, total, cap)
    reached = path.log[-1].get("trust", radius) if stored else radius
    point = treated.evaluate(start, statistics, levels_at(start, reached))
    if stored:
        treated.passes = path.log[-1]["passes"]
    else:
        record(point)
    for step in loop.descend(point, trust, proposals, evaluate, affords, least=LEAST_TRUST):
        moved = float(np.abs(step.point.counts - point.counts).sum() / numel.sum())
        point, trust, done = step.point, step.trust, step.proposal
        record(point, length=done.length, trust=done.trust, moved=moved, predicted=done.promise, measured=step.change)
        say(tick.progress, f"damage {point.divergence:.3g}")
        tick(len(path.log) - 1 - tick.done)
    last = next(proposals(point, trust), None)
    if last is not None:
        path.goal, path.promise = last.state, last.promise
    return path


def _keep(parts: Parts, path: _Path, point: Point, trust: float) -> None:
    """Keep the accepted steps, and the statistics with which the last one was treated, in the place of those before."""
    if parts.folder is None:
        return
    from safetensors.torch import save_file

    tensors = {f"counts.{i}": torch.from_numpy(np.ascontiguousarray(c)) for i, c in enumerate(path.counts)}
    for matrix, moments in point.statistics.items():
        tensors |= {f"{i}@{matrix}": m.value.clone() for i, m in enumerate(moments) if m.value is not None}
    copies = {matrix: len(moments) for matrix, moments in point.statistics.items()}
    record = json.dumps({"log": path.log, "trust": trust, "copies": copies})
    step = len(path.log) - 1
    parts.put(f"path-{step}", "safetensors", lambda file: save_file(tensors, file, {"record": record}))
    before = parts.find(f"path-{step - 1}")
    if before is not None:
        before.unlink()


def _kept(parts: Parts, statistic: str) -> tuple[_Path, InputStats, float] | None:
    """The path, the statistics of its last point, and the trust there; None where no whole part is left."""
    steps = sorted((int(name.removeprefix("path-")) for name in parts.names()), reverse=True)
    file = next((f for f in (parts.find(f"path-{step}") for step in steps) if f is not None), None)
    if file is None:
        return None
    from safetensors import safe_open

    with safe_open(file, framework="pt") as f:
        record, tensors = json.loads(f.metadata()["record"]), {key: f.get_tensor(key) for key in f.keys()}
    path = _Path(counts=[tensors[f"counts.{i}"].numpy() for i in range(len(record["log"]))], log=record["log"])
    statistics = {
        matrix: [InputMoments(statistic, value=tensors.get(f"{i}@{matrix}")) for i in range(copies)]
        for matrix, copies in record["copies"].items()
    }
    return path, statistics, record["trust"]


def _last_step(treated: TreatedModel, path: _Path) -> float:
    """Take the last step if the pruner itself finds it better; the divergence of the plan as it applies it."""
    if path.goal is None:
        return treated.apply(path.counts[-1])
    measured, last = treated.apply(path.goal), path.log[-1]
    if measured >= last["divergence"]:
        return treated.apply(path.counts[-1])
    moved = float(np.abs(path.goal - path.counts[-1]).sum() / treated.units.numel.sum())
    entry = {"step": last["step"] + 1, "divergence": measured, "passes": treated.passes, "length": 1.0, "moved": moved}
    path.counts.append(path.goal)
    path.log.append({**entry, "predicted": path.promise, "measured": measured - last["divergence"]})
    return measured


def _plan(identity: dict[str, Any], treated: TreatedModel, path: _Path, settings: Mapping[str, Any], measured: float) -> Plan:
    counts, log = path.counts[-1], path.log
    total, (blocks, rows) = int(counts.sum()), treated.units.planned(counts)
    predicted = log[max(len(log) - 2, 0)]["divergence"] + log[-1].get("predicted", 0.0)
    if rows is None and len(blocks) <= KEPT:
        steps = [[round(b.value, 4) for b in treated.units.planned(c)[0]] for c in path.counts]
        log = [{**entry, "values": values} for entry, values in zip(log, steps, strict=True)]
    damages = {"predicted": predicted, "measured": measured}
    return Plan(
        kind="sparsity",
        rule="directional",
        model=identity,
        blocks=blocks,
        hyperparameters=dict(settings),
        budget={"unit": "parameters", "limit": total, "spent": total},
        certificate=path.solution.certificate() if path.solution is not None else {},
        payload=SparsityPayload(forward_passes=treated.passes, path=log, rows=rows, **damages),
    )
