r"""Weights and cache under one memory: one exact program with one price per byte, its curve, and its plans. No torch.

The blocks of the weights and those of the cache stand in one table. Their damages are in one unit, nats per token, and add up
to first order: each is measured at the dense model. Of the memory, what no format changes goes first: the other tensors and the
metadata of the file, states of fixed size, and the buffers of a forward::

    minimise   sum_i R_i(f_i) + sum_k C_k(g_k)    over formats f of the weights and formats g of the cache
    subject to F + sum_i s_i(f_i) + sum_k t_k(g_k)  <=  B,

``R`` and ``C`` the damages of rounding weights and cache, ``s`` and ``t`` their bytes, ``F`` the bytes that no format changes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...budget import parse_bytes, rounded_up, unit_of
from ...errors import InfeasibleBudget, InvalidInput
from ...models.memory import MemoryModel, check_positions, read_context
from ...scores import Scores
from ...solvers.choices import Choice, choose
from ..cache import CacheSpace, find_cache
from ..formats.baselines import mix_of
from ..formats.limits import Limits
from ..formats.program import CURVE, SHOWN, bits_of
from ..formats.table import FormatTable
from .payload import More

KIND = "memory"
UNIFORM, MIX = "uniform-cache", "mix"
RULES = ("exact", UNIFORM, MIX)
GIB = 1 << 30
_SHARES = (0.01, 0.02, 0.05)  # of more memory that is asked what it brings; more of it brings much everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Memory, context and batch that a plan has to fit.

    Attributes:
        context: Tokens of a sequence, such as ``"32k"``.
        memory: Bytes in all, such as ``"8 GiB"``; None where there are two memories.
        gpu, ram: Bytes of a card, and of the processor's memory; see :mod:`layerbudget.decisions.memory.placement`.
        batch: Sequences at a time.
        forbid, keep: Formats of the weights; see :class:`~layerbudget.decisions.formats.limits.Limits`.
        cache: Formats of the cache to choose among, besides 16 bits; all that were measured where it is None.
        utilization: Share of the memory that the runtime takes.
    """

    context: str | int
    memory: str | float | None = None
    gpu: str | float | None = None
    ram: str | float | None = None
    batch: int = 1
    forbid: Sequence[str] = ()
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cache: Sequence[str] | None = None
    utilization: float = 1.0

    @property
    def limits(self) -> Limits:
        """The constraints on formats of the weights."""
        return Limits(forbid=self.forbid, keep=self.keep)

    @property
    def given(self) -> str:
        """The settings that leave out formats, in words; empty where there are none."""
        named = {"forbid": self.forbid, "keep": self.keep, "cache": self.cache is not None}
        return " and ".join(f"--{name}" for name, said in named.items() if said)

    @property
    def free(self) -> MemoryLimits:
        """The same with all formats."""
        return dataclasses.replace(self, forbid=(), keep={}, cache=None)

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return read_context(self.context)

    @property
    def bytes(self) -> int:
        """Bytes of the memory that the runtime takes; of two memories those of the card."""
        return int(parse_bytes(str(self.gpu or self.memory), "A memory", "8 GiB") * self.utilization)

    @property
    def beside(self) -> int:
        """Bytes of the processor's memory; zero where there is one memory."""
        return 0 if self.ram is None else parse_bytes(self.ram, "A memory", "32 GiB")

    def check(self, rule: str) -> None:
        """Refuse what no model can make possible."""
        if rule not in RULES:
            raise InvalidInput(f"There is no rule {rule!r} here.", f"There are {', '.join(RULES)}.", "Choose one of those.")
        if (self.memory is None) == (self.gpu is None) or (self.gpu is None) != (self.ram is None):
            what = "A plan of memory needs one memory, or a card and the processor's memory."
            raise InvalidInput(
                what, "--gpu and --ram go together, without --memory.", "Give --memory SIZE, or --gpu SIZE --ram SIZE."
            )
        _ = self.tokens, self.bytes, self.beside  # each is read
        if self.batch < 1:
            raise InvalidInput(f"batch is {self.batch}.", "It is a number of sequences.", "Use 1 or more.")
        self.limits.check_formats()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Weights and cache of a model at a context.

    Attributes:
        weights: Bytes and damages of matrices, those formats gone that may not be used.
        space, cache: What may be decided about the cache, with its bytes and damages.
        known: What other memory depends on.
    """

    weights: FormatTable
    space: CacheSpace
    cache: FormatTable
    known: MemoryModel

    @classmethod
    def of(
        cls,
        weights: FormatTable,
        space: CacheSpace,
        terms: MemoryLimits,
        damage: np.ndarray | None = None,
        rest: np.ndarray | None = None,
    ) -> Fit:
        """Return what is to be decided; without damages of the cache they are zero.

        Raises:
            InvalidInput: A model whose buffers are not counted, a context beyond its positions, formats that it cannot have.
        """
        if weights.cache is None:
            what = "The memory of this model beside its weights is not counted here."
            raise InvalidInput(what, "", "Plan both by bytes: layerbudget plan bits --budget, plan cache --budget.")
        check_positions(terms.tokens, weights.cache.positions)
        cache = space.table(damage, rest)
        if terms.cache is not None:
            if unknown := [n for n in terms.cache if n not in cache.formats]:
                what = f"{unknown[0]!r} was not measured for the cache."
                raise InvalidInput(what, f"Measured were {', '.join(cache.formats)}.", "Choose some of those.")
            wanted = np.array([n in terms.cache for n in cache.formats[:-1]] + [True])
            cache = dataclasses.replace(cache, damage=np.where(wanted, cache.damage, np.inf))
        return cls(weights=terms.limits.restrict(weights), space=space, cache=cache, known=weights.cache)

    @property
    def state(self) -> int:
        """Bytes of states of fixed size."""
        return self.known.state * self.space.batch

    @property
    def buffers(self) -> int:
        """Bytes of a forward's buffers, estimated."""
        return self.known.buffers(self.space.context, self.space.batch)

    @property
    def beside(self) -> int:
        """Bytes that no format changes."""
        return self.weights.beside + self.state + self.buffers

    @functools.cached_property
    def table(self) -> FormatTable:
        """The blocks of matrices and cache."""
        return self.weights.stacked(self.cache)

    def at(self, context: int) -> Fit:
        """Return the same at another context."""
        space = self.space.at(context, self.space.batch)
        return dataclasses.replace(self, space=space, cache=dataclasses.replace(self.cache, size=space.table().size))

    @property
    def least(self) -> int:
        """Bytes of the smallest plan, everything counted."""
        return int(self.weights.smallest.sum() + self.cache.smallest.sum()) + self.beside

    def limit(self, memory: int, others: Callable[[], Iterable[tuple[str, Fit]]] = tuple, share: float = 1.0) -> int:
        """Return the bytes of a memory that formats may take; one below the smallest plan is refused.

        Args:
            memory: Bytes in all.
            others: Asked for where nothing fits: the same with other formats, each with the words that lead to it.
            share: Of the memory that was given, what these bytes are.
        """
        if memory < self.least:
            tokens, batch = self.space.context, self.space.batch
            of_it = f" ({share:g} of the memory given)" if share < 1 else ""
            longest = self.known.longest(lambda context: self.at(context).least <= memory, self.space.runtime.step)
            fits = f"At most {longest} tokens fit." if longest else "No context fits."
            file = int(self.weights.smallest.sum()) + self.weights.beside
            rest, (unit, name) = self.state + self.buffers, unit_of(self.least)
            ways = [f"Raise the memory (to {rounded_up(self.least / share / unit)} {name})"]
            ways += ["shorten the context"] if longest else []
            ways += [words for words, other in others() if other.least <= memory]
            raise InfeasibleBudget(
                f"{memory:,} bytes{of_it} are too few at {tokens} tokens x {batch}.",
                f"The smallest plan takes {self.least:,}: {file:,} of the file, {self.least - file - rest:,} of the cache, "
                f"{rest:,} of buffers. {fits}",
                f"{', or '.join(ways)}.",
            )
        return memory - self.beside

    def joined(self, weights: np.ndarray, cache: np.ndarray) -> np.ndarray:
        """Return a choice of all blocks from one of each part."""
        return np.concatenate([weights, len(self.weights.formats) + cache])

    def apart(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the choices of the weights and of the cache."""
        count = len(self.weights.blocks)
        return chosen[:count], chosen[count:] - len(self.weights.formats)

    def uniform_caches(self, limit: int) -> dict[str, np.ndarray]:
        """Return the best weights beside one format for the whole cache, by that format, where both fit."""
        choices, k = {}, len(self.cache.blocks)
        for j in np.flatnonzero(self.cache.has.all(axis=0)):
            left = limit - int(self.cache.size[:, j].sum())
            if left >= self.weights.smallest.sum():
                best = choose(self.weights.damage, self.weights.size, left)
                choices[self.cache.formats[j]] = self.joined(best.chosen, np.full(k, j))
        return choices

    def mixes(self, limit: int) -> dict[str, np.ndarray]:
        """Return the best cache beside a mix of llama.cpp, or else one format for all weights, by its name, where both fit."""
        w = self.weights
        llama_mixes = [(mix, mix_of(w, mix)[1]) for mix in w.llama.mixes] if w.llama is not None else []
        even = [(n, np.full(len(w.blocks), j)) for j, n in enumerate(w.formats) if w.has[:, j].all()]
        choices = {}
        for name, chosen in llama_mixes or even:
            left = limit - (w.totals(chosen)["spent"] if chosen is not None else limit + 1)
            if chosen is not None and left >= self.cache.smallest.sum():
                best = choose(self.cache.damage, self.cache.size, left)
                choices[name] = self.joined(chosen, best.chosen)
        return choices

    def parts(self, chosen: np.ndarray) -> dict[str, dict[str, float]]:
        """Return bytes, nats and mean bits of the weights and of the cache, and the bytes of what is beside."""
        shares: dict[str, dict[str, float]] = {}
        for name, table, part_choice in zip(("weights", "cache"), (self.weights, self.cache), self.apart(chosen), strict=True):
            total = table.totals(part_choice)
            shares[name] = {"bytes": total["spent"], "predicted": total["predicted"], "bits": 8 * total["spent"] / table.numel}
        others = {"rest of the file": self.weights.beside, "states": self.state, "buffers": self.buffers}
        return shares | {name: {"bytes": size} for name, size in others.items() if size}

    def best(self, memory: int) -> Choice:
        """Return the choice of the least damage in a memory."""
        choice = choose(self.table.damage, self.table.size, memory - self.beside)
        return dataclasses.replace(choice, among=" of the planned matrices and the cache")

    def shown(self, chosen: np.ndarray) -> tuple[tuple[FormatTable, np.ndarray], ...]:
        """Return the tables whose blocks a plan has, each with its choice."""
        weights, cache = self.apart(chosen)
        return (self.weights, weights), (self.cache, cache)

    def row(self, choice: Choice) -> dict[str, Any]:
        """Return a choice in numbers."""
        totals = self.table.totals(choice.chosen)
        row = {"memory": choice.budget + self.beside, "predicted": totals["predicted"]}
        row |= {f"{n}_{key}": p[key] for n, p in self.parts(choice.chosen).items() for key in ("bytes", "bits") if key in p}
        few = len(self.weights.blocks) + len(self.cache.blocks) <= SHOWN
        return row | ({"values": [v for t, c in self.shown(choice.chosen) for v in bits_of(t, c)]} if few else {})


def share_of(runtime: str, utilization: float | None) -> float:
    """Return the share of a memory that a runtime takes.

    Raises:
        InvalidInput: A share that is none, or one of a runtime that takes all.
    """
    share = find_cache(runtime).share
    if utilization is None:
        return share
    if share == 1.0:
        raise InvalidInput(f"utilization has no meaning for {runtime}.", "It is vLLM's.", "Leave it out, or lower the memory.")
    if not 0.0 < utilization <= 1.0:
        raise InvalidInput(f"utilization is {utilization}.", "It is above 0 and at most 1.", "Use 0.9.")
    return utilization


def measured_for(source: object, otherwise: str = "llama.cpp") -> str:
    """Return the runtime that the cache of scores was measured for; ``otherwise`` where the source says nothing of a cache."""
    record = source.extra.get("cache") if isinstance(source, Scores) else None
    return str(record["runtime"]) if isinstance(record, Mapping) else otherwise


def fit_of(scores: Scores, terms: MemoryLimits) -> Fit:
    """Return what was measured, at a context."""
    record = scores.extra.get("cache")
    if not isinstance(record, Mapping):
        what = "These scores say nothing of the cache."
        raise InvalidInput(
            what, "A plan of memory needs the damage of its formats.", "Measure it: layerbudget plan memory MODEL."
        )
    space = CacheSpace.read(record, terms.tokens, terms.batch)
    damage, rest = (np.array(record[k], dtype=np.float64) for k in ("damage", "rest"))
    return Fit.of(FormatTable.of(scores), space, terms, damage, rest)


def curve(fit: Fit) -> list[dict[str, Any]]:
    """Return the best plans of several memories, from the smallest to 16 bits for everything, evenly in ratio.

    The ``price`` of a row is what a GiB saves on the way to the next row, in nats per token; zero in the last row.
    """
    low, high = fit.least - fit.beside, int(np.where(fit.table.has, fit.table.size, 0).max(axis=1).sum())
    rows = [point(fit, int(limit) + fit.beside) for limit in np.geomspace(low, high, CURVE).round()]
    for row, after in itertools.pairwise([*rows, rows[-1]]):
        room = after["memory"] - row["memory"]
        row["price"] = (row["predicted"] - after["predicted"]) / room * GIB if room else 0.0
    return rows


def with_more(fit: Fit, memory: int) -> More:
    """Return what the best plan loses with one unit of memory more, and with a few shares more."""
    unit, _ = unit_of(memory)
    near = [{"share": share, "memory": math.floor(memory * (1 + share))} for share in _SHARES]
    near = [{**row, "predicted": point(fit, int(row["memory"]))["predicted"]} for row in near]
    return More(bytes=unit, predicted=point(fit, memory + unit)["predicted"], near=near)


def point(fit: Fit, memory: int) -> dict[str, Any]:
    """Return the best plan of a memory in numbers."""
    return fit.row(fit.best(memory))
