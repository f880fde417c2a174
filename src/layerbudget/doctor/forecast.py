r"""What the long verbs will take on some machine, from a configuration and one timed layer: no model is loaded.

Shapes come from a skeleton without memory. A layer made of them (its matrices, norms, an activation, attention) is timed in the
precision of the checkpoint, forwards and backwards to its input. A walk backwards is two forwards of every layer, the second
with a graph, and one backward per loss; a point of ``measure`` multiplies out the gradient of every weight beside that. What a
verb multiplies beside is counted in products of float32 and float64, which are timed as well; what it compares, sorts, moves
or writes of every weight is counted in float32 products that take as long. Memory is what is anonymous: weights that are
streamed from their files in the checkpoint's precision are mapped and cost nothing. ``whole`` is chosen where it fits into half
of the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..errors import InvalidInput
from ..models.machine import SHARE, free_bytes
from .layer import Shape, Speed, shape_of, time_layer
from .work import WORK, Work

__all__ = ["VERBS", "Forecast", "Shape", "Speed", "forecast", "shape_of", "time_layer"]

_BASE = 0.35 * 2**30  # an interpreter with torch and transformers
_KEPT = 1.2  # what the allocator holds, over what is in use: freed tensors are kept for the next ones
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
    work: Work = WORK[name](shape, tokens, samples)
    memory, how = _memory(verb, shape, work, tokens, batch * length, machine)
    layer = sum(m.d_in * m.d_out for m in shape.matrices)
    seconds = work.runs * speed.token + work.backs * speed.backward + work.gradients * speed.products
    seconds += work.head * speed.products * shape.hidden * shape.vocabulary / layer / shape.layers
    seconds *= tokens * shape.layers
    seconds += shape.layers * (work.single / speed.single + work.double / speed.double)
    return Forecast(
        verb=verb, how=how, memory=int(memory), seconds=seconds, forwards=work.forwards, fits=memory <= machine
    )  # fmt: skip


def _memory(verb: str, shape: Shape, work: Work, tokens: int, some: int, machine: int) -> tuple[float, str]:
    """Anonymous bytes at the peak and how the weights are held, for ``some`` tokens at a time."""
    graph = some * 2 * sum(m.d_in + m.d_out for m in shape.matrices) * shape.width
    widest = max(max(m.d_in, m.d_out) for m in shape.matrices)
    acting = graph if work.losses else some * (12 * shape.hidden + 4 * widest * shape.width)
    logits = some * shape.vocabulary * 12 if work.head else 0
    stored = tokens * shape.hidden * shape.width * (shape.layers + 1 + 2 * work.losses if work.losses else 1)
    every = shape.layers if work.losses else 1
    whole = _BASE + shape.weights + _KEPT * (acting * every + logits + work.state * every + work.beside)
    if verb == "finetune":
        whole += _KEPT * graph * shape.layers
    kept = 0 if work.losses and stored >= SHARE * machine else stored  # what has no room in memory is kept on disk
    walked = _BASE + _KEPT * (acting + logits + kept + work.state + work.beside)
    if whole <= SHARE * machine or verb == "finetune":
        return whole, "whole"
    if walked + shape.weights <= machine * SHARE:
        return walked + shape.weights, "layers"
    changed = shape.layer if "prune" in verb or verb == "measure" else 0  # what is treated leaves its file
    return walked + _KEPT * changed, "streamed"
