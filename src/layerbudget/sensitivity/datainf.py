r"""DataInf's influence of training on validation samples, from inner products of their gradients. No torch.

For a weight tensor with training gradients ``g_k`` (k = 1..n), validation gradients ``v_j`` (j = 1..m) and
``lambda = mean over k and entries of g_k^2 / 10`` DataInf averages n rank-one inverses,

    I[j,k] = - <h_j, g_k>,    h_j = 1/(n lambda) sum_l [ v_j - <v_j, g_l> / (lambda + |g_l|^2) g_l ].

Only inner products enter: with ``A = V G'`` (m x n), ``K = G G'`` (n x n) and ``D = lambda + diag K``

    I = -(1/lambda) ( A - (A / D) K / n ),

so no ``h_j`` is ever formed and every layer is served by the same forward and backward passes. Negative entries are
helpful: upweighting sample k lowers the loss of sample j. It is an influence heuristic, not the gain: an average of
inverses exceeds the inverse of the average by factors up to thousands.

Source: DataInf (Kwon et al. 2024); the aggregations are LayerIF's (Askari et al. 2025).
"""

from __future__ import annotations

import dataclasses

import numpy as np

AGGREGATIONS = ("all", "positive")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Influence:
    """Influence of every training on every validation sample through one block.

    Attributes:
        table: ``(m, n)``: rows are validation samples, columns training samples; negative is helpful. Unit: parameters
            (the loss cancels, ``lambda`` being proportional to its square).
        damping: ``lambda`` of each weight tensor, by name; 0 for a tensor without any gradient, which adds nothing.
    """

    table: np.ndarray
    damping: dict[str, float]


def influence_table(train: np.ndarray, cross: np.ndarray, numel: int, *, divisor: float = 10.0) -> tuple[np.ndarray, float]:
    """DataInf's influence of one weight tensor from its inner products.

    Args:
        train: ``K = G G'``, ``(n, n)``.
        cross: ``A = V G'``, ``(m, n)``.
        numel: Entries of the tensor.
        divisor: ``lambda`` is the mean squared gradient entry divided by this.

    Returns:
        ``(I, lambda)``, I of shape ``(m, n)``; zeros where every gradient is zero.

    >>> g, v = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[1.0, 1.0]])
    >>> table, lam = influence_table(g @ g.T, v @ g.T, 2)
    >>> h = sum(np.linalg.solve(np.outer(x, x) + lam * np.eye(2), v[0]) for x in g) / 2
    >>> bool(np.allclose(table, -(h @ g.T)))
    True
    """
    norms = np.diagonal(train)
    lam = float(norms.mean()) / numel / divisor
    if not lam > 0:
        return np.zeros_like(cross), 0.0
    return -(cross - (cross / (lam + norms)) @ train / len(norms)) / lam, lam


def aggregate(table: np.ndarray, aggregation: str = "all") -> float:
    """Layer score: minus the sum of helpful influence, so that larger means more useful.

    ``all``: ``-sum I``.  ``positive``: with ``t_k = sum_j I[j,k]``, minus the sum of the ``t_k <= 0`` (positively influential,
    that is *helpful*, training samples; the released helper that keeps ``t_k > 0`` has the sign wrong).

    >>> aggregate(np.array([[-3.0, 1.0]])), aggregate(np.array([[-3.0, 1.0]]), "positive")
    (2.0, 3.0)
    """
    columns = table.sum(axis=0)
    return float(-(columns if aggregation == "all" else columns[columns <= 0]).sum())
