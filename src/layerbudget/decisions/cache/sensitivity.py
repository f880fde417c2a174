"""Damage of rounding the cache: gradients of keys and values along the change of every format."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...execution.backward import SampledLoss
from ...execution.loss import IGNORE, logits_of, unlabelled
from ...execution.modes import prepared
from ...progress import Progress, Steps
from ...sensitivity.directional.terms import pooled
from ...sensitivity.sequences import deviations
from .cache import caching, read_back
from .space import CacheSpace


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

    With it what every sequence adds beside its share, ``(K, m, sequences)``, and the passes.
    """
    where = {(k.layer, k.part): i for i, each in enumerate(space.members) for k in each}
    rows = np.zeros((len(space.members), len(space.formats), data.samples))
    if all(form.plain for form in space.formats):
        return rows[..., 0], rows, 0.0
    norm, counts = np.zeros(rows.shape[:2]), np.zeros(data.samples)
    tick = Steps(progress, data.samples, "gradients of keys and values")
    held: dict[tuple[int, int], torch.Tensor] = {}

    def listen(layer: int, *states: torch.Tensor) -> Any:
        for part, x in enumerate(states):
            held[layer, part] = x if x.requires_grad else x.requires_grad_(True)
        return states

    with prepared(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for batch in unlabelled(model, data, batch_size):
            held.clear()
            with caching(model, listen):
                logits = logits_of(model, batch)
            places, tensors = list(held), list(held.values())
            gradients = [
                torch.autograd.grad(
                    SampledLoss(1009 * seed + draw)(logits, batch), tensors, retain_graph=draw < draws - 1, allow_unused=True
                )
                for draw in range(draws)
            ]
            along = torch.zeros(draws, len(space.members), len(space.formats), batch.size, dtype=torch.float64)
            for n, place in enumerate(places):
                x, i = tensors[n].detach(), where[place]
                for j, form in enumerate(space.formats):
                    if form.plain:
                        continue
                    delta = read_back(x, form, place[1]) - x
                    norm[i, j] += float(delta.square().sum())
                    for draw, each in enumerate(gradients):
                        if each[n] is not None:
                            along[draw, i, j] += (each[n] * delta).flatten(1).sum(1).double().cpu()
            rows[:, :, batch.rows] = along.square().mean(0).numpy()
            counts[batch.rows] = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().numpy()
            for _ in range(batch.size):
                tick()
    tokens = counts.sum()
    second = rows.sum(-1) / (2 * tokens)
    rest = deviations(rows / 2, counts, second)
    return pooled(second, np.linalg.norm(rest, axis=-1), norm)[0], rest, 1.0 + 2.0 * draws
