"""Apply a plan of smaller shapes, and recount."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput, UnknownStructure
from ...execution.divergence import kl_sum, mean
from ...execution.inputs import gram_of
from ...execution.modes import inference
from ...execution.processes import shard
from ...execution.walk import Walk
from ...models.blocks import configs_of, describe, layers
from ...plan import Plan
from ...progress import Progress, Steps
from ...records import Result
from .attention import Attention, find_attention
from .compensation import DAMPINGS, REMAKES, Stream
from .depth import drop_layers
from .heads import follow_heads
from .mlp import Mlp, find_mlp
from .parts import KINDS, Part, amount
from .removable import cut, find_parts, inner_width, where_is
from .sparse import Planned, put_zeros, saved_by_zeros
from .width import Remake, follow_width, refitted


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShapeReceipt(Result):
    """What became smaller, recounted on the result.

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


def apply_structured(
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
        plan: From :func:`plan_structured`.
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
    if plan.kind != "structured":
        raise InvalidInput(
            f"A plan of kind {plan.kind!r} holds no shapes.",
            "Shapes are planned by plan_structured.",
            "Use apply_plan, which takes every kind.",
        )
    shapes = plan.extra["shapes"]
    plan.validate(describe(model))
    hyper = plan.hyperparameters
    lacking = [name for name in ("by", "multiple", "context", "bytes_per_parameter") if name not in hyper]
    if lacking:
        raise InvalidInput(f"The plan does not say its {lacking[0]}.", "", "Plan with plan_structured.")
    parts = {p.name: p for p in find_parts(model, kinds=(), by=hyper["by"], multiple=hyper["multiple"])}
    wrong = [n for n, s in shapes.items() if n not in parts or parts[n].units != s["units"] or parts[n].by != s["by"]]
    wrong += [n for n, s in shapes.items() if s["removed"] > s["units"] - (s["layer"] not in plan.extra["dropped"])]
    if wrong:
        raise CoverageError(f"The model has no {wrong[0]} as planned.", "", "Plan again for this model.")
    before = _recount(model, plan)
    dropped = list(plan.extra["dropped"])
    names = [n for n, _ in layers(model) if n not in dropped]
    jobs = {p.name: int(shapes[p.name]["removed"]) for p in parts.values() if p.name in shapes and p.layer not in dropped}
    way = {"compensate": hyper.get("compensate", "refit"), "damping": damping, "batch_size": batch_size}
    zeros = plan.extra.get("zeros", {})
    _apply(model, data, parts, jobs, dropped, zeros, progress=progress, **way)
    after = _recount(model, plan, names)
    saved = {k: before[k] - after[k] for k in ("amount", "parameters")}
    planned = {"amount": float(plan.budget["spent"]), "parameters": int(plan.counts.sum())}
    if saved != planned:
        raise CoverageError(
            f"{saved['amount']:g} {plan.budget['unit']} and {saved['parameters']} parameters went; "
            f"{planned['amount']:g} and {planned['parameters']} were planned.", "", "Report this.",
        )  # fmt: skip
    return ShapeReceipt(
        unit=plan.budget["unit"], before=before["amount"], after=after["amount"], saved=saved["amount"],
        planned=planned["amount"], parameters={"before": before["parameters"], "after": after["parameters"]},
        layers={n: _sizes(layer, now) for n, (now, layer) in zip(names, layers(model), strict=True)}, dropped=dropped,
    )  # fmt: skip


def _apply(
    model: nn.Module, data: CalibrationSet, parts: Mapping[str, Part], jobs: Mapping[str, int], dropped: Sequence[str],
    zeros: Planned, *, compensate: str, damping: float, batch_size: int, progress: Progress | None,
) -> None:  # fmt: skip
    widths = _widths(model, dropped)
    touched = {parts[n].kind for n, units in jobs.items() if units}
    heads = _heads(model, dropped) if "heads" in touched else []
    with inference(model):
        walk = Walk(model, shard(data), batch_size=batch_size)
        tick = Steps(progress, len(walk))
        walk.capture()
        stream = Stream(walk) if compensate == "stream" else None
        for i, (name, layer) in enumerate(walk.layers):
            walk.position = i
            if stream:
                stream.look(find_attention(layer, name), find_mlp(layer, name))
            for part in (parts[n] for kind in KINDS if (n := f"{name}.{kind}") in jobs):
                if jobs[part.name]:
                    _cut(model, walk, stream, part, where_is(layer, part), jobs[part.name], REMAKES.get(compensate), damping)
                put_zeros(model, walk, part, zeros)
            if name not in dropped:
                walk.advance()
            tick()
        walk.close()
    if dropped:
        drop_layers(model, dropped)
    if "heads" in touched:
        follow_heads(model, heads, _heads(model))
    if "mlp" in touched:
        follow_width(model, widths, _widths(model))


def _cut(
    model: nn.Module, walk: Walk, stream: Stream | None, part: Part, where: Attention | Mlp, units: int,
    remake: Remake | None, damping: float,
) -> None:  # fmt: skip
    if stream is None:
        gram = gram_of(model, walk, where.consumer, inner_width(where))
    else:
        aim = stream.aim(where)
        gram, remake = aim.total.gram, aim.remake(model.get_submodule(where.consumer), [damping * d for d in DAMPINGS])
    cut(model, part, where, gram, units, damping, remake or refitted)


def _heads(model: nn.Module, without: Sequence[str] = ()) -> list[Attention]:
    return [find_attention(layer, n) for n, layer in layers(model) if n not in without]


def _widths(model: nn.Module, without: Sequence[str] = ()) -> list[int]:
    with contextlib.suppress(UnknownStructure):
        return [find_mlp(layer, n).width for n, layer in layers(model) if n not in without]
    return []


def _recount(model: nn.Module, plan: Plan, names: Sequence[str] = ()) -> dict[str, Any]:
    """What the layers of a model amount to, from its matrices as they are; with the names that they had: their zeros too."""
    hyper = plan.hyperparameters
    options = {"context": hyper["context"], "bytes_per_parameter": hyper["bytes_per_parameter"]}
    parts = find_parts(model, kinds=(), by="auto", multiple=1)
    total = sum(amount(p, plan.budget["unit"], **options)[1] for p in parts)
    if names:
        was = dict(zip((n for n, _ in layers(model)), names, strict=True))
        renamed = [dataclasses.replace(p, name=f"{was[p.layer]}.{p.kind}") for p in parts]
        total -= saved_by_zeros(model, renamed, plan.extra.get("zeros", {}), plan.budget["unit"], **options)
    return {"amount": total, "parameters": sum(p.parameters for p in parts)}


def _sizes(layer: nn.Module, name: str) -> dict[str, int]:
    out: dict[str, int] = {}
    with contextlib.suppress(UnknownStructure):
        a = find_attention(layer, name)
        out |= {"heads": a.heads, "groups": a.groups}
    with contextlib.suppress(UnknownStructure):
        out |= {"width": find_mlp(layer, name).width}
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


def measure_plan(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet,
    *,
    held_out: CalibrationSet | None = None,
    damping: float = 0.01,
    batch_size: int = 8,
) -> float:
    """KL divergence per token (nats) from the model's output after applying a plan; the model is left as it was.

    It is measured on ``held_out`` where that is given, else on ``data``, from which the refit is made.

    Raises:
        CoverageError, InvalidInput, ModelMismatch: As :func:`apply_structured`.
    """
    total = tokens = 0.0
    with inference(model):
        test = shard(data if held_out is None else held_out)
        clean = [torch.log_softmax(model(**b).logits.float(), -1) for b in test.batches(batch_size, _device(model))]
        with preserved(model):
            apply_structured(model, plan, data, damping=damping, batch_size=batch_size)
            for batch, before in zip(test.batches(batch_size, _device(model)), clean, strict=True):
                each, count = kl_sum(model(**batch).logits, before, batch.get("attention_mask"))
                total, tokens = total + each, tokens + count
    return mean(total, tokens)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
