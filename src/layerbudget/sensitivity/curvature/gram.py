"""Per-sequence gradients and their Gram matrices ``K = SS'``, exact or sketched.

Rows ``s_i`` are gradients of the *summed* loss of sequence i. Gram matrices need no rows that outlive a matrix
(:mod:`.inner`); rows are kept where they are stored or compared one by one. The Kronecker sketch ``(B_i P_o)'(A_i P_i)`` keeps
r_o x r_i numbers per sequence and matrix. The same place in every layer shares its Gaussian maps: each Gram matrix stays
unbiased, and layers are compared under one draw.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...execution.backward import Accumulator, Fed, feed
from ...execution.loss import IGNORE, Batch, Data, targets_of
from ...execution.sites import Site
from ...progress import Progress, Steps
from ...records import Block, Module
from . import common
from .inner import InnerProducts


class Sketch:
    """Gaussian maps by place and width, drawn when they are first needed.

    Args:
        ranks: ``(r_out, r_in)``.
        seed: Of the maps.
    """

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


class Rows(Accumulator):
    """Per-sequence gradients of some blocks, ``(n, width)`` per block; exact or sketched.

    Args:
        blocks: The blocks.
        samples: Number of rows n.
        sketch: ``(r_out, r_in)``, or ``None`` for the gradients themselves.
        dtype: Of the stored rows.
        device: Where they live.
        seed: Of the sketch.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        samples: int,
        sketch: tuple[int, int] | None,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.sketch, self.dtype = None if sketch is None else Sketch(sketch, seed), dtype
        self.place: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.values: list[torch.Tensor] = []
        self.first = 0
        self._written: set[str] = set()
        for k, block in enumerate(blocks):
            width = 0
            for m in block.modules:
                sides = (m.d_out, m.d_in) if self.sketch is None else self.sketch.sides(m)
                shape = sides if m.copies == 1 else (m.copies, *sides)
                self.place[m.name] = (k, width, shape)
                width += int(np.prod(shape))
            self.values.append(torch.zeros(samples, width, dtype=dtype, device=device))

    def bytes(self, blocks: Sequence[Block]) -> int:
        """All rows."""
        return sum(v.nbytes for v in self.values)

    def begin(self, batch: Batch, loss: int) -> None:
        """Point at the first row of the next batch."""
        self.first, self._written = batch.rows.start, set()

    def update(self, site: Site) -> None:
        """Write the gradients that a site of the current batch contributes."""
        a = site.a.to(self.dtype)
        projected: torch.Tensor | None = None
        for name in site.names:
            k, offset, shape = self.place[name]
            b = site.b[name].to(self.dtype)
            left = a
            if self.sketch is not None:
                b = self.sketch("out", name, b)
                if projected is None:
                    projected = self.sketch("in", site.names[0], a)
                left = projected
            rows = self.values[k][self.first : self.first + len(a), offset : offset + shape[0] * shape[1]]
            out = rows.view(len(a), *shape)
            if name in self._written:
                out.baddbmm_(b.transpose(1, 2), left)
            else:
                torch.bmm(b.transpose(1, 2), left, out=out)
            self._written.add(name)

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Write the gradient of a directly read parameter (one sequence per batch)."""
        k, offset, _ = self.place[name]
        gradient = gradient.to(self.dtype)
        if self.sketch is not None:
            gradient = self.sketch("in", name, gradient)
            gradient = self.sketch("out", name, gradient.transpose(-1, -2))
        self.values[k][self.first, offset : offset + gradient.numel()] = gradient.reshape(-1)


def chunks(blocks: Sequence[Block], samples: int, bytes_each: int, limit: int) -> Iterator[list[int]]:
    """Cut the blocks into runs whose rows fit in ``limit`` bytes; one pass over the data per run."""
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


def real_type(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """In what gradients are kept, at least float32, and where."""
    parameter = next(model.parameters())
    return parameter.dtype if parameter.dtype == torch.float64 else torch.float32, parameter.device


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
) -> Rows:
    """One pass: the gradient of every sequence.

    Raises:
        CoverageError: A weight matrix was never seen, or sequences cannot be told apart.
    """
    dtype, device = real_type(model)
    rows = Rows(blocks, data.samples, sketch, dtype, device, seed)
    feed(model, data, blocks, rows, batch_size=batch_size, walk=walk, tick=tick)
    return rows


def gram_matrices(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    sketch: tuple[int, int] | None = None,
    seed: int = 0,
    max_bytes: int = 2 << 30,
    walk: str = "auto",
    progress: Progress | None = None,
) -> tuple[np.ndarray, Fed]:
    """Gram matrices of per-sequence gradients of every block.

    Args:
        model: The model.
        data: n sequences.
        blocks: K blocks.
        batch_size: Sequences per forward pass.
        sketch: ``(r_out, r_in)`` of the Kronecker sketch, or ``None`` for the exact matrix.
        seed: Of the sketch.
        max_bytes: Memory for what one pass keeps; matrices that do not fit take one more.
        walk: ``whole`` graph, by ``layers``, or ``auto``.
        progress: Called with sequences done and in total.

    Returns:
        ``K`` of shape ``(K, n, n)``, entries ``s_i . s_j`` of gradients of the summed sequence loss, and what it took.

    Raises:
        CoverageError: A weight matrix was never seen, or sequences cannot be told apart.
    """
    common.check_inputs(data, batch_size)
    maps = None if sketch is None else Sketch(sketch, seed)
    dtype, device = real_type(model)
    consumer = InnerProducts(
        blocks, data.samples, data.length, dtype=dtype, device=device, max_bytes=max_bytes, project=maps,
        sides=None if maps is None else maps.sides,
    )  # fmt: skip
    tick = Steps(progress, data.samples)
    fed = feed(model, data, blocks, consumer, batch_size=batch_size, walk=walk, tick=tick)
    return consumer.grams, fed


def token_counts(model: nn.Module, data: Data) -> np.ndarray:
    """Target tokens of every sequence, shape ``(n,)``."""
    return (targets_of(model, data).reshape(data.samples, -1) != IGNORE).sum(1).cpu().numpy().astype(np.float64)
