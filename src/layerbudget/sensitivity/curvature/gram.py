r"""Inner products of per-sequence gradients, ``K = SS'``, and the gradients themselves, exact or sketched.

Row i of S is the gradient ``S_i = B_i' A_i`` of sequence i's *summed* loss, one row for every loss and sequence. Inner products
add over the matrices of a block and over the output rows of a matrix, so each matrix is served in *pieces* (runs of its output
rows) that fit in memory, in one of two ways, whichever takes fewer multiplications:

    gradients    keep the piece's rows ``S_i``, then ``K += SS'``
    tokens       keep A and B of all sequences, then ``K_ij += sum_ts (A_i A_j')_ts (B_i B_j')_ts``

Tokens are the shorter way where all sequences together have fewer tokens than the matrix is wide. What does not fit at once
takes one more pass over the matrices that are open: over one layer in a walk, over the model in the whole graph. No gradient
outlives its matrix; rows are kept where they are stored or compared one by one (:func:`collect_rows`).

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

    Raises:
        CoverageError: A weight matrix was never seen, or sequences cannot be told apart.
    """
    rows = _Rows(blocks, data.samples, None if sketch is None else Sketch(sketch, seed), *real_type(model))
    feed(model, data, blocks, rows, batch_size=batch_size, walk=walk, tick=tick)
    return rows.values


@dataclasses.dataclass(eq=False)
class _Piece:
    module: Module
    rows: slice
    tokens: bool
    bytes: int
    values: torch.Tensor | None = None
    pairs: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = dataclasses.field(default_factory=dict)


