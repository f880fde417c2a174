"""Smaller shapes by the program: measure what removing heads and MLP units costs, and plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import InfeasibleBudget, InvalidInput
from ...execution.divergence import Meter
from ...execution.inputs import gram_of
from ...execution.modes import inference
from ...execution.processes import shard
from ...execution.walk import Walk
from ...models.blocks import describe, layers
from ...plan import Plan
from ...progress import Progress, Steps, say
from ...records import to_jsonable
from .attention import Attention, find_attention
from .compensation import ways_of
from .depth import plan_depth
from .head_units import allowed_units, head_units
from .measured import Keep, measurements
from .mlp import Mlp
from .parts import KINDS, Part
from .program import shape_plans
from .removable import cut, find_parts, inner_width, where_is
from .shrink import measure_plan

_NEAR = 2.0  # plans whose predicted damage is beyond this multiple of the least are not measured
Curve = tuple[list[int], list[float]]


def shape_curves(
    model: nn.Module,
    data: CalibrationSet,
    parts: Sequence[Part],
    *,
    kinds: Sequence[str] = KINDS,
    max_removed: float = 0.75,
    points: int = 4,
    held_out: CalibrationSet | None = None,
    metric: str = "kl",
    damping: float = 0.01,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, Curve]:
    """Measure what removing units of one part costs, all other parts being whole; the model is left as it was.

    Units are chosen and the matrix behind them is refitted as :func:`apply_structured` does it.

    Args:
        model: The model.
        data: Calibration tokens.
        parts: From :func:`find_parts`.
        kinds: Kinds to measure.
        max_removed: Largest share of the units.
        points: Numbers of units to try per part (all of them, where there are fewer).
        held_out: Tokens on which damage is measured; those of ``data`` by default. A refit looks better on the tokens that it
            was made from than it is: with few of them this decides which parts seem cheap.
        metric: ``kl`` (mean KL divergence per token from the whole model's output, nats) or ``loss``.
        damping: Relative to the mean of the second moments' diagonal.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Returns:
        ``{part: (removed units, damage)}``, as :func:`layerbudget.decisions.shapes.program.plan_shapes` takes it.
    """
    if points < 1:
        raise InvalidInput(f"points is {points}.", "At least one number of units is measured per part.", "Use 4.")
    out: dict[str, Curve] = {}
    with inference(model):
        walk = Walk(model, shard(data), batch_size=batch_size)
        walk.capture()
        test = walk if held_out is None else Walk(model, shard(held_out), batch_size=batch_size)
        walks = [walk] if test is walk else [walk, test]
        if test is not walk:
            test.capture()
        meter = Meter(test, metric)
        tick = Steps(progress, len(walk))
        for i, (name, layer) in enumerate(walk.layers):
            walk.position = i
            for part in (p for p in parts if p.layer == name and p.kind in kinds):
                tries = _tries(min(int(max_removed * part.units + 1e-9), part.units - 1), points)
                where = where_is(layer, part)
                if not tries:
                    out[part.name] = ([], [])
                    continue
                gram = gram_of(model, walk, where.consumer, inner_width(where))
                damage = []
                for units in tries:
                    with _restored(model, where):
                        cut(model, part, where, gram, units, damping)
                        damage.append(meter.damage(i))
                out[part.name] = (tries, damage)
            for each in walks:
                each.position = i
                each.advance()
            tick()
        for each in walks:
            each.close()
    return out


def _tries(top: int, points: int) -> list[int]:
    return sorted({round(top * (j + 1) / points) for j in range(points)} - {0}) if top > 0 else []


@contextlib.contextmanager
def _restored(model: nn.Module, where: Attention | Mlp) -> Iterator[None]:
    """Put the parameters and sizes of one part back afterwards; parameters are replaced, never changed, so none is copied."""
    names = {*where.producers, where.consumer, *([where.owner] if isinstance(where, Attention) else [])}
    modules = [model.get_submodule(n) for n in sorted(names)]
    held = [
        ({k: v for k, v in m.__dict__.items() if isinstance(v, int) or k == "config"}, dict(m._parameters)) for m in modules
    ]
    try:
        yield
    finally:
        for module, (sizes, parameters) in zip(modules, held, strict=True):
            module.__dict__.update(sizes)
            module._parameters.update(parameters)


def plan_structured(
    model: nn.Module,
    data: CalibrationSet,
    budget: str | float,
    *,
    kinds: Sequence[str] = KINDS,
    by: str = "auto",
    multiple: int = 8,
    max_removed: float = 0.75,
    depth: int = 0,
    even: bool = False,
    compensate: str = "auto",
    context: int = 0,
    curves: Mapping[str, Curve] | None = None,
    points: int = 4,
    trials: int = 8,
    batch_size: int = 8,
    resume: Path | str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide heads, MLP widths and layers together: at least ``budget`` is saved at the least measured damage.

    Args:
        model: The model; left as it was.
        data: Calibration tokens; damage is measured on sequences that the refit has not seen, see :func:`folds_of`.
        budget: What is to be saved: ``"25% flops"``, ``"100 MB"``, ``"2M params"`` (of the layers' matrices).
        kinds: ``heads``, ``mlp`` or both.
        by: Units of heads, see :func:`find_parts`; ``auto`` measures both where both are possible and keeps
            the better plan. Only ``groups`` make the key-value cache smaller.
        multiple: Channels of one MLP unit.
        max_removed: Largest share of the units of one part.
        depth: So many whole layers may go, chosen one after the other by :func:`layerbudget.decisions.shapes.depth.plan_depth`.
        even: The same number in all layers, so that a plain config can describe the model and the checkpoint can be saved.
        compensate: What the matrices behind become: ``none``, ``refit``, ``stream``, or ``auto``; see
            :mod:`layerbudget.decisions.shapes.compensation`. Single parts are always measured refitted.
        context: Mean number of tokens attended to, where attention scores shall count in the FLOPs; 0 counts matrices only.
        curves: From :func:`shape_curves`, where they were measured before (for the same ``by`` and ``multiple``).
        points: See :func:`shape_curves`.
        trials: Damages of single parts do not add up. Where there are several plans (units of heads, numbers of dropped
            layers, numbers of heads with ``even``), so many of the best predicted ones are applied and measured as a whole,
            none beyond twice the least prediction.
        batch_size: Sequences per forward.
        resume: Folder that keeps finished measurements; an interrupted run continues from it.
        progress: Called with (layers done, layers) of each measurement.

    Returns:
        The plan, see :func:`layerbudget.decisions.shapes.program.shape_plans`; ``extra["curves"]`` holds what was measured,
        ``extra["measured"]`` the KL divergence per token of the plan as a whole (null where there was no choice), and
        ``extra["candidates"]`` all of them.

    Raises:
        UnknownStructure: A layer without heads or MLP of a known layout; with ``even``: the config cannot express fewer heads.
        InfeasibleBudget: The caps do not allow it.
    """
    words = head_units(model, kinds, by, curves, even)
    sets = {word: find_parts(model, kinds=kinds, by=word, multiple=multiple, even=even) for word in words}
    may = {word: allowed_units(model, parts, kinds, depth) if even else None for word, parts in sets.items()}
    if context:
        find_attention(layers(model)[0][1], layers(model)[0][0])
    way = ways_of(model, data, compensate)
    told = {"kinds": list(kinds), "by": by, "max_removed": max_removed, "points": points, "batch_size": batch_size}
    keep = measurements(model, data, resume, {**told, "multiple": multiple, "depth": depth, "compensate": way})
    options: dict[str, Any] = {
        "budget": budget, "kinds": kinds, "max_removed": max_removed, "even": even, "context": context,
        "model": describe(model), "order": _order(model, data, depth, batch_size, keep),
        "bytes_per_parameter": float(next(model.parameters()).element_size()),
    }  # fmt: skip
    hyper = {"multiple": multiple, "depth": depth, "compensate": way}
    plans, refused, held = [], [], dict(curves or {})
    for word, parts in sets.items():
        if curves is None:
            say(progress, f"heads by {word}" if "heads" in kinds else "")
            left = [p for p in parts if p.kind == "heads" or p.name not in held]
            held |= crossed_curves(
                model, data, left, kinds=kinds, max_removed=max_removed, points=points, batch_size=batch_size,
                progress=progress, keep=partial(_under, keep, word),
            )  # fmt: skip
        try:
            found = shape_plans(parts, held, allowed=may[word], **options)
        except InfeasibleBudget as error:
            refused.append(error)
            continue
        plans += _recorded(found, held, options["order"], {"by": word, **hyper})
    if not plans:
        raise refused[0]
    say(progress, "plans as a whole")
    return _best(model, data, plans, trials, batch_size, keep)


def _order(model: nn.Module, data: CalibrationSet, depth: int, batch_size: int, keep: Keep) -> list[tuple[str, float]]:
    """Layers that may go as a whole, the first one first, each with its damage on top of those before it."""
    if not depth:
        return []
    gone = keep("depth", lambda: dict(plan_depth(model, data, remove=depth, batch_size=batch_size).extra))
    return [(n, float(found[n])) for n, found in zip(gone["removed"], gone["damage"], strict=True)]


def _under(keep: Keep, word: str, name: str, make: Callable[[], Any]) -> Any:
    return keep(f"{word}-{name}", make)


def _recorded(
    plans: Sequence[Plan], curves: Mapping[str, Curve], order: Sequence[tuple[str, float]], hyper: Mapping[str, Any]
) -> list[Plan]:
    """The same plans with what they rest on."""
    measured = {n: {"units": list(x), "damage": list(y)} for n, (x, y) in curves.items()}
    extra = to_jsonable({"curves": measured, "order": order})
    return [dataclasses.replace(p, hyperparameters={**p.hyperparameters, **hyper}, extra={**p.extra, **extra}) for p in plans]


def folds_of(data: CalibrationSet, folds: int = 4) -> list[tuple[CalibrationSet, CalibrationSet]]:
    """Pairs of sequences to refit with and to measure on: every sequence is measured on once, by a refit that has not seen it.

    With fewer sequences than folds all of them serve both purposes.
    """
    if data.samples < folds:
        return [(data, data)]
    groups = [list(range(k, data.samples, folds)) for k in range(folds)]
    return [(data.select([i for i in range(data.samples) if i not in set(g)]), data.select(g)) for g in groups]


def crossed_curves(
    model: nn.Module, data: CalibrationSet, parts: Sequence[Part], *, progress: Progress | None = None,
    keep: Keep = lambda name, make: make(), **options: Any,
) -> dict[str, Curve]:  # fmt: skip
    """:func:`shape_curves`, every sequence measured on by a refit that has not seen it; the mean over :func:`folds_of`."""
    folds = folds_of(data)
    found, total = [], len(layers(model))
    for k, (fit, test) in enumerate(folds):
        tell = (lambda done, _, k=k: progress(k * total + done, len(folds) * total)) if progress else None
        measure = partial(shape_curves, model, fit, parts, held_out=test, progress=tell, **options)
        found.append(keep(f"fold-{k}", measure))
    share = [test.samples / data.samples for _, test in folds]
    return {
        name: (units, [sum(w * f[name][1][i] for w, f in zip(share, found, strict=True)) for i in range(len(units))])
        for name, (units, _) in found[0].items()
    }


def _best(model: nn.Module, data: CalibrationSet, plans: list[Plan], trials: int, batch_size: int, keep: Keep) -> Plan:
    """The plan with the least damage as a whole, among the ones with the least predicted damage."""
    plans = sorted({(*p.counts.tolist(), *p.extra["dropped"]): p for p in plans}.values(), key=lambda p: p.extra["predicted"])
    near = [p for p in plans if p.extra["predicted"] <= _NEAR * plans[0].extra["predicted"]]
    tried = near[:trials] if len(near) > 1 and trials > 1 else []
    measured = [
        sum(
            keep(f"trial-{p.digest}-{k}", partial(measure_plan, model, p, fit, held_out=test, batch_size=batch_size))
            * test.samples
            / data.samples
            for k, (fit, test) in enumerate(folds_of(data))
        )
        for p in tried
    ]
    best = min(range(len(tried)), key=measured.__getitem__, default=0)
    candidates = [
        {"by": p.hyperparameters["by"], "dropped": len(p.extra["dropped"]), "predicted": p.extra["predicted"],
         "measured": measured[i] if i < len(measured) else None}
        for i, p in enumerate(plans)
    ]  # fmt: skip
    found = {"measured": measured[best] if measured else None, "candidates": candidates}
    return dataclasses.replace(plans[best], extra={**plans[best].extra, **found})
