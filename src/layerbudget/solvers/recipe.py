r"""Formats and capacities under one budget of bytes: what is saved on a weight's bits buys the rank of an adapter.

    minimise    sum_i d_i(j_i)  -  x sum_k g_k(r_k)
    subject to  sum_i c_i(j_i)  +  sum_k a_k r_k  <=  B,      j_i in J_i,   l_k <= r_k <= u_k,   c, a whole bytes

``d_i(j)`` is what format j of matrix i costs the output and ``g_k(r)`` what rank r of matrix k is worth, both in nats per
token; ``x`` says what a nat gained by training is worth in nats of damage. Nothing but the budget couples the two, and a rank
is one of ``u_k - l_k + 1`` alternatives as a format is one of J: **the recipe is one multiple-choice knapsack**, solved exactly
with the certificate of :mod:`layerbudget.solvers.choices`. Pairs (format, rank) of one matrix need no row each, since
objective and bytes are sums of the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput, LengthMismatch
from .choices import Choice, choose
from .inputs import number


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """Formats and ranks with the certificate of both.

    Attributes:
        chosen: Format of every matrix, ``(K,)``.
        ranks: Rank of every adapter, ``(M,)``.
        damage: ``sum_i d_i``, nats per token.
        gain: ``sum_k g_k``.
        choice: The program's own answer: status, bound, price of a byte.
    """

    chosen: np.ndarray
    ranks: np.ndarray
    damage: float
    gain: float
    choice: Choice


def mix_recipe(
    damage: ArrayLike, size: ArrayLike, increments: Sequence[ArrayLike], cost: ArrayLike, budget: int, *, lower: ArrayLike = 0,
    upper: ArrayLike | None = None, multiple: int = 1, exchange: float = 1.0,
) -> Recipe:  # fmt: skip
    """Give every matrix a format and every adapter a rank.

    Args:
        damage: Of formats, ``(K, m)``; infinite where a matrix does not have one.
        size: Bytes of formats, ``(K, m)``.
        increments: Gain of the first, second, ... rank of every adapter, zero or more; M rows, whose lengths are caps too.
        cost: Bytes of one rank, whole numbers, ``(M,)``.
        budget: Bytes of everything.
        lower: Smallest rank.
        upper: Largest rank.
        multiple: Ranks are multiples of this.
        exchange: ``x``.

    Raises:
        InfeasibleBudget: The smallest recipe is larger.
        InvalidInput: Negative gains, floors above caps, broken bytes, a multiple below one.
        LengthMismatch: Rows and costs of different numbers.

    >>> found = mix_recipe([[9.0, 1.0], [2.0, 1.0]], [[2, 4], [2, 4]], [[3.0, 0.5]], [2], 8)
    >>> found.chosen.tolist(), found.ranks.tolist(), found.damage, found.gain, found.choice.status
    ([1, 0], [1], 3.0, 3.0, 'optimal')
    """
    d, c = np.array(damage, dtype=np.float64, ndmin=2), np.array(size, ndmin=2)
    worth = number(exchange, "exchange")
    a, count = np.asarray(cost), len(increments)
    if a.shape != (count,) or worth < 0:
        raise LengthMismatch(f"{count} adapters, costs of shape {a.shape}, exchange {exchange}.", "One cost each.", "")
    low, high = (
        np.broadcast_to(np.asarray(x, dtype=np.float64), (count,)) for x in (lower, np.inf if upper is None else upper)
    )
    menu = [_ranks(k, row, int(low[k]), float(high[k]), multiple) for k, row in enumerate(increments)]
    width = max(d.shape[1], *(len(r) for r, _ in menu)) if menu else d.shape[1]
    both, bytes_ = np.full((len(d) + len(menu), width), np.inf), np.zeros((len(d) + len(menu), width))
    both[: len(d), : d.shape[1]], bytes_[: len(d), : d.shape[1]] = d, c
    for k, (ranks, gain) in enumerate(menu):
        both[len(d) + k, : len(ranks)], bytes_[len(d) + k, : len(ranks)] = -worth * gain, a[k] * ranks
    found = choose(both, bytes_, budget)
    picked = [(ranks[j], gain[j]) for (ranks, gain), j in zip(menu, found.chosen[len(d) :], strict=True)]
    return Recipe(
        chosen=found.chosen[: len(d)], ranks=np.array([r for r, _ in picked], dtype=np.int64),
        damage=float(d[np.arange(len(d)), found.chosen[: len(d)]].sum()), gain=float(sum(g for _, g in picked)), choice=found,
    )  # fmt: skip


def _ranks(k: int, row: ArrayLike, low: int, high: float, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """The ranks that an adapter may have, and what each is worth."""
    gain = np.asarray(row, dtype=np.float64)
    top = int(min(len(gain), high))
    if multiple < 1 or not np.isfinite(gain).all() or (gain < 0).any():
        raise InvalidInput(
            f"The gains of adapter {k} are negative or not finite, or multiple is {multiple}.", "They are zero or more.", ""
        )
    ranks = np.arange(-(-low // multiple) * multiple, top + 1, multiple)
    if low < 0 or not ranks.size:
        raise InvalidInput(f"Adapter {k} needs at least {low} and may have at most {top}.", "", "Lower the floor.")
    return ranks, np.concatenate(([0.0], np.cumsum(gain)))[ranks]
