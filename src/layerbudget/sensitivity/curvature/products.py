"""Gradient, Hessian-vector and GGN-vector products of the mean token loss, restricted to one block.

Layers in front of the block run once; afterwards their cached output stands in for them. Both products need second
derivatives of attention, which the fused kernels lack: the math kernel is used for the length of a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.autograd.forward_ad as fwad
from torch import nn
from torch.func import functional_call

from ...errors import CoverageError, CurvatureFailure, UnknownStructure
from ...execution.loss import IGNORE, Batch, Data, batches, logits_of, summed_loss, token_count
from ...execution.modes import prepared, twice_differentiable
from ...execution.replay import Replay
from ...models.blocks import layers, weight_of
from ...models.offload import converting
from ...records import Block


class BlockProducts:
    """Products of one block's curvature with flat vectors, over a fixed data set.

    ``C = (1/N) sum_tokens J' (diag(p) - pp') J`` for the GGN, the exact second derivative for the Hessian.

    Args:
        model: The model; use inside the context manager.
        data: The calibration set.
        block: The block.
        batch_size: Sequences per pass.
    """

    def __init__(self, model: nn.Module, data: Data, block: Block, batch_size: int) -> None:
        if converting(model):
            raise CoverageError(
                "Products of second order need the graph of the whole model, and this one is streamed layer by layer.",
                "Curvatures that are local to a layer: fisher-gram, kfac, ekfac, rank-gain.",
                "Choose one of those, or load without --stream.",
            )
        self.model, self.block, self.count = model, block, 0
        self.tokens = token_count(model, data)
        self.names, self.parameters = _names(model, block)
        self.shapes = [p.shape for p in self.parameters]
        self.batches: list[Batch] = list(batches(model, data, batch_size))
        self._replay = Replay(model) if (front := _front_layers(model, block)) else None
        self._start = front
        self._cache: list[torch.Tensor] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> BlockProducts:
        with self._stack:
            self._stack.enter_context(prepared(self.model))
            self._stack.enter_context(twice_differentiable(self.model))
            for p in self.model.parameters():
                p.requires_grad_(False)
            for p in self.parameters:
                p.requires_grad_(True)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cache.clear()
        self._stack.close()

    @property
    def numel(self) -> int:
        """Parameters of the block."""
        return sum(p.numel() for p in self.parameters)

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Flat vector to one tensor per parameter."""
        parts = vector.split([p.numel() for p in self.parameters])
        return [v.view(s) for v, s in zip(parts, self.shapes, strict=True)]

    def gradient(self, batch: int | None = None) -> torch.Tensor:
        """``(p,)`` gradient of the mean token loss; of one batch's share of it where a batch is named."""
        total = torch.zeros(self.numel, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        for i, b in enumerate(self.batches):
            if batch is None or i == batch:
                loss = summed_loss(self._logits(i), b.targets) / self.tokens
                total += _flat(torch.autograd.grad(loss, self.parameters, allow_unused=True), self.parameters)
        return total

    def ggn(self, vector: torch.Tensor) -> torch.Tensor:
        """``C v`` for the generalised Gauss-Newton matrix: one dual forward pass, one backward pass."""
        self.count += 1
        out = torch.zeros_like(vector)
        tangents = self.split(vector)
        for i, b in enumerate(self.batches):
            with fwad.dual_level():
                duals = {
                    n: fwad.make_dual(p, t.to(p.dtype)) for n, p, t in zip(self.names, self.parameters, tangents, strict=True)
                }
                logits, moved = fwad.unpack_dual(self._logits(i, duals))
            if moved is None:
                continue
            with torch.no_grad():
                cotangent = self._output_curvature(logits.detach(), moved.detach(), b)
            grads = torch.autograd.grad(logits, self.parameters, cotangent, allow_unused=True)
            out += _flat(grads, self.parameters)
        return out

    def hessian(self, vector: torch.Tensor) -> torch.Tensor:
        """``H v`` by differentiating the gradient (reverse over reverse)."""
        self.count += 1
        out = torch.zeros_like(vector)
        v = self.split(vector)
        for i, b in enumerate(self.batches):
            loss = summed_loss(self._logits(i), b.targets) / self.tokens
            grads = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
            inner = sum((g * t).sum() for g, t in zip(grads, v, strict=True) if g is not None)
            if isinstance(inner, torch.Tensor) and inner.requires_grad:
                out += _flat(torch.autograd.grad(inner, self.parameters, allow_unused=True), self.parameters)
        return out

    def _output_curvature(self, logits: torch.Tensor, moved: torch.Tensor, batch: Batch) -> torch.Tensor:
        p = logits.softmax(-1)
        moved = p * moved
        out = moved - p * moved.sum(-1, keepdim=True)
        keep = (batch.targets != IGNORE).reshape(*logits.shape[:-1], 1)
        return out * (keep.to(out.dtype) / self.tokens)

    def _logits(self, i: int, duals: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        with self._skip_front(i):
            if duals is None:
                return logits_of(self.model, self.batches[i])
            return _Functional(self.model, duals).logits(self.batches[i])

    def _skip_front(self, i: int) -> contextlib.AbstractContextManager[None]:
        """Begin at the block's own layer, from what the layers in front of it gave once."""
        if self._replay is None:
            return contextlib.nullcontext()
        if len(self._cache) <= i:
            self._fill_cache(self._replay)
        return self._replay.begin(self._start, self._cache[i])

    @torch.no_grad()
    def _fill_cache(self, replay: Replay) -> None:
        replay.probe(self.batches[0].kwargs)
        with replay.end(self._start - 1):
            self._cache = [replay.run(b.kwargs).detach() for b in self.batches]


class _Functional:
    """The model with some parameters replaced."""

    def __init__(self, model: nn.Module, parameters: dict[str, torch.Tensor]) -> None:
        self.model, self.parameters = model, parameters

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits as :func:`logits_of` gives them."""
        out = functional_call(self.model, self.parameters, batch.args, batch.kwargs)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return logits if logits.dtype == torch.float64 else logits.float()


def _flat(grads: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(grads, like, strict=True)])


def _names(model: nn.Module, block: Block) -> tuple[list[str], list[nn.Parameter]]:
    names = {id(p): n for n, p in model.named_parameters()}
    parameters = [weight_of(model, m.name)[1] for m in block.modules]
    return [names[id(p)] for p in parameters], parameters


def _front_layers(model: nn.Module, block: Block) -> int:
    """How many layers run before the first one that holds a matrix of the block; 0 where that is not known."""
    try:
        stack = layers(model)
    except UnknownStructure:
        return 0
    owners = [i for i, (name, _) in enumerate(stack) for m in block.modules if m.name.startswith(name + ".")]
    if not owners or len(owners) < len(block.modules):
        return 0
    inside = {id(p) for _, layer in stack[: min(owners)] for p in layer.parameters()}
    return 0 if any(id(weight_of(model, m.name)[1]) in inside for m in block.modules) else min(owners)


def check_finite(value: float, block: Block, what: str) -> float:
    """Refuse a product that is not finite.

    Raises:
        CurvatureFailure: Names the block.
    """
    if value != value or abs(value) == float("inf"):
        raise CurvatureFailure(
            f"The {what} of {block.name} is {value}.",
            "It must be finite.",
            "Score the model in float32 instead of half precision.",
        )
    return value
