"""The doctor: every check that applies to a model, and the verbs that would refuse it.

Nothing is changed: the model's mode, gradients and attention come back as they were.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..decisions.shapes.units import find_parts
from ..errors import LayerbudgetError, UnknownStructure
from ..execution.loss import IGNORE, head_of
from ..execution.sites import owners_of, tracked
from ..models.blocks import partition
from ..sensitivity.estimators import estimators
from .checks import (
    SEVERITIES,
    Finding,
    attention,
    coverage,
    determinism,
    first_batch,
    mode,
    padding,
    ties,
    tokens,
    visible,
    weights,
)

_FAILURES = (LayerbudgetError, ArithmeticError, LookupError, RuntimeError, ValueError, TypeError, AttributeError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings of the doctor.

    Attributes:
        findings: One or more per check, in order.
        samples, length: Size of the text that was looked at.
    """

    findings: tuple[Finding, ...]
    samples: int
    length: int

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


def diagnose(model: nn.Module, tokenizer: Any = None, data: CalibrationSet | None = None) -> Diagnosis:
    """Return what every check that applies has found; a check that itself fails becomes a finding.

    Args:
        model: A transformers model with a head, loaded.
        tokenizer: Its tokenizer, for the checks of special tokens.
        data: The calibration set that is planned; a random sample of 64 tokens stands in.
    """
    looking = (weights, mode, ties, coverage)
    findings = [f for check in looking for f in _safely(check, model)]
    findings += _safely(tokens, model, tokenizer, data)
    sample = data if data is not None else _stand_in(model)
    if sample is not None and not any(f.severity == "problem" for f in findings):
        sample = _learned_first(sample)
        findings += _safely(padding, model, sample)
        try:
            batch, blocks = first_batch(model, sample), partition(model)
            findings += _safely(determinism, model, batch, blocks[0])
            findings += visible(model, batch, blocks)  # a failure here is one of everything that scores the matrices
            findings += _safely(attention, model, first_batch(model, _shorten(sample)), blocks[0])
        except _FAILURES as error:
            findings.append(_failed("run", error, "problem"))
    samples, length = (data.samples, data.length) if data is not None else (1, 64)
    return Diagnosis(findings=tuple(findings), samples=samples, length=length)


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


def refusals(model: nn.Module) -> dict[str, str]:
    """One sentence for every long verb that would refuse the model for what it is made of; the model is not run."""
    found: dict[str, str] = {}
    fused = list(tracked(model, partition(model))[1])
    if fused:
        why = f"It knows no fused experts. Leave them out: --exclude '{owners_of(fused)}'."
        found |= {f"score {e.name}": why for e in estimators().values() if e.linear}
    try:
        find_parts(model)
    except UnknownStructure as error:
        found["plan shapes"] = str(error)
    try:
        if head_of(model) != "causal":
            found["evaluate"] = "Perplexity needs a causal language model."
    except LayerbudgetError as error:
        found["evaluate"] = str(error)
    return found
