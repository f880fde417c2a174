"""Scores from leaving a block out: layer ablation and block influence. Forward passes only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..blocks import is_conv1d, layers, weight_of
from ..errors import CoverageError, InvalidInput, UnknownStructure
from ..records import Block
from .curvature.common import Progress, Ticker, check_inputs, record
from .hooks import prepared
from .loss import IGNORE, Batch, Data, batches, logits_of
from .record import Scores


def sequence_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the token losses of each sequence, shape ``(B,)``, float64."""
    flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORE, reduction="none")
    return flat.reshape(len(targets), -1).double().sum(1)


def ratio_of_sums(values: np.ndarray, counts: np.ndarray) -> tuple[float, float | None]:
    """``sum v_i / sum n_i`` and its standard error over sequences (null for one sequence).

    >>> ratio_of_sums(np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    (2.0, 0.0)
    """
    total, n = float(counts.sum()), len(values)
    ratio = float(values.sum()) / total
    if n < 2:
        return ratio, None
    spread = float(np.square(values - ratio * counts).sum())
    return ratio, float(np.sqrt(spread * n / (n - 1))) / total


def over_sequences(
    model: nn.Module, data: Data, blocks: Sequence[Block], estimator: str, values: np.ndarray, counts: np.ndarray, *,
    unit: str,
) -> Scores:  # fmt: skip
    """Record of values ``(K, n)`` summed over sequences and divided by their tokens ``(n,)``, with standard errors."""
    gain, error = zip(*(ratio_of_sums(row, counts) for row in values), strict=True)
    return record(model, data, blocks, estimator, gain=(gain,), standard_error=(error,), unit=unit, orientation="gain")


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _like(hidden: torch.Tensor, output: Any) -> Any:
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


class _Trace:
    """What each layer was given and returned in one clean forward pass."""

    def __init__(self, stack: Sequence[nn.Module]) -> None:
        self.inputs: list[Any] = [None] * len(stack)
        self.outputs: list[Any] = [None] * len(stack)
        self.stack = stack

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what every layer is given and returns while the model runs."""

        def listen(i: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                self.inputs[i], self.outputs[i] = _hidden(args, kwargs), output

            return hook

        handles = []
        try:
            for i, layer in enumerate(self.stack):
                handles.append(layer.register_forward_hook(listen(i), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def resuming(self, start: int) -> Iterator[None]:
        """Make layers before ``start`` free and start there from the recorded clean input."""

        def stand_in(i: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.outputs[i]

        try:
            for i in range(start):
                self.stack[i].forward = stand_in(i)  # type: ignore[method-assign]
            yield
        finally:
            for i in range(start):
                del self.stack[i].forward


@contextlib.contextmanager
def _without(model: nn.Module, block: Block, trace: _Trace, whole: dict[str, int]) -> Iterator[None]:
    """Skip a whole layer (its residual stream passes through), or silence single matrices (they output zero)."""
    handles = []
    layer = whole.get(block.name)
    try:
        if layer is not None:
            module, output = trace.stack[layer], trace.outputs[layer]
            module.forward = lambda *args, **kwargs: _like(_hidden(args, kwargs), output)  # type: ignore[method-assign]
        else:
            for matrix in block.modules:
                owner, _ = weight_of(model, matrix.name, packed=True)
                handles.append(owner.register_forward_hook(lambda m, i, out: torch.zeros_like(out)))
        yield
    finally:
        if layer is not None:
            del trace.stack[layer].forward
        for handle in handles:
            handle.remove()


def _places(model: nn.Module, blocks: Sequence[Block]) -> tuple[list[nn.Module], dict[str, int], dict[str, int]]:
    """Return the layer stack, the first layer that each block touches, and the blocks that are whole layers."""
    try:
        named = layers(model)
    except UnknownStructure:
        named = []
    index = {name: i for i, (name, _) in enumerate(named)}
    first, whole = {}, {}
    for block in blocks:
        touched = [i for name, i in index.items() if any(m.name.startswith(name + ".") for m in block.modules)]
        first[block.name] = min(touched, default=0)
        if block.name in index:
            whole[block.name] = index[block.name]
    return [layer for _, layer in named], first, whole


def _refuse_fused(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse single matrices that no module of their own multiplies by: they cannot be silenced one by one.

    Raises:
        CoverageError: Names the first.
    """
    for matrix in (m for b in blocks for m in b.modules):
        owner, _ = weight_of(model, matrix.name, packed=True)
        if not (isinstance(owner, nn.Linear) or is_conv1d(owner)):
            raise CoverageError(
                f"{matrix.name} is a part of {type(owner).__name__} and has no output of its own to leave out.",
                "Whole layers, nn.Linear and Conv1D can be left out.",
                "Partition by layer, or exclude the fused experts.",
            )


