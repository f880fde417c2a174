"""Pruners that rank entries and leave the others as they are: magnitude, and wanda (Sun et al., arXiv 2306.11695)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .base import Level, Treatment
from .select import smallest_per_group, smallest_per_group_of_rows, smallest_per_row, spread_over_rows


class _Ranking(Treatment):
    """The entries with the smallest scores become zero."""

    nested = True

    def apply(self, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """See :meth:`Treatment.apply`."""
        if level.pattern is not None:
            return weight.masked_fill(smallest_per_group(self.order(weight, prepared), *level.pattern), 0)
        return self.apply_rows(weight, prepared, len(weight), np.array([level.zeros]))

    def apply_rows(self, weight: torch.Tensor, prepared: Any, size: int, zeros: np.ndarray) -> torch.Tensor:
        """See :meth:`Treatment.apply_rows`; rows of a group differ by at most one where entries compete within theirs."""
        scores, counts = self.order(weight, prepared).float(), torch.from_numpy(zeros)
        if self.by_row:
            return weight.masked_fill(smallest_per_row(scores, spread_over_rows(scores, size, counts)), 0)
        return weight.masked_fill(smallest_per_group_of_rows(scores, size, counts), 0)


class Magnitude(_Ranking):
    """The smallest weights of the matrix go."""

    name, summary = "magnitude", "the smallest weights of each matrix go; needs no data"
    modifier = None  # llm-compressor's modifier needs a training schedule
    by_row = False

    def order(self, weight: torch.Tensor, prepared: Any) -> torch.Tensor:
        """See :meth:`Treatment.order`."""
        return weight.abs()


class Wanda(_Ranking):
    """Row by row, the smallest ``|W_ij| * ||X_j||`` go; plain magnitude where no token was seen."""

    name, summary, statistic = "wanda", "in every row the smallest weight times input norm go", "diagonal"
    modifier = "WandaPruningModifier"

    def order(self, weight: torch.Tensor, prepared: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Treatment.order`."""
        scores = weight.abs().float()
        return scores if prepared is None else scores * prepared.sqrt()
