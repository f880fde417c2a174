r"""Inner products of per-sequence gradients, ``K = SS'``.

Row i of S is the gradient ``S_i = B_i' A_i`` of sequence i's *summed* loss, one row for every loss and sequence. Inner products
add over the matrices of a block and over the output rows of a matrix, so each matrix is served in *pieces* (runs of its output
rows) that fit in memory. What does not fit at once takes one more pass over the matrices that are open: over one layer in a
walk, over the model in the whole graph. No gradient outlives its matrix; rows are kept where they are stored or compared one by
one (:func:`~layerbudget.sensitivity.curvature.gradients.collect_rows`).

Inner products also add over coordinates, so several processes divide those: each multiplies the gradients of *all* sequences
in its run of rows or columns. A process sends the others the runs that they multiply, of its own sequences: cut from the
gradient, ``d_out d_in`` numbers, or as ``B_i`` and ``A_i``, ``T (d_out + d_in)`` numbers, of which the narrower one goes to
every process that has a part of the matrix. The fewer bytes are chosen for every matrix. One process keeps ``B_i`` and ``A_i``
where the gradients would take several passes and these are smaller.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ...execution.backward import Accumulator, Fed, Loss, data_loss, feed
from ...execution.loss import Batch, Data
from ...execution.processes import ProcessGroup, process_group
from ...execution.sites import Site
from ...models.machine import give_back, let_go, zeros_in_file
from ...progress import Progress, Steps
from ...records import Block, Module
from ...storage.writing import check_space
from .common import real_type
from .gradients import Sketch

MEMORY = 2 << 30  # bytes of the pieces of one pass
_FACTORS = 1 << 29  # bytes of factors of one layer that wait in memory
_CHUNK = 1 << 16


class _Kept(NamedTuple):
    """The gradient of some sequences in a matrix, or its factors ``B`` and ``A``."""

    rows: slice
    parts: tuple[torch.Tensor, ...]  # (B, copies d_out, d_in), or (B, T, d_out) and (B, T, d_in)

    def cut(self, side: int, run: slice) -> _Kept:
        """The same of a run of output rows (side 0) or of columns (side 1)."""
        if len(self.parts) == 1:
            return _Kept(self.rows, (self.parts[0][:, run] if side == 0 else self.parts[0][..., run],))
        return _Kept(self.rows, tuple(part[..., run] if i == side else part for i, part in enumerate(self.parts)))

    def add_to(self, values: torch.Tensor) -> None:
        """Add the gradients to the rows of these sequences."""
        mine = values[self.rows]
        if len(self.parts) == 1:
            mine += self.parts[0].flatten(1)
            return
        b, a = (part.to(values.dtype) for part in self.parts)
        mine.view(len(a), b.shape[-1], a.shape[-1]).baddbmm_(b.transpose(1, 2), a)

    @property
    def sides(self) -> tuple[int, int]:
        """Output rows and columns of the gradient."""
        return (self.parts[0].shape[-1] if len(self.parts) == 2 else self.parts[0].shape[1]), self.parts[-1].shape[-1]


@dataclasses.dataclass(eq=False)
class _Piece:
    """A run of a matrix's output rows, all of them where ``factors`` are kept in the place of gradients."""

    module: Module
    rows: slice
    bytes: int
    factors: bool = False
    values: torch.Tensor | None = None  # rows of all sequences, in one process
    kept: list[_Kept] = dataclasses.field(default_factory=list)  # what this process has of the matrix, if it is not that


