"""Lanczos started at the gradient: every damping from one run, with a two-sided bracket.

With ``T_m`` the tridiagonal matrix after m products, ``(theta_j, w_j)`` its eigenvalues and squared first eigenvector
entries, ``zeta^2(tau) ~ |g|^2 sum_j w_j/(theta_j + tau)`` (Golub and Meurant). For a positive semidefinite curvature this Gauss
rule is a lower bound and the Gauss-Radau rule with a node at 0 an upper one. Losing orthogonality only delays convergence, so
three vectors suffice (Golub and Strakos 1994).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from ...errors import InvalidInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tridiagonal:
    """What a Lanczos run leaves: ``|g|^2``, diagonal, off-diagonal (one entry longer: the residual)."""

    square: float
    diagonal: np.ndarray
    off: np.ndarray

    @property
    def steps(self) -> int:
        """Products taken."""
        return len(self.diagonal)

    def ritz(self) -> tuple[np.ndarray, np.ndarray]:
        """Ritz values and squared first entries of their vectors."""
        return _eigen(self.diagonal, self.off[:-1])

    @property
    def largest(self) -> float:
        """Largest Ritz value, a lower bound of the largest eigenvalue."""
        return float(self.ritz()[0][-1])

    @property
    def largest_error(self) -> float:
        """Residual of the largest Ritz pair; an eigenvalue lies within this distance of it."""
        t = np.diag(self.diagonal) + np.diag(self.off[:-1], 1) + np.diag(self.off[:-1], -1)
        return float(self.off[-1] * abs(np.linalg.eigh(t)[1][-1, -1]))

    @property
    def smallest(self) -> float:
        """Smallest Ritz value, an upper bound of the smallest eigenvalue; negative proves indefiniteness."""
        return float(self.ritz()[0][0])

    def gauss(self, tau: np.ndarray, *, absolute: bool = False) -> np.ndarray:
        """Lower bound of the gain (PSD curvature); ``absolute`` uses ``|theta|``."""
        theta, w = self.ritz()
        theta = np.abs(theta) if absolute else theta
        with np.errstate(divide="ignore"):
            return self.square * (w / (theta + np.asarray(tau)[:, None])).sum(1)

    def radau(self, tau: np.ndarray) -> np.ndarray:
        """Upper bound of the gain for a positive semidefinite curvature: one more node, fixed at 0."""
        if self.off[-1] <= 0:
            return self.gauss(tau)
        last = np.zeros(self.steps)
        last[-1] = self.off[-1] ** 2
        t = np.diag(self.diagonal) + np.diag(self.off[:-1], 1) + np.diag(self.off[:-1], -1)
        try:
            corner = float(np.linalg.solve(t, last)[-1])
        except np.linalg.LinAlgError:
            return np.full(len(tau), np.inf)
        theta, w = _eigen(np.append(self.diagonal, corner), self.off)
        if theta[0] < -1e-6 * max(theta[-1], 1e-300):
            return np.full(len(tau), np.inf)
        return self.square * (w / (theta.clip(0.0) + np.asarray(tau)[:, None])).sum(1)


def _eigen(diagonal: np.ndarray, off: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    t = np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)
    theta, vectors = np.linalg.eigh(t)
    return theta, vectors[0] ** 2


def lanczos(
    product: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    steps: int,
    stop: Callable[[Tridiagonal], bool] | None = None,
) -> Tridiagonal:
    """Run Lanczos from ``start`` for at most ``steps`` products.

    Args:
        product: ``v -> C v`` on flat vectors of length p.
        start: ``(p,)``, usually the gradient.
        steps: Largest number of products.
        stop: Asked after every product.

    Returns:
        The tridiagonal matrix; of no steps where ``start`` is zero.

    Raises:
        InvalidInput: Fewer than one step.
    """
    if steps < 1:
        raise InvalidInput(f"steps is {steps}.", "At least one product is needed.", "Use 30 or more.")
    square = float(start.double().square().sum())
    diagonal: list[float] = []
    off: list[float] = []
    if square <= 0:
        return Tridiagonal(square=0.0, diagonal=np.zeros(1), off=np.zeros(1))
    v, previous, beta = start / square**0.5, torch.zeros_like(start), 0.0
    for _ in range(min(steps, start.numel())):
        w = product(v) - beta * previous
        alpha = float(torch.dot(w.double(), v.double()))
        w -= alpha * v
        beta = float(torch.linalg.vector_norm(w.double()))
        diagonal.append(alpha)
        off.append(beta)
        result = Tridiagonal(square=square, diagonal=np.array(diagonal), off=np.array(off))
        scale = max(np.abs(diagonal).max(), max(off[:-1], default=0.0))
        if beta <= 1e-14 * scale:
            return dataclasses.replace(result, off=np.append(result.off[:-1], 0.0))
        if stop is not None and stop(result):
            break
        previous, v = v, w / beta
    return result
