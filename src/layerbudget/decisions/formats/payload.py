"""Payload of plans of formats, beside the blocks: of weights, of a cache, or of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...storage import reading

Number = int | float  #: what is whole in a file stays whole
Step = tuple[str, int, float]  #: the name, the bytes and the damage of another format


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One choice of formats on held-out text.

    Attributes:
        kl: Damage, nats per token.
        kl_error: Its standard error.
        perplexity: On the same text.
        perplexity_error: Its standard error.
        bytes: Of the planned matrices.
        same: Whether it has the formats of the plan that was asked for.
        difference: Its damage less that of the plan that was taken; None of that plan itself.
        difference_error: The standard error of the difference.
    """

    kl: float
    kl_error: float
    perplexity: float
    perplexity_error: float
    bytes: int
    same: bool
    difference: float | None = None
    difference_error: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A plan as a whole beside other choices, on held-out text.

    Attributes:
        rows: By rule.
        taken: The rule whose plan was taken.
        verdict: A sentence on all of them.
        data: ``{source, samples, length, ...}`` of the text.
        dense_perplexity: Of the dense model on it.
    """

    data: Mapping[str, Any]
    dense_perplexity: float
    rows: Mapping[str, CheckRow]
    taken: str
    verdict: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """The damage of the plan of memory that a plan is a part of, nats per token."""

    predicted: float | None
    measured: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reasons:
    """Why every block has its format, in the order of the blocks.

    Attributes:
        damage: Damage in the format, nats per token.
        smaller: The next format with fewer bytes; None where there is none.
        larger: The next format with less damage; None where there is none.
    """

    damage: Sequence[float]
    smaller: Sequence[Step | None]
    larger: Sequence[Step | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatsPayload:
    """Fields of ``extra`` in the file of every plan of formats.

    Attributes:
        formats: Format by the full name of a module.
        runtime: What reads the formats.
        bits: Mean bits per number.
        predicted: Sum of the damages of all blocks, nats per token.
        predicted_error: Its standard error.
        baselines: Other choices within the same limit: ``predicted``, ``spent``, and ``difference_error`` to the plan.
        near_ties: Single changes that noise cannot tell from the plan.
        check: Damages on held-out text, where they were measured.
        asked: The rule that was asked for, where a check could take another.
        passes: Forward equivalents that planning took.
        whole: The damage of the plan of memory that this is a part of.
        reasons: Why every block has its format, in plans of bits.
    """

    formats: Mapping[str, str]
    runtime: str
    bits: float
    predicted: float
    predicted_error: float
    baselines: Mapping[str, Mapping[str, Number]]
    near_ties: Sequence[Mapping[str, Any]]
    check: Check | None = None
    asked: str | None = None
    passes: float | None = None
    whole: Whole | None = None
    reasons: Reasons | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsPayload(FormatsPayload):
    """Fields of ``extra`` of plans that give formats to weights.

    Attributes:
        family: Where the formats come from: ``gguf`` or ``compressed-tensors``.
        method: How weights are rounded.
        fixed_bytes: Bytes of the tensors that no plan changes, padding included.
        head_bytes: Bytes of the file that are no tensors: exactly those of a GGUF file, at most those of a folder's headers;
            0 where they are not counted.
        fixed_terms: The bytes of ``fixed_bytes`` by what they are.
        few_tokens: ``tokens`` of the text, ``columns`` of the widest matrix, and the ``wanted`` tokens, where they are too few.
        unwritten: Why a matrix stays in 16 bits, by its name.
        signature: Of the dense model.
    """

    family: str
    method: str
    fixed_bytes: reading.Count
    head_bytes: reading.Count = 0
    fixed_terms: Mapping[str, reading.Count] | None = None
    few_tokens: Mapping[str, reading.Count] | None = None
    unwritten: Mapping[str, str] | None = None
    signature: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedPayload(FormatsPayload):
    """Fields of ``extra`` of plans that give formats to a cache.

    Attributes:
        context: Tokens of a sequence.
        batch: Sequences at a time.
        group: Channels that share a scale, where the formats do not say it.
        rotated: Whether llama.cpp rotates keys and values before it rounds them; None of other runtimes.
        interleaved: Whether neighbouring channels are rotated by position together; None of other runtimes.
        utilization: Share of the memory that the runtime takes, where it is not all.
    """

    context: reading.Size
    batch: reading.Size
    group: reading.Size | None
    rotated: bool | None = None
    interleaved: bool | None = None
    utilization: float | None = None
