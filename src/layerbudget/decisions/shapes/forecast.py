"""The work of ``plan shapes``: forwards, backwards and refits at every point."""

from __future__ import annotations

import functools

import torch

from ...cost import timing
from ...cost.sizes import Shape, Text
from ...cost.work import WorkItem, collecting_seconds
from ...execution.panels import count_numbers
from ...records import Module
from .path import LEVELS
from .units import damped, refitted, removal_order

_SIZES = 512, 1024  # inputs and outputs of the matrices whose refits are timed: wider ones make better use of a core
_POINT, _ENDS = 7.0, 6.0  # forward equivalents of a point, three and two draws, and of the first and last measurement
_GONE = 0.75  # of the units, at most


def shaping(text: Text, passes: float) -> list[WorkItem]:
    """Parts of ``plan shapes``: its forwards and backwards, and at every point the refits of what stays."""
    points, folds = max(passes - _ENDS, _POINT) / _POINT, min(4, text.samples)

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model: of moments at every point, and of refits by those of every part of the text.

        Heads are few, and take little beside the channels of the MLP.
        """
        widest = max(_behind(shape), key=lambda m: m.d_in, default=None)
        refits = 0.0 if widest is None else widest.copies * refitting_seconds(widest.d_out, widest.d_in)
        return points * (collecting_seconds("gram", shape, text) + folds * shape.layers * refits)

    def sent(shape: Shape, text: Text) -> float:
        """Moments of each of four parts of the text, for others to refit by: at every point, and of the dense model twice.

        They are of what heads and MLPs give, in float32; two starts are looked at, heads one by one and in groups.
        """
        each = 4.0 * folds * shape.layers * sum(m.copies * count_numbers(m.d_in) for m in _behind(shape))
        return each * (passes // _POINT + 2.0) / points

    return [WorkItem("directional", text, passes, losses=2, job=job), WorkItem("refit", text, times=points, sent=sent)]


def _behind(shape: Shape) -> list[Module]:
    """The matrices of a layer that read heads and MLP channels."""
    return [m for m in shape.matrices if m.d_out == shape.hidden and not m.name.rpartition(".")[2].startswith("q")]


def _order_and_refits(size: int) -> float:
    """Seconds of a square matrix: the order in which its inputs go, and a refit for every number of them that is looked at."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(n * size, size, generator=generator, dtype=torch.float64) for n in (1, 2))
    h, most = damped(inputs.T @ inputs, 0.01), int(_GONE * size)

    def run() -> torch.Tensor:
        order = removal_order(weight, h, most)
        for level in range(1, LEVELS):
            alive = torch.ones(size, dtype=torch.bool)
            alive[order[: most * level // (LEVELS - 1)]] = False
            made = refitted(weight, h, torch.nonzero(alive).flatten())
        return made

    return timing.seconds_of(run, repeats=1)


@functools.cache
def _refitting() -> tuple[float, float]:
    """Seconds per square and per cube of the columns."""
    (few, many), (small, large) = _SIZES, (_order_and_refits(size) / size**2 for size in _SIZES)
    cube = max(large - small, 0.0) / (many - few)
    return max(small - cube * few, 0.0), cube


def refitting_seconds(rows: int, columns: int) -> float:
    """Return what the alternatives of one matrix take."""
    square, cube = _refitting()
    return columns**2 * (square + cube * (rows + columns) / 2)
