"""The doctor: every check that applies to a model, and the verbs that would refuse it.

A check yields ``(severity, what, remedy)``. Some only look, others run the model on one sample; the model's mode, gradients and
attention come back as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..arguments import checked
from ..data.calibration import CalibrationSet
from ..data.text import beginning
from ..decisions.shapes import find_parts
from ..errors import InvalidInput, LayerbudgetError, UnknownStructure
from ..execution.loss import IGNORE, Batch, batches, head_of, logits_of, summed_loss
from ..execution.modes import prepared, twice_differentiable
from ..execution.sites import Collector, owners_of, tracked
from ..models.blocks import layers, left_out, partition, share_held, weight_of
from ..models.experts import check_experts, find_experts
from ..records import Block
from ..sensitivity.estimators import ESTIMATORS

SEVERITIES = ("ok", "note", "warning", "problem")
Remarks = Iterator[tuple[str, str, str]]
_FAILURES = (LayerbudgetError, ArithmeticError, LookupError, RuntimeError, ValueError, TypeError, AttributeError)
_SHORT = 8  # tokens of the sample that is tried first
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of one check: what was found, and the cheapest thing to do where there is any."""

    check: str
    severity: str  # ok, note (good to know), warning (numbers may mislead) or problem (will fail)
    what: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings of the doctor, one or more per check."""

    findings: tuple[Finding, ...]

    @property
    def worst(self) -> str:
        """The gravest severity of all findings."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default="ok")

    @property
    def ok(self) -> bool:
        """Whether nothing will fail; warnings may remain."""
        return self.worst != "problem"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"ok": self.ok, "worst": self.worst, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        return "\n".join(f"{f.severity:8}{f.check:13}{f.what} {f.remedy}".rstrip() for f in self.findings)


@checked
def diagnose(model: nn.Module, tokenizer: Any = None, data: CalibrationSet | None = None) -> Diagnosis:
    """Return what every check that applies has found; a check that itself fails becomes a finding.

    Args:
        model: A transformers model with a head, loaded.
        tokenizer: Its tokenizer, for the checks of special tokens.
        data: The calibration set that is planned; a random sample of 64 tokens stands in.
    """
    findings = [f for check in (weights, ties, coverage) for f in _findings(check.__name__, check(model))]
    findings += _findings("tokens", tokens(model, tokenizer, data))
    sample = _stand_in(model) if data is None else _learned_first(data)
    if sample is None or any(f.severity == "problem" for f in findings):
        return Diagnosis(findings=tuple(findings))
    findings += _findings("padding", padding(model, sample))
    findings += _findings("experts", experts(model))
    try:
        batch, short, blocks = first_batch(model, sample), first_batch(model, _shorten(sample)), partition(model)
        missing = unreached(model, batch, blocks)
    except _FAILURES as error:  # of everything that scores the matrices
        findings += _findings("run", iter([_failed(error, "problem")]))
    else:
        findings += _findings("determinism", determinism(model, batch, blocks[0]))
        findings += _findings("coverage", iter(missing))
        findings += _findings("attention", attention(model, short, blocks[0]))
    return Diagnosis(findings=tuple(findings))


def _findings(check: str, remarks: Remarks) -> list[Finding]:
    results: list[tuple[str, str, str]] = []
    try:
        results.extend(remarks)
    except _FAILURES as error:
        results.append(_failed(error, "warning"))
    return [Finding(check=check, severity=severity, what=what, remedy=remedy) for severity, what, remedy in results]


def _failed(error: Exception, severity: str) -> tuple[str, str, str]:
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return severity, f"The check did not run: {type(error).__name__}: {first}", getattr(error, "remedy", "")


# --- checks that only look --------------------------------------------------------------------------------------------------


