"""Prune as the reference implementations do (locuslab/wanda, IST-DASLab/sparsegpt), to compare masks bit for bit.

They differ from the package in four ways: statistics are running means over single sequences, counts are off by one, ties go
along with the threshold, and SparseGPT factorises twice and inverts in between.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn

from layerbudget.compressors.base import Level, Treatment, find_treatment
from layerbudget.compressors.select import kth_value, smallest_per_row
from layerbudget.compressors.sparsegpt import COLUMNS
from layerbudget.compressors.treating import matrices
from layerbudget.data.calibration import CalibrationSet
from layerbudget.execution.inputs import InputMoments, InputStatistics
from layerbudget.execution.modes import inference
from layerbudget.execution.walk import Walk
from layerbudget.models.blocks import partition, weight_of
from layerbudget.plan import Plan


class RunningMoments(InputMoments):
    """Second moments as a mean over sequences, in the references' order of operations; of ``gram`` the full matrix."""

    sequences = 0

    def add(self, x: torch.Tensor) -> None:
        """Add the tokens of one sequence, shape ``(tokens, d_in)``."""
        columns, n = x.detach().to(torch.float32).T, self.sequences
        if self.value is None:
            shape = (len(columns),) if self.kind == "diagonal" else (len(columns), len(columns))
            self.value = torch.zeros(shape, dtype=torch.float32, device=x.device)
        self.value *= n / (n + 1)
        if self.kind == "diagonal":
            self.value += torch.norm(columns, p=2, dim=1) ** 2 / (n + 1)
        else:
            columns = math.sqrt(2 / (n + 1)) * columns
            self.value += columns.matmul(columns.t())
        self.sequences += 1


class RunningStatistics(InputStatistics):
    """Running means of what matrices are given."""

    moments = RunningMoments


def threshold_inclusive(scores: torch.Tensor, ratio: float) -> torch.Tensor:
    """Mark everything ``<=`` the entry at position ``int(entries * ratio)`` of the ascending order, with all its ties.

    >>> threshold_inclusive(torch.tensor([[3.0, 1.0], [2.0, 1.0]]), 0.25)
    tensor([[False,  True],
            [False,  True]])
    """
    return scores <= kth_value(scores.reshape(1, -1), int(scores.numel() * ratio) + 1)


def magnitude_mask(weight: torch.Tensor, ratio: float) -> torch.Tensor:
    """``prune_magnitude`` of locuslab/wanda: one entry more than the ratio says, and all ties."""
    return threshold_inclusive(weight.abs(), ratio)


def wanda_mask(scores: torch.Tensor, ratio: float) -> torch.Tensor:
    """``prune_wanda`` of locuslab/wanda: exactly ``int(d_in * ratio)`` in each row."""
    return smallest_per_row(scores, torch.full((len(scores),), int(scores.shape[1] * ratio)))


def reference_factor(gram: torch.Tensor, damping: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``inverse_factor`` returns, by two factorisations and an inverse; ``gram`` is the full matrix."""
    gram = gram.clone()
    dead = gram.diagonal() == 0
    gram[dead, dead] = 1
    gram.diagonal().add_(damping * torch.mean(torch.diag(gram)))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return torch.linalg.cholesky(inverse, upper=True), dead


def sparsegpt_weights(
    weight: torch.Tensor, factor: torch.Tensor, dead: torch.Tensor, ratio: float, columns: int = COLUMNS
) -> torch.Tensor:
    """``fasterprune`` of IST-DASLab/sparsegpt: the new weights, with one entry more in every block of columns, and all ties."""
    work = torch.empty(weight.shape[::-1], dtype=torch.float32, device=weight.device).copy_(weight.detach().T)
    work[dead] = 0
    for start in range(0, len(work), columns):
        stop = min(start + columns, len(work))
        block, upper = work[start:stop], factor[start:stop, start:stop]
        scores = block.T**2 / upper.diagonal()[None] ** 2
        scores[:, dead[start:stop]] = 0
        mask, errors = threshold_inclusive(scores, ratio).T, torch.empty_like(block)
        for j in range(stop - start):
            errors[j] = block[j] * mask[j] / upper[j, j]
            block[j].masked_fill_(mask[j], 0)
            block[j + 1 :].addr_(upper[j, j + 1 :], errors[j], alpha=-1)
        if stop < len(work):
            work[stop:] -= factor[start:stop, stop:].T @ errors
    return work.T


def reference_weights(treatment: Treatment, weight: torch.Tensor, prepared: Any, ratio: float) -> torch.Tensor:
    """The matrix ``(d_out, d_in)`` as the reference of a method leaves it; by magnitude where SparseGPT saw no token."""
    if treatment.name == "wanda":
        return weight.masked_fill(wanda_mask(treatment.order(weight, prepared), ratio), 0)
    if treatment.name == "sparsegpt" and prepared is not None:
        return sparsegpt_weights(weight, *prepared, ratio)
    return weight.masked_fill(magnitude_mask(weight, ratio), 0)


def prune_as_reference(
    model: nn.Module, plan: Plan, data: CalibrationSet | None, method: str, pattern: tuple[int, int] | None = None
) -> None:
    """Prune a model in place as the reference of a method does, one sequence at a time.

    Args:
        model: Any transformers model with one list of layers.
        plan: A sparsity plan, whose ratios count.
        data: Calibration tokens; not read for ``magnitude``.
        method: ``magnitude``, ``wanda`` or ``sparsegpt``.
        pattern: ``(zeroed, group)`` of every matrix, in the place of the plan's ratios.
    """
    treatment = find_treatment(method)
    known = {m.name: m for b in partition(model, "linear") for m in b.modules}
    ratios = {name: block.value for block in plan.blocks for name in block.modules}

    def change(name: str, statistics: list[InputMoments] | None) -> None:
        for i, view in enumerate(matrices(*weight_of(model, name))):
            moment = statistics[i].value if statistics else None
            prepared = None if moment is None else reference_factor(moment) if treatment.statistic == "gram" else moment
            if pattern is None:
                view.copy_(reference_weights(treatment, view, prepared, ratios[name]))
            else:
                view.copy_(treatment.apply(view, prepared, Level(pattern=pattern)))

    if treatment.statistic == "none":
        for name in ratios:
            change(name, None)
        return
    with inference(model), contextlib.closing(Walk(model, data, batch_size=1)) as walk:
        walk.capture()
        for i, (layer, _) in enumerate(walk.layers):
            names = [name for name in ratios if name.startswith(f"{layer}.")]
            statistics = RunningStatistics(model, [known[name] for name in names], treatment.statistic)
            statistics.run(walk)
            for name in names:
                change(name, statistics.found.get(name))
            if i + 1 < len(walk.layers):
                walk.advance()
