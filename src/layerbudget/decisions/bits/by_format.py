"""Formats without a program: one for all, llama.cpp's mixes, first and last layers protected. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ...records import Block

_LAYER = re.compile(r"\.(\d+)\.")
_VALUES = re.compile(r"\.(v_proj|down_proj|w2|c_proj|fc2|output\.dense)$")


def layer_of(block: Block) -> int | None:
    """Number of the layer that a block lies in; None for embedding and head."""
    found = _LAYER.search(block.modules[0].name)
    return int(found.group(1)) if found else None


def _order(size: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Formats by their total size where all blocks have them, the smallest first."""
    total = np.where(there, size, 0).sum(0) / np.maximum(there.sum(0), 1)
    return np.argsort(total, kind="stable")


def _nearest(size: np.ndarray, there: np.ndarray, wanted: int, order: np.ndarray) -> np.ndarray:
    """A format for every block: the wanted one, or the next larger (else smaller) that it has, ``(K,)``."""
    place = list(order).index(wanted)
    ranked = [*order[place:], *order[:place][::-1]]
    return np.array([next(j for j in ranked if row[j]) for row in there])


def _spent(size: np.ndarray, chosen: np.ndarray) -> int:
    return int(size[np.arange(len(size)), chosen].sum())


def smallest(size: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The smallest format of every block, ``(K,)``."""
    return np.argmin(np.where(there, size, np.iinfo(np.int64).max), axis=1)


def uniform(size: np.ndarray, there: np.ndarray, limit: int) -> np.ndarray:
    """The largest format that fits for all blocks; what is left buys the next one for blocks spread evenly over the model.

    Args:
        size: Bytes, ``(K, m)``.
        there: Which formats a block has, ``(K, m)``.
        limit: Bytes.

    Returns:
        A format of every block, ``(K,)``.
    """
    return _protect(size, there, np.zeros(len(size), dtype=bool), limit)


def _spread(size: np.ndarray, low: np.ndarray, high: np.ndarray, limit: int) -> np.ndarray:
    """As many blocks as fit get the higher format, in the order of a van der Corput sequence over depth."""
    chosen, left = low.copy(), limit - _spent(size, low)
    turns = sorted(range(len(low)), key=lambda i: int(f"{i:016b}"[::-1], 2))
    for i in turns:
        more = int(size[i, high[i]] - size[i, low[i]])
        if 0 < more <= left:
            chosen[i], left = high[i], left - more
    return chosen


def _protect(size: np.ndarray, there: np.ndarray, mask: np.ndarray, limit: int) -> np.ndarray:
    """The largest format that fits for all; what is left raises the protected blocks by up to two formats, then the others."""
    order = _order(size, there)
    ways = [_nearest(size, there, j, order) for j in order]
    fits = [n for n, way in enumerate(ways) if _spent(size, way) <= limit]
    chosen, base = (ways[fits[-1]], fits[-1]) if fits else (smallest(size, there), 0)
    for steps, who in ((1, mask), (2, mask), (1, ~mask)):
        higher = ways[min(base + steps, len(ways) - 1)]
        chosen = _spread(size, chosen, np.where(who, higher, chosen), limit)
    return chosen


def mix(blocks: Sequence[Block], size: np.ndarray, there: np.ndarray, limit: int) -> np.ndarray:
    """As llama.cpp's ``_M`` mixes: a better format for embedding, head, and values and down projections of some layers.

    These are the layers of its ``use_more_bits``: the first and last eighth, and every third between.
    """
    depth = 1 + max((n for n in map(layer_of, blocks) if n is not None), default=0)

    def more(block: Block) -> bool:
        i = layer_of(block)
        if i is None:
            return True
        chosen = i < depth // 8 or i >= 7 * depth // 8 or (i - depth // 8) % 3 == 2
        return chosen and any(_VALUES.search(m.name) for m in block.modules)

    return _protect(size, there, np.array([more(b) for b in blocks]), limit)


def ends(blocks: Sequence[Block], size: np.ndarray, there: np.ndarray, limit: int) -> np.ndarray:
    """A better format for embedding, head, and the first and last eighth of the layers (one at least)."""
    depth = 1 + max((n for n in map(layer_of, blocks) if n is not None), default=0)
    edge = max(1, depth // 8)
    numbers = [layer_of(b) for b in blocks]
    return _protect(size, there, np.array([n is None or n < edge or n >= depth - edge for n in numbers]), limit)
