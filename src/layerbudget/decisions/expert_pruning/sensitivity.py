r"""The loss of the output when a router may not choose some experts: one forward, a few draws, and all sets of experts.

Let ``y_e(x)`` be what expert e makes of a token and ``w_e(x; K)`` its weight where only the experts K may be chosen, as the
router itself gives it (the next expert takes the place, weights are normalised again where the architecture does so). Keeping
K changes what the layer returns by ``delta = sum_e (w_e(x; K) - w_e(x; all)) y_e(x)``, and to second order the output by

    D(K)  =  1/2 (1/N) sum_s E_y [ ( sum_{t in s} b_st(y)' delta_st )^2 ]
          =  1/2 (1/N) sum_s E_y [ ( sum_{t in s} sum_e (w_e(x_st; K) - w_e(x_st; all)) p_ste )^2 ],    p_ste = b_st' y_e(x_st),

with the gradient ``b`` of a drawn label's loss at the layer's output: the Fisher form along the change, as for every other
treatment (:mod:`layerbudget.sensitivity.directional.terms`). The table ``p`` is made once, of every expert on every token; then
the damage of *any* set takes no more than a look at the router. Experts go one after the other, each time the one that leaves
the least damage *of the whole set*: what one expert loses by another's absence is in it.

Which tokens an absent expert matters to depends on the router, and is found by trying it (``_way``): only those that were
given it, where weights are normalised; all of them, each by one factor, where weights are a softmax over all experts; or
any token in any way, where the choice depends on that softmax.

The set that looks cheapest is chosen by the same draws and text that say how cheap it is, and so looks cheaper than it is. So
the sequences are also dealt into folds (``FOLDS``): what all folds but one choose is judged by that one.

Inputs, gradients and table of one layer are held at a time where the model is walked layer by layer. Several processes share
the batches of the text. Each then removes the experts of some layers, from their tables of the whole text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...execution.backward import Accumulator, Loss, SampledLoss, feed
from ...execution.loss import IGNORE, Batch, assign_folds, unlabelled
from ...execution.processes import ProcessGroup, in_turn, process_group
from ...execution.sites import Site
from ...models.experts import ExpertLayer
from ...progress import Progress, Steps
from ...records import Block, Module
from .program import Removal

FOLDS = 2  # of the sequences, for predictions on text that did not choose
_ROWS = 8192  # tokens of which a router is asked at a time
_TRIED = 131_072  # tokens times experts on which it is tried how far an absent expert reaches
_LEFT_OUT = 1e-4  # share of all changes of weights that may be left out; in 16 bits, where equal logits are common:
_LEFT_OUT_COARSE = 5e-3
Removals = dict[str, tuple[Removal, ...]]  # of all layers, by rule


@dataclasses.dataclass(eq=False)
class _Observed:
    """Of one layer: its tokens ``(T, d)``, their sequences ``(T,)``, and which count; the table ``(draws, T, E)``, norms."""

    x: list[torch.Tensor] = dataclasses.field(default_factory=list)
    rows: list[torch.Tensor] = dataclasses.field(default_factory=list)
    real: list[torch.Tensor] = dataclasses.field(default_factory=list)
    table: list[torch.Tensor] = dataclasses.field(default_factory=list)
    norms: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of the present batch, draw after draw


class ExpertSums(Accumulator):
    """Tables of all layers, and the removals that follow from them.

    ``counts`` are the target tokens of every sequence. ``removals`` has, by layer, what every rule does with all sequences, and
    then with all but those of each fold.
    """

    def __init__(
        self, expert_layers: Sequence[ExpertLayer], losses: Sequence[Loss], rules: Sequence[str], seed: int, counts: np.ndarray
    ) -> None:
        self.layers = {e.name: e for e in expert_layers}
        self.losses, self.rules, self.seed, self.counts = losses, rules, seed, counts
        self.removals: dict[str, list[dict[str, Removal]]] = {}
        self._owners: dict[str, int] = {}  # of several processes, the one that removes from a layer
        self._waiting: list[str] = []  # layers whose tables their owners have
        self._observed: dict[str, _Observed] = {}
        self._batch: Batch | None = None

    def begin(self, batch: Batch, loss: int) -> None:
        """See :meth:`Accumulator.begin`."""
        self._batch = batch

    def update(self, site: Site) -> None:
        """See :meth:`Accumulator.update`: the site is a block of experts."""
        for name, b in site.b.items():
            observed = self._observed.setdefault(name, _Observed())
            observed.gradients.append(b.flatten(0, 1))
            if len(observed.gradients) == len(self.losses):
                self._tabulate(name, observed, site.a)

    def _tabulate(self, name: str, observed: _Observed, a: torch.Tensor) -> None:
        """Add the present batch to the table of a layer."""
        batch, x = cast(Batch, self._batch), a.flatten(0, 1)
        mask = batch.kwargs.get("attention_mask")
        gradients = torch.stack(observed.gradients).float()
        along, norms = list[torch.Tensor](), list[torch.Tensor]()
        for y in self.layers[name].outputs(x):
            along.append((gradients * y.float()).sum(-1))
            norms.append(y.float().norm(dim=-1))
        observed.x.append(x)
        observed.rows.append(torch.arange(batch.rows.start, batch.rows.stop, device=x.device).repeat_interleave(a.shape[1]))
        observed.real.append(torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else mask.bool().flatten())
        observed.table.append(torch.stack(along, -1))
        observed.norms.append(torch.stack(norms, -1))
        observed.gradients.clear()

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """See :meth:`Accumulator.share`: every layer's table goes to one process, with its batches in the order of the text."""
        for name in [n for n in names if n in self.layers]:
            self._owners[name] = owner = len(self._owners) % group.size
            own = self._observed.pop(name)
            parts = group.bring({n: [x.cpu() for x in made] for n, made in own.__dict__.items()}, owner)
            if group.rank == owner:
                device = own.x[0].device
                self._observed[name] = _Observed(
                    **{n: [x.to(device) for x in in_turn([p[n] for p in parts])] for n in parts[0]}
                )
            self._waiting.append(name)

    def finalize(self, names: Sequence[str]) -> bool:
        """See :meth:`Accumulator.finalize`; several processes remove when each of them has a layer."""
        group = process_group()
        if group.size == 1:
            self._waiting += names
        if len(self._waiting) >= group.size:
            self._settle()
        return False

    def _settle(self) -> None:
        for name in self._waiting:
            if name in self._observed:
                self.removals[name] = self._removals(self.layers[name], self._observed.pop(name))
        self._waiting.clear()

    def merge(self, group: ProcessGroup) -> None:
        """See :meth:`Accumulator.merge`."""
        self._settle()
        for removals in group.gather(self.removals):
            self.removals |= removals

    def _removals(self, layer: ExpertLayer, observed: _Observed) -> list[dict[str, Removal]]:
        """The removals by every rule, of all sequences and of each fold's choosers."""
        place = list(self.layers).index(layer.name)
        sets = _Sets(layer, observed, self.counts)
        single, removals = sets.singles(), list[dict[str, Removal]]()
        for choosers in (np.ones(len(self.counts), dtype=bool), *(~fold for fold in folds_of(self.counts))):
            removals.append({})
            for rule in self.rules:
                scores = None
                if rule != "directional":
                    tokens = torch.cat(observed.real) & torch.from_numpy(choosers).to(sets.rows.device)[sets.rows]
                    scores = _scores(rule, sets, torch.cat(observed.norms), tokens, (self.seed, place))
                order, after, terms = sets.remove(scores, choosers)
                removals[-1][rule] = Removal(
                    name=layer.name,
                    experts=layer.count,
                    order=order,
                    after=after,
                    terms=terms,
                    counts=self.counts,
                    choosers=choosers,
                    single=single,
                    scores=single if scores is None else scores,
                )
        return removals


