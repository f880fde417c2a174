"""Smaller shapes by the program: find what can go, measure what it costs, plan, apply, recount."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..blocks import describe, layers, partition
from ..data.calibration import CalibrationSet
from ..errors import CoverageError, InvalidInput, UnknownStructure
from ..plan import Plan
from ..planning.shapes import KINDS, Part, amount, plan_shapes
from ..records import Block
from .attention import Attention, expressible, find_attention
from .depth import drop_layers, plan_depth
from .heads import cut_heads, follow_heads, unit_of
from .meter import Meter
from .mlp import Mlp, find_mlp
from .statistics import gram_of
from .walk import Walk, inference
from .width import cut_units, follow_width

Progress = Callable[[int, int], None]
Curve = tuple[list[int], list[float]]


def find_parts(
    model: nn.Module, *, kinds: Sequence[str] = KINDS, by: str = "auto", multiple: int = 8
) -> list[Part]:
    """The attention, MLP and other matrices of every layer, with the units that they can lose.

    Args:
        model: Any transformers model with one list of layers.
        kinds: Kinds that must be there.
        by: ``groups`` (key-value heads with their query heads), ``queries`` (one query head of every group) or ``auto``.
        multiple: Channels of one MLP unit; a remainder always stays.

    Returns:
        Parts in the order of the layers; matrices that cannot lose units are in ``<layer>.rest``.

    Raises:
        UnknownStructure: A layer lacks one of ``kinds`` in a layout that is known.
        InvalidInput: A multiple below 1, or an unknown unit.
    """
    if not isinstance(multiple, int) or multiple < 1:
        raise InvalidInput(f"multiple is {multiple}.", "It must be a whole number of at least 1.", "Use 8.")
    blocks = {b.name: b for b in partition(model)}
    parts = []
    for name, layer in layers(model):
        left = {m.name: m for m in blocks[name].modules}
        for kind, find in (("heads", find_attention), ("mlp", find_mlp)):
            try:
                where = find(layer, name)
            except UnknownStructure:
                if kind in kinds:
                    raise
                continue
            mine = [left.pop(n) for n in (*where.producers, where.consumer)]
            shape = _heads(where, mine[0].d_in, mine[-1].d_out, by) if kind == "heads" else _mlp(where, mine, multiple)
            parts.append(_part(f"{name}.{kind}", name, kind, Block(name=name, modules=tuple(mine)), **shape))
        if left:
            parts.append(_part(f"{name}.rest", name, "rest", Block(name=name, modules=tuple(left.values()))))
    return parts


def _part(name: str, layer: str, kind: str, block: Block, **shape: Any) -> Part:
    return Part(
        name=name, layer=layer, kind=kind, parameters=block.numel, flops=block.flops_per_token,
        modules=tuple(m.name for m in block.modules), **shape,
    )  # fmt: skip


def _heads(a: Attention, d_in: int, d_out: int, by: str) -> dict[str, Any]:
    by = unit_of(a, by)
    queries = a.per_group if by == "groups" else a.groups
    keys = 2 * d_in * a.head_dim if by == "groups" else 0
    return {
        "by": by, "units": a.groups if by == "groups" else a.per_group,
        "unit_parameters": (d_in + d_out) * queries * a.head_dim + keys,
        "unit_channels": queries * a.head_dim, "channels": a.heads * a.head_dim,
    }  # fmt: skip


def _mlp(mlp: Mlp, mine: Sequence[Any], multiple: int) -> dict[str, Any]:
    each = sum(m.d_in * mlp.stacked for m in mine[:-1]) + mine[-1].d_out
    return {"by": f"{multiple} channels", "units": mlp.width // multiple, "unit_parameters": each * multiple}


def shape_curves(
    model: nn.Module,
    data: CalibrationSet,
    parts: Sequence[Part],
    *,
    kinds: Sequence[str] = KINDS,
    max_removed: float = 0.75,
    points: int = 4,
    metric: str = "kl",
    damping: float = 0.01,
    batch_size: int = 8,
    measure_batches: int | None = None,
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
        metric: ``kl`` (mean KL divergence per token from the whole model's output, nats) or ``loss``.
        damping: Relative to the mean of the second moments' diagonal.
        batch_size: Sequences per forward.
        measure_batches: Measure on the first so many batches only.
        progress: Called with (layers done, layers).

    Returns:
        ``{part: (removed units, damage)}``, as :func:`layerbudget.planning.shapes.plan_shapes` takes it.
    """
    if points < 1:
        raise InvalidInput(f"points is {points}.", "At least one number of units is measured per part.", "Use 4.")
    out: dict[str, Curve] = {}
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        walk.capture()
        meter = Meter(walk, metric, measure_batches)
        for i, (name, layer) in enumerate(walk.layers):
            walk.position = i
            for part in (p for p in parts if p.layer == name and p.kind in kinds):
                tries = _tries(min(int(max_removed * part.units + 1e-9), part.units - 1), points)
                where = _where(layer, part)
                gram = gram_of(model, walk, where.consumer, _width(where)) if tries else None
                damage = []
                for units in tries:
                    with _restored(model, where):
                        _cut(model, part, where, gram, units, damping)
                        damage.append(meter.damage(i))
                out[part.name] = (tries, damage)
            walk.advance()
            if progress:
                progress(i + 1, len(walk))
        walk.close()
    return out


