r"""Pruners that rank entries and leave the others as they are.

* **magnitude**: the smallest weights of each matrix go.
* **wanda**: in every output row, the smallest ``|W_ij| * ||X_j||`` (Sun et al., arXiv 2306.11695).
* **gradient** (as GBLM-Pruner, arXiv 2311.04902, and Wanda++, arXiv 2503.04992): in every output row, the smallest::

      |W_ij| ( ||x_j|| / X + alpha G_ij / G ),      G_ij = ( sum_s (dl_s/dW_ij)^2 )^(1/2),

  with the loss l_s of sequence s on the *dense* model, and X, G the root mean squares of both factors over the matrix: alpha is
  a share and has no unit (the sources add the two as they are, with alpha = 100 for their normalisation of the gradients).
  Wanda++ takes gradients of single layers' outputs, GBLM-Pruner of the model's loss, as here.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..execution.backward import Accumulator, feed
from ..execution.processes import ProcessGroup
from ..execution.sites import Site
from ..models.blocks import partition
from ..records import Block
from .base import Level, Treatment
from .select import (
    smallest,
    smallest_evenly,
    smallest_per_group,
    smallest_per_group_of_rows,
    smallest_per_row,
    spread_over_rows,
    threshold_inclusive,
    zeroed,
)

_CHUNK = 64 << 20  # entries of the gradients of single sequences at a time


class _Ranking(Treatment):
    """The entries with the smallest scores become zero."""

    nested = True

    @abc.abstractmethod
    def order(self, weight: torch.Tensor, prepared: Any) -> torch.Tensor:
        """See :meth:`Treatment.order`."""

    def apply(self, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """See :meth:`Treatment.apply`."""
        return zeroed(weight, self.mask(weight, prepared, level))

    def mask(self, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """Entries that go, ``(d_out, d_in)``; rows differ by at most one where entries compete within theirs."""
        if level.pattern is not None:
            return smallest_per_group(self.order(weight, prepared), *level.pattern)
        if level.ratio is not None:
            return self._parity(self.order(weight, prepared), level.ratio)
        if self.by_row:
            rows, columns = weight.shape
            return smallest_evenly(self._rows(weight, prepared), (rows, columns), level.zeros)
        return smallest(self.order(weight, prepared).float(), level.zeros)

    def apply_rows(self, weight: torch.Tensor, prepared: Any, size: int, zeros: np.ndarray) -> torch.Tensor:
        """See :meth:`Treatment.apply_rows`."""
        scores, counts = self.order(weight, prepared).float(), torch.from_numpy(zeros)
        if self.by_row:
            return zeroed(weight, smallest_per_row(scores, spread_over_rows(scores, size, counts)))
        return zeroed(weight, smallest_per_group_of_rows(scores, size, counts))

    def _rows(self, weight: torch.Tensor, prepared: Any) -> Callable[[slice], torch.Tensor]:
        """Scores of some rows."""
        return self.order(weight, prepared).__getitem__

    def _parity(self, scores: torch.Tensor, ratio: float) -> torch.Tensor:
        raise InvalidInput("No reference makes these masks.", "Parity is for magnitude, wanda and sparsegpt.", "Leave it out.")


class Magnitude(_Ranking):
    """The smallest weights of the matrix go."""

    name, summary = "magnitude", "the smallest weights of each matrix go; needs no data"
    modifier = None  # llm-compressor's modifier needs a training schedule
    by_row = False

    def order(self, weight: torch.Tensor, prepared: Any) -> torch.Tensor:
        """See :meth:`Treatment.order`."""
        return weight.abs()

    def _parity(self, scores: torch.Tensor, ratio: float) -> torch.Tensor:
        """``prune_magnitude`` of locuslab/wanda: all ties, and one more than the ratio says."""
        return threshold_inclusive(scores, int(scores.numel() * ratio))


class Wanda(_Ranking):
    """Row by row, the smallest ``|W_ij| * ||X_j||`` go; plain magnitude where no token was seen."""

    name, summary, statistic = "wanda", "in every row the smallest weight times input norm go", "diagonal"
    modifier = "WandaPruningModifier"

    def order(self, weight: torch.Tensor, prepared: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Treatment.order`."""
        scores = weight.abs().float()
        return scores if prepared is None else scores * prepared.sqrt()

    def _rows(self, weight: torch.Tensor, prepared: Any) -> Callable[[slice], torch.Tensor]:
        return lambda part: self.order(weight[part], prepared)  # made twice rather than kept

    def _parity(self, scores: torch.Tensor, ratio: float) -> torch.Tensor:
        """``prune_wanda`` of locuslab/wanda: exactly ``int(d_in * ratio)`` in each row."""
        return smallest_per_row(scores, torch.full((scores.shape[0],), int(scores.shape[1] * ratio)))