class _Sets:
    """The damage of sets of experts of one layer, by its table."""

    def __init__(self, layer: ExpertLayer, observed: _Observed, counts: np.ndarray) -> None:
        self.layer, self.counts, self.tokens = layer, counts, float(counts.sum())
        self.x, self.rows, self.table = torch.cat(observed.x), torch.cat(observed.rows), torch.cat(observed.table, 1)
        self.dense = _gates(layer, self.x, range(layer.count))
        self.way = _way(layer, self.x)
        self.odds = layer.odds(self.x) if self.way == "softmax" else None
        self._begin()

    def _begin(self) -> None:
        """Have all experts again."""
        self.kept = list(range(self.layer.count))
        self._stand(self.dense, torch.zeros(len(self.table), len(self.counts), device=self.x.device))

    def _stand(self, gates: torch.Tensor, sums: torch.Tensor) -> None:
        self.gates, self.sums = gates, sums
        self.present = None if self.odds is None else (gates * self.table).sum(-1)  # (draws, tokens)

    def _change(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """When one more expert goes: tokens that are routed anew, their gates, and the factor of all other tokens' gates."""
        routed = torch.arange(len(self.x), device=self.x.device)
        if self.way != "any":
            routed = routed[self.gates[:, expert] != 0]
        gates = _gates(self.layer, self.x[routed], [e for e in self.kept if e != expert])
        if self.odds is None:
            return routed, gates, None
        left = self.odds[:, self.kept].sum(1)
        return routed, gates, (left / (left - self.odds[:, expert])).index_fill(0, routed, 1.0)

    def without(self, expert: int) -> torch.Tensor:
        """Sums ``(draws, sequences)`` when one more expert goes."""
        routed, gates, factor = self._change(expert)
        along = ((gates - self.gates[routed]) * self.table[:, routed]).sum(-1)
        sums = self.sums.index_add(1, self.rows[routed], along.to(self.sums))
        if factor is None or self.present is None:
            return sums
        return sums.index_add(1, self.rows, ((factor - 1) * self.present).to(sums))

    def drop(self, expert: int) -> None:
        """Let one more expert go."""
        routed, gates, factor = self._change(expert)
        sums, others = self.without(expert), self.gates if factor is None else self.gates * factor[:, None]
        self.kept.remove(expert)
        self._stand(others.index_copy(0, routed, gates), sums)

    def damage(self, sums: torch.Tensor, choosers: np.ndarray | None = None) -> float:
        """Nats per token of sums ``(draws, sequences)``, of all or of some sequences alone."""
        terms = sums.double().square().mean(0).cpu().numpy()
        return float(terms.sum() if choosers is None else terms[choosers].sum()) / (2 * self.tokens)

    def singles(self) -> np.ndarray:
        """Damage of every expert alone, ``(E,)``; infinite where the routing needs all of them."""
        if self.layer.count == self.layer.floor:
            return np.full(self.layer.count, np.inf)
        return np.array([self.damage(self.without(e)) for e in self.kept])

    def remove(self, scores: np.ndarray | None, choosers: np.ndarray) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
        """Let experts go one after the other: those of the lowest scores, or by the damage of what is left to some sequences.

        Returns their order, how many are gone after every step, and the nats that each step costs each sequence.
        """
        self._begin()
        order, after, sums = list[int](), [0], [self.sums]
        size, least = self.layer.count // self.layer.groups, self.layer.floor // self.layer.groups
        for _ in range(size - least):
            for group in range(self.layer.groups):
                able = [e for e in self.kept if e // size == group]
                worth = {e: self.damage(self.without(e), choosers) if scores is None else float(scores[e]) for e in able}
                gone = min(able, key=worth.__getitem__)
                self.drop(gone)
                order.append(gone)
            after.append(len(order))
            sums.append(self.sums)
        return tuple(order), np.array(after), torch.stack(sums).double().square().mean(1).cpu().numpy() / 2


def _gates(layer: ExpertLayer, x: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
    """Weights ``(T, E)`` of the experts where some may be chosen, a part of the tokens at a time."""
    index = torch.tensor(sorted(kept))
    gates = (layer.gates(part, index) for part in x.split(_ROWS) if len(part))
    return torch.cat([torch.zeros(0, layer.count, device=x.device), *gates])


def _way(layer: ExpertLayer, x: torch.Tensor) -> str:
    """How far the absence of an expert reaches: ``given`` (tokens that were given it), ``softmax`` (the weights of the others
    grow by ``z / (z - p)``, with the sum of the present experts' probabilities and that of the absent one) or ``any``.

    Every expert goes alone, and then one after the other in a random order. A way will do if it explains all but a small share
    of the changes; what two roundings of a weight may do is none.
    """
    if layer.groups > 1:  # an expert also counts for its group
        return "any"
    draw = torch.Generator().manual_seed(0)
    x = x[torch.randperm(len(x), generator=draw)[: _TRIED // layer.count].to(x.device)]
    everyone, odds = list(range(layer.count)), layer.odds(x)
    dense = gates = _gates(layer, x, everyone)
    order = torch.randperm(layer.count, generator=draw)[: layer.count - layer.floor].tolist()
    alone: list[tuple[list[int], int]] = [([], e) for e in everyone if order]
    changes, left_out = 0.0, {"given": 0.0, "softmax": np.inf if odds is None else 0.0}
    for gone, expert in (*alone, *((order[:step], e) for step, e in enumerate(order))):
        before, kept = gates if gone else dense, [e for e in everyone if e not in gone]
        gates = _gates(layer, x, [e for e in kept if e != expert])
        others = before[:, expert] == 0
        changes += float((gates - before).abs().sum())
        left_out["given"] += _apart(gates[others], before[others], x.dtype)
        if odds is not None:
            left = odds[others][:, kept].sum(1, keepdim=True)
            grown = before[others] * left / (left - odds[others, expert, None])
            left_out["softmax"] += _apart(gates[others], grown, x.dtype)
    most = changes * (_LEFT_OUT if torch.finfo(x.dtype).bits > 16 else _LEFT_OUT_COARSE)
    return next((way for way, missed in left_out.items() if missed <= most), "any")


def _apart(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Sum of the differences that are more than the rounding of numbers of a type."""
    difference = (actual - expected).abs()
    return float(difference[difference > 2 * torch.finfo(dtype).eps * expected].sum())


def folds_of(counts: np.ndarray) -> list[np.ndarray]:
    """The sequences of each fold, dealt in turn, as masks; none where too few have answers, whose numbers are given."""
    dealt = assign_folds(counts, FOLDS)
    return [dealt == fold for fold in range(FOLDS)] if (counts > 0).sum() >= 2 * FOLDS else []


def _scores(rule: str, sets: _Sets, norms: torch.Tensor, real: torch.Tensor, seed: Sequence[int]) -> np.ndarray:
    r"""The score that a rule ranks experts by, ``(E,)``: over the tokens T_e that are given expert e,

        frequency   |T_e| / T               norm   mean over T_e of ||y_e(x)||
        reap        mean over T_e of w_e(x) ||y_e(x)||   (arXiv 2510.13999)

    An expert that no token is given has zero.
    """
    if rule == "random":
        return np.random.default_rng(seed).random(sets.layer.count)
    gates, norms = sets.dense[real], norms[real]
    routed = (gates != 0).double()
    count = routed.sum(0)
    if rule == "frequency":
        return (count / max(len(gates), 1)).cpu().numpy()
    sums = (routed if rule == "norm" else gates.double()) * norms
    return (sums.sum(0) / count.clamp_min(1)).cpu().numpy()


def expert_removals(
    model: nn.Module,
    expert_layers: Sequence[ExpertLayer],
    data: CalibrationSet,
    *,
    rules: Sequence[str] = ("directional",),
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> tuple[list[Removals], float]:
    """Return the removals of all layers by rule, and the forward equivalents spent: ``1 + 2 draws``, and E/k for the table.

    The removals are those that all sequences choose, and then, fold by fold, those that the others choose.

    Args:
        model: Is left as it was.
        expert_layers: Its layers of experts.
        data: Calibration tokens.
        rules: ``directional``, or scores that others rank experts by.
        draws: Draws of labels.
        seed: Of the draws, and of the rule ``random``.
        batch_size: Sequences per forward.
        progress: Called with (sequences done, sequences).
    """
    losses, group = [SampledLoss(1009 * seed + draw) for draw in range(draws)], process_group()
    batches = list(unlabelled(model, data, group.batch_alike(data.samples, batch_size)))
    counts = np.concatenate([(b.targets != IGNORE).reshape(b.size, -1).sum(1).cpu().numpy() for b in batches]).astype(float)
    blocks = [Block(name=e.name, modules=(Module(name=e.name, d_in=e.d, d_out=e.d),)) for e in expert_layers]
    sums = ExpertSums(expert_layers, losses, rules, seed, counts)
    mine = sum(b.size for b in group.shard(batches))
    feed(model, batches, blocks, sums, tick=Steps(progress, mine, "gradients"))
    passes = 1.0 + 2.0 * draws + float(np.mean([e.count / e.top_k for e in expert_layers]))
    each = [sums.removals[e.name] for e in expert_layers]
    return [{rule: tuple(layer[i][rule] for layer in each) for rule in rules} for i in range(len(each[0]))], passes