def _tries(top: int, points: int) -> list[int]:
    return sorted({round(top * (j + 1) / points) for j in range(points)} - {0}) if top > 0 else []


def _where(layer: nn.Module, part: Part) -> Attention | Mlp:
    return find_attention(layer, part.layer) if part.kind == "heads" else find_mlp(layer, part.layer)


def _width(where: Attention | Mlp) -> int:
    return where.heads * where.head_dim if isinstance(where, Attention) else where.width


def _cut(
    model: nn.Module, part: Part, where: Attention | Mlp, gram: torch.Tensor, units: int, damping: float
) -> Attention | Mlp:
    if isinstance(where, Attention):
        return cut_heads(model, where, gram, units, by=part.by, damping=damping)
    width = where.width - units * int(part.by.split()[0])
    cut_units(model, where, gram, width, damping)
    return dataclasses.replace(where, width=width)


@contextlib.contextmanager
def _restored(model: nn.Module, where: Attention | Mlp) -> Iterator[None]:
    """Put the parameters and sizes of one part back afterwards; parameters are replaced, never changed, so none is copied."""
    names = {*where.producers, where.consumer, *([where.owner] if isinstance(where, Attention) else [])}
    modules = [model.get_submodule(n) for n in sorted(names)]
    held = [({k: v for k, v in m.__dict__.items() if isinstance(v, int)}, dict(m._parameters)) for m in modules]
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
    context: int = 0,
    curves: Mapping[str, Curve] | None = None,
    points: int = 4,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Plan:
    """Decide heads, MLP widths and layers together: at least ``budget`` is saved at the least measured damage.

    Args:
        model: The model; left as it was.
        data: Calibration tokens.
        budget: What is to be saved: ``"25% flops"``, ``"100 MB"``, ``"2M params"`` (of the layers' matrices).
        kinds: ``heads``, ``mlp`` or both.
        by: Units of heads, see :func:`find_parts`.
        multiple: Channels of one MLP unit.
        max_removed: Largest share of the units of one part.
        depth: So many whole layers may go, chosen one after the other by :func:`layerbudget.pruning.depth.plan_depth`.
        even: The same number in all layers, so that a plain config can describe the model and the checkpoint can be saved.
        context: Mean number of tokens attended to, where attention scores shall count in the FLOPs; 0 counts matrices only.
        curves: From :func:`shape_curves`, where they were measured before.
        points: See :func:`shape_curves`.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers) of each measurement.

    Returns:
        The plan, see :func:`layerbudget.planning.shapes.plan_shapes`; ``extra["curves"]`` holds what was measured.

    Raises:
        UnknownStructure: A layer without heads or MLP of a known layout; with ``even``: the config cannot express fewer heads.
        InfeasibleBudget: The caps do not allow it.
    """
    parts = find_parts(model, kinds=kinds, by=by, multiple=multiple)
    if context and not any(p.kind == "heads" for p in parts):
        find_attention(layers(model)[0][1], layers(model)[0][0])
    allowed = _allowed(model, parts, kinds) if even else None
    size = next(model.parameters()).element_size()
    gone = plan_depth(model, data, remove=depth, batch_size=batch_size).extra if depth else {"removed": [], "damage": []}
    order = [(n, float(found[n])) for n, found in zip(gone["removed"], gone["damage"], strict=True)]
    if curves is None:
        curves = shape_curves(
            model, data, parts, kinds=kinds, max_removed=max_removed, points=points, batch_size=batch_size, progress=progress
        )
    plan = plan_shapes(
        parts, curves, budget=budget, kinds=kinds, max_removed=max_removed, order=order, even=even, allowed=allowed,
        context=context, bytes_per_parameter=float(size), model=describe(model),
    )  # fmt: skip
    measured = {n: {"units": list(x), "damage": list(y)} for n, (x, y) in curves.items()}
    hyper = {**plan.hyperparameters, "by": by, "multiple": multiple, "depth": depth}
    return dataclasses.replace(plan, hyperparameters=hyper, extra={**plan.extra, "curves": measured, "order": order})


def _allowed(model: nn.Module, parts: Sequence[Part], kinds: Sequence[str]) -> dict[str, Collection[int]]:
    """Numbers of head units that a plain config can describe.

    Raises:
        UnknownStructure: Heads alone are to go and no number of them can be described.
    """
    first = next((p for p in parts if p.kind == "heads"), None)
    if first is None or "heads" not in kinds:
        return {}
    a = _where(layers(model)[0][1], first)
    fits, why = set[int](), None
    for units in range(1, first.units):
        gone = units * (a.per_group if first.by == "groups" else a.groups)
        groups = a.groups - units if first.by == "groups" else a.groups
        reason = expressible(model, dataclasses.replace(a, heads=a.heads - gone, groups=groups))
        why = why or reason
        if reason is None:
            fits.add(units)
    if not fits and "mlp" not in kinds:
        raise UnknownStructure(
            f"No smaller number of heads can be written into a plain config: {why or 'there is one unit only'}.",
            "even=True plans what an ordinary checkpoint can hold.",
            "Remove MLP units or blocks instead, or plan without even and use the model in memory.",
        )
    return {"heads": fits}


