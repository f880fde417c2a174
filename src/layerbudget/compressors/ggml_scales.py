"""Scales of llama.cpp's types: where they lie in a block, read and written, so that other scales may stand beside other codes.

:mod:`layerbudget.compressors.ggml` finds by trying where codes lie. Scales of a super-block are whole numbers of 4, 6 or 8 bits
under numbers of 16 bits, and stand where ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp put them. So do the code words of
lattices and the signs of their weights.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from .descent import Codes, Layout
from .formats import find_format
from .ggml import codes_of, dequantise, quantise, with_codes


def _run(byte: int, low: int, width: int) -> list[int]:
    return [8 * byte + low + i for i in range(width)]


_SIX = [_run(4 + j, 0, 6) if j < 4 else _run(8 + j, 0, 4) + _run(j, 6, 2) for j in range(8)]  # of Q4_K and Q5_K
_SIX_MINIMA = [_run(8 + j, 0, 6) if j < 4 else _run(8 + j, 4, 4) + _run(4 + j, 6, 2) for j in range(8)]
SIGNS = 8  # weights of a lattice whose signs stand together
_BYTES, _OCTETS, _NIBBLES = range(64), range(32), [(j // 2, j % 2 * 4) for j in range(16)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Where scales lie in a block of a type.

    Attributes:
        d: Byte of the step in float16.
        c: Byte of the minimum in float16; None where there is none.
        scales: Bits of every s, the lowest digit first.
        minima: Bits of every m.
        zero: What s = 0 is stored as; None where s is a two's complement.
        sign: Of the minimum: -1 where it is taken away.
        unit: What d is stored times. Of a lattice s is ``1 + 2 x`` for a stored x.
        words: Bits of the number of every code word, of a lattice.
        signs: Bits of the signs of every ``SIGNS`` weights: of seven of them where they have an even number of minuses.
    """

    d: int
    c: int | None = None
    scales: list[list[int]] | None = None
    minima: list[list[int]] | None = None
    zero: int | None = 0
    sign: int = 1
    unit: float = 1.0
    words: list[list[int]] | None = None
    signs: list[list[int]] | None = None


