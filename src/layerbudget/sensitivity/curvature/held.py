"""What is kept of a matrix while its batches come: sums of products on and above the diagonal, or the rows themselves."""

from __future__ import annotations

import dataclasses

import torch

from ...records import Module

_PANEL = 128


@dataclasses.dataclass(eq=False)
class Input:
    """What is kept of one input: panels of its second moment on and above the diagonal, or its rows."""

    sums: torch.Tensor | None = None
    rows: list[torch.Tensor] = dataclasses.field(default_factory=list)
    positions: float = 0.0


@dataclasses.dataclass(eq=False)
class Output:
    """What is kept of one matrix: sums of ``b~ b~'`` and gradients by group, or rows by loss."""

    module: Module
    tokens: bool
    leader: str = ""
    sums: torch.Tensor | None = None
    parts: torch.Tensor | None = None
    rows: dict[int, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    places: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # first sequence, sequences, length


def accumulate(sums: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Add ``rows' rows``: panels on and above the diagonal only, which is all that :func:`symmetric` reads."""
    width = rows.shape[1]
    sums = rows.new_zeros(width, width) if sums is None else sums
    for low in range(0, width, _PANEL):
        high = min(low + _PANEL, width)
        sums[low:high, low:].addmm_(rows[:, low:high].T, rows[:, low:])
    return sums


def symmetric(panels: torch.Tensor) -> torch.Tensor:
    """The whole matrix in float64; nothing else of its size is made beside it."""
    whole = panels.to(torch.float64, copy=True)
    for low in range(0, len(whole), _PANEL):
        high = low + _PANEL
        block = whole[low:high, low:high].triu()
        whole[low:high, low:high] = block + block.triu(1).T
        whole[high:, low:high] = whole[low:high, high:].T
    return whole
