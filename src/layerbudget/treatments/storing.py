"""Put every matrix of a model into the format that a plan gives it, layer after layer, and keep what the file needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..records import Module
from ..running.modes import inference
from ..running.walk import Walk
from .base import Level, find_quantiser
from .formats import find_format
from .items import modules_by_name
from .rounding import Quantiser, Rounded
from .treating import Job, Treating

Progress = Callable[[int, int], None]


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
        progress: Called with (layers done, layers).
        **own: Options of the quantiser.

    Raises:
        InvalidInput: An unknown method or format, missing data, a shape that a format does not divide.
        UnknownBlock: A matrix that the model does not have.
        MissingDependency: GGUF formats without the package gguf.
    """
    quantiser = quantiser_of(method)
    need_data(quantiser, data)
    modules = modules_by_name(model, formats)
    for name, module in modules.items():
        _check(name, module, formats[name])
    storing = Storing(model, quantiser, own)
    jobs = {name: Job(module=m, level=Level(format=formats[name])) for name, m in modules.items()}
    with inference(model):
        forwards, notes = _run(storing, jobs, data, batch_size, progress)
    return Stored(rounded=storing.rounded, formats=dict(formats), method=method, notes=tuple(notes), forwards=forwards)


def _check(name: str, module: Module, form: str) -> None:
    find_format(form).check(name, module.d_in)


def _run(
    storing: Storing, jobs: Mapping[str, Job], data: CalibrationSet | None, batch_size: int, progress: Progress | None
) -> tuple[int, list[str]]:
    if storing.treatment.statistic == "none" or data is None:
        for done, job in enumerate(jobs.values(), 1):
            storing.jobs([job], {})
            if progress:
                progress(done, len(jobs))
        return 0, []
    walk = Walk(storing.model, data, batch_size=batch_size)
    names = [name for name, _ in walk.layers]
    inside = {n: [j for m, j in jobs.items() if m.startswith(f"{n}.")] for n in names}
    apart = [j for m, j in jobs.items() if not any(m.startswith(f"{n}.") for n in names)]
    try:
        notes = storing.jobs(apart, {})
        walk.capture()
        for i, name in enumerate(names):
            notes += storing.layer(walk, inside[name])
            if i + 1 < len(names):
                walk.advance()
            if progress:
                progress(i + 1, len(names))
    finally:
        walk.close()
    return walk.forwards, notes
