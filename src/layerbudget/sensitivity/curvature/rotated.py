r"""Gradients in the eigenbasis of a Kronecker-factored curvature, and quadratic forms there.

With ``A = Q_A diag(l_A) Q_A'`` and ``G = Q_G diag(l_G) Q_G'`` the gradient becomes ``M = Q_G' dW Q_A`` and

    dW'(G (x) A + tau I)^-1 dW = sum_ij M_ij^2 / (l_G,i l_A,j + tau).

From tokens only the eigenvectors with eigenvalues above zero are needed: with ``X X' = U diag(k) U'`` and
``B~ B~' = W diag(h) W'``, ``M = h^-1/2 W' (B~ B') U k^1/2``, an m x m matrix, and what of the gradient lies outside, where the
curvature is zero, counts ``(|dW|^2 - |M|^2)/tau``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from .kronecker import Sums, Tokens

_RANK = 1e-10  # eigenvalues below this part of the largest are rounding
_RANK32 = 1e-6


@dataclasses.dataclass(eq=False)
class Rotated:
    """One matrix's gradients, group by group, in the eigenbasis of its curvature.

    Attributes:
        parts: ``(J, p, q)`` float64.
        eigenvalues: ``(p, q)`` of the curvature.
        rest: ``(J, J)`` inner products of what lies where the curvature is zero.
    """

    parts: torch.Tensor
    eigenvalues: torch.Tensor
    rest: torch.Tensor

    def form(self, weights: torch.Tensor, tau: float) -> float:
        """``v'(C + tau I)^-1 v`` of the weighted sum v of the groups."""
        v = torch.tensordot(weights.to(self.parts), self.parts, 1)
        outside = float(weights.to(self.rest) @ self.rest @ weights.to(self.rest))
        return float((v.square() / (self.eigenvalues + tau)).sum()) + max(outside, 0.0) / tau

    def forms(self, tau: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gain ``(D,)``, noise floor ``(D,)`` and leave-one-group-out gains ``(D, J)``.

        The floor is ``J/(J-1) sum_j (g_j - g/J)'(C + tau I)^-1 (g_j - g/J)``.
        """
        count = len(self.parts)
        unit, one = torch.eye(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        correction = count / max(count - 1, 1)
        gain = [self.form(one, float(t)) for t in tau]
        floor = [sum(self.form(unit[j] - one / count, float(t)) for j in range(count)) * correction for t in tau]
        jack = [[self.form((one - unit[j]) * correction, float(t)) for j in range(count)] for t in tau]
        return np.array(gain), np.array(floor), np.array(jack)


def rotated(found: Sums | Tokens, groups: int) -> Rotated:
    """Rotate the gradients of one matrix into the eigenbasis of its factors."""
    return _from_sums(found) if isinstance(found, Sums) else _from_tokens(found, groups)


def basis(found: Sums) -> tuple[torch.Tensor, torch.Tensor]:
    """``(Q_G, Q_A)``; the second is computed once for matrices that share an input."""
    if "eigen" not in found.cache:
        found.cache["eigen"] = torch.linalg.eigh(found.a)
    if "eigen_g" not in found.__dict__:
        found.__dict__["eigen_g"] = torch.linalg.eigh(found.g)
    return found.__dict__["eigen_g"][1], found.cache["eigen"][1]


def _from_sums(found: Sums) -> Rotated:
    qg, qa = basis(found)
    parts = torch.stack([qg.T @ part.double() @ qa for part in found.parts])
    eigenvalues = torch.outer(found.__dict__["eigen_g"][0].clamp_min(0), found.cache["eigen"][0].clamp_min(0))
    none = torch.zeros(len(parts), len(parts), dtype=torch.float64, device=parts.device)
    return Rotated(parts, eigenvalues, none)


def _spectrum(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues above rounding and eigenvectors of ``rows rows'``."""
    values, vectors = torch.linalg.eigh((rows @ rows.T).double())
    threshold = _RANK if rows.dtype == torch.float64 else _RANK32
    keep = values > threshold * values[-1].clamp_min(1e-300)
    return values[keep], vectors[:, keep]


def token_basis(found: Tokens) -> tuple[torch.Tensor, ...]:
    """``(k, U, h, W)`` of the inputs (shared) and of the drawn output gradients."""
    if "spectrum" not in found.cache:
        found.cache["spectrum"] = _spectrum(found.x)
    return (*found.cache["spectrum"], *_spectrum(found.drawn))


def _from_tokens(found: Tokens, groups: int) -> Rotated:
    k, u, h, w = token_basis(found)
    left = (w.T @ (found.drawn @ found.b.T).double()) / h.sqrt()[:, None]  # (p, m)
    right = u * k.sqrt()  # (m, q)
    parts = torch.stack([left[:, found.group == j] @ right[found.group == j] for j in range(groups)])
    whole = ((found.b @ found.b.T) * (found.x @ found.x.T)).double()
    member = torch.nn.functional.one_hot(found.group, groups).double()
    inside = torch.einsum("apq,bpq->ab", parts, parts)
    rest = member.T @ whole @ member - inside
    if float(rest.trace()) <= (_RANK if found.x.dtype == torch.float64 else _RANK32) * float(whole.trace().abs()):
        rest = torch.zeros_like(rest)  # rounding
    return Rotated(parts, torch.outer(h / found.scale, k / found.positions), rest)


def second_moments(found: Tokens, basis_: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """EK-FAC's eigenvalues from tokens: ``(1/N) sum_i (Q_G' S_i Q_A)^2`` over sequences and draws, ``(p, q)``."""
    k, u, h, w = basis_
    right, left = u * k.sqrt(), w * h.sqrt()
    m = len(right)
    total: Any = torch.zeros(len(h), len(k), dtype=torch.float64, device=right.device)
    for r in range(len(left) // m):
        rows = left[r * m : (r + 1) * m]
        for i in found.sequence.unique().tolist():
            own = found.sequence == i
            total += (rows[own].T @ right[own]).square()
    return total / found.scale
