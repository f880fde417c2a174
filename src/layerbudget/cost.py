"""Expected cost of the long verbs: forwards times the time of one, memory from shapes.

A verb counts what it does to a text in forward equivalents; a backward is two. Seconds are those forwards times the time of
one token's forward here, and what is factored or rounded beside. Memory is the weights, the activations of one batch, the graph
that is kept, and what an estimator holds of one layer. Both are rough: expect a factor of two. No weights are read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .compressors.base import QUANTISERS, find_quantiser, find_treatment
from .compressors.formats import ROWS, TOKENS
from .data.calibration import check_reads_text
from .errors import UnknownStructure
from .execution.modes import inference
from .models.blocks import layers, partition, text_config
from .models.machine import SHARE, free_bytes
from .models.offload import mapped
from .records import Module

_BASE = 0.45 * 2**30  # bytes of an interpreter with torch and transformers
_SLACK = 1.2  # bytes that the allocator holds, over those in use
_REAL = 1e10  # products that a timed forward of the model itself may cost; larger models are timed by one matrix
_TIMED = 2048  # tokens of a timed forward at least: fewer spend their time on starting operations
_EDGE = 2048  # a matrix of this width multiplies as fast, per entry, as any larger one
# Products that rounding one weight, ggml's search of its types, and sorting it into a mask take as long as.
_ROUND, _GGML, _MASK = 400, 8000, 300
HOWS = {"whole": "in memory", "layers": "layer by layer", "streamed": "streamed from its files"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model by its sizes."""

    matrices: tuple[Module, ...]  # of one layer
    layers: int
    weights: int  # bytes of all of them
    hidden: int  # width of the residual stream
    vocabulary: int
    width: int  # bytes of a number

    @property
    def numel(self) -> int:
        """Weights in the matrices of one layer."""
        return sum(m.numel for m in self.matrices)

    @property
    def inputs(self) -> list[int]:
        """Widths of the distinct inputs of a layer; q, k and v share theirs, gate and up too."""
        shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
        return list({shared.get(n := m.name.rsplit(".", 1)[-1], n): m.d_in for m in self.matrices}.values())

    @property
    def experts(self) -> bool:
        """Whether a router chooses among matrices of one layer."""
        return any(m.copies > 1 or ".experts." in m.name for m in self.matrices)

    @property
    def products(self) -> int:
        """Multiplications of one token's forward."""
        return self.layers * self.numel + self.hidden * self.vocabulary


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


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work, done to every layer."""

    forwards: float = 1.0  # forward equivalents
    graph: str = "none"  # or "layer" (walks backwards one layer at a time), or "model" (the whole graph is kept)
    losses: int = 0  # upstream gradients that a walk backwards keeps
    state: Callable[[Shape, Text], float] = lambda shape, text: 0.0  # bytes that are held of one layer beside the graph
    solve: Callable[[Shape], float] = lambda shape: 0.0  # products per layer beside the forwards
    each: float = 0.0  # further forward equivalents for every block; a layer is one where nothing else is said


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One kind of ``WORK`` on some text, as a part of a verb.

    It is done ``times`` times, with so many ``forwards`` (its kind's by default); ``resident`` weights are never streamed.
    """

    kind: str
    text: Text
    forwards: float | None = None
    times: float = 1.0
    resident: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Expected cost of a verb, as users type it."""

    verb: str
    how: str  # a key of HOWS
    memory: int  # bytes at the peak, mapped weights not counted
    seconds: float
    forwards: float  # forward equivalents of the first text
    fits: bool  # whether the machine has that much memory


# --- kinds of work ----------------------------------------------------------------------------------------------------------


def _rows(shape: Shape, text: Text) -> float:
    each = (min(text.tokens * (m.d_in + m.d_out), text.samples * m.numel) for m in shape.matrices)
    return min(4.0 * sum(each), 2.0 * 2**30)


def _squares(shape: Shape, text: Text) -> float:
    largest = max(m.numel for m in shape.matrices)
    return 4.0 * (sum(d**2 for d in shape.inputs) + 3 * max(shape.inputs) ** 2 + 3 * largest)


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


def _cubes(share: float) -> Callable[[Shape], float]:
    return lambda shape: share * sum(float(m.d_in**3 + m.d_out**3) for m in shape.matrices)


def _searched(shape: Shape) -> float:
    """Products that ggml's search takes as long as, of the rows of one layer that are measured."""
    rows = ((m, m.copies * m.d_out) for m in shape.matrices)
    return float(_GGML * sum(m.numel * min(1.0, ROWS / all_rows) for m, all_rows in rows))


