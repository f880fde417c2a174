r"""Directions: the changes that the levels of a treatment make to one weight matrix, and derivatives along all of them at once.

A gradient ``S`` of shape ``(d_out, d_in)`` - of a whole text, or of one sequence - meets every candidate ``Delta_l`` of every
group of rows g in ``<S, Delta_gl>``. Directions turn gradients into these numbers, ``(B, d_out, d_in) -> (B, groups, levels)``.

Masks that are nested need no candidate to be written down. Let a *line* be the entries that compete with each other (a row of
Wanda, the group for magnitude), sorted by the pruner's score, and ``P[c]`` the sum of the first c entries of ``S * W``
in that order. Going from c_0 pruned entries to c changes the weights by ``Delta``, and

    <S, Delta> = -(P[c] - P[c_0]),

upwards (entries go) and downwards (entries come back: their gradient is needed too). One gather and one cumulative sum give all
levels of all lines.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from ...compressors.select import ranked
from ...errors import LengthMismatch


class Directions(abc.ABC):
    """Candidate changes of one matrix."""

    groups: int  #: groups of rows that are decided one by one
    levels: int  #: candidates of every group

    @abc.abstractmethod
    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """``<S, Delta>`` of every gradient ``(B, d_out, d_in)``, for every group and level: ``(B, groups, levels)`` float64."""


def _groups(rows: int, size: int | None) -> int:
    return 1 if size is None else -(-rows // size)


def _sum_groups(x: torch.Tensor, size: int | None) -> torch.Tensor:
    """Sum rows into groups: ``(B, rows, n) -> (B, groups, n)``; the last group may be smaller."""
    if size is None:
        return x.sum(1, keepdim=True)
    short = -x.shape[1] % size
    if short:
        x = torch.cat((x, x.new_zeros(x.shape[0], short, x.shape[2])), 1)
    return x.unflatten(1, (-1, size)).sum(2)


class Written(Directions):
    """Candidates that are written down: treated minus present weights, ``(d_out, d_in)`` each.

    A group has so many ``rows``; the whole matrix where that is None.
    """

    def __init__(self, deltas: Sequence[torch.Tensor], rows: int | None = None) -> None:
        if not deltas or any(d.shape != deltas[0].shape or d.ndim != 2 for d in deltas):
            raise LengthMismatch(
                f"The candidates have shapes {sorted({tuple(d.shape) for d in deltas})}.",
                "All need the shape of the matrix.",
                "Give treated minus present weights, (d_out, d_in) each.",
            )
        self.deltas, self.rows, self.levels = list(deltas), rows, len(deltas)
        self.groups = _groups(deltas[0].shape[0], rows)

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        each = [torch.einsum("boi,oi->bo", gradient, d.to(gradient)).double() for d in self.deltas]
        return _sum_groups(torch.stack(each, -1), self.rows)


class Nested(Directions):
    """Levels of a pruner that ranks entries: what goes at one level goes at every higher one.

    Fractions of an entry per row are interpolated: a group whose rows lose 10 or 11 entries is between the two.

    Args:
        weight: Dense weights, ``(d_out, d_in)``.
        order: Scores of the entries, the same shape; the smallest go first, ties by place.
        present: Pruned entries of every group at the present point, shape ``(groups,)``.
        counts: Pruned entries of every group at the levels, ``(groups, levels)``; any order, either side of the present.
        rows: Rows of a group (of the last one perhaps fewer); the whole matrix where it is None.
        by_row: Entries compete within their row, and groups spread their counts evenly (Wanda); else within the group.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        order: torch.Tensor,
        present: torch.Tensor,
        counts: torch.Tensor,
        *,
        rows: int | None = None,
        by_row: bool = True,
    ) -> None:
        d_out, d_in = weight.shape
        self.rows, self.by_row, self.shape = rows, by_row, (d_out, d_in)
        self.groups, self.levels = _groups(d_out, rows), counts.shape[1]
        size = d_out if rows is None else rows
        self.line = d_in if by_row else size * d_in  # entries that compete
        self.lines = d_out if by_row else self.groups
        self.pad = pad = self.lines * self.line - d_out * d_in  # the last group may be smaller
        scores, values = _lines(order.reshape(-1), pad, self.line, float("inf")), _lines(weight.reshape(-1), pad, self.line)
        edges = self._edges(torch.cat((present[:, None], counts), 1).double())
        low = edges.amin(1).floor().long().clamp(0, self.line)
        width = int((edges.amax(1).ceil().long() - low).max()) if edges.numel() else 0
        width = min(max(width, 1), self.line)
        low = low.clamp_max(self.line - width)
        self.index = ranked(scores, low, width)
        self.values = values.gather(1, self.index)
        self.edges = edges - low[:, None]

    def _edges(self, counts: torch.Tensor) -> torch.Tensor:
        """Entries per line, ``(lines, 1 + levels)``, whole or between two whole numbers."""
        if not self.by_row:
            return counts
        d_out = self.shape[0]
        size = d_out if self.rows is None else self.rows
        rows = torch.full((self.groups,), size, dtype=torch.float64, device=counts.device)
        rows[-1] = d_out - size * (self.groups - 1)
        return (counts / rows[:, None]).repeat_interleave(rows.long(), 0)

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        flat = _lines(gradient.reshape(gradient.shape[0], -1), self.pad, self.line)
        part = flat.gather(2, self.index.expand(len(flat), -1, -1)).mul_(self.values.to(flat))
        sums = torch.nn.functional.pad(part.double().cumsum_(2), (1, 0))
        down = self.edges.floor().long()
        up = (down + 1).clamp_max(sums.shape[2] - 1)
        share = self.edges - down
        at = sums.gather(2, down.expand(len(flat), -1, -1)) * (1 - share) + sums.gather(2, up.expand(len(flat), -1, -1)) * share
        change = at[:, :, :1] - at[:, :, 1:]
        return _sum_groups(change, self.rows) if self.by_row else change


def _lines(flat: torch.Tensor, pad: int, line: int, fill: float = 0.0) -> torch.Tensor:
    """Cut the entries of matrices into lines, ``(..., numel) -> (..., lines, line)``, and fill up the last one."""
    if pad:
        flat = torch.cat((flat, flat.new_full((*flat.shape[:-1], pad), fill)), -1)
    return flat.unflatten(-1, (-1, line))
