r"""Gain of every further rank: how much of a matrix's gradient a LoRA update of rank r can follow.

Let ``G`` be the gradient of the mean loss with respect to a weight matrix and ``A (x) S`` its Kronecker-factored curvature,
with damped factors. The best update of rank r lowers the quadratic model of the loss by half of

    zeta^2(r) = sigma_1^2 + ... + sigma_r^2,    sigma the singular values of  (S + s I)^-1/2  G  (A + a I)^-1/2

(Eckart-Young in the whitened coordinates, which keep ranks). ``zeta^2(full rank)`` is ``g' ((A + a I) (x) (S + s I))^-1 g``:
the gain of the paper under Kronecker-factored curvature whose damping is factored too (``kfac`` damps by ``tau I``), resolved
by rank. The increments ``sigma_i^2`` fall with i, so they make an exactly solvable program
(:func:`layerbudget.solvers.allocate_increments`) whose answer needs no surrogate utility. Without curvature ``zeta(r)`` is what
the linearised loss loses per unit of norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInput
from ..execution.backward import Accumulator, Loss, SampledLoss, feed
from ..execution.loss import Batch, Data, batches, token_count
from ..execution.processes import ProcessGroup, process_group
from ..execution.sites import Site, refuse_direct
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .curvature import common
from .curvature.gram import real_type
from .curvature.kronecker import Sums, Tokens, collect, factors_of
from .curvature.whitened import Spectrum, of_halves, whitened
from .kept import Kept, matrices_of

CURVATURES = ("none", "kfac")


def score_rank_gain(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    batch_size: int = 8,
    seed: int | None = None,
    progress: Progress | None = None,
    largest: int = 64,
    curvature: str = "kfac",
    walk: str = "auto",
    kept: Kept | None = None,
) -> Scores:
    """Squared singular values of every gradient, plain or whitened by K-FAC; partition by ``linear`` for ranks per matrix.

    The noise floor comes from two halves of the data, whose shares in ``G = G_1 + G_2`` have nearly the same expectation:
    ``|G_1 - G_2|^2``, in the whitened space.

    Args:
        model: The model.
        data: The calibration set, two sequences or more.
        blocks: K blocks. A block of several matrices gives every one of them the same rank; increments add up.
        damping: With ``kfac`` only: a and s in units of :func:`damping_scale`, the median over matrices of the factors' mean
            eigenvalues, 1 by default.
        batch_size: Sequences per pass.
        seed: Of the sampled labels of K-FAC; 0 by default.
        progress: Called with sequences done and in total.
        largest: How many ranks per matrix are kept.
        curvature: ``kfac`` or ``none``.
        walk: ``whole`` graph, by ``layers``, or ``auto``: whole where it fits. By layers, one layer's factors exist at a time.
        kept: Blocks that an earlier run has finished; where finished ones are kept.

    Returns:
        ``gain`` sums all ranks; ``extra['increments']`` has, per damping and block, the gain of the first, second, ... rank;
        ``extra['increments_floor']`` the same of ``G_1 - G_2``, which is noise: what noise alone gives each rank;
        ``extra['loss']`` the mean loss, which no training can gain more than.

    Raises:
        CoverageError: Fused experts, or a matrix that was never seen.
        InvalidInput: An argument outside its domain.
    """
    _check(data, batch_size, curvature, largest, damping=damping, seed=seed)
    refuse_direct(model, blocks, "no adapter goes there", routers=True)
    seed = seed or 0
    values = (0.0,) if curvature == "none" else common.check_damping(damping, "absolute") or (1.0,)
    work = _Spectra(blocks, values, largest, kept)
    tick = Steps(progress, data.samples)
    if curvature == "none":
        halves = _Halves(model, data, work)
        fed = feed(model, data, blocks, halves, batch_size=batch_size, walk=walk, tick=tick)
        scale = None
    else:
        scale = damping_scale(model, data, blocks, batch_size=batch_size, seed=seed, walk=walk)
        factors = factors_of(
            model, data, blocks, lambda name, found: work.add(name, found, scale), seed=seed, groups=2, interleaved=True
        )
        factors.after, factors.done, factors.closed = work.merge, work.done, work.settle
        factors.workers = torch.get_num_threads() if next(model.parameters()).device.type == "cpu" else 1
        fed = collect(model, data, blocks, factors, batch_size=batch_size, walk=walk, tick=tick)
    extra = {
        "curvature": "none" if curvature == "none" else "K-FAC, sampled labels",
        "tokens": token_count(model, data),
        **({"loss": fed.loss / token_count(model, data)} if fed.loss > 0 else {}),  # an earlier run saw it
        "increments": work.increments(0),
        "increments_floor": work.increments(1),
        "excess": (work.gain[0] - work.gain[1]).tolist(),
        **({} if scale is None else {"damping_scale": {"inputs": scale[0], "outputs": scale[1]}}),
    }
    return common.record(
        model, data, blocks, "rank-gain", gain=work.gain[0].tolist(), noise_floor=work.gain[1].tolist(), damping=values,
        seed=seed, extra=extra, damping_unit="none" if curvature == "none" else "median",
        unit="(nats per parameter)^2" if curvature == "none" else "nats of average loss",
    )  # fmt: skip


def _check(data: Data, batch_size: int, curvature: str, largest: int, **kfac: Any) -> None:
    """Refuse options outside their domain, and those of K-FAC without it."""
    common.check_inputs(data, batch_size)
    if curvature not in CURVATURES or largest < 1 or data.samples < 2:
        raise InvalidInput(
            f"curvature={curvature!r}, largest={largest}, {data.samples} sequences.",
            f"Curvatures are {' and '.join(CURVATURES)}; one rank and two sequences at least.",
            "",
        )
    given = [name for name, value in kfac.items() if value is not None]
    if curvature == "none" and given:
        raise InvalidInput(f"{given[0]} was given with curvature='none'.", "K-FAC alone reads it.", "Leave it out.")


class _Spectra:
    """Sums and largest squared singular values by damping and block, matrix by matrix."""

    def __init__(self, blocks: Sequence[Block], values: Sequence[float], largest: int, kept: Kept | None = None) -> None:
        self.values, self.place = values, {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        self.gain = np.zeros((2, len(values), len(blocks)))
        self.size = [min(largest, *(min(m.d_in, m.d_out) for m in b.modules)) for b in blocks]
        self.ranks = [[[np.zeros(n) for n in self.size] for _ in values] for _ in range(2)]
        self.kept, self.waiting = kept, [len(b.modules) for b in blocks]
        found = {} if kept is None else kept.found()
        for k, record in found.items():
            self.gain[:, :, k] = record["gain"]
            for side, row in itertools.product(range(2), range(len(values))):
                self.ranks[side][row][k][:] = record["ranks"][side][row]
        self.done = matrices_of(blocks, list(found))
        self._found: dict[tuple[str, int], tuple[Spectrum, Spectrum]] = {}

    def put(self, name: str, row: int, found: Sequence[Spectrum]) -> None:
        """Add one matrix at one damping: the whole gradient's, then the noise's."""
        k = self.place[name]
        for side, (total, largest) in enumerate(found):
            self.gain[side, row, k] += total
            self.ranks[side][row][k] += largest[: self.size[k]].cpu().numpy()
        if row == len(self.values) - 1:  # the matrix is done
            self.waiting[k] -= 1
            if self.kept is not None and not self.waiting[k]:
                ranks = [[rank[k].tolist() for rank in side] for side in self.ranks]
                self.kept.put(k, {"gain": self.gain[:, :, k].tolist(), "ranks": ranks})

    def add(self, name: str, found: Sums | Tokens, scale: tuple[float, float]) -> None:
        """Whiten one matrix at every damping."""
        for row, value in enumerate(self.values):
            self._found[name, row] = whitened(found, value * scale[0], value * scale[1], self.size[self.place[name]])

    def settle(self) -> None:
        """Add what was whitened up, in the order of the matrices, whichever thread was first."""
        for name in self.place:
            for row in range(len(self.values)):
                if (name, row) in self._found:
                    self.put(name, row, self._found.pop((name, row)))

    def merge(self, group: ProcessGroup) -> None:
        """Add up what the owners found."""
        self.settle()
        self.gain = group.sum(self.gain)
        self.ranks = [[[group.sum(rank) for rank in row] for row in side] for side in self.ranks]

    def increments(self, side: int) -> list[list[list[float]]]:
        """Gain of every further rank by damping and block."""
        return [[rank.tolist() for rank in row] for row in self.ranks[side]]


class _Halves(Accumulator):
    """Shares of the even and the odd sequences in the mean gradient of every matrix."""

    def __init__(self, model: nn.Module, data: Data, work: _Spectra) -> None:
        self.dtype = real_type(model)[0]
        self.tokens, self.work = token_count(model, data), work
        self.sums: dict[str, torch.Tensor] = {}
        self.first = 0

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Two gradients per matrix."""
        return 2 * sum(b.numel for b in blocks) * self.dtype.itemsize

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember where the batch begins."""
        self.first = batch.rows.start

    def update(self, site: Site) -> None:
        """Add the sequences of each half."""
        for name in (n for n in site.names if n not in self.work.done):
            for half in (0, 1):
                rows = slice((self.first + half) % 2, None, 2)
                b, a = (x[rows].to(self.dtype).flatten(0, 1) for x in (site.b[name], site.a))
                if name not in self.sums:
                    self.sums[name] = torch.zeros(2, b.shape[1], a.shape[1], dtype=self.dtype, device=b.device)
                self.sums[name][half] += b.T @ a

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Add the halves up."""
        group.reduce([self.sums[n] for n in names])

    def finalize(self, names: Sequence[str]) -> bool:
        """Singular values, matrix by matrix."""
        for name in [n for n in names if n in self.sums]:
            even, odd = self.sums.pop(name).double() / self.tokens
            self.work.put(name, 0, of_halves([even, odd], self.work.size[self.work.place[name]]))
        return False