def _numel(products: float, per_column: float = 0.0) -> Callable[[Shape], float]:
    return lambda shape: products * shape.numel + per_column * sum(m.numel * m.d_in for m in shape.matrices)


SCORES: dict[str, Work] = {
    "gradient-norm": Work(3.0, "layer", 1),
    "fisher-diagonal": Work(4.2, "layer", 1, _bytes(32.0)),
    "fisher-gram": Work(3.0, "layer", 1, _rows),
    "fisher-mc": Work(5.0, "layer", 2, _rows),
    "layerif": Work(5.0, "layer", 2, _rows),
    "adapter": Work(3.3, "layer", 1, lambda shape, text: 32.0 * text.samples * sum(m.copies * m.d_out for m in shape.matrices)),
    "rank-gain": Work(5.4, "layer", 2, _factors(2, 2, 5, rows=True), _cubes(1.0)),
    "kfac": Work(5.4, "layer", 2, _factors(4, 3, 6, rows=False), _cubes(24.0)),
    "ekfac": Work(10.0, "layer", 2, _factors(4, 3, 6, rows=False), _cubes(24.0)),
    "fisher-trace": Work(3.9, "layer", 1),
    **dict.fromkeys(("ggn", "hessian"), Work(1.0, "model", 0, _bytes(12.0), each=45.0)),
    **dict.fromkeys(("outlier-ratio", "block-influence"), Work()),
    "ablation": Work(each=0.5),
    "spectral-tail": Work(0.01, solve=lambda shape: 10.0 * sum(m.numel * min(m.d_in, m.d_out) for m in shape.matrices)),
}
WORK: dict[str, Work] = SCORES | {
    "forward": Work(),
    "round": Work(solve=_numel(_ROUND)),
    "ggml": Work(0.0, solve=_searched),
    "refit": Work(0.0, solve=_numel(0.0, 80.0)),  # four folds of the text, seven numbers of units
    "train": Work(3.0, "model"),
    "direct check": Work(1.0, "model", 0, _rows),
    "directional": Work(
        20.0, "layer", 1, lambda shape, text: 6.0 * shape.numel + 4.0 * text.tokens * shape.vocabulary, _numel(20 * _MASK)
    ),
    "norms": Work(2.0, "none", 0, lambda shape, text: 8.0 * max(m.numel for m in shape.matrices), _numel(_MASK)),
    "gram": Work(2.0, "none", 0, _squares, _numel(1500, 1.0)),
    "descent": Work(2.0, "none", 0, _squares, _numel(3500, 2.0)),
}


# --- verbs ------------------------------------------------------------------------------------------------------------------


def scoring(name: str, text: Text, blocks: int | None = None) -> list[WorkItem]:
    """Parts of ``score`` for so many blocks, one per layer by default; empty for an estimator whose cost is not known."""
    if name not in SCORES:
        return []
    work = SCORES[name]
    return [WorkItem(name, text, None if blocks is None else work.forwards + work.each * blocks)]


def treating(method: str, text: Text, *, again: float = 1.0) -> list[WorkItem]:
    """Parts of applying a plan of sparsity or bits: inputs are collected ``again`` times, then the method works on them."""
    rounds = method in QUANTISERS.names()
    statistic = (find_quantiser if rounds else find_treatment)(method).statistic
    if statistic == "none":
        return [WorkItem("round" if rounds else "forward", Text(samples=1, length=text.length))]
    name = method if method in WORK else "gram" if statistic == "gram" else "norms"
    return [WorkItem(name, text, 1.0 + again)]


