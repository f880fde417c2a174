"""Expected cost of the long verbs: forwards times the time of one, and memory from shapes. No weights are read for it.

A verb counts what it does to a text in forward equivalents; a backward is two. Seconds are those forwards times the time of
one token's forward here, and what is factored or rounded beside. Memory is the weights, the activations of one batch, the graph
that is kept, and what an estimator holds of one layer. Both are rough: expect a factor of two. A verb that runs one layer at a
time is ``streamed`` where the weights do not fit into half of the memory: they stay in their files.
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

from ..compressors.base import QUANTISERS, find_quantiser, find_treatment
from ..data.calibration import check_reads_text
from ..errors import UnknownStructure
from ..execution.modes import inference
from ..models.blocks import layers, partition
from ..models.machine import SHARE, free_bytes
from ..records import Module

_BASE = 0.35 * 2**30  # bytes of an interpreter with torch and transformers
_SLACK = 1.2  # bytes that the allocator holds, over those in use
_REAL = 1e10  # products that a timed forward of the model itself may cost; larger models are timed by one matrix
_EDGE = 2048  # a matrix of this width multiplies as fast, per entry, as any larger one
_ROUND, _MASK = 400, 300  # products that rounding one weight, and sorting it into a mask, take as long as
HOWS = {"whole": "in memory", "layers": "layer by layer", "streamed": "streamed from its files"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model by its sizes.

    Attributes:
        matrices: The weight matrices of one layer.
        layers: How many layers.
        weights: Bytes of all weights.
        hidden: Width of the residual stream.
        vocabulary: Rows of the head.
        width: Bytes of a number.
    """

    matrices: tuple[Module, ...]
    layers: int
    weights: int
    hidden: int
    vocabulary: int
    width: int

    @property
    def numel(self) -> int:
        """Weights in the matrices of one layer."""
        return sum(m.numel for m in self.matrices)

    @property
    def inputs(self) -> list[int]:
        """Widths of the distinct inputs of a layer; q, k and v share theirs, gate and up too."""
        shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
        return list({shared.get(n := m.name.rsplit(".", 1)[-1], n): m.d_in for m in self.matrices}.values())


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of work, done to every layer.

    Attributes:
        forwards: Forward equivalents.
        graph: ``none``, ``layer`` (walks backwards one layer at a time) or ``model`` (the whole graph is kept).
        losses: Upstream gradients that a walk backwards keeps.
        state: ``(shape, text) -> bytes`` that are held of one layer beside the graph.
        solve: ``shape -> products`` per layer beside the forwards.
    """

    forwards: float = 1.0
    graph: str = "none"
    losses: int = 0
    state: Callable[[Shape, Text], float] = lambda shape, text: 0.0
    solve: Callable[[Shape], float] = lambda shape: 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of work on some text, as a part of a verb.

    Attributes:
        kind: A key of ``WORK``.
        text: What it reads.
        forwards: Forward equivalents; those of the kind by default.
        times: How often.
        products: Products per weight beside.
        held: The weights are in memory whatever their size.
    """

    kind: str
    text: Text
    forwards: float | None = None
    times: float = 1.0
    products: float = 0.0
    held: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Expected cost of a verb.

    Attributes:
        verb: What users type.
        how: ``whole`` (in memory), ``layers`` (in memory, one layer at a time) or ``streamed`` (weights stay in their files).
        memory: Bytes at the peak, mapped weights not counted.
        seconds: Wall clock.
        forwards: Forward equivalents of the first text.
        fits: Whether the machine has that much memory.
    """

    verb: str
    how: str
    memory: int
    seconds: float
    forwards: float
    fits: bool


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
        held = 4.0 * (sum(d**2 for d in (*inputs, *outputs)) + sums * shape.numel)
        return held + max(8.0 * (copies * (m.d_in**2 + m.d_out**2) + halves * m.numel) for m in shape.matrices)

    return state


def _cubes(share: float) -> Callable[[Shape], float]:
    return lambda shape: share * sum(float(m.d_in**3 + m.d_out**3) for m in shape.matrices)


def _numel(products: float, beside: float = 0.0) -> Callable[[Shape], float]:
    return lambda shape: products * shape.numel + beside * sum(m.numel * m.d_in for m in shape.matrices)


WORK: dict[str, Work] = {
    "forward": Work(),
    "train": Work(forwards=3.0, graph="model"),
    "directional": Work(
        forwards=20.0,
        graph="layer",
        losses=1,
        solve=_numel(20 * _MASK),
        state=lambda shape, text: 6.0 * shape.numel + 4.0 * text.tokens * shape.vocabulary,
    ),
    "norms": Work(forwards=2.0, solve=_numel(_MASK), state=lambda shape, text: 8.0 * max(m.numel for m in shape.matrices)),
    "gram": Work(forwards=2.0, solve=_numel(1500, 1.0), state=_squares),
    "gradient-norm": Work(forwards=3.0, graph="layer", losses=1),
    "fisher-diagonal": Work(forwards=4.2, graph="layer", losses=1, state=lambda shape, text: 32.0 * shape.numel),
    "fisher-gram": Work(forwards=3.0, graph="layer", losses=1, state=_rows),
    "fisher-mc": Work(forwards=5.0, graph="layer", losses=2, state=_rows),
    "layerif": Work(forwards=5.0, graph="layer", losses=2, state=_rows),
    "adapter": Work(
        forwards=3.3,
        graph="layer",
        losses=1,
        state=lambda shape, text: 32.0 * text.samples * sum(m.copies * m.d_out for m in shape.matrices),
    ),
    "rank-gain": Work(forwards=5.4, graph="layer", losses=2, state=_factors(2, 2, 5, rows=True), solve=_cubes(1.0)),
    "kfac": Work(forwards=5.4, graph="layer", losses=2, state=_factors(4, 3, 6, rows=False), solve=_cubes(24.0)),
    "ekfac": Work(forwards=10.0, graph="layer", losses=2, state=_factors(4, 3, 6, rows=False), solve=_cubes(24.0)),
    "fisher-trace": Work(forwards=3.9, graph="layer", losses=1),
    "ggn": Work(graph="model", state=lambda shape, text: 12.0 * shape.numel),
    "hessian": Work(graph="model", state=lambda shape, text: 12.0 * shape.numel),
    "outlier-ratio": Work(),
    "mean-metric": Work(),
    "reconstruction": Work(forwards=2.0, state=_squares, solve=_numel(1500, 1.0)),
    "ablation": Work(),
    "block-influence": Work(),
    "spectral-tail": Work(
        forwards=0.01, solve=lambda shape: 10.0 * sum(m.numel * min(m.d_in, m.d_out) for m in shape.matrices)
    ),
}


def shape_of(model: nn.Module, config: Any = None) -> Shape:
    """The sizes of a loaded model.

    Raises:
        UnknownStructure: It takes no tokens, has no single list of layers, or layers without matrices.
    """
    config = model.config if config is None else config
    stack = layers(model)
    middle = stack[len(stack) // 2][0]
    matrices = tuple(m for b in partition(model, "layer") if b.name == middle for m in b.modules)
    if not matrices:
        raise UnknownStructure(f"{type(model).__name__} has layers without matrices.", "", "Report the model.")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 0
    first = next(model.parameters())
    return Shape(
        matrices=matrices,
        layers=len(stack),
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        hidden=int(hidden),
        vocabulary=int(getattr(text, "vocab_size", 0)),
        width=max(1, first.element_size()),
    )


def shape_of_config(config: Any, dtype: torch.dtype) -> Shape:
    """The sizes of a configuration's model in a precision; nothing is allocated.

    Raises:
        UnknownStructure: It has no single list of layers.
    """
    from ..models.loading import auto_class

    with torch.device("meta"):
        return shape_of(auto_class(config).from_config(config, dtype=dtype))


def shape_in_memory(model: nn.Module) -> Shape:
    """The sizes of a loaded model that reads text, in the bytes that it holds: its weights may be packed.

    Raises:
        UnknownStructure: As :func:`shape_of`.
    """
    check_reads_text(model)
    config: Any = model.config
    if not hasattr(config, "quantization_config"):
        return shape_of(model)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return dataclasses.replace(shape_of_config(plain, torch.float32), weights=held)


def time_token(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    model: nn.Module | None = None,
    text: Text | None = None,
) -> float:
    """Seconds of one token's forward through all layers; the generators of random numbers stay as they were.

    Args:
        shape: The model's sizes.
        dtype: Precision of its weights.
        device: Where they are.
        model: The model itself where it is in memory: a small one spends more on starting operations than on products.
        text: Size of the timed batch, at most.
    """
    text, device = text or Text(samples=8), torch.device(device)
    each = float(shape.layers * shape.numel + shape.hidden * shape.vocabulary)
    rows = min(text.batch, int(_REAL / max(text.length * each, 1.0)))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if model is None or not rows:
            return each / _rate(dtype, device)
        ids = torch.randint(0, max(1, min(shape.vocabulary, 100)), (rows, text.length), device=next(model.parameters()).device)
        with inference(model):
            return min(_seconds(functools.partial(_forward, model, some)) / some.numel() for some in (ids[:1], ids))


def _forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids)[0]


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    run().reshape(-1)[0].item()  # waits for an accelerator
    return time.perf_counter() - start


@functools.lru_cache(maxsize=8)
def _rate(dtype: torch.dtype, device: torch.device) -> float:
    """Multiplications per second of a wide matrix with 256 tokens."""
    x, w = (torch.rand(rows, _EDGE, device=device).to(dtype) for rows in (256, _EDGE))
    return x.numel() * _EDGE / min(_seconds(lambda: x @ w.T) for _ in range(4))


def price(verb: str, parts: Sequence[Part], shape: Shape, token: float, machine: int | None = None) -> Cost:
    """Return what a verb takes: seconds and forwards add up over its parts, memory is that of the largest.

    Args:
        verb: What users type.
        parts: What it does.
        shape: The model.
        token: Seconds of one token's forward, of :func:`time_token`.
        machine: Bytes of memory; what is free here by default.
    """
    machine = free_bytes() if machine is None else machine
    product = token / (shape.layers * shape.numel + shape.hidden * shape.vocabulary)
    seconds, forwards, memory, how = 0.0, 0.0, 0.0, "whole"
    for part in parts:
        work = WORK[part.kind]
        spent = part.times * (work.forwards if part.forwards is None else part.forwards)
        beside = part.times * shape.layers * (work.solve(shape) + part.products * shape.numel)
        seconds += spent * part.text.tokens * token + beside * product
        forwards += spent * part.text.tokens / parts[0].text.tokens
        needs, walks = _memory(work, part, shape, machine)
        memory, how = max(memory, needs), max(how, walks, key=list(HOWS).index)
    return Cost(verb=verb, how=how, memory=int(memory), seconds=seconds, forwards=forwards, fits=memory <= machine)


def _memory(work: Work, part: Part, shape: Shape, machine: int) -> tuple[float, str]:
    """Bytes at the peak and how the weights are held."""
    text, backwards = part.text, work.graph != "none"
    batch = min(text.batch, text.samples) * text.length
    graph = 2.0 * batch * sum(m.d_in + m.d_out for m in shape.matrices) * shape.width
    widest = max(max(m.d_in, m.d_out) for m in shape.matrices)
    acting = graph if backwards else batch * (12.0 * shape.hidden + 4.0 * widest * shape.width)
    logits = 12.0 * batch * shape.vocabulary
    stored = text.tokens * shape.hidden * shape.width * (shape.layers + 1 + 2 * work.losses if backwards else 1)
    layer, state = shape.numel * shape.width, work.state(shape, text)
    every = shape.layers if backwards else 1
    whole = _BASE + shape.weights + _SLACK * (acting * every + logits + state)
    if work.graph == "model" or whole <= SHARE * machine:
        return whole, "whole"
    kept = 0.0 if backwards and stored >= SHARE * machine else stored  # what has no room in memory is kept on disk
    walked = _BASE + _SLACK * (acting + logits + kept + state)
    if part.held or walked + shape.weights <= SHARE * machine:
        return walked + shape.weights, "layers"
    return walked + _SLACK * layer, "streamed"


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it.

    >>> duration(75.0), duration(600.0), duration(7200.0)
    ('75.0 s', '10.0 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def scoring(name: str, text: Text, shape: Shape) -> list[Part]:
    """Parts of ``score``; empty for an estimator whose cost is not known."""
    if name not in WORK or name in ("forward", "train", "directional", "norms", "gram"):
        return []
    products = {"ggn": 45.0, "hessian": 45.0, "ablation": 0.5}.get(name)
    forwards = None if products is None else 1.0 + products * shape.layers
    return [Part(kind=name, text=text, forwards=forwards)]


def treating(method: str, text: Text, *, again: float = 1.0) -> list[Part]:
    """Parts of applying a plan of sparsity or bits: inputs are collected ``again`` times, then the method works on them."""
    rounds = _ROUND if method in QUANTISERS.names() else 0.0
    statistic = (find_quantiser if rounds else find_treatment)(method).statistic
    if statistic == "none":
        return [Part(kind="forward", text=Text(samples=1, length=text.length), products=max(rounds, 20.0))]
    kind = "gram" if statistic == "gram" else "norms"
    return [Part(kind=kind, text=text, forwards=1.0 + again, products=rounds)]


def searching(text: Text, passes: float | None = None, *, products: float = 0.0) -> list[Part]:
    """Parts of a plan by directional damage, which says itself how many forward equivalents it may spend."""
    return [Part(kind="directional", text=text, forwards=passes, products=products)]


def choosing(text: Text, check: Text | None, *, formats: int = 4, draws: int = 4) -> list[Part]:
    """Parts of ``plan bits``: rounding errors, ``1 + 2 draws`` passes along them, and the check."""
    whole = [] if check is None else [Part(kind="forward", text=check, times=5.0, products=_ROUND)]
    return [*searching(text, 1.0 + 2.0 * draws, products=formats * _ROUND), *whole]


def evaluating(texts: Sequence[Text], tasks: Sequence[str] = (), limit: int | None = None, batch: int = 16) -> list[Part]:
    """Parts of ``evaluate``: a forward over every window, and one over every option of every question (1,000 where unknown)."""
    asked = Text(samples=4 * (limit or 1000), length=80, batch=batch)
    return [Part(kind="forward", text=text) for text in (*texts, *(asked for _ in tasks))]


def training(text: Text, epochs: float, seeds: int, held_out: int) -> list[Part]:
    """Parts of ``finetune``: every row once per epoch, held-out rows after each seed."""
    judged = Part(kind="forward", text=dataclasses.replace(text, samples=held_out), times=seeds)
    return [Part(kind="train", text=text, times=epochs * seeds), *([judged] if held_out else [])]


def comparing(
    text: Text,
    held_out: Text,
    shape: Shape,
    scores: Sequence[str],
    *,
    rules: int = 1,
    budgets: int = 1,
    seeds: int = 1,
    method: str = "wanda",
    controls: bool = True,
) -> list[Part]:
    """Parts of ``compare`` on text: every score once per seed; every plan, uniform and controls too, applied and measured."""
    plans = budgets * seeds * (1 + len(scores) * rules * (2 if controls else 1))
    known = [(part, seeds) for name in scores for part in scoring(name, text, shape)]
    applied = [(part, plans) for part in (*treating(method, text), Part(kind="forward", text=held_out))]
    return [dataclasses.replace(part, times=part.times * count, held=True) for part, count in (*known, *applied)]


def demonstrating(shape: Shape) -> list[Part]:
    """Parts of ``demo``: it scores, searches twice, and prunes and measures four plans at two targets."""
    text = Text(samples=64)
    search = dataclasses.replace(searching(Text(samples=16))[0], times=2.0)
    treated = [dataclasses.replace(part, times=8.0) for part in treating("wanda", text)]
    return [*scoring("fisher-gram", text, shape), search, *treated, Part(kind="forward", text=Text(samples=96), times=9.0)]


def long_verbs(
    shape: Shape, *, samples: int | None = None, length: int = 256, batch: int = 8, demo: bool = False
) -> dict[str, list[Part]]:
    """Parts of every long verb by what users type, each at its own default sizes or at those given."""

    def text(own: int) -> Text:
        return Text(samples=samples or own, length=length, batch=batch)

    verbs = {f"score {name}": parts for name in WORK if (parts := scoring(name, text(128), shape))}
    verbs |= {
        "plan sparsity": searching(text(16)),
        "plan shapes": searching(text(16), 46.0),
        "plan bits": choosing(text(32), text(16)),
        "apply, wanda": treating("wanda", text(128)),
        "apply, sparsegpt": treating("sparsegpt", text(128)),
        "apply, rtn": treating("rtn", text(128)),
        "apply, gptq": treating("gptq", text(128)),
        "finetune": training(text(128), 1.0, 1, 0),
        "evaluate": evaluating([text(96)]),
        "compare --scores fisher-gram": comparing(text(64), text(96), shape, ["fisher-gram"]),
    }
    return {**verbs, "demo": demonstrating(shape)} if demo else verbs
