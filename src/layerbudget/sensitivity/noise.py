"""How much of a gain is noise, from Gram matrices ``K = SS'`` of per-sequence gradients and the sequences' token counts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import kendalltau

from ..errors import InvalidInput
from ..scores import Scores

AGREE = 0.5  # Kendall's tau of gain and excess, below which they rank otherwise
_MOST = 16  # times as many sequences as there were: more is no advice


class Spectrum:
    """Eigendecomposition ``K/N = U diag(mu) U'`` of the Gram matrix ``(n, n)`` of one block, N target tokens in all."""

    def __init__(self, gram: np.ndarray, tokens: float) -> None:
        self.tokens, self.samples = float(tokens), len(gram)
        mu, self.vectors = np.linalg.eigh((gram + gram.T) / (2 * self.tokens))
        self.values = mu.clip(0.0)
        self.projection = (self.vectors.sum(0)) ** 2

    @property
    def largest(self) -> float:
        """Largest eigenvalue of the curvature."""
        return float(self.values[-1])

    @property
    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self.values.sum())

    def gain(self, tau: float) -> float:
        """``(1/N) sum_j (u_j'1)^2 mu_j/(tau+mu_j)``."""
        return float((self.projection * self.values / (tau + self.values)).sum() / self.tokens)

    def null(self, tau: float) -> tuple[float, float]:
        """Mean and standard deviation of the gain under random signs of the gradients.

        Flipping the sign of a gradient leaves the curvature as it is and removes any mean signal:
        ``E zeta^2 = d_eff/N``, ``Var zeta^2 = 2 (|M|_F^2 - sum_i M_ii^2)``, ``M = (1/N) U diag(mu/(tau+mu)) U'``.
        """
        f = self.values / (tau + self.values) / self.tokens
        diagonal = (self.vectors**2) @ f
        variance = 2.0 * max(float((f**2).sum() - (diagonal**2).sum()), 0.0)
        return float(f.sum()), variance**0.5