def choosing(text: Text, check: Text | None, *, draws: int = 4, ggml: bool = False, method: str = "rtn") -> list[WorkItem]:
    """Parts of ``plan bits``: ``1 + 2 draws`` passes along the rounding errors, and the check of five plans.

    ``ggml`` says that the formats are its types, which take their time to be searched. The check rounds the whole model by the
    ``method``, and one that reads inputs collects them for every plan.
    """
    rounded = [dataclasses.replace(part, times=5.0) for part in treating(method, text)]
    whole = [] if check is None else [*rounded, WorkItem("forward", check, times=6.0)]
    searched = [WorkItem("ggml", text, times=4.0)] if ggml else []
    return [WorkItem("directional", text, 1.0 + 2.0 * draws), *whole, *searched]


def certifying(curvature: str, text: Text, blocks: int, dampings: int) -> list[WorkItem]:
    """Parts of ``explain certify``: loss and gradient of every block, then three Hessian products and a loss of every damping.

    A product counts seven forwards. Curvatures other than ``fisher`` solve for the steps, at the price of their scores.
    """
    solved = [] if curvature == "fisher" else [WorkItem(curvature, text, WORK[curvature].each * blocks * (1 + dampings))]
    return [WorkItem("direct check", text, blocks * (4.0 + 22.0 * dampings)), *solved]


def shaping(text: Text, passes: float) -> list[WorkItem]:
    """Parts of ``plan shapes``: its forwards and backwards, and at every point the refits of what stays."""
    return [WorkItem("directional", text, passes), WorkItem("refit", text, times=max(1.0, passes / 7.0))]


def removing(text: Text, *, draws: int = 4) -> list[WorkItem]:
    """Parts of ``plan expert-pruning``: a look, and forwards with experts masked: the plan, its rivals, halves of the text."""
    return [WorkItem("directional", text, 1.0 + 2.0 * draws + 36.0)]


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
    search, measured = WorkItem("directional", Text(samples=16), times=2.0), WorkItem("forward", Text(samples=96), times=9.0)
    return [*scoring("fisher-gram", text), search, *treated, measured]


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
    verbs |= {"plan sparsity": [WorkItem("directional", text(16))], "plan shapes": shaping(text(16), 46.0)}
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
        layers=len(stack),
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        hidden=int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 0),
        vocabulary=int(getattr(text, "vocab_size", 0)),
        width=next(model.parameters()).element_size(),
    )


def shape_of_config(config: Any, dtype: torch.dtype) -> Shape:
    """The sizes of a configuration's model in a precision; nothing is allocated."""
    from .models.loading import from_config

    with torch.device("meta"):
        return shape_of(from_config(config, dtype=dtype))


def shape_in_memory(model: nn.Module) -> Shape:
    """The sizes of a loaded model that reads text, in the bytes that it holds: its weights may be packed."""
    check_reads_text(model)
    config: Any = model.config
    if not hasattr(config, "quantization_config"):
        return shape_of(model)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    stored = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return dataclasses.replace(shape_of_config(plain, torch.float32), weights=stored)


def time_token(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    model: nn.Module | None = None,
    text: Text | None = None,
) -> float:
    """Seconds of one token's forward through all layers.

    A small model in memory is timed itself, on a batch of that text: it spends more on starting operations than on products.
    """
    text = text or Text(samples=8)
    rows = min(text.batch, int(_REAL / max(text.length * shape.products, 1.0)))
    if model is None or not rows:
        return shape.products / _rate(dtype, torch.device(device))
    ids = (torch.arange(rows * text.length, device=device) % max(1, min(shape.vocabulary, 100))).reshape(rows, -1)
    with inference(model):
        return min(_seconds(lambda some=some: model(input_ids=some)[0]) / some.numel() for some in (ids[:1], ids))  # type: ignore[misc]


