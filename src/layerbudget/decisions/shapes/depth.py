"""Depth: whole layers go, the others are renumbered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import InfeasibleBudget, InvalidInput, UnknownBlock
from ...execution.divergence import Meter
from ...execution.modes import inference
from ...execution.processes import shard
from ...execution.replay import Replay
from ...execution.walk import Walk
from ...models.blocks import configs_of, describe, layers, partition
from ...plan import Plan, PlanBlock
from ...progress import Progress, Steps


def drop_layers(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Remove whole layers and renumber the others, in place.

    Args:
        model: The model.
        names: Layers to remove, as in :func:`layerbudget.models.blocks.layers`.

    Raises:
        UnknownBlock: The model has no such layer.
        InfeasibleBudget: No layer would be left.
    """
    known = layers(model)
    wrong = [n for n in names if n not in {k for k, _ in known}]
    if wrong:
        raise UnknownBlock(f"The model has no layer {wrong[0]!r}.", f"Layers are {known[0][0]} to {known[-1][0]}.", "")
    kept = [(i, layer) for i, (name, layer) in enumerate(known) if name not in names]
    if not kept:
        raise InfeasibleBudget(f"All {len(known)} layers would go.", f"At most {len(known) - 1} can.", "Remove fewer.")
    parent, _, stack = known[0][0].rpartition(".")[0].rpartition(".")
    setattr(model.get_submodule(parent), stack, nn.ModuleList(layer for _, layer in kept))
    for new, (_, layer) in enumerate(kept):
        modules: Iterator[Any] = layer.modules()
        for module in modules:
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = new
    for config in configs_of(model):
        if getattr(config, "num_hidden_layers", None) == len(known):
            types = config.__dict__.get("layer_types")  # some derive it from the number of layers
            config.num_hidden_layers = len(kept)
            if isinstance(types, list | tuple) and len(types) == len(known):
                config.layer_types = [types[i] for i, _ in kept]
    return model


def drop_damage(
    model: nn.Module, data: CalibrationSet, names: Sequence[str] | None = None, *, batch_size: int = 8
) -> dict[str, float]:
    """KL divergence per token (nats) from the given model's output when one layer is skipped, for each layer.

    Args:
        model: The model.
        data: Calibration tokens.
        names: Layers to try; all by default.
        batch_size: Sequences per forward.
    """
    out: dict[str, float] = {}
    with inference(model):
        walk = Walk(model, shard(data), batch_size=batch_size)
        walk.capture()
        meter = Meter(walk)
        for i, (name, _) in enumerate(walk.layers):
            if names is None or name in names:
                out[name] = meter.damage(i + 1)
            walk.advance()
        walk.close()
    return out


def plan_depth(
    model: nn.Module, data: CalibrationSet, *, remove: int, batch_size: int = 8, progress: Progress | None = None
) -> Plan:
    """Choose layers to remove, one after the other, measuring again after every removal (errors do not add up).

    Args:
        model: The model; left as it was.
        data: Calibration tokens.
        remove: How many layers go.
        batch_size: Sequences per forward.
        progress: Called with (chosen, remove).

    Returns:
        A plan of kind ``depth``: values 0 and 1.

    Raises:
        InfeasibleBudget: As many layers as the model has, or more.
    """
    names = [n for n, _ in layers(model)]
    if not 0 <= remove < len(names):
        possible = f"Between 0 and {len(names) - 1} can."
        raise InfeasibleBudget(f"{remove} of {len(names)} layers cannot go.", possible, "Remove fewer.")
    gone: list[str] = []
    rounds: list[dict[str, float]] = []
    replay, tick = Replay(model), Steps(progress, remove)
    with inference(model):
        replay.probe(next(data.select(slice(0, 1)).batches(1, next(model.parameters()).device)))
    for _ in range(remove):
        with replay.without(gone):
            found = drop_damage(model, data, [n for n in names if n not in gone], batch_size=batch_size)
        rounds.append(found)
        gone.append(min(found, key=lambda n: found[n]))
        tick()
    blocks = tuple(PlanBlock.of(b, float(b.name in gone), b.numel * (b.name in gone)) for b in partition(model))
    spent = sum(b.count for b in blocks)
    return Plan(
        kind="depth",
        rule="greedy",
        model=describe(model),
        blocks=blocks,
        budget={"unit": "parameters", "limit": spent, "spent": spent},
        hyperparameters={"remove": remove, "cap": 1.0},
        extra={"removed": gone, "damage": rounds},
    )


def apply_depth(model: nn.Module, plan: Plan) -> nn.Module:
    """Remove the layers that a plan gives ratio 1, in place.

    Raises:
        InvalidInput: The plan has ratios other than 0 and 1.
        ModelMismatch: The plan belongs to another model.
    """
    plan.validate(describe(model))
    between = next((b for b in plan.blocks if b.count not in (0, b.numel)), None)
    if between is not None:
        ratio = f"{between.name} has ratio {between.value:.3f}."
        raise InvalidInput(ratio, "A depth plan has ratios 0 and 1 only.", "Use plan_depth.")
    return drop_layers(model, [b.name for b in plan.blocks if b.count])
