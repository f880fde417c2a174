"""How llama.cpp writes a quantised cache: rotated by a Hadamard matrix, and rounded without a search. No torch.

Since April 2026 (pull request 21038) keys and values are rotated before they are rounded, wherever 64 divides the channels of a
head; queries and the output of attention are rotated alike, so that nothing else changes. Keys are rotated in pieces as wide
as the largest power of two that divides the head, values in pieces of 64. Keys of architectures whose files have the halves of
a head as neighbours (Llama's) are rotated and rounded in that order. ``LLAMA_ATTN_ROT_DISABLE=1`` turns it off. What the
installed library does is read from it: it has the name of that variable.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
from pathlib import Path

import numpy as np

from ...compressors.formats import find_format
from ...compressors.ggml import dequantise, need_ggml

SWITCH = "LLAMA_ATTN_ROT_DISABLE"
LEAST = "of April 2026 or later (pull request 21038)"  # builds that rotate a quantised cache
_PIECE = 64


def rotates() -> bool:
    """Return whether llama.cpp rotates a quantised cache: the installed one with this environment, or today's where none is."""
    value = os.environ.get(SWITCH, "").strip()
    off = value.lstrip("+-").isdigit() and int(value) != 0
    return not off and _able()


@functools.cache
def _able() -> bool:
    spec = importlib.util.find_spec("xllamacpp")
    files = sorted(Path(spec.origin).parent.glob("*.so")) if spec is not None and spec.origin else []
    if not files:
        return True
    with files[0].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(SWITCH.encode()) >= 0


def piece(channels: int, part: int) -> int:
    """Channels of a head that are rotated together: of keys (part 0) or of values (1); 0 where they are left as they are."""
    if channels % _PIECE:
        return 0
    return channels & -channels if part == 0 else _PIECE


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """The normalised Hadamard matrix ``(size, size)`` of Sylvester, float32: symmetric, and its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def written(rows: np.ndarray, name: str) -> np.ndarray:
    """Return what is read back of rows ``(n, channels)`` in a type, float32: rounded as a runtime rounds, by blocks, at once.

    Files are rounded otherwise: for IQ4_NL they get the best of many scales.
    """
    form, values = find_format(name, "gguf"), np.ascontiguousarray(rows, dtype=np.float32)
    row = getattr(need_ggml(), f"quantize_row_{name.lower()}_ref")
    row.argtypes, row.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    data = np.zeros((len(values), values.shape[1] // (form.group or 1) * form.block_bytes), dtype=np.uint8)
    row(values.ctypes.data, data.ctypes.data, values.size)
    return dequantise(data, name)