class _Traces(Accumulator):
    """Traces of every matrix's factors."""

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Each sequence counts once."""
        for table in (self.a, self.g, self.positions):
            for name, value in zip(names, group.sum(np.array([table.get(n, 0.0) for n in names])), strict=True):
                table[name] = float(value)

    losses: Sequence[Loss]

    def __init__(self, seed: int) -> None:
        self.losses = (SampledLoss(seed + 1),)
        self.a: dict[str, float] = {}
        self.g: dict[str, float] = {}
        self.positions: dict[str, float] = {}
        self.mask: torch.Tensor | None = None

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember which tokens are real."""
        self.mask = batch.kwargs.get("attention_mask")

    def update(self, site: Site) -> None:
        """Add the squares of a site."""
        a = site.a
        count = float(a.shape[0] * a.shape[1])
        if self.mask is not None and self.mask.shape == a.shape[:2]:
            a, count = a * self.mask[..., None], float(self.mask.sum())
        square = float(torch.linalg.vector_norm(a.float() if a.dtype != torch.float64 else a).double().square())
        for name in site.names:
            b = site.b[name]
            norm = torch.linalg.vector_norm(b.float() if b.dtype != torch.float64 else b).double()
            self.a[name] = self.a.get(name, 0.0) + square
            self.g[name] = self.g.get(name, 0.0) + float(norm.square())
            self.positions[name] = self.positions.get(name, 0.0) + count


