"""Kronecker factors of every weight matrix: sums, eigenbases and the corrected eigenvalues of EK-FAC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import CoverageError, InvalidInput
from ...records import Block
from ...running.loss import Batch, Data, sampled_targets, token_count
from ...running.sites import Collector, Site
from . import common

_PANEL = 128


class _Factors:
    """Sums of ``a a'`` (shared by matrices with one input), ``b b'`` and gradients by group of sequences."""

    def __init__(self, dtype: torch.dtype, groups: int) -> None:
        self.dtype, self.groups = dtype, groups
        self.a: dict[str, torch.Tensor] = {}
        self.g: dict[str, torch.Tensor] = {}
        self.share: dict[str, str] = {}
        self.gradient: dict[str, torch.Tensor] = {}
        self.positions: dict[str, float] = {}
        self.group, self.mode = 0, "both"
        self.mask: torch.Tensor | None = None

    def __call__(self, site: Site) -> None:
        a = site.a.to(self.dtype)
        flat = a.reshape(-1, a.shape[-1])
        if self.mode in ("factors", "both"):
            self._input(site, a)
        for name in site.names:
            b = site.b[name].to(self.dtype).reshape(-1, site.b[name].shape[-1])
            if self.mode in ("factors", "both"):
                _accumulate(self.g, name, b)
            if self.mode in ("gradient", "both"):
                if name not in self.gradient:
                    self.gradient[name] = b.new_zeros(self.groups, b.shape[1], flat.shape[1])
                self.gradient[name][self.group].addmm_(b.T, flat)

    def _input(self, site: Site, a: torch.Tensor) -> None:
        key = self.share.get(site.names[0], site.names[0])
        if self.mask is not None and self.mask.shape == a.shape[:2]:
            rows, count = a * self.mask[..., None], float(self.mask.sum())
        else:
            rows, count = a, float(a.shape[0] * a.shape[1])
        _accumulate(self.a, key, rows.reshape(-1, rows.shape[-1]))
        self.positions[key] = self.positions.get(key, 0.0) + count
        for name in site.names:
            self.share.setdefault(name, key)


def _accumulate(store: dict[str, torch.Tensor], key: str, rows: torch.Tensor) -> None:
    """Add ``rows' rows``: panels on and above the diagonal only, which is all that :func:`_symmetric` reads."""
    width = rows.shape[1]
    if key not in store:
        store[key] = rows.new_zeros(width, width)
    for low in range(0, width, _PANEL):
        high = min(low + _PANEL, width)
        store[key][low:high, low:].addmm_(rows[:, low:high].T, rows[:, low:])


def _symmetric(panels: torch.Tensor) -> torch.Tensor:
    upper = panels.double().triu()
    return upper + upper.triu(1).T


class Kronecker:
    """Eigenbases, eigenvalues and gradients of every weight matrix, from one pass over the data."""

    def __init__(self, factors: _Factors, tokens: float) -> None:
        self.tokens, self.share = tokens, factors.share
        eigen_a = {k: torch.linalg.eigh(_symmetric(v) / factors.positions[k]) for k, v in factors.a.items()}
        self.a = {name: eigen_a[key] for name, key in factors.share.items()}
        self.g = {name: torch.linalg.eigh(_symmetric(v) / tokens) for name, v in factors.g.items()}
        self.gradients = factors.gradient
        self.eigenvalues = {name: torch.outer(self.g[name][0].clamp_min(0), self.a[name][0].clamp_min(0)) for name in self.g}

    def rotated(self, name: str, matrices: torch.Tensor) -> torch.Tensor:
        """``Q_G' S Q_A`` of a stack of matrices."""
        return self.g[name][1].T @ matrices.double() @ self.a[name][1]


