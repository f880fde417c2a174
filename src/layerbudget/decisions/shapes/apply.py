"""Take units and layers out of a model, layer after layer with the inputs that the smaller model gives, and recount."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ...arguments import checked
from ...data.calibration import CalibrationSet
from ...decision import check_kind
from ...errors import CoverageError, InfeasibleBudget, InvalidInput, UnknownBlock, UnknownStructure
from ...execution.divergence import Reference
from ...execution.inputs import gram_of
from ...execution.modes import inference
from ...execution.processes import shard
from ...execution.walk import Walk
from ...models.blocks import config_of, configs_of, describe, layers, text_config
from ...plan import Plan, payload_of
from ...progress import Progress, Steps
from ...records import Receipt
from .compensation import Stream
from .layouts import FIND, Attention
from .payload import ShapesPayload
from .program import DAMPING, KINDS, PrunablePart
from .save import follow, shorten
from .units import Remake, cut, find_parts, refitted, where_is


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeReceipt(Receipt):
    """Recount of a model that became smaller."""

    unit: str  # of the next four
    before: float
    after: float
    saved: float
    planned: float
    parameters: Mapping[str, int]  # before, after
    layers: Mapping[str, Mapping[str, int]]  # {name: {heads, groups, width}}
    dropped: Sequence[str]


@checked
def apply_shapes(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> ShapeReceipt:
    """Remove what a plan says, in place, layer after layer with the pruned inputs, and recount.

    Args:
        model: The model that the plan was made for.
        plan: From :func:`layerbudget.decisions.shapes.plan.plan_shapes`.
        data: Calibration tokens: which units go, and the refit, with the damping of the plan.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Raises:
        InvalidInput: Not a plan of smaller shapes.
        ModelMismatch: The plan belongs to another model.
        CoverageError: The recount differs from the plan.
    """
    check_kind(plan.kind, ("shapes",), "holds no shapes")
    identity, payload, hyper = describe(model), payload_of(plan, ShapesPayload), plan.hyperparameters
    plan.validate(identity)
    shapes, dropped = payload.shapes, list(payload.dropped)
    parts = {p.name: p for p in find_parts(model, kinds=(), by=hyper["by"], multiple=hyper["multiple"])}
    wrong = [n for n, s in shapes.items() if n not in parts or (parts[n].units, parts[n].by) != (s.units, s.by)]
    wrong += [n for n, s in shapes.items() if s.removed > max(s.units - (s.layer not in dropped), 0)]
    if wrong:
        raise CoverageError(f"The model has no {wrong[0]} as planned.", "", "Plan again for this model.")
    unit, width, prices = plan.budget["unit"], hyper["bytes_per_parameter"], payload.prices
    names = [n for n, _ in layers(model) if n not in dropped]
    before = _amount(model, unit, width, prices)
    jobs = {parts[n]: s.removed for n, s in shapes.items() if s.layer not in dropped}
    way: dict[str, Any] = {"damping": hyper.get("damping", DAMPING), "batch_size": batch_size, "progress": progress}
    _cut_layers(model, data, jobs, dropped, compensate=hyper["compensate"], **way)
    after = _amount(model, unit, width, prices)
    saved, planned = (before[0] - after[0], before[1] - after[1]), (float(plan.budget["spent"]), int(plan.counts.sum()))
    if saved != planned:
        raise CoverageError(
            f"{saved[0]:g} {unit} and {saved[1]} parameters went; {planned[0]:g} and {planned[1]} were planned.",
            "",
            "Report this.",
        )
    return ShapeReceipt(
        plan_digest=plan.digest,
        identity=identity,
        model=model,
        unit=unit,
        before=before[0],
        after=after[0],
        saved=saved[0],
        planned=planned[0],
        parameters={"before": before[1], "after": after[1]},
        layers={n: _sizes(layer, now) for n, (now, layer) in zip(names, layers(model), strict=True)},
        dropped=dropped,
    )


@checked
def remove_units(
    model: nn.Module,
    data: CalibrationSet,
    fraction: float | Mapping[str, float],
    *,
    kind: str = "heads",
    by: str = "auto",
    multiple: int = 8,
    damping: float = DAMPING,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Remove the same share of the heads, or of the MLP, from every layer, in place; what reads them is refitted.

    Args:
        model: The model.
        data: Calibration tokens.
        fraction: Share that goes at most, for all layers or per layer name.
        kind: ``heads`` (rounded down to whole units) or ``mlp`` (widths are rounded up).
        by: ``groups`` (key-value heads with their query heads), ``queries`` (query heads, equally many per group) or ``auto``.
        multiple: Widths are multiples of this.
        damping: Relative to the mean of H's diagonal.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Returns:
        ``{layer: query heads, or width, that are left}``. The config follows when all layers have equally many and it can say
        so.

    Raises:
        UnknownStructure: A layer whose units cannot be taken out.
        UnknownBlock: A fraction for a layer that the model does not have.
        InvalidInput: A fraction outside [0, 1), or an unknown kind or unit.
    """
    if kind not in KINDS:
        raise InvalidInput(f"There is nothing of kind {kind!r} to remove.", f"Kinds are {', '.join(KINDS)}.", "Use heads.")
    parts = {p.layer: p for p in find_parts(model, kinds=(kind,), by=by, multiple=1) if p.kind == kind}
    unknown = [name for name in fraction if name not in parts] if isinstance(fraction, Mapping) else []
    if unknown:
        raise UnknownBlock(f"There is no layer {unknown[0]!r}.", f"Layers are {', '.join(list(parts)[:3])}, ...", "Correct it.")
    shares = {n: fraction.get(n, 0.0) if isinstance(fraction, Mapping) else fraction for n in parts}
    jobs = {part: _going(part, shares[n], multiple) for n, part in parts.items()}
    way: dict[str, Any] = {"damping": damping, "batch_size": batch_size, "progress": progress}
    _cut_layers(model, data, jobs, [], compensate="refit", **way)
    return {n: FIND[kind](layer, n).shape[0] for n, layer in layers(model)}


