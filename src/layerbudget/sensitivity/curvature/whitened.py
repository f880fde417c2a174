r"""Singular values of a whitened gradient, ``(G + s I)^-1/2 dW (A + a I)^-1/2``, without an inverse square root.

They are those of ``L_G^-1 dW L_A^-T`` with Cholesky factors ``G + s I = L_G L_G'`` and ``A + a I = L_A L_A'``: n^3/3 instead of
the 10 n^3 of an eigendecomposition. From m tokens fewer than the matrix is wide, with ``dW = B'X``,

    M_1 = B (G + s I)^-1 B' = (1/s) [B B' - C'(N s I + B~ B~')^-1 C],   C = B~ B',        (Woodbury)
    M_2 = X (A + a I)^-1 X' = P K (K + P a I)^-1,                       K = X X',

and the squared singular values are the eigenvalues of ``R' M_1 R``, m x m, for any R with ``R R' = M_2``: from ``K = C C'``,

    R = P^1/2 C T^-T,    T T' = C'C + P a I.

A matrix with fewer outputs than tokens has them as eigenvalues of ``H M_2 H'``, ``H = L_G^-1 B'``, as wide as its outputs. The
largest ones of a large matrix come from a block Krylov space (Musco and Musco 2015), grown until they stand still.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import CurvatureFailure
from .kronecker import Sums, Tokens

SMALL = 1024  # up to here the whole spectrum costs less than a search for its top
_STEPS, _STILL = 12, 1e-7
_PANEL = 256
_LEAST = 1e-4  # of the mean eigenvalue: with less damping, a singular K is no longer told from its rounding by Cholesky

Spectrum = tuple[float, torch.Tensor]


def whitened(found: Sums | Tokens, a: float, s: float, count: int) -> tuple[Spectrum, Spectrum]:
    """Sum and largest of the squared singular values, of the whole gradient and of the difference of its two halves.

    Args:
        found: Factors and gradient of one matrix, in two groups.
        a: Absolute damping of the inputs' factor.
        s: Absolute damping of the outputs' factor.
        count: How many to return, descending.

    Raises:
        CurvatureFailure: A damped factor that is not positive definite.
    """
    if isinstance(found, Tokens):
        return _from_tokens(found, a, s, count)
    left = _cholesky(found.g, s)
    halves = [torch.linalg.solve_triangular(left, part.double(), upper=False) for part in found.parts]
    del left  # the factors of a wide matrix's two sides are never there together
    right = found.cache.get(f"cholesky {a}")
    if right is None:
        right = found.cache[f"cholesky {a}"] = _cholesky(found.a, a)
    for j, inner in enumerate(halves):
        halves[j] = torch.linalg.solve_triangular(right, inner.T, upper=False).T
    return of_halves(halves, count)


def of_halves(halves: list[torch.Tensor], count: int) -> tuple[Spectrum, Spectrum]:
    """Sums and largest squared singular values of ``H_1 + H_2`` and ``H_1 - H_2``."""
    return _spectrum(halves[0] + halves[1], count), _spectrum(halves[0] - halves[1], count)


def _spectrum(matrix: torch.Tensor, count: int) -> Spectrum:
    return float(matrix.square().sum()), largest_squared(matrix, count)[0]


def _cholesky(matrix: torch.Tensor, damping: float) -> torch.Tensor:
    damped = matrix.double()
    own = damped.diagonal().clone()
    damped.diagonal().add_(damping)  # in its place: a copy would be as large as the factor
    factor, failed = torch.linalg.cholesky_ex(damped)
    damped.diagonal().copy_(own)
    if int(failed):
        raise CurvatureFailure(
            f"A Kronecker factor of width {len(matrix)} damped by {damping:.3g} is not positive definite.",
            "Its damping must exceed rounding.",
            "Raise damping.",
        )
    return factor


def outer(x: torch.Tensor) -> torch.Tensor:
    """``x x'`` in float64: half of the products on a processor, panel by panel."""
    if x.device.type != "cpu":
        return (x @ x.T).double()
    found = torch.empty(len(x), len(x), dtype=torch.float64)
    for start in range(0, len(x), _PANEL):
        panel = x[start : start + _PANEL] @ x[start:].T
        found[start : start + _PANEL, start:] = panel
        found[start:, start : start + _PANEL] = panel.T
    return found


