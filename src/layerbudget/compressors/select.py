"""Exact selection: which entries go when a count is fixed. Partial selection instead of sorting.

On a processor scores are ranked chunk by chunk in the cache, by keys of whole numbers: a non-negative float32 is ordered as its
bits are, so ``bits * 2^32 + place`` is a key whose plain sort is the stable argsort of the scores; numpy sorts and partitions
whole numbers with vector instructions, an order of magnitude faster than an argsort.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ..errors import InvalidInput
from ..models.machine import in_threads

CHUNK = 1 << 18
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def share(count: int, sizes: Sequence[int]) -> list[int]:
    """Split an integer count in proportion to sizes, exactly (largest remainder, ties to the first).

    Args:
        count: Entries to distribute, ``0 <= count <= sum(sizes)``.
        sizes: Capacity of every part.

    Returns:
        One integer per part, ``sum == count`` and ``0 <= part <= size``.

    Raises:
        InvalidInput: The count does not fit.

    >>> share(5, [4, 4, 2])
    [2, 2, 1]
    """
    total = sum(sizes)
    if not 0 <= count <= total:
        raise InvalidInput(f"{count} entries cannot be taken from {total}.", f"The count must lie in 0..{total}.", "")
    if not total:
        return [0 for _ in sizes]
    parts = [count * s // total for s in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (-(count * sizes[i] % total), i))
    for i in order[: count - sum(parts)]:
        parts[i] += 1
    return parts


def smallest_per_row(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mark the ``counts[r]`` smallest entries of each row; ties go to the lower column (a stable sort's choice).

    Args:
        scores: ``(rows, columns)``, finite and float.
        counts: ``(rows,)`` integers in ``0..columns``.

    Returns:
        Boolean mask ``(rows, columns)`` with exactly ``counts[r]`` true entries in row r.
    """
    rows, columns = scores.shape
    counts = counts.to(scores.device)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=scores.device)
    for k in torch.unique(counts).tolist():
        pick = counts == k
        if k == 0:
            continue
        if k == columns:
            mask[pick] = True
            continue
        part = scores if bool(pick.all()) else scores[pick]
        mask[pick] = _smallest_k(part, k)
    return mask


def _smallest_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    threshold = kth_value(scores, k)[:, None]
    mask = scores <= threshold
    _trim_ties(mask, scores, threshold, mask.sum(dim=1) - k)
    return mask


def _trim_ties(mask: torch.Tensor, scores: torch.Tensor, threshold: torch.Tensor, surplus: torch.Tensor) -> None:
    """Unmark the last entries at the threshold in rows that have more than they should."""
    for r in torch.nonzero(surplus).flatten().tolist():
        ties = torch.nonzero(scores[r] == threshold[r]).flatten()
        mask[r, ties[len(ties) - int(surplus[r]) :]] = False


def kth_value(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th smallest value (1-based) of each row, shape ``(rows,)``; numpy's partition on the CPU."""
    if scores.device.type != "cpu":
        return torch.kthvalue(scores, k, dim=1).values
    held = (scores if scores.dtype in (torch.float32, torch.float64) else scores.float()).numpy()
    return torch.from_numpy(np.partition(held, k - 1, axis=1)[:, k - 1].copy()).to(scores.dtype)


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
    """Entries to take from each row so that the rows of a group are equal to within one; see :func:`row_counts`.

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


def threshold_inclusive(scores: torch.Tensor, index: int) -> torch.Tensor:
    """The references' rule: everything ``<=`` the entry at position ``index`` of the ascending order.

    It marks at least ``index + 1`` entries, and every tie with the threshold.

    Raises:
        InvalidInput: ``index`` is not a position of the matrix (a ratio of 1).
    """
    if not 0 <= index < scores.numel():
        raise InvalidInput(
            f"The references' threshold rule cannot prune {index} of {scores.numel()} entries.",
            f"At most {scores.numel() - 1} can be named.",
            "Use a ratio below 1, or leave parity mode.",
        )
    return scores <= kth_value(scores.reshape(1, -1), index + 1)


def row_counts(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Entries to take from each row so that the rows are equal to within one and the total is exact.

    Rows that give one more are those whose next smallest entry costs least.
    """
    rows, columns = scores.shape
    base, extra = divmod(count, rows)
    counts = torch.full((rows,), base, dtype=torch.long)
    if extra:
        following = kth_value(scores, base + 1).cpu()
        counts[smallest(following[None], extra)[0]] += 1
    return counts


def parse_pattern(pattern: str) -> tuple[int | None, int]:
    """Read ``n:m`` (n of every m consecutive inputs are zeroed) or ``n:8`` with a literal n (n per block from the plan).

    Returns:
        ``(zeroed, group)``; ``zeroed`` is None where each block has its own.

    Raises:
        InvalidInput: Not such a pattern.

    >>> parse_pattern("2:4"), parse_pattern("n:8")
    ((2, 4), (None, 8))
    """
    found = re.fullmatch(r"(\d+|n):(\d+)", pattern.strip())
    zeroed = None if not found or found.group(1) == "n" else int(found.group(1))
    group = int(found.group(2)) if found else 0
    if not found or group < 1 or (zeroed is not None and not 0 <= zeroed <= group):
        raise InvalidInput(
            f"{pattern!r} is not a pattern.",
            "Write n:m with 0 <= n <= m: n of every m consecutive inputs are zeroed.",
            "Use 2:4, or n:8 with a literal n to let every block have its own n.",
        )
    return zeroed, group


def check_group(columns: int, group: int, name: str) -> None:
    """Refuse a matrix whose rows do not split into groups.

    Raises:
        InvalidInput: The number of inputs is no multiple of the group.
    """
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

    in_threads(rank, list(_chunks(lines, columns)))
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

    in_threads(look, list(_chunks(rows, columns)))
    counts = torch.full((rows,), base)
    if extra:
        counts[smallest(following[None], extra)[0]] += 1
    threshold = torch.where(counts > base, following, last)[:, None]
    mask = torch.empty(rows, columns, dtype=torch.bool)

    def mark(part: slice) -> None:
        held = scores(part)
        torch.le(held, threshold[part], out=mask[part])
        _trim_ties(mask[part], held, threshold[part], mask[part].sum(dim=1) - counts[part])

    in_threads(mark, list(_chunks(rows, columns)))
    return mask


def zeroed(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix with zeros where the mask is true; by products of whole numbers, which are faster than branches."""
    whole = _WHOLE.get(weight.element_size())
    if weight.device.type != "cpu" or whole is None or not weight.is_floating_point():
        return weight.masked_fill(mask, 0)
    return (weight.view(whole) * ~mask).view(weight.dtype)