def weights(model: nn.Module) -> Remarks:
    """Values that are not finite, precision, quantised storage."""
    bad = [n for n, p in model.state_dict().items() if p.is_floating_point() and not bool(torch.isfinite(p).all())]
    packed = [n for n, p in model.named_parameters() if not p.is_floating_point()]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if bad:
        what = f"{len(bad)} tensors hold NaN or infinite values, first {bad[0]}."
        yield "problem", what, "Repair or download the checkpoint again."
    elif packed:
        what = f"{len(packed)} tensors are quantised, first {packed[0]}."
        yield "problem", what, "Score the unquantised checkpoint; plans carry over by name."
    elif kinds not in (["float32"], ["float64"]):
        what = f"Weights are {', '.join(kinds)}; gains differ by about 0.1 % from those in float32."
        yield "note", what, "Load with dtype=float32 where memory allows."
    else:
        yield "ok", f"All weights are finite and {kinds[0]}.", ""


def ties(model: nn.Module) -> Remarks:
    """Weights that serve in several places."""
    by_parameter: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(p), []).append(name)
    shared = [names for names in by_parameter.values() if len(names) > 1]
    inside: tuple[str, ...] = ()
    with contextlib.suppress(UnknownStructure):
        inside = tuple(name + "." for name, _ in layers(model))
    across = [names for names in shared if any(n.startswith(inside) for n in names)]
    if across:
        what = f"{len(across)} matrices are shared between layers, first {' = '.join(across[0][:2])}."
        yield (
            "warning",
            what,
            "They count once, in the first block that holds them; partition by='linear' to see them one by one.",
        )
    elif shared:
        yield "note", f"Tied: {' = '.join(shared[0][:2])}; neither is scored nor counted.", ""
    else:
        yield "ok", "No weights are shared.", ""


def coverage(model: nn.Module) -> Remarks:
    """Whether blocks are found and which matrices no block holds, inside the layers or outside of them."""
    try:
        blocks = partition(model)
    except LayerbudgetError as error:
        yield "warning", error.what, error.remedy
        return
    rest = left_out(model, blocks)
    fused = [m.name for b in blocks for m in b.modules if m.copies > 1]
    if rest:
        prefixes = tuple(name + "." for name, _ in layers(model))
        outside = sum(not name.startswith(prefixes) for name in rest)
        what = (
            f"Blocks hold {share_held(model, blocks):.1%} of the matrices' weights (embeddings and output head aside); "
            f"{len(rest)} tensors are in no block, {outside} of them outside the layers, first {next(iter(rest))}."
        )
        severity = "warning" if outside < len(rest) else "note"
        yield severity, what, "They are neither scored nor pruned; say so when you report a sparsity."
    if fused:
        remedy = "Scores that need per-sequence gradients run one sequence at a time; outlier-ratio does not cover them."
        yield "note", f"{len(fused)} fused expert tensors, first {fused[0]}.", remedy
    if not rest and not fused:
        yield "ok", f"{len(blocks)} blocks hold all {sum(b.numel for b in blocks):,} weights of the matrices.", ""


def tokens(model: nn.Module, tokenizer: Any, data: CalibrationSet | None) -> Remarks:
    """Vocabulary sizes, a doubled or missing beginning-of-text token, a missing padding token, lengths."""
    if data is not None:
        yield from _tokens_of(model, data, getattr(tokenizer, "bos_token_id", None))
    if tokenizer is None:
        return
    bos, text = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "bos_token", None)
    adds = beginning(tokenizer) is not None
    if adds and list(tokenizer(f"{text}a b")["input_ids"])[:2] == [bos, bos]:
        remedy = "Pass add_special_tokens=False for text from chat templates."
        yield "note", f"The tokenizer adds {text} also to text that begins with it.", remedy
    elif bos is not None and not adds:
        remedy = "Some models (Gemma) need it: check perplexity with and without."
        yield "note", f"The tokenizer knows {text} but does not add it.", remedy
    if getattr(tokenizer, "pad_token_id", None) is None:
        remedy = "Use equal lengths, or set tokenizer.pad_token = tokenizer.eos_token."
        yield "note", "The tokenizer has no padding token.", remedy


