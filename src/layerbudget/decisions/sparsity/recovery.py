"""Recovery after pruning: low-rank updates that never touch a zero.

The effective weight during training is ``W + M * (B A) s`` with ``M`` the mask of the weights that are left. Merging is
therefore exact - the merged model is the trained model - and keeps every zero. Adapters that were trained without a mask (any
PEFT LoRA) can be merged with the zeros kept too, but that changes the function: :func:`merge_keeping_zeros` says how much.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...data.calibration import CalibrationSet
from ...errors import CoverageError, CurvatureFailure, InvalidInput
from ...models.blocks import is_conv1d, partition, weight_of

Progress = Callable[[int, int], None]


class MaskedLowRank(nn.Module):
    """``W -> W + mask(W) * (B A) * scale``, zero at the start.

    Args:
        weight: ``(rows, columns)``; its zeros are the mask.
        rank: Rank of the update.
        scale: Factor of the update.
        generator: Source of the random ``A``.
    """

    mask: torch.Tensor

    def __init__(self, weight: torch.Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        start = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        self.a = nn.Parameter(start.to(weight.device, torch.float32))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device, dtype=torch.float32))
        self.register_buffer("mask", weight.detach() != 0)
        self.scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Effective weight."""
        return weight + (self.b @ self.a * self.scale * self.mask).to(weight.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a recovery did.

    Attributes:
        steps: Optimiser steps.
        trained: Trained parameters.
        losses: Training loss of each step, nats per token.
        zeros: Zeros of the adapted matrices, before and after (equal).
    """

    steps: int
    trained: int
    losses: tuple[float, ...]
    zeros: tuple[int, int]


def recover(
    model: nn.Module,
    data: CalibrationSet,
    *,
    rank: int = 8,
    steps: int = 100,
    learning_rate: float = 1e-3,
    batch_size: int = 8,
    scale: float = 1.0,
    names: Sequence[str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Recovery:
    """Train masked low-rank updates on text and merge them, in place; every zero stays.

    Args:
        model: A pruned causal language model.
        data: Training tokens (calibration text serves).
        rank: Rank of every update.
        steps: Optimiser steps (AdamW, cosine decay).
        learning_rate: Peak learning rate.
        batch_size: Sequences per step.
        scale: Factor of the update.
        names: Matrices to adapt; all two-dimensional ones inside the layers by default.
        seed: Of the initial values and the order of the text.
        progress: Called with (steps done, steps).

    Raises:
        InvalidInput: A rank or a number of steps below one.
        CurvatureFailure: The loss stopped being finite; the model is then as it was.
        CoverageError: A zero was lost (never seen; checked after merging).
    """
    if rank < 1 or steps < 1:
        raise InvalidInput(f"rank is {rank} and steps is {steps}.", "Both must be at least 1.", "Use rank 8 and 100 steps.")
    names = list(names) if names is not None else [m.name for b in partition(model, "linear") for m in b.modules]
    names = [n for n in names if weight_of(model, n)[1].ndim == 2]
    before = _zeros(model, names)
    flags = {p: p.requires_grad for p in model.parameters()}
    training, generator = model.training, torch.Generator().manual_seed(seed)
    for p in flags:
        p.requires_grad_(False)
    updates = [MaskedLowRank(weight_of(model, n)[1], rank, scale, generator) for n in names]
    for name, update in zip(names, updates, strict=True):
        parametrize.register_parametrization(model.get_submodule(name), "weight", update)
    try:
        model.eval()  # no dropout: a few steps on little text
        losses = _train(model, data, updates, steps, learning_rate, batch_size, generator, progress)
    except CurvatureFailure:
        for update in updates:
            update.a.data.zero_()
            update.b.data.zero_()
        raise
    finally:
        for name in names:
            parametrize.remove_parametrizations(model.get_submodule(name), "weight", leave_parametrized=True)
        for p in model.parameters():
            p.requires_grad_(flags.get(p, True))
        model.train(training)
    after = _zeros(model, names)
    if after < before:
        raise CoverageError(f"{before - after} zeros were lost in the merge.", "", "Report this.")
    trained = sum(u.a.numel() + u.b.numel() for u in updates)
    return Recovery(steps=steps, trained=trained, losses=tuple(losses), zeros=(before, after))


def _zeros(model: nn.Module, names: Sequence[str]) -> int:
    return sum(int((weight_of(model, n)[1] == 0).sum()) for n in names)


def _train(
    model: nn.Module,
    data: CalibrationSet,
    updates: Sequence[MaskedLowRank],
    steps: int,
    learning_rate: float,
    batch_size: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> list[float]:
    device = next(model.parameters()).device
    optimiser = torch.optim.AdamW([p for u in updates for p in u.parameters()], lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))
    losses: list[float] = []
    with torch.enable_grad():
        while len(losses) < steps:
            order = torch.randperm(data.samples, generator=generator)
            for batch in data.select(order).batches(batch_size, device):
                labels = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(1, device=device)) == 0, -100)
                loss = model(**batch, labels=labels, use_cache=False).loss
                loss.backward()
                optimiser.step()
                schedule.step()
                optimiser.zero_grad(set_to_none=True)
                losses.append(float(loss.detach()))
                if not math.isfinite(losses[-1]):
                    raise CurvatureFailure(
                        f"The loss is {losses[-1]} at step {len(losses)}.", "It must be finite.", "Use a smaller learning rate."
                    )
                if progress:
                    progress(len(losses), steps)
                if len(losses) == steps:
                    break
    return losses


def merge_keeping_zeros(model: Any) -> tuple[nn.Module, dict[str, float]]:
    """Merge a PEFT LoRA model into its pruned base with every zero kept.

    Args:
        model: ``peft.PeftModel`` with LoRA adapters on a pruned base.

    Returns:
        The merged base model, and per matrix the share of the update's norm that the zeros swallowed (0: nothing was
        lost; the merged model differs from the adapted one by exactly that part).

    Raises:
        InvalidInput: Not a PEFT model.
    """
    if not hasattr(model, "merge_and_unload"):
        raise InvalidInput(f"{type(model).__name__} is no PEFT model.", "", "Give the model that carries the LoRA adapters.")
    masks: dict[str, torch.Tensor] = {}
    before: dict[str, torch.Tensor] = {}
    for name, module in model.get_base_model().named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and (isinstance(base, nn.Linear) or is_conv1d(base)):
            before[name] = base.weight.detach().clone()
            masks[name] = before[name] != 0
    merged = model.merge_and_unload()
    lost: dict[str, float] = {}
    for name, mask in masks.items():
        weight = merged.get_submodule(name).weight.data
        update = weight - before[name]
        total = float(update.norm())
        lost[name] = float((update * ~mask).norm()) / total if total else 0.0
        weight.mul_(mask)
    return merged, lost
