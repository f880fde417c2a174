r"""Gain of every further rank: how much of a matrix's gradient a LoRA update of rank r can follow.

Let ``G`` be the gradient of the mean loss with respect to a weight matrix and ``A (x) S`` its Kronecker-factored curvature,
with damped factors. The best update of rank r lowers the quadratic model of the loss by half of

    zeta^2(r) = sigma_1^2 + ... + sigma_r^2,    sigma the singular values of  (S + s I)^-1/2  G  (A + a I)^-1/2

(Eckart-Young in the whitened coordinates, which keep ranks). ``zeta^2(full rank)`` is ``g' ((A + a I) (x) (S + s I))^-1 g``:
the gain of the paper under Kronecker-factored curvature whose damping is factored too (``kfac`` damps by ``tau I``), resolved
by rank. The increments ``sigma_i^2`` fall with i, so they make an exactly solvable program
(:func:`layerbudget.program.allocate_increments`) whose answer needs no surrogate utility. Without curvature ``zeta(r)`` is what
the linearised loss loses per unit of norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from ..errors import CoverageError, InvalidInput
from ..records import Block
from ..running.loss import Data, token_count
from ..running.sites import Collector, Site
from .curvature import common
from .curvature.kronecker import Kronecker, build
from .record import Scores

CURVATURES = ("none", "kfac")


def score_rank_gain(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    batch_size: int = 8,
    seed: int | None = None,
    progress: common.Progress | None = None,
    largest: int = 64,
    curvature: str = "kfac",
) -> Scores:
    """Squared singular values of every gradient, plain or whitened by K-FAC; partition by ``linear`` for ranks per matrix.

    The noise floor comes from two halves of the data, whose shares in ``G = G_1 + G_2`` have nearly the same expectation:
    ``|G_1 - G_2|^2``, in the whitened space (K-FAC needs two batches for it).

    Args:
        model: The model.
        data: The calibration set, two sequences or more.
        blocks: K blocks. A block of several matrices gives every one of them the same rank; increments add up.
        damping: With ``kfac`` only: a and s in units of the median over matrices of the factors' mean eigenvalues, 1 by
            default.
        batch_size: Sequences per pass.
        seed: Of the sampled labels of K-FAC; 0 by default.
        progress: Called with sequences done and in total.
        largest: How many ranks per matrix are kept.
        curvature: ``kfac`` or ``none``.

    Returns:
        ``gain`` sums all ranks; ``extra['increments']`` has, per damping and block, the gain of the first, second, ... rank;
        ``extra['increments_floor']`` the same of ``G_1 - G_2``, which is noise: what noise alone gives each rank.

    Raises:
        CoverageError: Fused experts, or a matrix that was never seen.
        InvalidInput: An argument outside its domain.
    """
    common.check_inputs(data, batch_size)
    if curvature not in CURVATURES or largest < 1 or data.samples < 2:
        raise InvalidInput(
            f"curvature={curvature!r}, largest={largest}, {data.samples} sequences.",
            f"Curvatures are {' and '.join(CURVATURES)}; one rank and two sequences at least.",
            "",
        )
    if curvature == "none" and (damping is not None or seed is not None):
        raise InvalidInput(
            f"{'damping' if damping is not None else 'seed'} was given with curvature='none'.",
            "K-FAC alone reads it.",
            "Leave it out.",
        )
    seed = seed or 0
    values = (0.0,) if curvature == "none" else common.check_damping(damping, "absolute") or (1.0,)
    tick, kronecker = common.Ticker(progress, data.samples), None
    if curvature == "none":
        halves = _halves(model, data, blocks, batch_size, tick)
    else:
        kronecker = build(model, data, blocks, batch_size=batch_size, seed=seed, groups=2, tick=tick)
        halves = {name: value / kronecker.tokens for name, value in kronecker.gradients.items()}
    gain, floor = np.zeros((len(values), len(blocks))), np.zeros((len(values), len(blocks)))
    increments: list[list[list[float]]] = [[] for _ in values]
    noise: list[list[list[float] | None]] = [[] for _ in values]
    for d, value in enumerate(values):
        whiten = _whitening(kronecker, value)
        for k, block in enumerate(blocks):
            size = min(largest, *(min(m.d_in, m.d_out) for m in block.modules))
            total, lower = torch.zeros(2, size, dtype=torch.float64)
            for m in block.modules:
                parts = [whiten(m.name, half.double()) for half in halves[m.name]]
                whole = torch.stack(parts).sum(0)
                gain[d, k] += float(whole.square().sum())
                total += _squared(whole)[:size].cpu()
                if len(parts) == 2:
                    floor[d, k] += float((parts[0] - parts[1]).square().sum())
                    lower += _squared(parts[0] - parts[1])[:size].cpu()
                else:
                    floor[d, k] = np.nan
            increments[d].append(total.tolist())
            noise[d].append(None if np.isnan(floor[d, k]) else lower.tolist())
    extra = {
        "curvature": "none" if curvature == "none" else "K-FAC, sampled labels",
        "tokens": token_count(model, data),
        "increments": increments,
        "increments_floor": noise,
        "excess": (gain - floor).tolist(),
    }
    return common.record(
        model, data, blocks, "rank-gain", gain=gain.tolist(), noise_floor=floor.tolist(), damping=values, seed=seed,
        extra=extra, damping_unit="none" if curvature == "none" else "median",
        unit="(nats per parameter)^2" if curvature == "none" else "nats of average loss",
    )  # fmt: skip


def _halves(
    model: nn.Module, data: Data, blocks: Sequence[Block], batch_size: int, tick: common.Ticker
) -> dict[str, torch.Tensor]:
    """Shares of the even and the odd sequences in the mean gradient, ``(2, d_out, d_in)`` by matrix; they add up to it."""
    dtype = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    sums: dict[str, torch.Tensor] = {}
    first = 0

    def add(site: Site) -> None:
        for name in site.names:
            for half in (0, 1):
                rows = slice((first + half) % 2, None, 2)
                b, a = (x[rows].to(dtype).flatten(0, 1) for x in (site.b[name], site.a))
                if name not in sums:
                    sums[name] = torch.zeros(2, b.shape[1], a.shape[1], dtype=dtype, device=b.device)
                sums[name][half] += b.T @ a

    with Collector(model, blocks, add) as collector:
        if collector.direct:
            raise CoverageError(
                f"{next(iter(collector.direct))} is not a Linear, so no adapter goes there.",
                "Linear and Conv1D matrices have adapters.",
                "Exclude the fused experts.",
            )
        for batch, logits in common.walk(model, data, collector, batch_size, tick):
            first = batch.rows.start
            common.backward(collector, batch, logits, batch.targets)
        collector.check_coverage()
    n = token_count(model, data)
    return {name: value / n for name, value in sums.items()}


def _whitening(kronecker: Kronecker | None, damping: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """``(name, matrix) -> (S + s I)^-1/2 matrix (A + a I)^-1/2`` in the factors' eigenbases, which change no singular value."""
    if kronecker is None:
        return lambda name, matrix: matrix
    a = damping * float(np.median([float(v[0].mean()) for v in kronecker.a.values()]))
    s = damping * float(np.median([float(v[0].mean()) for v in kronecker.g.values()]))

    def whiten(name: str, matrix: torch.Tensor) -> torch.Tensor:
        left, right = (kronecker.g[name][0].clamp_min(0) + s), (kronecker.a[name][0].clamp_min(0) + a)
        return kronecker.rotated(name, matrix) / torch.outer(left.sqrt(), right.sqrt())

    return whiten


def _squared(matrix: torch.Tensor) -> torch.Tensor:
    """Squared singular values, descending: eigenvalues of the smaller Gram matrix, which costs a fraction of an SVD."""
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
