"""The record of a model that was written with a plan's formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...records import Receipt


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisationReceipt(Receipt):
    """The record of one written model, counted again from its files.

    ``modules`` is ``{name: {format, bytes}}``, ``bytes`` of all planned matrices and ``planned`` what the plan says (equal, or
    nothing is written). ``tensors`` are the bytes of all tensors, ``file`` the size of the files, ``bits`` the bits per weight
    of the planned matrices. ``llama_cpp`` says what llama.cpp makes of
    a GGUF file.
    """

    method: str
    family: str
    modules: Mapping[str, Mapping[str, Any]]
    bytes: int
    planned: int
    tensors: int
    file: int
    bits: float
    llama_cpp: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    made_by: str = ""
