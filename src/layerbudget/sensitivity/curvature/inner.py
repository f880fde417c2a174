r"""Inner products of per-sequence gradients, ``K = SS'``, matrix by matrix: no gradient outlives its matrix.

Row i of S is the gradient ``S_i = B_i' A_i`` of sequence i's summed loss, one row for every loss and sequence. Inner products
add over the matrices of a block and over the output rows of a matrix, so each matrix is served in *pieces* (runs of its output
rows) that fit in memory, in one of two ways, whichever takes fewer multiplications:

    gradients    keep the piece's rows ``S_i``, then ``K += SS'``
    tokens       keep A and B of all sequences, then ``K_ij += sum_ts (A_i A_j')_ts (B_i B_j')_ts``

Tokens are the shorter way where all sequences together have fewer tokens than the matrix is wide. What does not fit at once
takes one more pass over the matrices that are open: over one layer in a walk, over the model in the whole graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...execution.backward import Accumulator, Loss, data_loss
from ...execution.loss import Batch
from ...execution.processes import ProcessGroup
from ...execution.sites import Site
from ...records import Block, Module

_CHUNK = 1 << 16
Projection = Callable[[str, str, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(eq=False)
class _Piece:
    """Some output rows of one matrix, in one of the two ways."""

    module: Module
    rows: slice
    tokens: bool
    bytes: int
    values: torch.Tensor | None = None
    pairs: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = dataclasses.field(default_factory=dict)


class InnerProducts(Accumulator):
    """Gram matrices of the gradients of some losses.

    Args:
        blocks: K blocks.
        samples: n sequences.
        length: T, tokens of each.
        losses: R losses.
        dtype: Of the gradients; products are accumulated in float64.
        device: Of the gradients.
        max_bytes: For the pieces of one pass.
        project: ``(side, name, x) -> x`` applied to inputs (``in``, with the name of the site's first matrix) and output
            gradients (``out``); its widths are ``sides``.
        sides: Widths after ``project``, ``(module) -> (d_out, d_in)``.

    Attributes:
        grams: ``(K, R n, R n)`` float64, sequences of the first loss first.
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
        max_bytes: int = 2 << 30,
        project: Projection | None = None,
        sides: Callable[[Module], tuple[int, int]] | None = None,
    ) -> None:
        self.losses, self.samples, self.length = losses, samples, length
        self.dtype, self.device, self.max_bytes, self.project = dtype, device, max_bytes, project
        self.sides = sides or (lambda m: (m.d_out, m.d_in))
        self.blocks = {m.name: (k, m) for k, b in enumerate(blocks) for m in b.modules}
        size = samples * len(losses)
        self.grams = np.zeros((len(blocks), size, size))
        self._blocks = blocks
        self._group: ProcessGroup | None = None
        self._waiting: list[_Piece] = []
        self._active: dict[str, list[_Piece]] = {}
        self._place = (0, slice(0, 0))
        self._written: set[str] = set()

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return 8 if self.dtype == torch.float64 else 4

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Pieces of one pass."""
        total = sum(self._rows_bytes(m) * m.copies for b in blocks for m in b.modules)
        return min(total, self.max_bytes)

    def _rows_bytes(self, module: Module) -> int:
        d_out, d_in = self.sides(module)
        return self.samples * len(self.losses) * d_out * d_in * self.width

    def start(self, names: Sequence[str]) -> None:
        """Cut the matrices into pieces and choose those of the first pass."""
        self._waiting = [piece for name in names if name in self.blocks for piece in self._pieces(self.blocks[name][1])]
        self._next()

    def _pieces(self, module: Module) -> list[_Piece]:
        (d_out, d_in), n, r = self.sides(module), self.samples, len(self.losses)
        whole = self._rows_bytes(module) * module.copies
        if module.copies > 1:
            return [_Piece(module, slice(0, d_out), False, whole)]
        positions = n * self.length
        by_tokens = 2.0 * positions**2 * (d_in + d_out * r**2)
        by_rows = 2.0 * positions * r * d_in * d_out + 2.0 * (n * r) ** 2 * d_in * d_out
        kept = positions * (d_in + r * d_out) * self.width
        if by_tokens < by_rows and kept <= self.max_bytes:
            return [_Piece(module, slice(0, d_out), True, kept)]
        count = min(d_out, -(-whole // self.max_bytes))
        step = -(-d_out // count)
        return [
            _Piece(module, slice(low, min(low + step, d_out)), False, whole * (min(low + step, d_out) - low) // d_out)
            for low in range(0, d_out, step)
        ]

    def _next(self) -> None:
        """Take as many waiting pieces as fit, one at least."""
        self._active, used = {}, 0
        while self._waiting and (not self._active or used + self._waiting[0].bytes <= self.max_bytes):
            piece = self._waiting.pop(0)
            used += piece.bytes
            self._active.setdefault(piece.module.name, []).append(piece)

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        self._place = (loss, batch.rows)
        self._written = set()

    def update(self, site: Site) -> None:
        """Keep what the active pieces need of a site."""
        a: torch.Tensor | None = None
        for name in site.names:
            for piece in self._active.get(name, ()):
                if a is None:
                    a = self._projected("in", site.names[0], site.a.to(self.dtype))
                b = self._projected("out", name, site.b[name].to(self.dtype))
                self._keep(piece, a, b)
            self._written.add(name)

    def _projected(self, side: str, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if self.project is None else self.project(side, name, x)

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
            if self.project is not None:
                gradient = self.project("in", name, gradient)
                gradient = self.project("out", name, gradient.transpose(-1, -2))
            self._own(piece)[loss * self.samples + rows.start] = gradient.reshape(-1)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Every process has rows, or tokens, of its own sequences; zeros or nothing of the others'."""
        self._group = group
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

    def _settles(self, k: int) -> bool:
        return self._group is None or self._group.owners(self._blocks)[k] == self._group.rank

    def finalize(self, names: Sequence[str]) -> bool:
        """Multiply what was kept, forget it, and ask for another pass while pieces wait."""
        shared: dict[int, torch.Tensor] = {}
        for name in [n for n in names if n in self._active]:
            k = self.blocks[name][0]
            for piece in self._active[name]:
                if not self._settles(k):
                    pass
                elif piece.pairs:
                    self.grams[k] += self._from_tokens(piece, shared)
                elif piece.values is not None:
                    self.grams[k] += inner(piece.values)
                piece.values, piece.pairs = None, {}
        self._next()
        return bool(self._active)

    def _from_tokens(self, piece: _Piece, shared: dict[int, torch.Tensor]) -> np.ndarray:
        """``K_ij = sum_ts (A_i A_j')_ts (B_i B_j')_ts``; matrices with one input share its products."""
        n, r = self.samples, len(self.losses)
        whole = [_joined(piece.pairs, loss, n) for loss in range(r)]
        first = next(iter(piece.pairs.values()))[0][0]
        a, b = whole[0][0], [pair[1] for pair in whole]
        key = id(first)
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
