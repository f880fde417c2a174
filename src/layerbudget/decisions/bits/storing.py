"""Put every matrix of a model into the format that a plan gives it, layer after layer, and keep what the file needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compressors.base import Level, find_quantiser
from ...compressors.conforming import check
from ...compressors.formats import find_format
from ...compressors.rounding import Quantiser, Rounded
from ...compressors.treating import Job, Treating
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.modes import inference
from ...execution.walk import Walk
from ...models.blocks import layers
from ...models.offload import mapped
from ...progress import Progress, Steps
from .items import modules_by_name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """What was done.

    Attributes:
        rounded: By matrix, one entry per copy: scales and zero points of compressed-tensors.
        formats: By matrix.
        method: The quantiser.
        notes: Everything that deserves a sentence.
        forwards: Forwards of one layer on one batch.
    """

    rounded: Mapping[str, Sequence[Rounded]]
    formats: Mapping[str, str]
    method: str
    notes: tuple[str, ...]
    forwards: int


class Storing(Treating):
    """Treating that keeps scales and zero points."""

    def __init__(self, model: nn.Module, quantiser: Quantiser, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(model, quantiser, options)
        self.rounded: dict[str, list[Rounded]] = {}

    def become(self, name: str, copy: int, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """See :meth:`Treating.become`."""
        quantiser: Any = self.treatment
        done: Rounded = quantiser.quantise(weight, prepared, level, **self.options)
        check(quantiser, weight, done.weight, level)
        self.rounded.setdefault(name, []).append(dataclasses.replace(done, weight=weight[:0]))
        return done.weight.to(weight.dtype)


def quantiser_of(method: str) -> Quantiser:
    """A quantiser by name.

    Raises:
        InvalidInput: There is none.
    """
    found: Any = find_quantiser(method)
    return found


def need_data(quantiser: Quantiser, data: CalibrationSet | None) -> None:
    """Refuse a quantiser without the data that it needs.

    Raises:
        InvalidInput: It has none.
    """
    if quantiser.statistic != "none" and data is None:
        raise InvalidInput(f"{quantiser.name} needs calibration data.", "", "Pass data, or use method rtn.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What is rounded, and written, together: a layer, or all that lies outside the layers.

    Attributes:
        name: Full name of the layer; empty outside.
        index: Its place; -1 outside.
        jobs: What its planned matrices become.
    """

    name: str
    index: int
    jobs: tuple[Job, ...]


Begin = Callable[[Piece], bool]
End = Callable[[Piece, Sequence[str]], None]


def pieces_of(model: nn.Module, formats: Mapping[str, str]) -> list[Piece]:
    """The model in the order in which it is rounded: embedding and head first, then layer after layer.

    Raises:
        InvalidInput: An unknown format, or a shape that it does not divide.
        UnknownBlock: A matrix that the model does not have.
    """
    modules = modules_by_name(model, formats)
    for name, module in modules.items():
        find_format(formats[name]).check(name, module.d_in)
    jobs = {name: Job(module=m, level=Level(format=formats[name])) for name, m in modules.items()}
    names = [name for name, _ in layers(model)]
    inside = {n: tuple(j for m, j in jobs.items() if m.startswith(f"{n}.")) for n in names}
    apart = tuple(j for m, j in jobs.items() if not any(m.startswith(f"{n}.") for n in names))
    return [Piece(name="", index=-1, jobs=apart), *(Piece(name=n, index=i, jobs=inside[n]) for i, n in enumerate(names))]


def store(
    model: nn.Module,
    formats: Mapping[str, str],
    data: CalibrationSet | None = None,
    *,
    method: str = "rtn",
    batch_size: int = 8,
    progress: Progress | None = None,
    **own: Any,
) -> Stored:
    """Round a model's matrices in place.

    Embedding and head come first and are rounded to nearest; then the layers, each with the inputs that the rounded model
    below it gives.

    Args:
        model: Changed in place.
        formats: Format of every matrix; others stay as they are.
        data: Calibration tokens, for quantisers that look at inputs.
        method: ``rtn``, ``weighted``, ``gptq`` or a quantiser of your own.
        batch_size: Sequences per forward.
        progress: Called with (pieces done, pieces).
        **own: Options of the quantiser.

    Raises:
        InvalidInput: An unknown method or format, missing data, a shape that a format does not divide.
        UnknownBlock: A matrix that the model does not have.
        MissingDependency: GGUF formats without the package gguf.
    """
    quantiser = quantiser_of(method)
    need_data(quantiser, data)
    storing = Storing(model, quantiser, own)
    forwards, notes = in_turn(storing, pieces_of(model, formats), data, batch_size=batch_size, progress=progress)
    return Stored(rounded=storing.rounded, formats=dict(formats), method=method, notes=tuple(notes), forwards=forwards)


def in_turn(
    storing: Storing, pieces: Sequence[Piece], data: CalibrationSet | None, *, batch_size: int = 8,
    progress: Progress | None = None, begin: Begin = lambda piece: False, end: End | None = None,
) -> tuple[int, list[str]]:  # fmt: skip
    """Round piece after piece.

    Args:
        storing: The quantiser on its model.
        pieces: See :func:`pieces_of`.
        data: Calibration tokens, for quantisers that look at inputs.
        batch_size: Sequences per forward.
        progress: Called with (pieces done, pieces).
        begin: Called with a piece, whose weights are at hand; true where it has put it in place itself.
        end: Called with a rounded piece and its notes while its weights are at hand; weights of a streamed model are dropped
            after that. Without it they stay, rounded.

    Returns:
        Forwards of one layer on one batch, and notes.
    """
    blind = storing.treatment.statistic == "none" or data is None
    walk = None if blind or data is None else Walk(storing.model, data, batch_size=batch_size)
    notes: list[str] = []
    with inference(storing.model):
        try:
            tick = Steps(progress, len(pieces))
            for piece in pieces:
                at_hand(storing.model, piece)
                found = [] if begin(piece) else _round(storing, piece, walk)
                notes += found
                if end is not None:
                    end(piece, found)
                if walk is not None:
                    _onward(walk, piece, len(pieces))
                if end is not None:
                    _drop(storing.model, piece)
                tick()
        finally:
            if walk is not None:
                walk.close()
    return 0 if walk is None else walk.forwards, notes


def _round(storing: Storing, piece: Piece, walk: Walk | None) -> list[str]:
    if walk is None or piece.index < 0:
        return storing.jobs(piece.jobs, {})
    return storing.layer(walk, piece.jobs)


def _onward(walk: Walk, piece: Piece, count: int) -> None:
    """To the inputs of the next layer, as the rounded ones give them."""
    if piece.index < 0:
        walk.capture()
    elif piece.index + 2 < count:
        walk.advance()


def at_hand(model: nn.Module, piece: Piece) -> None:
    """Bring a layer whose weights come and go."""
    lies = mapped(model)
    if lies is not None and lies.converts and piece.index >= 0:
        lies.bring(piece.name)


def _drop(model: nn.Module, piece: Piece) -> None:
    """Have a streamed layer's weights as its files have them: what was written into them leaves the memory."""
    lies = mapped(model)
    if lies is not None and piece.index >= 0:
        lies.leave()
        lies.fresh([job.module.name + ".weight" for job in piece.jobs])
