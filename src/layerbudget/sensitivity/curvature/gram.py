r"""Inner products of per-sequence gradients, ``K = SS'``, and the gradients themselves, exact or sketched.

Row i of S is the gradient ``S_i = B_i' A_i`` of sequence i's *summed* loss, one row for every loss and sequence. Inner products
add over the matrices of a block and over the output rows of a matrix, so each matrix is served in *pieces* (runs of its output
rows) that fit in memory. What does not fit at once takes one more pass over the matrices that are open: over one layer in a
walk, over the model in the whole graph. No gradient outlives its matrix; rows are kept where they are stored or compared one by
one (:func:`collect_rows`).

The Kronecker sketch ``(B_i P_o)'(A_i P_i)`` keeps r_o x r_i numbers per sequence and matrix. The same place in every layer
shares its Gaussian maps: each Gram matrix stays unbiased, and layers are compared under one draw.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...execution.backward import Accumulator, Fed, Loss, data_loss, feed
from ...execution.loss import Batch, Data
from ...execution.processes import ProcessGroup
from ...execution.sites import Site
from ...progress import Progress, Steps
from ...records import Block, Module
from .common import real_type

MEMORY = 2 << 30  # bytes of the pieces of one pass
_CHUNK = 1 << 16


class Sketch:
    """Gaussian maps of ranks ``(r_out, r_in)`` by place and width, drawn when they are first needed."""

    def __init__(self, ranks: tuple[int, int], seed: int) -> None:
        self.ranks, self.seed = ranks, seed
        self._maps: dict[tuple[str, int, int], torch.Tensor] = {}

    def sides(self, module: Module) -> tuple[int, int]:
        """Output and input width of a sketched gradient."""
        return min(self.ranks[0], module.d_out), min(self.ranks[1], module.d_in)

    def __call__(self, side: str, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x P`` for the ``in`` or ``out`` side of a matrix."""
        rank, width = self.ranks[side == "in"], x.shape[-1]
        if rank >= width:
            return x
        place = (re.sub(r"\d+", "#", f"{side}.{name}", count=1), width, rank)
        if place not in self._maps:
            digest = hashlib.sha256(f"{self.seed}.{place[0]}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            self._maps[place] = (torch.randn(width, rank, generator=generator) / rank**0.5).to(x.device, x.dtype)
        return x @ self._maps[place]

    def direct(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient ``(copies, d_out, d_in)`` between both maps, transposed."""
        return self("out", name, self("in", name, gradient).transpose(-1, -2))


class Gradients(Accumulator):
    """Gradients of every sequence, ``(B, d_out, d_in)``: :meth:`add` gets them once all calls of a matrix have come."""

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype, sketch: Sketch | None = None) -> None:
        self.dtype, self.sketch = dtype, sketch
        self.place = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        self.rows = slice(0, 0)
        self._batch: dict[str, torch.Tensor] = {}

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        self.rows = batch.rows

    def update(self, site: Site) -> None:
        """Multiply, and keep what is not whole."""
        for name in site.names:
            a, b = site.a.to(self.dtype), site.b[name].to(self.dtype)
            if self.sketch is not None:
                a, b = self.sketch("in", site.names[0], a), self.sketch("out", name, b)
            rows = self.product(b, a)
            rows = self._batch.pop(name) + rows if name in self._batch else rows
            if site.open.get(name, 0) > 0:
                self._batch[name] = rows
            else:
                self.add(name, rows)

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """One sequence's gradient of a parameter that is read from autograd."""
        gradient = gradient.to(self.dtype)
        self.add(name, (gradient if self.sketch is None else self.sketch.direct(name, gradient))[None])

    def finish(self, batch: Batch, loss: int) -> None:
        """Hand over what stayed open."""
        for name, rows in self._batch.items():
            self.add(name, rows)
        self._batch.clear()

    def product(self, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """``B' A`` of every sequence."""
        return torch.bmm(b.transpose(1, 2), a)

    def add(self, name: str, rows: torch.Tensor) -> None:
        """Gradients of one matrix and of the sequences ``self.rows``."""
        raise NotImplementedError


class Summed(Gradients):
    """Gradients of the summed loss, in ``sums`` by matrix."""

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype) -> None:
        super().__init__(blocks, dtype)
        self.sums: dict[str, torch.Tensor] = {}

    def bytes(self, blocks: Sequence[Block]) -> int:
        """One gradient per matrix."""
        return sum(b.numel for b in blocks) * self.dtype.itemsize

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient that is read from autograd."""
        self.add(name, gradient.to(self.dtype, copy=True))

    def product(self, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """``B' A`` over all tokens."""
        return b.flatten(0, 1).T @ a.flatten(0, 1)

    def add(self, name: str, rows: torch.Tensor) -> None:
        """Add up."""
        self.sums[name] = rows if name not in self.sums else self.sums[name].add_(rows)


class _Rows(Gradients):
    """Gradients of every sequence as rows: ``values`` has ``(n, width)`` per block."""

    def __init__(
        self, blocks: Sequence[Block], samples: int, sketch: Sketch | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(blocks, dtype, sketch)
        self.offset: dict[str, int] = {}
        self.values: list[torch.Tensor] = []
        for block in blocks:
            width = 0
            for m in block.modules:
                d_out, d_in = (m.d_out, m.d_in) if sketch is None else sketch.sides(m)
                self.offset[m.name], width = width, width + m.copies * d_out * d_in
            self.values.append(torch.zeros(samples, width, dtype=dtype, device=device))

    def bytes(self, blocks: Sequence[Block]) -> int:
        return sum(v.nbytes for v in self.values)

    def add(self, name: str, rows: torch.Tensor) -> None:
        offset, flat = self.offset[name], rows.flatten(1)
        self.values[self.place[name]][self.rows, offset : offset + flat.shape[1]] = flat


def chunks(blocks: Sequence[Block], samples: int, bytes_each: int, limit: int) -> Iterator[list[int]]:
    """Runs of blocks whose rows fit in ``limit`` bytes; one pass over the data per run."""
    run: list[int] = []
    used = 0
    for k, block in enumerate(blocks):
        need = block.numel * bytes_each * samples
        if run and used + need > limit:
            yield run
            run, used = [], 0
        run.append(k)
        used += need
    yield run


def collect_rows(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int,
    sketch: tuple[int, int] | None = None,
    seed: int = 0,
    walk: str = "auto",
    tick: Any = None,
) -> list[torch.Tensor]:
    """Gradient of every sequence, ``(n, width)`` per block.

    Args:
        model: The model.
        data: The calibration set.
        blocks: Blocks of the model.
        batch_size: Sequences per pass.
        sketch: ``(r_out, r_in)`` of a Kronecker sketch.
        seed: Of the sketch.
        walk: ``whole``, ``layers`` or ``auto``, as in :func:`layerbudget.execution.backward.feed`.
        tick: Called with the sequences of every batch.
    """
    rows = _Rows(blocks, data.samples, None if sketch is None else Sketch(sketch, seed), *real_type(model))
    feed(model, data, blocks, rows, batch_size=batch_size, walk=walk, tick=tick)
    return rows.values


@dataclasses.dataclass(eq=False)
class _Piece:
    module: Module
    rows: slice
    bytes: int
    values: torch.Tensor


class InnerProducts(Accumulator):
    """Gram matrices of the gradients of R losses: ``grams``, ``(K, R n, R n)`` float64, sequences of the first loss first.

    Gradients of n sequences are kept in ``dtype`` and, piece by piece, in ``max_bytes`` (``MEMORY`` by default). ``sketch`` is
    applied to inputs and output gradients; ``sides`` are the widths of a gradient, ``(module) -> (d_out, d_in)``, where they
    are neither the matrix's nor the sketch's.
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
    ) -> None:
        self.losses, self.samples, self.dtype, self.device = losses, samples, dtype, device
        self.max_bytes, self.sketch = max_bytes or MEMORY, sketch
        self.sides = sides or (sketch.sides if sketch else lambda m: (m.d_out, m.d_in))
        self.blocks, self.place = blocks, {m.name: (k, m) for k, b in enumerate(blocks) for m in b.modules}
        self.grams = np.zeros((len(blocks), samples * len(losses), samples * len(losses)))
        self._processes = ProcessGroup()
        self._waiting: list[_Piece] = []
        self._active: dict[str, list[_Piece]] = {}
        self._rows = slice(0, 0)
        self._written: set[str] = set()

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Pieces of one pass."""
        return min(sum(self._bytes_of(m) for b in blocks for m in b.modules), self.max_bytes)

    def _bytes_of(self, module: Module) -> int:
        d_out, d_in = self.sides(module)
        return self.samples * len(self.losses) * d_out * d_in * self.dtype.itemsize * module.copies

    def start(self, names: Sequence[str]) -> None:
        """Cut the matrices into pieces and choose those of the first pass."""
        self._waiting = [piece for name in names if name in self.place for piece in self._pieces(self.place[name][1])]
        self._next()

    def _pieces(self, module: Module) -> Iterator[_Piece]:
        d_out, whole, empty = self.sides(module)[0], self._bytes_of(module), torch.empty(0)
        parts = 1 if module.copies > 1 else min(d_out, -(-whole // self.max_bytes))
        step = -(-d_out // parts)
        for low in range(0, d_out, step):
            high = min(low + step, d_out)
            yield _Piece(module, slice(low, high), whole * (high - low) // d_out, empty)

    def _next(self) -> None:
        self._active, used = {}, 0
        while self._waiting and (not self._active or used + self._waiting[0].bytes <= self.max_bytes):
            piece = self._waiting.pop(0)
            used += piece.bytes
            size = (piece.rows.stop - piece.rows.start) * self.sides(piece.module)[1] * piece.module.copies
            piece.values = torch.zeros(len(self.losses) * self.samples, size, dtype=self.dtype, device=self.device)
            self._active.setdefault(piece.module.name, []).append(piece)

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        first = loss * self.samples
        self._rows, self._written = slice(first + batch.rows.start, first + batch.rows.stop), set()

    def update(self, site: Site) -> None:
        """Write the rows of the active pieces."""
        sketch = self.sketch or (lambda side, name, x: x)
        names = [name for name in site.names if name in self._active]
        a = sketch("in", site.names[0], site.a.to(self.dtype)) if names else site.a
        for name in names:
            b = sketch("out", name, site.b[name].to(self.dtype))
            for piece in self._active[name]:
                out = piece.values[self._rows].view(len(a), -1, a.shape[-1])
                left = b[..., piece.rows].transpose(1, 2)
                if name in self._written:
                    out.baddbmm_(left, a)
                else:
                    torch.bmm(left, a, out=out)
            self._written.add(name)

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Write the gradient of a parameter that is read from autograd."""
        for piece in self._active.get(name, ()):
            gradient = gradient.to(self.dtype)
            gradient = gradient if self.sketch is None else self.sketch.direct(name, gradient)
            piece.values[self._rows] = gradient.reshape(1, -1)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Every process has the rows of its own sequences, zeros for the others'."""
        self._processes = group
        group.reduce([piece.values for name in names for piece in self._active.get(name, ())])

    def merge(self, group: ProcessGroup) -> None:
        """Add up what the owners of the blocks multiplied."""
        self.grams = group.sum(self.grams)

    def finalize(self, names: Sequence[str]) -> bool:
        """Multiply what was kept, forget it, and ask for another pass while pieces wait."""
        group = self._processes
        owners = group.owners(self.blocks)
        for name in [n for n in names if n in self._active]:
            k = self.place[name][0]
            if owners[k] == group.rank:
                for piece in self._active[name]:
                    self.grams[k] += inner(piece.values)
        self._next()
        return bool(self._active)


def inner(rows: torch.Tensor, others: torch.Tensor | None = None) -> np.ndarray:
    """``rows @ others'`` accumulated in float64 over column chunks, as numpy."""
    others = rows if others is None else others
    total = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[1], _CHUNK):
        total += rows[:, start : start + _CHUNK] @ others[:, start : start + _CHUNK].T
    return total.cpu().numpy()


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
    products = InnerProducts(blocks, data.samples, dtype=dtype, device=device, max_bytes=max_bytes, sketch=maps)
    fed = feed(model, data, blocks, products, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    return products.grams, fed
