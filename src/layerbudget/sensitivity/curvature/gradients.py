r"""Gradients of every sequence's *summed* loss, ``S_i = B_i' A_i``, as rows or summed, exact or sketched.

The Kronecker sketch ``(B_i P_o)'(A_i P_i)`` keeps r_o x r_i numbers per sequence and matrix. The same place in every layer
shares its Gaussian maps: each Gram matrix stays unbiased, and layers are compared under one draw.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...execution.backward import Accumulator, feed
from ...execution.loss import Batch, Data
from ...execution.sites import Site
from ...records import Block, Module
from .common import real_type


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
