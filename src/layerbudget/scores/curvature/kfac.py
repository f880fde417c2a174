"""K-FAC and EK-FAC, one Kronecker-factored curvature per weight matrix.

K-FAC (expand setting): ``C ~ G (x) A`` with ``A = mean_t a_t a_t'`` over positions and ``G = (1/N) sum_t b_t b_t'``, ``b`` the
output gradients of the summed loss under labels drawn from the model (empirical labels on request). Damping is exact, in the
eigenbasis: with ``A = Q_A diag(l_A) Q_A'``, ``G = Q_G diag(l_G) Q_G'`` and ``M = Q_G' dW Q_A``,

    zeta^2(tau) = sum_ij M_ij^2 / (L_ij + tau),   L = l_G l_A'  (K-FAC),   L = (1/N) sum_i (Q_G' S_i Q_A)^2  (EK-FAC),

S_i being sampled-label gradients of sequence i (George et al. 2018). Gains of a block add over its matrices: coupling between
matrices is dropped. Fused experts have no hooks and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from ...errors import InvalidInput
from ...records import Block
from ...running.loss import Data
from ..record import Scores
from . import common
from .kronecker import Kronecker, build


def score_kfac(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    seed: int | None = None,
    progress: common.Progress | None = None,
    labels: str = "sampled",
    draws: int | None = None,
    groups: int = 4,
) -> Scores:
    """Gain under K-FAC with exact damping.

    The gradient is kept in J groups of sequences. The noise floor is ``sum_j (g_j - g)'(C + tau I)^-1 (g_j - g) / (J(J-1))``
    over their mean gradients, the standard error a jackknife over them, both with the curvature held fixed.

    Args:
        model: The model.
        data: The calibration set.
        blocks: K blocks.
        damping: One or several; ``None`` for the default sweep.
        damping_unit: ``max`` (of a block's largest Kronecker eigenvalue), ``mean`` or ``absolute``.
        batch_size: Sequences per pass.
        seed: Of the sampled labels, which depend on a sequence's content and not on its place; 0 by default.
        progress: Called with sequences done and in total.
        labels: ``sampled`` from the model (the Fisher), or the ``data``'s own (the empirical Fisher).
        draws: Draws of sampled labels per token, 1 by default.
        groups: Groups of sequences.

    Returns:
        Gains per block; ``extra['by_module']`` has them per weight matrix.

    Raises:
        CoverageError: Fused experts, or a weight matrix that was never seen.
        InvalidInput: An argument outside its domain, or a seed or draws where no label is sampled.
    """
    return _score(model, data, blocks, damping, damping_unit, batch_size, seed, progress, labels, draws, groups, False)


def score_ekfac(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    seed: int | None = None,
    progress: common.Progress | None = None,
    labels: str = "sampled",
    draws: int | None = None,
    groups: int = 4,
) -> Scores:
    """Gain under EK-FAC: as :func:`score_kfac`, with eigenvalues replaced by exact second moments.

    Raises:
        CoverageError: Fused experts, or a weight matrix that was never seen.
        InvalidInput: As :func:`score_kfac`.
    """
    return _score(model, data, blocks, damping, damping_unit, batch_size, seed, progress, labels, draws, groups, True)


def _score(
    model: nn.Module, data: Data, blocks: Sequence[Block], damping: float | Sequence[float] | None, damping_unit: str,
    batch_size: int, seed: int | None, progress: common.Progress | None, labels: str, draws: int | None, groups: int,
    corrected: bool,
) -> Scores:  # fmt: skip
    common.check_arguments(damping, damping_unit, data, batch_size)
    if labels == "data" and (seed is not None or draws is not None):
        raise InvalidInput(
            f"{'seed' if seed is not None else 'draws'} was given with labels='data'.",
            "Only sampled labels read it.",
            "Leave it out.",
        )
    seed, draws = seed or 0, 1 if draws is None else draws
    tick = common.Ticker(progress, data.samples * (2 if corrected else 1))
    kronecker = build(
        model, data, blocks, batch_size=batch_size, seed=seed, labels=labels, draws=draws, groups=groups, corrected=corrected,
        tick=tick,
    )  # fmt: skip
    largest = np.array([max(float(kronecker.eigenvalues[m.name].max()) for m in b.modules) for b in blocks])
    trace = np.array([sum(float(kronecker.eigenvalues[m.name].sum()) for m in b.modules) for b in blocks])
    mean = trace / np.array([b.numel for b in blocks])
    values, tau = common.resolve_damping(damping, damping_unit, largest, mean)
    gain, floor, error = (np.zeros_like(tau) for _ in range(3))
    by_module: dict[str, list[float]] = {}
    for k, block in enumerate(blocks):
        left_out: Any = 0.0
        for m in block.modules:
            whole, noise, jack = _quadratic_forms(kronecker, m.name, tau[:, k])
            by_module[m.name] = whole.tolist()
            gain[:, k] += whole
            floor[:, k] += noise
            left_out = left_out + jack
        count = left_out.shape[1]
        error[:, k] = np.sqrt((count - 1) * left_out.var(1)) if count > 1 else np.nan
        floor[:, k] = floor[:, k] if count > 1 else np.nan
    extra = {
        "curvature": f"{'EK-FAC' if corrected else 'K-FAC'}, {labels} labels"
        + (f", {draws} draws" if labels == "sampled" else ""),
        "tokens": int(kronecker.tokens),
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": largest.tolist(),
        "mean_eigenvalue": mean.tolist(),
        "trace": trace.tolist(),
        "excess": (gain - floor).tolist(),
        "by_module": by_module,
    }
    return common.record(
        model, data, blocks, "ekfac" if corrected else "kfac", gain=gain.tolist(), damping=values, damping_unit=damping_unit,
        standard_error=error.tolist(), noise_floor=floor.tolist(), seed=seed, extra=extra,
    )  # fmt: skip


def _quadratic_forms(kronecker: Kronecker, name: str, tau: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gain ``(D,)``, noise floor ``(D,)`` and leave-one-group-out gains ``(D, J)`` of one matrix."""
    parts = kronecker.rotated(name, kronecker.gradients[name]) / kronecker.tokens
    count = len(parts)
    whole = parts.sum(0)
    spread = parts - whole / count
    left_out = (whole - parts) * (count / max(count - 1, 1))
    whole2, spread2, left2 = whole.square(), spread.square().sum(0), left_out.square()
    gain, floor, jack = [], [], []
    for t in tau:
        inverse = 1.0 / (kronecker.eigenvalues[name] + float(t))
        gain.append(float((whole2 * inverse).sum()))
        floor.append(float((spread2 * inverse).sum()) * count / max(count - 1, 1))
        jack.append((left2 * inverse).sum((1, 2)).tolist())
    return np.array(gain), np.array(floor), np.array(jack)
