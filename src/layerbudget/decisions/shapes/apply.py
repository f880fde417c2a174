"""Take units, layers and zeros out of a model, layer after layer with the inputs that the smaller model gives, and recount."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.pruners import Wanda
from ...compressors.select import share
from ...compressors.treating import Job, Treating, matrices
from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput, UnknownBlock, UnknownStructure
from ...execution.divergence import kl_sum, mean
from ...execution.inputs import gram_of
from ...execution.modes import inference
from ...execution.processes import shard
from ...execution.walk import Walk
from ...models.blocks import configs_of, describe, layers, weight_of
from ...plan import Plan
from ...progress import Progress, Steps
from ...records import Module, Result
from .compensation import REMAKES, Stream
from .depth import drop_layers
from .layouts import FIND, Attention, Where, follow
from .parts import KINDS, ZEROS, Part, Price
from .units import cut, find_parts, refitted, where_is


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShapeReceipt(Result):
    """Recount of a model that became smaller.

    Attributes:
        unit: Of the next four.
        before, after, saved, planned: What the layers amount to.
        parameters: ``{before, after}``.
        layers: ``{name: {heads, groups, width}}``.
        dropped: Layers that are gone.
    """

    unit: str
    before: float
    after: float
    saved: float
    planned: float
    parameters: Mapping[str, int]
    layers: Mapping[str, Mapping[str, int]]
    dropped: Sequence[str]


def apply_shapes(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet,
    *,
    damping: float = 0.01,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> ShapeReceipt:
    """Remove what a plan says, in place, layer after layer with the pruned inputs, and recount.

    Args:
        model: The model that the plan was made for.
        plan: From :func:`layerbudget.decisions.shapes.plan.plan_shapes`.
        data: Calibration tokens: which units go, and the refit.
        damping: Relative to the mean of the second moments' diagonal.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Returns:
        The recount.

    Raises:
        InvalidInput: Not a plan of smaller shapes.
        ModelMismatch: The plan belongs to another model.
        CoverageError: The recount differs from the plan.
    """
    if plan.kind != "shapes":
        raise InvalidInput(
            f"A plan of kind {plan.kind!r} holds no shapes.",
            "Shapes are planned by plan_shapes.",
            "Use apply_plan, which takes every kind.",
        )
    plan.validate(describe(model))
    shapes, dropped, hyper = plan.extra["shapes"], list(plan.extra["dropped"]), plan.hyperparameters
    parts = {p.name: p for p in find_parts(model, kinds=(), by=hyper["by"], multiple=hyper["multiple"])}
    wrong = [n for n, s in shapes.items() if n not in parts or (parts[n].units, parts[n].by) != (s["units"], s["by"])]
    wrong += [n for n, s in shapes.items() if s["removed"] > s["units"] - (s["layer"] not in dropped)]
    if wrong:
        raise CoverageError(f"The model has no {wrong[0]} as planned.", "", "Plan again for this model.")
    zeros = plan.extra.get("zeros", {})
    price = Price(unit=plan.budget["unit"], context=hyper["context"], bytes_per_parameter=hyper["bytes_per_parameter"])
    names = [n for n, _ in layers(model) if n not in dropped]
    before = _amount(model, price)
    jobs = {n: int(s["removed"]) for n, s in shapes.items() if s["layer"] not in dropped}
    way = {"compensate": hyper["compensate"], "damping": damping, "batch_size": batch_size, "progress": progress}
    _cut_layers(model, data, [parts[n] for n in jobs], jobs, dropped, zeros, **way)
    after = _amount(model, price, names, zeros)
    saved, planned = (before[0] - after[0], before[1] - after[1]), (float(plan.budget["spent"]), int(plan.counts.sum()))
    if saved != planned:
        raise CoverageError(
            f"{saved[0]:g} {price.unit} and {saved[1]} parameters went; {planned[0]:g} and {planned[1]} were planned.",
            "",
            "Report this.",
        )
    return ShapeReceipt(
        unit=price.unit,
        before=before[0],
        after=after[0],
        saved=saved[0],
        planned=planned[0],
        parameters={"before": before[1], "after": after[1]},
        layers={n: _sizes(layer, now) for n, (now, layer) in zip(names, layers(model), strict=True)},
        dropped=dropped,
    )


def remove_units(
    model: nn.Module,
    data: CalibrationSet,
    fraction: float | Mapping[str, float],
    *,
    kind: str = "heads",
    by: str = "auto",
    multiple: int = 8,
    criterion: str = "obs",
    refit: bool = True,
    damping: float = 0.01,
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
        criterion: ``obs`` or ``wanda``, see :mod:`layerbudget.decisions.shapes.units`.
        refit: Replace the kept columns by ``W H_{:S} H_{SS}^-1``; else they stay as they are.
        damping: Relative to the mean of H's diagonal.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Returns:
        ``{layer: query heads, or width, that are left}``. The config follows when all layers have equally many and it can say
        so.

    Raises:
        UnknownStructure: A layer whose units cannot be taken out.
        UnknownBlock: A fraction for a layer that the model does not have.
        InvalidInput: A fraction outside [0, 1), or an unknown kind, criterion or unit.
    """
    if kind not in KINDS:
        raise InvalidInput(f"There is nothing of kind {kind!r} to remove.", f"Kinds are {', '.join(KINDS)}.", "Use heads.")
    parts = {p.layer: p for p in find_parts(model, kinds=(kind,), by=by, multiple=1) if p.kind == kind}
    unknown = [name for name in fraction if name not in parts] if isinstance(fraction, Mapping) else []
    if unknown:
        raise UnknownBlock(f"There is no layer {unknown[0]!r}.", f"Layers are {', '.join(list(parts)[:3])}, ...", "Correct it.")
    shares = {n: fraction.get(n, 0.0) if isinstance(fraction, Mapping) else fraction for n in parts}
    jobs = {p.name: _going(p, shares[n], multiple) for n, p in parts.items()}
    way: dict[str, Any] = {"compensate": "refit" if refit else "none", "damping": damping, "batch_size": batch_size}
    _cut_layers(model, data, list(parts.values()), jobs, [], {}, criterion=criterion, progress=progress, **way)
    return {n: FIND[kind](layer, n).shape[0] for n, layer in layers(model)}