def _increases(model: nn.Module, batch: Batch, blocks: Sequence[Block], places: Any) -> tuple[np.ndarray, np.ndarray]:
    """Loss increase per block and sequence, ``(K, B)``, and target tokens per sequence, ``(B,)``."""
    stack, first, whole = places
    trace = _Trace(stack)
    with trace.recording():
        clean = sequence_losses(logits_of(model, batch), batch.targets)
    rows = []
    for block in blocks:
        with trace.resuming(first[block.name]), _without(model, block, trace, whole):
            rows.append(sequence_losses(logits_of(model, batch), batch.targets) - clean)
    counts = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1)
    return torch.stack(rows).cpu().numpy(), counts.cpu().numpy()


def ablation(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Scores:
    """Increase of the mean token loss when a block is left out: ``L(without k) - L``, in nats per token.

    A block that is a whole layer is skipped, its residual stream passes through; of any other block the matrices output
    zero. Each block costs one forward pass from its own layer upward: the clean states below are re-used, so K layers
    cost about K/2 forward passes (K where the model has no single stack of layers). A negative score says that the loss is
    lower without the block.

    Args:
        model: The model.
        data: Calibration set.
        blocks: Blocks to score.
        batch_size: Sequences per forward pass; the result does not depend on it.
        progress: Called with sequences done and in total.

    Returns:
        A record with orientation ``gain`` and standard errors over sequences.

    Raises:
        UnknownStructure: The model has no head.
        InvalidInput: No token has a loss.
        CoverageError: A block of fused experts that is not a whole layer.
    """
    check_inputs(data, batch_size)
    places, tick = _places(model, blocks), Ticker(progress, data.samples)
    _refuse_fused(model, [b for b in blocks if b.name not in places[2]])
    increases, counts = [], []
    with prepared(model), torch.no_grad():
        for batch in batches(model, data, batch_size):
            rows, n = _increases(model, batch, blocks, places)
            increases.append(rows)
            counts.append(n)
            tick(batch.size)
    rows, n = np.concatenate(increases, axis=1), np.concatenate(counts).astype(float)
    return over_sequences(model, data, blocks, "ablation", rows, n, unit="nats of average loss")


def _distances(trace: _Trace, chosen: Sequence[int], batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Sum over real tokens of ``1 - cos(in, out)`` per layer and sequence, ``(K, B)``, and the token counts, ``(B,)``."""
    mask = batch.kwargs.get("attention_mask")
    rows = []
    for i in chosen:
        a, b = trace.inputs[i], _first(trace.outputs[i])
        distance = 1.0 - F.cosine_similarity(a.double(), b.double(), dim=-1)
        rows.append((distance if mask is None else distance * mask).sum(1))
    n = mask.sum(1) if mask is not None else torch.full((batch.size,), trace.inputs[chosen[0]].shape[1])
    return torch.stack(rows).cpu().numpy(), n.double().cpu().numpy()


def block_influence(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Scores:
    """``1 - mean over tokens cos(h_in, h_out)`` of each layer's hidden states (ShortGPT's block influence).

    A layer that hardly turns its hidden states is the first to go; orientation ``gain``. One forward pass in all.

    Args:
        model: The model.
        data: Calibration set; padding is left out.
        blocks: Blocks that are whole layers (``partition(model, by="layer")``).
        batch_size: Sequences per forward pass; the result does not depend on it.
        progress: Called with sequences done and in total.

    Raises:
        InvalidInput: A block is not a whole layer.
        UnknownStructure: The model has no head.
    """
    stack, _, whole = _places(model, blocks)
    partial = [b.name for b in blocks if b.name not in whole]
    if partial:
        raise InvalidInput(
            f"{partial[0]} is not a whole layer ({len(partial)} such blocks).",
            "Block influence compares the hidden states before and after a layer.",
            "Partition with by='layer', or use ablation.",
        )
    check_inputs(data, batch_size)
    tick = Ticker(progress, data.samples)
    sums, counts = [], []
    with prepared(model), torch.no_grad():
        for batch in batches(model, data, batch_size):
            trace = _Trace(stack)
            with trace.recording():
                logits_of(model, batch)
            rows, n = _distances(trace, [whole[b.name] for b in blocks], batch)
            sums.append(rows)
            counts.append(n)
            tick(batch.size)
    rows, unit = np.concatenate(sums, axis=1), "1 - cosine of hidden states"
    return over_sequences(model, data, blocks, "block-influence", rows, np.concatenate(counts), unit=unit)
