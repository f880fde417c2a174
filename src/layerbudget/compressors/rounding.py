"""Round to nearest exactly as a format does it, plainly or with the grid chosen for the inputs that matter.

``rtn`` is what the runtimes' own writers do without data: GGUF types through the package ``gguf`` itself, compressed-tensors on
the range of every group. ``weighted`` minimises ``sum_j h_j (w_j - Q(w_j))^2`` over ranges, with ``h_j = sum x_j^2`` of the
calibration text (the "importance matrix" of llama.cpp).
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import torch

from ..errors import InvalidInput
from .base import Level, Treatment
from .formats import GGUF, Format, find_format
from .grid import Grid, best_grid, grid_of, grouped
from .rounding_packages import need_gguf


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rounded:
    """A matrix on the grid of its format.

    Attributes:
        weight: ``(d_out, d_in)``, float32: exactly what a runtime reads back.
        scale, zero: Of compressed-tensors, ``(d_out, groups)``, bfloat16 and int8; None for others, which need none beside it.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None


class Quantiser(Treatment):
    """A treatment whose level is a format."""

    changes: ClassVar[str] = "format"
    unseen: ClassVar[str] = "it was rounded to nearest"

    def apply(self, weight: torch.Tensor, prepared: Any, level: Level, **options: Any) -> torch.Tensor:
        """See :meth:`Treatment.apply`."""
        return self.quantise(weight, prepared, level, **options).weight.to(weight.dtype)

    def quantise(self, weight: torch.Tensor, prepared: Any, level: Level, **options: Any) -> Rounded:
        """The matrix in a format, with what the file needs beside the integers.

        Args:
            weight: ``(d_out, d_in)``.
            prepared: From :meth:`prepare`; None where no token reached the matrix: then to nearest.
            level: Its ``format``.
            **options: Of the quantiser.

        Raises:
            InvalidInput: A level without a format, or a shape that the format does not divide.
        """
        if level.format is None:
            raise InvalidInput(
                f"{self.name} rounds to formats and removes nothing.", "Levels of it have a format.", "Use quantize."
            )
        form = find_format(level.format)
        form.check("The matrix", weight.shape[1])
        if form.plain:
            half = torch.float16 if form.family == GGUF else torch.bfloat16
            return Rounded(weight=weight.to(half).to(torch.float32))
        if prepared is None and self.statistic != "none":
            return Nearest().onto(weight, None, form)
        return self.onto(weight, prepared, form, **options)

    @abc.abstractmethod
    def onto(self, weight: torch.Tensor, prepared: Any, form: Format, **options: Any) -> Rounded:
        """The matrix on the grid of a format that is none of plain numbers and divides it."""


def on_grid(groups: torch.Tensor, grid: Grid, shape: torch.Size) -> Rounded:
    """Groups rounded on their grids, as one matrix."""
    weight = grid.round(groups).reshape(shape)
    if grid.zero is None:
        return Rounded(weight=weight)
    return Rounded(weight=weight, scale=grid.d[..., 0].to(torch.bfloat16), zero=grid.zero[..., 0])


def through_gguf(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """Quantised and read back by the package ``gguf``, float32.

    Raises:
        MissingDependency: It is not installed.
    """
    gguf = need_gguf()
    kind = gguf.GGMLQuantizationType[form.name]
    data = weight.detach().to(torch.float32).cpu().contiguous().numpy()
    return torch.from_numpy(gguf.dequantize(gguf.quantize(data, kind), kind)).to(weight.device)


class Nearest(Quantiser):
    """Round to nearest, as the format's own writer does."""

    name, summary = "rtn", "round to nearest as the format does it; needs no data"

    def onto(self, weight: torch.Tensor, prepared: Any, form: Format, **options: Any) -> Rounded:
        """See :meth:`Quantiser.onto`."""
        if form.family == GGUF:
            return Rounded(weight=through_gguf(weight, form))
        groups = grouped(weight, form)
        return on_grid(groups, grid_of(groups, form), weight.shape)


class Weighted(Quantiser):
    """Round to nearest on the range that loses least, weighted by the inputs."""

    name, summary = "weighted", "round to nearest, ranges chosen by the second moments of the inputs"
    statistic = "diagonal"

    def onto(self, weight: torch.Tensor, prepared: torch.Tensor, form: Format, **options: Any) -> Rounded:
        """See :meth:`Quantiser.onto`."""
        groups = grouped(weight, form)
        importance = prepared.to(torch.float32).reshape(1, groups.shape[1], -1)
        return on_grid(groups, best_grid(groups, form, importance), weight.shape)