def _going(part: Part, fraction: float, multiple: int) -> int:
    if not (isinstance(fraction, int | float) and math.isfinite(fraction) and 0 <= fraction < 1):
        raise InvalidInput(f"The fraction is {fraction}.", "It must lie in [0, 1).", "Give 0.25, for example.")
    if part.kind == "heads":
        return min(math.floor(part.units * fraction + 1e-9), part.units - 1)
    return part.units - min(part.units, max(multiple, multiple * math.ceil(part.units * (1 - fraction) / multiple - 1e-9)))


def _cut_layers(
    model: nn.Module,
    data: CalibrationSet,
    parts: Sequence[Part],
    jobs: Mapping[str, int],
    dropped: Sequence[str],
    zeros: Mapping[str, Any],
    *,
    compensate: str,
    damping: float,
    batch_size: int,
    criterion: str = "obs",
    progress: Progress | None = None,
) -> None:
    """Take units out of parts, put zeros into what remains, drop layers, and let the config follow."""
    touched = [kind for kind in KINDS if any(p.kind == kind and jobs[p.name] for p in parts)]
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
            for part in (p for kind in KINDS for p in parts if (p.layer, p.kind) == (name, kind)):
                if jobs[part.name]:
                    where, remake = where_is(model, part), REMAKES.get(compensate, refitted)
                    if stream:
                        aim = stream.aim(where)
                        gram, remake = aim.total.gram, aim.remake(model.get_submodule(where.consumer), damping)
                    else:
                        gram = gram_of(model, walk, where.consumer, where.inputs)
                    cut(model, where, gram, jobs[part.name], part.by, damping, remake, criterion)
                _put_zeros(model, walk, part, zeros)
            if name not in dropped:
                walk.advance()
            tick()
        walk.close()
    if dropped:
        drop_layers(model, dropped)
    for kind in touched:
        follow(model, before[kind], [FIND[kind](layer, n) for n, layer in layers(model)])


