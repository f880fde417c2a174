"""Sums along directions: derivatives of every unit at every level, added up batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from ...errors import LengthMismatch
from .directions import Directions

_CHUNK = 64 << 20  # entries of the gradients of single sequences at a time


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """Where one matrix's directions belong.

    Attributes:
        directions: Its candidates.
        first: Index of its first group among all units; the groups of one matrix follow each other. Matrices with the same
            index are treated together: the sum of their changes is squared.
    """

    directions: Directions
    first: int


class Candidates:
    """Directions of many matrices, made when their matrix comes and dropped behind it.

    Args:
        first: Index of the first group among all units, by matrix; see :class:`Unit`.
        make: Directions of a matrix.
        count: Number of units.
        levels: Candidates of every unit.
    """

    def __init__(self, first: Mapping[str, int], make: Callable[[str], Directions], count: int, levels: int) -> None:
        self.first, self._make, self.count, self.levels = dict(first), make, count, levels
        self._held: dict[str, Directions] = {}

    @classmethod
    def of(cls, units: Mapping[str, Unit]) -> Candidates:
        """Those that are written down.

        Raises:
            LengthMismatch: Different numbers of levels, or no unit.
        """
        levels = {u.directions.levels for u in units.values()}
        if len(levels) != 1:
            raise LengthMismatch(
                f"The matrices have {sorted(levels)} candidates.", "All need the same number.",
                "Repeat a candidate where one has less.",
            )  # fmt: skip
        count = max(u.first + u.directions.groups for u in units.values())
        return cls({n: u.first for n, u in units.items()}, lambda name: units[name].directions, count, levels.pop())

    def directions(self, name: str) -> Directions:
        """Of a matrix."""
        if name not in self._held:
            self._held[name] = self._make(name)
        return self._held[name]

    def drop(self, names: Iterable[str]) -> None:
        """Forget the directions of some matrices."""
        for name in names:
            self._held.pop(name, None)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuadraticTerms:
    """Predicted damage of every unit at every level, in nats per token; zero for no change.

    Attributes:
        first: ``<dD/dtheta, Delta>``, shape ``(units, levels)``; zero at the dense point.
        second: Half the Fisher form, the same shape.
        error: Standard error of ``second`` over sequences (draws included), the same shape.
        tokens: N.
        passes: Forward equivalents spent: forward 1, backward 2.
        rest: What every sequence adds to ``second`` beside its share, ``(units, levels, sequences)``, of norm ``error``: a sum
            of units has the norm of the sum as its error. Empty where sequences were not kept apart.
        divergence: D at the present point, in nats per token; zero at the dense one.
    """

    first: np.ndarray
    second: np.ndarray
    error: np.ndarray
    tokens: int
    passes: float
    rest: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0)))
    divergence: float = 0.0

    @property
    def total(self) -> np.ndarray:
        """Both terms, ``(units, levels)``."""
        return self.first + self.second


class DirectionalSums:
    """Adds up derivatives along directions; fed with ``(a, b)`` of one matrix and one batch at a time.

    It does not care who runs the model: a backward through the whole graph, or layer by layer. After the sites of one backward
    comes :meth:`gradient` (the backward of the divergence) or :meth:`draw` (of a draw of labels), after a batch :meth:`close`.

    Args:
        candidates: Directions by matrix.
        sequences: Keep so many sequences apart.
    """

    def __init__(self, candidates: Candidates, sequences: int = 0) -> None:
        self.candidates, self.shape = candidates, (candidates.count, candidates.levels)
        zeros = np.zeros(self.shape)
        self._first, self._sum, self._squares = zeros.copy(), zeros.copy(), zeros.copy()
        self._held: dict[int, torch.Tensor] = {}  # (B, groups, levels) by first unit: calls and matrices of one unit add up
        self._draws: list[dict[int, torch.Tensor]] = []
        self.rows = np.zeros((sequences, *self.shape))

    def site(self, name: str, a: torch.Tensor, b: torch.Tensor, *, apart: bool) -> None:
        """Take the inputs ``(B, T, d_in)`` and output gradients ``(B, T, d_out)`` of one call of a matrix.

        Args:
            name: The matrix.
            a: Inputs.
            b: Gradients of the summed loss.
            apart: Keep sequences apart (they will be squared), or add them up.
        """
        if name not in self.candidates.first:
            return
        if not apart:
            return self.hold(name, (b.flatten(0, 1).T @ a.flatten(0, 1))[None])
        size = max(1, _CHUNK // (a.shape[2] * b.shape[2]))
        found = [self.candidates.directions(name).along(b[i : i + size].mT @ a[i : i + size]) for i in range(0, len(a), size)]
        self._add(name, torch.cat(found))

    def hold(self, name: str, gradient: torch.Tensor) -> None:
        """Take gradients ``(B, d_out, d_in)`` that are there already."""
        self._add(name, self.candidates.directions(name).along(gradient))

    def _add(self, name: str, along: torch.Tensor) -> None:
        first = self.candidates.first[name]
        held = self._held.get(first)
        self._held[first] = along if held is None else held + along

    def gradient(self) -> None:
        """End of a backward of the divergence."""
        for first, along in self._held.items():
            self._first[first : first + along.shape[1]] += along.sum(0).cpu().numpy()
        self._held.clear()

    def draw(self) -> None:
        """End of a backward of one draw of labels."""
        self._draws.append({first: along.square() for first, along in self._held.items()})
        self._held.clear()

    def close(self, sequences: Sequence[int] = ()) -> None:
        """End of a batch of these sequences, where they are kept apart."""
        for first in self._draws[0] if self._draws else ():
            mean = torch.stack([draw[first] for draw in self._draws]).mean(0)
            rows = slice(first, first + mean.shape[1])
            self._sum[rows] += mean.sum(0).cpu().numpy()
            self._squares[rows] += mean.square().sum(0).cpu().numpy()
            if len(self.rows):
                self.rows[list(sequences), rows] += mean.cpu().numpy()
        self._draws.clear()

    def sums(self) -> np.ndarray:
        """All that was added up, ``(3, units, levels)``; those of several processes add up in turn."""
        return np.stack((self._first, self._sum, self._squares))

    def take(self, sums: np.ndarray) -> None:
        """Go on with these sums."""
        self._first, self._sum, self._squares = sums

    def forms(self, tokens: int, sequences: int, passes: float, counts: np.ndarray | None = None) -> QuadraticTerms:
        """The sums as means over tokens; with the tokens of every sequence, errors of ratios and what they are made of."""
        n = max(sequences, 1)
        if counts is not None:
            second = self._sum / (2 * tokens)
            rest = (self.rows.T / 2).transpose(1, 0, 2) - second[..., None] * counts
            rest *= np.sqrt(n / max(n - 1, 1)) / tokens
            return QuadraticTerms(
                first=self._first / tokens, second=second, error=np.linalg.norm(rest, axis=-1), tokens=tokens, passes=passes,
                rest=rest,
            )  # fmt: skip
        spread = np.maximum(self._squares - self._sum**2 / n, 0.0) * (n / max(n - 1, 1))
        return QuadraticTerms(
            first=self._first / tokens, second=self._sum / (2 * tokens), error=np.sqrt(spread) / (2 * tokens), tokens=tokens,
            passes=passes,
        )  # fmt: skip
