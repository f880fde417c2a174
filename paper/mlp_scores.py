"""What the released MLP script computes of one block: truncated conjugate gradients, two proxies, two rank correlations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
Parameters = list[torch.Tensor]
EPSILON = 1e-12  # the script's guard against division by zero


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One vector of several tensors."""
    return torch.cat([p.detach().reshape(-1) for p in parts])


def truncated_gain(
    loss: torch.Tensor, block: Parameters, tau: float, *, steps: int = 80, tolerance: float = 1e-6
) -> tuple[float, float, str]:
    """``g'x`` with ``(H + tau I) x = g`` by conjugate gradients, as the script solves it.

    Args:
        loss: The loss, its graph kept.
        block: Parameters of the block.
        tau: Damping.
        steps: Largest number of products.
        tolerance: Of the residual, absolute.

    Returns:
        The gain (never below zero), ``|g|^2``, and how it ended: ``converged``, ``negative curvature`` (the steps before that
        are kept) or ``steps``.
    """
    grads = torch.autograd.grad(loss, block, create_graph=True)
    g = flat(grads)

    def product(v: torch.Tensor) -> torch.Tensor:
        pieces = v.split([p.numel() for p in block])
        along = sum((a * b.view_as(a)).sum() for a, b in zip(grads, pieces, strict=True))
        return flat(torch.autograd.grad(along, block, retain_graph=True)) + tau * v

    x, r, p = torch.zeros_like(g), g.clone(), g.clone()
    square, how = torch.dot(r, r), "steps"
    for _ in range(steps):
        q = product(p)
        bend = torch.dot(p, q)
        if bend <= EPSILON:
            how = "negative curvature"
            break
        length = square / (bend + EPSILON)
        x, r = x + length * p, r - length * q
        new = torch.dot(r, r)
        if new.sqrt() < tolerance:
            how = "converged"
            break
        p, square = r + new / (square + EPSILON) * p, new
    return max(float(torch.dot(g, x)), 0.0), max(float(torch.dot(g, g)), 0.0), how


def sample_gradients(model: nn.Module, batch: Batch, blocks: Sequence[Parameters]) -> list[torch.Tensor]:
    """Gradients of every sample by block, each ``(n, p_k)``."""
    rows: list[list[torch.Tensor]] = [[] for _ in blocks]
    for i in range(len(batch[1])):
        loss = loss_of(model, (batch[0][i : i + 1], batch[1][i : i + 1]))
        found = iter(torch.autograd.grad(loss, [p for block in blocks for p in block]))
        for row, block in zip(rows, blocks, strict=True):
            row.append(flat([next(found) for _ in block]))
    return [torch.stack(row) for row in rows]


def diagonal_gain(rows: torch.Tensor, g: torch.Tensor, damping: float) -> float:
    """``sum_j g_j^2 / (F_jj + damping)`` with the empirical Fisher's diagonal of the rows ``(n, p)``."""
    return max(float((g.square() / (rows.square().mean(0) + damping)).sum()), 0.0)


def influence_gain(rows: torch.Tensor, g: torch.Tensor, damping: float) -> float:
    """``g'(damping I + G'G/n)^-1 g`` by Woodbury: what the script calls its LayerIF-style proxy."""
    n = len(rows)
    inner = rows @ rows.T + n * damping * torch.eye(n)
    rest = g - rows.T @ torch.linalg.solve(inner, rows @ g)
    return max(float(torch.dot(g, rest)) / damping, 0.0)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """The script's: ranks by two sorts, so that ties are broken by the sort."""
    a, b = (np.argsort(np.argsort(v)).astype(float) for v in (x, y))
    a, b = a - a.mean(), b - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > EPSILON else 0.0


def kendall(x: np.ndarray, y: np.ndarray) -> float:
    """The script's: ties count on neither side."""
    i, j = np.triu_indices(len(x), 1)
    signs = np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])
    return float(signs.sum() / np.abs(signs).sum()) if np.abs(signs).sum() else 0.0