def _put_zeros(model: nn.Module, walk: Walk, part: Part, planned: Mapping[str, Any]) -> None:
    """Put the planned zeros of one part into its matrices, by Wanda on the inputs that they get now."""
    if part.name not in planned.get("parts", {}):
        return
    modules = []
    for name in part.modules:  # parameters are replaced, never changed, so that the model can be put back
        owner, parameter = weight_of(model, name)
        owner.weight = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        d_out, d_in = matrices(*weight_of(model, name))[0].shape
        modules.append(Module(name=name, d_in=d_in, d_out=d_out))
    counts = share(int(planned["parts"][part.name]["zeros"]), [m.numel for m in modules])
    pattern = ZEROS[planned["pattern"]].pattern
    jobs = [Job(module=m, level=Level(zeros=c, pattern=pattern)) for m, c in zip(modules, counts, strict=True)]
    Treating(model, Wanda()).layer(walk, jobs)


def saved_by_zeros(model: nn.Module, parts: Sequence[Part], planned: Mapping[str, Any], price: Price) -> float:
    """Return what the zeros of a smaller model save, counted on its matrices.

    Args:
        model: The smaller model.
        parts: Its parts, under the names that the plan has for them.
        planned: ``extra["zeros"]`` of the plan.
        price: The unit.

    Raises:
        CoverageError: Fewer zeros than planned, or in other places than the pattern allows.
    """
    total = 0.0
    for part in (p for p in parts if p.name in planned.get("parts", {})):
        zeros, wanted = ZEROS[planned["pattern"]], planned["parts"][part.name]
        weights = [matrices(*weight_of(model, n))[0] for n in part.modules]
        found = sum(int((w == 0).sum()) for w in weights)
        gone, group = zeros.pattern or (0, 1)
        fits = all(bool(((w.unflatten(1, (-1, group)) == 0).sum(2) >= gone).all()) for w in weights)
        if found < wanted["zeros"] or not fits:
            raise CoverageError(
                f"{part.name} holds {found} zeros, {wanted['zeros']} were planned ({zeros.name}).", "", "Report this."
            )
        total += price.left(part) - price.left(part, 0, zeros, zeros.shares.index(wanted["share"]))
    return total


def _amount(
    model: nn.Module, price: Price, names: Sequence[str] = (), zeros: Mapping[str, Any] | None = None
) -> tuple[float, int]:
    """Return the size of a model's layers, from its matrices as they are, and their parameters.

    With the names that the layers had in the whole model, planned zeros are counted too.
    """
    parts = find_parts(model, kinds=(), by="auto", multiple=1)
    total = sum(price.left(p) for p in parts)
    if names:
        was = dict(zip((n for n, _ in layers(model)), names, strict=True))
        renamed = [dataclasses.replace(p, name=f"{was[p.layer]}.{p.kind}") for p in parts]
        total -= saved_by_zeros(model, renamed, zeros or {}, price)
    return total, sum(p.parameters for p in parts)


def _sizes(layer: nn.Module, name: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for find in FIND.values():
        with contextlib.suppress(UnknownStructure):
            found: Where = find(layer, name)
            out |= dict(zip(("heads", "groups") if isinstance(found, Attention) else ("width",), found.shape, strict=False))
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
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._modules.clear()
            module._modules.update(children)
        for config, values in fields:
            config.__dict__.clear()
            config.__dict__.update(values)


def measure_plan(model: nn.Module, plan: Plan, data: CalibrationSet, *, damping: float = 0.01, batch_size: int = 8) -> float:
    """KL divergence per token (nats) from the model's output after applying a plan; the model is left as it was.

    Raises:
        CoverageError, InvalidInput, ModelMismatch: As :func:`apply_shapes`.
    """
    total = tokens = 0.0
    with inference(model):
        device, test = next(model.parameters()).device, shard(data)
        clean = [torch.log_softmax(model(**b).logits.float(), -1) for b in test.batches(batch_size, device)]
        with preserved(model):
            apply_shapes(model, plan, data, damping=damping, batch_size=batch_size)
            for batch, before in zip(test.batches(batch_size, device), clean, strict=True):
                each, count = kl_sum(model(**batch).logits, before, batch.get("attention_mask"))
                total, tokens = total + each, tokens + count
    return mean(total, tokens)
