"""K-FAC and EK-FAC, one Kronecker-factored curvature per weight matrix.

K-FAC (expand setting): ``C ~ G (x) A`` with ``A = mean_t a_t a_t'`` over positions and ``G = (1/N) sum_t b_t b_t'``, ``b`` the
output gradients of the summed loss under labels drawn from the model (empirical labels on request). Damping is exact, in the
eigenbasis: with ``A = Q_A diag(l_A) Q_A'``, ``G = Q_G diag(l_G) Q_G'`` and ``M = Q_G' dW Q_A``,

    zeta^2(tau) = sum_ij M_ij^2 / (L_ij + tau),   L = l_G l_A'  (K-FAC),   L = (1/N) sum_i (Q_G' S_i Q_A)^2  (EK-FAC),

S_i being sampled-label gradients of sequence i (George et al. 2018). Gains of a block add over its matrices: coupling between
matrices is dropped. Fused experts have no hooks and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import InvalidInput
from ...execution.loss import Batch, Data, token_count
from ...execution.processes import ProcessGroup
from ...execution.sites import Site
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from ..kept import Kept, matrices_of
from . import common
from .kronecker import Factors, Sums, Tokens, collect, factors_of
from .rotated import Rotated, basis, rotated, second_moments, token_basis


def score_kfac(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    seed: int | None = None,
    progress: Progress | None = None,
    labels: str = "sampled",
    draws: int | None = None,
    groups: int = 4,
    walk: str = "auto",
    kept: Kept | None = None,
) -> Scores:
    """Gain under K-FAC with exact damping.

    The gradient is kept in J groups of sequences. The noise floor is ``sum_j (g_j - g)'(C + tau I)^-1 (g_j - g) / (J(J-1))``
    over their mean gradients, the standard error a jackknife over them, both with the curvature held fixed.

    Args:
        model: The model.
        data: The calibration set.
        blocks: K blocks.
        damping: One or several; ``None`` for the default sweep.
        damping_unit: ``max`` (of a block's largest Kronecker eigenvalue), ``mean`` or ``absolute``.
        batch_size: Sequences per pass.
        seed: Of the sampled labels, which depend on a sequence's content and not on its place; 0 by default.
        progress: Called with sequences done and in total.
        labels: ``sampled`` from the model (the Fisher), or the ``data``'s own (the empirical Fisher).
        draws: Draws of sampled labels per token, 1 by default.
        groups: Groups of sequences, one per sequence at most.
        walk: ``whole`` graph, by ``layers``, or ``auto``: whole where it fits. By layers one layer's factors exist at a time
            (all of them with ``damping_unit='median'`` or the absolute default sweep, which wait for the last block).
        kept: Blocks that an earlier run has finished; where finished ones are kept.

    Returns:
        Gains per block; ``extra['by_module']`` has them per weight matrix.

    Raises:
        CoverageError: Fused experts, or a weight matrix that was never seen.
        InvalidInput: An argument outside its domain, or a seed or draws where no label is sampled.
    """
    return _score(
        model, data, blocks, damping, damping_unit, batch_size, seed, progress, labels, draws, groups, walk, False, kept
    )


def score_ekfac(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    seed: int | None = None,
    progress: Progress | None = None,
    labels: str = "sampled",
    draws: int | None = None,
    groups: int = 4,
    walk: str = "auto",
    kept: Kept | None = None,
) -> Scores:
    """Gain under EK-FAC: as :func:`score_kfac`, with eigenvalues replaced by exact second moments.

    Raises:
        CoverageError: Fused experts, or a weight matrix that was never seen.
        InvalidInput: As :func:`score_kfac`.
    """
    return _score(
        model, data, blocks, damping, damping_unit, batch_size, seed, progress, labels, draws, groups, walk, True, kept
    )


class _Settling:
    """Quadratic forms block by block, as soon as a block's matrices are whole and its damping is known."""

    def __init__(
        self, blocks: Sequence[Block], damping: float | Sequence[float] | None, unit: str, groups: int, kept: Kept | None = None
    ) -> None:
        self.blocks, self.damping, self.unit, self.groups = blocks, damping, unit, groups
        self.place = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        self.waiting = [len(b.modules) for b in blocks]
        self.held: list[dict[str, Rotated]] = [{} for _ in blocks]
        self.largest, self.trace = np.zeros(len(blocks)), np.zeros(len(blocks))
        self.forms: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.local = unit in ("max", "mean") or (unit == "absolute" and damping is not None)
        self.kept = kept if self.local else None
        found = {} if self.kept is None else self.kept.found()
        for k, record in found.items():
            self.largest[k], self.trace[k], self.waiting[k] = record["largest"], record["trace"], 0
            for name, forms in record["forms"].items():
                whole, noise, jack = (np.array(form) for form in forms)
                self.forms[name] = (whole, noise, jack)
        self.done = matrices_of(blocks, list(found))

    def add(self, name: str, found: Rotated) -> None:
        """Take one matrix; settle its block if it was the last."""
        k = self.place[name]
        self.held[k][name] = found
        self.largest[k] = max(self.largest[k], float(found.eigenvalues.max()) if found.eigenvalues.numel() else 0.0)
        self.trace[k] += float(found.eigenvalues.sum())
        self.waiting[k] -= 1
        if self.local and not self.waiting[k]:
            self._settle(k, self.dampings(k)[1][:, 0])
            if self.kept is not None:
                forms = {m.name: [form.tolist() for form in self.forms[m.name]] for m in self.blocks[k].modules}
                self.kept.put(k, {"largest": float(self.largest[k]), "trace": float(self.trace[k]), "forms": forms})

    @property
    def mean(self) -> np.ndarray:
        """Mean eigenvalue of every block."""
        return self.trace / np.array([b.numel for b in self.blocks])

    def dampings(self, k: int | None = None) -> tuple[tuple[float, ...], np.ndarray]:
        """Recorded and absolute dampings, of all blocks or of one."""
        own = slice(None) if k is None else slice(k, k + 1)
        return common.resolve_damping(self.damping, self.unit, self.largest[own], self.mean[own])

    def _settle(self, k: int, tau: np.ndarray) -> None:
        for name, found in self.held[k].items():
            self.forms[name] = found.forms(tau)
        self.held[k] = {}

    def merge(self, group: ProcessGroup) -> None:
        """Bring the owners' blocks together."""
        self.largest, self.trace = group.sum(self.largest), group.sum(self.trace)
        if self.local:
            self.forms = {name: forms for found in group.gather(self.forms) for name, forms in found.items()}
        else:
            everything = group.gather(self.held)
            self.held = [{n: r for held in everything for n, r in held[k].items()} for k in range(len(self.blocks))]

    def finish(self) -> tuple[tuple[float, ...], np.ndarray]:
        """Settle what waited for all blocks; the dampings."""
        values, tau = self.dampings()
        for k in range(len(self.blocks)):
            self._settle(k, tau[:, k])
        return values, tau


class _Corrected(Factors):
    """EK-FAC: sums take a second pass for the second moments in their eigenbasis; tokens have them already."""

    again: dict[str, tuple[Sums, torch.Tensor]]
    receive: Any
    _rows: dict[str, torch.Tensor]
    _second: bool

    def prepare(self, receive: Any) -> None:
        """Where finished matrices go."""
        self.again, self.receive, self._second, self._rows = {}, receive, False, {}
        self.settle = self._first

    def _first(self, name: str, found: Sums | Tokens) -> None:
        if isinstance(found, Tokens):
            turned = rotated(found, self.groups)
            turned.eigenvalues = second_moments(found, token_basis(found))
            self.receive(name, turned)
        else:
            qg, qa = basis(found)
            self.again[name] = (found, torch.zeros(len(qg), len(qa), dtype=torch.float64, device=qg.device))

    def needs(self, loss: int) -> bool:
        """The second pass reads drawn labels only."""
        return super().needs(loss) and (not self._second or loss > 0 or self.own)

    def update(self, site: Site) -> None:
        """Second pass: per-sequence gradients in the eigenbasis."""
        if not self._second:
            super().update(site)
            return
        for name in site.names:
            if name not in self.again:
                continue
            qg, qa = (q.to(self.dtype) for q in basis(self.again[name][0]))
            rows = torch.bmm((site.b[name].to(self.dtype) @ qg).transpose(1, 2), site.a.to(self.dtype) @ qa)
            self._rows[name] = self._rows[name] + rows if name in self._rows else rows

    def finish(self, batch: Batch, loss: int) -> None:
        """Square the rows of the batch and add them up."""
        for name, rows in self._rows.items():
            self.again[name][1].add_(rows.square_().sum(0, dtype=torch.float64))
        self._rows = {}

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """The second pass adds moments; every process needs every eigenbasis for it, so all of them settle."""
        if not self._second:
            super().share(names, group)
        else:
            group.reduce([moments for _, moments in self.again.values()])

    def owns(self, name: str) -> bool:
        """All processes."""
        return True

    def finalize(self, names: Sequence[str]) -> bool:
        """Ask for the second pass; settle after it."""
        if not self._second:
            super().finalize(names)
            self._second = bool(self.again)
            return self._second
        for name, (found, moments) in self.again.items():
            turned = rotated(found, self.groups)
            turned.eigenvalues = moments / self._scale
            self.receive(name, turned)
        self.again, self._second = {}, False
        return False


def _score(
    model: nn.Module, data: Data, blocks: Sequence[Block], damping: float | Sequence[float] | None, damping_unit: str,
    batch_size: int, seed: int | None, progress: Progress | None, labels: str, draws: int | None, groups: int, walk: str,
    corrected: bool, kept: Kept | None,
) -> Scores:  # fmt: skip
    common.check_arguments(damping, damping_unit, data, batch_size)
    if labels == "data" and (seed is not None or draws is not None):
        raise InvalidInput(
            f"{'seed' if seed is not None else 'draws'} was given with labels='data'.",
            "Only sampled labels read it.",
            "Leave it out.",
        )
    seed, draws = seed or 0, 1 if draws is None else draws
    settling = _Settling(blocks, damping, damping_unit, groups, kept)
    factors = factors_of(
        model, data, blocks, lambda name, found: settling.add(name, rotated(found, factors.groups)), seed=seed, labels=labels,
        draws=draws, groups=groups, kind=_Corrected if corrected else Factors,
    )  # fmt: skip
    if isinstance(factors, _Corrected):
        factors.prepare(settling.add)
    factors.after = None if corrected else settling.merge
    factors.done = settling.done
    tick = Steps(progress, data.samples)
    collect(model, data, blocks, factors, batch_size=batch_size, walk=walk, tick=tick)
    values, tau = settling.finish()
    gain, floor, error = (np.zeros_like(tau) for _ in range(3))
    for k, block in enumerate(blocks):
        left_out: Any = 0.0
        for m in block.modules:
            whole, noise, jack = settling.forms[m.name]
            gain[:, k] += whole
            floor[:, k] += noise
            left_out = left_out + jack
        count = left_out.shape[1]
        error[:, k] = np.sqrt((count - 1) * left_out.var(1)) if count > 1 else np.nan
        floor[:, k] = floor[:, k] if count > 1 else np.nan
    extra = {
        "curvature": f"{'EK-FAC' if corrected else 'K-FAC'}, {labels} labels"
        + (f", {draws} draws" if labels == "sampled" else ""),
        "tokens": token_count(model, data),
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": settling.largest.tolist(),
        "mean_eigenvalue": settling.mean.tolist(),
        "trace": settling.trace.tolist(),
        "excess": (gain - floor).tolist(),
        "by_module": {m.name: settling.forms[m.name][0].tolist() for b in blocks for m in b.modules},
    }
    return common.record(
        model, data, blocks, "ekfac" if corrected else "kfac", gain=gain.tolist(), damping=values, damping_unit=damping_unit,
        standard_error=error.tolist(), noise_floor=floor.tolist(), seed=seed, extra=extra,
    )  # fmt: skip
