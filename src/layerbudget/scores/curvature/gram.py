"""Per-sequence gradients and their Gram matrices ``K = SS'``, exact or sketched.

Rows ``s_i`` are gradients of the *summed* loss of sequence i. Exact rows are materialised for as many blocks at a time as
fit in memory; the Kronecker sketch ``(B_i P_o)'(A_i P_i)`` keeps r_o x r_i numbers per sequence and matrix instead. The same
place in every layer shares its Gaussian maps: each Gram matrix stays unbiased, and layers are compared under one draw.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...records import Block
from ...running.loss import IGNORE, Data, sampled_targets, targets_of
from ...running.sites import Collector, Site
from . import common

_CHUNK = 1 << 16


class Rows:
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
        self.sketch, self.seed, self.dtype, self.device = sketch, seed, dtype, device
        self.place: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.values: list[torch.Tensor] = []
        self.start = 0
        self._written: set[str] = set()
        self._maps: dict[tuple[str, int, int], torch.Tensor] = {}
        for k, block in enumerate(blocks):
            width = 0
            for m in block.modules:
                sides = (m.d_out, m.d_in) if sketch is None else (min(sketch[0], m.d_out), min(sketch[1], m.d_in))
                shape = sides if m.copies == 1 else (m.copies, *sides)
                self.place[m.name] = (k, width, shape)
                width += int(np.prod(shape))
            self.values.append(torch.zeros(samples, width, dtype=dtype, device=device))

    def begin(self, start: int) -> None:
        """Point at the first row of the next batch."""
        self.start, self._written = start, set()

    def __call__(self, site: Site) -> None:
        """Write the gradients that a site of the current batch contributes."""
        a = site.a.to(self.dtype)
        projected: torch.Tensor | None = None
        for name in site.names:
            k, offset, shape = self.place[name]
            b = site.b[name].to(self.dtype)
            left = a
            if self.sketch is not None:
                b = self._project(b, f"out.{name}", self.sketch[0])
                if projected is None:
                    projected = self._project(a, f"in.{site.names[0]}", self.sketch[1])
                left = projected
            rows = self.values[k][self.start : self.start + len(a), offset : offset + shape[0] * shape[1]]
            out = rows.view(len(a), *shape)
            if name in self._written:
                out.baddbmm_(b.transpose(1, 2), left)
            else:
                torch.bmm(b.transpose(1, 2), left, out=out)
            self._written.add(name)

    def direct(self, name: str, grad: torch.Tensor | None) -> None:
        """Write the gradient of a directly read parameter (one sequence per batch)."""
        if grad is not None:
            k, offset, _ = self.place[name]
            grad = grad.to(self.dtype)
            if self.sketch is not None:
                grad = self._project(grad, f"in.{name}", self.sketch[1])
                grad = self._project(grad.transpose(-1, -2), f"out.{name}", self.sketch[0])
            self.values[k][self.start, offset : offset + grad.numel()] = grad.reshape(-1)

    def _project(self, x: torch.Tensor, key: str, rank: int) -> torch.Tensor:
        width = x.shape[-1]
        if rank >= width:
            return x
        place = (re.sub(r"\d+", "#", key, count=1), width, rank)
        if place not in self._maps:
            digest = hashlib.sha256(f"{self.seed}.{place[0]}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            self._maps[place] = (torch.randn(width, rank, generator=generator) / rank**0.5).to(self.device, self.dtype)
        return x @ self._maps[place]


def gram(rows: torch.Tensor, others: torch.Tensor | None = None) -> np.ndarray:
    """``rows @ others'`` accumulated in float64 over column chunks, as numpy."""
    others = rows if others is None else others
    total = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[1], _CHUNK):
        total += rows[:, start : start + _CHUNK] @ others[:, start : start + _CHUNK].T
    return total.cpu().numpy()


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


def collect_rows(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int,
    sketch: tuple[int, int] | None = None,
    seed: int = 0,
    draws: int = 0,
    tick: Any = None,
) -> tuple[Rows, list[Rows], float]:
    """One pass: rows with the data's labels, rows with ``draws`` sampled label sets, and the summed loss.

    Raises:
        CoverageError: A weight matrix was never seen, or sequences cannot be told apart.
    """
    parameter = next(model.parameters())
    dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
    true, *drawn = (Rows(blocks, data.samples, sketch, dtype, parameter.device, seed) for _ in range(1 + draws))
    current = [true]
    total = 0.0
    with Collector(model, blocks, lambda site: current[0](site)) as collector:
        for batch, logits in common.walk(model, data, collector, batch_size, tick):
            for r, rows in enumerate((true, *drawn)):
                targets = batch.targets if r == 0 else sampled_targets(logits, batch, seed + r)
                current[0] = rows
                rows.begin(batch.rows.start)
                loss = common.backward(collector, batch, logits, targets, retain=r < draws)
                total += loss if r == 0 else 0.0
                for name, p in collector.direct.items():
                    rows.direct(name, p.grad)
        collector.check_coverage()
    return true, drawn, total


def gram_matrices(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    sketch: tuple[int, int] | None = None,
    seed: int = 0,
    max_bytes: int = 2 << 30,
    progress: common.Progress | None = None,
) -> tuple[np.ndarray, float]:
    """Gram matrices of per-sequence gradients of every block.

    Args:
        model: The model.
        data: n sequences.
        blocks: K blocks.
        batch_size: Sequences per forward pass.
        sketch: ``(r_out, r_in)`` of the Kronecker sketch, or ``None`` for the exact matrix.
        seed: Of the sketch.
        max_bytes: Memory for the gradients of one pass; more blocks than fit take more passes.
        progress: Called with sequences done and in total.

    Returns:
        ``K`` of shape ``(K, n, n)``, entries ``s_i . s_j`` of gradients of the summed sequence loss, and the summed loss.

    Raises:
        CoverageError: A weight matrix was never seen, or sequences cannot be told apart.
    """
    common.check_inputs(data, batch_size)
    width = 8 if next(model.parameters()).dtype == torch.float64 else 4
    runs = [list(range(len(blocks)))] if sketch else list(chunks(blocks, data.samples, width, max_bytes))
    tick = common.Ticker(progress, len(runs) * data.samples)
    out = np.zeros((len(blocks), data.samples, data.samples))
    total = 0.0
    for run in runs:
        rows, _, total = collect_rows(
            model, data, [blocks[k] for k in run], batch_size=batch_size, sketch=sketch, seed=seed, tick=tick
        )
        for k, values in zip(run, rows.values, strict=True):
            out[k] = gram(values)
    return out, total


def token_counts(model: nn.Module, data: Data) -> np.ndarray:
    """Target tokens of every sequence, shape ``(n,)``."""
    return (targets_of(model, data).reshape(data.samples, -1) != IGNORE).sum(1).cpu().numpy().astype(np.float64)
