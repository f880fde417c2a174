"""Wanda: in every output row, the weights with the smallest ``|W_ij| * ||X_j||`` go (Sun et al., arXiv 2306.11695)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .base import Level, Treatment
from .ranking import smallest_evenly, zeroed
from .select import smallest_per_group, smallest_per_row, spread_over_rows


def wanda_scores(weight: torch.Tensor, moment: torch.Tensor | None) -> torch.Tensor:
    """``|W| * sqrt(moment)``, shape ``(d_out, d_in)``; plain magnitude where no token was seen.

    Args:
        weight: ``(d_out, d_in)``.
        moment: ``(d_in,)``, sum or mean of squares of every input; its scale does not matter.
    """
    if moment is None:
        return weight.abs().float()
    return weight.abs().float() * moment.sqrt()


def wanda_mask(
    weight: torch.Tensor,
    moment: torch.Tensor | None,
    count: int,
    *,
    ratio: float | None = None,
    pattern: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Entries of one matrix that Wanda removes.

    Args:
        weight: ``(d_out, d_in)``.
        moment: See :func:`wanda_scores`.
        count: Entries to remove from the whole matrix, exactly; rows differ by at most one.
        ratio: Parity with the reference (``prune_wanda`` of locuslab/wanda): exactly ``int(d_in * ratio)`` in each row.
            Ties go to the lower column in both modes.
        pattern: ``(zeroed, group)`` for n:m instead of a count.

    Returns:
        Boolean mask ``(d_out, d_in)``.
    """
    if pattern is None and ratio is None:
        rows, columns = weight.shape
        return smallest_evenly(lambda part: wanda_scores(weight[part], moment), (rows, columns), count)
    scores = wanda_scores(weight, moment)
    if pattern is not None:
        return smallest_per_group(scores, *pattern)
    return smallest_per_row(scores, torch.full((scores.shape[0],), int(scores.shape[1] * (ratio or 0.0))))


class Wanda(Treatment):
    """Row by row, the smallest ``|W_ij| * ||X_j||`` go."""

    name, summary, statistic = "wanda", "in every row the smallest weight times input norm go", "diagonal"
    modifier = "WandaPruningModifier"
    nested = True

    def apply(self, weight: torch.Tensor, prepared: torch.Tensor | None, level: Level, **options: Any) -> torch.Tensor:
        """See :meth:`Treatment.apply`; by magnitude where no token was seen."""
        mask = wanda_mask(weight, prepared, level.zeros, ratio=level.ratio, pattern=level.pattern)
        return zeroed(weight, mask)

    def apply_rows(
        self, weight: torch.Tensor, prepared: torch.Tensor | None, size: int, zeros: np.ndarray, **options: Any
    ) -> torch.Tensor:
        """See :meth:`Treatment.apply_rows`."""
        scores = wanda_scores(weight, prepared)
        return zeroed(weight, smallest_per_row(scores, spread_over_rows(scores, size, torch.from_numpy(zeros))))

    def order(self, weight: torch.Tensor, prepared: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Treatment.order`."""
        return wanda_scores(weight, prepared)
