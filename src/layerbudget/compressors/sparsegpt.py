"""SparseGPT: remove weights block by block of columns and let the later columns make up for them (arXiv 2301.00774)."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import CurvatureFailure
from ..models.machine import give_back
from .base import Level, Treatment
from .pruners import Magnitude
from .select import share, smallest_per_group, smallest_per_group_of_rows

COLUMNS = 128
INNER = 16
_PANEL = 1024
_GATHERED = 256
_WIDE = 1 << 26  # bytes of a matrix


def inverse_factor(
    gram: torch.Tensor, damping: float = 0.01, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper factor ``U`` with ``U' U = (G + damping * mean(diag G) I)^-1``.

    One Cholesky factorisation of the reversed matrix and one triangular inverse: with ``J`` the reversal,
    ``J G J = L L'`` gives ``G = R R'`` for the upper ``R = J L J``, hence ``U = R^-1``. Only the upper triangle of ``gram``
    is read. Inputs that were never active get a unit diagonal, as in the reference.

    Args:
        gram: ``(d_in, d_in)``, float32; its scale does not matter.
        damping: Relative to the mean of the diagonal.
        order: The inputs as rows and columns of ``U`` have them, ``(d_in,)``; by default as they are.

    Returns:
        ``U`` and the boolean ``(d_in,)`` of inputs that were never active.

    Raises:
        CurvatureFailure: Not positive definite even at 1000 times the damping.
    """
    if gram.nbytes >= _WIDE and gram.device.type == "cpu":  # what was freed in smaller pieces has no room for it
        give_back()
    diagonal = gram.diagonal().clone()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    mean = float(diagonal.mean())
    backwards = (torch.arange(len(diagonal), device=gram.device) if order is None else order).flip(0)
    reverse = gram.flip(0, 1) if order is None else _reordered(gram, backwards)
    for boost in (1.0, 10.0, 100.0, 1000.0):
        reverse.diagonal().copy_((diagonal + boost * damping * mean)[backwards])
        factor, info = torch.linalg.cholesky_ex(reverse)
        if int(info) == 0:
            return _inverse(factor, reverse.contiguous()), dead
    raise CurvatureFailure(
        f"The second moments of {len(diagonal)} inputs are not positive definite at damping {damping:g}.",
        f"They were not at {1000 * damping:g} either.",
        "Use more calibration samples or a larger damping, and check the activations for infinities.",
    )


