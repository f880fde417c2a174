"""Magnitude pruning: the smallest weights of each matrix go."""

from __future__ import annotations

import torch

from .select import smallest, smallest_per_group, threshold_inclusive


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
