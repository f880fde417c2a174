"""What was really written: bytes counted again from the file itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...compressors.rounding_packages import need_gguf
from ...errors import CorruptFile, CoverageError
from ...plan import Plan
from ...records import Record

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisationReceipt(Record):
    """The record of one written model.

    Attributes:
        method: The quantiser.  family: ``gguf`` or ``compressed-tensors``.
        plan_digest: Content hash of the plan.  model: ``{id, revision, digest}`` before rounding.
        modules: ``{name: {format, bytes}}``, counted from the file.
        bytes: Of all planned matrices, counted.  planned: What the plan says; equal, or nothing is written.
        tensors: Bytes of all tensors of the file.  file: Size of the file.
        bits: Bits per weight of the planned matrices.
        notes: Everything that deserves a sentence.  versions: Of the packages.
        made_by: The command that made it; empty where Python did.
    """

    what: ClassVar[str] = "receipt"
    command: ClassVar[str] = "quantize"

    method: str
    family: str
    plan_digest: str
    model: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Any]]
    bytes: int
    planned: int
    tensors: int
    file: int
    bits: float
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    made_by: str = ""


def recount_safetensors(folder: Path) -> dict[str, int]:
    """Bytes of every tensor of a folder's safetensors files, from their headers.

    Raises:
        CorruptFile: One does not parse.
    """
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as f:
            try:
                header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
            except ValueError as error:
                raise CorruptFile(f"{file} is not a safetensors file ({error}).", "", "Write it again.") from error
        found |= {n: e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n != "__metadata__"}
    return found


def recount_gguf(file: Path) -> dict[str, int]:
    """Bytes of every tensor of a GGUF file, padding included: from one tensor's place to the next one's.

    Raises:
        MissingDependency: Without the package gguf.
    """
    tensors = sorted(need_gguf().GGUFReader(file).tensors, key=lambda t: t.data_offset)
    stops = [t.data_offset for t in tensors[1:]] + [file.stat().st_size]
    return {t.name: int(stop - t.data_offset) for t, stop in zip(tensors, stops, strict=True)}


def compare(plan: Plan, counted: Mapping[str, int]) -> None:
    """Refuse a file whose matrices are not as large as planned.

    Args:
        plan: Of kind ``bits``.
        counted: Bytes by full name of the matrix.

    Raises:
        CoverageError: Names the first block.
    """
    for block in plan.blocks:
        spent = sum(counted[m] for m in block.modules)
        if spent != block.count:
            raise CoverageError(
                f"{block.name} takes {spent} bytes in the file, {block.count} were planned.",
                "",
                "Report this; nothing is kept.",
            )