def _reordered(gram: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The lower triangle of the symmetric matrix that an upper one stands for, in another order; by panels of rows."""
    out = torch.empty_like(gram, memory_format=torch.contiguous_format)
    for start in range(0, len(gram), _GATHERED):
        stop = start + _GATHERED
        rows, columns = order[start:stop], order[:stop]
        above = gram.index_select(0, rows).index_select(1, columns)
        below = gram.index_select(1, rows).index_select(0, columns).T
        out[start:stop, :stop] = torch.where(rows[:, None] <= columns, above, below)
    return out


def _inverse(factor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Inverse of a lower triangle, with rows and columns in reverse, in ``room``, which is as large.

    Nothing else of their size is held. Panels of columns are inverted in their place, which no later panel needs; what is left
    of the triangle is copied into ``room`` as the solver wants it, which would make a copy itself.
    """
    n = len(factor)
    for start in range(0, n, _PANEL):
        left = n - start
        unit = torch.zeros(left, min(_PANEL, left), dtype=factor.dtype, device=factor.device)
        unit.diagonal().fill_(1.0)
        rest = room.view(-1)[: left * left].view(left, left).T.copy_(factor[start:, start:])
        factor[start:, start : start + _PANEL] = torch.linalg.solve_triangular(rest, unit, upper=False)
    for start in range(0, n, _PANEL):
        rows = factor[start : start + _PANEL]
        room[n - start - len(rows) : n - start] = rows.flip(0, 1)
    return room


def sparsegpt_update(
    weight: torch.Tensor,
    factor: torch.Tensor,
    dead: torch.Tensor,
    count: int | np.ndarray,
    *,
    pattern: tuple[int, int] | None = None,
    columns: int = COLUMNS,
    rows: int | None = None,
) -> torch.Tensor:
    """New weights of one pruned matrix, ``(d_out, d_in)`` float32.

    Args:
        weight: ``(d_out, d_in)``; not changed.
        factor: ``U`` from :func:`inverse_factor`.
        dead: Inputs that were never active: their weights cost nothing and go first.
        count: Entries to remove, exactly; every block of columns gives its proportional share.
        pattern: ``(zeroed, group)``; chosen from the already updated weights at the start of each group.
        columns: Width of a block of columns.
        rows: Rows of a group; ``count`` is then one number per group. The whole matrix by default.
    """
    work = torch.empty(weight.shape[::-1], dtype=torch.float32, device=weight.device).copy_(weight.detach().T)
    if pattern is not None:
        work[dead] = 0
        columns = max(pattern[1], columns // pattern[1] * pattern[1])
    starts = list(range(0, work.shape[0], columns))
    widths = [min(columns, work.shape[0] - s) for s in starts]
    size = work.shape[1] if rows is None else rows
    counts = _shares(count, widths, size, work.shape[1]) if pattern is None else []
    for i, (start, width) in enumerate(zip(starts, widths, strict=True)):
        stop = start + width
        block, upper = work[start:stop], factor[start:stop, start:stop]
        mask = None
        if pattern is None:
            scores = (block.T**2) / (upper.diagonal()[None] ** 2)
            scores[:, dead[start:stop]] = 0
            mask = smallest_per_group_of_rows(scores, size, counts[i]).T
        errors = _compensate(block, upper, mask, pattern)
        if stop < work.shape[0]:
            work[stop:] -= factor[start:stop, stop:].T @ errors
    return work.T


def _shares(count: int | np.ndarray, widths: list[int], size: int, rows: int) -> list[torch.Tensor]:
    """Zeros of every group in every block of columns: in proportion to its width, whole numbers."""
    members = [min(size, rows - start) for start in range(0, rows, size)]
    each = zip(np.atleast_1d(count).tolist(), members, strict=True)
    parts = [share(c, [w * m for w in widths]) for c, m in each]
    return list(torch.tensor(parts).T)


def _compensate(
    block: torch.Tensor, upper: torch.Tensor, mask: torch.Tensor | None, pattern: tuple[int, int] | None
) -> torch.Tensor:
    """Zero the marked entries of one block of columns (rows of ``block``) in place; return the errors, same shape."""
    width, rows = block.shape
    errors = torch.empty_like(block)
    inner = INNER if pattern is None else max(pattern[1], INNER // pattern[1] * pattern[1])
    chosen = torch.empty(width, rows, dtype=torch.bool, device=block.device) if mask is None else mask
    for low in range(0, width, inner):
        high = min(low + inner, width)
        for j in range(low, high):
            if pattern is not None and j % pattern[1] == 0:
                group = slice(j, j + pattern[1])
                scores = block[group].T ** 2 / upper.diagonal()[group][None] ** 2
                chosen[group] = smallest_per_group(scores, *pattern).T
            torch.mul(block[j], chosen[j], out=errors[j]).div_(upper[j, j])
            block[j].masked_fill_(chosen[j], 0)
            if j + 1 < high:
                block[j + 1 : high].addr_(upper[j, j + 1 : high], errors[j], alpha=-1)
        if high < width:
            block[high:].addmm_(upper[low:high, high:].T, errors[low:high], alpha=-1)
    return errors


class SparseGPT(Treatment):
    """Weights go block by block of columns, and the later columns make up for them; by magnitude where no token was seen.

    Args:
        damping: Relative to the mean of the second moments' diagonal.
    """

    name, summary, statistic = "sparsegpt", "the others make up for what goes, by second moments of the inputs", "gram"
    modifier = "SparseGPTModifier"

    def __init__(self, *, damping: float = 0.01) -> None:
        self.damping = damping

    def prepare(self, moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor of the damped inverse, and the inputs that were never active."""
        return inverse_factor(moment, self.damping)

    def apply(self, weight: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor] | None, level: Level) -> torch.Tensor:
        """See :meth:`Treatment.apply`."""
        if prepared is None:
            return Magnitude().apply(weight, None, level)
        return sparsegpt_update(weight, *prepared, level.zeros, pattern=level.pattern)

    def apply_rows(
        self, weight: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor] | None, size: int, zeros: np.ndarray
    ) -> torch.Tensor:
        """See :meth:`Treatment.apply_rows`."""
        if prepared is None:
            return Magnitude().apply_rows(weight, None, size, zeros)
        return sparsegpt_update(weight, *prepared, zeros, rows=size)
