r"""Quantisers: round a matrix onto the grid of a format, plainly, for the inputs that matter, or column by column.

* **rtn** rounds to nearest, as the runtimes' own writers do without data: GGUF types through ggml itself, compressed-tensors
  on the range of every group.
* **weighted** minimises ``sum_j h_j (w_j - Q(w_j))^2`` over the grids that a group may have, with ``h_j = sum x_j^2`` of the
  calibration text. GGUF types are rounded by ggml, for which ``h`` is the importance matrix.
* **gptq** (Frantar et al., arXiv 2210.17323) minimises ``|| (W - Q) X ||^2`` over grids, greedily: with
  ``U' U = (X X' + damping)^-1`` (the factor of SparseGPT), column j is rounded, its error divided by ``U_jj`` and taken from
  the columns behind it in proportion to ``U_j,:``. Groups and their columns go by what their inputs weigh, the heaviest first
  (:class:`layerbudget.compressors.feedback.Factors`). The grid of a group is fixed when its first column comes: for GGUF types
  by ggml (:func:`layerbudget.compressors.feedback.feed_back`).

* **descent** begins with gptq, under ranges that are searched as those of weighted, and lowers the same form, column by
  column, with the scales solved again in between (:mod:`layerbudget.compressors.descent`). IQ1_S, IQ1_M, MXFP4 and NVFP4 of
  llama.cpp stay as gptq leaves them, and so do scales that are powers of two (``fp8``, ``mxfp4``, ``mxfp8``).

The grid of a group of compressed-tensors is ``base + d q``, ``q`` an integer or a floating-point number of few bits, with ``d``
and ``base`` exactly as the file holds them, so that a weight on the grid is what a runtime reads back. Scales of rows (``fp8``)
and the number over all scales (``nvfp4``) are powers of two: a floating-point grid loses nothing by that, and every weight is
then a number of bfloat16, in whatever order a runtime multiplies. Scales of ``mxfp4`` and ``mxfp8`` can be nothing else.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch

from ..errors import InvalidInput
from ..models.machine import in_threads, one_thread
from . import ggml, ggml_scales
from .base import Level, Treatment
from .descent import Codes, Layout, descend
from .feedback import Factors, feed_back, feed_back_each
from .formats import GGUF, Floats, Format, find_format
from .sparsegpt import COLUMNS

_SHRINK = tuple(1.0 - 0.02 * i for i in range(26))
_COARSE = tuple(1.0 - 0.1 * i for i in range(5))  # where the scale is solved again afterwards
_GROW = tuple(1.0 + 0.05 * i for i in range(1, 11))  # in e2m1 the largest weight may be 4 as well as 6
_E4M3 = 448  # its largest number, as a scale
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantGrid:
    """Grids of some groups, all of shape ``(..., 1)`` over the inputs of the group.

    Attributes:
        d: Step.
        base: Value of ``q = 0``.
        top: Largest ``q``.
        scale: ``d`` as compressed-tensors is given it: bfloat16, or e4m3 in units of ``unit``.
        zero: Its zero point, int8.
        mantissa, least: Bits behind the point of floating-point ``q``, and their smallest exponent; integers have none.
        unit: The number over all scales, where there is one.
    """

    d: torch.Tensor
    base: torch.Tensor | float
    top: int
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    mantissa: int | None = None
    least: int = 0
    unit: float | None = None

    def nearest(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest ``q``, as float."""
        q = weight / self.d
        if self.mantissa is None:  # base is a whole number of steps: rounded first, no digit of the weight is lost beside it
            return q.round_().sub_(self.base / self.d).clamp_(0, self.top)
        q.clamp_(-self.top, self.top)
        step = _power_below(q).clamp_(min=2.0**self.least).mul_(2.0**-self.mantissa)
        return q.div_(step).round_().mul_(step)  # ties to even, as the formats do it

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest points of the grid."""
        return self.nearest(weight).mul_(self.d).add_(self.base)


def grouped(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """``(d_out, groups, inputs of a group)``, float32."""
    return weight.to(torch.float32).reshape(weight.shape[0], form.groups(weight.shape[1]), -1)


def grid_of(
    groups: torch.Tensor,
    form: Format,
    peak: float | None,
    shrink: float | torch.Tensor = 1.0,
    *,
    sign: torch.Tensor | None = None,
) -> QuantGrid:
    """The grid of groups of weights ``(..., inputs)``, float32, whose range ``shrink`` makes smaller.

    Zero is a point of the grid; scales of integers are kept in bfloat16, zero points in int8. ``peak`` is the largest magnitude
    that the number over all scales is made for; None where the format has no such number (:attr:`Format.united`).

    Symmetric integers have one code more below zero than above. Their scales may have a ``sign`` ``(..., 1)``, 1 or -1: then
    the largest weight is the last code on its side, and with :func:`sign_of_largest` that is the one without an opposite. All
    codes are used then, and steps are smaller: by 6 % with 4 bits. Else scales are above zero, as most tools make them.
    """
    if form.floats is not None:
        return _float_grid(groups.abs().amax(-1, keepdim=True) * shrink, form.floats, peak)
    low = groups.amin(-1, keepdim=True).clamp(max=0) * shrink
    high = groups.amax(-1, keepdim=True).clamp(min=0) * shrink
    span, least = form.levels - 1, -(1 << (form.bits - 1))
    raw = torch.maximum(-low, high) * 2 / span if form.symmetric else (high - low) / span
    if form.symmetric and sign is not None:
        raw = sign * torch.maximum(-low, high) / torch.where(sign == sign_of_largest(groups), -least, span + least)
    raw = torch.where(raw == 0, torch.full_like(raw, torch.finfo(torch.float32).eps), raw)
    zero = torch.zeros_like(raw) if form.symmetric else torch.round((least - low / raw).clamp(least, least + span))
    scale = raw.to(torch.bfloat16)
    d = scale.to(torch.float32)
    return QuantGrid(d=d, base=(least - zero) * d, top=form.levels - 1, scale=scale, zero=zero.to(torch.int8))


def sign_of_largest(groups: torch.Tensor) -> torch.Tensor:
    """Signs of scales ``(..., 1)`` with which the largest weights of groups lie below zero among the codes."""
    return torch.where(groups.amax(-1, keepdim=True) > -groups.amin(-1, keepdim=True), -1.0, 1.0)


def _float_grid(high: torch.Tensor, floats: Floats, peak: float | None) -> QuantGrid:
    """The grid of groups of the largest magnitudes ``(..., 1)``.

    Powers of two in one byte are those of compressed-tensors: the largest magnitude of e2m1 becomes 3.5 to 7, above 6 it is 6;
    that of e4m3 becomes 224 to 448.
    """
    top = floats.top
    codes: dict[str, Any] = {"base": 0.0, "top": top, "mantissa": floats.mantissa, "least": floats.least}
    if floats.scale == "uint8":  # as far as every code is a normal number of bfloat16
        whole = 2.0 ** (top.bit_length() - 1)
        d = (_power_below(high / 0.875) / whole).clamp(2.0 ** (floats.mantissa - floats.least - 126), 2.0**127 / whole)
        return QuantGrid(d=d, scale=d.to(torch.bfloat16), **codes)
    if not floats.united:
        d = 1 / _power_below(top / torch.where(high == 0, top, high))
        return QuantGrid(d=d, scale=d.to(torch.bfloat16), **codes)
    if peak is None:
        raise ValueError("A grid under one number over all scales needs the largest magnitude of the matrix.")
    unit = float(_power_below(torch.tensor(_E4M3 * top / (peak or top))))
    scale = (high * (unit / top)).clamp(2.0**-9, _E4M3).to(torch.float8_e4m3fn)  # the least is the smallest above zero
    return QuantGrid(d=scale.float() / unit, scale=scale, unit=unit, **codes)


def _power_below(values: torch.Tensor) -> torch.Tensor:
    """The largest powers of two that are no larger in magnitude, of float32: its exponent without its mantissa."""
    return values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def _best_grid(
    groups: torch.Tensor,
    form: Format,
    peak: float | None,
    importance: torch.Tensor,
    ranges: Sequence[float] = _SHRINK,
    ways: Sequence[float] = (1.0, -1.0),
) -> QuantGrid:
    """For every group the grid of least ``sum_j h_j (w_j - Q(w_j))^2`` among ranges, and of symmetric integers among signs.

    Ranges are shares of the whole one, by default 26 from all of it to half. Of floating-point codes with few bits ranges up to
    half as large again are tried too. Signs are :func:`sign_of_largest` times one or two ``ways``.
    """
    ranges = (*ranges, *(_GROW if form.floating and form.bits < 8 else ()))
    likely, least = sign_of_largest(groups), torch.full_like(groups[..., :1], torch.inf)
    shrink, turn = torch.ones_like(least), torch.ones_like(least)
    for way, factor in itertools.product(ways if form.symmetric and not form.floating else (1.0,), ranges):
        grid = grid_of(groups, form, peak, factor, sign=likely * way)
        total = ((grid.round(groups) - groups) ** 2 * importance).sum(-1, keepdim=True)
        better = total < least
        least, shrink = torch.where(better, total, least), torch.where(better, factor, shrink)
        turn = torch.where(better, way, turn)
    return grid_of(groups, form, peak, shrink, sign=likely * turn)


_FEW = 4096  # rows at most, in all types together, that get error feedback in all types at once
_MANY = 5120  # rows at most that get error feedback together on a processor: every step of few rows takes as long as of more
_ROWS = 1024  # that one thread improves together: fewer, and a step takes longer to begin than to do
_FED_BACK = 1 << 25  # weights that get error feedback together, at most: a few copies of them in float32 are held


def rows_together(weight: torch.Tensor) -> int:
    """Return how many rows get error feedback together: as many as lie in a processor's cache, and fit in memory.

    There are as few pieces as that allows, and all are equally large.
    """
    fit = max(1, _FED_BACK // weight.shape[1])
    most = min(_MANY, fit) if weight.device.type == "cpu" else fit
    return -(-len(weight) // -(-len(weight) // most)) if len(weight) else 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rounded:
    """A matrix on the grid of its format.

    Attributes:
        weight: ``(d_out, d_in)``, float32: exactly what a runtime reads back.
        scale, zero: Of compressed-tensors, ``(d_out, groups)``; see :class:`QuantGrid`.
        unit: The number over all scales, of formats that have one.
        data: Of GGUF, the bytes of the file, ``(d_out, bytes of a row)``; None for 16 bits.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    unit: float | None = None
    data: np.ndarray | None = None


