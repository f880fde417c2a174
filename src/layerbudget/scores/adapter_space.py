"""Adapter space: what adding a LoRA adapter at a module could gain, and the gradients to start one from.

An adapter adds ``B A`` to a weight matrix, ``A`` (r x d_in) fixed at its start and ``B = 0``. The first step moves B alone,
along ``dL/dB = dL/dW A'`` (d_out x r). The adapter gain is the same quadratic form as in weight space with these gradients.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CoverageError, InvalidInput
from ..records import Block
from ..running.loss import Data, token_count
from ..running.sites import Collector, Site
from .curvature import common, fisher, gram
from .record import Scores


class _AdapterRows(gram.Rows):
    """Per-sequence gradients of B, ``S_i A'``, with an A of its own for every module."""

    def __init__(self, blocks: Sequence[Block], samples: int, rank: int, dtype: torch.dtype, device: Any, seed: int) -> None:
        super().__init__(blocks, samples, (1 << 40, rank), dtype, device, seed)
        self.a = {m.name: start_matrix(m.name, m.d_in, rank, seed).to(dtype).to(device) for b in blocks for m in b.modules}

    def __call__(self, site: Site) -> None:
        for name in site.names:
            own = Site(a=site.a.to(self.dtype) @ self.a[name].T, source=site.source, names=[name], b={name: site.b[name]})
            super().__call__(own)

    def _project(self, x: torch.Tensor, key: str, rank: int) -> torch.Tensor:
        return x


def start_matrix(name: str, d_in: int, rank: int, seed: int) -> torch.Tensor:
    """``(min(rank, d_in), d_in)`` start of A: uniform on ``+-1/sqrt(d_in)`` as in PEFT, seeded by module name."""
    digest = hashlib.sha256(f"{seed}.{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (2 * torch.rand(min(rank, d_in), d_in, generator=generator, dtype=torch.float64) - 1) / d_in**0.5


def score_adapter(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "median",
    batch_size: int = 8,
    seed: int = 0,
    progress: common.Progress | None = None,
    rank: int = 8,
    scaling: float = 1.0,
    replicates: int = 50,
) -> Scores:
    """Gain of adding a rank-r LoRA adapter at every matrix of a block, empirical Fisher in the space of B.

    Args:
        model: The model.
        data: n sequences.
        blocks: K blocks; partition by ``linear`` for a gain per module.
        damping: One or several; ``None`` for the default sweep.
        damping_unit: ``median`` (one damping for all blocks), ``max``, ``mean`` or ``absolute``. Relative to each block's own
            curvature, adapter gains come out nearly equal and plans from them nearly uniform.
        batch_size: Sequences per pass.
        seed: Of A and of the resampling.
        progress: Called with sequences done and in total.
        rank: r.
        scaling: LoRA's ``alpha/r``; matters with absolute damping only.
        replicates: Bootstrap replicates.

    Returns:
        As :func:`layerbudget.scores.curvature.fisher.score_gram`, with ``estimator='adapter'``.

    Raises:
        CoverageError: Fused experts, or a weight matrix that was never seen.
        InvalidInput: An argument outside its domain.
    """
    common.check_arguments(damping, damping_unit, data, batch_size)
    if rank < 1 or data.samples < 2:
        raise InvalidInput(f"rank={rank} with {data.samples} sequences.", "At least rank 1 and two sequences.", "Use rank=8.")
    parameter = next(model.parameters())
    dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
    rows = _AdapterRows(blocks, data.samples, rank, dtype, parameter.device, seed)
    tick, total = common.Ticker(progress, data.samples), 0.0
    with Collector(model, blocks, rows) as collector:
        _refuse_direct(collector.direct)
        for batch, logits in common.walk(model, data, collector, batch_size, tick):
            rows.begin(batch.rows.start)
            total += common.backward(collector, batch, logits, batch.targets)
        collector.check_coverage()
    grams = np.stack([gram.gram(v) for v in rows.values]) * scaling**2
    scores = fisher.from_grams(
        model, data, blocks, grams, damping=damping, damping_unit=damping_unit, seed=seed, sketch=None, replicates=replicates,
        loss=total,
    )  # fmt: skip
    extra = {**scores.extra, "curvature": "empirical Fisher of B at B=0", "rank": rank, "scaling": scaling}
    return dataclasses.replace(scores, estimator="adapter", extra=extra)


def accumulated_gradients(
    model: nn.Module,
    data: Data,
    modules: Sequence[str] | Sequence[Block],
    *,
    batch_size: int = 8,
    progress: common.Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Gradient of the mean token loss of every named weight matrix, as ``(d_out, d_in)`` (also for Conv1D).

    Args:
        model: The model.
        data: The calibration set.
        modules: Full names of weight matrices, or blocks.
        batch_size: Sequences per pass.
        progress: Called with sequences done and in total.

    Returns:
        ``{name: (d_out, d_in)}`` in float32 (float64 for a float64 model), on the model's device.

    Raises:
        CoverageError: A matrix that is not a Linear, or was never seen.
        UnknownBlock: The model has no such matrix.
    """
    common.check_inputs(data, batch_size)
    blocks = [m if isinstance(m, Block) else _as_block(model, m) for m in modules]
    dtype = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    sums: dict[str, torch.Tensor] = {}

    def add(site: Site) -> None:
        a = site.a.to(dtype).reshape(-1, site.a.shape[-1])
        for name in site.names:
            g = site.b[name].to(dtype).reshape(-1, site.b[name].shape[-1]).T @ a
            sums[name] = sums[name].add_(g) if name in sums else g

    tick = common.Ticker(progress, data.samples)
    with Collector(model, blocks, add) as collector:
        _refuse_direct(collector.direct)
        for batch, logits in common.walk(model, data, collector, batch_size, tick):
            common.backward(collector, batch, logits, batch.targets)
        collector.check_coverage()
    n = token_count(model, data)
    return {m.name: sums[m.name] / n for b in blocks for m in b.modules}


def truncated(gradients: dict[str, torch.Tensor], rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Best rank-r factors ``(U (d_out, r), S (r,), V' (r, d_in))`` of every gradient."""
    out = {}
    for name, gradient in gradients.items():
        u, s, v = torch.linalg.svd(gradient.double(), full_matrices=False)
        r = min(rank, len(s))
        out[name] = (u[:, :r].to(gradient), s[:r].to(gradient), v[:r].to(gradient))
    return out


def _as_block(model: nn.Module, name: str) -> Block:
    from ..blocks import is_conv1d, weight_of
    from ..records import Module

    owner, parameter = weight_of(model, name, packed=True)
    shape = tuple(parameter.shape[::-1] if is_conv1d(owner) else parameter.shape)
    if isinstance(owner, nn.Linear):
        shape = (owner.out_features, owner.in_features)  # which a quantised parameter does not have
    if len(shape) != 2:
        _refuse_direct({name: parameter})
    return Block(name=name, modules=(Module(name=name, d_out=shape[0], d_in=shape[1]),))


def _refuse_direct(direct: dict[str, nn.Parameter]) -> None:
    if direct:
        raise CoverageError(
            f"{next(iter(direct))} is not a Linear, so no adapter goes there.", "Linear and Conv1D matrices have adapters.",
            "Exclude the fused experts.",
        )  # fmt: skip


__all__ = ["accumulated_gradients", "score_adapter", "start_matrix", "truncated"]
