"""Outlier ratio: the layer signal of OWL ("Outlier Weighed Layerwise sparsity", ``luuyin/OWL``, ``lib/prune_all.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CoverageError, InvalidInput
from ..execution.loss import Data, FeatureSet, pad_right
from ..execution.modes import prepared
from ..execution.sites import owners_of
from ..models.blocks import is_conv1d, weight_of
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .curvature.common import check_inputs, record


@contextlib.contextmanager
def _input_power(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Collect ``sum over tokens x^2`` (float32, one value per input feature) of named matrices while the model runs.

    ``state["mask"]`` holds the mask of the running batch: padding adds nothing.
    """
    power: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {"mask": None}
    handles = []

    def listen(name: str) -> Callable[..., None]:
        """Hook that adds what one matrix is given."""

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


def _feed(data: Data, size: int, device: torch.device) -> Iterator[tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]]:
    """Model arguments, batch by batch; labels are not needed."""
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

    Args:
        model: The dense model.
        data: Calibration set; padding is left out.
        blocks: Blocks to score.
        multiple: ``M`` of the source, which uses 3 by default and recommends 5 for LLaMA-7B (the default here).
        batch_size: Sequences per forward pass; the result does not depend on it.
        progress: Called with sequences done and in total.

    Raises:
        CoverageError: A matrix whose input cannot be seen (fused experts), or that no token reached.
        InvalidInput: ``multiple`` is not positive.
    """
    if not multiple > 0 or not np.isfinite(multiple):
        raise InvalidInput(f"multiple is {multiple}.", "It must be positive.", "Use 3, 5 or 7, the values of the source.")
    power = _run(model, data, blocks, batch_size, progress)
    return record(
        model, data, blocks, "outlier-ratio", gain=(tuple(_ratio(model, b, power, multiple) for b in blocks),),
        unit=f"percent of weights above {multiple:g} x the mean", orientation="gain", extra={"multiple": multiple},
    )  # fmt: skip


def mean_metric(
    model: nn.Module, data: Data, blocks: Sequence[Block], *, batch_size: int = 8, progress: Progress | None = None
) -> Scores:
    """DLP's importance ``1 - s_i / sum s``, ``s_i`` the mean of ``|W| sqrt(mean x^2)`` over a block (arXiv 2505.23807).

    Activations grow with depth and with them the metric: later blocks count as less important.

    Args:
        model: The dense model.
        data: Calibration set; padding is left out.
        blocks: Blocks to score.
        batch_size: Sequences per forward pass; the result does not depend on it.
        progress: Called with sequences done and in total.

    Raises:
        CoverageError: A matrix whose input cannot be seen (fused experts), or that no token reached.
    """
    power = _run(model, data, blocks, batch_size, progress)
    means = np.array([float(torch.cat(_metric(model, b, power)).double().mean()) for b in blocks])
    gain = 1.0 - means / means.sum()
    return record(model, data, blocks, "mean-metric", gain=(tuple(gain.tolist()),), unit="share", orientation="gain")


def _run(
    model: nn.Module, data: Data, blocks: Sequence[Block], batch_size: int, progress: Progress | None
) -> dict[str, torch.Tensor]:
    """``sum x^2`` of the inputs of all matrices; see :func:`outlier_ratio` for what is refused."""
    check_inputs(data, batch_size)
    names = [m.name for b in blocks for m in b.modules]
    tick = Steps(progress, data.samples)
    device = next(model.parameters()).device
    with prepared(model), torch.no_grad(), _input_power(model, names) as (power, state):
        for args, kwargs in _feed(data, batch_size, device):
            state["mask"] = kwargs.get("attention_mask")
            model(*args, **kwargs)
            tick(len(args[0] if args else kwargs["input_ids"]))
    unseen = [n for n in names if n not in power]
    if unseen:
        raise CoverageError(f"No token reached {unseen[0]} ({len(unseen)} matrices).", "", "Use more calibration samples.")
    return power
