r"""Gains from an optimiser's running moments: a mean gradient and a diagonal Fisher that training keeps anyway.

With m the running mean of a parameter's gradient and v that of its square, both bias-corrected,

    gain(tau) = sum m^2 / (v + tau),        floor(tau) = r sum v / (v + tau),

where r, the sum of the squared weights of the running mean, makes the floor what pure noise would give (flipping the signs of
gradients leaves v alone). What is left above the floor, the excess, is what layers may be compared by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

Key = TypeVar("Key", bound=Hashable)
_SMALL = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Bias-corrected moments of one parameter.

    Attributes:
        mean: Running mean of the gradient.
        square: Running mean of its square.
        noise: Sum of the squared weights of ``mean``.
    """

    mean: torch.Tensor
    square: torch.Tensor
    noise: float


def corrected(mean: torch.Tensor, square: torch.Tensor, betas: tuple[float, float], steps: float) -> Moments:
    """Undo the zero start of two running means after ``steps`` steps; ``r = (1-b)(1+b^t) / ((1+b)(1-b^t))`` for the first."""
    (b1, b2), t = betas, float(steps)
    noise = (1 - b1) * (1 + b1**t) / ((1 + b1) * (1 - b1**t))
    return Moments(mean=mean.float() / (1 - b1**t), square=square.float() / (1 - b2**t), noise=noise)


def optimizer_moments(optimizer: Any, parameters: Sequence[torch.Tensor]) -> list[Moments]:
    """Moments of those parameters of which an Adam-type optimiser keeps them."""
    betas = {id(p): g.get("betas", (0.9, 0.999)) for g in optimizer.param_groups for p in g["params"]}
    found = []
    for p in parameters:
        state = optimizer.state.get(p, {})
        if "exp_avg_sq" in state:
            found.append(corrected(state["exp_avg"], state["exp_avg_sq"], betas[id(p)], float(state.get("step", 1))))
    return found


@torch.no_grad()
def moment_gains(groups: Mapping[Key, Sequence[Moments]], damping: float, *, shared: bool) -> dict[Key, tuple[float, float]]:
    """``(gain, floor)`` of every group of parameters.

    Args:
        groups: Moments by group.
        damping: tau in units of the mean of v.
        shared: One tau for all groups (the mean over all of them), else each group's own.
    """
    scale = {k: (sum(m.square.sum() for m in g), sum(m.square.numel() for m in g)) for k, g in groups.items()}
    total, count = sum(float(s) for s, _ in scale.values()), sum(n for _, n in scale.values())
    out = {}
    for key, group in groups.items():
        own = float(scale[key][0]) / max(scale[key][1], 1)
        tau = max(damping * (total / max(count, 1) if shared else own), _SMALL)
        gain = sum((m.mean.square() / (m.square + tau)).sum() for m in group)
        floor = sum(m.noise * (m.square / (m.square + tau)).sum() for m in group)
        out[key] = (float(gain), float(floor))
    return out


def excess_weights(gain: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """What stands above the noise floor; the gains themselves where nothing does. Shape ``(K,)``, not negative."""
    excess = np.maximum(gain - floor, 0.0)
    return excess if excess.any() else gain
