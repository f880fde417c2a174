"""Scores from gradients and their squares alone: the diagonal Fisher, the squared gradient norm and the Fisher's trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ...execution.backward import feed
from ...execution.loss import IGNORE, Batch, Data
from ...execution.processes import ProcessGroup
from ...execution.sites import Site
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .common import Damping, Dampings, Unit
from .gradients import Gradients, Summed

_PIECE = 1 << 15  # entries: what a sweep reads again and again fits into the second-level cache
_GROUPS = 4


class _Diagonal(Gradients):
    def __init__(
        self, blocks: Sequence[Block], dtype: torch.dtype, groups: int, counts: np.ndarray, damping: Damping, unit: str
    ) -> None:
        super().__init__(blocks, dtype)
        self.blocks, self.groups, self.samples = blocks, groups, len(counts)
        self.damping, self.unit, self.total = damping, unit, float(counts.sum())
        owner = np.arange(self.samples) * groups // self.samples
        self.tokens = np.array([counts[owner == g].sum() for g in range(groups)])
        self.waiting = [len(b.modules) for b in blocks]
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}
        self.largest, self.mean = np.zeros(len(blocks)), np.zeros(len(blocks))
        self.swept: dict[int, np.ndarray] = {}

    def bytes(self, blocks: Sequence[Block]) -> int:
        return 2 * self.groups * sum(b.numel for b in blocks) * self.dtype.itemsize

    def add(self, name: str, rows: torch.Tensor) -> None:
        if name not in self.first:
            self.first[name] = rows.new_zeros(self.groups, *rows.shape[1:])
            self.second[name] = torch.zeros_like(self.first[name])
        for i, row in enumerate(rows):  # while they are in the cache
            g = (self.rows.start + i) * self.groups // self.samples
            self.first[name][g] += row
            self.second[name][g].addcmul_(row, row)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        group.reduce([table[n] for table in (self.first, self.second) for n in names if n in table])

    def finalize(self, names: Sequence[str]) -> bool:
        """See :meth:`Accumulator.finalize`."""
        for name in [n for n in names if n in self.place]:
            k = self.place[name]
            if name in self.second:
                d = self.second[name].sum(0)
                self.largest[k] = max(self.largest[k], float(d.max()) / self.total)
                self.mean[k] += float(d.sum(dtype=torch.float64)) / self.total / self.blocks[k].numel
            self.waiting[k] -= 1
            if common.is_local(self.damping, self.unit) and not self.waiting[k]:
                block_slice = slice(k, k + 1)
                self._sweep(
                    k, Dampings.of(self.damping, self.unit, self.largest[block_slice], self.mean[block_slice]).tau[:, 0]
                )
        return False

    def _sweep(self, k: int, tau: np.ndarray) -> None:
        sums = np.zeros((2 + self.groups, len(tau)))
        for name in [m.name for m in self.blocks[k].modules if m.name in self.first]:
            sums += _sweep(self.first.pop(name).flatten(1), self.second.pop(name).flatten(1), self.tokens, tau)
        self.swept[k] = sums

    def settled(self) -> Dampings:
        """Sweep the blocks whose dampings waited for the last one."""
        damped = Dampings.of(self.damping, self.unit, self.largest, self.mean)
        for k in range(len(self.blocks)):
            if k not in self.swept:
                self._sweep(k, damped.tau[:, k])
        return damped


def _sweep(first: torch.Tensor, second: torch.Tensor, tokens: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """``sum g^2/(D+tau)``, ``sum D/(D+tau)``, and the first again with one group left out at a time: ``(2 + groups, D)``."""
    groups, n = len(first), float(tokens.sum())
    out = np.zeros((2 + groups, len(tau)))
    for start in range(0, first.shape[1], _PIECE):
        f, s = first[:, start : start + _PIECE], second[:, start : start + _PIECE]
        f_all, s_all = f.sum(0), s.sum(0)
        for row in (0, *range(2, 2 + groups)):
            left = f_all if row == 0 else f_all - f[row - 2]
            squares = s_all if row == 0 else s_all - s[row - 2]
            m = n if row == 0 else max(n - float(tokens[row - 2]), 1.0)
            g, d = (left / m).square_(), squares / m
            for i, t in enumerate(tau):
                inverse = (d + float(t)).reciprocal_()
                out[row, i] += float(torch.dot(g, inverse))
                if row == 0:
                    out[1, i] += float(torch.dot(d, inverse))
    return out


def score_diagonal(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    walk: str = "auto",
) -> Scores:
    """Gain under the diagonal empirical Fisher, ``sum_p g_p^2 / (D_p + tau)`` with ``D_p = (1/N) sum_i s_ip^2``.

    The noise floor is exact, ``(1/N) sum_p D_p/(D_p + tau)`` (random signs of the sequences' gradients), the standard error a
    jackknife over four groups of sequences. Memory: eight times the blocks' parameters in the ``whole`` graph, one layer's by
    ``layers``.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`.
    """
    groups = min(_GROUPS, data.samples)
    dtype = common.real_type(model)[0]
    sums = _Diagonal(blocks, dtype, groups, common.token_counts(model, data), damping, damping_unit)
    fed = feed(model, data, blocks, sums, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    damped = sums.settled()
    gain, floor, error = (np.zeros_like(damped.tau) for _ in range(3))
    for k in range(len(blocks)):
        swept = sums.swept[k]
        gain[:, k], floor[:, k] = swept[0], swept[1] / sums.total
        error[:, k] = np.sqrt((groups - 1) * np.var(swept[2:], axis=0)) if groups > 1 else np.nan
    extra = {"tokens": int(sums.total), "mean_loss": fed.loss / sums.total, "excess": gain - floor}
    name, fields = "diagonal empirical Fisher", {"standard_error": error, "noise_floor": floor}
    return damped.record(blocks, "fisher-diagonal", gain, name, **fields, extra=extra)


class _Norms(Summed):
    """``|sum_b G_b|^2`` and ``sum_b |G_b|^2`` of every block, ``G_b`` the gradient of a batch's summed loss."""

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype) -> None:
        super().__init__(blocks, dtype)
        self.square, self.squares = np.zeros(len(blocks)), np.zeros(len(blocks))
        self.counts: dict[int, int] = {}

    def begin(self, batch: Batch, loss: int) -> None:
        self.counts[batch.rows.start] = int((batch.targets != IGNORE).sum())

    def add(self, name: str, rows: torch.Tensor) -> None:
        self.squares[self.place[name]] += float(torch.linalg.vector_norm(rows)) ** 2
        super().add(name, rows)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        group.reduce([self.sums[n] for n in names if n in self.sums])

    def merge(self, group: ProcessGroup) -> None:
        self.squares = group.sum(self.squares)
        self.counts = {k: v for counts in group.gather(self.counts) for k, v in counts.items()}

    def finalize(self, names: Sequence[str]) -> bool:
        for name in [n for n in names if n in self.sums]:
            self.square[self.place[name]] += float(torch.linalg.vector_norm(self.sums.pop(name))) ** 2
        return False


def score_gradient_norm(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    walk: str = "auto",
    progress: Progress | None = None,
) -> Scores:
    """``|g_k|^2`` of the mean token loss; one forward and backward pass.

    The plain value is inflated by ``tr(Sigma)/n``; ``extra['unbiased']`` removes that by pairing different batches only,
    ``(|sum_b G_b|^2 - sum_b |G_b|^2) / (N^2 - sum_b N_b^2)``, ``G_b`` the summed gradient of batch b with ``N_b`` tokens. The
    difference of the two is the noise floor.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`.
    """
    sums = _Norms(blocks, common.real_type(model)[0])
    fed = feed(model, data, blocks, sums, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    counts = np.array(list(sums.counts.values()))
    n = float(counts.sum())
    pairs = n**2 - float(np.square(counts).sum())
    unbiased = (sums.square - sums.squares) / pairs if pairs > 0 else np.full(len(blocks), np.nan)
    plain = sums.square / n**2
    floor = [None if np.isnan(u) else p - u for p, u in zip(plain, unbiased, strict=True)]
    extra = {"unbiased": unbiased, "tokens": int(n), "mean_loss": fed.loss / n}
    return common.record(
        blocks, "gradient-norm", gain=[plain.tolist()], noise_floor=[floor], unit="(nats per parameter)^2", extra=extra
    )


class _SequenceNorms(Gradients):
    """Squared norms of the gradients of every sequence, ``(K, n)``."""

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype, samples: int) -> None:
        super().__init__(blocks, dtype)
        self.table = np.zeros((len(blocks), samples))

    def update(self, site: Site) -> None:
        """Norms without the gradients, where a matrix is used once; the gradients of several uses are summed, then squared."""
        once = [name for name in site.names if not site.open.get(name, 0) and name not in self._batch]
        for name in once:
            norms = _square_norms(site.a.to(self.dtype), site.b[name].to(self.dtype))
            self.table[self.place[name], self.rows] += norms.cpu().numpy()
        super().update(dataclasses.replace(site, names=[name for name in site.names if name not in once]))

    def add(self, name: str, rows: torch.Tensor) -> None:
        self.table[self.place[name], self.rows] += rows.double().square().flatten(1).sum(1).cpu().numpy()

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Nothing: every process fills the columns of its own sequences."""

    def merge(self, group: ProcessGroup) -> None:
        self.table = group.sum(self.table)


def _square_norms(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``|S_i|^2 = sum_ts (A_i A_i')_ts (B_i B_i')_ts`` where the sequence is short beside the matrix, else from ``S_i``."""
    length, d_in, d_out = a.shape[1], a.shape[2], b.shape[2]
    if length * (d_in + d_out) < d_in * d_out:
        return ((a @ a.mT) * (b @ b.mT)).double().sum((1, 2))
    return (b.mT @ a).double().square().sum((1, 2))


def score_trace(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    walk: str = "auto",
    progress: Progress | None = None,
) -> Scores:
    """``tr F_k = (1/N) sum_i |s_i|^2``, ``s_i`` the gradient of the summed loss of sequence i in block k, N tokens.

    The sum of the eigenvalues that the dampings of every curvature refer to.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`.
    """
    norms = _SequenceNorms(blocks, common.real_type(model)[0], data.samples)
    feed(model, data, blocks, norms, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    return common.over_sequences(
        blocks, "fisher-trace", norms.table, common.token_counts(model, data), unit="nats^2 per parameter^2"
    )