def joined(parts: Sequence[Rounded]) -> Rounded:
    """Return a matrix from rounded rows of it, in their order."""

    def below(name: str) -> Any:
        """One field of all rows."""
        values = [getattr(part, name) for part in parts]
        if values[0] is None or len(values) == 1:
            return values[0]
        return np.concatenate(values) if name == "data" else torch.cat(values)

    return dataclasses.replace(parts[0], **{name: below(name) for name in ("weight", "scale", "zero", "data")})


class Quantiser(Treatment):
    """A treatment whose level is a format."""

    changes: ClassVar[str] = "format"
    unseen: ClassVar[str] = "it was rounded to nearest"
    imatrix: str | None = None

    @property
    def reads_text(self) -> bool:
        """Whether it asks for the inputs of matrices, and no file has them."""
        return self.statistic != "none" and self.imatrix is None

    def apply(self, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """See :meth:`Treatment.apply`."""
        return self.quantise(weight, prepared, level).weight.to(weight.dtype)

    def quantise(self, weight: torch.Tensor, prepared: Any, level: Level) -> Rounded:
        """The matrix ``(d_out, d_in)`` in a format, with scales and zero points; to nearest where no token reached it.

        Raises:
            InvalidInput: A level without a format, or a shape that the format does not divide.
        """
        if level.format is None:
            what = f"{self.name} rounds to formats and removes nothing."
            raise InvalidInput(what, "Levels of it have a format.", "Use a plan of bits.")
        form = find_format(level.format)
        form.check("The matrix", weight.shape[1])
        if form.plain:
            half = torch.float16 if form.family == GGUF else torch.bfloat16
            return Rounded(weight=weight.to(half).to(torch.float32))
        chosen = Nearest() if prepared is None and self.statistic != "none" else self
        if form.family != GGUF:
            peak = float(weight.abs().max()) if form.united and level.peak is None else level.peak
            return chosen.onto(weight, prepared, form, peak)
        data = chosen.in_ggml(weight, prepared, form)
        return Rounded(weight=torch.from_numpy(ggml.dequantise(data, form.name)).to(weight.device), data=data)

    def quantise_each(self, weight: torch.Tensor, prepared: Any, levels: Sequence[Level]) -> list[Rounded]:
        """See :meth:`quantise`, in several formats."""
        return [self.quantise(weight, prepared, level) for level in levels]

    def weigh(self, errors: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Squared error of every row as it counts for the output, ``(rows,)``: ``sum_j h_j e_j^2`` by a diagonal."""
        return errors.square() @ prepared.to(errors)

    @abc.abstractmethod
    def onto(self, weight: torch.Tensor, prepared: Any, form: Format, peak: float | None) -> Rounded:
        """The matrix on the grid of a format of compressed-tensors that is none of plain numbers and divides it.

        ``peak`` goes on to :func:`grid_of`: the largest magnitude that shares one number over all scales.
        """

    def in_ggml(self, weight: torch.Tensor, prepared: Any, form: Format) -> np.ndarray:
        """The bytes of the matrix in a type of llama.cpp that divides it, ``(d_out, bytes of a row)``; refused by default."""
        raise InvalidInput(
            f"{self.name} does not round to llama.cpp's types.",
            "rtn, weighted, gptq and descent do.",
            "Use one of those, or plan for compressed-tensors.",
        )


def _on_grid(groups: torch.Tensor, grid: QuantGrid, shape: torch.Size) -> Rounded:
    zero = None if grid.zero is None else grid.zero[..., 0]
    return Rounded(weight=grid.round(groups).reshape(shape), scale=grid.scale[..., 0], zero=zero, unit=grid.unit)


def _by_ggml(weight: torch.Tensor, form: Format, importance: torch.Tensor | None) -> np.ndarray:
    weights = None if importance is None else importance.detach().to(torch.float32).cpu().numpy()
    return ggml.quantise(weight.detach().to(torch.float32).cpu().numpy(), form.name, weights, threads=torch.get_num_threads())


class Nearest(Quantiser):
    """Round to nearest, as the format's own writer does."""

    name, summary = "rtn", "round to nearest as the format does it; needs no data"

    def onto(self, weight: torch.Tensor, prepared: Any, form: Format, peak: float | None) -> Rounded:
        """See :meth:`Quantiser.onto`."""
        groups = grouped(weight, form)
        return _on_grid(groups, grid_of(groups, form, peak), weight.shape)

    def in_ggml(self, weight: torch.Tensor, prepared: Any, form: Format) -> np.ndarray:
        """See :meth:`Quantiser.in_ggml`; where ggml asks for importances all columns count alike."""
        return _by_ggml(weight, form, torch.ones(weight.shape[1]) if form.needs_inputs else None)


class Weighted(Quantiser):
    """Round to nearest on the range that loses least, weighted by the inputs.

    Args:
        imatrix: An importance matrix of llama.cpp that has the second moments; by default they are of the calibration text.
    """

    name, summary = "weighted", "round to nearest, ranges chosen by the second moments of the inputs"
    statistic = "diagonal"

    def __init__(self, *, imatrix: str | None = None) -> None:
        self.imatrix = imatrix

    def onto(self, weight: torch.Tensor, prepared: torch.Tensor, form: Format, peak: float | None) -> Rounded:
        """See :meth:`Quantiser.onto`."""
        groups = grouped(weight, form)
        importance = prepared.to(torch.float32).reshape(1, groups.shape[1], -1)
        return _on_grid(groups, _best_grid(groups, form, peak, importance), weight.shape)

    def in_ggml(self, weight: torch.Tensor, prepared: torch.Tensor, form: Format) -> np.ndarray:
        """See :meth:`Quantiser.in_ggml`."""
        return _by_ggml(weight, form, prepared)


class GPTQ(Quantiser):
    """Column by column, and the later columns make up for the errors.

    Args:
        damping: Relative to the mean of the second moments' diagonal.
        shrinkage: By what share moments of two different inputs are taken to be smaller than the text says.
        equal_tokens: Let every token count the same in the moments, however large its input is.
    """

    name, summary = "gptq", "later columns make up for the rounding of earlier ones, by second moments of the inputs"
    statistic = "gram"

    def __init__(self, *, damping: float = 0.01, shrinkage: float = 0.0, equal_tokens: bool = False) -> None:
        if not 0 <= shrinkage < 1:
            raise InvalidInput(f"A shrinkage of {shrinkage:g} was given.", "It is 0 or more, and less than 1.", "Try 0.2.")
        self.damping, self.shrinkage, self.equal_tokens = damping, shrinkage, equal_tokens

    def prepare(self, moment: torch.Tensor) -> Factors:
        """The factors of the inverse of the moment, shrunk and damped."""
        if self.shrinkage:
            diagonal, moment = moment.diagonal(), moment * (1 - self.shrinkage)
            moment.diagonal().copy_(diagonal)
        return Factors(moment, self.damping)

    def weigh(self, errors: torch.Tensor, prepared: Factors) -> torch.Tensor:
        """See :meth:`Quantiser.weigh`: ``e (X X' + damping) e'``, from a factor of the inverse."""
        order, upper = next(iter(prepared.made.values()), None) or prepared.of(errors.shape[1])
        outputs = torch.linalg.solve_triangular(upper.to(errors), errors[:, order], upper=True, left=False)
        return outputs.square().sum(1)

    def grid(self, groups: torch.Tensor, form: Format, peak: float | None, importance: torch.Tensor) -> QuantGrid:
        """The grid of one group ``(rows, inputs)`` as the columns before it have left it, whose inputs count so much."""
        return grid_of(groups, form, peak, sign=sign_of_largest(groups))

    def onto(self, weight: torch.Tensor, prepared: Factors, form: Format, peak: float | None) -> Rounded:
        """See :meth:`Quantiser.onto`."""
        size = form.group or weight.shape[1]
        order, factor = prepared.of(size)
        work = weight.detach().to(torch.float32).T[order]
        columns = max(size, COLUMNS // size * size)
        out, grids = torch.empty_like(work), []
        for start in range(0, work.shape[0], columns):
            stop = min(start + columns, work.shape[0])
            block, upper, errors = work[start:stop], factor[start:stop, start:stop], torch.empty_like(work[start:stop])
            for low in range(0, stop - start, size):
                groups = block[low : low + size].T.contiguous()
                grid = self.grid(groups, form, peak, upper.diagonal()[low : low + size].square().reciprocal())
                grids.append(grid)
                for j in range(low, low + size):
                    rounded = grid.round(block[j][:, None])[:, 0]
                    torch.sub(block[j], rounded, out=errors[j]).div_(upper[j, j])
                    block[j + 1 :].addr_(upper[j, j + 1 :], errors[j], alpha=-1)
                    out[start + j] = rounded
            if stop < work.shape[0]:
                work[stop:] -= factor[start:stop, stop:].T @ errors
        grids = [grids[i] for i in (order[::size] // size).argsort().tolist()]
        scale, zeros = torch.cat([g.scale for g in grids], 1), [g.zero for g in grids if g.zero is not None]
        zero = torch.cat(zeros, 1) if zeros else None
        return Rounded(weight=out[order.argsort()].T.contiguous(), scale=scale, zero=zero, unit=grids[0].unit)

    def in_ggml(self, weight: torch.Tensor, prepared: Factors, form: Format) -> np.ndarray:
        """See :meth:`Quantiser.in_ggml`; rows do not depend on each other, so large matrices come in pieces."""
        pieces = weight.split(rows_together(weight))
        return np.concatenate([feed_back(rows, prepared, form.name, threads=torch.get_num_threads()) for rows in pieces])

    def quantise_each(self, weight: torch.Tensor, prepared: Any, levels: Sequence[Level]) -> list[Rounded]:
        """See :meth:`Quantiser.quantise_each`; types of llama.cpp share the steps of few rows."""
        forms = [find_format(str(level.format)) for level in levels]
        names = [form.name for form in forms if form.family == GGUF and not form.plain]
        if prepared is None or len(weight) * len(names) > _FEW or type(self).in_ggml is not GPTQ.in_ggml:
            return super().quantise_each(weight, prepared, levels)
        for form in forms:
            form.check("The matrix", weight.shape[1])
        together = feed_back_each(weight, prepared, names, threads=torch.get_num_threads())
        made = {
            name: Rounded(weight=torch.from_numpy(ggml.dequantise(data, name)).to(weight.device), data=data)
            for name, data in together.items()
        }
        return [
            made[form.name] if form.name in made else self.quantise(weight, prepared, level)
            for form, level in zip(forms, levels, strict=True)
        ]


def _codes_of(floats: Floats) -> torch.Tensor:
    """All numbers that a code of floating point can be, from the least to the largest."""
    steps = torch.arange(2**floats.mantissa) / 2**floats.mantissa
    powers = range(floats.least, floats.top.bit_length())
    positive = torch.cat([steps * 2.0**floats.least, *((1 + steps) * 2.0**power for power in powers)])
    positive = positive[positive <= floats.top]
    return torch.cat([-positive[1:].flip(0), positive])


def _layout_of(form: Format, weight: torch.Tensor, unit: float | None) -> Layout:
    """Return the layout of a matrix in a format of compressed-tensors; ``unit`` is the number over all scales."""
    size, least = form.group or weight.shape[1], -(1 << (form.bits - 1))
    if form.floats is not None:
        levels = _codes_of(form.floats)
        half = torch.float8_e4m3fn if form.floats.scale == "float8_e4m3fn" else None  # powers of two stay as they are
    else:
        levels, half = torch.arange(least, least + form.levels, dtype=torch.float32), torch.bfloat16
    return Layout(
        block=size,
        sub=size,
        levels=levels.to(weight.device),
        half=half,
        unit=unit or 1.0,
        minima=None if form.floating or form.symmetric else (1 - form.levels - least, -least),
        tied=not (form.floating or form.symmetric),
    )


class Descent(GPTQ):
    """Error feedback, then sweeps in which codes move to where the error of the output is least and scales are solved again.

    Args:
        damping: Relative to the mean of the second moments' diagonal.
        shrinkage: By what share moments of two different inputs are taken to be smaller than the text says.
        equal_tokens: Let every token count the same in the moments, however large its input is.
        sweeps: Passes over the columns.
    """

    name, summary = "descent", "gptq, then codes and scales are improved in turn; two or three times as long"

    def __init__(self, *, damping: float = 0.01, shrinkage: float = 0.2, sweeps: int = 1, equal_tokens: bool = False) -> None:
        super().__init__(damping=damping, shrinkage=shrinkage, equal_tokens=equal_tokens)
        if sweeps < 0:
            raise InvalidInput(f"{sweeps} sweeps were given.", "There are 0 or more.", "Try 1.")
        self.sweeps = sweeps

    def weigh(self, errors: torch.Tensor, prepared: Factors) -> torch.Tensor:
        """See :meth:`Quantiser.weigh`: ``e (X X' + damping) e'``."""
        return ((errors @ prepared.whole.to(errors)) * errors).sum(1)

    def grid(self, groups: torch.Tensor, form: Format, peak: float | None, importance: torch.Tensor) -> QuantGrid:
        """See :meth:`GPTQ.grid`: the range is searched, as ggml does it; sweeps find nothing better from the other sign."""
        return grid_of(groups, form, peak) if form.floating else _best_grid(groups, form, peak, importance, _COARSE, (1.0,))

    def onto(self, weight: torch.Tensor, prepared: Factors, form: Format, peak: float | None) -> Rounded:
        """See :meth:`Quantiser.onto`."""
        return joined(self._by_rows(lambda rows: self._in_groups(rows, prepared, form, peak), weight, prepared, form))

    def in_ggml(self, weight: torch.Tensor, prepared: Factors, form: Format) -> np.ndarray:
        """See :meth:`Quantiser.in_ggml`."""
        return np.concatenate(self._by_rows(lambda rows: self._in_type(rows, prepared, form), weight.cpu(), prepared, form))

    def begin(self, weight: torch.Tensor, prepared: Factors, form: Format, peak: float | None) -> Rounded:
        """Codes of compressed-tensors where the sweeps begin."""
        return super().onto(weight, prepared, form, peak)

    def _by_rows(self, work: Callable[[torch.Tensor], T], weight: torch.Tensor, prepared: Factors, form: Format) -> list[T]:
        """Return the results of pieces of rows. Each has one thread, so that sums do not depend on the number of threads."""
        with one_thread():
            prepared.of(form.group or weight.shape[1]), prepared.whole  # made once for all pieces
        pieces = weight.split(_ROWS) if weight.device.type == "cpu" else (weight,)
        if len(pieces) == 1:
            with one_thread():
                return [work(weight)]
        done: dict[int, T] = {}
        in_threads(lambda i: done.__setitem__(i, work(pieces[i])), range(len(pieces)))
        return [done[i] for i in range(len(pieces))]

    def _in_groups(self, weight: torch.Tensor, prepared: Factors, form: Format, peak: float | None) -> Rounded:
        """Rows in a format of compressed-tensors."""
        begin = self.begin(weight, prepared, form, peak)
        layout = _layout_of(form, weight, begin.unit)
        scale = cast(torch.Tensor, begin.scale)
        d = scale.T.to(torch.float32).contiguous() / layout.unit
        m = torch.zeros_like(d) if begin.zero is None else begin.zero.T.to(torch.float32).neg()
        level = (begin.weight.T.contiguous() / d.repeat_interleave(layout.sub, 0)).sub_(m.repeat_interleave(layout.sub, 0))
        c = d.clone() if layout.tied else torch.zeros_like(d)
        codes = Codes(level=layout.nearest(level), d=d, c=c, s=torch.ones_like(d), m=m)
        self._descend(weight, prepared, codes, layout)
        return Rounded(
            weight=codes.weight(layout).T.contiguous(),
            scale=(codes.d * layout.unit).T.to(scale.dtype).contiguous(),
            zero=None if begin.zero is None else codes.m.neg().T.to(torch.int8).contiguous(),
            unit=begin.unit,
        )

    def _in_type(self, weight: torch.Tensor, prepared: Factors, form: Format) -> np.ndarray:
        """Rows in a type of llama.cpp; IQ1_S, IQ1_M, MXFP4 and NVFP4 stay as error feedback leaves them."""
        data = feed_back(weight, prepared, form.name, words=True)
        if form.name not in ggml_scales.FIELDS:
            return data
        codes = ggml_scales.read_codes(data, form.name)
        self._descend(weight, prepared, codes, ggml_scales.layout_of(form.name))
        return ggml_scales.write_codes(data, form.name, codes)

    def _descend(self, weight: torch.Tensor, prepared: Factors, codes: Codes, layout: Layout) -> None:
        columns = weight.detach().to(torch.float32).T.contiguous()
        descend(columns, prepared.whole.to(columns), codes, layout, self.sweeps)
