"""The even grid of a format: ``base + d q`` for every group of inputs, with ``d`` and ``base`` exactly as the file holds them.

Multiplied out in float32 they are exact: ``d`` has at most 11 bits, ``q`` at most 8. So a weight on the grid is the weight that
a runtime reads back.
"""

from __future__ import annotations

import dataclasses

import torch

from .formats import GGUF, Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Grids of some groups, all of shape ``(..., 1)`` over the inputs of the group.

    Attributes:
        d: Step; its sign is that of GGUF's (the largest entry may be on the side that has one level more).
        base: Value of ``q = 0``.
        top: Largest ``q``.
        zero: Zero point as compressed-tensors keeps it, int8; None for GGUF.
    """

    d: torch.Tensor
    base: torch.Tensor
    top: int
    zero: torch.Tensor | None = None

    def nearest(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest ``q``, as float."""
        step = torch.where(self.d == 0, torch.ones_like(self.d), self.d)
        return (weight - self.base).div_(step).round_().clamp_(0, self.top)

    def value(self, q: torch.Tensor) -> torch.Tensor:
        """``base + d q``."""
        return self.base + self.d * q

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest points of the grid."""
        return self.nearest(weight).mul_(self.d).add_(self.base)


def grouped(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """``(d_out, groups, inputs of a group)``, float32."""
    return weight.to(torch.float32).reshape(weight.shape[0], form.groups(weight.shape[1]), -1)


def grid_of(groups: torch.Tensor, form: Format, shrink: float | torch.Tensor = 1.0) -> Grid:
    """The grid that the format gives to groups of weights.

    Args:
        groups: ``(..., inputs)``, float32.
        form: A format with a grid.
        shrink: The range of the weights is made smaller by this factor first (at most 1; what is outside is clipped).
    """
    return (_gguf_grid if form.family == GGUF else _packed_grid)(groups, form, shrink)


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).to(torch.float32)


def _gguf_grid(groups: torch.Tensor, form: Format, shrink: float | torch.Tensor) -> Grid:
    """As ggml: the entry of largest size spans the grid of ``_0``, smallest and largest entry that of ``_1``."""
    top = form.levels - 1
    if not form.symmetric:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        middle, half = (low + high) / 2, (high - low) / 2 * shrink
        return Grid(d=_half(2 * half / top), base=_half(middle - half), top=top)
    if form.name == "Q8_0":
        d = _half(groups.abs().amax(-1, keepdim=True) * shrink / 127)
        return Grid(d=d, base=-127 * d, top=top)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    offset = form.levels // 2
    d = _half(extreme * shrink / -offset)
    return Grid(d=d, base=-offset * d, top=top)


def _packed_grid(groups: torch.Tensor, form: Format, shrink: float | torch.Tensor) -> Grid:
    """As compressed-tensors: zero is a point of the grid; scales are kept in bfloat16."""
    scale, zero = scale_and_zero(groups, form, shrink)
    d = scale.to(torch.float32)
    return Grid(d=d, base=-(zero.to(torch.float32) + (1 << (form.bits - 1))) * d, top=form.levels - 1, zero=zero)


def scale_and_zero(groups: torch.Tensor, form: Format, shrink: float | torch.Tensor = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale (bfloat16) and zero point (int8) of compressed-tensors, ``(..., 1)``."""
    low = groups.amin(-1, keepdim=True).clamp(max=0) * shrink
    high = groups.amax(-1, keepdim=True).clamp(min=0) * shrink
    span, least = form.levels - 1, -(1 << (form.bits - 1))
    raw = torch.maximum(-low, high) * 2 / span if form.symmetric else (high - low) / span
    tiny = torch.finfo(torch.float32).eps
    raw = torch.where(raw == 0, torch.full_like(raw, tiny), raw)
    if form.symmetric:
        return raw.to(torch.bfloat16), torch.zeros_like(raw, dtype=torch.int8)
    zero = torch.round((least - low / raw).clamp(least, least + span))
    return raw.to(torch.bfloat16), zero.to(torch.int8)


def pinned(groups: torch.Tensor, form: Format) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Entries that must keep their end of the grid, so that ggml finds this very grid in the rounded weights again.

    Args:
        groups: ``(rows, inputs)``: one group of every row.
        form: Its format.

    Returns:
        ``(input, q)`` of every row; nothing for formats that store their grid beside the integers.
    """
    if form.family != GGUF:
        return []
    low, high = torch.zeros(len(groups)), torch.full((len(groups),), float(form.levels - 1))
    if not form.symmetric:
        return [(groups.argmin(-1), low.to(groups)), (groups.argmax(-1), high.to(groups))]
    extreme = groups.abs().argmax(-1)
    if form.name != "Q8_0":
        return [(extreme, low.to(groups))]
    above = groups.gather(-1, extreme[:, None])[:, 0] > 0
    return [(extreme, torch.where(above, high.to(groups), low.to(groups)))]


SHRINK = tuple(1.0 - 0.02 * i for i in range(26))


def best_grid(groups: torch.Tensor, form: Format, importance: torch.Tensor | None) -> Grid:
    """The grid of least weighted error among those of smaller range, for every group by itself.

    Minimises ``sum_j h_j (w_j - Q(w_j))^2`` over 26 ranges from the whole to half of it.

    Args:
        groups: ``(..., inputs)``.
        form: The format.
        importance: ``h``, to be broadcast against ``groups``; all alike where it is None.
    """
    least, shrink = None, torch.ones_like(groups[..., :1])
    for factor in SHRINK:
        error = (grid_of(groups, form, factor).round(groups) - groups) ** 2
        total = (error if importance is None else error * importance).sum(-1, keepdim=True)
        better = torch.ones_like(total, dtype=torch.bool) if least is None else total < least
        least = total if least is None else torch.where(better, total, least)
        shrink = torch.where(better, torch.full_like(shrink, factor), shrink)
    return grid_of(groups, form, shrink)