def _tokens_of(model: nn.Module, data: CalibrationSet, bos: int | None) -> Remarks:
    embedding, largest = getattr(model, "get_input_embeddings", lambda: None)(), int(data.input_ids.max())
    if embedding is not None and largest >= embedding.weight.shape[0]:
        what = f"Token id {largest}, but the model has {embedding.weight.shape[0]} embeddings."
        yield "problem", what, "Use the tokenizer that belongs to the model."
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit and data.length > limit:
        what = f"Samples have {data.length} tokens, the model was made for {limit}."
        yield "warning", what, f"Use length={limit} or less."
    starts = data.input_ids == bos if bos is not None else torch.zeros_like(data.input_ids, dtype=torch.bool)
    double = int((starts[:, :-1] & starts[:, 1:]).any(1).sum())
    if double:
        remedy = "Tokenise with add_special_tokens=False where the text carries the token already."
        yield "warning", f"{double} of {data.samples} samples begin their text twice.", remedy


# --- checks that run the model ----------------------------------------------------------------------------------------------


def padding(model: nn.Module, data: CalibrationSet) -> Remarks:
    """Whether real tokens get the same logits beside padding, on either side."""
    row = data.input_ids[:1, : min(data.length, 24)]
    if data.attention_mask is not None:
        row = row[:, data.attention_mask[0, : row.shape[1]].bool()]
    width, extra = row.shape[1], 5
    if width < 2 or not hasattr(model, "config"):
        return
    pads = torch.full((1, extra), getattr(model.config, "pad_token_id", None) or 0)
    changed = {}
    with prepared(model), torch.no_grad():
        clean = _logits(model, row, torch.ones_like(row))
        for side in ("right", "left"):
            ids = torch.cat([row, pads] if side == "right" else [pads, row], 1)
            real = slice(0, width) if side == "right" else slice(extra, None)
            mask = torch.zeros_like(ids)
            mask[:, real] = 1
            out = _logits(model, ids, mask)
            out = out if out.ndim == 2 else out[:, real]
            changed[side] = float((out - clean).abs().max() / clean.abs().max().clamp_min(1e-30))
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, 1e-2)
    good = [side for side, c in changed.items() if c <= tolerance]
    each = ", ".join(f"{side} {c:.1e}" for side, c in changed.items())
    if len(good) == 2:
        yield "ok", f"Padding leaves the logits alone (relative: {each}).", ""
        return
    edges = {"left": 0, "right": -1}
    padded = {
        s for s, edge in edges.items() if data.attention_mask is not None and bool((data.attention_mask[:, edge] == 0).any())
    }
    remedy = f"Pad on the {good[0]}." if good else "Use samples of equal length, without padding."
    severity = "note" if good and padded <= set(good) else "warning"
    yield severity, f"Padding changes the logits of real tokens (relative: {each}).", remedy