class InnerProducts(Accumulator):
    """Gram matrices of the gradients of R losses: ``grams``, ``(K, R n, R n)`` float64, sequences of the first loss first.

    Gradients of n sequences are kept in ``dtype`` and, piece by piece, in ``max_bytes`` (``MEMORY`` by default). ``sketch`` is
    applied to inputs and output gradients; ``sides`` are the widths of a gradient, ``(module) -> (d_out, d_in)``, where they
    are neither the matrix's nor the sketch's. ``activation`` are the bytes of one number for every position of a sequence;
    without them the factors of gradients are never kept.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        samples: int,
        losses: Sequence[Loss] = (data_loss,),
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int | None = None,
        sketch: Sketch | None = None,
        sides: Callable[[Module], tuple[int, int]] | None = None,
        activation: int = 0,
    ) -> None:
        self.losses, self.samples, self.dtype, self.device = losses, samples, dtype, device
        self.max_bytes, self.sketch, self.activation = max_bytes or MEMORY, sketch, activation
        self.sides = sides or (sketch.sides if sketch else lambda m: (m.d_out, m.d_in))
        self.place = {m.name: (k, m) for k, b in enumerate(blocks) for m in b.modules}
        self.grams = np.zeros((len(blocks), samples * len(losses), samples * len(losses)))
        self._waiting: list[_Piece] = []
        self._active: dict[str, list[_Piece]] = {}
        self._rows = slice(0, 0)
        self._folder: Path | None = None

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Pieces of one pass."""
        return min(sum(self._bytes_of(m) for b in blocks for m in b.modules), self.max_bytes)

    def _bytes_of(self, module: Module, *, factors: bool = False) -> int:
        """Of the sequences of one process."""
        d_out, d_in = self.sides(module)
        each = self.activation * (d_out + d_in) if factors else d_out * d_in * self.dtype.itemsize * module.copies
        return -(-self.samples // process_group().size) * len(self.losses) * each

    def start(self, names: Sequence[str]) -> None:
        """Cut the matrices into pieces and choose those of the first pass."""
        modules = [self.place[name][1] for name in names if name in self.place]
        total = sum(self._bytes_of(m) for m in modules)
        self._waiting = [piece for m in modules for piece in self._pieces(m, self._by_factors(m, total))]
        self._folder = self._factor_folder()
        self._next()

    def _factor_folder(self) -> Path | None:
        """Where factors lie until their matrix is multiplied: in files where those of one process take much memory."""
        need = sum(piece.bytes for piece in self._waiting if piece.factors)
        if process_group().size > 1 or self.device.type != "cpu" or need <= _FACTORS:
            return None
        folder = Path(tempfile.gettempdir())
        check_space({folder: need})
        return folder

    def _aside(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor that waits."""
        if self._folder is None:
            return factor
        filed = zeros_in_file(factor.shape, self._folder, factor.dtype).copy_(factor)
        let_go(filed)
        return filed

    def _by_factors(self, module: Module, total: int) -> bool:
        """Whether the factors are fewer bytes, sent to as many processes as have a part of the matrix."""
        size = process_group().size
        if self.activation == 0 or module.copies > 1 or (size == 1 and total <= self.max_bytes):
            return False
        low, high = sorted(self.sides(module))
        parts = min(size, 1 + size * self._bytes_of(module) // total) if size > 1 else 1
        return self.activation * (parts * low + high) < low * high * self.dtype.itemsize

    def _pieces(self, module: Module, factors: bool) -> Iterator[_Piece]:
        d_out, whole = self.sides(module)[0], self._bytes_of(module, factors=factors)
        parts = 1 if module.copies > 1 or factors else min(d_out, -(-whole // self.max_bytes))
        step = -(-d_out // parts)
        for low in range(0, d_out, step):
            high = min(low + step, d_out)
            yield _Piece(module, slice(low, high), whole * (high - low) // d_out, factors)

    def _next(self) -> None:
        self._active, used = {}, 0
        while self._waiting and (not self._active or used + self._waiting[0].bytes <= self.max_bytes):
            piece = self._waiting.pop(0)
            used += piece.bytes
            if process_group().size == 1 and not piece.factors:
                height = (piece.rows.stop - piece.rows.start) * piece.module.copies
                piece.values = self._zeros(height * self.sides(piece.module)[1])
            self._active.setdefault(piece.module.name, []).append(piece)

    def _zeros(self, width: int) -> torch.Tensor:
        return torch.zeros(len(self.losses) * self.samples, width, dtype=self.dtype, device=self.device)

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        first = loss * self.samples
        self._rows = slice(first + batch.rows.start, first + batch.rows.stop)

    def update(self, site: Site) -> None:
        """Write the rows of the active pieces, or keep what they are made of."""
        sketch = self.sketch or (lambda side, name, x: x)
        names = [name for name in site.names if name in self._active]
        a = sketch("in", site.names[0], site.a.to(self.dtype)) if names and self.sketch else site.a
        waits = None
        for name in names:
            b = sketch("out", name, site.b[name].to(self.dtype)) if self.sketch else site.b[name]
            if a.dtype != b.dtype:
                a, b = a.to(self.dtype), b.to(self.dtype)
            for piece in self._active[name]:
                found = _Kept(self._rows, (b[..., piece.rows], a))
                if piece.values is not None:
                    found.add_to(piece.values)
                elif piece.factors:
                    waits = self._aside(a) if waits is None else waits  # matrices of a site share their inputs
                    piece.kept.append(_Kept(self._rows, (self._aside(found.parts[0]), waits)))
                else:
                    product = torch.bmm(found.parts[0].to(self.dtype).transpose(1, 2), a.to(self.dtype))
                    piece.kept.append(_Kept(self._rows, (product,)))

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Write the gradient of a parameter that is read from autograd."""
        for piece in self._active.get(name, ()):
            rows = gradient.to(self.dtype, copy=piece.values is None)
            rows = rows if self.sketch is None else self.sketch.direct(name, rows)
            found = _Kept(self._rows, (rows.reshape(1, -1, rows.shape[-1]),))
            if piece.values is not None:
                found.add_to(piece.values)
            else:
                piece.kept.append(found)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Give every process what it multiplies: its run of the coordinates, of all sequences.

        All is exchanged before anything is multiplied: a process that multiplies keeps no other one waiting.
        """
        pieces = [piece for name in names for piece in self._active.get(name, ())]
        told = group.gather([[_Told.of(kept) for kept in piece.kept] for piece in pieces])
        dealt, sides = iter(_dealt([self.sides(p.module) for p in pieces if p.factors], group.size)), list[int]()
        for i, piece in enumerate(pieces):
            height = (piece.rows.stop - piece.rows.start) * piece.module.copies
            side, runs = next(dealt) if piece.factors else _dealt([(height, 0)], group.size)[0]
            width = runs[group.rank].stop - runs[group.rank].start
            cuts = [[kept.cut(side, run) for kept in piece.kept if run.stop > run.start] for run in runs]
            coming = [[each.cut(side, width) for each in theirs[i] if width] for theirs in told]
            came = group.swap(
                [_packed(cut, self.device) for cut in cuts], [sum(sum(t.counts) for t in each) for each in coming]
            )
            piece.kept = [kept for theirs, flat in zip(coming, came, strict=True) for kept in _unpacked(theirs, flat)]
            sides.append(side)
        for piece, side in zip(pieces, sides, strict=True):
            if piece.kept:
                self._multiply(piece, side)
            piece.kept = []

    def _multiply(self, piece: _Piece, side: int = 0) -> None:
        """Add the inner products of what is kept of a piece, some rows or columns at a time."""
        sizes = piece.kept[0].sides
        step = max(1, self.max_bytes // (4 * self._zeros(1).nbytes * sizes[1 - side]))
        for low in range(0, sizes[side], step):
            run = slice(low, min(low + step, sizes[side]))
            values = self._zeros((run.stop - run.start) * sizes[1 - side])
            for kept in piece.kept:
                kept.cut(side, run).add_to(values)
            self.grams[self.place[piece.module.name][0]] += inner(values)

    def merge(self, group: ProcessGroup) -> None:
        """Add up what the processes multiplied."""
        self.grams = group.sum(self.grams)

    def finalize(self, names: Sequence[str]) -> bool:
        """Multiply what was kept, forget it, and ask for another pass while pieces wait."""
        if self._folder is not None:
            give_back()  # what the graph took lies between what is held, and would lie beside the products
        for piece in [piece for name in names for piece in self._active.get(name, ())]:
            if piece.values is not None:
                self.grams[self.place[piece.module.name][0]] += inner(piece.values)
            elif piece.kept:
                self._multiply(piece)
                piece.kept = []
        self._next()
        return bool(self._active)


def _dealt(sides: Sequence[tuple[int, int]], size: int) -> list[tuple[int, list[slice]]]:
    """Of every matrix the longer side, and the run of it that each process has: in the order of the matrices, equal in all.

    >>> _dealt([(2, 2), (2, 4)], 2)
    [(0, [slice(0, 2, None), slice(2, 2, None)]), (1, [slice(0, 1, None), slice(1, 4, None)])]
    """
    weights = [d_out * max(d_in, 1) for d_out, d_in in sides]
    total, before, dealt = sum(weights), 0, []
    for (d_out, d_in), weight in zip(sides, weights, strict=True):
        side = int(d_in > d_out)
        bounds = [min(max(total * r / size - before, 0.0), weight) / weight for r in range(size + 1)]
        places = [round(b * (d_out, d_in)[side]) for b in bounds]
        dealt.append((side, [slice(low, high) for low, high in zip(places, places[1:], strict=False)]))
        before += weight
    return dealt


class _Told(NamedTuple):
    """A :class:`_Kept` as it is announced to the other processes: whose it is, and the shape of every part."""

    rows: slice
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, kept: _Kept) -> _Told:
        """Describe what is kept."""
        return cls(kept.rows, tuple(tuple(part.shape) for part in kept.parts), kept.parts[0].dtype)

    def cut(self, side: int, width: int) -> _Told:
        """The same of a run of so many rows or columns."""
        if len(self.shapes) == 1:
            size, d_out, d_in = self.shapes[0]
            return self._replace(shapes=((size, *((width, d_in) if side == 0 else (d_out, width))),))
        shapes = ((*shape[:-1], width) if i == side else shape for i, shape in enumerate(self.shapes))
        return self._replace(shapes=tuple(shapes))

    @property
    def counts(self) -> list[int]:
        """Bytes of every part."""
        return [math.prod(shape) * self.dtype.itemsize for shape in self.shapes]


def _packed(kept: Sequence[_Kept], device: torch.device) -> torch.Tensor:
    """All parts behind each other, as bytes."""
    parts = [part.contiguous().flatten().view(torch.uint8) for each in kept for part in each.parts]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _unpacked(told: Sequence[_Told], flat: torch.Tensor) -> list[_Kept]:
    """Undo :func:`_packed`."""
    kept, at = list[_Kept](), 0
    for each in told:
        parts = []
        for shape, count in zip(each.shapes, each.counts, strict=True):
            parts.append(flat[at : at + count].view(each.dtype).view(shape))
            at += count
        kept.append(_Kept(each.rows, tuple(parts)))
    return kept


def inner(rows: torch.Tensor, others: torch.Tensor | None = None) -> np.ndarray:
    """``rows @ others'`` accumulated in float64 over column chunks, as numpy."""
    others = rows if others is None else others
    total = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[1], _CHUNK):
        total += rows[:, start : start + _CHUNK] @ others[:, start : start + _CHUNK].T
    return total.cpu().numpy()


def activation_bytes(model: nn.Module, data: Data) -> int:
    """Bytes of one number for every position of a sequence, in the precision of the model's activations."""
    return data.length * next(p for p in model.parameters() if p.is_floating_point()).dtype.itemsize


def gram_matrices(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    sketch: tuple[int, int] | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    walk: str = "auto",
    progress: Progress | None = None,
) -> tuple[np.ndarray, Fed]:
    """Gram matrices ``(K, n, n)`` of per-sequence gradients of every block, and what feeding took.

    Args:
        model: The model.
        data: The calibration set.
        blocks: Blocks of the model.
        batch_size: Sequences per pass.
        sketch: ``(r_out, r_in)`` of a Kronecker sketch.
        seed: Of the sketch.
        max_bytes: Memory for the rows of gradients.
        walk: ``whole``, ``layers`` or ``auto``, as in :func:`layerbudget.execution.backward.feed`.
        progress: Called with sequences done and in total.
    """
    maps, (dtype, device) = None if sketch is None else Sketch(sketch, seed), real_type(model)
    products = InnerProducts(
        blocks,
        data.samples,
        dtype=dtype,
        device=device,
        max_bytes=max_bytes,
        sketch=maps,
        activation=activation_bytes(model, data),
    )
    fed = feed(model, data, blocks, products, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    return products.grams, fed
