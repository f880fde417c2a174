"""What a long verb is expected to take, said before it starts, and what it took, said after it ended."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .shared import announce

if TYPE_CHECKING:
    from ..doctor.cost import Cost, Part, Shape, Text
    from ..doctor.watch import MemoryMonitor


@dataclasses.dataclass(kw_only=True)
class CostEstimate:
    """One run: what was expected, where it is known, and the watch that runs."""

    expected: Cost | None
    watch: MemoryMonitor


def text_of(data: Any, arguments: argparse.Namespace) -> Text:
    """How much text a verb reads: of a calibration set, in the batches that ``--batch-size`` names; one token of none."""
    from ..doctor.cost import Text
    from .shared import batch_of

    if data is None:
        return Text(samples=1, length=1, batch=1)
    return Text(samples=data.samples, length=data.length, batch=min(batch_of(arguments), data.samples))


def words_of(data: Any) -> str:
    """What a calibration set is."""
    return f"{data.samples} samples of {data.length} tokens of {data.source}"


def expect(arguments: argparse.Namespace, what: str, model: Any, parts: Callable[[Shape], Sequence[Part]]) -> None:
    """Say model, device, precision, expected time and memory in one line on stderr, and start the watch.

    Called once the model is loaded, before the work. A second call (another model of the same verb) says only what was loaded.

    Args:
        arguments: Of the command; the outlook is left on it for :func:`conclude`.
        what: What will be done, and on which text.
        model: As it was loaded.
        parts: Prices the verb on a model of these sizes; none where nobody knows what it costs.
    """
    from ..models.loading import describe_place

    if getattr(arguments, "quiet", False) and not getattr(arguments, "json", False):
        return
    place = f"{arguments.model}: {describe_place(model)}."
    if getattr(arguments, "outlook", None) is not None:
        announce(arguments, place)
        return
    device = next(model.parameters()).device
    found = _priced(arguments.verb, model, parts)
    begin(arguments, f"{place} {what}", found, device)


def begin(arguments: argparse.Namespace, sentence: str, found: Cost | None, device: Any = "cpu") -> None:
    """Say a sentence with what a forecast says, and start the watch."""
    from ..doctor.watch import MemoryMonitor

    announce(arguments, f"{sentence}{told(found)}.")
    arguments.outlook = CostEstimate(expected=found, watch=MemoryMonitor(device))


def told(found: Cost | None) -> str:
    """A forecast as the end of a sentence."""
    if found is None:
        return ""
    from ..doctor.cost import HOWS

    short = "" if found.fits else ", more than is free here"
    return f": about {_cost(found.seconds, found.memory)}{short}, {HOWS[found.how]}"


def conclude(arguments: argparse.Namespace, result: Any) -> Any:
    """Stop the watch, say what was taken beside what was expected, and give the result both as fields."""
    held: CostEstimate | None = getattr(arguments, "outlook", None)
    if held is None:
        return result
    seconds, memory = held.watch.end()
    e = held.expected
    beside = f"; expected {_cost(e.seconds, e.memory)}" if e is not None else ""
    announce(arguments, f"took {_cost(seconds, memory)}{beside}.")
    if not isinstance(result, dict):
        return result
    expected = None if e is None else {"seconds": e.seconds, "memory": e.memory, "how": e.how, "forwards": e.forwards}
    return {**result, "expected": expected, "took": {"seconds": seconds, "memory": memory}}


def dismiss(arguments: argparse.Namespace) -> None:
    """Stop the watch of a command that ended, however it did."""
    held: CostEstimate | None = getattr(arguments, "outlook", None)
    if held is not None:
        held.watch.end()


def _cost(seconds: float, memory: int) -> str:
    from ..doctor.cost import duration

    return f"{duration(seconds)} and {memory / 2**30:.2g} GiB"


def _priced(verb: str, model: Any, parts: Callable[[Shape], Sequence[Part]]) -> Cost | None:
    """The forecast of a loaded model; None where it has no layers that could be counted."""
    from ..doctor.cost import price, shape_in_memory, time_token
    from ..errors import UnknownStructure
    from ..models.machine import free_bytes
    from ..models.offload import mapped

    try:
        shape = shape_in_memory(model)
    except UnknownStructure:
        return None
    found = parts(shape)
    if not found:
        return None
    first = next(model.parameters())
    lies = mapped(model)
    dtype, device = (first.dtype, first.device) if lies is None else (lies.dtype, lies.device)
    text = max((p.text for p in found), key=lambda t: t.batch)
    token = time_token(shape, dtype, device, model=model if lies is None else None, text=text)
    machine = free_bytes(device) + (shape.weights if lies is None else 0)  # which has the model already
    priced = price(verb, found, shape, token, machine)
    if lies is None and priced.how == "streamed":  # it was asked for in memory, and is there
        return dataclasses.replace(priced, how="layers", memory=priced.memory + shape.weights)
    if lies is not None and priced.how != "streamed":
        return dataclasses.replace(priced, how="streamed", memory=max(priced.memory - shape.weights, 0))
    return priced