class InnerProducts(Accumulator):
    """Gram matrices of the gradients of R losses: ``grams``, ``(K, R n, R n)`` float64, sequences of the first loss first.

    Gradients of n sequences of ``length`` tokens are kept in ``dtype`` and, piece by piece, in ``max_bytes`` (``MEMORY`` by
    default). ``sketch`` is applied to inputs and output gradients; ``sides`` are the widths of a gradient,
    ``(module) -> (d_out, d_in)``, where they are neither the matrix's nor the sketch's.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        samples: int,
        length: int,
        losses: Sequence[Loss] = (data_loss,),
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int | None = None,
        sketch: Sketch | None = None,
        sides: Callable[[Module], tuple[int, int]] | None = None,
    ) -> None:
        self.losses, self.samples, self.length = losses, samples, length
        self.dtype, self.device, self.max_bytes, self.sketch = dtype, device, max_bytes or MEMORY, sketch
        self.sides = sides or (sketch.sides if sketch else lambda m: (m.d_out, m.d_in))
        self.blocks = {m.name: (k, m) for k, b in enumerate(blocks) for m in b.modules}
        self.grams = np.zeros((len(blocks), samples * len(losses), samples * len(losses)))
        self._blocks = blocks
        self._processes: ProcessGroup | None = None
        self._waiting: list[_Piece] = []
        self._active: dict[str, list[_Piece]] = {}
        self._place = (0, slice(0, 0))
        self._written: set[str] = set()

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Pieces of one pass."""
        return min(sum(self._rows_bytes(m) for b in blocks for m in b.modules), self.max_bytes)

    def _rows_bytes(self, module: Module) -> int:
        d_out, d_in = self.sides(module)
        return self.samples * len(self.losses) * d_out * d_in * self.dtype.itemsize * module.copies

    def start(self, names: Sequence[str]) -> None:
        """Cut the matrices into pieces and choose those of the first pass."""
        self._waiting = [piece for name in names if name in self.blocks for piece in self._pieces(self.blocks[name][1])]
        self._next()

    def _pieces(self, module: Module) -> list[_Piece]:
        (d_out, d_in), n, r = self.sides(module), self.samples, len(self.losses)
        whole = self._rows_bytes(module)
        if module.copies > 1:
            return [_Piece(module, slice(0, d_out), False, whole)]
        positions = n * self.length
        by_tokens = 2.0 * positions**2 * (d_in + d_out * r**2)
        by_rows = 2.0 * positions * r * d_in * d_out + 2.0 * (n * r) ** 2 * d_in * d_out
        kept = positions * (d_in + r * d_out) * self.dtype.itemsize
        if by_tokens < by_rows and kept <= self.max_bytes:
            return [_Piece(module, slice(0, d_out), True, kept)]
        step = -(-d_out // min(d_out, -(-whole // self.max_bytes)))
        return [
            _Piece(module, slice(low, min(low + step, d_out)), False, whole * (min(low + step, d_out) - low) // d_out)
            for low in range(0, d_out, step)
        ]

    def _next(self) -> None:
        self._active, used = {}, 0
        while self._waiting and (not self._active or used + self._waiting[0].bytes <= self.max_bytes):
            piece = self._waiting.pop(0)
            used += piece.bytes
            self._active.setdefault(piece.module.name, []).append(piece)

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        self._place, self._written = (loss, batch.rows), set()

    def update(self, site: Site) -> None:
        """Keep what the active pieces need of a site."""
        a: torch.Tensor | None = None
        for name in site.names:
            for piece in self._active.get(name, ()):
                if a is None:
                    a = self._sketched("in", site.names[0], site.a.to(self.dtype))
                self._keep(piece, a, self._sketched("out", name, site.b[name].to(self.dtype)))
            self._written.add(name)

    def _sketched(self, side: str, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if self.sketch is None else self.sketch(side, name, x)

    def _keep(self, piece: _Piece, a: torch.Tensor, b: torch.Tensor) -> None:
        loss, rows = self._place
        if piece.tokens:
            piece.pairs.setdefault((loss, rows.start), []).append((a, b))
            return
        out = self._own(piece)[loss * self.samples + rows.start : loss * self.samples + rows.stop]
        out = out.view(len(a), -1, a.shape[-1])
        left = b[..., piece.rows].transpose(1, 2)
        if piece.module.name in self._written:
            out.baddbmm_(left, a)
        else:
            torch.bmm(left, a, out=out)

    def _own(self, piece: _Piece) -> torch.Tensor:
        if piece.values is None:
            size = (piece.rows.stop - piece.rows.start) * self.sides(piece.module)[1] * piece.module.copies
            piece.values = torch.zeros(len(self.losses) * self.samples, size, dtype=self.dtype, device=self.device)
        return piece.values

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Keep the gradient of a parameter that is read from autograd."""
        for piece in self._active.get(name, ()):
            loss, rows = self._place
            gradient = gradient.to(self.dtype)
            gradient = gradient if self.sketch is None else self.sketch.direct(name, gradient)
            self._own(piece)[loss * self.samples + rows.start] = gradient.reshape(-1)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Every process has rows, or tokens, of its own sequences; zeros or nothing of the others'."""
        self._processes = group
        for name in [n for n in names if n in self._active]:
            for piece in self._active[name]:
                if piece.tokens:
                    for pairs in group.gather(piece.pairs):
                        piece.pairs.update({key: value for key, value in pairs.items() if key not in piece.pairs})
                else:
                    group.reduce([self._own(piece)])

    def merge(self, group: ProcessGroup) -> None:
        """Add up what the owners of the blocks multiplied."""
        self.grams = group.sum(self.grams)

    def finalize(self, names: Sequence[str]) -> bool:
        """Multiply what was kept, forget it, and ask for another pass while pieces wait."""
        shared: dict[int, torch.Tensor] = {}
        for name in [n for n in names if n in self._active]:
            k = self.blocks[name][0]
            own = self._processes is None or self._processes.owners(self._blocks)[k] == self._processes.rank
            for piece in self._active[name]:
                if own and piece.pairs:
                    self.grams[k] += self._from_tokens(piece, shared)
                elif own and piece.values is not None:
                    self.grams[k] += inner(piece.values)
                piece.values, piece.pairs = None, {}
        self._next()
        return bool(self._active)

    def _from_tokens(self, piece: _Piece, shared: dict[int, torch.Tensor]) -> np.ndarray:
        """``K_ij = sum_ts (A_i A_j')_ts (B_i B_j')_ts``; matrices with one input share its products."""
        n, r = self.samples, len(self.losses)
        whole = [_joined(piece.pairs, loss, n) for loss in range(r)]
        a, b = whole[0][0], [pair[1] for pair in whole]
        key = id(next(iter(piece.pairs.values()))[0][0])
        if key not in shared:
            shared.clear()
            shared[key] = a @ a.T
        left, out = shared[key], np.zeros((r, n, r, n))
        t = len(a) // n
        for i in range(r):
            for j in range(i, r):
                products = (b[i] @ b[j].T).mul_(left)
                tile = products.view(n, t, n, t).sum((1, 3), dtype=torch.float64).cpu().numpy()
                out[i, :, j, :], out[j, :, i, :] = tile, tile.T
        return out.reshape(r * n, r * n)


def _joined(
    pairs: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]], loss: int, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of all sequences in order, ``(n T, d)``; calls of one matrix side by side, zeros where it did not run."""
    found = {start: calls for (of, start), calls in pairs.items() if of == loss}
    example = next(iter(pairs.values()))[0]
    length = max((sum(x.shape[1] for x, _ in calls) for calls in found.values()), default=1)
    out = tuple(part.new_zeros(samples, length, part.shape[-1]) for part in example)
    for start, calls in found.items():
        for whole, parts in zip(out, zip(*calls, strict=True), strict=True):
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            whole[start : start + len(joined), : joined.shape[1]] = joined
    return out[0].flatten(0, 1), out[1].flatten(0, 1)


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

    Raises:
        CoverageError: A weight matrix was never seen, or sequences cannot be told apart.
    """
    maps, (dtype, device) = None if sketch is None else Sketch(sketch, seed), real_type(model)
    products = InnerProducts(blocks, data.samples, data.length, dtype=dtype, device=device, max_bytes=max_bytes, sketch=maps)
    fed = feed(model, data, blocks, products, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    return products.grams, fed