FIELDS = {
    "Q4_0": Fields(d=0),
    "Q4_1": Fields(d=0, c=2),
    "Q5_0": Fields(d=0),
    "Q5_1": Fields(d=0, c=2),
    "Q8_0": Fields(d=0),
    "IQ4_NL": Fields(d=0),
    "Q2_K": Fields(d=80, c=82, scales=[_run(j, 0, 4) for j in range(16)], minima=[_run(j, 4, 4) for j in range(16)], sign=-1),
    "Q3_K": Fields(
        d=108, scales=[_run(96 + j % 8, j // 8 * 4, 4) + _run(104 + j % 4, j // 4 * 2, 2) for j in range(16)], zero=32
    ),
    "Q4_K": Fields(d=0, c=2, scales=_SIX, minima=_SIX_MINIMA, sign=-1),
    "Q5_K": Fields(d=0, c=2, scales=_SIX, minima=_SIX_MINIMA, sign=-1),
    "Q6_K": Fields(d=208, scales=[_run(192 + j, 0, 8) for j in range(16)], zero=None),
    "IQ4_XS": Fields(d=0, scales=[_run(4 + j // 2, j % 2 * 4, 4) + _run(2 + j // 4, j % 4 * 2, 2) for j in range(8)], zero=32),
    "IQ2_XXS": Fields(
        d=0,
        unit=8,
        words=[_run(2 + j // 4 * 8 + j % 4, 0, 8) for j in _OCTETS],
        signs=[_run(6 + j // 4 * 8, j % 4 * 7, 7) for j in _OCTETS],
        scales=[_run(9 + j * 8, 4, 4) for j in range(8)],
    ),
    "IQ2_XS": Fields(
        d=0,
        unit=8,
        words=[_run(2 + 2 * j, 0, 9) for j in _OCTETS],
        signs=[_run(2 + 2 * j, 9, 7) for j in _OCTETS],
        scales=[_run(66 + byte, low, 4) for byte, low in _NIBBLES],
    ),
    "IQ2_S": Fields(
        d=0,
        unit=8,
        words=[_run(2 + j, 0, 8) + _run(66 + j // 4, j % 4 * 2, 2) for j in _OCTETS],
        signs=[_run(34 + j, 0, 8) for j in _OCTETS],
        scales=[_run(74 + byte, low, 4) for byte, low in _NIBBLES],
    ),
    "IQ3_XXS": Fields(
        d=0,
        unit=4,
        words=[_run(2 + j, 0, 8) for j in _BYTES],
        signs=[_run(66 + j // 4 * 4, j % 4 * 7, 7) for j in _OCTETS],
        scales=[_run(69 + 4 * j, 4, 4) for j in range(8)],
    ),
    "IQ3_S": Fields(
        d=0,
        words=[_run(2 + j, 0, 8) + _run(66 + j // 8, j % 8, 1) for j in _BYTES],
        signs=[_run(74 + j, 0, 8) for j in _OCTETS],
        scales=[_run(106 + byte, low, 4) for byte, low in _NIBBLES[:8]],
    ),
}


def _get(blocks: np.ndarray, places: list[list[int]]) -> np.ndarray:
    """Whole numbers that stand in bits of every block, ``(numbers of a row, rows)``."""
    bits = np.array(places)
    value = ((blocks[..., bits // 8] >> (bits % 8)).astype(np.int32) & 1) @ (1 << np.arange(bits.shape[1]))
    return value.reshape(len(blocks), -1).T


def _put(blocks: np.ndarray, places: list[list[int]], values: np.ndarray) -> None:
    """Write whole numbers, as :func:`_get` gives them."""
    each = values.T.astype(np.int32).reshape(*blocks.shape[:2], len(places))
    for j, bits in enumerate(places):
        for digit, bit in enumerate(bits):
            blocks[..., bit // 8] &= np.uint8(255 ^ (1 << bit % 8))
            blocks[..., bit // 8] |= ((each[..., j] >> digit & 1) << bit % 8).astype(np.uint8)


def _blocks(data: np.ndarray, name: str) -> np.ndarray:
    return np.ascontiguousarray(data).reshape(len(data), -1, find_format(name).block_bytes)


def read_scales(data: np.ndarray, name: str) -> tuple[np.ndarray, ...]:
    """Return d and c, ``(blocks of a row, rows)``, and s and m, ``(subs of a row, rows)``, float32, of the bytes of a matrix.

    A weight is ``d s t + c m``; what a type does not have is one, a minimum zero.
    """
    fields, blocks = FIELDS[name], _blocks(data, name)

    def half(byte: int) -> np.ndarray:
        return np.ascontiguousarray(blocks[..., byte : byte + 2]).view(np.float16)[..., 0].T.astype(np.float32)

    d = half(fields.d) / np.float32(fields.unit)
    c = np.zeros_like(d) if fields.c is None else fields.sign * half(fields.c)
    s = np.ones_like(d) if fields.scales is None else _get(blocks, fields.scales).astype(np.float32)
    if fields.words is not None:
        s = 1 + 2 * s
    elif fields.scales is not None:
        s = s - fields.zero if fields.zero is not None else np.where(s >= 128, s - 256, s)
    m = np.ones_like(s if fields.minima is not None else d) if fields.minima is None else _get(blocks, fields.minima)
    return d, c, s, np.ones_like(s) if fields.minima is None else m.astype(np.float32)


def with_scales(data: np.ndarray, name: str, d: np.ndarray, c: np.ndarray, s: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Return the bytes with other scales, as :func:`read_scales` gives them, over the same codes.

    Args:
        data: Bytes of a matrix, ``(rows, bytes of a row)``.
        name: Their type, as in ``Q4_K``.
        d: Scales of the blocks, ``(blocks of a row, rows)``.
        c: Offsets of the blocks, in the same shape.
        s: Scales of the subs, ``(subs of a row, rows)``.
        m: Minima of the subs, in the same shape.
    """
    fields, blocks = FIELDS[name], _blocks(data, name).copy()

    def put_half(byte: int, values: np.ndarray) -> None:
        blocks[..., byte : byte + 2] = np.ascontiguousarray(values.T.astype(np.float16))[..., None].view(np.uint8)

    put_half(fields.d, d * np.float32(fields.unit))
    if fields.c is not None:
        put_half(fields.c, fields.sign * c)
    if fields.words is not None:
        s = (s - 1) / 2
    elif fields.scales is not None:
        s = s + fields.zero if fields.zero is not None else np.where(s < 0, s + 256, s)
    if fields.scales is not None:
        _put(blocks, fields.scales, s)
    if fields.minima is not None:
        _put(blocks, fields.minima, m)
    return blocks.reshape(data.shape)


@functools.cache
def absolute_levels(name: str) -> np.ndarray:
    """Return the t of every code, whole numbers, with which a weight is ``d s t + c m``."""
    block = quantise(np.random.default_rng(2).standard_normal((1, find_format(name).group or 1)), name)
    d, c, s, m = (part[:, 0] for part in read_scales(block, name))
    each, sub = len(s) // len(d), (find_format(name).group or 1) // len(s)
    step, base = (np.repeat(np.repeat(x, each) * y, sub) for x, y in ((d, s), (c, m)))
    clearest = np.abs(step).argmax()
    values = [dequantise(with_codes(block, name, code), name)[0, clearest] for code in range(1 << find_format(name).bits)]
    return np.round((np.array(values) - base[clearest]) / step[clearest])


@functools.cache
def code_words(name: str) -> np.ndarray:
    """Return the t of the weights of every code word of a lattice, without their signs, ``(words, weights of a word)``."""
    fields, form = FIELDS[name], find_format(name)
    places = fields.words or []
    number = np.arange(1 << len(places[0]))
    blocks = np.zeros((len(number), 1, form.block_bytes), dtype=np.uint8)
    blocks[..., fields.d : fields.d + 2] = np.array([fields.unit], dtype=np.float16).view(np.uint8)
    _put(blocks, places[:1], number[None])
    return dequantise(blocks[:, 0], name)[:, : (form.group or 1) // len(places)].round()


def _lattice_of(name: str) -> Layout:
    """Return what a lattice of :func:`layout_of` can hold."""
    fields, block = FIELDS[name], find_format(name).group or 1
    scales, words = fields.scales or [], torch.from_numpy(code_words(name))
    positive = words.unique()
    return Layout(
        block=block,
        sub=block // len(scales),
        levels=torch.cat([-positive.flip(0), positive]),
        half=torch.float16,
        unit=fields.unit,
        scales=(1, 2 * (1 << len(scales[0])) - 1),
        words=words,
        even_signs=len((fields.signs or [[]])[0]) < SIGNS,
    )


def layout_of(name: str) -> Layout:
    """Return what a type of ``FIELDS`` can hold."""
    fields, form = FIELDS[name], find_format(name)
    if fields.words is not None:
        return _lattice_of(name)
    block, t = form.group or 1, np.sort(absolute_levels(name))
    if name == "Q8_0":
        t = t[1:]  # ggml never writes -128: some of its kernels negate a code in its byte
    width = 0 if fields.scales is None else len(fields.scales[0])
    zero = 1 << (width - 1) if fields.zero is None else fields.zero
    return Layout(
        block=block,
        sub=block if fields.scales is None else block // len(fields.scales),
        levels=torch.from_numpy(t).to(torch.float32),
        half=torch.float16,
        scales=None if fields.scales is None else (-zero, (1 << width) - 1 - zero),
        minima=None if fields.c is None else (1, 1) if fields.minima is None else (0, (1 << len(fields.minima[0])) - 1),
    )


def read_codes(data: np.ndarray, name: str) -> Codes:
    """Return codes and scales of a matrix, transposed."""
    level = _read_words(data, name) if FIELDS[name].words else absolute_levels(name).astype(np.float32)[codes_of(data, name)].T
    d, c, s, m = (torch.from_numpy(np.ascontiguousarray(part)) for part in read_scales(data, name))
    return Codes(level=torch.from_numpy(np.ascontiguousarray(level)), d=d, c=c, s=s, m=m)


def write_codes(data: np.ndarray, name: str, codes: Codes) -> np.ndarray:
    """Return the bytes with other codes and scales, as :func:`read_codes` gives them."""
    scaled = with_scales(data, name, *(part.numpy() for part in (codes.d, codes.c, codes.s, codes.m)))
    if FIELDS[name].words is not None:
        return _with_words(scaled, name, codes.level.numpy())
    t = absolute_levels(name)
    order = t.argsort(kind="stable").astype(np.uint8)
    code = order[np.searchsorted(np.sort(t), codes.level.T.numpy())]
    return with_codes(scaled, name, code)


def _read_words(data: np.ndarray, name: str) -> np.ndarray:
    """The t of every weight of a lattice, with its sign, ``(columns, rows)``."""
    fields, blocks, words = FIELDS[name], _blocks(data, name), code_words(name)
    numbers, bits = _get(blocks, fields.words or []), _get(blocks, fields.signs or [])
    minus = (bits[:, None] >> np.arange(SIGNS)[:, None]) & 1
    minus[:, -1] |= minus[:, :-1].sum(1) & 1 if len((fields.signs or [[]])[0]) < SIGNS else 0
    level = words[numbers].transpose(0, 2, 1).reshape(-1, len(data))
    return level * (1 - 2 * minus.reshape(level.shape)).astype(np.float32)


def _with_words(data: np.ndarray, name: str, level: np.ndarray) -> np.ndarray:
    """The bytes with other words and signs, as :func:`_read_words` gives them."""
    fields, blocks, words = FIELDS[name], _blocks(data, name).copy(), code_words(name)
    values = np.unique(words)
    digits = len(values) ** np.arange(words.shape[1])
    number = np.zeros(len(values) ** words.shape[1], dtype=np.int32)
    number[np.searchsorted(values, words) @ digits] = np.arange(len(words))
    each = np.searchsorted(values, np.abs(level)).reshape(-1, words.shape[1], len(data))
    _put(blocks, fields.words or [], number[np.einsum("wkr,k->wr", each, digits)])
    minus = (level < 0).reshape(-1, SIGNS, len(data))
    _put(blocks, fields.signs or [], np.einsum("okr,k->or", minus, 1 << np.arange(SIGNS)))
    return blocks.reshape(data.shape)