@functools.lru_cache(maxsize=8)
def _rate(dtype: torch.dtype, device: torch.device) -> float:
    """Multiplications per second of a wide matrix with 256 tokens."""
    x, w = (torch.ones(rows, _EDGE, device=device, dtype=dtype) for rows in (256, _EDGE))
    return x.numel() * _EDGE / min(_seconds(lambda: x @ w.T) for _ in range(4))


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    run().reshape(-1)[0].item()  # waits for an accelerator
    return time.perf_counter() - start


# --- prices -----------------------------------------------------------------------------------------------------------------


def place_of(model: nn.Module, text: Text) -> tuple[Shape, float, int, bool]:
    """Facts of a loaded model that :func:`price` needs: sizes, seconds of a token, bytes here, whether it is streamed."""
    shape, lies = shape_in_memory(model), mapped(model)
    rows = max(text.batch, -(-_TIMED // text.length))  # a short text is no measure of what rounding and searching take
    text = dataclasses.replace(text, samples=rows, batch=rows)
    home = next(model.parameters()) if lies is None else lies
    token = time_token(shape, home.dtype, home.device, model if lies is None else None, text)
    return shape, token, free_bytes(home.device) + (shape.weights if lies is None else 0), lies is not None


def price(verb: str, parts: Sequence[WorkItem], shape: Shape, token: float, machine: int, streamed: bool | None = None) -> Cost:
    """Return what a verb takes: seconds and forwards add up over its parts, memory is that of the largest.

    Args:
        verb: The verb as users type it.
        parts: Its parts.
        shape: Of the model.
        token: Seconds, see :func:`time_token`.
        machine: Bytes of memory.
        streamed: Whether weights stay in their files; where it is None they do so if half of the memory does not hold them.
    """
    seconds, forwards, memory, how = 0.0, 0.0, 0.0, "whole"
    for part in parts:
        work = WORK[part.kind]
        passes = work.forwards + work.each * shape.layers if part.forwards is None else part.forwards
        solved = shape.layers * work.solve(shape) / shape.products
        seconds += token * part.times * (passes * part.text.tokens + solved)
        forwards += part.times * passes * part.text.tokens / parts[0].text.tokens
        needs, walks = _memory(part, shape, machine, False if part.resident else streamed)
        memory, how = max(memory, needs), max(how, walks, key=list(HOWS).index)
    return Cost(verb=verb, how=how, memory=int(memory), seconds=seconds, forwards=forwards, fits=memory <= machine)


def _memory(part: WorkItem, shape: Shape, machine: int, streamed: bool | None) -> tuple[float, str]:
    """Bytes at the peak and how the weights are held."""
    work, text, half = WORK[part.kind], part.text, SHARE * machine
    backwards = work.graph != "none"
    batch = min(text.batch, text.samples) * text.length
    graph = 2.0 * batch * sum(m.d_in + m.d_out for m in shape.matrices) * shape.width
    widest = max(max(m.d_in, m.d_out) for m in shape.matrices)
    acting = graph if backwards else batch * (12.0 * shape.hidden + 4.0 * widest * shape.width)
    logits, state = 12.0 * batch * shape.vocabulary, work.state(shape, text)
    whole = _BASE + shape.weights + _SLACK * (acting * (shape.layers if backwards else 1) + logits + state)
    if work.graph == "model" or (whole <= half and not streamed):
        return whole, "whole"
    stored = text.tokens * shape.hidden * shape.width * (shape.layers + 1 + 2 * work.losses if backwards else 1)
    kept = 0.0 if backwards and stored >= half else stored  # what has no room in memory is kept on disk
    walked = _BASE + _SLACK * (acting + logits + kept + state)
    if streamed or (streamed is None and walked + shape.weights > half):
        return walked + _SLACK * shape.numel * shape.width, "streamed"
    return walked + shape.weights, "layers"


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it.

    >>> duration(75.0), duration(600.0), duration(7200.0)
    ('75.0 s', '10.0 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
