r"""Spectral tail of the weights: the metric of AlphaPruning and AlphaLoRA. Needs no data.

For a weight ``W`` with squared singular values ``e_0 <= ... <= e_{N-1}`` the Hill estimator at index ``i`` is

    alpha_i = 1 + (N - i) / sum_{j >= i} log(e_j / e_i),

the maximum-likelihood exponent of a power law ``p(e) ~ e^-alpha`` above ``e_i``. The methods differ in the choice of ``i``.
A larger exponent means a lighter tail, a layer that learned less: it may be pruned more (orientation ``redundancy``).

Sources: ``haiquanlu/AlphaPruning`` (``lib/esd_utils.py``), ``morelife2017/alphalora`` (``expert_number.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..models.blocks import describe, weight_of
from ..models.provenance import computation, versions
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores

METHODS = ("peak", "mid")
LOWER_BOUNDS = ("published", "corrected")
BINS = 100


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


def _distance(values: np.ndarray, i: int, alpha: float) -> float:
    """Kolmogorov-Smirnov distance of the tail above ``values[i]`` to its power law (empirical CDF from zero)."""
    n = len(values) - i
    return float(np.max(np.abs(1.0 - (values[i:] / values[i]) ** (1.0 - alpha) - np.arange(n) / n)))


def alpha_mid(values: np.ndarray) -> float:
    """Hill exponent above the median eigenvalue, index ``int(N / 2)``."""
    return float(hill(values)[len(values) // 2])


def alpha_peak(values: np.ndarray, *, lower_bound: str = "published") -> float | None:
    """Hill exponent at the threshold near the histogram's peak that fits a power law best.

    The peak is the left edge ``x`` of the fullest of 100 equal bins of ``log10(e)``. Of the thresholds ``e_i`` with
    ``lo <= e_i <= 1.5 x`` the one with the smallest Kolmogorov-Smirnov distance is taken, the first on ties.

    Args:
        values: Eigenvalues, ascending, positive.
        lower_bound: ``published``: ``lo = log10(0.95 x)``, which compares a logarithm with an eigenvalue (no lower bound at
            all for ``x < 1.05``) but defines every published number. ``corrected``: ``lo = 0.95 x``, what was meant.

    Returns:
        The exponent, or None when no threshold is admissible.
    """
    if len(values) < 2 or values[0] == values[-1]:
        return None
    counts, edges = np.histogram(np.log10(values), bins=BINS)
    peak = 10.0 ** edges[int(np.argmax(counts))]
    low = np.log10(0.95 * peak) if lower_bound == "published" else 0.95 * peak
    exponents, best, smallest = hill(values), None, 1.0
    for i in np.flatnonzero((values[:-1] >= low) & (values[:-1] <= 1.5 * peak)):
        if 1.0 < exponents[i] < np.inf:
            distance = _distance(values, int(i), exponents[i])
            if distance < smallest:
                best, smallest = float(exponents[i]), distance
    return best


def _exponent(weight: torch.Tensor, method: str, lower_bound: str) -> float | None:
    """Exponent of one matrix; the mean over the copies of a fused tensor."""
    copies = weight if weight.ndim == 3 else weight[None]
    found = []
    for matrix in copies:
        values = eigenvalues(matrix)
        if len(values) >= 2:
            alpha = alpha_mid(values) if method == "mid" else alpha_peak(values, lower_bound=lower_bound)
            if alpha is not None and np.isfinite(alpha):
                found.append(alpha)
    return float(np.mean(found)) if found else None


def spectral_tail(
    model: nn.Module,
    data: CalibrationSet | None,
    blocks: Sequence[Block],
    *,
    method: str = "peak",
    lower_bound: str | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Mean power-law exponent of each block's weight spectra (unweighted over matrices, as AlphaPruning and AlphaLoRA do).

    Args:
        model: The dense model.
        data: Not read: the score is of the weights only.
        blocks: Blocks to score.
        method: ``peak`` (``alpha_peak``, the default of both sources) or ``mid``.
        lower_bound: ``published`` (default) or ``corrected``; see :func:`alpha_peak`. ``mid`` has none.
        progress: Called with blocks done and in total.

    Returns:
        A record with orientation ``redundancy``; ``extra["modules"]`` holds the exponent of each matrix.

    Raises:
        InvalidInput: An unknown method or bound.
        UnknownBlock: A matrix that the model does not have.
    """
    if method == "mid" and lower_bound is not None:
        raise InvalidInput(f"lower_bound is {lower_bound!r} with method='mid'.", "Only peak has one.", "Leave it out.")
    lower_bound = lower_bound or LOWER_BOUNDS[0]
    if method not in METHODS or lower_bound not in LOWER_BOUNDS:
        raise InvalidInput(
            f"method={method!r}, lower_bound={lower_bound!r}.",
            f"method is one of {METHODS}, lower_bound one of {LOWER_BOUNDS}.",
            "Choose one of those.",
        )
    exponents: dict[str, float | None] = {}
    gain, status = [], []
    tick = Steps(progress, len(blocks))
    for block in blocks:
        own = {m.name: _exponent(weight_of(model, m.name)[1], method, lower_bound) for m in block.modules}
        exponents.update(own)
        usable = [v for v in own.values() if v is not None]
        gain.append(float(np.mean(usable)) if usable else None)
        tick()
        status.append("ok" if len(usable) == len(own) else f"no admissible threshold in {len(own) - len(usable)} matrices")
    return Scores(
        estimator="spectral-tail",
        blocks=tuple(blocks),
        gain=(tuple(gain),),
        status=(tuple(status),),
        unit="power-law exponent",
        orientation="redundancy",
        extra={"modules": exponents, "method": method, "lower_bound": lower_bound if method == "peak" else None},
        model={**describe(model), "computation": computation(model)},
        data=data.describe() if data is not None else {},
        versions=versions(),
    )
