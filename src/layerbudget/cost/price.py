"""The price of a verb: seconds, forward equivalents, and the memory of its largest part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from ..execution.memory import HEAD
from ..models.machine import ROOM, SHARE, free_bytes
from ..models.offload import mapped
from . import timing
from .sizes import Shape, Text, shape_in_memory
from .timing import Pace
from .work import WORK, WorkItem

_BASE = 0.6 * 2**30  # bytes of an interpreter with torch, transformers and a tokenizer
_SLACK = 1.2  # bytes that the allocator holds, over those in use
HOWS = {"whole": "in memory", "layers": "layer by layer", "streamed": "streamed from its files"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Expected cost of a verb, as users type it."""

    verb: str
    how: str  # a key of HOWS
    memory: int  # bytes at the peak; of mapped weights as many as there is room for
    seconds: float
    forwards: float  # forward equivalents of the first text
    fits: bool  # whether the machine has that much memory


def pace_of_shape(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Pace:
    """The pace of a model that is not loaded, as fast as a wide matrix is multiplied here."""
    return timing.pace_of_rate(shape.layers * shape.met, shape.hidden * shape.vocabulary, dtype, device)


def place_of(model: nn.Module, text: Text) -> tuple[Shape, Pace, int, bool]:
    """Facts of a loaded model that :func:`price` needs: sizes, its pace, bytes here, whether it is streamed."""
    shape, lies = shape_in_memory(model), mapped(model)
    home = next(model.parameters()) if lies is None else lies
    products = shape.numel, shape.hidden * shape.vocabulary
    pace = timing.pace_of(model, text.length, text.batch, products, shape.vocabulary)
    return shape, pace, free_bytes(home.device) + (shape.weights if lies is None else 0), lies is not None


def price(verb: str, parts: Sequence[WorkItem], shape: Shape, pace: Pace, machine: int, streamed: bool | None = None) -> Cost:
    """Return what a verb takes: seconds and forwards of the whole first text add up over its parts, memory is the largest.

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
        forwards += part.times * passes * part.text.tokens / (parts[0].text.whole * parts[0].text.length)
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
