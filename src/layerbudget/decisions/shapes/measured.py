"""Finished measurements of smaller shapes, kept so that a run that was stopped makes only the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.processes import process_group
from ...models.blocks import fingerprint
from ...models.provenance import computation, versions
from ...storage.parts import Parts

Keep = Callable[[str, Callable[[], Any]], Any]


def measurements(model: nn.Module, data: CalibrationSet, folder: Path | str | None, settings: Mapping[str, Any]) -> Keep:
    """``keep(name, make)``: the stored result of a measurement, or a new one that is stored; without a folder always a new one.

    Args:
        model: What is measured, as it is.
        data: What it is measured on.
        folder: Where.
        settings: What else changes a number.

    Raises:
        ModelMismatch: The folder holds measurements of another request.
        InvalidInput: Several processes, which share their sequences.
    """
    if folder is None:
        return lambda name, make: make()
    if process_group() is not None:
        raise InvalidInput("Measurements are kept by one process.", "", "Leave resume out, or use one process.")
    request = {
        "model": fingerprint(model), "data": data.digest, "settings": dict(settings), "computation": computation(model),
        "versions": versions(),
    }  # fmt: skip
    return Parts(folder, request).json
