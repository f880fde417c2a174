"""Randomised Nystrom approximation of the GGN: ``C ~ Y (Omega'Y)^-1 Y'``, ``Y = C Omega``, Omega Gaussian of rank r.

It never exceeds C, so the gain that it gives is too large, by factors of 2 to 200 where r is below twice the effective
dimension: ``zeta^2 ~ sum_j (u_j'g)^2/(lambda_j + tau) + (|g|^2 - |U'g|^2)/tau``. Prefer ``ggn`` for gains; the
factor serves as a preconditioner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from ...execution.loss import Data
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .products import BlockProducts


def nystrom(
    product: Callable[[torch.Tensor], torch.Tensor], size: int, rank: int, seed: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues ``(r,)`` and vectors ``(p, r)`` of a rank-r Nystrom approximation (Tropp et al. 2017, shifted)."""
    generator = torch.Generator().manual_seed(seed)
    omega = torch.randn(size, min(rank, size), generator=generator, dtype=torch.float64)
    omega = torch.linalg.qr(omega).Q
    y = torch.stack([product(omega[:, j].to(like)).double().cpu() for j in range(omega.shape[1])], 1)
    shift = float(torch.linalg.matrix_norm(y)) * 1e-12 * size**0.5
    y = y + shift * omega
    core = omega.T @ y
    value, vector = torch.linalg.eigh((core + core.T) / 2)
    if not float(value.max()) > 0.0:  # no curvature at all
        return torch.zeros(1, dtype=y.dtype), y.new_zeros(size, 1)
    keep = value > 1e-14 * value.max()
    b = y @ (vector[:, keep] / value[keep].sqrt())
    u, s, _ = torch.linalg.svd(b, full_matrices=False)
    return (s**2 - shift).clamp_min(0.0), u


def score_nystrom(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    rank: int = 32,
) -> Scores:
    """Gain under a rank-r Nystrom approximation of the GGN: an upper bound, often a loose one.

    Raises:
        InvalidInput: A damping or batch size outside its domain.
    """
    common.check_arguments(damping, damping_unit, data, batch_size)
    tick = Steps(progress, len(blocks))
    parts, largest, trace = [], [], []
    for block in blocks:
        with BlockProducts(model, data, block, batch_size) as p:
            g = p.gradient()
            value, u = nystrom(p.ggn, p.numel, rank, seed, g)
        g = g.double().cpu()
        inside = (u.T @ g).numpy() ** 2
        parts.append((value.numpy(), inside, max(float(g @ g) - float(inside.sum()), 0.0)))
        largest.append(float(value.max()))
        trace.append(float(value.sum()))
        tick(1)
    mean = np.array(trace) / np.array([b.numel for b in blocks])
    values, tau = common.resolve_damping(damping, damping_unit, np.array(largest), mean)
    gain = [[float((w / (v + t)).sum() + rest / t) for (v, w, rest), t in zip(parts, row, strict=True)] for row in tau]
    status = [[f"upper bound, rank {rank}"] * len(blocks) for _ in values]
    extra = {
        "curvature": f"GGN, Nystrom rank {rank} (overestimates the gain)",
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": largest,
    }
    return common.record(
        model,
        data,
        blocks,
        "nystrom",
        gain=gain,
        damping=values,
        damping_unit=damping_unit,
        status=status,
        seed=seed,
        extra=extra,
    )