def damping_scale(
    model: nn.Module, data: Data, blocks: Sequence[Block], *, batch_size: int = 8, seed: int = 0, walk: str = "auto"
) -> tuple[float, float]:
    """Unit of the dampings: medians over matrices of the mean eigenvalues of A and of G, from a few of the sequences.

    A walk settles one layer before it has seen the next, so the unit, which needs all of them, is found first, on a quarter of
    the sequences and eight at most, chosen by their content so that their order does not matter: a unit, not an estimate.

    Returns:
        ``(a, s)``.
    """
    count = max(1, min(8, data.samples // 4))
    keys = [key for batch in batches(model, data, batch_size) for key in batch.keys]
    few = data.select(sorted(sorted(range(data.samples), key=keys.__getitem__)[:count]))
    traces = _Traces(seed)
    together = process_group()
    alone = together is not None and few.samples < together.size
    feed(model, few, blocks, traces, batch_size=batch_size, walk=walk, alone=alone)
    tokens = float(token_count(model, few))
    widths = {m.name: m for b in blocks for m in b.modules}
    a = [traces.a[n] / traces.positions[n] / widths[n].d_in for n in traces.a]
    g = [traces.g[n] / tokens / widths[n].d_out for n in traces.g]
    return float(np.median(a)), float(np.median(g))
