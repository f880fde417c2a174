r"""ggml's own quantiser for every type of llama.cpp: round rows, read them back, put other codes into a block.

:func:`quantise` gives the bytes that ``llama-quantize`` writes, with or without an importance matrix. A block of a type holds
some scales and one code per weight. In all types but the lattices (IQ1 to IQ3) a code stands in bits of its own and says one
weight. So other codes may stand under the scales that ggml has chosen, and :mod:`layerbudget.compressors.feedback` finds
better ones for the output of a layer. Where the bits of a code lie is found by trying: a bit that changes one weight of a block
is a bit of its code, one that changes several belongs to a scale.

The functions are those of the shared object in the wheel of ``xllamacpp``, called through ctypes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidInput, MissingDependency
from ..gguf.names import need_gguf
from .formats import find_format

_TRIES = 6  # blocks of random weights: a bit of a code may change nothing in one of them (the sign of a zero)


def library_file() -> Path | None:
    """Return the shared object of ggml and llama.cpp; None where the package xllamacpp is not installed."""
    package = importlib.util.find_spec("xllamacpp")
    files = sorted(Path(package.origin).parent.glob("*.so")) if package is not None and package.origin else []
    return files[0] if files else None


@functools.cache
def need_ggml() -> Any:
    """Return ggml's functions.

    Raises:
        MissingDependency: The package that has them is not installed.
    """
    file = library_file()
    if file is None:
        raise MissingDependency(
            "Rounding to llama.cpp's types needs ggml, which the package xllamacpp brings.",
            "",
            "Install xllamacpp (Linux, macOS), or plan for compressed-tensors.",
        )
    library = ctypes.CDLL(str(file))
    rows, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, rows, rows, number, number, number, rows]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    return library


def needs_importance(name: str) -> bool:
    """Return whether ggml refuses to round to a type without an importance matrix."""
    return bool(need_ggml().ggml_quantize_requires_imatrix(_kind(name)))


def quantise(weight: np.ndarray, name: str, importance: np.ndarray | None = None, *, threads: int = 1) -> np.ndarray:
    """Return the bytes of a matrix in a type, ``(rows, bytes of a row)``, as ``llama-quantize`` makes them.

    Args:
        weight: ``(rows, columns)``.
        name: A type, as in ``Q4_K``.
        importance: How much every column counts, ``(columns,)``: the mean square of the inputs.
        threads: Rows are shared among so many.

    Raises:
        InvalidInput: Columns that the type's block does not divide, or a type that needs an importance matrix without one.
        MissingDependency: See :func:`need_ggml`.
    """
    library, form, kind = need_ggml(), find_format(name), _kind(name)
    values = np.ascontiguousarray(weight, dtype=np.float32)
    rows, columns = values.shape
    form.check("A matrix", columns)
    if importance is None and needs_importance(name):
        raise InvalidInput(
            f"ggml rounds to {name} only with an importance matrix.",
            "Types below three bits are useless without one.",
            "Use --method weighted, gptq or descent, which take it from the calibration text.",
        )
    weights = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    if weights is not None and weights.shape != (columns,):
        raise InvalidInput(f"The importance has shape {weights.shape}.", f"It is one number for each of {columns} columns.", "")
    out = np.zeros((rows, columns // form.group * form.block_bytes), dtype=np.uint8)
    library.ggml_quantize_init(kind)

    def part(span: np.ndarray) -> None:
        start, count = int(span[0]), len(span)
        pointer = None if weights is None else weights.ctypes.data
        library.ggml_quantize_chunk(kind, values[start:].ctypes.data, out[start:].ctypes.data, 0, count, columns, pointer)

    spans = [s for s in np.array_split(np.arange(rows), max(1, threads)) if len(s)]
    if len(spans) == 1:  # a thread of its own would cost more than a small block
        part(spans[0])
        return out
    with ThreadPoolExecutor(len(spans)) as pool:
        list(pool.map(part, spans))
    return out


def dequantise(data: np.ndarray, name: str) -> np.ndarray:
    """Return the weights that bytes stand for, ``(rows, columns)`` float32, as llama.cpp reads them."""
    form, library = find_format(name), need_ggml()
    read = getattr(library, f"dequantize_row_{name.lower().removesuffix('_k')}{'_K' if name.endswith('_K') else ''}")
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    data = np.ascontiguousarray(data)
    out = np.zeros((data.shape[0], data.shape[1] // form.block_bytes * form.group), dtype=np.float32)
    read(data.ctypes.data, out.ctypes.data, out.size)
    return out


def is_finite(data: np.ndarray, name: str) -> bool:
    """Return whether all weights that bytes stand for are finite: a scale of 16 bits has an end."""
    library, data = need_ggml(), np.ascontiguousarray(data)
    library.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    library.ggml_validate_row_data.restype = ctypes.c_bool
    return bool(library.ggml_validate_row_data(_kind(name), data.ctypes.data, data.nbytes))


def _kind(name: str) -> int:
    return int(need_gguf().GGMLQuantizationType[name])


def _block(name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    form = find_format(name)
    return form.group or 1, form.block_bytes


# ---- codes: the part of a block that is one weight's own


@functools.cache
def code_bits(name: str) -> np.ndarray | None:
    """Return where the codes of a block lie, ``(weights of a block, bits of a code)``: bits of the block, lowest digit first.

    None for lattices, where one code says several weights.
    """
    (count, size), random = _block(name), np.random.default_rng(0)
    bits = np.arange(8 * size)
    weight, effect = np.full(bits.size, -1), np.zeros(bits.size)
    shared = np.zeros(bits.size, dtype=bool)
    for _ in range(_TRIES):
        block = quantise(random.standard_normal((1, count)), name, np.ones(count))
        flipped = np.repeat(block, bits.size, 0)
        flipped[bits, bits // 8] ^= (1 << (bits % 8)).astype(np.uint8)
        with np.errstate(all="ignore"):  # a flipped bit of a scale may make it infinite
            change = np.abs(dequantise(flipped, name) - dequantise(block, name))
        hit = ~(change == 0)
        shared |= hit.sum(1) > 1
        one = hit.sum(1) == 1
        weight[one] = hit[one].argmax(1)
        effect[one] = np.maximum(effect[one], change[one].max(1))
    weight[shared] = -1
    counts = np.bincount(weight[weight >= 0], minlength=count)
    if counts.min() < 2 or counts.min() != counts.max():
        return None
    order = np.lexsort((effect, weight))
    places = order[weight[order] >= 0].reshape(count, -1)
    # Within one byte digits stand in their order; only there is a level no multiple of its code, so that sizes may mislead.
    together = (places // 8 == places[:, :1] // 8).all(1, keepdims=True)
    return np.where(together, np.sort(places), places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Bits of many codes that lie alike in their bytes: of every code those from ``low`` on, in a byte from ``bit`` on.

    No byte comes twice in ``inside``, so that all are written at once.
    """

    weights: np.ndarray
    inside: np.ndarray
    low: int
    bit: int
    mask: int


