r"""Layer signals of other pruning methods: OWL, DLP, LSA (all from inputs of the dense model) and AlphaPruning (weights only).

**LSA** (ICLR 2026, BeiYazi0/LSA). From every row w of a matrix a fraction of the entries goes, inside blocks of consecutive
inputs, each time the one that adds least to the squared error of the row's output,

    s_j = w_j^2 H_jj + 2 w_j sum_{i gone} w_i H_ij,      H = sum over tokens of x x',

so that what is added up is exactly ``e' H e`` with e the entries that went. No weight is updated.

**AlphaPruning, AlphaLoRA** (``haiquanlu/AlphaPruning``, ``lib/esd_utils.py``; ``morelife2017/alphalora``). For a weight with
squared singular values ``e_0 <= ... <= e_{N-1}`` the Hill estimator at index ``i`` is

    alpha_i = 1 + (N - i) / sum_{j >= i} log(e_j / e_i),

the maximum-likelihood exponent of a power law ``p(e) ~ e^-alpha`` above ``e_i``. A larger exponent means a lighter tail, a
layer that learned less: it may be pruned more (orientation ``redundancy``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import CoverageError, InvalidInput
from ..execution.inputs import InputMoments, InputStatistics
from ..execution.loss import Data, FeatureSet, pad_right
from ..execution.modes import inference, prepared
from ..execution.sites import owners_of
from ..execution.walk import Walk
from ..models.blocks import is_conv1d, layers, transposed, weight_of
from ..progress import Progress, Steps
from ..records import Block, Module, check_fraction
from ..scores import Scores
from .curvature.common import record


@contextlib.contextmanager
def _input_power(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Collect ``sum over tokens x^2`` (float32, one value per input feature) of named matrices while the model runs."""
    power: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {"mask": None}
    handles = []

    def listen(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x, mask = inputs[0].detach().float(), state["mask"]
            if mask is not None and x.shape[:2] == mask.shape:
                x = x * mask[..., None].to(x)
            added = x.reshape(-1, x.shape[-1]).square().sum(0)
            power[name] = power[name] + added if name in power else added

        return hook

    try:
        for name in names:
            owner, _ = weight_of(model, name)
            if not isinstance(owner, nn.Linear) and not is_conv1d(owner):
                raise CoverageError(
                    f"The inputs of {name} ({type(owner).__name__}) are formed inside its module and cannot be seen.",
                    "The outlier ratio covers nn.Linear and Conv1D.",
                    f"Leave it out: --exclude '{owners_of([name])}' (exclude= in Python), or use --estimator fisher-gram.",
                )
            handles.append(owner.register_forward_pre_hook(listen(name)))
        yield power, state
    finally:
        for handle in handles:
            handle.remove()


def _ratio(model: nn.Module, block: Block, power: dict[str, torch.Tensor], multiple: float) -> float:
    """``100 * count(A > multiple * mean(A)) / size(A)`` over all matrices of a block together, ``A = |W| sqrt(power)``."""
    scores = _metric(model, block, power)
    mean = torch.stack([s.double().sum() for s in scores]).sum() / sum(s.numel() for s in scores)
    above = sum(int((s > float(multiple * mean)).sum()) for s in scores)
    return 100.0 * above / sum(s.numel() for s in scores)


def _metric(model: nn.Module, block: Block, power: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """``|W| sqrt(power)`` of the matrices of a block, flat."""
    scores = []
    for module in block.modules:
        owner, weight = weight_of(model, module.name)
        matrix = weight.detach().float().abs()
        matrix = matrix.t() if is_conv1d(owner) else matrix
        scores.append((matrix * power[module.name].sqrt()).flatten())
    return scores


def _arguments(
    data: Data, size: int, device: torch.device
) -> Iterator[tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]]:
    padded: Any = pad_right(data)
    if isinstance(padded, FeatureSet):
        yield from (((rows.to(device),), {}) for rows in padded.inputs.split(size))
    else:
        yield from (((), batch) for batch in padded.batches(size, device))


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

    ``multiple`` is ``M`` of the source, which uses 3 by default and recommends 5 for LLaMA-7B (the default here).

    Raises:
        CoverageError: A matrix whose input cannot be seen (fused experts), or that no token reached.
        InvalidInput: ``multiple`` is not positive.
    """
    if not multiple > 0 or not np.isfinite(multiple):
        raise InvalidInput(f"multiple is {multiple}.", "It must be positive.", "Use 3, 5 or 7, the values of the source.")
    power = _powers(model, data, blocks, batch_size, progress)
    return record(
        blocks,
        "outlier-ratio",
        gain=(tuple(_ratio(model, b, power, multiple) for b in blocks),),
        unit=f"percent of weights above {multiple:g} x the mean",
        orientation="gain",
        extra={"multiple": multiple},
    )


def mean_metric(
    model: nn.Module, data: Data, blocks: Sequence[Block], *, batch_size: int = 8, progress: Progress | None = None
) -> Scores:
    """DLP's importance ``1 - s_i / sum s``, ``s_i`` the mean of ``|W| sqrt(mean x^2)`` over a block (arXiv 2505.23807).

    Activations grow with depth and with them the metric: later blocks count as less important.

    Raises:
        CoverageError: A matrix whose input cannot be seen (fused experts), or that no token reached.
    """
    power = _powers(model, data, blocks, batch_size, progress)
    means = np.array([float(torch.cat(_metric(model, b, power)).double().mean()) for b in blocks])
    gain = 1.0 - means / means.sum()
    return record(blocks, "mean-metric", gain=(tuple(gain.tolist()),), unit="share", orientation="gain")


def _powers(
    model: nn.Module, data: Data, blocks: Sequence[Block], batch_size: int, progress: Progress | None
) -> dict[str, torch.Tensor]:
    """``sum x^2`` of the inputs of all matrices; see :func:`outlier_ratio` for what is refused."""
    names = [m.name for b in blocks for m in b.modules]
    tick = Steps(progress, data.samples)
    device = next(model.parameters()).device
    with prepared(model), torch.no_grad(), _input_power(model, names) as (power, state):
        for args, kwargs in _arguments(data, batch_size, device):
            state["mask"] = kwargs.get("attention_mask")
            model(*args, **kwargs)
            tick(len(args[0] if args else kwargs["input_ids"]))
    unseen = [n for n in names if n not in power]
    if unseen:
        raise CoverageError(f"No token reached {unseen[0]} ({len(unseen)} matrices).", "", "Use more calibration samples.")
    return power


def removal_error(weight: torch.Tensor, gram: torch.Tensor, share: float = 0.5, width: int = 128) -> float:
    """Squared error of the output that the greedy removal causes, summed over rows and tokens.

    Args:
        weight: ``(d_out, d_in)``.
        gram: ``sum x x'``, ``(d_in, d_in)``.
        share: Fraction of every block of a row that goes; whole entries, rounded down.
        width: Inputs of a block.

    >>> removal_error(torch.tensor([[1.0, 2.0]]), torch.eye(2), 0.5, 2)
    1.0
    """
    weight, gram = weight.float(), gram.float()
    scores = weight.square() * gram.diagonal()
    total = 0.0
    for start in range(0, weight.shape[1], width):
        stop = min(start + width, weight.shape[1])
        inside, within, own = weight[:, start:stop], gram[start:stop, start:stop], scores[:, start:stop]
        gone = torch.zeros_like(inside)
        for _ in range(int(share * (stop - start))):
            least = own.argmin(1, keepdim=True)
            total += float(own.gather(1, least).double().sum())
            value = inside.gather(1, least)
            own += 2.0 * inside * value * within[least[:, 0]]
            own.scatter_(1, least, torch.inf)
            gone.scatter_(1, least, value)
        scores[:, stop:] += 2.0 * weight[:, stop:] * (gone @ gram[start:stop, stop:])
    return total


def reconstruction(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    share: float = 0.5,
    width: int = 128,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Scores:
    """LSA's importance ``1 - s_k / sum s``, s_k the mean over a block's matrices of :func:`removal_error`, on the dense model.

    The model is walked layer by layer, one layer's second moments at a time. Blocks are layers, or single matrices.
    ``share`` of every ``width`` inputs goes; the published default is a half.

    Raises:
        InvalidInput: Data that are not tokens, or an option outside its domain.
        CoverageError: A matrix outside the layers, or that no token reached.
    """
    check_fraction(share, "share")
    if width < 1 or int(share * width) < 1:
        raise InvalidInput(f"width is {width}, share {share}.", "At least one entry of a block must go.", "Use width=128.")
    padded = pad_right(data)
    if not isinstance(padded, CalibrationSet):
        raise InvalidInput("The reconstruction error is made from tokens.", "", "Give a calibration set.")
    errors = _walked(model, padded, blocks, share, width, batch_size, progress)
    means = np.array([np.mean([errors[m.name] for m in b.modules]) for b in blocks])
    gain = 1.0 - means / means.sum() if means.sum() > 0 else np.ones(len(means))
    return record(
        blocks,
        "reconstruction",
        gain=(tuple(gain.tolist()),),
        unit="share",
        orientation="gain",
        extra={"share": share, "width": width},
    )


def _walked(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block],
    share: float,
    width: int,
    batch_size: int,
    progress: Progress | None,
) -> Mapping[str, float]:
    modules = [m for b in blocks for m in b.modules]
    names = [name for name, _ in layers(model)]
    outside = [m.name for m in modules if not any(m.name.startswith(f"{n}.") for n in names)]
    if outside:
        raise CoverageError(f"{outside[0]} lies outside the layers.", "Inputs are gathered layer by layer.", "Exclude it.")
    errors: dict[str, float] = {}
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        try:
            tick = Steps(progress, len(names))
            walk.capture()
            for i, name in enumerate(names):
                mine = [m for m in modules if m.name.startswith(f"{name}.")]
                if mine:
                    found = InputStatistics(model, mine, "gram")
                    found.run(walk)
                    errors |= {m.name: _error(model, m, found.found.get(m.name, []), share, width) for m in mine}
                if i + 1 < len(names):
                    walk.advance()
                tick()
        finally:
            walk.close()
    return errors


def _error(model: nn.Module, module: Module, statistics: Sequence[InputMoments], share: float, width: int) -> float:
    if not any(s.value is not None for s in statistics):
        raise CoverageError(f"No token reached {module.name}.", "", "Use more calibration samples.")
    owner, parameter = weight_of(model, module.name)
    weight = parameter.detach()
    flipped = weight.mT if transposed(owner) or is_conv1d(owner) else weight
    copies = list(flipped) if weight.ndim == 3 else [flipped]
    total = 0.0
    for matrix, statistic in zip(copies, statistics, strict=True):
        if statistic.value is not None:
            upper = statistic.value
            total += removal_error(matrix, upper.triu() + upper.triu(1).T, share, width)
    return total


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
            distance = _distance(values, int(i), exponents[i])
            if distance < smallest:
                best, smallest = float(exponents[i]), distance
    return best


def _exponent(weight: torch.Tensor, method: str) -> float | None:
    copies, found = weight if weight.ndim == 3 else weight[None], []
    for values in (eigenvalues(matrix) for matrix in copies):
        alpha = None if len(values) < 2 else alpha_mid(values) if method == "mid" else alpha_peak(values)
        if alpha is not None and np.isfinite(alpha):
            found.append(alpha)
    return float(np.mean(found)) if found else None


def spectral_tail(
    model: nn.Module,
    data: Data | None,
    blocks: Sequence[Block],
    *,
    method: Literal["peak", "mid"] = "peak",
    progress: Progress | None = None,
) -> Scores:
    """Mean power-law exponent of each block's weight spectra, unweighted over matrices; fused copies are averaged.

    ``method`` is ``peak`` (:func:`alpha_peak`, the default of both sources) or ``mid``, above the median eigenvalue.

    Returns:
        A record with orientation ``redundancy``; ``extra["modules"]`` holds the exponent of each matrix.
    """
    exponents: dict[str, float | None] = {}
    gain, status, tick = [], [], Steps(progress, len(blocks))
    for block in blocks:
        own = {m.name: _exponent(weight_of(model, m.name)[1], method) for m in block.modules}
        exponents.update(own)
        usable = [v for v in own.values() if v is not None]
        gain.append(float(np.mean(usable)) if usable else None)
        tick()
        status.append("ok" if len(usable) == len(own) else f"no admissible threshold in {len(own) - len(usable)} matrices")
    return record(
        blocks,
        "spectral-tail",
        gain=(tuple(gain),),
        status=(tuple(status),),
        unit="power-law exponent",
        orientation="redundancy",
        extra={"modules": exponents, "method": method},
    )
