"""Empirical Fisher from a Gram matrix: one n x n eigendecomposition serves every damping. Also with labels from the model.

``zeta^2(tau) = g'(C + tau I)^-1 g`` with ``g = S'1/N`` and ``C = S'S/N``, the rows ``s_i`` of S being gradients of the
*summed* loss of sequence i and N the number of tokens. With ``K = SS'`` and ``K/N = U diag(mu) U'``, push-through gives

    zeta^2(tau) = (1/N) sum_j (u_j'1)^2 mu_j / (tau + mu_j),

so only K is needed (:doc:`/theory`, section 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

from ...errors import InvalidInput
from ...execution.backward import Loss, SampledLoss, data_loss, feed
from ...execution.loss import Data, token_count
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from .. import noise
from . import common
from .common import Damping, Dampings, Unit
from .gram import InnerProducts, activation_bytes, gram_matrices


def score_gram(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    sketch: tuple[int, int] | int | None = None,
    replicates: int = 50,
    walk: str = "auto",
    resume: Path | str | None = None,
) -> Scores:
    """Gain under the empirical Fisher, ``zeta^2 = g'(S'S/N + tau I)^-1 g``, with floor, errors and verdict.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``seed``: of the bootstrap, the halves and the sketch.
    - ``sketch``: ``r`` or ``(r_out, r_in)``: a Kronecker sketch, for models whose gradients do not fit.
    - ``replicates``: of the bootstrap.
    - ``resume``: folder that keeps the rows of every sequence; only those that it lacks are computed.

    Returns:
        Gains (bounded by n/N), standard errors and floors ``d_eff/N``; ``extra`` holds excess, z,
        rank stability and the verdict.
    """
    if data.samples < 2:
        raise InvalidInput(f"The data has {data.samples} sequence.", "A Gram matrix needs at least two.", "Give more text.")
    pair = (sketch, sketch) if isinstance(sketch, int) else sketch
    if pair is not None and min(pair) < 1:
        raise InvalidInput(f"sketch is {sketch}.", "Its sides are at least 1.", "Use 16, or None for the exact matrix.")
    loss: float | None = None
    if resume is None:
        grams, fed = gram_matrices(
            model, data, blocks, batch_size=batch_size, sketch=pair, seed=seed, walk=walk, progress=progress
        )
        loss = fed.loss
    else:
        from ..stored import gram_matrices as stored

        grams = stored(resume, model, data, blocks, batch_size=batch_size, sketch=pair, seed=seed, walk=walk, progress=progress)
    name = "empirical Fisher" if pair is None else f"empirical Fisher, Kronecker sketch {pair[0]}x{pair[1]}"
    tokens = common.token_counts(model, data)
    return from_grams(blocks, grams, tokens, damping, damping_unit, name, loss=loss, seed=seed, replicates=replicates)


def from_grams(
    blocks: Sequence[Block],
    grams: np.ndarray,
    tokens: np.ndarray,
    damping: Damping,
    unit: str,
    curvature: str,
    *,
    loss: float | None,
    seed: int,
    replicates: int,
) -> Scores:
    """Return the scores of Gram matrices of sequences.

    Args:
        blocks: Blocks of the model.
        grams: ``(K, n, n)``.
        tokens: Target tokens of every sequence, ``(n,)``.
        damping: tau, one or several, in ``unit``; None for the default sweep.
        unit: ``max``, ``mean``, ``median`` or ``absolute``.
        curvature: Its name in the record.
        loss: Summed loss of all tokens, where it is known.
        seed: Of the bootstrap and the halves.
        replicates: Of the bootstrap.
    """
    spectra = [noise.Spectrum(k, tokens.sum()) for k in grams]
    largest, trace = np.array([[s.largest, s.trace] for s in spectra]).T
    damped = Dampings.of(damping, unit, largest, trace / np.array([b.numel for b in blocks]))
    summary = noise.summarise(grams, tokens, damped.tau, seed=seed, replicates=replicates)
    gain, error, floor = (summary.pop(name) for name in ("gain", "standard_error", "floor"))
    status = [["ok" if top > 0 else "zero gradient" for top in largest] for _ in damped.values]
    total = float(tokens.sum())
    extra = {"tokens": int(total), "mean_loss": None if loss is None else loss / total, "upper_bound": len(tokens) / total}
    fields = {"standard_error": error, "noise_floor": floor, "status": status, "seed": seed}
    return damped.record(blocks, "fisher-gram", gain, curvature, **fields, extra={**extra, **summary})


def score_monte_carlo(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    draws: int = 1,
    walk: str = "auto",
) -> Scores:
    """Gain under the Fisher with labels drawn from the model, R draws per token.

    ``zeta^2 = (|g|^2 - v'(tau I + K~/M)^-1 v / M) / tau`` with ``M = N R``, ``K~`` the Gram matrix of sampled-label
    gradients and ``v = G~ g``. With fewer rows n R than effective dimensions it tends to ``|g|^2/tau``.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``seed``: of the sampled labels.
    - ``draws``: R, labels per token.
    """
    if draws < 1:
        raise InvalidInput(f"draws is {draws}.", "At least one draw per token is needed.", "Use draws=1.")
    tokens, n, (dtype, device) = float(token_count(model, data)), data.samples, common.real_type(model)
    losses: tuple[Loss, ...] = (data_loss, *(SampledLoss(seed + r) for r in range(1, draws + 1)))
    products = InnerProducts(blocks, n, losses, dtype=dtype, device=device, activation=activation_bytes(model, data))
    feed(model, data, blocks, products, batch_size=batch_size, walk=walk, tick=Steps(progress, n))
    scale = tokens * draws
    eigen = [np.linalg.eigh(gram[n:, n:] / scale) for gram in products.grams]
    largest = np.array([max(float(mu[-1]), 0.0) for mu, _ in eigen])
    trace = np.array([float(mu.clip(0).sum()) for mu, _ in eigen])
    damped = Dampings.of(damping, damping_unit, largest, trace / np.array([b.numel for b in blocks]))
    gain = np.zeros_like(damped.tau)
    for k, ((mu, u), gram) in enumerate(zip(eigen, products.grams, strict=True)):
        square, v = float(gram[:n, :n].sum()) / tokens**2, gram[n:, :n].sum(1) / tokens
        w = (u.T @ v) ** 2 / scale
        gain[:, k] = [(square - (w / (t + mu.clip(0))).sum()) / t for t in damped.tau[:, k]]
    name, extra = f"Monte-Carlo Fisher, {draws} draws", {"tokens": int(tokens), "trace": trace}
    return damped.record(blocks, "fisher-mc", gain, name, seed=seed, extra=extra)