def _root(found: Tokens, a: float) -> torch.Tensor:
    """R, ``(m, m)``, with ``R R' = P K (K + P a I)^-1``."""
    if "inputs" not in found.cache:
        found.cache["inputs"] = outer(found.x)
    gram, damping = found.cache["inputs"], found.positions * a
    level = float(gram.diagonal().mean())
    if damping >= _LEAST * level:
        raised = gram.clone()
        raised.diagonal().add_(4 * len(gram) * torch.finfo(torch.float64).eps * level)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not int(failed):
            inner = _cholesky(factor.T @ factor, damping)
            return found.positions**0.5 * torch.linalg.solve_triangular(inner, factor.T, upper=False).T
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    return vectors * (found.positions * values / (values + damping)).sqrt()


def _from_tokens(found: Tokens, a: float, s: float, count: int) -> tuple[Spectrum, Spectrum]:
    root = found.cache.get(f"root {a}")
    if root is None:
        root = found.cache[f"root {a}"] = _root(found, a)
    of = [found.group == j for j in (0, 1)]
    if found.b.shape[1] < len(found.b):
        factor = _cholesky(outer(found.drawn.T) / found.scale, s)
        half = torch.linalg.solve_triangular(factor, found.b.T.double(), upper=False)
        first, second = (half[:, rows] @ root[rows] for rows in of)
        own, across = first @ first.T + second @ second.T, first @ second.T
    else:
        cross = (found.drawn @ found.b.T).double()
        solved = torch.linalg.solve_triangular(_cholesky(outer(found.drawn), found.scale * s), cross, upper=False)
        middle = (outer(found.b) - outer(solved.T)) / s
        images = [middle[:, rows] @ root[rows] for rows in of]
        own = sum((root[rows].T @ image[rows] for rows, image in zip(of, images, strict=True)), torch.zeros_like(root))
        across = root[of[1]].T @ images[0][of[1]]
    across = across + across.T
    return _top(own + across, count), _top(own - across, count)


def _top(product: torch.Tensor, count: int) -> Spectrum:
    """Of a symmetric matrix, up to rounding."""
    values = torch.linalg.eigvalsh((product + product.T) / 2).flip(0).clamp_min(0)
    return float(product.trace()), _padded(values[:count], count)


def _padded(values: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(count - len(values))]) if len(values) < count else values


def largest_squared(matrix: torch.Tensor, count: int, *, seed: int = 0) -> tuple[torch.Tensor, float]:
    """The ``count`` largest squared singular values, descending, and how much the last step still changed them (relative).

    >>> values, error = largest_squared(torch.diag(torch.arange(5.0, 0, -1)), 2)
    >>> values.tolist(), error
    ([25.0, 16.0], 0.0)
    """
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    if matrix.shape[0] <= max(SMALL, 4 * count):
        values = torch.linalg.eigvalsh((matrix @ matrix.T).double()).flip(0).clamp_min(0)
        return values[:count], 0.0
    return _krylov(lambda x: matrix @ (matrix.T @ x), matrix, count, seed)


def _krylov(
    apply: Callable[[torch.Tensor], torch.Tensor], matrix: torch.Tensor, count: int, seed: int
) -> tuple[torch.Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(matrix.shape[0], count + 8, generator=generator, dtype=torch.float64).to(matrix)
    base = torch.linalg.qr(apply(block))[0]
    latest, before, change = base, None, 1.0
    for _ in range(_STEPS):
        image = matrix.T @ base
        values = torch.linalg.eigvalsh((image.T @ image).double()).flip(0)[:count].clamp_min(0)
        if before is not None:
            change = float(((values - before).abs() / values.clamp_min(1e-300)).max())
            if change < _STILL:
                break
        before = values
        if base.shape[1] + latest.shape[1] > matrix.shape[0]:
            break
        latest = apply(latest)
        for _ in range(2):  # twice is enough
            latest = latest - base @ (base.T @ latest)
        latest = torch.linalg.qr(latest)[0]
        base = torch.cat([base, latest], 1)
    return values, change
