"""Exact selection: which entries go when a count is fixed. Partial selection instead of sorting.

On a processor scores are ranked chunk by chunk in the cache, by keys of whole numbers: a non-negative float32 is ordered as its
bits are, so ``bits * 2^32 + place`` is a key whose plain sort is the stable argsort of the scores; numpy sorts and partitions
whole numbers with vector instructions, an order of magnitude faster than an argsort.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..errors import InvalidInput
from ..models.machine import in_threads

CHUNK = 1 << 18


def share(count: int, sizes: Sequence[int]) -> list[int]:
    """Split an integer count in proportion to sizes, exactly (largest remainder, ties to the first); no part exceeds its size.

    Raises:
        InvalidInput: The count is negative or larger than all sizes together.

    >>> share(5, [4, 4, 2])
    [2, 2, 1]
    """
    total = sum(sizes)
    if not 0 <= count <= total:
        raise InvalidInput(f"{count} entries cannot be taken from {total}.", f"The count must lie in 0..{total}.", "")
    parts = [count * s // max(total, 1) for s in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (-(count * sizes[i] % max(total, 1)), i))
    for i in order[: count - sum(parts)]:
        parts[i] += 1
    return parts


def smallest_per_row(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mark exactly the ``counts[r]`` smallest entries of each row; ties go to the lower column (a stable sort's choice).

    Args:
        scores: ``(rows, columns)``, finite and float.
        counts: ``(rows,)`` integers in ``0..columns``.
    """
    rows, columns = scores.shape
    counts = counts.to(scores.device)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=scores.device)
    for k in torch.unique(counts).tolist():
        pick = counts == k
        if k == columns:
            mask[pick] = True
        elif k:
            part = scores if bool(pick.all()) else scores[pick]
            threshold = kth_value(part, k)[:, None]
            chosen = part <= threshold
            for r in torch.nonzero(chosen.sum(dim=1) > k).flatten().tolist():
                ties = torch.nonzero(part[r] == threshold[r]).flatten()
                chosen[r, ties[len(ties) + k - int(chosen[r].sum()) :]] = False
            mask[pick] = chosen
    return mask


def kth_value(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th smallest value (1-based) of each row, shape ``(rows,)``; numpy's partition on the CPU."""
    if scores.device.type != "cpu":
        return torch.kthvalue(scores, k, dim=1).values
    values = (scores if scores.dtype in (torch.float32, torch.float64) else scores.float()).numpy()
    kth = np.empty(len(values), values.dtype)

    def partition(part: slice) -> None:
        kth[part] = np.partition(values[part], k - 1, axis=1)[:, k - 1]

    in_threads(partition, list(_chunks(*values.shape)))
    return torch.from_numpy(kth).to(scores.dtype)


def smallest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the ``count`` smallest entries of a whole matrix; ties go to the lower flat index."""
    flat = scores.reshape(1, -1)
    return smallest_per_row(flat, torch.tensor([count])).reshape(scores.shape)


def by_groups(x: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    """Groups of ``size`` rows side by side, ``(rows, n) -> (groups, size * n)``; the last one is filled up."""
    short = -x.shape[0] % size
    if short:
        x = torch.cat((x, x.new_full((short, x.shape[1]), fill)))
    return x.reshape(-1, size * x.shape[1])


def smallest_per_group_of_rows(scores: torch.Tensor, size: int, counts: torch.Tensor) -> torch.Tensor:
    """Mark the ``counts[g]`` smallest entries of every group of ``size`` rows; ties go to the lower flat index."""
    mask = smallest_per_row(by_groups(scores, size, float("inf")), counts)
    return mask.reshape(-1, scores.shape[1])[: scores.shape[0]]


def spread_over_rows(scores: torch.Tensor, size: int, counts: torch.Tensor) -> torch.Tensor:
    """Entries to take from each row so that the rows of a group are equal to within one.

    Rows that give one more are those whose next smallest entry costs least.

    Args:
        scores: ``(rows, columns)``.
        size: Rows of a group; the last one may be smaller.
        counts: ``(groups,)`` entries to take from every group.
    """
    rows, columns = scores.shape
    members = torch.full((len(counts),), size)
    members[-1] = rows - size * (len(counts) - 1)
    base, extra = counts // members, counts % members
    each = base.repeat_interleave(members)
    if extra.any():
        following = torch.empty(rows)
        for k in torch.unique(each).tolist():
            pick = (each == k).to(scores.device)
            following[pick.cpu()] = kth_value(scores[pick], min(k + 1, columns)).float().cpu()
        each = each + smallest_per_group_of_rows(following[:, None], size, extra)[:, 0]
    return each


def parse_pattern(pattern: str) -> tuple[int | None, int]:
    """Read ``n:m`` (n of every m consecutive inputs are zeroed) or ``n:8`` with a literal n (n per block from the plan).

    Returns:
        ``(zeroed, group)``; ``zeroed`` is None where each block has its own.

    Raises:
        InvalidInput: Not such a pattern.

    >>> parse_pattern("2:4"), parse_pattern("n:8")
    ((2, 4), (None, 8))
    """
    match = re.fullmatch(r"(\d+|n):(\d+)", pattern.strip())
    zeroed = None if not match or match.group(1) == "n" else int(match.group(1))
    group = int(match.group(2)) if match else 0
    if not match or group < 1 or (zeroed is not None and not 0 <= zeroed <= group):
        raise InvalidInput(
            f"{pattern!r} is not a pattern.",
            "Write n:m with 0 <= n <= m: n of every m consecutive inputs are zeroed.",
            "Use 2:4, or n:8 with a literal n to let every block have its own n.",
        )
    return zeroed, group


def check_group(columns: int, group: int, name: str) -> None:
    """Refuse a matrix whose rows do not split into groups."""
    if columns % group:
        raise InvalidInput(
            f"{name} has {columns} inputs, which do not split into groups of {group}.",
            "The inputs must be a multiple of the group.",
            "Exclude the matrix from the plan, or use another pattern.",
        )


def smallest_per_group(scores: torch.Tensor, zeroed: int, group: int) -> torch.Tensor:
    """Mark the ``zeroed`` smallest entries in every group of ``group`` consecutive columns, ties to the lower column."""
    rows, columns = scores.shape
    grouped = scores.reshape(rows * columns // group, group)
    order = torch.sort(grouped, dim=1, stable=True).indices[:, :zeroed]
    mask = torch.zeros_like(grouped, dtype=torch.bool)
    return mask.scatter_(1, order, True).reshape(rows, columns)


def _chunks(rows: int, columns: int) -> Iterator[slice]:
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
    chosen, places = np.empty((lines, width), np.int64), np.arange(columns)
    starts, same = low.numpy(), bool((low == low[0]).all()) if lines else True

    def rank(part: slice) -> None:
        keys = _keys(scores[part], places)
        if same:
            keys = _between(keys, int(starts[0]), width)
        else:
            keys.sort(axis=1)
            keys = np.take_along_axis(keys, starts[part, None] + np.arange(width), 1)
        np.bitwise_and(keys, 0xFFFFFFFF, out=chosen[part])

    in_threads(rank, list(_chunks(lines, columns)))
    return torch.from_numpy(chosen)


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
