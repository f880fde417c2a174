r"""Coordinate descent: codes and scales of a matrix, chosen for the error of its output, none of them once and for all.

What a rounded matrix Q does to the output is ``tr((W - Q) H (W - Q)')`` with H the second moment of the inputs. Error feedback
(GPTQ) chooses every code once, and scales never again. Here a sweep goes over the columns: the scales of a group are solved
again for its codes, then every code moves to the level that is best while all others stay, which is the one nearest to
``q_j + ((W - Q) H)_j / H_jj``. No step raises the form, so more sweeps only help. Codes begin at the nearest ones: from there
descent ends nearer to the weights than from those of error feedback, and at less damage on other text.

All types are one form, ``d s[sub] t[code] + c m[sub]``: d and c belong to a block and are numbers of 8 or 16 bits, s and m are
whole numbers of a few bits and belong to some of its columns (:class:`Layout`).

Weights of a lattice share a code. Eight of them move together, if the form falls: to the best of all words under the signs of
what is aimed at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import cast

import torch

PANEL = 128  # columns whose part of (W - Q) H is made in one product
OCTET = 8  # weights of a lattice that are chosen together
_CHUNK = 32  # columns that are corrected for each other one by one
_TINY = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Weights that a type can hold: a weight is ``d s t + c m``.

    Attributes:
        block: Columns under one d and c.
        sub: Columns under one s and m.
        levels: All t, ascending, ``(levels,)``.
        half: The type of d and c: float16, bfloat16 or, in units of ``unit``, e4m3. None where they stay as they are.
        unit: The number over all d.
        scales: Least and largest s; None where there is none, and s = 1.
        minima: Least and largest m; ``(1, 1)`` where c alone is the minimum. None where there is no minimum.
        tied: Whether c is d, and m a zero point.
        words: Of a lattice: the t that weights beside each other may have, without their signs, ``(words, weights of a word)``.
            Its s are odd.
        even_signs: Whether every ``OCTET`` weights of a lattice have an even number of minuses.
    """

    block: int
    sub: int
    levels: torch.Tensor
    half: torch.dtype | None
    unit: float = 1.0
    scales: tuple[int, int] | None = None
    minima: tuple[int, int] | None = None
    tied: bool = False
    words: torch.Tensor | None = None
    even_signs: bool = False

    def to_half(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest numbers that d and c can be.

        In compressed-tensors (bfloat16, e4m3) none is zero, and d alone may be below it, of integers without a zero point.
        """
        if self.half is None:
            return values
        most = torch.finfo(self.half).max
        least = {torch.bfloat16: torch.finfo(torch.float32).eps, torch.float8_e4m3fn: 2.0**-9}.get(self.half, -most)
        sizes = values.abs() if self.signed else values
        halves = (sizes * self.unit).clamp(least, most).to(self.half).to(values.dtype) / self.unit
        return torch.where(values < 0, -halves, halves) if self.signed else halves

    @property
    def signed(self) -> bool:
        """Whether d has either sign, as that of integers in compressed-tensors, which reach further below zero than above."""
        return self.half == torch.bfloat16 and self.minima is None

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest levels."""
        if self.even:
            return values.round().clamp_(*self.ends)
        return self.levels[torch.bucketize(values, self._between)]

    @functools.cached_property
    def ends(self) -> tuple[float, float]:
        """The least and the largest level."""
        return float(self.levels[0]), float(self.levels[-1])

    @functools.cached_property
    def even(self) -> bool:
        """Whether levels are one apart."""
        return self.ends[1] - self.ends[0] == len(self.levels) - 1

    @functools.cached_property
    def features(self) -> torch.Tensor:
        """Of every word its weights, and their products two by two, ``(words, weights + pairs)``: a form of them is linear."""
        words = cast(torch.Tensor, self.words)
        first, second = torch.triu_indices(words.shape[1], words.shape[1])
        return torch.cat([words, words[:, first] * words[:, second]], 1)

    @functools.cached_property
    def _between(self) -> torch.Tensor:
        return (self.levels[1:] + self.levels[:-1]) / 2


@dataclasses.dataclass(kw_only=True, eq=False)
class Codes:
    """A matrix in a layout, transposed: one column per row of the matrix.

    Attributes:
        level: The t of every weight, ``(columns, rows)``.
        d, c: ``(blocks, rows)``; c is zero where there is no minimum, and d where it is tied.
        s, m: ``(subs, rows)``, whole numbers.
    """

    level: torch.Tensor
    d: torch.Tensor
    c: torch.Tensor
    s: torch.Tensor
    m: torch.Tensor

    def steps(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factor and the offset of the levels of every sub, ``(subs, rows)`` each."""
        each = layout.block // layout.sub
        return self.d.repeat_interleave(each, 0) * self.s, self.c.repeat_interleave(each, 0) * self.m

    def weight(self, layout: Layout) -> torch.Tensor:
        """The weights, ``(columns, rows)``."""
        step, base = (x.repeat_interleave(layout.sub, 0) for x in self.steps(layout))
        return step.mul_(self.level).add_(base)


def descend(weight: torch.Tensor, moment: torch.Tensor, codes: Codes, layout: Layout, sweeps: int = 1) -> None:
    """Improve codes and scales in place until ``sweeps`` went over all columns; scales are solved once more at the end.

    Args:
        weight: ``(columns, rows)``, float32.
        moment: H, symmetric and positive definite, ``(columns, columns)``.
        codes: Where descent begins; changed.
        layout: What the type can hold.
        sweeps: Passes over the columns.
    """
    state = _State(weight=weight, moment=moment, codes=codes, layout=layout, error=weight - codes.weight(layout))
    for turn in range(max(sweeps, 1)):
        for panel in state.panels():
            state.improve(panel, first=turn == 0, with_codes=sweeps > 0)


@dataclasses.dataclass(kw_only=True, eq=False)
class _State:
    """The error ``W - Q`` of all columns beside what it comes from."""

    weight: torch.Tensor
    moment: torch.Tensor
    codes: Codes
    layout: Layout
    error: torch.Tensor

    def panels(self) -> Iterator[slice]:
        """Columns that are improved together: whole blocks."""
        block = self.layout.block
        width = max(block, PANEL // block * block)
        for start in range(0, len(self.error), width):
            yield slice(start, min(start + width, len(self.error)))

    def improve(self, panel: slice, *, first: bool, with_codes: bool) -> None:
        """One pass over a panel. ``pull`` is its part of ``H (W - Q)``, kept up to date for the columns still to come.

        Scales are solved for the codes that a sub begins with, and again for those that it ends with.
        """
        block, sub = self.layout.block, self.layout.sub
        pull = self.moment[panel] @ self.error
        for start in range(panel.start, panel.stop, block):
            if sub < block:
                self._change(panel, pull, slice(start, start + block), self._solve_block(panel, pull, start))
            for low in range(start, start + block, sub):
                columns = slice(low, low + sub)
                if first and self.layout.half is not None:
                    self._change(panel, pull, columns, self._solve_sub(panel, pull, columns))
                if with_codes and self.layout.words is None:
                    self._choose_codes(panel, pull, columns)
                elif with_codes:
                    self._choose_words(panel, pull, columns)
                if with_codes and self.layout.half is not None:
                    self._change(panel, pull, columns, self._solve_sub(panel, pull, columns))

    def _change(self, panel: slice, pull: torch.Tensor, columns: slice, change: torch.Tensor) -> None:
        """Take a change of the weights of some columns into account, in those and in later ones."""
        self.error[columns] -= change
        pull[columns.start - panel.start :].addmm_(self.moment[columns.start : panel.stop, columns], change, alpha=-1)

    def _choose_codes(self, panel: slice, pull: torch.Tensor, columns: slice) -> None:
        """Move every code of a sub to its best level. All is measured in steps of the grid, which its columns share."""
        sub, codes, layout = columns.start // self.layout.sub, self.codes, self.layout
        step = codes.d[columns.start // layout.block] * codes.s[sub]
        inverse = torch.where(step == 0, 0.0, 1 / step)
        for start in range(columns.start, columns.stop, _CHUNK):
            stop = min(start + _CHUNK, columns.stop)
            inside = self.moment[start:stop, start:stop]
            scaled = pull[start - panel.start : stop - panel.start] * inverse
            level, moved = codes.level[start:stop], torch.empty_like(scaled)
            for j, each in enumerate(inside.diagonal().tolist()):
                best = torch.add(level[j], scaled[j], alpha=1 / each)
                best = best.round_().clamp_(*layout.ends) if layout.even else layout.nearest(best)
                torch.sub(best, level[j], out=moved[j])
                level[j] = best
                scaled[j + 1 :].addr_(inside[j + 1 :, j], moved[j], alpha=-1)
            moved *= step
            self.error[start:stop] -= moved
            pull[columns.start - panel.start :].addmm_(self.moment[columns.start : panel.stop, start:stop], moved, alpha=-1)

    def _choose_words(self, panel: slice, pull: torch.Tensor, columns: slice) -> None:
        """Choose the words of a sub again, an octet after the other: signs by its best weights, then the best word under them.

        An octet stays as it is where the form does not fall.
        """
        codes, layout = self.codes, self.layout
        step = codes.d[columns.start // layout.block] * codes.s[columns.start // layout.sub]
        inverse = torch.where(step == 0, 0.0, 1 / step)
        for start in range(columns.start, columns.stop, OCTET):
            octet = slice(start, start + OCTET)
            inside, there = self.moment[octet, octet], pull[start - panel.start : start - panel.start + OCTET]
            level, (factor, lost) = codes.level[octet], torch.linalg.cholesky_ex(inside)
            best = there / inside.diagonal()[:, None] if lost else torch.cholesky_solve(there, factor)  # lost in rounding
            aim = level + best * inverse
            moved = _nearest_octet(aim, inside, layout) - level
            change = moved * step
            falls = (change * (inside @ change - 2 * there)).sum(0) < 0
            moved, change = (torch.where(falls, x, 0.0) for x in (moved, change))
            codes.level[octet] += moved
            self.error[octet] -= change
            pull[columns.start - panel.start :].addmm_(self.moment[columns.start : panel.stop, octet], change, alpha=-1)

    def _solve_sub(self, panel: slice, pull: torch.Tensor, columns: slice) -> torch.Tensor:
        """Solve the scales of one sub again; return the change of its weights, ``(columns, rows)``."""
        layout, codes = self.layout, self.codes
        sub, block = columns.start // layout.sub, columns.start // layout.block
        level, inside = codes.level[columns], self.moment[columns, columns]
        d, c, s, m = codes.d[block], codes.c[block], codes.s[sub], codes.m[sub]
        there = pull[columns.start - panel.start : columns.stop - panel.start]
        form = _Form.of(level, inside, there, None if layout.minima is None else torch.ones_like(level[:, :1]))
        step, base = d * s, c * m
        best = _Best(torch.zeros_like(step), d, c, s, m)
        for d_new, c_new, s_new, m_new in _candidates(form, layout, d, c, s, m):
            best.offer(form.change(d_new * s_new - step, c_new * m_new - base), d_new, c_new, s_new, m_new)
        codes.d[block], codes.c[block], codes.s[sub], codes.m[sub] = d, c, s, m = best.values
        return level * (d * s - step) + (c * m - base)

    def _solve_block(self, panel: slice, pull: torch.Tensor, start: int) -> torch.Tensor:
        """Solve d and c of a block again under its s and m; return the change of its weights."""
        layout, codes = self.layout, self.codes
        columns, block = slice(start, start + layout.block), start // layout.block
        subs = slice(start // layout.sub, (start + layout.block) // layout.sub)
        inside, there = self.moment[columns, columns], pull[start - panel.start : start - panel.start + layout.block]
        slope = codes.level[columns] * codes.s[subs].repeat_interleave(layout.sub, 0)
        add = None if layout.minima is None else codes.m[subs].repeat_interleave(layout.sub, 0)
        form = _Form.of(slope, inside, there, add)
        d, c = codes.d[block], codes.c[block]
        by_d, _ = form.solve()
        new_d = layout.to_half(d + by_d)
        new_c = c if add is None else layout.to_half(c + form.rest(new_d - d))
        best = _Best(torch.zeros_like(d), d, c)
        best.offer(form.change(new_d - d, new_c - c), new_d, new_c)
        change = slope * (best.values[0] - d)
        if add is not None:
            change += add * (best.values[1] - c)
        codes.d[block], codes.c[block] = best.values
        return change


def _nearest_octet(aim: torch.Tensor, moment: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return levels of a lattice near those that are aimed at, ``(OCTET, rows)``, by the form with a moment.

    Signs are those of the aim. Words that do not fill the octet are chosen one after the other, as error feedback does it.
    """
    words = cast(torch.Tensor, layout.words)
    size = words.shape[1]
    signs = torch.where(aim < 0, -1.0, 1.0)
    if layout.even_signs:  # the sign that costs least is turned where their number is odd
        least = (aim.abs() * moment.diagonal()[:, None]).argmin(0, keepdim=True)
        odd = signs.prod(0, keepdim=True)
        signs.scatter_(0, least, signs.gather(0, least) * odd)
    out, first, second = torch.empty_like(aim), *torch.triu_indices(size, size)
    twice = torch.where(first == second, 1.0, 2.0)[:, None]
    for start in range(0, OCTET, size):
        part, rest = slice(start, start + size), slice(start + size, OCTET)
        own, (inverse, lost) = moment[part, part], torch.linalg.inv_ex(moment[rest, rest])
        made_up = moment[rest, part] * 0 if lost else inverse @ moment[rest, part]  # by the rest, for an error of the part
        own = own - moment[part, rest] @ made_up
        signed = signs[part]
        linear = -2 * signed * (own @ aim[part])
        square = own[first, second][:, None] * twice * signed[first] * signed[second]
        form = torch.cat([linear, square]).T @ layout.features.T
        best = torch.from_numpy(form.numpy().argmin(1))  # numpy's is many times as quick as torch's
        out[part] = words[best].T * signed
        aim[rest] += made_up @ (aim[part] - out[part])
    return out


class _Best:
    """The values of the largest fall of the form so far, for every row by itself."""

    def __init__(self, change: torch.Tensor, *values: torch.Tensor) -> None:
        self.change, self.values = change, list(values)

    def offer(self, change: torch.Tensor, *values: torch.Tensor) -> None:
        """Take other values where the form falls further by them."""
        better = change < self.change
        self.change = torch.where(better, change, self.change)
        self.values = [torch.where(better, new, old) for new, old in zip(values, self.values, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Form:
    """How the form changes with the weights of some columns, by ``x slope + y add``, for every row: two variables.

    It changes by ``x^2 xx + 2 x y xy + y^2 yy - 2 (x px + y py)``. Without ``both`` y is zero, and so are its parts.
    """

    both: bool
    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor
    px: torch.Tensor
    py: torch.Tensor

    @classmethod
    def of(cls, slope: torch.Tensor, moment: torch.Tensor, pull: torch.Tensor, add: torch.Tensor | None) -> _Form:
        """The form of columns with a moment and a pull, all ``(columns, ...)``; ``add`` is ``(columns, 1 or rows)``."""
        xx, px = (slope * (moment @ slope)).sum(0), (slope * pull).sum(0)
        if add is None:
            none = torch.zeros_like(xx)
            return cls(both=False, xx=xx, xy=none, yy=none, px=px, py=none)
        seen = moment @ add
        return cls(both=True, xx=xx, xy=(slope * seen).sum(0), yy=(add * seen).sum(0), px=px, py=(add * pull).sum(0))

    def change(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """By how much the form changes."""
        out = x * (x * self.xx - 2 * self.px)
        return out + y * (y * self.yy + 2 * (x * self.xy - self.py)) if self.both else out

    def solve(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The best x and y."""
        if not self.both:
            return _over(self.px, self.xx), self.py
        determinant = self.xx * self.yy - self.xy.square()
        regular = determinant > 1e-6 * self.xx * self.yy
        x = torch.where(regular, _over(self.px * self.yy - self.py * self.xy, determinant), 0.0)
        return x, self.rest(x)

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        """The best y for an x."""
        return _over(self.py - x * self.xy, self.yy)

    def tied(self, step: torch.Tensor, base: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The best step where the base is ``zero`` times it, from a step and base of now."""
        by_step, by_base = self.xx + zero * self.xy, self.xy + zero * self.yy
        return _over(self.px + zero * self.py + step * by_step + base * by_base, by_step + zero * by_base)


def _over(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A quotient, zero where nothing can be divided by."""
    return torch.where(by > _TINY, values / by, 0.0)


def _candidates(
    form: _Form, layout: Layout, d: torch.Tensor, c: torch.Tensor, s: torch.Tensor, m: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Values that a sub can hold near the best ones: of d and c where they are its own, else of s and m."""
    step, base = d * s, c * m
    x, y = form.solve()
    if layout.tied and layout.minima is not None:
        nearest = torch.where(step + x == 0, m, (base + y) / (step + x)).round().clamp(*layout.minima)
        for zero in (m, nearest):
            fitted = layout.to_half(form.tied(step, base, zero))
            yield fitted, fitted, s, zero
    elif layout.scales is None:
        fitted = layout.to_half(step + x)
        yield fitted, c if layout.minima is None else layout.to_half(base + form.rest(fitted - step)), s, m
    else:
        inverse, back = torch.where(d == 0, 0.0, 1 / d), torch.where(c == 0, 0.0, 1 / c)
        aim = (step + x) * inverse
        low, high = (aim.floor(), aim.ceil()) if layout.words is None else _odd_beside(aim)
        for whole in (low, high, s):
            fitted = whole.clamp(*layout.scales)
            least = m
            if layout.minima is not None:
                least = ((base + form.rest(d * fitted - step)) * back).round().clamp(*layout.minima)
            yield d, c, fitted, least


def _odd_beside(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next odd numbers below and above."""
    low = 2 * ((values - 1) / 2).floor() + 1
    return low, low + 2
