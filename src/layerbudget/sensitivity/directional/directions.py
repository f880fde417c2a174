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
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ...compressors.select import ranked
from ...errors import LengthMismatch
from ...execution.processes import process_group

_CHUNK = 64 << 20  # entries of the gradients of single sequences at a time
_PIECE = 1 << 19  # of these, entries of one sequence that are met while they lie in the processor's cache
_PRODUCT = 1 << 22  # entries of a candidate that meet inputs together: narrower products take longer
_LARGE = 1 << 18  # weights of a matrix: with fewer the gradient is made in no time
_PARTS = 16  # of a sample of rows, at the least: how they differ says how sure it is


class Directions(abc.ABC):
    """Candidate changes of one matrix."""

    groups: int  #: groups of rows that are decided one by one
    levels: int  #: candidates of every group

    @abc.abstractmethod
    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """``<S, Delta>`` of every gradient ``(B, d_out, d_in)``, for every group and level: ``(B, groups, levels)`` float64."""

    def between(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The same of ``S = sum_t b_t a_t'``, with inputs ``(B, T, d_in)`` and output gradients ``(B, T, d_out)``."""
        size = max(1, _CHUNK // (a.shape[2] * b.shape[2]))
        return torch.cat([self.along(b[i : i + size].mT @ a[i : i + size]) for i in range(0, len(a), size)])

    def looked_up(self, rows: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The same where the inputs ``(B, T)`` are rows of the matrix (an embedding), with gradients ``(B, T, d_in)``."""
        raise NotImplementedError

    def by_token(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Contribution of every token to :meth:`between`, ``(B, T, levels)``."""
        raise NotImplementedError


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


class _Last:
    """Results for the last inputs: the draws of a batch share it."""

    def __init__(self) -> None:
        self.inputs: torch.Tensor | None = None
        self.made: Any = None

    def of(self, a: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
        """Return what is made of inputs, the same where they are views of the same values."""
        last = self.inputs
        if last is None or (last.data_ptr(), last.shape, last.dtype) != (a.data_ptr(), a.shape, a.dtype):
            self.made = None  # the old one goes first
            self.inputs, self.made = a, make(a)
        return self.made


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """So many rows of a candidate that another process makes, and where they go."""

    rows: int
    device: torch.device


class Int8Directions(Directions):
    """Candidates that are written down in one byte per entry, under one scale per row: what that rounds off is noise.

    ``pieces`` hold rows of a matrix ``(d_out, d_in)``, one piece below the other: treated minus present weights of every
    candidate, ``(rows, d_in)``, None for no change. Several processes may share them: :class:`Elsewhere` stands for what
    another one makes, and all get what all have made.

    Where candidates of different rows have nothing to do with each other, products of their derivatives are zero on average. A
    *sample* of a matrix's rows is then enough: squares of its derivatives are as large as those of all rows, and
    :func:`spread` says how sure that is.

    Args:
        shape: Rows that the pieces hold in all, and ``d_in``.
        pieces: See above.
        rows: Places of these rows in the matrix, rising; by default all of them.
        share: Share that they are of the rows that count.
        draws: How often the same inputs come, each time with other gradients. Where that is more often than there are
            candidates, the outputs of these are made once, and no gradient of the matrix.
        shared: Whether the processes of the run divide the pieces; then all of them must come here.
    """

    groups = 1

    def __init__(
        self,
        shape: tuple[int, int],
        pieces: Iterable[Sequence[torch.Tensor | Elsewhere | None]],
        rows: torch.Tensor | None = None,
        share: float = 1.0,
        draws: int = 1,
        *,
        shared: bool = False,
    ) -> None:
        self.coded: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self.rows, self.share = rows, share
        size = max(1, _PIECE // shape[1])
        self.size = size if share == 1.0 else min(size, -(-shape[0] // _PARTS))
        start, tiny = 0, torch.finfo(torch.float32).tiny
        for piece in pieces:
            if not self.coded:
                self.coded = [None if d is None else self._room(d, shape) for d in piece]
            stop = start
            for coded, delta in zip(self.coded, piece, strict=True):
                if isinstance(delta, Elsewhere):
                    stop = start + delta.rows
                elif coded is not None and delta is not None:
                    stop = start + len(delta)
                    scale = (delta.abs().amax(1, keepdim=True) / 127).clamp_min(tiny)
                    coded[0][start:stop] = (delta / scale).round_()
                    coded[1][start:stop] = scale * share**-0.5
            start = stop
        for tensor in (t for coded in self.coded if coded is not None for t in coded) if shared else ():
            process_group().reduce([tensor])  # zero where it was another's
        self.levels = len(self.coded)
        self._products = _Last()
        candidates = sum(coded is not None for coded in self.coded)
        self._by_outputs = rows is None and candidates < draws and shape[0] * shape[1] > _LARGE
        self.squares = np.zeros((-(-shape[0] // self.size), self.levels))  # derivatives of parts, squared and added up

    @staticmethod
    def _room(like: torch.Tensor | Elsewhere, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.zeros(shape, dtype=torch.int8, device=like.device)
        return codes, torch.zeros(shape[0], 1, dtype=torch.float32, device=like.device)

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        return self._meet(gradient, lambda rows: gradient[:, rows])

    def between(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.between`; of the gradients some rows at a time are made.

        Or none: the outputs ``Delta a`` are the same for all draws. They are not where rows are a sample, whose squares count.
        """
        if self._by_outputs:
            return self.by_token(a, b).double().sum(1, keepdim=True)
        return self._meet(a, lambda rows: b[..., rows].mT @ a)

    def looked_up(self, rows: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.looked_up`."""
        derivatives = b.new_zeros(len(b), 1, self.levels, dtype=torch.float64)
        rows = rows if self.rows is None else torch.searchsorted(self.rows.to(rows.device), rows)
        for level, coded in enumerate(self.coded):
            if coded is not None:
                derivatives[:, 0, level] = (coded[0][rows].to(b) * coded[1][rows].to(b) * b).sum(-1).double().sum(-1)
        return derivatives

    def by_token(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.by_token`."""
        derivatives = a.new_zeros(*a.shape[:2], self.levels, dtype=torch.float32)
        products = self._products.of(a, self._outputs)
        for start in range(0, b.shape[2], self.size):
            rows = slice(start, start + self.size)
            for level, outputs in products.items():
                derivatives[..., level] += (outputs[..., rows] * b[..., rows]).sum(-1)
        return derivatives

    def _outputs(self, a: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return what every candidate adds to the output of inputs ``(B, T, d_in)``, ``(B, T, d_out)`` by level."""
        outputs, size = {}, max(1, _PRODUCT // a.shape[2])
        for level, coded in enumerate(self.coded):
            if coded is not None:
                made = outputs[level] = a.new_empty(*a.shape[:2], len(coded[0]))
                for start in range(0, len(coded[0]), size):
                    rows = slice(start, start + size)
                    made[..., rows] = a @ (coded[0][rows] * coded[1][rows]).to(a).T
        return outputs

    def _meet(self, like: torch.Tensor, piece: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        derivatives = like.new_zeros(len(like), 1, self.levels, dtype=torch.float64)
        there = [(level, *coded) for level, coded in enumerate(self.coded) if coded is not None]
        if not there:
            return derivatives
        levels = [level for level, _, _ in there]
        for i, start in enumerate(range(0, len(there[0][1]), self.size)):
            rows = slice(start, start + self.size)
            deltas = torch.stack([(codes[rows] * scale[rows]).flatten() for _, codes, scale in there])
            part = (piece(rows if self.rows is None else self.rows[rows]).to(deltas).flatten(1) @ deltas.T).double()
            derivatives[:, 0, levels] += part
            self.squares[i, levels] += part.square().sum(0).cpu().numpy()
        return derivatives


class Itself(Directions):
    """One candidate: the matrix itself, which scales all of its weights alike.

    Its derivative is that of the outputs without a bias, ``sum_t b_t' (W a_t)``: no gradient of the matrix is made.

    Args:
        views: Gives the copies of the matrix, ``(d_out, d_in)`` each, whenever a gradient comes: a layer that is not at hand
            need not be held for it.
    """

    groups = levels = 1

    def __init__(self, views: Callable[[], Sequence[torch.Tensor]]) -> None:
        self.views, self._products = views, _Last()

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        derivatives, start = gradient.new_zeros(len(gradient), 1, 1, dtype=torch.float64), 0
        for view in self.views():
            part = gradient[:, start : start + len(view)].flatten(1)
            derivatives[:, 0, 0] += (part @ view.to(part).flatten()).double()
            start += len(view)
        return derivatives

    def between(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.between`."""
        return self.by_token(a, b).double().sum(1, keepdim=True)

    def looked_up(self, rows: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.looked_up`."""
        return (self.views()[0][rows].to(b) * b).sum(-1).double().sum(-1)[:, None, None]

    def by_token(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.by_token`."""
        return (self._products.of(a, self._outputs) * b).sum(-1, keepdim=True)

    def _outputs(self, a: torch.Tensor) -> torch.Tensor:
        """Outputs of inputs ``(B, T, d_in)``; a matrix that is held in another precision is converted some rows at a time."""
        size = max(1, _PIECE // a.shape[2])
        parts = [(view,) if view.dtype == a.dtype else view.split(size) for view in self.views()]
        return torch.cat([a @ rows.to(a).T for each in parts for rows in each], -1)


class Apart(Directions):
    """Candidates that are taken apart into a share of the matrix itself and a rest: the rests, the matrix, and both together.

    Args:
        rest: The rests R of n candidates ``c W + R``.
        itself: The matrix W.
        factors: The shares c, ``(n,)``.
    """

    groups = 1

    def __init__(self, rest: Directions, itself: Itself, factors: Sequence[float]) -> None:
        self.rest, self.itself, self.levels = rest, itself, 2 * rest.levels + 1
        self.factors = torch.tensor(factors, dtype=torch.float64)

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        return self._all(self.rest.along(gradient), self.itself.along(gradient))

    def between(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.between`."""
        return self._all(self.rest.between(a, b), self.itself.between(a, b))

    def looked_up(self, rows: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.looked_up`."""
        return self._all(self.rest.looked_up(rows, b), self.itself.looked_up(rows, b))

    def by_token(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.by_token`."""
        return self._all(self.rest.by_token(a, b), self.itself.by_token(a, b))

    def _all(self, rest: torch.Tensor, itself: torch.Tensor) -> torch.Tensor:
        return torch.cat((rest, itself, rest + self.factors.to(itself) * itself), -1)


def spread(squares: np.ndarray, share: float) -> np.ndarray:
    """Variances of sums of squares that a sample of rows leaves open, ``(levels,)``, from those of its parts.

    Args:
        squares: Of every part of the sample and every level, ``(parts, levels)``, see :class:`Int8Directions`.
        share: Share of the rows that the sample has.
    """
    count = len(squares)
    off = squares - squares.mean(0)
    return np.asarray((1.0 - share) * count / max(count - 1, 1) * (off**2).sum(0))


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
