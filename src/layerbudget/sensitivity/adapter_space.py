"""Adapter space: what adding a LoRA adapter at a module could gain, and the gradients to start one from.

An adapter adds ``B A`` to a weight matrix, ``A`` (r x d_in) fixed at its start and ``B = 0``. The first step moves B alone,
along ``dL/dB = dL/dW A'`` (d_out x r). The adapter gain is the same quadratic form as in weight space with these gradients.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CoverageError, InvalidInput
from ..execution.backward import feed
from ..execution.loss import Data, token_count
from ..execution.sites import Site, refuse_direct
from ..models.blocks import is_conv1d, weight_of
from ..progress import Progress, Steps
from ..records import Block, Module
from ..scores import Scores
from .curvature import common, fisher
from .curvature.common import real_type
from .curvature.gradients import Summed
from .curvature.gram import InnerProducts

_NO_PLACE = "no adapter goes there"


class _Started(InnerProducts):
    """Per-sequence gradients of B, ``S_i A'``, with an A of its own for every module."""

    def __init__(self, *arguments: Any, starts: dict[str, torch.Tensor], rank: int, **named: Any) -> None:
        super().__init__(*arguments, sides=lambda m: (m.d_out, min(rank, m.d_in)), **named)
        self.starts = starts

    def update(self, site: Site) -> None:
        """Every module's inputs in its own A."""
        for name in site.names:
            projected = site.a.to(self.dtype) @ self.starts[name].T
            super().update(Site(a=projected, source=site.source, names=[name], b={name: site.b[name]}))


def start_matrix(name: str, d_in: int, rank: int, seed: int) -> torch.Tensor:
    """Return a start of A, ``(min(rank, d_in), d_in)``: uniform on ``+-1/sqrt(d_in)`` as in PEFT, seeded by module name."""
    digest = hashlib.sha256(f"{seed}.{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (2 * torch.rand(min(rank, d_in), d_in, generator=generator, dtype=torch.float64) - 1) / d_in**0.5


def score_adapter(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: common.Damping = None,
    damping_unit: common.Unit = "median",
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    rank: int = 8,
    scaling: float = 1.0,
    replicates: int = 50,
    walk: str = "auto",
) -> Scores:
    """Return the gain of adding a rank-r LoRA adapter at every matrix of a block, empirical Fisher in the space of B.

    One damping serves all blocks (``median``): relative to each block's own curvature, adapter gains come out nearly equal and
    plans from them nearly uniform.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``seed``: of A and of the bootstrap.
    - ``rank``: r of the adapters.
    - ``scaling``: LoRA's ``alpha/r``, which matters with absolute damping only.
    - ``replicates``: of the bootstrap.

    Returns:
        As :func:`layerbudget.sensitivity.curvature.fisher.score_gram`, with ``estimator='adapter'``.
    """
    if rank < 1 or data.samples < 2:
        raise InvalidInput(f"rank={rank} with {data.samples} sequences.", "At least rank 1 and two sequences.", "Use rank=8.")
    refuse_direct(model, blocks, _NO_PLACE, routers=True)
    dtype, device = real_type(model)
    starts = {m.name: start_matrix(m.name, m.d_in, rank, seed).to(device, dtype) for b in blocks for m in b.modules}
    rows = _Started(blocks, data.samples, dtype=dtype, device=device, starts=starts, rank=rank)
    total = feed(model, data, blocks, rows, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples)).loss
    tokens, fields = common.token_counts(model, data), {"seed": seed, "replicates": replicates}
    name = "empirical Fisher of B at B=0"
    scores = fisher.from_grams(blocks, rows.grams * scaling**2, tokens, damping, damping_unit, name, loss=total, **fields)
    return dataclasses.replace(scores, estimator="adapter", extra={**scores.extra, "rank": rank, "scaling": scaling})


def accumulated_gradients(
    model: nn.Module, data: Data, modules: Sequence[str], *, batch_size: int = 8
) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean token loss of every named weight matrix, as ``(d_out, d_in)`` (also for Conv1D).

    It is float32 (float64 for a float64 model), on the model's device.
    """
    common.check_inputs(batch_size)
    blocks = [_as_block(model, name) for name in modules]
    refuse_direct(model, blocks, _NO_PLACE, routers=True)
    gradients = Summed(blocks, real_type(model)[0])
    feed(model, data, blocks, gradients, batch_size=batch_size)
    n = token_count(model, data)
    return {name: total / n for name, total in gradients.sums.items()}


def _as_block(model: nn.Module, name: str) -> Block:
    owner, parameter = weight_of(model, name, packed=True)
    shape = tuple(parameter.shape[::-1] if is_conv1d(owner) else parameter.shape)
    if isinstance(owner, nn.Linear):
        shape = (owner.out_features, owner.in_features)  # which a quantised parameter does not have
    if len(shape) != 2:
        raise CoverageError(f"{name} is not a Linear: {_NO_PLACE}.", "", "Linear and Conv1D matrices have adapters.")
    return Block(name=name, modules=(Module(name=name, d_out=shape[0], d_in=shape[1]),))
