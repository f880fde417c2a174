"""Checks of the doctor: some only look, others run the model on one sample. What they change they put back."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput, LayerbudgetError, UnknownStructure
from ..execution.loss import Batch, batches, head_of, logits_of, summed_loss
from ..execution.modes import prepared, twice_differentiable
from ..execution.sites import Collector
from ..models.blocks import layers, left_out, partition, share_held, weight_of
from ..records import Block

SEVERITIES = ("ok", "note", "warning", "problem")
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of one check.

    Attributes:
        check: Name of the check.
        severity: ``ok``, ``note`` (good to know), ``warning`` (numbers may mislead), ``problem`` (will fail).
        what: What was found, with numbers.
        remedy: The cheapest thing to do; empty where there is nothing to do.
    """

    check: str
    severity: str
    what: str
    remedy: str = ""


def weights(model: nn.Module) -> Iterator[Finding]:
    """Values that are not finite, precision, quantised storage."""
    bad = [n for n, p in model.state_dict().items() if p.is_floating_point() and not bool(torch.isfinite(p).all())]
    packed = [n for n, p in model.named_parameters() if not p.is_floating_point()]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if bad:
        yield Finding(
            check="weights",
            severity="problem",
            what=f"{len(bad)} tensors hold NaN or infinite values, first {bad[0]}.",
            remedy="Repair or download the checkpoint again.",
        )
    elif packed:
        yield Finding(
            check="weights",
            severity="problem",
            what=f"{len(packed)} tensors are quantised, first {packed[0]}.",
            remedy="Score the unquantised checkpoint; plans carry over by name.",
        )
    elif kinds not in (["float32"], ["float64"]):
        yield Finding(
            check="weights",
            severity="note",
            what=f"Weights are {', '.join(kinds)}; gains have relative errors near 1e-2.",
            remedy="Load with dtype=float32 where memory allows.",
        )
    else:
        yield Finding(check="weights", severity="ok", what=f"All weights are finite and {kinds[0]}.")


def mode(model: nn.Module) -> Iterator[Finding]:
    """Training mode and dropout."""
    live = [m.p for m in model.modules() if isinstance(m, (nn.Dropout, nn.AlphaDropout)) and m.training and m.p > 0]
    if live:
        yield Finding(
            check="mode",
            severity="warning",
            what=f"{len(live)} dropout layers are active (rates up to {max(live):g}).",
            remedy="Estimators switch to evaluation mode themselves; call model.eval() for your own measurements.",
        )
    elif model.training:
        yield Finding(
            check="mode",
            severity="note",
            what="The model is in training mode, without active dropout.",
            remedy="Call model.eval().",
        )
    else:
        yield Finding(check="mode", severity="ok", what="Evaluation mode, no dropout is active.")


def ties(model: nn.Module) -> Iterator[Finding]:
    """Weights that serve in several places."""
    by_parameter: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(p), []).append(name)
    shared = [names for names in by_parameter.values() if len(names) > 1]
    try:
        inside = tuple(name + "." for name, _ in layers(model))
    except UnknownStructure:
        inside = ()
    across = [names for names in shared if inside and any(n.startswith(inside) for n in names)]
    if across:
        yield Finding(
            check="ties",
            severity="warning",
            what=f"{len(across)} matrices are shared between layers, first {' = '.join(across[0][:2])}.",
            remedy="They count once, in the first block that holds them; partition by='linear' to see them one by one.",
        )
    elif shared:
        yield Finding(check="ties", severity="note", what=f"Tied: {' = '.join(shared[0][:2])}; neither is scored nor counted.")
    else:
        yield Finding(check="ties", severity="ok", what="No weights are shared.")


def coverage(model: nn.Module) -> Iterator[Finding]:
    """Whether blocks are found and which matrices no block holds, inside the layers or outside of them."""
    try:
        blocks = partition(model)
    except LayerbudgetError as error:
        yield Finding(check="coverage", severity="warning", what=error.what, remedy=error.remedy)
        return
    rest = left_out(model, blocks)
    if rest:
        prefixes = tuple(name + "." for name, _ in layers(model))
        beside = sum(not name.startswith(prefixes) for name in rest)
        yield Finding(
            check="coverage",
            severity="warning" if beside < len(rest) else "note",
            what=f"Blocks hold {share_held(model, blocks):.1%} of the matrices' weights (embeddings and output head aside); "
            f"{len(rest)} tensors are in no block, {beside} of them outside the layers, first {next(iter(rest))}.",
            remedy="They are neither scored nor pruned; say so when you report a sparsity.",
        )
    fused = [m.name for b in blocks for m in b.modules if m.copies > 1]
    if fused:
        yield Finding(
            check="coverage",
            severity="note",
            what=f"{len(fused)} fused expert tensors, first {fused[0]}.",
            remedy="Scores that need per-sequence gradients run one sequence at a time; outlier-ratio does not cover them.",
        )
    if not rest and not fused:
        total = sum(b.numel for b in blocks)
        yield Finding(check="coverage", severity="ok", what=f"{len(blocks)} blocks hold all {total:,} weights of the matrices.")


