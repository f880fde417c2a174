r"""Gain of every further rank: how much of a matrix's gradient a LoRA update of rank r can follow.

Let ``G`` be the gradient of the mean loss with respect to a weight matrix and ``A (x) S`` its Kronecker-factored curvature,
with damped factors. The best update of rank r lowers the quadratic model of the loss by half of

    zeta^2(r) = sigma_1^2 + ... + sigma_r^2,    sigma the singular values of  (S + s I)^-1/2  G  (A + a I)^-1/2

(Eckart-Young in the whitened coordinates, which keep ranks). ``zeta^2(full rank)`` is ``g' ((A + a I) (x) (S + s I))^-1 g``:
the gain of the paper under Kronecker-factored curvature whose damping is factored too (``kfac`` damps by ``tau I``), resolved
by rank. The increments ``sigma_i^2`` fall with i, so they make an exactly solvable program
(:func:`layerbudget.solvers.allocate_increments`) whose answer needs no surrogate utility.

The singular values are those of ``L_S^-1 G L_A^-T`` with Cholesky factors ``S + s I = L_S L_S'`` and ``A + a I = L_A L_A'``:
n^3/3 instead of the 10 n^3 of an eigendecomposition. From m tokens fewer than the matrix is wide, with ``G = B'X``,

    M_1 = B (S + s I)^-1 B' = (1/s) [B B' - C'(N s I + B~ B~')^-1 C],   C = B~ B',        (Woodbury)
    M_2 = X (A + a I)^-1 X' = P K (K + P a I)^-1,                       K = X X',

and the squared singular values are the eigenvalues of ``R' M_1 R``, m x m, for any R with ``R R' = M_2``: from ``K = C C'``,

    R = P^1/2 C T^-T,    T T' = C'C + P a I.

A matrix with fewer outputs than tokens has them as eigenvalues of ``H M_2 H'``, ``H = L_S^-1 B'``, as wide as its outputs. The
largest ones of a large matrix come from a block Krylov space (Musco and Musco 2015), grown until they stand still.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CurvatureFailure, InvalidInput
from ..execution.backward import Accumulator, Loss, SampledLoss, feed
from ..execution.loss import Batch, Data, batches, token_count
from ..execution.processes import ProcessGroup, process_group
from ..execution.sites import Site, refuse_direct
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .curvature import common
from .curvature.kronecker import Factors, Sums, Tokens, real_positions
from .stored import Finished

SMALL = 1024  # up to here the whole spectrum costs less than a search for its top
_STEPS, _STILL = 12, 1e-7
_PANEL = 256
_LEAST = 1e-4  # of the mean eigenvalue: with less damping, a singular K is no longer told from its rounding by Cholesky

Spectrum = tuple[float, torch.Tensor]


def score_rank_gain(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: common.Damping = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    largest: int = 64,
    walk: str = "auto",
    finished: Finished | None = None,
) -> Scores:
    """Squared singular values of every gradient, whitened by K-FAC; partition by ``linear`` for ranks per matrix.

    A block of several matrices gives every one of them the same rank; increments add up. The noise floor comes from two halves
    of the data, whose shares in ``G = G_1 + G_2`` have nearly the same expectation: ``|G_1 - G_2|^2``, in the whitened space.

    By layers, one layer's factors exist at a time.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``damping``: a and s in units of :func:`damping_scale`, 1 by default.
    - ``seed``: of the sampled labels.
    - ``largest``: ranks per matrix that are kept.
    - ``finished``: blocks that an earlier run has finished.

    Returns:
        ``gain`` sums all ranks; ``extra['increments']`` has, per damping and block, the gain of the first, second, ... rank;
        ``extra['increments_floor']`` the same of ``G_1 - G_2``: what noise alone gives each rank; ``extra['loss']`` the mean
        loss, which no training can gain more than.
    """
    if largest < 1 or data.samples < 2:
        raise InvalidInput(
            f"largest is {largest}, with {data.samples} sequences.", "One rank and two sequences at least.", "Give more text."
        )
    refuse_direct(model, blocks, "no adapter goes there", routers=True)
    values = common.check_damping(damping, "absolute") or (1.0,)
    scale = damping_scale(model, data, blocks, batch_size=batch_size, seed=seed, walk=walk)
    workers = torch.get_num_threads() if next(model.parameters()).device.type == "cpu" else 1
    options: dict[str, Any] = {"seed": seed, "groups": 2, "interleaved": True, "finished": finished, "workers": workers}
    work = _Spectra(model, data, blocks, values=values, scale=scale, largest=largest, **options)
    fed = feed(model, data, blocks, work, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    tokens = token_count(model, data)
    increments, floor = ([[rank.tolist() for rank in row] for row in side] for side in work.ranks)
    extra = {
        "curvature": "K-FAC, sampled labels",
        "tokens": tokens,
        **({"loss": fed.loss / tokens} if fed.loss > 0 else {}),  # an earlier run saw it
        "increments": increments,
        "increments_floor": floor,
        "excess": work.gain[0] - work.gain[1],
        "damping_scale": {"inputs": scale[0], "outputs": scale[1]},
    }
    fields = {"gain": work.gain[0], "noise_floor": work.gain[1], "damping": values, "damping_unit": "median", "seed": seed}
    return common.record(blocks, "rank-gain", **fields, unit="nats of average loss", extra=extra)


class _Spectra(Factors):
    """Sums and largest ones of the squared singular values, of the gradient and of the difference of its halves."""

    def __init__(
        self, *arguments: Any, values: Sequence[float], scale: tuple[float, float], largest: int, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.values, self.scale = values, scale
        self.gain = np.zeros((2, len(values), len(self.blocks)))
        self.size = [min(largest, *(min(m.d_in, m.d_out) for m in b.modules)) for b in self.blocks]
        self.ranks = [[[np.zeros(n) for n in self.size] for _ in values] for _ in range(2)]
        for k, record in ({} if self.finished is None else self.finished.records).items():
            self.gain[:, :, k] = record["gain"]
            for side, row in itertools.product(range(2), range(len(values))):
                self.ranks[side][row][k][:] = record["ranks"][side][row]
        self._spectra: dict[str, list[tuple[Spectrum, Spectrum]]] = {}

    def settle(self, name: str, factors: Sums | Tokens) -> None:
        (a, s), count = self.scale, self.size[self.place[name]]
        self._spectra[name] = [whitened(factors, value * a, value * s, count) for value in self.values]

    def settled(self) -> None:
        """Add up in the order of the blocks, whichever thread was first."""
        for name, k in self.place.items():
            if name not in self._spectra:
                continue
            for row, sides in enumerate(self._spectra.pop(name)):
                for side, (total, largest) in enumerate(sides):
                    self.gain[side, row, k] += total
                    self.ranks[side][row][k] += largest[: self.size[k]].cpu().numpy()
            self.waiting[k] -= 1
            if self.finished is not None and not self.waiting[k]:
                ranks = [[rank[k].tolist() for rank in side] for side in self.ranks]
                self.finished.put(k, {"gain": self.gain[:, :, k].tolist(), "ranks": ranks})

    def merge(self, group: ProcessGroup) -> None:
        self.gain = group.sum(self.gain)
        self.ranks = [[[group.sum(rank) for rank in row] for row in side] for side in self.ranks]


class _Traces(Accumulator):
    """Traces of A and of G, and positions, by matrix: ``(3,)`` sums."""

    losses: Sequence[Loss]

    def __init__(self, seed: int) -> None:
        self.losses = (SampledLoss(seed + 1),)
        self.sums: dict[str, np.ndarray] = {}
        self.batch: Batch | None = None

    def begin(self, batch: Batch, loss: int) -> None:
        self.batch = batch

    def update(self, site: Site) -> None:
        a, count = real_positions(site.a, self.batch)
        square = _square(a)
        for name in site.names:
            self.sums[name] = self.sums.get(name, 0.0) + np.array([square, _square(site.b[name]), count])

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        whole = group.sum(np.array([self.sums.get(n, np.zeros(3)) for n in names]))
        self.sums |= dict(zip(names, whole, strict=True))


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x if x.dtype == torch.float64 else x.float()).double().square())


def damping_scale(
    model: nn.Module, data: Data, blocks: Sequence[Block], *, batch_size: int = 8, seed: int = 0, walk: str = "auto"
) -> tuple[float, float]:
    """Unit of the dampings: medians over matrices of the mean eigenvalues of A and of G, from a few of the sequences.

    A walk settles one layer before it has seen the next, so the unit, which needs all of them, is found first, on a quarter of
    the sequences and eight at most, chosen by their content so that their order does not matter: a unit, not an estimate.

    Args:
        model: The model.
        data: The calibration set.
        blocks: Blocks of the model.
        batch_size: Sequences per pass.
        seed: Of the sampled labels.
        walk: ``whole``, ``layers`` or ``auto``, as in :func:`layerbudget.execution.backward.feed`.

    Returns:
        ``(a, s)``.
    """
    count = max(1, min(8, data.samples // 4))
    keys = [key for batch in batches(model, data, batch_size) for key in batch.keys]
    few = data.select(sorted(sorted(range(data.samples), key=keys.__getitem__)[:count]))
    traces = _Traces(seed)
    alone = few.samples < process_group().size
    feed(model, few, blocks, traces, batch_size=batch_size, walk=walk, alone=alone)
    tokens = float(token_count(model, few))
    widths = {m.name: m for b in blocks for m in b.modules}
    each = [(a / count / widths[n].d_in, g / tokens / widths[n].d_out) for n, (a, g, count) in traces.sums.items()]
    a, g = np.median(each, axis=0)
    return float(a), float(g)


def whitened(factors: Sums | Tokens, a: float, s: float, count: int) -> tuple[Spectrum, Spectrum]:
    """Sum and largest of the squared singular values, of the whole gradient and of the difference of its two halves.

    ``factors`` is one matrix in two groups, ``a`` and ``s`` are the absolute dampings of its inputs' and its outputs' factor;
    the largest ``count`` are returned, descending.
    """
    if isinstance(factors, Tokens):
        return _from_tokens(factors, a, s, count)
    left = _cholesky(factors.g, s)
    halves = [torch.linalg.solve_triangular(left, part.double(), upper=False) for part in factors.parts]
    del left  # the factors of a wide matrix's two sides are never there together
    right = factors.cache.get(f"cholesky {a}")
    if right is None:
        right = factors.cache[f"cholesky {a}"] = _cholesky(factors.a, a)
    for j, inner in enumerate(halves):
        halves[j] = torch.linalg.solve_triangular(right, inner.T, upper=False).T
    return _spectrum(halves[0] + halves[1], count), _spectrum(halves[0] - halves[1], count)


def _spectrum(matrix: torch.Tensor, count: int) -> Spectrum:
    return float(matrix.square().sum()), largest_squared(matrix, count)[0]


def _cholesky(matrix: torch.Tensor, damping: float) -> torch.Tensor:
    damped = matrix.double()
    diagonal = damped.diagonal().clone()
    damped.diagonal().add_(damping)  # in its place: a copy would be as large as the factor
    factor, failed = torch.linalg.cholesky_ex(damped)
    damped.diagonal().copy_(diagonal)
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
    product = torch.empty(len(x), len(x), dtype=torch.float64)
    for start in range(0, len(x), _PANEL):
        panel = x[start : start + _PANEL] @ x[start:].T
        product[start : start + _PANEL, start:] = panel
        product[start:, start : start + _PANEL] = panel.T
    return product


def _root(tokens: Tokens, a: float) -> torch.Tensor:
    """R, ``(m, m)``, with ``R R' = P K (K + P a I)^-1``."""
    if "inputs" not in tokens.cache:
        tokens.cache["inputs"] = outer(tokens.x)
    gram, damping = tokens.cache["inputs"], tokens.positions * a
    level = float(gram.diagonal().mean())
    if damping >= _LEAST * level:
        raised = gram.clone()
        raised.diagonal().add_(4 * len(gram) * torch.finfo(torch.float64).eps * level)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not int(failed):
            inner = _cholesky(factor.T @ factor, damping)
            return tokens.positions**0.5 * torch.linalg.solve_triangular(inner, factor.T, upper=False).T
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    return vectors * (tokens.positions * values / (values + damping)).sqrt()


