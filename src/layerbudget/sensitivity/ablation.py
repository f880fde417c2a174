"""Scores from leaving a block out: layer ablation and block influence. Forward passes only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..errors import CoverageError, InvalidInput, UnknownStructure
from ..execution.divergence import sequence_losses
from ..execution.loss import IGNORE, Batch, Data, batches, logits_of
from ..execution.modes import inference, overflowed
from ..execution.replay import Replay, recorded
from ..models.blocks import is_conv1d, weight_of
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .curvature.common import over_sequences


def _nothing(module: nn.Module, inputs: Any, output: Any) -> Any:
    return torch.zeros_like(output) if isinstance(output, torch.Tensor) else module.forward(torch.zeros_like(inputs[0]))


@contextlib.contextmanager
def _without(model: nn.Module, block: Block) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for matrix in block.modules:
            owner, _ = weight_of(model, matrix.name, packed=True)
            if not (isinstance(owner, nn.Linear) or is_conv1d(owner)):
                raise CoverageError(
                    f"{matrix.name} is a part of {type(owner).__name__} and has no output of its own to leave out.",
                    "Whole layers, nn.Linear and Conv1D can be left out.",
                    "Partition by layer, or exclude the fused experts.",
                )
            stack.callback(owner.register_forward_hook(_nothing).remove)
        yield


def _replay(model: nn.Module) -> Replay | None:
    try:
        return Replay(model)
    except UnknownStructure:
        return None


def _increases(model: nn.Module, batch: Batch, blocks: Sequence[Block], replay: Replay | None) -> np.ndarray:
    """Loss increase per block and sequence, ``(K, B)``."""
    stack = replay.layers if replay else []
    with recorded([layer for _, layer in stack], replay.state) if replay else recorded([]) as states:
        clean = sequence_losses(logits_of(model, batch), batch.targets)
    rows = []
    for block in blocks:
        whole = any(block.name == name for name, _ in stack)
        touched = [i for i, (n, _) in enumerate(stack) if any(m.name.startswith(f"{n}.") for m in block.modules)]
        start = min(touched, default=0)
        with contextlib.ExitStack() as patches:
            if not whole:
                patches.enter_context(_without(model, block))
            if replay is not None:  # the layers below are as they were; a layer that is left out passes its input on
                handed = states[start - 1][1] if replay.hands_more and start else states[start][0]
                patches.enter_context(replay.begin(start + whole, handed))
            rows.append(sequence_losses(logits_of(model, batch), batch.targets) - clean)
    return torch.stack(rows).cpu().numpy()


def ablation(
    model: nn.Module, data: Data, blocks: Sequence[Block], *, batch_size: int = 8, progress: Progress | None = None
) -> Scores:
    """Increase of the mean token loss when a block is left out: ``L(without k) - L``, in nats per token.

    A block that is a whole layer is skipped, its residual stream passes through; of any other block the matrices output
    zero. Each block costs one forward pass from its own layer upward: the clean states below are re-used, so K layers
    cost about K/2 forward passes (K where the model has no single stack of layers). A negative score says that the loss is
    lower without the block.

    Returns:
        A record with orientation ``gain`` and standard errors over sequences.
    """
    replay, tick = _replay(model), Steps(progress, data.samples)
    rows: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    with inference(model):
        for batch in batches(model, data, batch_size):
            if replay is not None and not rows:
                replay.probe(batch.kwargs)
            rows.append(_increases(model, batch, blocks, replay))
            counts.append((batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().numpy())
            tick(batch.size)
    n = np.concatenate(counts).astype(float)
    return over_sequences(blocks, "ablation", np.concatenate(rows, axis=1), n, unit="nats of average loss")


def block_influence(
    model: nn.Module, data: Data, blocks: Sequence[Block], *, batch_size: int = 8, progress: Progress | None = None
) -> Scores:
    """``1 - mean over tokens cos(h_in, h_out)`` of each layer's hidden states (ShortGPT's block influence).

    A layer that hardly turns its hidden states is the first to go; orientation ``gain``. One forward pass in all; padding
    is left out.
    """
    replay = _replay(model)
    stack = dict(replay.layers) if replay else {}
    partial = [b.name for b in blocks if b.name not in stack]
    if partial:
        raise InvalidInput(
            f"{partial[0]} is not a whole layer ({len(partial)} such blocks).",
            "Block influence compares the hidden states before and after a layer.",
            "Partition with by='layer', or use ablation.",
        )
    tick = Steps(progress, data.samples)
    sums, counts = [], []
    with inference(model):
        for batch in batches(model, data, batch_size):
            with recorded([stack[b.name] for b in blocks]) as states:
                logits_of(model, batch)
            pairs = [states[k] for k in range(len(blocks))]
            for state in (state for pair in pairs for state in pair):
                if not bool(torch.isfinite(state).all()):
                    raise overflowed("The hidden states of the model", state.dtype)
            distance = torch.stack([1.0 - F.cosine_similarity(a.double(), b.double(), dim=-1) for a, b in pairs])
            mask = batch.kwargs.get("attention_mask", torch.ones_like(distance[0]))
            sums.append((distance * mask).sum(2).cpu().numpy())
            counts.append(mask.sum(1).double().cpu().numpy())
            tick(batch.size)
    rows, unit = np.concatenate(sums, axis=1), "1 - cosine of hidden states"
    return over_sequences(blocks, "block-influence", rows, np.concatenate(counts), unit=unit)