@functools.cache
def _places(name: str) -> tuple[_Place, ...]:
    """Where the codes of a block lie, in as few steps as their layout allows."""
    bits = code_bits(name)
    if bits is None:
        raise InvalidInput(f"{name} is a lattice: a code says several weights.", "", "Round whole blocks of it.")
    width, runs = bits.shape[1], dict[tuple[int, int, int], list[tuple[int, int]]]()
    for weight, bit_places in enumerate(bits.tolist()):
        low = 0
        for high in range(1, width + 1):
            if high == width or bit_places[high] != bit_places[high - 1] + 1 or bit_places[high] % 8 == 0:
                runs.setdefault((low, bit_places[low] % 8, (1 << (high - low)) - 1), []).append((weight, bit_places[low] // 8))
                low = high
    return tuple(
        _Place(weights=np.array([w for w, _ in places]), inside=np.array([b for _, b in places]), low=low, bit=bit, mask=mask)
        for (low, bit, mask), places in runs.items()
    )


def with_codes(data: np.ndarray, name: str, codes: np.ndarray | int) -> np.ndarray:
    """Return the bytes with other codes under the same scales.

    Args:
        data: ``(rows, bytes of a row)``, as :func:`quantise` made them.
        name: A type that is no lattice.
        codes: ``(rows, columns)`` of uint8, each below the number of levels; or one for all weights.
    """
    count, size = _block(name)
    out = data.reshape(-1, size).T.copy()  # a row for every byte of a block, so that a step below writes whole rows
    each = np.broadcast_to(np.uint8(codes), (count, 1)) if isinstance(codes, int) else codes.reshape(-1, count).T
    for place in _places(name):
        out[place.inside] &= ~np.uint8(place.mask << place.bit)
        out[place.inside] |= (each[place.weights] >> place.low & place.mask) << place.bit
    return np.ascontiguousarray(out.T).reshape(data.shape)


def codes_of(data: np.ndarray, name: str) -> np.ndarray:
    """Return the codes that bytes hold, ``(rows, columns)`` of uint8: see :func:`with_codes`."""
    count, size = _block(name)
    blocks = np.ascontiguousarray(data.reshape(-1, size).T)
    out = np.zeros((count, blocks.shape[1]), dtype=np.uint8)
    for place in _places(name):
        out[place.weights] |= (blocks[place.inside] >> place.bit & place.mask) << place.low
    return np.ascontiguousarray(out.T).reshape(len(data), -1)


@functools.cache
def levels(name: str) -> np.ndarray:
    """Return the level of every code, ``t``: under any scales a weight is ``base + step t[code]``, and ``t`` begins 0, 1.

    Even types have ``t[code] = code``.
    """
    block = _some_block(name)
    values = np.stack([dequantise(with_codes(block, name, code), name)[0] for code in range(1 << find_format(name).bits)])
    change = (values - values[0]).astype(np.float64)
    clearest = np.abs(change[1]).argmax()
    table: np.ndarray = change[:, clearest] / change[1, clearest]
    whole = table.round()
    return whole if np.allclose(table, whole, atol=1e-4) else table


def _some_block(name: str) -> np.ndarray:
    """A block of random weights."""
    return quantise(np.random.default_rng(1).standard_normal((1, _block(name)[0])), name)


def grid(data: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ``base`` and ``step`` of every weight, ``(rows, columns)`` each: see :func:`levels`."""
    base, one = (dequantise(with_codes(data, name, code), name) for code in (0, 1))
    return base, one - base
