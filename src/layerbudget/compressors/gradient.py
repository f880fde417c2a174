r"""Gradient-weighted pruning, in the manner of GBLM-Pruner (arXiv 2311.04902) and Wanda++ (arXiv 2503.04992).

In every output row the entries go whose score is smallest,

    |W_ij| ( ||x_j|| / X + alpha G_ij / G ),      G_ij = ( sum_s (dl_s/dW_ij)^2 )^(1/2),

with the loss l_s of sequence s on the *dense* model, and X, G the root mean squares of both factors over the matrix: alpha is a
share and has no unit (the sources add the two as they are, with alpha = 100 for their normalisation of the gradients). Wanda++
takes gradients of single layers' outputs, GBLM-Pruner of the model's loss, as here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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
from .select import row_counts, smallest_per_group, smallest_per_row, spread_over_rows

_CHUNK = 64 << 20  # entries of the gradients of single sequences at a time


class _Squares(Accumulator):
    """``sum_s g_s^2`` of every entry, by matrix, one per copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sums = model, dict[str, torch.Tensor]()

    def update(self, site: Site) -> None:
        """See :meth:`Accumulator.update`."""
        for name, b in site.b.items():
            size = max(1, _CHUNK // (site.a.shape[2] * b.shape[2]))
            for i in range(0, len(b), size):
                self._add(name, (b[i : i + size].mT @ site.a[i : i + size]).square_().sum(0, keepdim=True))

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """See :meth:`Accumulator.direct`: experts, one sequence per batch."""
        self._add(name, gradient.square())

    def _add(self, name: str, squares: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + squares if name in self.sums else squares.float()

    def bytes(self, blocks: Sequence[Block]) -> int:
        """See :meth:`Accumulator.bytes`."""
        return 4 * sum(b.numel for b in blocks)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """See :meth:`Accumulator.share`."""
        group.reduce([self.sums[name] for name in names if name in self.sums])


class GradientWeighted(Treatment):
    """Row by row, the smallest ``|W| (||x|| + alpha G)`` go, both factors at their own scale."""

    name, summary = "gradient", "in every row the smallest weight times input norm and gradient norm go"
    statistic = "diagonal"
    options: ClassVar[Mapping[str, Any]] = {"alpha": 1.0}
    nested = True
    price = 3.0

    def __init__(self) -> None:
        self.norms: dict[str, torch.Tensor] = {}
        self.alpha = 1.0

    def begin(self, model: nn.Module, data: CalibrationSet, *, batch_size: int = 8, **options: Any) -> None:
        """See :meth:`Treatment.begin`: a forward and a backward; as many numbers are kept as the matrices have.

        Raises:
            InvalidInput: A negative alpha.
        """
        alpha = float(options.get("alpha", self.options["alpha"]))
        if not alpha >= 0:
            raise InvalidInput(f"alpha is {alpha:g}.", "It is zero (Wanda's order) or more.", "Use 1.")
        squares = _Squares(model)
        feed(model, data, partition(model, "linear"), squares, batch_size=batch_size)
        self.alpha, self.norms = alpha, {name: s.sqrt() for name, s in squares.sums.items()}

    def of(self, name: str, copy: int, prepared: Any) -> Any:
        """See :meth:`Treatment.of`: second moments and gradient norms.

        Raises:
            InvalidInput: No gradients were gathered.
        """
        if name not in self.norms:
            raise InvalidInput(f"No gradients of {name} were gathered.", "They are, before a model is treated.", "Call begin.")
        return prepared, self.norms[name][copy]

    def apply(self, weight: torch.Tensor, prepared: Any, level: Level, **options: Any) -> torch.Tensor:
        """See :meth:`Treatment.apply`.

        Raises:
            InvalidInput: Parity with a reference, which there is none of.
        """
        if level.ratio is not None:
            raise InvalidInput(
                "No reference makes these masks.", "Parity is for magnitude, wanda and sparsegpt.", "Leave it out."
            )
        scores = self.order(weight, prepared)
        if level.pattern is not None:
            return weight.masked_fill(smallest_per_group(scores, *level.pattern), 0)
        return weight.masked_fill(smallest_per_row(scores, row_counts(scores, level.zeros)), 0)

    def apply_rows(self, weight: torch.Tensor, prepared: Any, size: int, zeros: np.ndarray, **options: Any) -> torch.Tensor:
        """See :meth:`Treatment.apply_rows`."""
        scores = self.order(weight, prepared)
        return weight.masked_fill(smallest_per_row(scores, spread_over_rows(scores, size, torch.from_numpy(zeros))), 0)

    def order(self, weight: torch.Tensor, prepared: Any) -> torch.Tensor:
        """See :meth:`Treatment.order`; magnitude and gradient where no token was seen."""
        moment, norm = prepared
        inputs = torch.ones(weight.shape[1]) if moment is None else moment.sqrt()
        inputs, norm = inputs.to(weight.device), norm.to(weight.device)
        return weight.abs().float() * (_scaled(inputs) + self.alpha * _scaled(norm))


def _scaled(values: torch.Tensor) -> torch.Tensor:
    """Values with a root mean square of one; zeros stay."""
    return values / values.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