def _logits(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    device = next(model.parameters()).device
    kwargs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        kwargs["position_ids"] = (kwargs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return model(**kwargs).logits.float()


def experts(model: nn.Module) -> Remarks:
    """Whether routed experts are called in a known way, tried on a few tokens of one layer of each kind."""
    if not any(m.copies > 1 for b in partition(model) for m in b.modules):
        return
    try:
        expert_layers = find_experts(model)
        check_experts(expert_layers)
    except UnknownStructure as error:
        yield "note", f"Which experts stay cannot be planned: {error.what}", error.remedy
        return
    counts = "/".join(sorted({f"{e.top_k} of {e.count}" for e in expert_layers}))
    remedy = "plan expert-pruning says which of them your text needs."
    yield "ok", f"{len(expert_layers)} layers give a token {counts} experts, as their routers and matrices by hand do.", remedy


def determinism(model: nn.Module, batch: Batch, block: Block) -> Remarks:
    """Two passes over the same sample: equal loss, equal gradient?"""
    _, parameter = weight_of(model, block.modules[0].name)
    passes = []
    with prepared(model):
        parameter.requires_grad_(True)
        for _ in range(2):
            loss = summed_loss(logits_of(model, batch), batch.targets)
            passes.append((loss.detach(), torch.autograd.grad(loss, parameter)[0]))
    gap = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(*passes, strict=True))
    what = f"Two passes over one sample differ by {gap:.1e} (relative)."
    if gap == 0:
        yield "ok", "Two passes give the same loss and gradient, bit for bit.", ""
    elif gap > _TOLERANCE.get(parameter.dtype, 1e-2):
        yield "warning", what, "Look for randomness that evaluation mode leaves on."
    else:
        yield "note", what, "Try torch.use_deterministic_algorithms(True)."


def attention(model: nn.Module, batch: Batch, block: Block) -> Remarks:
    """Whether attention can be differentiated twice as it is, or by the math kernel."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own"
    if _twice(model, batch, block, contextlib.nullcontext()) is None:
        yield "ok", f"Attention ({implementation}) can be differentiated twice.", ""
        return
    failure = _twice(model, batch, block, twice_differentiable(model))
    if failure is None:
        remedy = "ggn, hessian and certificates switch to the math kernel for their own runs; nothing to do."
        yield "note", f"Attention ({implementation}) has no second derivative on this device.", remedy
    else:
        remedy = "Use fisher-gram, kfac or ekfac, or load with attn_implementation='eager'."
        yield "warning", f"Second derivatives fail also with the math kernel: {failure}", remedy


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


def unreached(model: nn.Module, batch: Batch, blocks: Iterable[Block]) -> list[tuple[str, str, str]]:
    """Whether one sample reaches every weight matrix through its module."""
    with Collector(model, tuple(blocks), lambda site: None) as collector:
        logits_of(model, batch)
        missing = sorted(set(collector.hooked.values()) - collector.seen)
    remedy = "Leave them out with exclude=, or give data that reaches them."
    return [("warning", f"{len(missing)} matrices did not run on a sample: {missing[0]}.", remedy)] if missing else []


# --- samples ----------------------------------------------------------------------------------------------------------------


def first_batch(model: nn.Module, data: CalibrationSet) -> Batch:
    """One sample, ready for the model; labels stand in where a classification head has none."""
    one = data.select(slice(0, 1))
    if one.labels is None and head_of(model) == "classes":
        one = dataclasses.replace(one, labels=torch.zeros(1, dtype=torch.long))
    elif one.labels is None and head_of(model) == "token":
        one = dataclasses.replace(one, labels=one.input_ids)
    return next(iter(batches(model, one, 1)))


def sample_of(model: nn.Module, data: CalibrationSet) -> Batch:
    """A few tokens of one sample, ready for the model."""
    return first_batch(model, _shorten(_learned_first(data)))


def _stand_in(model: nn.Module) -> CalibrationSet | None:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is None:
        return None
    ids = torch.randint(embedding.weight.shape[0], (1, 64), generator=torch.Generator().manual_seed(0))
    return CalibrationSet(input_ids=ids, source="random tokens")


def _learned_first(data: CalibrationSet) -> CalibrationSet:
    """The data from its first sample with a learned token on: a long question may leave no room for its answer."""
    if data.labels is None or data.labels.ndim != 2:
        return data
    rows = (data.labels[:, 1:] != IGNORE).any(1).nonzero()
    return data.select(slice(int(rows[0]), None)) if len(rows) else data


def _shorten(data: CalibrationSet) -> CalibrationSet:
    """A few tokens of the first sample; where only answers are learned, up to the first learned token."""
    end, labels = _SHORT, data.labels
    if labels is not None and labels.ndim == 2:
        end = max(_SHORT, 1 + int((labels[0] != IGNORE).int().argmax()))
        labels = labels[:1, end - _SHORT : end]
    elif labels is not None:
        labels = labels[:1]
    return dataclasses.replace(data, input_ids=data.input_ids[:1, end - _SHORT : end], attention_mask=None, labels=labels)


# --- refusals ---------------------------------------------------------------------------------------------------------------


def refusals(model: nn.Module) -> dict[str, str]:
    """One sentence for every long verb that would refuse the model for what it is made of; the model is not run."""
    reasons: dict[str, str] = {}
    fused = list(tracked(model, partition(model))[1])
    if fused:
        why = f"It knows no fused experts. Leave them out: --exclude '{owners_of(fused)}'."
        reasons |= {f"score {e.name}": why for e in ESTIMATORS.all().values() if e.linear}
    try:
        find_parts(model)
    except UnknownStructure as error:
        reasons["plan shapes"] = str(error)
    try:
        if head_of(model) != "causal":
            reasons["evaluate"] = "Perplexity needs a causal language model."
    except LayerbudgetError as error:
        reasons["evaluate"] = str(error)
    return reasons
