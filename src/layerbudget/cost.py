"""Expected cost of the long verbs: what they count, times seconds that are measured here (:mod:`layerbudget.timing`).

A verb counts what it does to a text in forward equivalents; a backward is two. Their seconds are those of one layer and of the
head, which are timed. Beside them a verb counts the matrices that it rounds, sorts or factors, which are timed on a few rows.
Memory is the weights, the activations of one batch, the graph that is kept, and what is held of one layer. Weights that stay
in their files count as far as there is room for them. Expect a factor of 1.5: benchmarks/results/size.md has both beside what
commands took.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from . import timing
from .compressors.base import QUANTISERS, find_quantiser, find_treatment
from .compressors.formats import BY_MOMENTS, GGUF, HEAD_ROWS, PLAIN, ROWS, RUNTIMES, TOKENS, find_format, find_runtime
from .data.calibration import check_reads_text
from .errors import UnknownStructure
from .execution.inputs import EXACT
from .execution.memory import GRAPHS, HEAD, TOGETHER
from .models.blocks import end_modules, layers, partition, text_config
from .models.experts import find_experts
from .models.machine import ROOM, SHARE, free_bytes
from .models.offload import mapped
from .records import Module
from .timing import Pace

_BASE = 0.6 * 2**30  # bytes of an interpreter with torch, transformers and a tokenizer
_SLACK = 1.2  # bytes that the allocator holds, over those in use
_LABELS = 30.0  # different ones, over the root of those that are drawn
_CLEAN = 256 << 20  # of the dense model's probabilities are kept at the most
HOWS = {"whole": "in memory", "layers": "layer by layer", "streamed": "streamed from its files"}


def _is_routed(matrix: Module) -> bool:
    """Whether a router decides which tokens a matrix, or each of its copies, sees."""
    return matrix.copies > 1 or ".experts." in matrix.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model by its sizes."""

    matrices: tuple[Module, ...]  # of one layer
    ends: tuple[Module, ...]  # embedding and head; one where they are tied
    layers: int
    weights: int  # bytes of all of them
    hidden: int  # width of the residual stream
    vocabulary: int
    width: int  # bytes of a number that layers compute with
    converts: bool = False  # whether a layer, or the head, is converted into these when it comes from its file
    routed: float = 1.0  # share of a layer's experts that its router gives to a token

    @property
    def numel(self) -> int:
        """Weights in the matrices of one layer."""
        return sum(m.numel for m in self.matrices)

    @property
    def inputs(self) -> list[int]:
        """Widths of the distinct inputs of a layer; q, k and v share theirs, gate and up too."""
        return [width for width, _ in self.sites]

    @property
    def sites(self) -> list[tuple[int, int]]:
        """Widths of the distinct inputs of a layer, and how many matrices of one stack have such an input of their own."""
        shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
        return list({shared.get(n := m.name.rsplit(".", 1)[-1], n): (m.d_in, m.copies) for m in self.matrices}.values())

    @property
    def experts(self) -> bool:
        """Whether a router chooses among matrices of one layer."""
        return any(_is_routed(m) for m in self.matrices)

    @property
    def met(self) -> float:
        """Weights of one layer that a token meets."""
        return sum(m.numel * (self.routed if _is_routed(m) else 1.0) for m in self.matrices)

    def over(self, each: Callable[[int, int], float], *, ends: bool = False) -> float:
        """Sum of what rows and columns of every matrix of every layer take, and of embedding and head where they count."""
        inside = self.layers * sum(m.copies * each(m.d_out, m.d_in) for m in self.matrices)
        return inside + sum(each(m.d_out, m.d_in) for m in self.ends if ends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """How much text: ``samples`` sequences of ``length`` tokens, ``batch`` of them at a time."""

    samples: int
    length: int = 256
    batch: int = 8

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.samples * self.length


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Expected cost of a verb, as users type it."""

    verb: str
    how: str  # a key of HOWS
    memory: int  # bytes at the peak; of mapped weights as many as there is room for
    seconds: float
    forwards: float  # forward equivalents of the first text
    fits: bool  # whether the machine has that much memory


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
    """Second moments of all inputs, of every pair of columns: in float64 up to a width."""
    return shape.layers * sum((8.0 if d <= EXACT else 4.0) * copies * d**2 for d, copies in shape.sites)


def norms_bytes(shape: Shape, text: Text) -> float:
    """Second moments of every input by itself, in float64."""
    return 8.0 * shape.layers * sum(copies * d for d, copies in shape.sites)


def _derivatives(levels: int, samples: int) -> Job:
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
    "refit": Work(0.0, "none", 0, _squares),
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
        seconds, weights = _collected(find_quantiser(method).statistic, shape, text), dict[str, float]()
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


def _collected(statistic: str, shape: Shape, text: Text) -> float:
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
    job = rounding(method, formats, ends=ends, more=more) if rounds else _pruning(method)
    sent: Job = _rounded(ends) if rounds else lambda shape, text: 0.0
    if statistic == "none":
        return [WorkItem("forward", Text(samples=1, length=text.length), forwards, job=job, held=held, sent=sent)]
    return [WorkItem("gram" if statistic == "gram" else "norms", text, 1.0 + again, job=job, held=held, sent=sent)]


def _rounded(ends: bool) -> Job:
    """Bytes of all weights that several processes round for each other, and of embedding and head where they are among them."""
    return lambda shape, text: shape.width * shape.over(lambda rows, columns: rows * columns, ends=ends)


def _pruning(method: str) -> Job:
    """Pruning half of every matrix."""

    def job(shape: Shape, text: Text) -> float:
        treated = shape.over(lambda rows, columns: timing.treating_seconds(find_treatment, method, None, rows, columns))
        return treated + _collected(find_treatment(method).statistic, shape, text)

    return job


def searching(text: Text, passes: float, levels: int = 17) -> list[WorkItem]:
    """Parts of ``plan sparsity``: looks of three passes, each of which masks every matrix and takes derivatives along masks."""

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model."""
        make, meet = timing.nested_seconds(levels)
        batches = -(-text.samples // text.batch)
        product = text.tokens / timing.rate(torch.float32, torch.device("cpu"))  # of the gradient of every matrix
        one = shape.over(lambda rows, columns: rows * columns * (make + meet * batches + product)) + _pruning("wanda")(
            shape, text
        )
        return passes / 3.0 * one

    def sent(shape: Shape, text: Text) -> float:
        """Derivatives and norms of every point, and norms of the dense model and of the plan that the pruner applies."""
        points, looks = max(1.0, passes / 3.0 - 1.0), passes / 3.0
        return (points * _derivatives(levels, 0)(shape, text) + (points + 2.0) * norms_bytes(shape, text)) / looks

    return [WorkItem("directional", text, passes, job=job, sent=sent)]


def choosing(
    text: Text,
    check: Text | None,
    *,
    draws: int = 4,
    runtime: str = "llama.cpp",
    method: str = "rtn",
    names: Sequence[str] | None = None,
    group: int | None = None,
    rows: int = 16,
    anchors: Sequence[str] = ("Q3_K", "Q4_K", "Q6_K", "Q5_0", "Q8_0"),
) -> list[WorkItem]:
    """Parts of ``plan bits``: ``1 + 2 draws`` passes along the rounding errors, and the check of whole plans.

    Some ``rows`` of every matrix are rounded to all formats of the menu, and :data:`~layerbudget.compressors.formats.ROWS` of
    them to the ``anchors``, along whose errors damages are measured. The check rounds the whole model by the ``method``.
    """
    target, statistic = find_runtime(runtime, RUNTIMES[runtime].family), find_quantiser(method).statistic
    gram = statistic == "gram"
    most, together = 6 if gram else 4, HEAD_ROWS if target.ends else 0

    def seconds(form: str, rows: int, columns: int) -> float:
        return timing.treating_seconds(find_quantiser, method, form, rows, columns)

    def sampled(menu: Sequence[str], rows: int, columns: int) -> float:
        return timing.sampling_seconds(find_quantiser, method, [*menu, *anchors], rows, columns)

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model."""
        menu = [f.name for f in target.formats(shape.inputs, names, group, inputs=statistic != "none")]

        def fit(columns: int) -> list[str]:
            return [f for f in anchors if not find_format(f).plain and find_format(f).fits(columns)][:most]

        def each(out: int, columns: int) -> float:
            kept = out if gram else min(out, ROWS)
            rounded = sum(seconds(f, kept, columns) for f in fit(columns)) + sampled(menu, rows, columns)
            return rounded + draws * text.samples * kept * columns * timing.written_seconds(len(fit(columns)), text.length)

        def end(out: int, columns: int) -> float:
            labels = out if out <= HEAD_ROWS else min(out, int(_LABELS * (draws * text.tokens) ** 0.5))  # that are drawn
            rounded = sum(seconds(f, labels, columns) for f in fit(columns)) + sampled(menu, 4 * rows, columns)
            met = text.samples * out * columns * timing.written_seconds(len(fit(columns)), text.length, head=True)
            return rounded + (met if labels == out else 0.0)

        ends = sum(end(m.d_out, m.d_in) for m in shape.ends if target.ends)
        return shape.over(each) + ends + _collected(statistic, shape, text)

    def codes(shape: Shape, text: Text) -> float:
        """The rows that are measured, rounded to every anchor, in a byte for each weight."""

        def each(out: int, columns: int) -> float:
            fit = sum(not find_format(f).plain and find_format(f).fits(columns) for f in anchors)
            return min(fit, most) * (columns + 4.0) * (out if gram else min(out, ROWS))

        return shape.over(each, ends=target.ends) + _derivatives(17, text.samples)(shape, text)

    way: dict[str, Any] = {"job": job, "sent": codes, "together": together}
    measured = [WorkItem("directional", text, 1.0 + 2.0 * draws, losses=draws, **way)]
    if gram:  # every second sequence shows the inputs, and the others have twice as many draws
        half = dataclasses.replace(text, samples=max(1, text.samples // 2))
        look = WorkItem("directional", half, 1.0 + 4.0 * draws, losses=2 * draws, **way)
        measured = [look, WorkItem("norms", half, 2.0, sent=moments_bytes)]
    elif statistic == "diagonal":
        measured.append(WorkItem("norms", text, 1.0))
    if check is None:
        return measured
    plans = 3.0 if runtime == "llama.cpp" else 2.0
    whole = treating(method, text, formats=anchors, ends=target.ends, forwards=0.0)
    whole = [dataclasses.replace(part, times=plans) for part in whole]
    if runtime == "llama.cpp" and method in BY_MOMENTS:
        whole += [dataclasses.replace(part, forwards=1.0) for part in treating("weighted", text, formats=anchors, ends=True)]
    return [*measured, *whole, WorkItem("forward", check, 1.0 + plans + (method in BY_MOMENTS))]


def caching(text: Text, *, draws: int = 4) -> list[WorkItem]:
    """Parts of the damage of a cache: ``1 + 2 draws`` passes, one sequence at a time; graphs of layers are kept."""

    def held(shape: Shape) -> float:
        """Of a streamed model; where the weights are in memory, so is the whole graph."""
        tokens = max(text.length, min(TOGETHER, text.tokens))
        graphs = 2.0 * tokens * shape.layers * sum(m.copies * m.d_out for m in shape.matrices) * shape.width
        return graphs if shape.converts and graphs < GRAPHS else 0.0

    return [WorkItem("directional", dataclasses.replace(text, batch=1), 1.0 + 2.0 * draws, losses=draws, held=held)]


def certifying(curvature: str, text: Text, blocks: int, dampings: int) -> list[WorkItem]:
    """Parts of ``explain certify``: loss and gradient of every block, then three Hessian products and a loss of every damping.

    A product counts seven forwards. Curvatures other than ``fisher`` solve for the steps, at the price of their scores.
    """
    solved = [] if curvature == "fisher" else [WorkItem(curvature, text, WORK[curvature].each * blocks * (1 + dampings))]
    return [WorkItem("direct check", text, blocks * (4.0 + 22.0 * dampings)), *solved]


def shaping(text: Text, passes: float) -> list[WorkItem]:
    """Parts of ``plan shapes``: its forwards and backwards, and at every point the refits of what stays."""

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model."""
        return passes / 7.0 * _collected("gram", shape, text)

    def sent(shape: Shape, text: Text) -> float:
        """Moments of each of four parts of the text, for others to refit by: at every point, and of the dense model twice.

        They are of what heads and MLPs give, in float32; two starts are looked at, heads one by one and in groups.
        """
        behind = [m for m in shape.matrices if m.d_out == shape.hidden and not m.name.rpartition(".")[2].startswith("q")]
        each = 4.0 * min(4, text.samples) * shape.layers * sum(m.copies * m.d_in**2 for m in behind)
        return each * (passes // 7.0 + 2.0) / (passes / 7.0)

    return [WorkItem("directional", text, passes, losses=2, job=job), WorkItem("refit", text, times=passes / 7.0, sent=sent)]


def removing(text: Text, *, draws: int = 4) -> list[WorkItem]:
    """Parts of ``plan expert-pruning``: a look, and forwards with experts masked: the plan, its rivals, halves of the text."""
    return [WorkItem("directional", text, 1.0 + 2.0 * draws + 36.0, sent=_derivatives(17, text.samples))]


def training(text: Text, epochs: float, seeds: int, held_out: int) -> list[WorkItem]:
    """Parts of ``finetune``: every row once per epoch, held-out rows after each seed."""
    judged = WorkItem("forward", dataclasses.replace(text, samples=held_out), times=seeds)
    return [WorkItem("train", text, times=epochs * seeds), *([judged] if held_out else [])]


def comparing(text: Text, held_out: Text, scores: Sequence[str], method: str, *, seeds: int, plans: int) -> list[WorkItem]:
    """Parts of ``compare`` on text: every score once per seed; every plan applied and measured.

    Args:
        text: The calibration text.
        held_out: The text that the plans are measured on.
        scores: Estimators.
        method: The pruner.
        seeds: How many seeds.
        plans: How many plans are applied and measured.
    """
    known = [(part, seeds) for name in scores for part in scoring(name, text)]
    applied = [(part, plans) for part in (*treating(method, text), WorkItem("forward", held_out))]
    return [dataclasses.replace(part, times=part.times * count, resident=True) for part, count in (*known, *applied)]


def demonstrating() -> list[WorkItem]:
    """Parts of ``demo``: it scores, searches twice, and prunes and measures four plans at two targets."""
    text = Text(samples=64)
    treated = [dataclasses.replace(part, times=8.0) for part in treating("wanda", text)]
    search = [dataclasses.replace(part, times=2.0) for part in searching(Text(samples=16), 24.0)]
    return [*scoring("fisher-gram", text), *search, *treated, WorkItem("forward", Text(samples=96), times=9.0)]


def long_verbs(
    *, samples: int | None = None, length: int = 256, batch: int = 8, demo: bool = False, experts: bool = False, widest: int = 0
) -> dict[str, list[WorkItem]]:
    """Parts of every long verb by what users type, each at its own default sizes or at those given.

    Args:
        samples: Samples of text; each verb's default where it is None.
        length: Tokens of a sample.
        batch: Sequences per pass.
        demo: Whether the model is the demo's.
        experts: Whether the model has routed experts: ``plan expert-pruning`` is then among the verbs.
        widest: Columns of the widest matrix, which say how much text error feedback wants.
    """

    def text(default: int) -> Text:
        return Text(samples=samples or default, length=length, batch=batch)

    verbs = {f"score {name}": scoring(name, text(128)) for name in SCORES}
    verbs |= {"plan sparsity": searching(text(16), 24.0), "plan shapes": shaping(text(16), 46.0)}
    verbs |= {"plan bits": choosing(text(32), text(16))}
    verbs |= {"plan bits --method gptq": choosing(text(max(32, -(-TOKENS * widest // length))), text(16), method="gptq")}
    verbs |= {"plan expert-pruning": removing(text(16))} if experts else {}
    verbs |= {f"apply, {method}": treating(method, text(128)) for method in ("wanda", "sparsegpt", "rtn", "gptq")}
    verbs |= {"finetune": training(text(128), 1.0, 1, 0), "evaluate": [WorkItem("forward", text(96))]}
    verbs["compare"] = comparing(text(64), text(96), ["fisher-gram"], "wanda", seeds=1, plans=3)
    return {**verbs, "demo": demonstrating()} if demo else verbs


# --- sizes and speed --------------------------------------------------------------------------------------------------------


def shape_of(model: nn.Module) -> Shape:
    """The sizes of a loaded model.

    Raises:
        UnknownStructure: It takes no tokens, has no single list of layers, or layers without matrices.
    """
    config: Any = model.config
    stack = layers(model)
    middle = stack[len(stack) // 2][0]
    matrices = tuple(m for b in partition(model, "layer") if b.name == middle for m in b.modules)
    if not matrices:
        raise UnknownStructure(f"{type(model).__name__} has layers without matrices.", "", "Report the model.")
    text = text_config(config)
    return Shape(
        matrices=matrices,
        ends=tuple(end_modules(model)),
        layers=len(stack),
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        hidden=int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 0),
        vocabulary=int(getattr(text, "vocab_size", 0)),
        width=next(model.parameters()).element_size(),
        routed=_routed(model, middle),
    )


def _routed(model: nn.Module, layer: str) -> float:
    """Share of a layer's experts that its router gives to a token; all of them where they are not known."""
    try:
        return next((e.top_k / e.count for e in find_experts(model) if e.layer == layer), 1.0)
    except UnknownStructure:
        return 1.0


def shape_of_config(config: Any, dtype: torch.dtype) -> Shape:
    """The sizes of a configuration's model in a precision; nothing is allocated."""
    from .models.loading import from_config

    with torch.device("meta"):
        return shape_of(from_config(config, dtype=dtype))


def shape_in_memory(model: nn.Module) -> Shape:
    """The sizes of a loaded model that reads text, in the bytes that it holds: its weights may be packed, or stay in files."""
    check_reads_text(model)
    config, files = cast(Any, model.config), mapped(model)
    if not hasattr(config, "quantization_config"):
        shape = shape_of(model)
        return shape if files is None else dataclasses.replace(shape, width=files.dtype.itemsize, converts=files.converts)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    stored = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return dataclasses.replace(shape_of_config(plain, torch.float32), weights=stored)


def pace_of_shape(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Pace:
    """The pace of a model that is not loaded, as fast as a wide matrix is multiplied here."""
    return timing.pace_of_rate(shape.layers * shape.met, shape.hidden * shape.vocabulary, dtype, device)


# --- prices -----------------------------------------------------------------------------------------------------------------


def place_of(model: nn.Module, text: Text) -> tuple[Shape, Pace, int, bool]:
    """Facts of a loaded model that :func:`price` needs: sizes, its pace, bytes here, whether it is streamed."""
    shape, lies = shape_in_memory(model), mapped(model)
    home = next(model.parameters()) if lies is None else lies
    products = shape.numel, shape.hidden * shape.vocabulary
    pace = timing.pace_of(model, text.length, text.batch, products, shape.vocabulary)
    return shape, pace, free_bytes(home.device) + (shape.weights if lies is None else 0), lies is not None


def price(verb: str, parts: Sequence[WorkItem], shape: Shape, pace: Pace, machine: int, streamed: bool | None = None) -> Cost:
    """Return what a verb takes: seconds and forwards add up over its parts, memory is that of the largest.

    Args:
        verb: The verb as users type it.
        parts: Its parts.
        shape: Of the model.
        pace: Of the model here.
        machine: Bytes of memory.
        streamed: Whether weights stay in their files; where it is None they do so if half of the memory does not hold them.
    """
    seconds, forwards, memory, how = 0.0, 0.0, 0.0, "whole"
    for part in parts:
        work = WORK[part.kind]
        passes = work.forwards + work.each * shape.layers if part.forwards is None else part.forwards
        jobs = work.job(shape, part.text) + part.job(shape, part.text)
        seconds += part.times * (passes * part.text.tokens * _token(part, shape, pace) + jobs)
        forwards += part.times * passes * part.text.tokens / parts[0].text.tokens
        needs, walks = _memory(part, shape, pace.device, machine, False if part.resident else streamed)
        memory, how = max(memory, needs), max(how, walks, key=list(HOWS).index)
    return Cost(verb=verb, how=how, memory=int(memory), seconds=seconds, forwards=forwards, fits=memory <= machine)


def _token(part: WorkItem, shape: Shape, pace: Pace) -> float:
    """Seconds of a token's forward equivalent: backwards, a layer runs forwards twice, and once back for every loss."""
    work = WORK[part.kind]
    if work.graph == "none":
        return pace.forward + pace.head * work.head
    losses = max(1, work.losses if part.losses is None else part.losses)
    heads = losses if part.together is None or shape.vocabulary <= part.together else 1
    walk = 2.0 * pace.forward + losses * pace.backward + pace.head + heads * pace.head_backward
    return walk / (1.0 + 2.0 * losses)


def _memory(part: WorkItem, shape: Shape, device: str, machine: int, streamed: bool | None) -> tuple[float, str]:
    """Bytes at the peak and how the weights are held."""
    work, text, half = WORK[part.kind], part.text, SHARE * machine
    backwards = work.graph != "none"
    batch = min(text.batch, text.samples) * text.length
    graph = 2.0 * batch * sum(m.d_in + m.d_out for m in shape.matrices) * shape.width
    widest = max(max(m.d_in, m.d_out) for m in shape.matrices)
    acting = graph if backwards else batch * (12.0 * shape.hidden + 4.0 * widest * shape.width)
    state = work.state(shape, text) + part.held(shape)
    logits = 12.0 * batch * shape.vocabulary * work.head
    pieces = min(logits, 3.0 * HEAD)  # where a head is asked for some positions at a time
    logits = pieces if part.kind == "forward" else logits
    ends = 2.0 * batch * shape.width * sum(m.d_in + m.d_out for m in shape.ends)
    needed = ((acting + state) * shape.layers + ends if backwards else acting + state) + logits
    weights = shape.weights * (1 + work.copied)
    whole, room = _BASE + weights + _SLACK * needed, min(half, ROOM) if device == "cpu" and backwards else half
    if work.graph == "model" or (whole <= half and needed < room and not streamed):
        return whole, "whole"
    losses = work.losses if part.losses is None else part.losses
    stored = text.tokens * shape.hidden * shape.width * (shape.layers + 1 + 2 * losses if backwards else 1)
    most = SHARE * ROOM if device == "cpu" and backwards else half  # see execution.memory.room_for
    kept = 0.0 if part.kind == "forward" or (backwards and stored >= most) else stored  # else it is kept on disk
    walked = _BASE + _SLACK * (acting + pieces + kept + state)
    if streamed or (streamed is None and walked + shape.weights > half):
        head = max((m.numel for m in shape.ends), default=0) if shape.converts else 0
        streams = walked + _SLACK * (shape.numel + head) * shape.width
        if shape.converts and device == "cpu":  # what was converted leaves the process; all is read once when it is loaded
            return max(streams + _stored(shape), _BASE + shape.weights), "streamed"
        return streams + (min(shape.weights, max(machine - streams, 0.0)) if device == "cpu" else 0.0), "streamed"
    return walked + weights, "layers"


def _stored(shape: Shape) -> float:
    """Bytes of embedding and head as the checkpoint holds them."""
    ends = sum(m.numel for m in shape.ends)
    return shape.weights * ends / max(ends + shape.layers * shape.numel, 1)


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it.

    >>> duration(75.0), duration(600.0), duration(7200.0)
    ('75.0 s', '10.0 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
