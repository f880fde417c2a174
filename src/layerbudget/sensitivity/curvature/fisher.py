"""Empirical Fisher from a Gram matrix: one n x n eigendecomposition serves every damping.

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
from ...execution.backward import SampledLoss, data_loss, feed
from ...execution.loss import Data, token_count
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from .. import noise
from . import common
from .gram import gram_matrices, real_type, token_counts
from .inner import InnerProducts


def score_gram(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    sketch: tuple[int, int] | int | None = None,
    replicates: int = 50,
    max_bytes: int | None = None,
    walk: str = "auto",
    stage: Path | str | None = None,
) -> Scores:
    """Gain under the empirical Fisher, ``zeta^2 = g'(S'S/N + tau I)^-1 g``, with floor, errors and verdict.

    Args:
        model: The model.
        data: n sequences.
        blocks: K blocks.
        damping: One or several; ``None`` for the default sweep.
        damping_unit: ``max``, ``mean`` (of each block's eigenvalues) or ``absolute``.
        batch_size: Sequences per pass; the result does not depend on it beyond rounding.
        seed: Of the bootstrap, the halves and the sketch.
        progress: Called with sequences done and in total.
        sketch: ``r`` or ``(r_out, r_in)``: Kronecker sketch, for models whose gradients do not fit.
        replicates: Bootstrap replicates.
        max_bytes: Memory for the gradients of one pass, 2 GiB by default; a sketch or a stage bounds it by itself.
        walk: ``whole`` graph, by ``layers``, or ``auto``: whole where it fits (:mod:`layerbudget.execution.backward`).
        stage: Folder that keeps the rows of every sequence; only sequences that it lacks are computed.

    Returns:
        Gains (bounded by n/N), standard errors and floors ``d_eff/N``; ``extra`` holds excess, z, centred gain, cross-fit
        gain, rank stability and the verdict.

    Raises:
        CoverageError: A weight matrix was never seen.
        InvalidInput: A damping or batch size outside its domain, or fewer than two sequences.
    """
    common.check_arguments(damping, damping_unit, data, batch_size)
    if data.samples < 2:
        raise InvalidInput(f"The data has {data.samples} sequence.", "A Gram matrix needs at least two.", "Give more text.")
    pair = (sketch, sketch) if isinstance(sketch, int) else sketch
    if pair is not None and min(pair) < 1:
        raise InvalidInput(f"sketch is {sketch}.", "Its sides are at least 1.", "Use 16, or None for the exact matrix.")
    if max_bytes is not None and (pair is not None or stage is not None):
        raise InvalidInput(
            f"max_bytes was given with a {'sketch' if pair is not None else 'stage'}.", "That bounds the memory by itself.",
            "Leave it out.",
        )  # fmt: skip
    if stage is None:
        grams, fed = gram_matrices(
            model,
            data,
            blocks,
            batch_size=batch_size,
            sketch=pair,
            seed=seed,
            max_bytes=max_bytes or (2 << 30),
            walk=walk,
            progress=progress,
        )
        total: float | None = fed.loss
    else:
        from .. import stages

        place = stages.Stage(stage, stages.identity(model, blocks, pair, seed))
        grams, _ = stages.gram_matrices(
            place, model, data, blocks, batch_size=batch_size, sketch=pair, seed=seed, walk=walk, progress=progress
        )
        total = None
    return from_grams(
        model, data, blocks, grams, damping=damping, damping_unit=damping_unit, seed=seed, sketch=pair,
        replicates=replicates, loss=total,
    )  # fmt: skip


def from_grams(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    grams: np.ndarray,
    *,
    damping: float | Sequence[float] | None,
    damping_unit: str,
    seed: int,
    sketch: tuple[int, int] | None,
    replicates: int,
    loss: float | None,
) -> Scores:
    """Turn Gram matrices ``(K, n, n)`` into a score record."""
    tokens = token_counts(model, data)
    spectra = [noise.Spectrum(k, tokens.sum()) for k in grams]
    largest = np.array([s.largest for s in spectra])
    mean = np.array([s.trace for s in spectra]) / np.array([b.numel for b in blocks])
    values, tau = common.resolve_damping(damping, damping_unit, largest, mean)
    summary = noise.summarise(grams, tokens, tau, seed=seed, replicates=replicates)
    status = [["ok" if top > 0 else "zero gradient" for top in largest] for _ in values]
    extra = {
        "curvature": "empirical Fisher" if sketch is None else f"empirical Fisher, Kronecker sketch {sketch[0]}x{sketch[1]}",
        "tokens": int(tokens.sum()),
        "mean_loss": None if loss is None else loss / float(tokens.sum()),
        "upper_bound": data.samples / float(tokens.sum()),
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": largest.tolist(),
        "mean_eigenvalue": mean.tolist(),
        **{k: v for k, v in summary.items() if k not in ("gain", "floor", "standard_error")},
    }
    return common.record(
        model, data, blocks, "fisher-gram", gain=summary["gain"].tolist(), damping=values, damping_unit=damping_unit,
        standard_error=summary["standard_error"].tolist(), noise_floor=summary["floor"].tolist(), status=status, seed=seed,
        extra=extra,
    )  # fmt: skip


def score_monte_carlo(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    draws: int = 1,
    max_bytes: int = 2 << 30,
    walk: str = "auto",
) -> Scores:
    """Gain under the Fisher with labels drawn from the model, R draws per token.

    ``zeta^2 = (|g|^2 - v'(tau I + K~/M)^-1 v / M) / tau`` with ``M = N R``, ``K~`` the Gram matrix of sampled-label
    gradients and ``v = G~ g``. With fewer rows n R than effective dimensions it tends to ``|g|^2/tau``.

    Raises:
        CoverageError: A weight matrix was never seen.
        InvalidInput: A damping, batch size or number of draws outside its domain.
    """
    common.check_arguments(damping, damping_unit, data, batch_size)
    if draws < 1:
        raise InvalidInput(f"draws is {draws}.", "At least one draw per token is needed.", "Use draws=1.")
    tokens = float(token_count(model, data))
    dtype, device = real_type(model)
    products = InnerProducts(
        blocks, data.samples, data.length, (data_loss, *(SampledLoss(seed + r) for r in range(1, draws + 1))), dtype=dtype,
        device=device, max_bytes=max_bytes,
    )  # fmt: skip
    tick = Steps(progress, data.samples)
    feed(model, data, blocks, products, batch_size=batch_size, walk=walk, tick=tick)
    n = data.samples
    joint = [(float(k[:n, :n].sum()) / tokens**2, k[n:, :n].sum(1) / tokens, k[n:, n:]) for k in products.grams]
    scale = tokens * draws
    eigen = [np.linalg.eigh(joint[k][2] / scale) for k in range(len(blocks))]
    largest = np.array([max(float(mu[-1]), 0.0) for mu, _ in eigen])
    trace = np.array([float(mu.clip(0).sum()) for mu, _ in eigen])
    mean = trace / np.array([b.numel for b in blocks])
    values, tau = common.resolve_damping(damping, damping_unit, largest, mean)
    gain = np.zeros_like(tau)
    for k, (mu, u) in enumerate(eigen):
        square, v, _ = joint[k]
        w = (u.T @ v) ** 2 / scale
        gain[:, k] = [(square - (w / (t + mu.clip(0))).sum()) / t for t in tau[:, k]]
    extra = {
        "curvature": f"Monte-Carlo Fisher, {draws} draws",
        "tokens": int(tokens),
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": largest.tolist(),
        "mean_eigenvalue": mean.tolist(),
        "trace": trace.tolist(),
    }
    return common.record(
        model, data, blocks, "fisher-mc", gain=gain.tolist(), damping=values, damping_unit=damping_unit, seed=seed, extra=extra
    )
