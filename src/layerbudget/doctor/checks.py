"""Checks of the doctor that only look: weights, modes, ties, coverage, tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import LayerbudgetError, UnknownStructure
from ..models.blocks import layers, left_out, partition, share_held

SEVERITIES = ("ok", "note", "warning", "problem")


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
            check="weights", severity="problem", what=f"{len(bad)} tensors hold NaN or infinite values, first {bad[0]}.",
            remedy="Repair or download the checkpoint again.",
        )  # fmt: skip
    elif packed:
        yield Finding(
            check="weights", severity="problem", what=f"{len(packed)} tensors are quantised, first {packed[0]}.",
            remedy="Score the unquantised checkpoint; plans carry over by name.",
        )  # fmt: skip
    elif kinds not in (["float32"], ["float64"]):
        yield Finding(
            check="weights", severity="note", what=f"Weights are {', '.join(kinds)}; gains have relative errors near 1e-2.",
            remedy="Load with dtype=float32 where memory allows.",
        )  # fmt: skip
    else:
        yield Finding(check="weights", severity="ok", what=f"All weights are finite and {kinds[0]}.")


def mode(model: nn.Module) -> Iterator[Finding]:
    """Training mode and dropout."""
    live = [m.p for m in model.modules() if isinstance(m, (nn.Dropout, nn.AlphaDropout)) and m.training and m.p > 0]
    if live:
        yield Finding(
            check="mode", severity="warning", what=f"{len(live)} dropout layers are active (rates up to {max(live):g}).",
            remedy="Estimators switch to evaluation mode themselves; call model.eval() for your own measurements.",
        )  # fmt: skip
    elif model.training:
        yield Finding(
            check="mode", severity="note", what="The model is in training mode, without active dropout.",
            remedy="Call model.eval().",
        )  # fmt: skip
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
            check="ties", severity="warning",
            what=f"{len(across)} matrices are shared between layers, first {' = '.join(across[0][:2])}.",
            remedy="They count once, in the first block that holds them; partition by='linear' to see them one by one.",
        )  # fmt: skip
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
            check="coverage", severity="warning" if beside < len(rest) else "note",
            what=f"Blocks hold {share_held(model, blocks):.1%} of the matrices' weights (embeddings and output head aside); "
            f"{len(rest)} tensors are in no block, {beside} of them outside the layers, first {next(iter(rest))}.",
            remedy="They are neither scored nor pruned; say so when you report a sparsity.",
        )  # fmt: skip
    fused = [m.name for b in blocks for m in b.modules if m.copies > 1]
    if fused:
        yield Finding(
            check="coverage", severity="note", what=f"{len(fused)} fused expert tensors, first {fused[0]}.",
            remedy="Scores that need per-sequence gradients run one sequence at a time; outlier-ratio does not cover them.",
        )  # fmt: skip
    if not rest and not fused:
        total = sum(b.numel for b in blocks)
        yield Finding(check="coverage", severity="ok", what=f"{len(blocks)} blocks hold all {total:,} weights of the matrices.")


def tokens(model: nn.Module, tokenizer: Any, data: CalibrationSet | None) -> Iterator[Finding]:
    """Vocabulary sizes, a doubled or missing beginning-of-text token, a missing padding token, lengths."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = embedding.weight.shape[0] if embedding is not None else None
    if data is not None and rows is not None and int(data.input_ids.max()) >= rows:
        yield Finding(
            check="tokens", severity="problem",
            what=f"Token id {int(data.input_ids.max())}, but the model has {rows} embeddings.",
            remedy="Use the tokenizer that belongs to the model.",
        )  # fmt: skip
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if data is not None and limit and data.length > limit:
        yield Finding(
            check="tokens", severity="warning", what=f"Samples have {data.length} tokens, the model was made for {limit}.",
            remedy=f"Use length={limit} or less.",
        )  # fmt: skip
    bos = getattr(tokenizer, "bos_token_id", None)
    if data is not None and bos is not None and data.length > 1:
        double = int(((data.input_ids[:, :-1] == bos) & (data.input_ids[:, 1:] == bos)).any(1).sum())
        if double:
            yield Finding(
                check="tokens", severity="warning", what=f"{double} of {data.samples} samples begin their text twice.",
                remedy="Tokenise with add_special_tokens=False where the text carries the token already.",
            )  # fmt: skip
    if tokenizer is not None:
        yield from _special_tokens(tokenizer)


def _special_tokens(tokenizer: Any) -> Iterator[Finding]:
    bos, text = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "bos_token", None)
    plain = list(tokenizer("a b")["input_ids"])
    adds = bos is not None and plain[:1] == [bos]
    if adds and list(tokenizer(f"{text}a b")["input_ids"])[:2] == [bos, bos]:
        yield Finding(
            check="tokens", severity="note", what=f"The tokenizer adds {text} also to text that begins with it.",
            remedy="Pass add_special_tokens=False for text from chat templates.",
        )  # fmt: skip
    elif bos is not None and not adds:
        yield Finding(
            check="tokens", severity="note", what=f"The tokenizer knows {text} but does not add it.",
            remedy="Some models (Gemma) need it: check perplexity with and without.",
        )  # fmt: skip
    if getattr(tokenizer, "pad_token_id", None) is None:
        yield Finding(
            check="tokens", severity="note", what="The tokenizer has no padding token.",
            remedy="Use equal lengths, or set tokenizer.pad_token = tokenizer.eos_token.",
        )  # fmt: skip
