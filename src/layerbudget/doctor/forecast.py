r"""What the long verbs will take on some machine, from a configuration and one timed layer: no model is loaded.

Shapes come from a skeleton without memory. One token's forward through a layer is timed as its matrix products, in the
precision of the checkpoint; a forward and backward is three of them, and what an estimator multiplies beside that is counted
in products of float32 and float64, which are timed as well. Memory is what is anonymous: weights that are streamed from their
files in the checkpoint's precision are mapped and cost nothing. ``whole`` is chosen where it fits into half of the machine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..blocks import layers, partition
from ..errors import InvalidInput, UnknownStructure
from ..machine import SHARE, free_bytes
from ..records import Module

_BASE = 0.35 * 2**30  # an interpreter with torch and transformers
_TOKENS = 256  # of the timed products
VERBS = (
    "score fisher-gram",
    "score rank-gain",
    "score kfac",
    "measure",
    "prune wanda",
    "prune sparsegpt",
    "evaluate",
    "finetune",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """One verb.

    Attributes:
        verb: What users type.
        how: ``whole`` (in memory), ``layers`` (in memory, walked) or ``streamed`` (weights stay in their files).
        memory: Anonymous bytes at the peak.
        seconds: Wall clock.
        forwards: Forward equivalents (a backward is two).
        fits: Whether the machine has that much.
    """

    verb: str
    how: str
    memory: int
    seconds: float
    forwards: float
    fits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model by its sizes; bytes in the checkpoint's precision.

    Attributes:
        matrices: Of one layer.
        layers: How many.
        weights, outside: Bytes of all weights, and of those outside the layers.
        hidden: Width of the residual stream.
        vocabulary: Rows of the head.
        width: Bytes of a number.
    """

    matrices: tuple[Module, ...]
    layers: int
    weights: int
    outside: int
    hidden: int
    vocabulary: int
    width: int

    @property
    def layer(self) -> int:
        """Bytes of one layer."""
        return sum(m.d_in * m.d_out * m.copies for m in self.matrices) * self.width

    @property
    def inputs(self) -> int:
        """Widths of the distinct inputs of a layer, added up (q, k, v share theirs, gate and up too)."""
        return sum({self.group(m): m.d_in for m in self.matrices}.values())

    @staticmethod
    def group(m: Module) -> str:
        """What names the input of a matrix."""
        own = m.name.rsplit(".", 1)[-1]
        return {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(own, own)


def shape_of(config: Any, dtype: torch.dtype) -> Shape:
    """Sizes of a configuration's model.

    Raises:
        UnknownStructure: It has no single list of layers.
    """
    from ..loading import auto_class

    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    stack = layers(model)
    inside = [m for b in partition(model, "layer") if b.name == stack[len(stack) // 2][0] for m in b.modules]
    if not inside:
        raise UnknownStructure(f"{type(model).__name__} has layers without matrices.", "", "Report the model.")
    total = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    in_layers = sum(p.numel() for _, layer in stack for p in layer.parameters()) * dtype.itemsize
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0)
    return Shape(
        matrices=tuple(inside), layers=len(stack), weights=total, outside=total - in_layers,
        hidden=int(hidden), vocabulary=int(getattr(text, "vocab_size", 0)),
        width=dtype.itemsize,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of one token's forward through one layer, and products per second in float32 and float64."""

    token: float
    single: float
    double: float


def time_layer(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Speed:
    """Time the products of one layer on some tokens, the best of three."""
    sizes = [(m.d_out, m.d_in) for m in shape.matrices]
    pairs = [(torch.randn(_TOKENS, i, device=device).to(dtype), torch.randn(o, i, device=device).to(dtype)) for o, i in sizes]
    token = _best(lambda: [x @ w.T for x, w in pairs], device) / _TOKENS
    wide = torch.randn(1024, 2048, device=device)
    single = 2.0 * 1024 * 1024 * 2048 / _best(lambda: wide @ wide.T, device)
    square = torch.randn(768, 768, device=device, dtype=torch.float64)
    double = 2.0 * 768**3 / _best(lambda: square @ square, device)
    return Speed(token=token, single=single, double=double)


def _best(run: Any, device: torch.device | str) -> float:
    best = float("inf")
    for _ in range(4):
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def forecast(
    shape: Shape, speed: Speed, *, samples: int, length: int, batch_size: int = 8, machine: int | None = None,
    verbs: Sequence[str] = VERBS,
) -> list[Forecast]:  # fmt: skip
    """Memory and time of the verbs.

    Args:
        shape: The model.
        speed: Of the machine.
        samples: Sequences.
        length: Tokens of each.
        batch_size: Sequences per forward.
        machine: Bytes of memory; what is free here by default.
        verbs: Which.

    Raises:
        InvalidInput: An unknown verb.
    """
    unknown = [v for v in verbs if v not in VERBS]
    if unknown:
        raise InvalidInput(f"There is no forecast for {unknown[0]!r}.", f"There is one for {', '.join(VERBS)}.", "")
    machine = free_bytes() if machine is None else machine
    return [_one(verb, shape, speed, samples, length, min(batch_size, samples), machine) for verb in verbs]


def _one(verb: str, shape: Shape, speed: Speed, samples: int, length: int, batch: int, machine: int) -> Forecast:
    tokens, name = samples * length, verb.split()[-1]
    forwards, losses, state, extra = _WORK[name](shape, tokens, samples)
    graph = batch * length * 2 * sum(m.d_in + m.d_out for m in shape.matrices) * shape.width
    logits = batch * length * shape.vocabulary * 12
    stored = tokens * shape.hidden * shape.width * ((shape.layers + 1 + 2 * losses) if losses else 1)
    whole = _BASE + shape.weights + graph * (shape.layers if losses else 1) + logits + state * (shape.layers if losses else 1)
    if name == "finetune":
        whole += graph * shape.layers
    walked = _BASE + graph + logits + stored + state
    if whole <= SHARE * machine or name == "finetune":
        how, memory = "whole", whole
    elif walked + shape.weights <= machine * SHARE:
        how, memory = "layers", walked + shape.weights
    else:
        how, memory = "streamed", walked + (shape.layer if "prune" in verb else 0)
    layer = sum(m.d_in * m.d_out for m in shape.matrices)
    seconds = forwards * tokens * speed.token * (shape.layers + shape.hidden * shape.vocabulary / layer)
    seconds += shape.layers * (extra[0] / speed.single + extra[1] / speed.double)
    return Forecast(verb=verb, how=how, memory=int(memory), seconds=seconds, forwards=forwards, fits=memory <= machine)


def _gram(shape: Shape, tokens: int, samples: int) -> tuple[float, int, float, tuple[float, float]]:
    """fisher-gram: rows, or tokens, of the matrices of one layer."""
    work = state = 0.0
    for m in shape.matrices:
        by_tokens, by_rows = 2.0 * tokens**2 * (m.d_in + m.d_out), 2.0 * tokens * m.numel + 2.0 * samples**2 * m.numel
        work += min(by_tokens, by_rows)
        state += 4 * (tokens * (m.d_in + m.d_out) if by_tokens < by_rows else samples * m.numel)
    return 3.0, 1, min(state, 2.0 * 2**30), (work, 0.0)


def _factors(groups: int, whitened: bool) -> Any:
    """Work of kfac and rank-gain."""

    def work(shape: Shape, tokens: int, samples: int) -> tuple[float, int, float, tuple[float, float]]:
        """Passes, retained sites, bytes beside the model, and products in single and double precision."""
        single = double = state = largest = 0.0
        for m in shape.matrices:
            kept = tokens * (m.d_in + 2 * m.d_out)
            if kept < m.d_in**2 + m.d_out**2 and tokens <= max(m.d_in, m.d_out):
                single += 2.0 * tokens**2 * (m.d_in + 3 * m.d_out)
                double += (20.0 if whitened else 40.0) * tokens**3
                state += 4.0 * kept
                largest = max(largest, 8.0 * 10 * tokens**2)
            else:
                single += tokens * (m.d_in**2 + m.d_out**2) + 2.0 * tokens * m.numel
                cube = (m.d_in**3 + m.d_out**3) / 3 if whitened else 12.0 * (m.d_in**3 + m.d_out**3)
                double += cube + 2.0 * groups * m.numel * (m.d_in + m.d_out)
                state += 4.0 * (m.d_in**2 + m.d_out**2 + groups * m.numel)
                largest = max(largest, 8.0 * (3 * (m.d_in**2 + m.d_out**2) + (groups + 2) * m.numel))
        few = max(1, min(8, samples // 4)) / samples if whitened else 0.0
        return 5.0 + 3.0 * few, 2, state + largest, (single, double)

    return work


def _pruner(solves: bool) -> Any:
    """Work of Wanda and SparseGPT: two forwards, statistics of inputs, and the solve."""

    def work(shape: Shape, tokens: int, samples: int) -> tuple[float, int, float, tuple[float, float]]:
        """As for the factors."""
        widest = max(m.d_in for m in shape.matrices)
        if not solves:
            return 2.0, 0, 8.0 * max(m.numel for m in shape.matrices), (0.0, 0.0)
        single = tokens * float(shape.inputs) * widest + sum(2.0 * m.numel * m.d_in for m in shape.matrices)
        single += sum(4.0 * d**3 for d in {m.d_in for m in shape.matrices})
        return 2.0, 0, 4.0 * (4 * widest**2 + 3 * max(m.numel for m in shape.matrices)), (single, 0.0)

    return work


_WORK: dict[str, Any] = {
    "fisher-gram": _gram, "rank-gain": _factors(2, True), "kfac": _factors(4, False), "wanda": _pruner(False),
    "sparsegpt": _pruner(True), "evaluate": lambda shape, tokens, samples: (1.0, 0, 0.0, (0.0, 0.0)),
    "measure": lambda shape, tokens, samples: (20.0, 3, 12.0 * shape.layer / shape.width, (0.0, 0.0)),
    "finetune": lambda shape, tokens, samples: (3.0, 0, 0.0, (0.0, 0.0)),
}  # fmt: skip
