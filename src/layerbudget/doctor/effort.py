"""What an estimator will cost, from one timed forward and backward pass of one sample."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import nn

from ..execution.loss import Batch, logits_of, summed_loss
from ..execution.modes import prepared
from ..models.blocks import weight_of
from ..records import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward and backward pass of one sample.

    Attributes:
        seconds: Of the faster of two runs, all weight gradients included.
        weights, gradients, activations: Bytes of each (activations: what autograd keeps for the backward pass).
    """

    seconds: float
    weights: int
    gradients: int
    activations: int

    @property
    def memory(self) -> int:
        """Bytes of all three together."""
        return self.weights + self.gradients + self.activations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """Estimated cost of one estimator on the whole calibration set.

    Attributes:
        estimator: Its name.
        passes: Forward-and-backward passes over the data that it costs about as much as.
        seconds: ``passes * samples * seconds of one pass``, a sample at a time; batches are faster.
        memory: Bytes at the peak, weights included.
    """

    estimator: str
    passes: float
    seconds: float
    memory: int


def time_pass(model: nn.Module, batch: Batch, blocks: Sequence[Block]) -> Pass:
    """Run one sample forward and backward twice; measure time and what autograd saves."""
    parameters = {id(p): p for b in blocks for m in b.modules for p in [weight_of(model, m.name, packed=True)[1]]}.values()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    seconds = []
    with prepared(model):
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        for p in parameters:
            p.requires_grad_(True)
        for _ in range(2):
            kept.clear()
            start = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = summed_loss(logits_of(model, batch), batch.targets)
            gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
            loss.item()
            if gradients[0] is not None:
                gradients[0].reshape(-1)[0].item()  # waits for an accelerator
            seconds.append(time.perf_counter() - start)
    return Pass(
        seconds=min(seconds),
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        gradients=sum(p.numel() * p.element_size() for p in parameters),
        activations=sum(size for place, size in kept.items() if place not in own),
    )


def efforts(one: Pass, blocks: Sequence[Block], samples: int, batch_size: int) -> list[Effort]:
    """Estimate every estimator; factors are those of benchmarks/scores.py and of the cost models in the docstrings.

    ``passes`` counts forward-and-backward passes over all samples: a forward pass is a third of one. Memory counts the
    weights, a batch of activations and what the estimator itself keeps in float32.
    """
    k, modules = len(blocks), [m for b in blocks for m in b.modules]
    numel, largest = sum(b.numel for b in blocks), max(b.numel for b in blocks)
    factors = 4 * sum(m.copies * (m.d_in**2 + m.d_out**2) for m in modules)
    acts = one.activations * batch_size
    products = 10.0 * k * 1.5
    rows = {
        "gradient-norm": (1.05, acts + 4 * numel),
        "fisher-diagonal": (1.4, acts + 32 * numel),
        "fisher-gram": (1.5, acts + min(4 * samples * numel, max(2 << 30, 4 * samples * largest))),
        "fisher-mc": (1.9, acts + min(8 * samples * numel, max(2 << 30, 8 * samples * largest))),
        "adapter": (1.1, acts + 4 * 8 * samples * sum(m.copies * m.d_out for m in modules)),
        "kfac": (1.7, acts + 2 * factors),
        "ekfac": (4.5, acts + 2 * factors + 4 * numel),
        "rank-gain": (1.8, acts + 2 * factors + 8 * numel),
        "ggn": (products, 2 * acts + 12 * largest),
        "hessian": (products, 3 * acts + 12 * largest),
        "layerif": (1.5, acts + min(4 * samples * numel, max(4 << 30, 4 * samples * largest))),
        "fisher-trace": (1.3, acts),
        "outlier-ratio": (0.34, acts // k),
        "mean-metric": (0.34, acts // k),
        "reconstruction": (1.0, acts // k + 2 * factors // k),
        "ablation": ((1 + k / 2) / 3, acts),
        "block-influence": (0.34, acts),
        "spectral-tail": (0.0, 8 * max(m.d_in * m.d_out for m in modules)),
    }
    return [
        Effort(estimator=n, passes=f, seconds=f * samples * one.seconds, memory=one.weights + int(m))
        for n, (f, m) in rows.items()
    ]