def _from_tokens(tokens: Tokens, a: float, s: float, count: int) -> tuple[Spectrum, Spectrum]:
    root = tokens.cache.get(f"root {a}")
    if root is None:
        root = tokens.cache[f"root {a}"] = _root(tokens, a)
    of = [tokens.group == j for j in (0, 1)]
    if tokens.b.shape[1] < len(tokens.b):
        factor = _cholesky(outer(tokens.drawn.T) / tokens.scale, s)
        half = torch.linalg.solve_triangular(factor, tokens.b.T.double(), upper=False)
        first, second = (half[:, rows] @ root[rows] for rows in of)
        within, across = first @ first.T + second @ second.T, first @ second.T
    else:
        cross = (tokens.drawn @ tokens.b.T).double()
        solved = torch.linalg.solve_triangular(_cholesky(outer(tokens.drawn), tokens.scale * s), cross, upper=False)
        middle = (outer(tokens.b) - outer(solved.T)) / s
        images = [middle[:, rows] @ root[rows] for rows in of]
        within = sum((root[rows].T @ image[rows] for rows, image in zip(of, images, strict=True)), torch.zeros_like(root))
        across = root[of[1]].T @ images[0][of[1]]
    across = across + across.T
    return _top(within + across, count), _top(within - across, count)


