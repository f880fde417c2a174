"""Checks of the doctor that run the model on one sample: padding, determinism, second derivatives, reach.

Each puts back what it changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..execution.loss import Batch, batches, head_of, logits_of, summed_loss
from ..execution.modes import prepared
from ..execution.sites import Collector
from ..models.blocks import weight_of
from ..records import Block
from .checks import Finding

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def padding(model: nn.Module, data: CalibrationSet) -> Iterator[Finding]:
    """Whether real tokens get the same logits beside padding, on either side."""
    if not hasattr(model, "config"):
        return
    row = data.input_ids[:1, : min(data.length, 24)]
    if data.attention_mask is not None:
        row = row[:, data.attention_mask[0, : row.shape[1]].bool()]
    width, extra = row.shape[1], 5
    if width < 2:
        return
    fill = getattr(model.config, "pad_token_id", None) or 0
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, 1e-2)
    changed = {}
    with prepared(model), torch.no_grad():
        clean = _logits(model, row, torch.ones_like(row))
        for side in ("right", "left"):
            pads = torch.full((1, extra), fill)
            ids = torch.cat([row, pads] if side == "right" else [pads, row], 1)
            mask = torch.zeros_like(ids)
            real = slice(0, width) if side == "right" else slice(extra, None)
            mask[:, real] = 1
            out = _logits(model, ids, mask)
            out = out if out.ndim == 2 else out[:, real]
            changed[side] = float((out - clean).abs().max() / clean.abs().max().clamp_min(1e-30))
    bad = {side: c for side, c in changed.items() if c > tolerance}
    told = ", ".join(f"{side} {c:.1e}" for side, c in changed.items())
    if bad:
        good = [side for side in changed if side not in bad]
        yield Finding(
            check="padding", severity="note" if good and not bad.keys() & _sides(data) else "warning",
            what=f"Padding changes the logits of real tokens (relative: {told}).",
            remedy=f"Pad on the {good[0]}." if good else "Use samples of equal length, without padding.",
        )  # fmt: skip
    else:
        yield Finding(check="padding", severity="ok", what=f"Padding leaves the logits alone (relative: {told}).")


def _sides(data: CalibrationSet) -> set[str]:
    """On which sides the data is padded."""
    if data.attention_mask is None:
        return set()
    first, last = data.attention_mask[:, 0], data.attention_mask[:, -1]
    return {side for side, edge in (("left", first), ("right", last)) if bool((edge == 0).any())}


def _logits(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    device = next(model.parameters()).device
    kwargs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        kwargs["position_ids"] = (kwargs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return model(**kwargs).logits.float()


def first_batch(model: nn.Module, data: CalibrationSet) -> Batch:
    """One sample, ready for the model; random class labels stand in where a classification head has none."""
    one = data.select(slice(0, 1))
    if one.labels is None and head_of(model) == "classes":
        one = dataclasses.replace(one, labels=torch.zeros(1, dtype=torch.long))
    elif one.labels is None and head_of(model) == "token":
        one = dataclasses.replace(one, labels=one.input_ids)
    return next(iter(batches(model, one, 1)))


def determinism(model: nn.Module, batch: Batch, block: Block) -> Iterator[Finding]:
    """Two passes over the same sample: equal loss, equal gradient?"""
    _, parameter = weight_of(model, block.modules[0].name)
    found = []
    with prepared(model):
        parameter.requires_grad_(True)
        for _ in range(2):
            loss = summed_loss(logits_of(model, batch), batch.targets)
            found.append((loss.detach(), torch.autograd.grad(loss, parameter)[0]))
    gap = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(*found, strict=True))
    if gap == 0:
        yield Finding(check="determinism", severity="ok", what="Two passes give the same loss and gradient, bit for bit.")
    else:
        severe = gap > _TOLERANCE.get(parameter.dtype, 1e-2)
        yield Finding(
            check="determinism", severity="warning" if severe else "note",
            what=f"Two passes over one sample differ by {gap:.1e} (relative).",
            remedy="Look for randomness that evaluation mode leaves on." if severe
            else "Try torch.use_deterministic_algorithms(True).",
        )  # fmt: skip


def attention(model: nn.Module, batch: Batch, block: Block, switched: Any) -> Iterator[Finding]:
    """Whether attention can be differentiated twice as it is, or after ``switched(model)``."""
    own = getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own"
    if _twice(model, batch, block, contextlib.nullcontext()) is None:
        yield Finding(check="attention", severity="ok", what=f"Attention ({own}) can be differentiated twice.")
        return
    failure = _twice(model, batch, block, switched(model))
    if failure is None:
        yield Finding(
            check="attention", severity="note", what=f"Attention ({own}) has no second derivative on this device.",
            remedy="ggn, hessian and certificates switch to the math kernel for their own runs; nothing to do.",
        )  # fmt: skip
    else:
        yield Finding(
            check="attention", severity="warning", what=f"Second derivatives fail also with the math kernel: {failure}",
            remedy="Use fisher-gram, kfac or ekfac, or load with attn_implementation='eager'.",
        )  # fmt: skip


def _twice(model: nn.Module, batch: Batch, block: Block, context: Any) -> str | None:
    """Differentiate twice; None if that works, else why not."""
    _, parameter = weight_of(model, block.modules[0].name)
    try:
        with prepared(model), context:
            parameter.requires_grad_(True)
            loss = summed_loss(logits_of(model, batch), batch.targets)
            (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
            torch.autograd.grad(gradient.square().sum(), parameter)
    except (RuntimeError, NotImplementedError, InvalidInput) as error:
        return str(error).strip().splitlines()[0][:160]
    return None


def visible(model: nn.Module, batch: Batch, blocks: tuple[Block, ...]) -> Iterator[Finding]:
    """Whether one sample reaches every weight matrix through its module."""
    with Collector(model, blocks, lambda site: None) as collector:
        logits_of(model, batch)
        missing = sorted(set(collector.hooked.values()) - collector.seen)
    if missing:
        yield Finding(
            check="coverage", severity="warning", what=f"{len(missing)} matrices did not run on a sample: {missing[0]}.",
            remedy="Leave them out with exclude=, or give data that reaches them.",
        )  # fmt: skip
