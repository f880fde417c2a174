"""Damage of rounding the cache: gradients of keys and values along the change of every format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...execution.backward import SampledLoss
from ...execution.loss import IGNORE, Batch, logits_of, unlabelled
from ...execution.memory import pieces_of
from ...execution.modes import prepared
from ...execution.processes import process_group, shard
from ...execution.replay import Replay, unwalkable
from ...progress import Progress, Steps
from ...sensitivity.directional.terms import pooled
from ...sensitivity.sequences import deviations
from .cache import caching, read_back
from .space import CacheSpace


def _gradients(
    model: nn.Module,
    batch: Batch,
    run_states: MutableMapping[Any, torch.Tensor],
    losses: Sequence[SampledLoss],
    pieces: Sequence[tuple[Batch, slice]],
) -> list[tuple[torch.Tensor, ...]]:
    """Run a batch, and return the gradients of every loss at what ``run_states`` holds then; logits come in ``pieces``."""
    ends: Iterator[torch.Tensor]
    at: list[torch.Tensor] | list[None] = [None] * len(losses)
    if len(pieces) < 2:
        logits = logits_of(model, batch)
        ends = (loss(logits, batch) for loss in losses)
    else:
        replay = Replay(model)
        replay.probe(batch.kwargs)
        run_states.clear()
        with replay.end(len(replay.layers) - 1):
            hidden = replay.run(batch.kwargs)
        ends, at = itertools.repeat(hidden), [torch.zeros_like(hidden) for _ in losses]
        for piece, places in pieces:
            part = hidden[:, places].detach().requires_grad_(True)
            with replay.begin(len(replay.layers), part):
                logits = logits_of(model, piece)
            for end_gradient, loss in zip(at, losses, strict=True):
                (end_gradient[:, places],) = torch.autograd.grad(loss(logits, piece), part, retain_graph=loss is not losses[-1])
    tensors = list(run_states.values())
    return [
        torch.autograd.grad(end, tensors, end_gradient, retain_graph=i < len(losses) - 1, allow_unused=True)
        for i, (end, end_gradient) in enumerate(zip(ends, at, strict=False))
    ]


def cache_damage(
    model: nn.Module,
    data: CalibrationSet,
    space: CacheSpace,
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Damage of every block in every format, ``(K, m)`` nats per token; sixteen bits cost nothing.

    With it what every sequence adds beside its share, ``(K, m, sequences)``, and the passes. Several processes share the
    sequences, and all have all of it.
    """
    where = {(k.layer, k.part): i for i, each in enumerate(space.members) for k in each}
    group, mine = process_group(), shard(data)
    rows = np.zeros((len(space.members), len(space.formats), data.samples))
    if all(form.plain for form in space.formats):
        return rows[..., 0], rows, 0.0
    places = group.shard(range(data.samples))
    norms, counts = np.zeros((data.samples, *rows.shape[:2])), np.zeros(data.samples)
    tick = Steps(progress, mine.samples, "gradients of keys and values")
    run_states: dict[tuple[int, int], torch.Tensor] = {}

    def listen(layer: int, *states: torch.Tensor) -> Any:
        for part, x in enumerate(states):
            run_states[layer, part] = x if x.requires_grad else x.requires_grad_(True)
        return states

    with prepared(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for batch in unlabelled(model, mine, batch_size):
            run_states.clear()
            losses, pieces = [SampledLoss(1009 * seed + draw) for draw in range(draws)], list(pieces_of(model, batch))
            pieces = [] if len(pieces) > 1 and unwalkable(model, (), [batch]) else pieces
            with caching(model, listen):
                gradients = _gradients(model, batch, run_states, losses, pieces)
            sequences, states = places[batch.rows], list(run_states.items())
            along = torch.zeros(draws, len(space.members), len(space.formats), batch.size, dtype=torch.float64)
            for n, (place, state) in enumerate(states):
                x, i = state.detach(), where[place]
                for j, form in enumerate(space.formats):
                    if form.plain:
                        continue
                    delta = read_back(x, form, place[1]) - x
                    norms[sequences, i, j] += [float(each.square().sum()) for each in delta]
                    for draw, each in enumerate(gradients):
                        if each[n] is not None:
                            along[draw, i, j] += (each[n] * delta).flatten(1).sum(1).double().cpu()
            rows[:, :, sequences] = along.square().mean(0).numpy()
            counts[sequences] = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().numpy()
            for _ in range(batch.size):
                tick()
    rows, counts, norm = group.sum(rows), group.sum(counts), group.sum(norms).sum(0)
    tokens = counts.sum()
    second = rows.sum(-1) / (2 * tokens)
    rest = deviations(rows / 2, counts, second)
    return pooled(second, np.linalg.norm(rest, axis=-1), norm)[0], rest, 1.0 + 2.0 * draws
