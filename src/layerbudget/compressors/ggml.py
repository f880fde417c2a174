r"""ggml's own quantiser for every type of llama.cpp: round rows, read them back, put other codes into a block.

:func:`quantise` gives the bytes that ``llama-quantize`` writes, with or without an importance matrix. A block of a type holds
some scales and one code per weight. In all types but the lattices (IQ1 to IQ3) a code stands in bits of its own and says one
weight. So other codes may stand under the scales that ggml has chosen, and :func:`feed_back` finds better ones for the output
of a layer. Where the bits of a code lie is found by trying: a bit that changes one weight of a block is a bit of its code, one
that changes several belongs to a scale.

The functions are those of the shared object in the wheel of ``xllamacpp``, called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import InvalidInput, MissingDependency
from .formats import find_format, need_gguf

_TRIES = 6  # blocks of random weights: a bit of a code may change nothing in one of them (the sign of a zero)


@functools.cache
def need_ggml() -> Any:
    """Return ggml's functions.

    Raises:
        MissingDependency: The package that has them is not installed.
    """
    found = importlib.util.find_spec("xllamacpp")
    files = sorted(Path(found.origin).parent.glob("*.so")) if found is not None and found.origin else []
    if not files:
        raise MissingDependency(
            "Rounding to llama.cpp's types needs ggml, which the package xllamacpp brings.",
            "",
            "Install xllamacpp (Linux, macOS), or plan for compressed-tensors.",
        )
    library = ctypes.CDLL(str(files[0]))
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
            "Use --method weighted or gptq, which take it from the calibration text.",
        )
    weights = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    if weights is not None and weights.shape != (columns,):
        raise InvalidInput(f"The importance has shape {weights.shape}.", f"It is one number for each of {columns} columns.", "")
    out = np.zeros((rows, columns // form.group * form.block_bytes), dtype=np.uint8)
    library.ggml_quantize_init(kind)

    def part(span: np.ndarray) -> None:
        start, count = int(span[0]), len(span)
        given = None if weights is None else weights.ctypes.data
        library.ggml_quantize_chunk(kind, values[start:].ctypes.data, out[start:].ctypes.data, 0, count, columns, given)

    spans = [s for s in np.array_split(np.arange(rows), max(1, threads)) if len(s)]
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


def with_codes(data: np.ndarray, name: str, codes: np.ndarray) -> np.ndarray:
    """Return the bytes with other codes under the same scales.

    Args:
        data: ``(rows, bytes of a row)``, as :func:`quantise` made them.
        name: A type that is no lattice.
        codes: ``(rows, columns)``, whole numbers below the number of levels.
    """
    places, (count, size) = _places(name), _block(name)
    bits = np.unpackbits(data.reshape(-1, size), axis=1, bitorder="little")
    bits[:, places] = (codes.reshape(-1, count, 1) >> np.arange(places.shape[1])) & 1
    return np.packbits(bits, axis=1, bitorder="little").reshape(data.shape)


@functools.cache
def levels(name: str) -> np.ndarray:
    """Return the level of every code, ``t``: under any scales a weight is ``base + step t[code]``, and ``t`` begins 0, 1.

    Even types have ``t[code] = code``.
    """
    weights, count = _block(name)[0], 1 << _places(name).shape[1]
    block = quantise(np.random.default_rng(1).standard_normal((1, weights)), name, np.ones(weights))
    every = np.repeat(np.arange(count)[:, None], weights, 1)
    values = dequantise(with_codes(np.repeat(block, count, 0), name, every), name).astype(np.float64)
    clearest = np.abs(values[1] - values[0]).argmax()
    found: np.ndarray = (values[:, clearest] - values[0, clearest]) / (values[1, clearest] - values[0, clearest])
    return found


def grid(data: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ``base`` and ``step`` of every weight, ``(rows, columns)`` each: see :func:`levels`."""
    count, size = _block(name)
    shape = (data.shape[0], data.shape[1] // size * count)
    base, one = (dequantise(with_codes(data, name, np.full(shape, code)), name) for code in (0, 1))
    return base, one - base


def _places(name: str) -> np.ndarray:
    found = code_bits(name)
    if found is None:
        raise InvalidInput(f"{name} is a lattice: a code says several weights.", "", "Round whole blocks of it.")
    return found


# ---- error feedback between and inside blocks


def feed_back(weight: torch.Tensor, upper: torch.Tensor, name: str) -> np.ndarray:
    r"""Return the bytes of a matrix whose later columns make up for the rounding of earlier ones, ``(rows, bytes of a row)``.

    GPTQ (arXiv 2210.17323) inside ggml's grids. With ``U' U = (X X' + damping)^-1``, every block of columns is taken as the
    columns before it have left it, ``W_b``. ggml chooses its scales, for columns that count ``1 / U_jj^2`` each: what an error
    costs after the later columns have made up for it. Then codes are chosen column by column, and ``(w_j - q_j) / U_jj`` is
    taken from the later columns in proportion to ``U_j,:``. Codes of a lattice stay as ggml chose them, and the error of the
    whole block is fed back, ``E U_bb^-1 U_b,:`` with ``E = W_b - Q_b``, which is the same step for all its columns together.

    Args:
        weight: ``(rows, columns)``.
        upper: ``U``, ``(columns, columns)``.
        name: A type of ``layerbudget.compressors.formats.TYPES`` that divides the columns.
    """
    work = torch.empty(weight.shape[::-1], dtype=torch.float32).copy_(weight.detach().T)
    upper, size = upper.to(work), int(find_format(name).group or 0)
    importance = upper.diagonal().square().reciprocal().numpy()
    found = []
    for start in range(0, work.shape[0], size):
        block, rest = work[start : start + size], work[start + size :]
        inside = upper[start : start + size, start : start + size]
        data = quantise(block.T.numpy(), name, importance[start : start + size])
        if code_bits(name) is None:
            error = block - torch.from_numpy(dequantise(data, name).T)
            errors = torch.linalg.solve_triangular(inside.T, error, upper=False)
        else:
            base, step = (torch.from_numpy(g.T.copy()) for g in grid(data, name))
            codes, errors = _choose_codes(block, inside, base, step, levels(name))
            data = with_codes(data, name, codes.T)
        rest -= upper[start : start + size, start + size :].T @ errors
        found.append(data)
    return np.concatenate(found, 1)


def _choose_codes(
    block: torch.Tensor, upper: torch.Tensor, base: torch.Tensor, step: torch.Tensor, table: np.ndarray
) -> tuple[np.ndarray, torch.Tensor]:
    """The codes of a block, column after column (rows of ``block``, which is used up), and the errors divided by ``U_jj``."""
    order = table.argsort(kind="stable")
    steps = torch.from_numpy(table[order]).to(block)
    between = (steps[1:] + steps[:-1]) / 2
    one_over = torch.where(step == 0, 0.0, 1 / step)
    places, errors = torch.empty(block.shape, dtype=torch.long), torch.empty_like(block)
    for j in range(len(block)):
        places[j] = torch.bucketize((block[j] - base[j]) * one_over[j], between)
        torch.sub(block[j], base[j] + step[j] * steps[places[j]], out=errors[j]).div_(upper[j, j])
        block[j + 1 :].addr_(upper[j, j + 1 :], errors[j], alpha=-1)
    return order[places.numpy()], errors