class _Squares(Accumulator):
    """``sum_s g_s^2`` of every entry, by matrix, one per copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sums = model, dict[str, torch.Tensor]()

    def update(self, site: Site) -> None:
        for name, b in site.b.items():
            size = max(1, _CHUNK // (site.a.shape[2] * b.shape[2]))
            for i in range(0, len(b), size):
                self._add(name, (b[i : i + size].mT @ site.a[i : i + size]).square_().sum(0, keepdim=True))

    def direct(self, name: str, gradient: torch.Tensor) -> None:  # experts, one sequence per batch
        self._add(name, gradient.square())

    def _add(self, name: str, squares: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + squares if name in self.sums else squares.float()

    def bytes(self, blocks: Sequence[Block]) -> int:
        return 4 * sum(b.numel for b in blocks)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        group.reduce([self.sums[name] for name in names if name in self.sums])


class GradientWeighted(_Ranking):
    """Row by row, the smallest ``|W| (||x|| + alpha G)`` go, both factors at their own scale.

    Args:
        alpha: Weight of the gradients; zero is Wanda's order.

    Raises:
        InvalidInput: A negative alpha.
    """

    name, summary = "gradient", "in every row the smallest weight times input norm and gradient norm go"
    statistic = "diagonal"
    price = 3.0

    def __init__(self, *, alpha: float = 1.0) -> None:
        if not alpha >= 0:
            raise InvalidInput(f"alpha is {alpha:g}.", "It is zero (Wanda's order) or more.", "Use 1.")
        self.alpha, self.norms = alpha, dict[str, torch.Tensor]()

    def begin(self, model: nn.Module, data: CalibrationSet, *, batch_size: int = 8) -> None:
        """See :meth:`Treatment.begin`: a forward and a backward; as many numbers are kept as the matrices have."""
        squares = _Squares(model)
        feed(model, data, partition(model, "linear"), squares, batch_size=batch_size)
        self.norms = {name: s.sqrt() for name, s in squares.sums.items()}

    def of(self, name: str, copy: int, prepared: Any) -> Any:
        """See :meth:`Treatment.of`: second moments and gradient norms.

        Raises:
            InvalidInput: No gradients were gathered.
        """
        if name not in self.norms:
            raise InvalidInput(f"No gradients of {name} were gathered.", "They are, before a model is treated.", "Call begin.")
        return prepared, self.norms[name][copy]

    def order(self, weight: torch.Tensor, prepared: Any) -> torch.Tensor:
        """See :meth:`Treatment.order`; magnitude and gradient where no token was seen."""
        moment, norm = prepared
        inputs = torch.ones(weight.shape[1]) if moment is None else moment.sqrt()
        inputs, norm = inputs.to(weight.device), norm.to(weight.device)
        return weight.abs().float() * (_scaled(inputs) + self.alpha * _scaled(norm))


def _scaled(values: torch.Tensor) -> torch.Tensor:
    """Values with a root mean square of one; zeros stay."""
    return values / values.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
