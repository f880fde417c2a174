"""One matrix's Kronecker factors and gradient, as sums or as the tokens that they are sums of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Cache = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Sums:
    """One matrix by sums.

    Attributes:
        a: ``(d_in, d_in)`` mean of ``a a'``, float64; matrices with one input share it.
        g: ``(d_out, d_out)`` ``(1/N) sum b~ b~'``, float64.
        parts: ``(J, d_out, d_in)`` gradients of the groups, divided by N.
        cache: Of whatever is derived from ``a``, by name; shared as ``a`` is.
    """

    a: torch.Tensor
    g: torch.Tensor
    parts: torch.Tensor
    cache: Cache


@dataclasses.dataclass(eq=False)
class Tokens:
    """One matrix by tokens, in the order in which they came.

    Attributes:
        x: ``(m, d_in)`` inputs; zero rows for padding.
        b: ``(m, d_out)`` output gradients of the loss divided by N.
        drawn: ``(R m, d_out)`` output gradients under drawn labels.
        positions: P.
        scale: ``N R``: ``G = drawn' drawn / scale``.
        group: ``(m,)`` group of every token.
        sequence: ``(m,)`` sequence of every token.
        cache: As in :class:`Sums`.
    """

    x: torch.Tensor
    b: torch.Tensor
    drawn: torch.Tensor
    positions: float
    scale: float
    group: torch.Tensor
    sequence: torch.Tensor
    cache: Cache


Settle = Callable[[str, Sums | Tokens], None]
