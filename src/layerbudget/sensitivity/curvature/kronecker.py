r"""Kronecker factors of every weight matrix and its gradient, matrix by matrix, as sums or as the tokens themselves.

``A = (1/P) sum_t a_t a_t'`` over P real positions, ``G = (1/N) sum_t b~_t b~_t'`` with the output gradients of the summed loss
under drawn labels, and the gradient ``dW_j = sum_t b_t a_t'`` of every group j of sequences. Where there are fewer tokens than
a matrix is wide, the tokens X (m x d_in), B~ and B (m x d_out) are kept instead of d_in x d_in and d_out x d_out sums, and
whatever is asked of the factors is answered from m x m products: the factors' ranks cannot exceed m.

A matrix is settled as soon as its batches are through, so a walk by layers never holds more than one layer's factors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import CoverageError, InvalidInput
from ...execution.backward import Accumulator, Loss, SampledLoss, data_loss
from ...execution.loss import Batch, Data, token_count
from ...execution.panels import add_products, panels, symmetric
from ...execution.processes import ProcessGroup
from ...execution.sites import Site, refuse_direct
from ...models.machine import in_threads
from ...records import Block, Module
from ..stored import Finished
from .common import real_type


@dataclasses.dataclass(eq=False)
class Sums:
    """One matrix by sums.

    Attributes:
        a: ``(d_in, d_in)`` mean of ``a a'``, float64; matrices with one input share it.
        g: ``(d_out, d_out)`` ``(1/N) sum b~ b~'``, float64.
        parts: ``(J, d_out, d_in)`` gradients of the groups, divided by N.
        cache: Of whatever is derived from ``a``, by name; shared as ``a`` is.
    """

    a: torch.Tensor
    g: torch.Tensor
    parts: torch.Tensor
    cache: dict[str, Any]

    def eigen(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Eigenvalues and eigenvectors of G and of A, computed once; those of A once for matrices that share an input."""
        if "eigen" not in self.cache:
            self.cache["eigen"] = torch.linalg.eigh(self.a)
        return self._eigen_g, self.cache["eigen"]

    @functools.cached_property
    def _eigen_g(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.linalg.eigh(self.g)


@dataclasses.dataclass(eq=False)
class Tokens:
    """One matrix by tokens, in the order in which they came.

    Attributes:
        x: ``(m, d_in)`` inputs; zero rows for padding.
        b: ``(m, d_out)`` output gradients of the loss divided by N.
        drawn: ``(R m, d_out)`` output gradients under drawn labels.
        positions: P.
        scale: ``N R``: ``G = drawn' drawn / scale``.
        group: ``(m,)`` group of every token.
        cache: As in :class:`Sums`.
    """

    x: torch.Tensor
    b: torch.Tensor
    drawn: torch.Tensor
    positions: float
    scale: float
    group: torch.Tensor
    cache: dict[str, Any]


@dataclasses.dataclass(eq=False)
class _Input:
    sums: torch.Tensor | None = None
    rows: list[torch.Tensor] = dataclasses.field(default_factory=list)
    positions: float = 0.0


@dataclasses.dataclass(eq=False)
class _Output:
    """Sums of ``b~ b~'`` and gradients by group of one matrix, or rows by loss."""

    module: Module
    tokens: bool
    leader: str = ""  # the first matrix with the same input
    sums: torch.Tensor | None = None
    parts: torch.Tensor | None = None
    rows: dict[int, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    places: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # first sequence, sequences, length


def accumulate(sums: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Sums with ``rows' rows`` added, by panels."""
    sums = rows.new_zeros(rows.shape[1], rows.shape[1]) if sums is None else sums
    add_products(sums, rows)
    return sums


def real_positions(a: torch.Tensor, batch: Batch | None) -> tuple[torch.Tensor, float]:
    """Inputs ``(B, T, d)`` with zeros for padding, and how many positions are none."""
    mask = None if batch is None else batch.kwargs.get("attention_mask")
    if mask is not None and mask.shape == a.shape[:2]:
        return a * mask[..., None], float(mask.sum())
    return a, float(a.shape[0] * a.shape[1])


class Factors(Accumulator):
    """Factors and gradients of every matrix: :meth:`settle` gets each as soon as it is whole.

    Labels are ``sampled`` from the model (``draws`` per token, by ``seed``) or the ``data``'s own (empirical Fisher).
    Sequence i of n belongs to group ``i J / n`` of J ``groups``, or to ``i mod J`` where they are ``interleaved``.
    ``finished`` are blocks that an earlier run has settled, ``workers`` the threads in which :meth:`settle` may be called
    at a time. Fused experts are refused before anything runs.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        blocks: Sequence[Block],
        *,
        seed: int = 0,
        labels: str = "sampled",
        draws: int = 1,
        groups: int = 4,
        interleaved: bool = False,
        finished: Finished | None = None,
        workers: int = 1,
    ) -> None:
        if draws < 1:
            raise InvalidInput(f"draws is {draws}.", "At least one draw per token is needed.", "Use draws=1.")
        refuse_direct(model, blocks, "K-FAC has no factors for it")
        self.empirical = labels == "data"
        self.losses: tuple[Loss, ...] = (data_loss, *(SampledLoss(seed + r + 1) for r in range(0 if self.empirical else draws)))
        self.blocks, self.dtype, self.workers, self.finished = blocks, real_type(model)[0], workers, finished
        self.modules = {m.name: m for b in blocks for m in b.modules}
        self.place = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        self.samples, self.length, self.total = data.samples, data.length, float(token_count(model, data))
        self.groups, self.interleaved = max(1, min(groups, data.samples)), interleaved
        records = {} if finished is None else finished.records
        self.done = frozenset(m.name for k in records for m in blocks[k].modules)
        self.waiting = [0 if k in records else len(b.modules) for k, b in enumerate(blocks)]
        self.inputs: dict[str, _Input] = {}
        self.outputs: dict[str, _Output] = {}
        self._processes = ProcessGroup()
        self._idle = False
        self._batch: Batch | None = None
        self._loss = 0

    def settle(self, name: str, factors: Sums | Tokens) -> None:
        """One matrix is whole."""
        raise NotImplementedError

    def settled(self) -> None:
        """The matrices that :meth:`finalize` was told of are settled."""

    def by_tokens(self, m: Module) -> bool:
        """Whether the tokens of a matrix are kept in the place of sums."""
        positions = self.samples * self.length
        smaller = positions * (m.d_in + len(self.losses) * m.d_out) < m.d_in**2 + m.d_out**2
        return smaller and positions <= max(m.d_in, m.d_out)

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Sums, or tokens, of all matrices."""
        total, positions = 0, self.samples * self.length
        for m in (m for b in blocks for m in b.modules):
            if self.by_tokens(m):
                total += positions * (m.d_in + len(self.losses) * m.d_out)
            else:
                total += 3 * (m.d_in**2 + m.d_out**2) + (1 + self.groups) * m.d_in * m.d_out
        return total * self.dtype.itemsize

    def start(self, names: Sequence[str]) -> None:
        """Nothing is to be had of matrices that are all settled."""
        self._idle = self.done.issuperset(names)

    def needs(self, loss: int) -> bool:
        """Every loss, while anything is left to settle."""
        return not self._idle

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        self._batch, self._loss = batch, loss

    def update(self, site: Site) -> None:
        """Add a site to the factors and to the gradients."""
        if self.done.issuperset(site.names):
            return
        a = site.a.to(self.dtype)
        known = self.outputs.get(site.names[0])
        leader = site.names[0] if known is None else known.leader
        entry = self.inputs.setdefault(leader, _Input())
        tokens = all(self.by_tokens(self.modules[n]) for n in site.names)  # one input, one form
        for name in site.names:
            self.outputs.setdefault(name, _Output(self.modules[name], tokens, leader))
        if self._loss == len(self.losses) - 1:  # once per batch
            self._input(entry, a, self.outputs[site.names[0]].tokens)
        for name in site.names:
            self._output(self.outputs[name], a, site.b[name].to(self.dtype))

    def _input(self, entry: _Input, a: torch.Tensor, tokens: bool) -> None:
        a, count = real_positions(a, self._batch)
        rows = a.reshape(-1, a.shape[-1])
        entry.positions += count
        if tokens:
            entry.rows.append(rows)
        else:
            entry.sums = accumulate(entry.sums, rows)

    def _output(self, output: _Output, a: torch.Tensor, b: torch.Tensor) -> None:
        batch = self._batch
        if batch is None:
            return
        rows, true = b.reshape(-1, b.shape[-1]), self._loss == 0
        if output.tokens:
            output.rows.setdefault(self._loss, []).append(rows)
            if true:
                output.places.append((batch.rows.start, b.shape[0], b.shape[1]))
            return
        if true:
            if output.parts is None:
                output.parts = rows.new_zeros(self.groups, rows.shape[1], a.shape[-1])
            group = self._group(torch.arange(batch.rows.start, batch.rows.start + len(b)))
            for j in group.unique().tolist():
                chosen = slice(None) if bool((group == j).all()) else (group == j).to(b.device)
                output.parts[j].addmm_(b[chosen].flatten(0, 1).T, a[chosen].flatten(0, 1))
        if not true or self.empirical:
            output.sums = accumulate(output.sums, rows)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Add sums up; bring tokens together, process after process."""
        self._processes = group
        outputs = {n: self.outputs[n] for n in names if n in self.outputs}
        if group.gather(sorted(outputs)) != [sorted(outputs)] * group.size:
            raise CoverageError("Some matrices ran in some processes only.", "", "Use one process.")
        entries = {o.leader: self.inputs[o.leader] for o in outputs.values()}
        squares = [t for t in (*(o.sums for o in outputs.values()), *(e.sums for e in entries.values())) if t is not None]
        group.reduce([panel for square in squares for panel in panels(square)])
        group.reduce([o.parts for o in outputs.values() if o.parts is not None])
        for entry in entries.values():
            entry.positions = float(group.sum(np.array([entry.positions]))[0])
            if entry.rows:
                entry.rows = [x for rows in group.gather(entry.rows) for x in rows]
        for output in (o for o in outputs.values() if o.tokens):
            gathered = group.gather((output.rows, output.places))
            output.rows = {i: [x for rows, _ in gathered for x in rows[i]] for i in output.rows}
            output.places = [place for _, places in gathered for place in places]

    def owns(self, name: str) -> bool:
        """Whether this process settles a matrix."""
        group = self._processes
        return group.size == 1 or group.owners(self.blocks)[self.place[name]] == group.rank

    def finalize(self, names: Sequence[str]) -> bool:
        """Settle the matrices input by input, and forget them."""
        inputs: dict[str, list[str]] = {}
        for name in [n for n in names if n in self.outputs]:
            inputs.setdefault(self.outputs[name].leader, []).append(name)
        if self.workers > 1 and all(self.outputs[n].tokens for members in inputs.values() for n in members):
            first = sorted(inputs, key=lambda leader: -len(inputs[leader]))
            in_threads(lambda leader: self._settle(leader, inputs[leader]), first, self.workers)
        else:
            for leader, members in inputs.items():
                self._settle(leader, members)
        self.settled()
        return False

    def _settle(self, leader: str, names: Sequence[str]) -> None:
        entry, cache = self.inputs.pop(leader), dict[str, Any]()
        moment: torch.Tensor | None = None
        for name in names:
            output = self.outputs.pop(name)
            if name in self.done or not self.owns(name):
                continue
            if moment is None and output.tokens:
                moment, entry.rows = torch.cat(entry.rows), []
            elif moment is None and entry.sums is not None:
                moment, entry.sums = symmetric(entry.sums).div_(entry.positions), None
            if moment is not None:
                self.settle(
                    name, self._tokens(output, entry, moment, cache) if output.tokens else self._sums(output, moment, cache)
                )

    @property
    def _scale(self) -> float:
        return self.total * max(len(self.losses) - 1, 1)

    def _sums(self, output: _Output, a: torch.Tensor, cache: dict[str, Any]) -> Sums:
        if output.sums is None or output.parts is None:
            raise CoverageError(f"{output.module.name} has no gradient.", "", "Give data that reaches it.")
        g, output.sums = symmetric(output.sums).div_(self._scale), None
        parts, output.parts = output.parts.div_(self.total), None
        return Sums(a=a, g=g, parts=parts, cache=cache)

    def _tokens(self, output: _Output, entry: _Input, x: torch.Tensor, cache: dict[str, Any]) -> Tokens:
        b = torch.cat(output.rows.pop(0))
        drawn = torch.cat([torch.cat(output.rows[i]) for i in sorted(output.rows)]) if output.rows else b
        sequence = torch.cat([torch.arange(first, first + n).repeat_interleave(length) for first, n, length in output.places])
        if len(x) != len(b):
            raise CoverageError(
                f"{output.module.name} ran on {len(b)} tokens, its input has {len(x)}.",
                "They share their input.",
                "Exclude it, or use estimator='fisher-gram'.",
            )
        return Tokens(
            x=x,
            b=b / self.total,
            drawn=drawn,
            positions=entry.positions,
            scale=self._scale,
            group=self._group(sequence).to(x.device),
            cache=cache,
        )

    def _group(self, sequence: torch.Tensor) -> torch.Tensor:
        return sequence % self.groups if self.interleaved else sequence * self.groups // self.samples
