"""GPTQ: round column by column and let the later columns make up for the errors (Frantar et al., arXiv 2210.17323).

    minimise   || (W - Q) X ||^2      over   Q on the grids of a format,

greedily: with ``U' U = (X X' + damping)^-1`` (the factor of SparseGPT), column j is rounded, its error divided by ``U_jj``
and taken from the columns behind it in proportion to ``U_j,:``. The grid of a group is fixed when its first column comes, from
the weights as they then are. GGUF keeps no grid of its own beside the integers: there the entries that span a group's grid keep
their ends, so that the format's own writer finds the same grid again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .formats import Format
from .grid import Grid, best_grid, grid_of, pinned
from .rounding import Quantiser, Rounded
from .sparsegpt import COLUMNS, inverse_factor


def gptq_update(weight: torch.Tensor, factor: torch.Tensor, form: Format, *, search: bool = False) -> Rounded:
    """Round one matrix.

    Args:
        weight: ``(d_out, d_in)``; not changed.
        factor: ``U`` from :func:`~layerbudget.compressors.sparsegpt.inverse_factor`.
        form: A format with a grid that divides the inputs.
        search: Take the range of least error for every group, instead of the whole range.
    """
    work = torch.empty(weight.shape[::-1], dtype=torch.float32, device=weight.device).copy_(weight.detach().T)
    size = form.group or work.shape[0]
    columns = max(size, COLUMNS // size * size)
    out, grids = torch.empty_like(work), []
    for start in range(0, work.shape[0], columns):
        stop = min(start + columns, work.shape[0])
        upper, errors = factor[start:stop, start:stop], torch.empty_like(work[start:stop])
        block = work[start:stop]
        for low in range(0, stop - start, size):
            grids.append(_round_group(block, out[start:stop], upper, errors, (low, low + size), form, search))
        if stop < work.shape[0]:
            work[stop:] -= factor[start:stop, stop:].T @ errors
    if grids[0].zero is None:
        return Rounded(weight=out.T.contiguous())
    scale = torch.cat([g.d for g in grids], 1).to(torch.bfloat16)
    return Rounded(weight=out.T.contiguous(), scale=scale, zero=torch.cat([g.zero for g in grids if g.zero is not None], 1))


def _round_group(
    block: torch.Tensor, out: torch.Tensor, upper: torch.Tensor, errors: torch.Tensor, span: tuple[int, int], form: Format,
    search: bool,
) -> Grid:  # fmt: skip
    """Round the columns (rows of ``block``) of one group; errors go into the rest of the block. Returns the group's grid."""
    low, high = span
    groups = block[low:high].T.contiguous()
    importance = upper.diagonal()[low:high].square().reciprocal()[None] if search else None
    grid = best_grid(groups, form, importance) if search else grid_of(groups, form)
    held = pinned(groups, form)
    for j in range(low, high):
        q = grid.nearest(block[j][:, None])[:, 0]
        for column, end in held:
            q = torch.where(column == j - low, end, q)
        out[j] = grid.value(q[:, None])[:, 0]
        torch.sub(block[j], out[j], out=errors[j]).div_(upper[j, j])
        if j + 1 < block.shape[0]:
            block[j + 1 :].addr_(upper[j, j + 1 :], errors[j], alpha=-1)
    return grid


class GPTQ(Quantiser):
    """Column by column, and the later columns make up for the errors."""

    name, summary = "gptq", "later columns make up for the rounding of earlier ones, by second moments of the inputs"
    statistic = "gram"
    options: ClassVar = {"damping": 0.01, "search": False}

    def prepare(self, moment: torch.Tensor, *, parity: bool = False, **options: Any) -> torch.Tensor:
        """The factor of the damped inverse."""
        return inverse_factor(moment, options.get("damping", GPTQ.options["damping"]))[0]

    def onto(self, weight: torch.Tensor, prepared: torch.Tensor, form: Format, **options: Any) -> Rounded:
        """See :meth:`Quantiser.onto`."""
        return gptq_update(weight, prepared, form, search=bool(options.get("search", False)))