def tokens(model: nn.Module, tokenizer: Any, data: CalibrationSet | None) -> Iterator[Finding]:
    """Vocabulary sizes, a doubled or missing beginning-of-text token, a missing padding token, lengths."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = embedding.weight.shape[0] if embedding is not None else None
    if data is not None and rows is not None and int(data.input_ids.max()) >= rows:
        yield Finding(
            check="tokens",
            severity="problem",
            what=f"Token id {int(data.input_ids.max())}, but the model has {rows} embeddings.",
            remedy="Use the tokenizer that belongs to the model.",
        )
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if data is not None and limit and data.length > limit:
        yield Finding(
            check="tokens",
            severity="warning",
            what=f"Samples have {data.length} tokens, the model was made for {limit}.",
            remedy=f"Use length={limit} or less.",
        )
    bos = getattr(tokenizer, "bos_token_id", None)
    if data is not None and bos is not None and data.length > 1:
        double = int(((data.input_ids[:, :-1] == bos) & (data.input_ids[:, 1:] == bos)).any(1).sum())
        if double:
            yield Finding(
                check="tokens",
                severity="warning",
                what=f"{double} of {data.samples} samples begin their text twice.",
                remedy="Tokenise with add_special_tokens=False where the text carries the token already.",
            )
    if tokenizer is not None:
        yield from _special_tokens(tokenizer)


def _special_tokens(tokenizer: Any) -> Iterator[Finding]:
    bos, text = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "bos_token", None)
    plain = list(tokenizer("a b")["input_ids"])
    adds = bos is not None and plain[:1] == [bos]
    if adds and list(tokenizer(f"{text}a b")["input_ids"])[:2] == [bos, bos]:
        yield Finding(
            check="tokens",
            severity="note",
            what=f"The tokenizer adds {text} also to text that begins with it.",
            remedy="Pass add_special_tokens=False for text from chat templates.",
        )
    elif bos is not None and not adds:
        yield Finding(
            check="tokens",
            severity="note",
            what=f"The tokenizer knows {text} but does not add it.",
            remedy="Some models (Gemma) need it: check perplexity with and without.",
        )
    if getattr(tokenizer, "pad_token_id", None) is None:
        yield Finding(
            check="tokens",
            severity="note",
            what="The tokenizer has no padding token.",
            remedy="Use equal lengths, or set tokenizer.pad_token = tokenizer.eos_token.",
        )


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
    each = ", ".join(f"{side} {c:.1e}" for side, c in changed.items())
    if bad:
        good = [side for side in changed if side not in bad]
        yield Finding(
            check="padding",
            severity="note" if good and not bad.keys() & _sides(data) else "warning",
            what=f"Padding changes the logits of real tokens (relative: {each}).",
            remedy=f"Pad on the {good[0]}." if good else "Use samples of equal length, without padding.",
        )
    else:
        yield Finding(check="padding", severity="ok", what=f"Padding leaves the logits alone (relative: {each}).")


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
            check="determinism",
            severity="warning" if severe else "note",
            what=f"Two passes over one sample differ by {gap:.1e} (relative).",
            remedy="Look for randomness that evaluation mode leaves on."
            if severe
            else "Try torch.use_deterministic_algorithms(True).",
        )


def attention(model: nn.Module, batch: Batch, block: Block) -> Iterator[Finding]:
    """Whether attention can be differentiated twice as it is, or by the math kernel."""
    own = getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own"
    if _twice(model, batch, block, contextlib.nullcontext()) is None:
        yield Finding(check="attention", severity="ok", what=f"Attention ({own}) can be differentiated twice.")
        return
    failure = _twice(model, batch, block, twice_differentiable(model))
    if failure is None:
        yield Finding(
            check="attention",
            severity="note",
            what=f"Attention ({own}) has no second derivative on this device.",
            remedy="ggn, hessian and certificates switch to the math kernel for their own runs; nothing to do.",
        )
    else:
        yield Finding(
            check="attention",
            severity="warning",
            what=f"Second derivatives fail also with the math kernel: {failure}",
            remedy="Use fisher-gram, kfac or ekfac, or load with attn_implementation='eager'.",
        )


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
            check="coverage",
            severity="warning",
            what=f"{len(missing)} matrices did not run on a sample: {missing[0]}.",
            remedy="Leave them out with exclude=, or give data that reaches them.",
        )
