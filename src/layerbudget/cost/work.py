"""Kinds of work that verbs do to every layer, and what scores, pruners and quantisers count of them.

A new estimator has a row in ``SCORES``; a decision counts its own work in its folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ..compressors.base import QUANTISERS, find_quantiser, find_treatment
from ..compressors.formats import GGUF, PLAIN, find_format
from ..execution.inputs import EXACT
from ..execution.panels import count_numbers
from ..records import Module
from . import timing
from .sizes import Shape, Text

_CLEAN = 256 << 20  # of the dense model's probabilities are kept at the most

Job = Callable[[Shape, Text], float]  # seconds of the whole model beside forwards and backwards
Written = Callable[[Shape, Text, dict[str, float]], float]  # the same, of so many weights in every format
Formats = Sequence[str] | Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work, done to every layer."""

    forwards: float = 1.0  # forward equivalents
    graph: str = "none"  # or "layer" (walks backwards one layer at a time), or "model" (the whole graph is kept)
    losses: int = 0  # upstream gradients that a walk backwards keeps
    state: Callable[[Shape, Text], float] = lambda shape, text: 0.0  # bytes that are held of one layer beside the graph
    job: Job = lambda shape, text: 0.0
    each: float = 0.0  # further forward equivalents for every block; a layer is one where nothing else is said
    head: bool = True  # whether its forwards go through the head
    copied: bool = False  # whether dense weights are kept while others take their place, where they are not streamed


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One kind of ``WORK`` on some text, as a part of a verb.

    It is done ``times`` times, with so many ``forwards`` and ``losses`` (its kind's by default) and a ``job`` beside them;
    ``resident`` weights are never streamed. Through a head of more rows than ``together`` all losses run backwards at once.
    ``held`` are bytes beside those of its kind, and ``sent`` those that several processes exchange beside the sums of its kind.
    """

    kind: str
    text: Text
    forwards: float | None = None
    times: float = 1.0
    resident: bool = False
    losses: int | None = None
    together: int | None = None
    job: Job = lambda shape, text: 0.0
    held: Callable[[Shape], float] = lambda shape: 0.0
    sent: Job = lambda shape, text: 0.0


# --- kinds of work ----------------------------------------------------------------------------------------------------------


def _rows(shape: Shape, text: Text) -> float:
    """Gradients of every sequence in a layer; where these take too much a part of them, and the factors of one matrix."""
    whole, most = 4.0 * text.samples * shape.numel, 2.0 * 2**30
    if whole <= most or any(m.copies > 1 for m in shape.matrices):
        return min(whole, most)
    return most / 4.0 + max(shape.width * text.tokens * (m.d_in + m.d_out) for m in shape.matrices)


def _squares(shape: Shape, text: Text) -> float:
    largest = max(m.numel for m in shape.matrices)
    return 4.0 * (sum(copies * d**2 for d, copies in shape.sites) + 3 * max(shape.inputs) ** 2 + 3 * largest)


def moments_bytes(shape: Shape, text: Text) -> float:
    """Second moments of all inputs, by panels: in float64 up to a width."""
    return shape.layers * sum((8.0 if d <= EXACT else 4.0) * copies * count_numbers(d) for d, copies in shape.sites)


def norms_bytes(shape: Shape, text: Text) -> float:
    """Second moments of every input by itself, in float64."""
    return 8.0 * shape.layers * sum(copies * d for d, copies in shape.sites)


def derivatives_bytes(levels: int, samples: int) -> Job:
    """Bytes of derivatives along so many changes of every matrix: their sums, and those of sequences whose labels are drawn."""
    return lambda shape, text: 8.0 * levels * (2 + samples) * shape.layers * len(shape.matrices)


def _factors(sums: int, copies: int, halves: int, *, rows: bool) -> Callable[[Shape, Text], float]:
    """Both factors of every matrix, ``sums`` of its gradients, and the largest decomposed; of few tokens, their ``rows``."""

    def state(shape: Shape, text: Text) -> float:
        inputs, outputs = shape.inputs, [m.d_out for m in shape.matrices]
        if rows and text.tokens <= max(inputs):
            return 4.0 * text.tokens * (sum(inputs) + 2 * sum(outputs)) + 224.0 * text.tokens**2
        factors = 4.0 * (sum(d**2 for d in (*inputs, *outputs)) + sums * shape.numel)
        return factors + max(8.0 * (copies * (m.d_in**2 + m.d_out**2) + halves * m.numel) for m in shape.matrices)

    return state


def _bytes(each: float) -> Callable[[Shape, Text], float]:
    return lambda shape, text: each * shape.numel


def _decomposed(times: float, *, by_tokens: bool = False) -> Job:
    """Eigenvectors of both factors of every matrix, so many times; ``by_tokens`` those of few tokens are as wide as these."""

    def job(shape: Shape, text: Text) -> float:
        most = text.tokens if by_tokens else max(shape.inputs) + max(m.d_out for m in shape.matrices)
        return times * shape.over(lambda rows, columns: sum(timing.decomposing_seconds(min(d, most)) for d in (rows, columns)))

    return job


def _between(shape: Shape, text: Text) -> float:
    """Products of the tokens of a sequence with each other, in every input and output gradient."""
    each = timing.meeting_seconds(text.length)
    return text.tokens * shape.over(lambda rows, columns: each * (rows + columns))


SCORES: dict[str, Work] = {
    "gradient-norm": Work(3.0, "layer", 1),
    "fisher-diagonal": Work(4.2, "layer", 1, _bytes(32.0)),
    "fisher-gram": Work(3.0, "layer", 1, _rows, _between),
    "fisher-mc": Work(5.0, "layer", 2, _rows, _between),
    "layerif": Work(5.0, "layer", 2, _rows),
    "adapter": Work(3.3, "layer", 1, lambda shape, text: 32.0 * text.samples * sum(m.copies * m.d_out for m in shape.matrices)),
    "rank-gain": Work(5.4, "layer", 2, _factors(2, 2, 5, rows=True), _decomposed(1.5, by_tokens=True)),
    "kfac": Work(5.4, "layer", 2, _factors(4, 3, 6, rows=False), _decomposed(1.0)),
    "ekfac": Work(10.0, "layer", 2, _factors(4, 3, 6, rows=False), _decomposed(1.0)),
    "fisher-trace": Work(3.9, "layer", 1),
    **dict.fromkeys(("ggn", "hessian"), Work(1.0, "model", 0, _bytes(12.0), each=45.0)),
    **dict.fromkeys(("outlier-ratio", "block-influence"), Work()),
    "ablation": Work(each=0.5),
    "spectral-tail": Work(
        0.01, job=lambda shape, text: shape.over(lambda rows, columns: timing.decomposing_seconds(min(rows, columns)))
    ),
}
WORK: dict[str, Work] = SCORES | {
    "forward": Work(),
    "refit": Work(0.0, "none", 0, _squares, head=False),
    "train": Work(3.0, "model"),
    "direct check": Work(1.0, "model", 0, _rows),
    "directional": Work(
        20.0, "layer", 1, lambda shape, text: 6.0 * shape.numel + min(4.0 * text.tokens * shape.vocabulary, _CLEAN), copied=True
    ),
    "norms": Work(2.0, "none", 0, lambda shape, text: 8.0 * max(m.numel for m in shape.matrices), head=False),
    "gram": Work(2.0, "none", 0, _squares, head=False),
}


# --- verbs ------------------------------------------------------------------------------------------------------------------


def scoring(name: str, text: Text, blocks: int | None = None) -> list[WorkItem]:
    """Parts of ``score`` for so many blocks, one per layer by default; empty for an estimator whose cost is not known."""
    if name not in SCORES:
        return []
    work = SCORES[name]
    return [WorkItem(name, text, None if blocks is None else work.forwards + work.each * blocks, job=_looked_at)]


def _looked_at(shape: Shape, text: Text) -> float:
    """Looking for weights that are not finite, before they are scored."""
    return shape.weights * timing.finite_seconds(shape.width)


def rounding(method: str, formats: Formats, *, ends: bool, more: Written | None = None) -> Job:
    """Rounding every matrix once: to the formats that matrices of its name have, or to the mean of some; and ``more``."""

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model."""
        seconds, weights = collecting_seconds(find_quantiser(method).statistic, shape, text), dict[str, float]()
        for matrix, count in [*((m, shape.layers * m.copies) for m in shape.matrices), *((m, 1) for m in shape.ends if ends)]:
            fit = _formats_of(matrix, formats)
            for form in fit:
                one = timing.treating_seconds(find_quantiser, method, form, matrix.d_out, matrix.d_in)
                seconds += count * one / len(fit)
                weights[form] = weights.get(form, 0.0) + count * matrix.d_out * matrix.d_in / len(fit)
        return seconds + (more(shape, text, weights) if more is not None else 0.0)

    return job


def _formats_of(matrix: Module, formats: Formats) -> list[str]:
    """Formats of a matrix: where they are given by name, those of the matrices of that name in all layers."""
    if isinstance(formats, Mapping):
        last = matrix.name.rpartition(".")[2]
        formats = [f for name, f in formats.items() if name.rpartition(".")[2] == last] or list(formats.values())
    return [f for f in formats if find_format(f).plain or find_format(f).fits(matrix.d_in)] or [PLAIN[GGUF].name]


def collecting_seconds(statistic: str, shape: Shape, text: Text) -> float:
    """Second moments of all inputs of every layer, and their factors."""
    found = sum(
        (copies * shape.routed if copies > 1 else 1.0) * timing.moments_seconds(statistic, text.tokens, columns)
        for columns, copies in shape.sites
    )
    factors = sum(copies * timing.factor_seconds(columns) for columns, copies in shape.sites) if statistic == "gram" else 0.0
    return shape.layers * (found + factors)


def treating(
    method: str,
    text: Text,
    *,
    again: float = 1.0,
    formats: Formats = (),
    ends: bool = False,
    forwards: float = 1.0,
    more: Written | None = None,
    held: Callable[[Shape], float] = lambda shape: 0.0,
) -> list[WorkItem]:
    """Parts of applying a plan of sparsity or bits: inputs are collected ``again`` times, then the method works on them.

    Args:
        method: A pruner or quantiser.
        text: What is read.
        again: Forwards behind the first one.
        formats: Of the plan's matrices, for a quantiser; by name, or some whose mean is taken.
        ends: Whether embedding and head are rounded too.
        forwards: Of a method that reads nothing: zero where no layer runs.
        more: Seconds of writing so many weights in every format.
        held: Bytes beside those of the work.
    """
    rounds = method in QUANTISERS.names()
    statistic = (find_quantiser if rounds else find_treatment)(method).statistic
    job = rounding(method, formats, ends=ends, more=more) if rounds else pruning_job(method)
    sent: Job = _rounded(ends) if rounds else lambda shape, text: 0.0
    if statistic == "none":
        return [WorkItem("forward", Text(samples=1, length=text.length), forwards, job=job, held=held, sent=sent)]
    return [WorkItem("gram" if statistic == "gram" else "norms", text, 1.0 + again, job=job, held=held, sent=sent)]


def _rounded(ends: bool) -> Job:
    """Bytes of all weights that several processes round for each other, and of embedding and head where they are among them."""
    return lambda shape, text: shape.width * shape.over(lambda rows, columns: rows * columns, ends=ends)


def pruning_job(method: str) -> Job:
    """Pruning half of every matrix."""

    def job(shape: Shape, text: Text) -> float:
        treated = shape.over(lambda rows, columns: timing.treating_seconds(find_treatment, method, None, rows, columns))
        return treated + collecting_seconds(find_treatment(method).statistic, shape, text)

    return job