def gain_of(gram: np.ndarray, weights: np.ndarray, tokens: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Gain of a weighted sample (bootstrap counts, halves) at several dampings.

    ``zeta^2 = (1/N)(|w|^2 - tau w'(tau I + K~/N)^-1 w)`` with ``K~ = D K D``, ``D = diag(w)``, ``w_i`` the square root of
    the multiplicity of sequence i.
    """
    keep = weights > 0
    w, n = np.sqrt(weights[keep]), float((weights * tokens).sum())
    k = gram[np.ix_(keep, keep)] * np.outer(w, w) / n
    stack = k[None] + tau[:, None, None] * np.eye(len(w))
    solved = np.linalg.solve(stack, np.broadcast_to(w[:, None], (len(tau), len(w), 1)))[..., 0]
    return ((w @ w) - tau * (solved @ w)) / n


def floor_of(gram: np.ndarray, keep: np.ndarray, tokens: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Noise floor ``d_eff/N`` of a subset of the sequences at several dampings."""
    n = float(tokens[keep].sum())
    mu = np.linalg.eigvalsh(gram[np.ix_(keep, keep)] / n).clip(0.0)
    return (mu / (mu + tau[:, None])).sum(1) / n


def halves(n: int, seed: int, count: int) -> np.ndarray:
    """``count`` random halves of ``n`` sequences as masks, ``(count, n)``."""
    rng = np.random.default_rng((seed, 1))
    masks = np.zeros((count, n), dtype=bool)
    for row in masks:
        row[rng.permutation(n)[: n // 2]] = True
    return masks


def rank_stability(values: np.ndarray, others: np.ndarray) -> float:
    """Mean Kendall tau of the block rankings of two sets of half-samples, each ``(replicates, K)``."""
    if values.shape[1] < 2:
        return float("nan")
    taus = [kendalltau(a, b).statistic for a, b in zip(values, others, strict=True)]
    taus = [t for t in taus if np.isfinite(t)]
    return float(np.mean(taus)) if taus else float("nan")


def samples_needed(signal: np.ndarray, error: np.ndarray, n: int) -> float:
    """Sequences at which the top third separates from the bottom third by two standard errors.

    The standard error falls as ``1/sqrt(n)``: ``n_needed = n (2 e / gap)^2``, ``e`` the error of the difference of the two
    third means. Infinite when the thirds do not differ.
    """
    if len(signal) < 2:
        return float("inf")
    third = max(len(signal) // 3, 1)
    order = np.argsort(signal)
    low, high = order[:third], order[-third:]
    gap = float(signal[high].mean() - signal[low].mean())
    e = float(np.sqrt((error[high] ** 2).sum() + (error[low] ** 2).sum()) / third)
    return float("inf") if gap <= 0 else max(2.0, n * (2 * e / gap) ** 2)


def verdict(n: int, z: np.ndarray, share: float, stability: float, needed: float, agreement: float) -> str:
    """Return a sentence on whether the ranking can be trusted.

    Args:
        n: Sequences.
        z: z-scores of the blocks, ``(K,)``.
        share: Of the mean gain that is noise floor.
        stability: Kendall's tau of the excess gains of halves.
        needed: :func:`samples_needed`.
        agreement: Kendall's tau between raw gain and excess.

    >>> verdict(64, np.array([5.0, 4.0, 0.1]), 0.3, 0.8, 20.0, 1.0)
    'the ranking of the blocks is usable: noise makes up 30 % of the gain, and 2 of 3 blocks stand above it (z > 2).'
    """
    above, usable = int((z > 2).sum()), _usable(z, stability)
    if len(z) < 2 or not np.isfinite(stability):
        trust = "there is no ranking to judge"
    elif not usable and needed > n:
        trust = f"the top third of the blocks cannot be told from the bottom third ({_wanted(n, needed)})"
    elif agreement < AGREE:
        trust = "the gain ranks the blocks by their noise, and what stands above it ranks them otherwise (score --excess)"
    elif usable:
        trust = "the ranking of the blocks is usable"
    else:
        trust = "the top third of the blocks can be told from the bottom third, single places cannot"
    return f"{trust}: noise makes up {100 * share:.0f} % of the gain, and {above} of {len(z)} blocks stand above it (z > 2)."


def _wanted(n: int, needed: float) -> str:
    """How many sequences a ranking needs, in words; what to take where they are too many."""
    if not np.isfinite(needed):
        return "no number of sequences would do: take uniform"
    clause = f"about {math.ceil(needed):,} sequences would do"
    return clause if needed <= _MOST * n else f"{clause}, which are too many: take uniform"


def remedy(scores: Scores) -> str:
    """Return what a ranking that cannot be trusted needs: ``excess``, a number of ``samples``, ``uniform`` where none would do.

    Empty where the ranking can be used, and where the estimator does not say it. It is that of the verdict.
    """
    if "samples_needed" not in scores.extra:
        return ""
    z, _, stability, needed, agreement = _middle(scores)
    many = int(scores.data.get("samples", 0))
    if len(z) < 2 or not np.isfinite(stability):
        return ""
    if needed > many and not _usable(z, stability):
        return str(math.ceil(needed)) if needed <= _MOST * many else "uniform"
    return "excess" if agreement < AGREE and not scores.extra.get("floor_subtracted") else ""


def _usable(z: np.ndarray, stability: float) -> bool:
    return stability >= 0.6 and int((z > 2).sum()) >= len(z) / 2


def _middle(scores: Scores) -> tuple[np.ndarray, float, float, float, float]:
    """Return the numbers of a verdict: z, share of noise, stability, sequences needed, agreement of gain and excess."""
    names = ("noise_share", "rank_stability_excess", "samples_needed", "rank_agreement")
    read = [list(scores.extra[name]) for name in names]
    middle = len(read[0]) // 2
    z = np.asarray(scores.extra["z"], dtype=float)[middle]
    return (z, *(math.inf if row[middle] is None else float(row[middle]) for row in read))  # type: ignore[return-value]


def _falling(values: np.ndarray) -> list[float]:
    """Nearest nonnegative row that never rises."""
    return isotonic_regression(values, increasing=False).x.clip(0.0).tolist()


def subtract_floor(scores: Scores) -> Scores:
    """Same record with the excess over the noise floor as gain; entries below the floor weigh nothing in a plan.

    Gains of every further rank lose what noise alone gives each rank, and are pooled where they then rise.
    """
    floors = [[f for f in row if f is not None] for row in scores.noise_floor]
    if any(len(row) < len(scores.blocks) for row in floors):
        raise InvalidInput(
            f"{scores.estimator} has no noise floor to subtract.",
            "fisher-gram, fisher-diagonal, kfac, ekfac and rank-gain have one.",
            "Score with estimator='fisher-gram'.",
        )
    gain = tuple(
        tuple(None if g is None else g - f for g, f in zip(row, floor, strict=True))
        for row, floor in zip(scores.gain, floors, strict=True)
    )
    extra = {**scores.extra, "floor_subtracted": True}
    if "samples_needed" in extra:  # the verdict is of what is written: the ranking by what stands above the noise
        extra["verdict"] = verdict(int(scores.data.get("samples", 0)), *_middle(scores)[:4], 1.0)
    if "increments" in extra:
        extra["increments"] = [
            [_falling(np.subtract(row, lower)) for row, lower in zip(rows, lowers, strict=True)]
            for rows, lowers in zip(extra["increments"], extra.pop("increments_floor"), strict=True)
        ]
    return dataclasses.replace(scores, gain=gain, noise_floor=(), extra=extra)


def summarise(
    grams: np.ndarray, tokens: np.ndarray, tau: np.ndarray, *, seed: int = 0, replicates: int = 50, splits: int = 8
) -> dict[str, Any]:
    """Return the gains of Gram matrices at absolute dampings, with everything said about their noise.

    Args:
        grams: ``(K, n, n)``.
        tokens: Target tokens of every sequence, ``(n,)``.
        tau: Absolute dampings, ``(D, K)``.
        seed: Of the bootstrap and the halves.
        replicates: Of the bootstrap.
        splits: Random splits of the sequences into halves.

    Returns:
        ``gain``, ``floor``, ``null_deviation``, ``standard_error``, ``excess`` and ``z`` of shape ``(D, K)``; per damping
        ``rank_stability`` (halves, by gain), ``rank_stability_excess``, ``rank_agreement`` (gain against excess),
        ``noise_share`` and ``samples_needed``; the ``verdict`` at the middle damping.
    """
    d, k = tau.shape
    n, total = len(tokens), float(tokens.sum())
    out: dict[str, Any] = {key: np.zeros((d, k)) for key in ("gain", "floor", "null_deviation", "standard_error")}
    weights = np.random.default_rng((seed, 2)).multinomial(n, np.full(n, 1.0 / n), size=replicates)
    weights = weights[(weights > 0).sum(1) > 1]
    masks = halves(n, seed, splits)
    half = np.zeros((2, 2, splits, d, k))
    for j, gram in enumerate(grams):
        spectrum = Spectrum(gram, total)
        for i in range(d):
            out["gain"][i, j] = spectrum.gain(tau[i, j])
            out["floor"][i, j], out["null_deviation"][i, j] = spectrum.null(tau[i, j])
        drawn = np.array([gain_of(gram, w, tokens, tau[:, j]) for w in weights])
        out["standard_error"][:, j] = drawn.std(0, ddof=1) if len(drawn) > 1 else np.nan
        for s, mask in enumerate(masks):
            for side, keep in enumerate((mask, ~mask)):
                half[0, side, s, :, j] = gain_of(gram, keep.astype(float), tokens, tau[:, j])
                half[1, side, s, :, j] = half[0, side, s, :, j] - floor_of(gram, keep, tokens, tau[:, j])
    return {**out, **_judged(out, n, half)}


def _judged(out: dict[str, np.ndarray], n: int, half: np.ndarray) -> dict[str, Any]:
    """Excess, signal and verdict from gains and floors, of all sequences and of halves."""
    excess = out["gain"] - out["floor"]
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(out["null_deviation"] > 0, excess / out["null_deviation"], 0.0)
    raw, stability = ([rank_stability(h[0, :, i], h[1, :, i]) for i in range(len(excess))] for h in half)
    needed = [samples_needed(excess[i], out["standard_error"][i], n) for i in range(len(excess))]
    middle = len(excess) // 2
    share = [float(f.sum() / max(g.sum(), 1e-300)) for f, g in zip(out["floor"], out["gain"], strict=True)]
    agreement = [rank_stability(g[None], e[None]) for g, e in zip(out["gain"], excess, strict=True)]
    return {
        "excess": excess,
        "z": z,
        "rank_stability": raw,
        "rank_stability_excess": stability,
        "rank_agreement": agreement,
        "noise_share": share,
        "samples_needed": needed,
        "verdict": verdict(n, z[middle], share[middle], stability[middle], needed[middle], agreement[middle]),
    }