class _Lambda:
    """Second pass of EK-FAC: sums of squared rotated per-sequence gradients."""

    def __init__(self, kronecker: Kronecker, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.share = kronecker.share
        self.qa = {n: v[1].to(dtype) for n, v in kronecker.a.items()}
        self.qg = {n: v[1].to(dtype) for n, v in kronecker.g.items()}
        self.sums: dict[str, torch.Tensor] = {}
        self._batch: dict[str, torch.Tensor] = {}

    def __call__(self, site: Site) -> None:
        a = site.a.to(self.dtype) @ self.qa[site.names[0]]
        for name in site.names:
            b = site.b[name].to(self.dtype) @ self.qg[name]
            rows = torch.bmm(b.transpose(1, 2), a)
            self._batch[name] = self._batch[name] + rows if name in self._batch else rows

    def finish(self) -> None:
        """Square the rows of the batch and add them up."""
        for name, rows in self._batch.items():
            square = rows.square_().sum(0, dtype=torch.float64)
            self.sums[name] = self.sums[name] + square if name in self.sums else square
        self._batch.clear()


def _check_options(labels: str, draws: int) -> None:
    if labels not in ("sampled", "data") or draws < 1:
        raise InvalidInput(f"labels={labels!r}, draws={draws}.", "labels is 'sampled' or 'data'; draws at least 1.", "")


def build(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    seed: int = 0,
    labels: str = "sampled",
    draws: int = 1,
    groups: int = 4,
    corrected: bool = False,
    tick: Any = None,
) -> Kronecker:
    """Kronecker factors, their eigendecompositions and the gradient of every weight matrix.

    Args:
        model: The model.
        data: The calibration set.
        blocks: Whose matrices.
        batch_size: Sequences per pass.
        seed: Of the sampled labels.
        labels: ``sampled`` from the model, or the ``data``'s own (empirical Fisher).
        draws: Label draws per token.
        groups: Groups of sequences in which gradients are kept, for errors.
        corrected: A second pass replaces the eigenvalues by exact second moments (EK-FAC).
        tick: Called with the sequences of every batch.

    Raises:
        CoverageError: Fused experts, or a weight matrix that was never seen.
        InvalidInput: Options outside their domain.
    """
    _check_options(labels, draws)
    dtype = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    groups = max(1, min(groups, -(-data.samples // batch_size)))
    factors = _Factors(dtype, groups)
    with Collector(model, blocks, factors) as collector:
        if collector.direct:
            raise CoverageError(
                f"K-FAC has no factors for {next(iter(collector.direct))}: it is not a Linear.",
                "Every matrix must be a Linear or a Conv1D.",
                "Use estimator='fisher-gram', or exclude the fused experts.",
            )
        for batch, logits in common.walk(model, data, collector, batch_size, tick):
            factors.group = batch.rows.start * groups // data.samples
            factors.mask = batch.kwargs.get("attention_mask")
            if labels == "data":
                common.backward(collector, batch, logits, batch.targets)
                continue
            for r in range(draws):
                factors.mode = "factors"
                common.backward(collector, batch, logits, sampled_targets(logits, batch, seed + r + 1), retain=True)
            factors.mode = "gradient"
            common.backward(collector, batch, logits, batch.targets)
        collector.check_coverage()
    if labels == "sampled":
        factors.g = {k: v / draws for k, v in factors.g.items()}
    kronecker = Kronecker(factors, float(token_count(model, data)))
    if corrected:
        _correct(model, data, blocks, kronecker, batch_size, seed, labels, draws, tick)
    return kronecker


def _correct(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    kronecker: Kronecker,
    batch_size: int,
    seed: int,
    labels: str,
    draws: int,
    tick: Any,
) -> None:
    second = _Lambda(kronecker, next(iter(kronecker.gradients.values())).dtype)
    with Collector(model, blocks, second) as collector:
        for batch, logits in common.walk(model, data, collector, batch_size, tick):
            for targets, last in _label_sets(logits, batch, labels, draws, seed):
                common.backward(collector, batch, logits, targets, retain=not last)
                second.finish()
    scale = kronecker.tokens * (draws if labels == "sampled" else 1)
    kronecker.eigenvalues = {k: v / scale for k, v in second.sums.items()}


def _label_sets(logits: torch.Tensor, batch: Batch, labels: str, draws: int, seed: int) -> Iterator[tuple[torch.Tensor, bool]]:
    if labels == "data":
        yield batch.targets, True
        return
    for r in range(draws):
        yield sampled_targets(logits, batch, seed + r + 1), r == draws - 1
