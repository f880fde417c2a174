r"""Layer signals of other pruning methods: OWL (inputs of the dense model) and AlphaPruning (weights only).

**AlphaPruning, AlphaLoRA** (``haiquanlu/AlphaPruning``, ``lib/esd_utils.py``; ``morelife2017/alphalora``). For a weight with
squared singular values ``e_0 <= ... <= e_{N-1}`` the Hill estimator at index ``i`` is

    alpha_i = 1 + (N - i) / sum_{j >= i} log(e_j / e_i),

the maximum-likelihood exponent of a power law ``p(e) ~ e^-alpha`` above ``e_i``. A larger exponent means a lighter tail, a
layer that learned less: it may be pruned more (orientation ``redundancy``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..compressors.treating import matrices
from ..errors import CoverageError, InvalidInput
from ..execution.inputs import InputStatistics
from ..execution.loss import Data, unlabelled
from ..execution.modes import inference
from ..execution.sites import refuse_direct
from ..models.blocks import weight_of
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .curvature.common import record


def outlier_ratio(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    multiple: float = 5.0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Scores:
    """Percentage of weights whose Wanda score exceeds ``multiple`` times the block's mean score, on the dense model.

    ``A = |W| * sqrt(sum over tokens x^2)``; the matrices of a block are pooled, the comparison is strict. A common factor of
    the activation statistic (the number of sequences) cancels. More outliers: protect more (orientation ``gain``).

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``multiple``: ``M`` of the source, which uses 3 by default and recommends 5 for LLaMA-7B (the default here).
    """
    if not multiple > 0 or not np.isfinite(multiple):
        raise InvalidInput(f"multiple is {multiple}.", "It must be positive.", "Use 3, 5 or 7, the values of the source.")
    power, gain = _powers(model, data, blocks, batch_size, progress), []
    for block in blocks:
        scores = _metric(model, block, power)
        mean = torch.stack([s.double().sum() for s in scores]).sum() / sum(s.numel() for s in scores)
        above = sum(int((s > float(multiple * mean)).sum()) for s in scores)
        gain.append(100.0 * above / sum(s.numel() for s in scores))
    return record(
        blocks,
        "outlier-ratio",
        gain=(tuple(gain),),
        unit=f"percent of weights above {multiple:g} x the mean",
        orientation="gain",
        extra={"multiple": multiple},
    )


def _powers(
    model: nn.Module, data: Data, blocks: Sequence[Block], batch_size: int, progress: Progress | None
) -> dict[str, torch.Tensor]:
    """``sum over tokens x^2`` of the inputs of all matrices, ``(d_in,)`` float32, from one forward."""
    refuse_direct(model, blocks, "its inputs are formed inside its module")
    modules, tick = [m for b in blocks for m in b.modules], Steps(progress, data.samples)
    statistics = InputStatistics(model, modules, "diagonal")
    with inference(model):
        for batch in unlabelled(model, data, batch_size):
            with statistics.listening(batch.kwargs.get("attention_mask")):
                model(*batch.args, **batch.kwargs)
            tick(batch.size)
    power = {name: moments.value for name, (moments,) in statistics.found.items() if moments.value is not None}
    unseen = [m.name for m in modules if m.name not in power]
    if unseen:
        raise CoverageError(f"No token reached {unseen[0]} ({len(unseen)} matrices).", "", "Use more calibration samples.")
    return power


def _metric(model: nn.Module, block: Block, power: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """``|W| sqrt(power)`` of the matrices of a block, flat."""
    weights = {m.name: matrices(*weight_of(model, m.name))[0] for m in block.modules}
    return [(w.float().abs() * power[name].sqrt()).flatten() for name, w in weights.items()]


def eigenvalues(weight: torch.Tensor) -> np.ndarray:
    """Squared singular values of a matrix in ascending order, float64, without those that are rounding noise.

    A pruned or rank-deficient weight has zeros in its spectrum whose logarithms would spoil every exponent; values below
    ``(eps * max(shape) * sigma_max)^2`` of float32 are dropped. Computed in float32 as the sources do.
    """
    sigma = torch.linalg.svdvals(weight.detach().to(device="cpu", dtype=torch.float32)).double().numpy()
    floor = np.finfo(np.float32).eps * max(weight.shape) * sigma.max(initial=0.0)
    return np.sort(sigma[sigma > floor] ** 2)


def hill(values: np.ndarray) -> np.ndarray:
    """Hill exponents ``alpha_i`` for every starting index, shape ``(N,)``; infinite where all larger values are equal.

    >>> bool(abs(hill(np.exp(np.arange(4.0)))[0] - (1 + 4 / (0 + 1 + 2 + 3))) < 1e-12)
    True
    """
    logs = np.log(values)
    count = np.arange(len(values), 0, -1)
    spread = np.cumsum(logs[::-1])[::-1] - count * logs
    with np.errstate(divide="ignore"):
        return 1.0 + count / np.maximum(spread, 0.0)


def alpha_peak(values: np.ndarray) -> float | None:
    """Hill exponent at the threshold near the histogram's peak that fits a power law best; None where none is admissible.

    The peak is the left edge ``x`` of the fullest of 100 equal bins of ``log10(e)``. Of the thresholds ``e_i`` with
    ``log10(0.95 x) <= e_i <= 1.5 x`` the one with the smallest Kolmogorov-Smirnov distance is taken, the first on ties. The
    lower bound compares a logarithm with an eigenvalue, and so defines every published number.
    """
    if len(values) < 2 or values[0] == values[-1]:
        return None
    counts, edges = np.histogram(np.log10(values), bins=100)
    peak = 10.0 ** edges[int(np.argmax(counts))]
    exponents, best, smallest = hill(values), None, 1.0
    for i in np.flatnonzero((values[:-1] >= np.log10(0.95 * peak)) & (values[:-1] <= 1.5 * peak)):
        if 1.0 < exponents[i] < np.inf:
            n = len(values) - i  # distance of the tail above values[i] to its power law, the empirical CDF from zero
            distance = float(np.max(np.abs(1.0 - (values[i:] / values[i]) ** (1.0 - exponents[i]) - np.arange(n) / n)))
            if distance < smallest:
                best, smallest = float(exponents[i]), distance
    return best


def spectral_tail(model: nn.Module, data: Data | None, blocks: Sequence[Block], *, progress: Progress | None = None) -> Scores:
    """Mean power-law exponent (:func:`alpha_peak`) of each block's weight spectra, unweighted over matrices.

    Copies of fused experts are averaged.

    Returns:
        A record with orientation ``redundancy``; ``extra["modules"]`` holds the exponent of each matrix.
    """
    exponents: dict[str, float | None] = {}
    gain, status, tick = [], [], Steps(progress, len(blocks))
    for block in blocks:
        usable = []
        for m in block.modules:
            peaks = [alpha_peak(eigenvalues(matrix)) for matrix in matrices(*weight_of(model, m.name))]
            there = [a for a in peaks if a is not None]
            usable += [float(np.mean(there))] if there else []
            exponents[m.name] = usable[-1] if there else None
        missing = len(block.modules) - len(usable)
        gain.append(float(np.mean(usable)) if usable else None)
        status.append(f"no admissible threshold in {missing} matrices" if missing else "ok")
        tick()
    return record(
        blocks,
        "spectral-tail",
        gain=(tuple(gain),),
        status=(tuple(status),),
        unit="power-law exponent",
        orientation="redundancy",
        extra={"modules": exponents},
    )
