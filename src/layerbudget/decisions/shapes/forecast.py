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

_WIDE = 512  # inputs and outputs of the matrix whose refits are timed
_POINT = 7.0  # forward equivalents of a point: three and two draws
_GONE = 0.75  # of the units, at most


def shaping(text: Text, passes: float) -> list[WorkItem]:
    """Parts of ``plan shapes``: its forwards and backwards, and at every point the refits of what stays."""
    points, folds = passes / _POINT, min(4, text.samples)

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model: of moments at every point, and of refits by those of every part of the text."""
        refits = sum(m.copies * refitting_seconds(m.d_out, m.d_in) for m in _behind(shape))
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


@functools.cache
def _refitting() -> float:
    """Seconds of one matrix: the order in which its inputs go, and a refit for every number of them that is looked at."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(n * _WIDE, _WIDE, generator=generator, dtype=torch.float64) for n in (1, 2))
    h, most = damped(inputs.T @ inputs, 0.01), int(_GONE * _WIDE)

    def run() -> torch.Tensor:
        order = removal_order(weight, h, most)
        for level in range(1, LEVELS):
            alive = torch.ones(_WIDE, dtype=torch.bool)
            alive[order[: most * level // (LEVELS - 1)]] = False
            made = refitted(weight, h, torch.nonzero(alive).flatten())
        return made

    return timing.seconds_of(run) / _WIDE**3


def refitting_seconds(rows: int, columns: int) -> float:
    """Return what the alternatives of one matrix take: half of the work goes with the cube of its columns."""
    return _refitting() * columns**2 * (rows + columns) / 2
