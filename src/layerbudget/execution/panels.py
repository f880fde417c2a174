"""Sums of ``X' X`` by panels of rows: what lies on and above the diagonal is all that is computed, read and sent.

Panel i has rows ``a = PANEL i`` to ``b = a + PANEL`` and columns from ``a`` on. Below the panels there are zeros.
"""

from __future__ import annotations

import torch

PANEL = 256  #: Rows of a panel.


def panels(square: torch.Tensor) -> list[torch.Tensor]:
    """Views of the panels of a square matrix, from the top."""
    return [square[a : a + PANEL, a:] for a in range(0, len(square), PANEL)]


def count_numbers(width: int) -> int:
    """How many numbers the panels of a matrix of so many rows have.

    >>> count_numbers(256), count_numbers(512) / 512**2
    (65536, 0.75)
    """
    return sum(min(PANEL, width - a) * (width - a) for a in range(0, width, PANEL))


def add_products(sums: torch.Tensor, rows: torch.Tensor) -> None:
    """Add ``rows' rows`` to sums in place; where sums have another type, products are made in that of the rows."""
    for k, panel in enumerate(panels(sums)):
        left, right = rows[:, k * PANEL : (k + 1) * PANEL].T, rows[:, k * PANEL :]
        if panel.dtype == rows.dtype:
            panel.addmm_(left, right)
        else:
            panel += left @ right


def symmetric(sums: torch.Tensor) -> torch.Tensor:
    """The whole matrix in float64; nothing else of its size is made beside it."""
    whole = sums.to(torch.float64, copy=True)
    for low in range(0, len(whole), PANEL):
        high = low + PANEL
        block = whole[low:high, low:high].triu()
        whole[low:high, low:high] = block + block.triu(1).T
        whole[high:, low:high] = whole[low:high, high:].T
    return whole