def apply_structured(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet,
    *,
    damping: float = 0.01,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Remove what a plan says, in place, layer after layer with the pruned inputs, and recount.

    Args:
        model: The model that the plan was made for.
        plan: From :func:`plan_structured`.
        data: Calibration tokens: which units go, and the refit.
        damping: Relative to the mean of the second moments' diagonal.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Returns:
        ``{unit, before, after, saved, planned, parameters, layers: {name: {heads, groups, width}}}``, recounted on the result.

    Raises:
        InvalidInput: Not a plan of smaller shapes.
        ModelMismatch: The plan belongs to another model.
        CoverageError: The recount differs from the plan.
    """
    shapes = plan.extra.get("shapes")
    if not shapes:
        raise InvalidInput(
            f"A plan of rule {plan.rule!r} holds no shapes.", "Shapes are planned by plan_structured.", "Use prune or apply_depth."
        )
    plan.validate(describe(model))
    hyper = plan.hyperparameters
    parts = {p.name: p for p in find_parts(model, kinds=(), by=hyper["by"], multiple=hyper["multiple"])}
    wrong = [n for n, s in shapes.items() if n not in parts or parts[n].units != s["units"] or parts[n].by != s["by"]]
    if wrong:
        raise CoverageError(f"The model has no {wrong[0]} as planned.", "", "Plan again for this model.")
    before = _recount(model, plan)
    left = [n for n, _ in layers(model) if n not in plan.extra["dropped"]]
    if plan.extra["dropped"]:
        drop_layers(model, plan.extra["dropped"])
    now = dict(zip((n for n, _ in layers(model)), left, strict=True))
    jobs = {p.name: int(shapes[p.name]["removed"]) for p in parts.values() if p.name in shapes}
    _apply(model, data, parts, jobs, now, damping, batch_size, progress)
    after = _recount(model, plan)
    saved = {k: before[k] - after[k] for k in ("amount", "parameters")}
    planned = {"amount": float(plan.budget["spent"]), "parameters": int(plan.counts.sum())}
    if saved != planned:
        raise CoverageError(
            f"{saved['amount']:g} {plan.budget['unit']} and {saved['parameters']} parameters went; "
            f"{planned['amount']:g} and {planned['parameters']} were planned.", "", "Report this.",
        )  # fmt: skip
    return {
        "unit": plan.budget["unit"], "before": before["amount"], "after": after["amount"], "saved": saved["amount"],
        "planned": planned["amount"], "parameters": {"before": before["parameters"], "after": after["parameters"]},
        "layers": {now[n]: _sizes(layer, n) for n, layer in layers(model)}, "dropped": list(plan.extra["dropped"]),
    }  # fmt: skip


def _apply(
    model: nn.Module,
    data: CalibrationSet,
    parts: Mapping[str, Part],
    jobs: Mapping[str, int],
    now: Mapping[str, str],
    damping: float,
    batch_size: int,
    progress: Progress | None,
) -> None:
    widths = _widths(model)
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        walk.capture()
        for i, (name, layer) in enumerate(walk.layers):
            walk.position = i
            for kind in KINDS:
                part = parts.get(f"{now[name]}.{kind}")
                if part is not None and jobs.get(part.name):
                    where = _where(layer, dataclasses.replace(part, layer=name))
                    gram = gram_of(model, walk, where.consumer, _width(where))
                    _cut(model, part, where, gram, jobs[part.name], damping)
            walk.advance()
            if progress:
                progress(i + 1, len(walk))
        walk.close()
    touched = {parts[n].kind for n, units in jobs.items() if units}
    if "heads" in touched:
        follow_heads(model, [find_attention(layer, n) for n, layer in layers(model)])
    if "mlp" in touched:
        follow_width(model, widths, _widths(model))


def _widths(model: nn.Module) -> list[int]:
    with contextlib.suppress(UnknownStructure):
        return [find_mlp(layer, n).width for n, layer in layers(model)]
    return []


def _recount(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """What the layers of a model amount to, from its matrices as they are."""
    hyper = plan.hyperparameters
    options = {"context": hyper["context"], "bytes_per_parameter": hyper["bytes_per_parameter"]}
    parts = find_parts(model, kinds=(), by="auto", multiple=1)
    total = sum(amount(p, plan.budget["unit"], **options)[1] for p in parts)
    return {"amount": total, "parameters": sum(p.parameters for p in parts)}


def _sizes(layer: nn.Module, name: str) -> dict[str, int]:
    out: dict[str, int] = {}
    with contextlib.suppress(UnknownStructure):
        a = find_attention(layer, name)
        out |= {"heads": a.heads, "groups": a.groups}
    with contextlib.suppress(UnknownStructure):
        out |= {"width": find_mlp(layer, name).width}
    return out
