"""Seconds of writing a plan of bits beside rounding: packing, reading back and the vocabulary, timed on a few rows here."""

from __future__ import annotations

import functools
import hashlib
import struct
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...compressors.base import Level
from ...compressors.formats import GGUF, find_format
from ...gguf.names import need_gguf
from ...plan import Plan, payload_of
from ..formats.program import formats_of_plan
from .apply import quantiser_of
from .packed import _pack, _unpack
from .payload import BitsPayload

if TYPE_CHECKING:
    from ...cost import Shape, Text

_ROWS, _COLUMNS = 2048, 1024  # of the matrix that is timed: every format fits, and no cache holds it
_WORDS = 4096  # of a vocabulary, timed
_TOUCHES = 200  # packings that take as long as a word of a vocabulary: in tokenizers that are read again, and in heads of files
_BYTES = 1500  # of a token of the vocabulary in the memory: as words, as bytes, and in dictionaries


def rounded_of(plan: Plan) -> dict[str, Any]:
    """Return what applying a plan rounds and writes, as ``cost.treating`` takes it."""
    formats, gguf = formats_of_plan(plan), payload_of(plan, BitsPayload).family == GGUF
    return {"formats": formats, "ends": gguf, "forwards": 0.0, "more": _writing(gguf), "held": _held(gguf)}


def _writing(gguf: bool) -> Callable[[Shape, Text, dict[str, float]], float]:
    """Seconds of writing so many weights in every format."""

    def job(shape: Shape, text: Text, weights: dict[str, float]) -> float:
        return shape.vocabulary * _TOUCHES * _word() + sum(count * _weight(form, gguf) for form, count in weights.items())

    return job


def _held(gguf: bool) -> Callable[[Shape], float]:
    """Bytes of an embedding that is rounded beside its head, of the vocabulary, and of a folder that is loaded once written."""

    def held(shape: Shape) -> float:
        sizes = sorted((m.numel for m in shape.ends), reverse=True)
        loaded = 0 if gguf else 2 * (shape.layers * shape.numel + sum(sizes))
        return sum(sizes[1:]) * shape.width * shape.converts + _BYTES * shape.vocabulary * gguf + loaded

    return held


@functools.cache
def _weight(name: str, gguf: bool) -> float:
    """Seconds of a weight on its way into the file, and of reading it back."""
    from ...timing import seconds_of

    form, weight = find_format(name), torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(1))
    made = quantiser_of("rtn").quantise(weight, None, Level(format=name, peak=float(weight.abs().max())))

    halved = weight.to(torch.bfloat16)

    def write() -> torch.Tensor:
        """Convert, look at every number, write and read back; a packed folder is loaded, and all files are read once more."""
        torch.isfinite(weight.copy_(halved)).all()
        weight.copy_(made.weight)
        if gguf and not form.plain:
            package = need_gguf()
            np.array_equal(package.dequantize(made.data, package.GGMLQuantizationType[form.name]), made.weight.numpy())
            _write(made.data)
            return weight
        written = weight.to(torch.float16 if gguf else torch.bfloat16)
        if not form.plain:
            packed = {f"x.{key}": tensor for key, tensor in _pack(made.weight, made, form, "x").items()}
            written = _unpack(packed, form, "x").to(written)
        _write(written.view(torch.uint8).numpy())
        torch.isfinite(written).all()
        return weight

    return seconds_of(write) / weight.numel()


def _write(data: Any) -> None:
    """Write an array to a file without a name, and take its checksum."""
    with tempfile.TemporaryFile() as file:
        file.write(memoryview(data))
    hashlib.blake2b(memoryview(data))


@functools.cache
def _word() -> float:
    """Seconds of packing one word."""
    from ...timing import seconds_of

    words = [f"word{i}" for i in range(_WORDS)]

    def pack() -> bytes:
        return b"".join(struct.pack("<Q", len(data := word.encode())) + data for word in words)

    return seconds_of(pack) / _WORDS
