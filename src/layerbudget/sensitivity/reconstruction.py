r"""Reconstruction error of a greedy removal, the signal of LSA ("Layer-wise Sparsity Allocation", ICLR 2026, BeiYazi0/LSA).

From every row w of a matrix a fraction of the entries goes, inside blocks of consecutive inputs, each time the one that adds
least to the squared error of the row's output,

    s_j = w_j^2 H_jj + 2 w_j sum_{i gone} w_i H_ij,      H = sum over tokens of x x',

so that what is added up is exactly ``e' H e`` with e the entries that went. No weight is updated. The importance of a layer is
``1 - s / sum s``, s the mean over its matrices; matrices can be ranked by themselves as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import CoverageError, InvalidInput
from ..execution.inputs import InputMoments, InputStatistics
from ..execution.loss import Data, pad_right
from ..execution.modes import inference
from ..execution.walk import Walk
from ..models.blocks import is_conv1d, layers, transposed, weight_of
from ..progress import Progress, Steps
from ..records import Block, Module, check_fraction
from ..scores import Scores
from .curvature.common import check_inputs, record


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

    Args:
        model: The dense model; walked layer by layer, one layer's second moments at a time.
        data: Calibration tokens; padding is left out.
        blocks: Layers, or single matrices.
        share: Fraction that goes; the published default is a half.
        width: Inputs of a block.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Raises:
        InvalidInput: Data that are not tokens, or an option outside its domain.
        CoverageError: A matrix outside the layers, or that no token reached.
    """
    check_inputs(data, batch_size)
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
        model, data, blocks, "reconstruction", gain=(tuple(gain.tolist()),), unit="share", orientation="gain",
        extra={"share": share, "width": width},
    )  # fmt: skip


def _walked(
    model: nn.Module, data: CalibrationSet, blocks: Sequence[Block], share: float, width: int, batch_size: int,
    progress: Progress | None,
) -> Mapping[str, float]:  # fmt: skip
    """Errors by matrix."""
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
    """Of one matrix, its copies added up."""
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