def _going(part: PrunablePart, fraction: float, multiple: int) -> int:
    if not (isinstance(fraction, numbers.Real) and math.isfinite(fraction) and 0 <= fraction < 1):
        raise InvalidInput(f"The fraction is {fraction}.", "It must lie in [0, 1).", "Give 0.25, for example.")
    if part.kind == "heads":
        return min(math.floor(part.units * fraction + 1e-9), part.units - 1)
    return part.units - min(part.units, max(multiple, multiple * math.ceil(part.units * (1 - fraction) / multiple - 1e-9)))


def _cut_layers(
    model: nn.Module,
    data: CalibrationSet,
    jobs: Mapping[PrunablePart, int],
    dropped: Sequence[str],
    *,
    compensate: str,
    damping: float,
    batch_size: int,
    progress: Progress | None = None,
) -> None:
    """Take units out of parts, drop layers, and let the config follow."""
    touched = [kind for kind in KINDS if any(p.kind == kind and units for p, units in jobs.items())]
    before = {kind: [FIND[kind](layer, n) for n, layer in layers(model) if n not in dropped] for kind in touched}
    with inference(model):
        walk = Walk(model, shard(data), batch_size=batch_size)
        tick = Steps(progress, len(walk))
        walk.capture()
        stream = Stream(walk) if compensate == "stream" else None
        for i, (name, _) in enumerate(walk.layers):
            walk.position = i
            if stream:
                stream.look()
            for part in (p for kind in KINDS for p in jobs if (p.layer, p.kind) == (name, kind) and jobs[p]):
                where = where_is(model, part)
                remake: Remake = refitted
                if stream:
                    aim = stream.aim(where)
                    gram, remake = aim.total.gram, aim.remake(model.get_submodule(where.consumer), damping)
                else:
                    gram = gram_of(model, walk, where.consumer, where.inputs)
                cut(model, where, gram, jobs[part], part.by, damping, remake)
            if name not in dropped:
                walk.advance()
            tick()
        walk.close()
    if dropped:
        drop_layers(model, dropped)
    for kind in touched:
        follow(model, before[kind], [FIND[kind](layer, n) for n, layer in layers(model)])


def drop_layers(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Remove whole layers, by name, and renumber the others, in place."""
    known = layers(model)
    wrong = [n for n in names if n not in {k for k, _ in known}]
    if wrong:
        raise UnknownBlock(f"The model has no layer {wrong[0]!r}.", f"Layers are {known[0][0]} to {known[-1][0]}.", "")
    kept = [(i, layer) for i, (name, layer) in enumerate(known) if name not in names]
    if not kept:
        raise InfeasibleBudget(f"All {len(known)} layers would go.", f"At most {len(known) - 1} can.", "Remove fewer.")
    parent, _, stack = known[0][0].rpartition(".")[0].rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, stack, nn.ModuleList(layer for _, layer in kept))
    for new, (_, layer) in enumerate(kept):
        modules: Iterator[Any] = layer.modules()
        for module in modules:
            for place in ("layer_idx", "layer_id"):
                if isinstance(getattr(module, place, None), int):
                    setattr(module, place, new)
    configs = [text_config(config_of(model)), *configs_of(owner)]  # those of towers for images stay
    for config in {id(c): c for c in configs if getattr(c, "num_hidden_layers", None) == len(known)}.values():
        shorten(config, [i for i, _ in kept], len(known))
    return model


def _amount(
    model: nn.Module, unit: str, bytes_per_parameter: float, prices: Mapping[str, int] | None = None
) -> tuple[float, int]:
    """Size of a model's layers, from its matrices as they are, and their parameters."""
    parts = find_parts(model, kinds=(), by="auto", multiple=1, prices=prices)
    return sum(p.size(unit, bytes_per_parameter) for p in parts), sum(p.parameters for p in parts)


def _sizes(layer: nn.Module, name: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for find in FIND.values():
        with contextlib.suppress(UnknownStructure):
            part = find(layer, name)
            out |= dict(zip(("heads", "groups") if isinstance(part, Attention) else ("width",), part.shape, strict=False))
    return out


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put a model back as it was, whatever is removed from it inside; nothing is copied, for removal replaces parameters."""
    modules = [(m, dict(m.__dict__), dict(m._parameters), dict(m._modules)) for m in model.modules()]
    fields = [(c, dict(c.__dict__)) for c in configs_of(model)]
    try:
        yield
    finally:
        for module, attributes, parameters, children in modules:
            _refill(module.__dict__, attributes)
            _refill(module._parameters, parameters)
            _refill(module._modules, children)
        for config, values in fields:
            _refill(config.__dict__, values)


def _refill(mapping: dict[str, Any], values: dict[str, Any]) -> None:
    mapping.clear()
    mapping.update(values)


def measure_plan(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> float:
    """KL divergence per token (nats) from the model's output after applying a plan; the model is left as it was."""
    reference = Reference(model, data, batch_size)
    with preserved(model):
        apply_shapes(model, plan, data, batch_size=batch_size, progress=progress)
        return reference.measure()
