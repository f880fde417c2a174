"""Order of scores on a processor: which entries go first, chunk by chunk in the cache, by keys of whole numbers.

A non-negative float32 is ordered as its bits are, so ``bits * 2^32 + place`` is a key whose plain sort is the stable argsort of
the scores; numpy sorts and partitions whole numbers with vector instructions, an order of magnitude faster than an argsort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..models.machine import in_threads
from .select import row_counts, smallest, smallest_per_row

CHUNK = 1 << 18
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Rows that together have about as many entries as a cache holds."""
    size = max(1, CHUNK // max(columns, 1))
    yield from (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def ranked(scores: torch.Tensor, low: torch.Tensor, width: int) -> torch.Tensor:
    """Places of some of the smallest entries of every line, in ascending order; ties by place.

    Args:
        scores: ``(lines, columns)``, no NaN.
        low: Rank of the first, ``(lines,)``.
        width: How many.

    Returns:
        ``(lines, width)``: ranks ``low[r]`` to ``low[r] + width - 1`` of line r.

    >>> ranked(torch.tensor([[3.0, 1.0, 2.0, 1.0]]), torch.tensor([1]), 2)
    tensor([[3, 2]])
    """
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or scores.shape[1] >= 1 << 31:
        wanted = low[:, None] + torch.arange(width, device=scores.device)
        return scores.argsort(dim=1, stable=True).gather(1, wanted)
    lines, columns = scores.shape
    found, places = np.empty((lines, width), np.int64), np.arange(columns)
    starts, same = low.numpy(), bool((low == low[0]).all()) if lines else True

    def rank(part: slice) -> None:
        keys = _keys(scores[part], places)
        if same:
            keys = _between(keys, int(starts[0]), width)
        else:
            keys.sort(axis=1)
            keys = np.take_along_axis(keys, starts[part, None] + np.arange(width), 1)
        np.bitwise_and(keys, 0xFFFFFFFF, out=found[part])

    in_threads(rank, list(chunks(lines, columns)))
    return torch.from_numpy(found)


def _keys(scores: torch.Tensor, places: np.ndarray) -> np.ndarray:
    bits = (scores + 0.0).numpy().view(np.int32)  # one zero, not two
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    keys <<= 32
    keys |= places
    return keys


def _between(keys: np.ndarray, low: int, width: int) -> np.ndarray:
    """Ranks ``low`` to ``low + width - 1`` of every line, sorted."""
    if low > 0:
        keys.partition(low, axis=1)
        keys = keys[:, low:].copy()
    if width < keys.shape[1]:
        keys.partition(width, axis=1)
        keys = keys[:, :width].copy()
    keys.sort(axis=1)
    return keys


def smallest_evenly(scores: Callable[[slice], torch.Tensor], shape: tuple[int, int], count: int) -> torch.Tensor:
    """Mark ``count`` entries of a matrix, the smallest of every row, rows equal to within one.

    What :func:`~layerbudget.compressors.select.row_counts` and :func:`~layerbudget.compressors.select.smallest_per_row` say,
    with scores that are made twice rather than kept.

    Args:
        scores: Scores of some rows, ``(n, columns)``.
        shape: Rows and columns.
        count: Entries to mark.

    Returns:
        Boolean mask of that shape.
    """
    rows, columns = shape
    first = scores(slice(0, 1))
    if first.device.type != "cpu" or first.dtype != torch.float32:
        everything = scores(slice(0, rows))
        return smallest_per_row(everything, row_counts(everything, count))
    base, extra = divmod(count, rows)
    last, following = torch.full((rows,), -torch.inf), torch.full((rows,), torch.inf)

    def look(part: slice) -> None:
        held = scores(part).numpy()
        if base < columns:
            held = np.partition(held, base, axis=1)
            following[part] = torch.from_numpy(held[:, base])
        if base:
            last[part] = torch.from_numpy(held[:, :base].max(axis=1))

    in_threads(look, list(chunks(rows, columns)))
    counts = torch.full((rows,), base)
    if extra:
        counts[smallest(following[None], extra)[0]] += 1
    threshold = torch.where(counts > base, following, last)[:, None]
    mask = torch.empty(rows, columns, dtype=torch.bool)

    def mark(part: slice) -> None:
        held = scores(part)
        torch.le(held, threshold[part], out=mask[part])
        surplus = mask[part].sum(dim=1) - counts[part]
        for r in torch.nonzero(surplus).flatten().tolist():
            ties = torch.nonzero(held[r] == threshold[part][r]).flatten()
            mask[part][r, ties[len(ties) - int(surplus[r]) :]] = False

    in_threads(mark, list(chunks(rows, columns)))
    return mask


def zeroed(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix with zeros where the mask is true; by products of whole numbers, which are faster than branches."""
    whole = _WHOLE.get(weight.element_size())
    if weight.device.type != "cpu" or whole is None or not weight.is_floating_point():
        return weight.masked_fill(mask, 0)
    return (weight.view(whole) * ~mask).view(weight.dtype)
