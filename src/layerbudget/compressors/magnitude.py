"""Magnitude pruning: the smallest weights of each matrix go."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .base import Level, Treatment
from .select import smallest, smallest_per_group, smallest_per_group_of_rows, threshold_inclusive


def magnitude_mask(
    weight: torch.Tensor, count: int, *, ratio: float | None = None, pattern: tuple[int, int] | None = None
) -> torch.Tensor:
    """Entries of one matrix that magnitude pruning removes.

    Args:
        weight: ``(d_out, d_in)``.
        count: Entries to remove, exactly.
        ratio: Parity with the reference (``prune_magnitude`` of locuslab/wanda): remove everything that is not larger
            than the entry at position ``int(numel * ratio)``, which is one more than the ratio says, and all ties.
        pattern: ``(zeroed, group)`` for n:m instead of a count.

    Returns:
        Boolean mask ``(d_out, d_in)``.
    """
    scores = weight.abs()
    if pattern is not None:
        return smallest_per_group(scores, *pattern)
    if ratio is not None:
        return threshold_inclusive(scores, int(scores.numel() * ratio))
    return smallest(scores.float(), count)


class Magnitude(Treatment):
    """The smallest weights of the matrix go."""

    name, summary = "magnitude", "the smallest weights of each matrix go; needs no data"
    modifier = None  # llm-compressor's modifier needs a training schedule
    nested, by_row = True, False

    def apply(self, weight: torch.Tensor, prepared: Any, level: Level, **options: Any) -> torch.Tensor:
        """See :meth:`Treatment.apply`."""
        mask = magnitude_mask(weight, level.zeros, ratio=level.ratio, pattern=level.pattern)
        return weight.masked_fill(mask, 0)

    def apply_rows(self, weight: torch.Tensor, prepared: Any, size: int, zeros: np.ndarray, **options: Any) -> torch.Tensor:
        """See :meth:`Treatment.apply_rows`."""
        return weight.masked_fill(smallest_per_group_of_rows(weight.abs().float(), size, torch.from_numpy(zeros)), 0)

    def order(self, weight: torch.Tensor, prepared: Any) -> torch.Tensor:
        """See :meth:`Treatment.order`."""
        return weight.abs()