def _top(product: torch.Tensor, count: int) -> Spectrum:
    """Trace and ``count`` largest eigenvalues of a symmetric matrix, zeros where it has fewer."""
    values = torch.linalg.eigvalsh((product + product.T) / 2).flip(0).clamp_min(0)[:count]
    return float(product.trace()), torch.nn.functional.pad(values, (0, count - len(values)))


def largest_squared(matrix: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """The ``count`` largest squared singular values, descending, and how much the last step still changed them (relative).

    >>> values, error = largest_squared(torch.diag(torch.arange(5.0, 0, -1)), 2)
    >>> values.tolist(), error
    ([25.0, 16.0], 0.0)
    """
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    if matrix.shape[0] <= max(SMALL, 4 * count):
        values = torch.linalg.eigvalsh((matrix @ matrix.T).double()).flip(0).clamp_min(0)
        return values[:count], 0.0
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(matrix.shape[0], count + 8, generator=generator, dtype=torch.float64).to(matrix)
    base = latest = torch.linalg.qr(matrix @ (matrix.T @ block))[0]
    before: torch.Tensor | None = None
    change = 1.0
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
        latest = matrix @ (matrix.T @ latest)
        for _ in range(2):  # twice is enough
            latest = latest - base @ (base.T @ latest)
        latest = torch.linalg.qr(latest)[0]
        base = torch.cat([base, latest], 1)
    return values, change
