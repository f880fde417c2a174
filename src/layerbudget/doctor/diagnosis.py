"""The doctor: look at a model before GPU hours are spent on it.

Every check runs the model itself on one short sample; nothing is changed, and the model's mode, gradients and
attention come back as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput, LayerbudgetError
from ..execution.loss import IGNORE
from ..models.blocks import partition
from ..models.machine import free_bytes
from .checks import SEVERITIES, Finding, coverage, mode, ties, tokens, weights
from .effort import Effort, Pass, efforts, time_pass
from .trials import attention, determinism, first_batch, padding, visible

logger = logging.getLogger(__name__)
_FAILURES = (LayerbudgetError, ArithmeticError, LookupError, RuntimeError, ValueError, TypeError, AttributeError)

__all__ = ["Diagnosis", "Effort", "Finding", "Pass", "double_backward_attention", "diagnose"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        findings: One or more per check, in order.
        sample: The timed pass, where it could run.
        efforts: Estimated cost of the chosen estimator, or of every estimator, on all of the data.
        samples, length: Size of the data that the estimates are for.
    """

    findings: tuple[Finding, ...]
    sample: Pass | None
    efforts: tuple[Effort, ...]
    samples: int
    length: int

    @property
    def worst(self) -> str:
        """The gravest severity, one of ``ok``, ``note``, ``warning`` or ``problem``."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default="ok")

    @property
    def ok(self) -> bool:
        """Whether nothing will fail (warnings may remain)."""
        return self.worst != "problem"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "ok": self.ok,
            "worst": self.worst,
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "sample": dataclasses.asdict(self.sample) if self.sample else None,
            "efforts": [dataclasses.asdict(e) for e in self.efforts],
            "samples": self.samples,
            "length": self.length,
        }

    def __str__(self) -> str:
        rows = [f"{f.severity:8}{f.check:13}{f.what} {f.remedy}".rstrip() for f in self.findings]
        rows += [
            f"{'cost':8}{e.estimator:16}{e.passes:7.2f} passes, {duration(e.seconds)}, {e.memory / 2**30:.2f} GiB"
            for e in self.efforts
        ]
        return "\n".join(rows)


@contextlib.contextmanager
def double_backward_attention(model: nn.Module) -> Iterator[str]:
    """Use attention that can be differentiated twice for the length of a with-block; yield a sentence that says what is used.

    The fused kernels (CPU and CUDA flash) have no second derivative. ``sdpa`` keeps its code and is held to the math
    kernel; other implementations are replaced by ``eager``; ``eager`` stays. The model's own choice comes back at the end,
    also after an exception.
    """
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    choose: Any = getattr(model, "set_attn_implementation", None)
    switch = own not in (None, "eager", "sdpa") and choose is not None
    used = "eager attention" if switch or own == "eager" else "the math kernel of scaled dot-product attention"
    sentence = f"Second derivatives use {used} (the model's own: {own or 'unknown'})."
    logger.info(sentence)
    try:
        if switch:
            choose("eager")
        with sdpa_kernel(SDPBackend.MATH):
            yield sentence
    finally:
        if switch:
            choose(own)


def diagnose(
    model: nn.Module,
    tokenizer: Any = None,
    data: CalibrationSet | None = None,
    *,
    estimator: str | None = None,
    batch_size: int = 8,
) -> Diagnosis:
    """Run every check that applies.

    Args:
        model: A transformers model with a head, loaded.
        tokenizer: Its tokenizer, for the checks of special tokens.
        data: The calibration set that is planned; without it a random sample of 64 tokens stands in and costs are for 128
            such samples.
        estimator: Estimate the cost of this one only.
        batch_size: Sequences per pass that are planned, for the memory estimate.

    Returns:
        The diagnosis. A check that itself fails becomes a finding, it does not raise.

    Raises:
        InvalidInput: An estimator that has no cost model.
    """
    findings = [f for check in (weights, mode, ties, coverage) for f in _safely(check, model)]
    findings += _safely(tokens, model, tokenizer, data)
    planned = data if data is not None else _stand_in(model)
    samples = data.samples if data is not None else 128
    fatal = any(f.severity == "problem" for f in findings)
    sample: Pass | None = None
    costs: tuple[Effort, ...] = ()
    if planned is not None and not fatal:
        planned = _learned_first(planned)
        findings += _safely(padding, model, planned)
        try:
            batch, blocks = first_batch(model, planned), partition(model)
            findings += _safely(determinism, model, batch, blocks[0])
            findings += visible(
                model, batch, blocks
            )  # what sees the matrices here is what scores them: a failure is one of all
            short = first_batch(model, _shorten(planned))
            findings += _safely(attention, model, short, blocks[0], double_backward_attention)
            sample = time_pass(model, batch, blocks)
            costs = tuple(efforts(sample, blocks, samples, batch_size))
        except _FAILURES as error:
            findings.append(_failed("run", error, "problem"))
    if estimator is not None:
        known = [e.estimator for e in costs]
        if costs and estimator not in known:
            raise InvalidInput(f"There is no cost model for {estimator!r}.", f"There are {', '.join(known)}.", "Choose one.")
        costs = tuple(e for e in costs if e.estimator == estimator)
    findings += _memory(model, costs)
    length = planned.length if planned is not None else 0
    return Diagnosis(findings=tuple(findings), sample=sample, efforts=costs, samples=samples, length=length)


def _safely(check: Any, *arguments: Any) -> list[Finding]:
    try:
        return list(check(*arguments))
    except _FAILURES as error:
        return [_failed(check.__name__, error)]


def _failed(check: str, error: Exception, severity: str = "warning") -> Finding:
    what = f"The check did not run: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return Finding(check=check, severity=severity, what=what, remedy=getattr(error, "remedy", ""))


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


def _shorten(data: CalibrationSet, length: int = 8) -> CalibrationSet:
    """A few tokens of the first sample; where only answers are learned, up to the first learned token."""
    end = length
    if data.labels is not None and data.labels.ndim == 2:
        end = max(length, 1 + int((data.labels[0] != IGNORE).int().argmax()))
    cut: dict[str, Any] = {"input_ids": data.input_ids[:1, end - length : end], "attention_mask": None}
    if data.labels is not None:
        cut["labels"] = data.labels[:1, end - length : end] if data.labels.ndim == 2 else data.labels[:1]
    return dataclasses.replace(data, **cut)


def _memory(model: nn.Module, costs: tuple[Effort, ...]) -> list[Finding]:
    free = free_bytes(next(model.parameters()).device)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    heavy = [e for e in costs if free is not None and e.memory - held > free]
    if not heavy:
        return []
    names = ", ".join(f"{e.estimator} ({e.memory / 2**30:.1f} GiB)" for e in heavy)
    return [
        Finding(
            check="memory", severity="problem" if len(heavy) == len(costs) else "warning",
            what=f"{(free or 0) / 2**30:.1f} GiB are free, too little for {names}.",
            remedy="Use batch_size=1, a sketch (fisher-gram, layerif), fewer samples, or spectral-tail, which needs no data.",
        )
    ]  # fmt: skip


def duration(seconds: float) -> str:
    """Say a time in the unit that fits it."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
