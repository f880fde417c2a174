"""Weights and cache under one memory: one exact program with one price per byte, its curve, and its two plans. No torch.

The blocks of the weights and those of the cache stand in one table. Their damages are in one unit, nats per token, and add up
to first order: each is measured at the dense model. Of the memory, what no format changes goes first: the other tensors and the
metadata of the file, states of fixed size, and the buffers of a forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput
from ...plan import Plan
from ...records import to_jsonable
from ...scores import Scores
from ...solvers.choices import choose
from ..bits.memory import Cache, read_context
from ..bits.mixes import MIXES
from ..bits.program import (
    CURVE,
    SHOWN,
    Decision,
    Limits,
    bits_of,
    extra_of,
    few_tokens,
    imatrix_of,
    mix_of,
    plan_blocks,
    read_bytes,
)
from ..bits.table import Table
from ..cache.space import CacheSpace

KIND = "fit"
UNIFORM, MIX = "uniform-cache", "mix"
RULES = ("choices", UNIFORM, MIX)
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Memory, context and batch that a plan has to fit.

    Attributes:
        memory: Bytes in all, such as ``"8 GiB"``.
        context: Tokens of a sequence, such as ``"32k"``.
        batch: Sequences at a time.
        forbid, keep: Formats of the weights; see :class:`~layerbudget.decisions.bits.program.Limits`.
        cache: Formats of the cache to choose among, besides 16 bits; all that were measured where it is None.
    """

    memory: str
    context: str | int
    batch: int = 1
    forbid: Sequence[str] = ()
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cache: Sequence[str] | None = None

    @property
    def limits(self) -> Limits:
        """The constraints on formats of the weights."""
        return Limits(forbid=self.forbid, keep=self.keep)

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return read_context(self.context)

    @property
    def bytes(self) -> int:
        """Bytes of the memory."""
        return read_bytes(self.memory, "A memory", "8 GiB")

    def check(self, rule: str) -> None:
        """Refuse what no model can make possible."""
        if rule not in RULES:
            raise InvalidInput(f"There is no rule {rule!r} here.", f"There are {', '.join(RULES)}.", "Choose one of those.")
        if self.tokens and self.bytes and self.batch < 1:
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

    weights: Table
    space: CacheSpace
    cache: Table
    known: Cache

    @classmethod
    def of(
        cls, weights: Table, space: CacheSpace, terms: Terms, damage: np.ndarray | None = None, rest: np.ndarray | None = None
    ) -> Fit:
        """Return what is to be decided; without damages of the cache they are zero.

        Raises:
            InvalidInput: A model whose buffers are not counted, a context beyond its positions, formats that it cannot have.
        """
        if weights.cache is None:
            what = "The memory of this model beside its weights is not counted here."
            raise InvalidInput(what, "", "Plan both by bytes: layerbudget plan bits --budget, plan cache --budget.")
        most = weights.cache.positions
        if most and terms.tokens > most:
            what = f"A context of {terms.tokens} tokens is too long."
            raise InvalidInput(what, f"The model reads at most {most}.", "Ask for fewer.")
        cache = space.table(damage, rest)
        if terms.cache is not None:
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
        return self.known.buffers(self.space.context)

    @property
    def beside(self) -> int:
        """Bytes that no format changes."""
        return self.weights.beside + self.state + self.buffers

    @property
    def table(self) -> Table:
        """All blocks."""
        return self.weights.stacked(self.cache)

    def at(self, context: int) -> Fit:
        """Return the same at another context."""
        space = self.space.at(context, self.space.batch)
        return dataclasses.replace(self, space=space, cache=dataclasses.replace(self.cache, size=space.table().size))

    @property
    def least(self) -> int:
        """Bytes of the smallest plan, everything counted."""
        return int(self.weights.smallest.sum() + self.cache.smallest.sum()) + self.beside

    def limit(self, memory: int) -> int:
        """Return the bytes of a memory that formats may take; one below the smallest plan is refused."""
        if memory < self.least:
            tokens, batch = self.space.context, self.space.batch
            longest = self.known.longest(lambda context: self.at(context).least <= memory)
            fits = f"At most {longest} tokens fit." if longest else "No context fits."
            file = int(self.weights.smallest.sum()) + self.weights.beside
            rest, least = self.state + self.buffers, math.ceil(10 * self.least / 2**20) / 10
            raise InfeasibleBudget(
                f"{memory:,} bytes are too few at {tokens} tokens x {batch}.",
                f"The smallest plan takes {self.least:,}: {file:,} of the file, {self.least - file - rest:,} of the cache, "
                f"{rest:,} of buffers. {fits}",
                f"Raise the memory (to {least:g} MiB){', shorten the context' * bool(longest)}, or "
                "allow smaller formats (--formats).",
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
        found, k = {}, len(self.cache.blocks)
        for j in np.flatnonzero(self.cache.has.all(axis=0)):
            left = limit - int(self.cache.size[:, j].sum())
            if left >= self.weights.smallest.sum():
                best = choose(self.weights.damage, self.weights.size, left)
                found[self.cache.formats[j]] = self.joined(best.chosen, np.full(k, j))
        return found

    def mixes(self, limit: int) -> dict[str, np.ndarray]:
        """Return the best cache beside a mix of llama.cpp, or else one format for all weights, by its name, where both fit."""
        w = self.weights
        own = [(mix, mix_of(w, mix)[1]) for mix in MIXES] if w.llama is not None else []
        even = [(n, np.full(len(w.blocks), j)) for j, n in enumerate(w.formats) if w.has[:, j].all()]
        found = {}
        for name, chosen in own or even:
            left = limit - (w.totals(chosen)["spent"] if chosen is not None else limit + 1)
            if chosen is not None and left >= self.cache.smallest.sum():
                best = choose(self.cache.damage, self.cache.size, left)
                found[name] = self.joined(chosen, best.chosen)
        return found

    def parts(self, chosen: np.ndarray) -> dict[str, dict[str, float]]:
        """Return bytes, nats and mean bits of the weights and of the cache, and the bytes of what is beside."""
        found: dict[str, dict[str, float]] = {}
        for name, table, own in zip(("weights", "cache"), (self.weights, self.cache), self.apart(chosen), strict=True):
            total = table.totals(own)
            found[name] = {"bytes": total["spent"], "predicted": total["predicted"], "bits": 8 * total["spent"] / table.numel}
        beside = {"rest of the file": self.weights.beside, "states": self.state, "buffers": self.buffers}
        return found | {name: {"bytes": size} for name, size in beside.items() if size}

    def curve(self, count: int = CURVE) -> list[dict[str, Any]]:
        """Return the best plans of several memories, from the smallest to 16 bits for everything, evenly in ratio."""
        table = self.table
        low, high = int(table.smallest.sum()), int(np.where(table.has, table.size, 0).max(axis=1).sum())
        return [self.point(int(limit)) for limit in np.geomspace(low, high, count).round()]

    def point(self, limit: int) -> dict[str, Any]:
        """Return the best plan of so many bytes for formats, in numbers."""
        table = self.table
        found = choose(table.damage, table.size, limit)
        own = table.totals(found.chosen)
        row = {"memory": limit + self.beside, "predicted": own["predicted"], "price": found.price * GIB}
        row |= {f"{n}_{key}": p[key] for n, p in self.parts(found.chosen).items() for key in ("bytes", "bits") if key in p}
        return row | ({"values": bits_of(table, found.chosen)} if len(table.blocks) <= SHOWN else {})


def fit_of(scores: Scores, terms: Terms) -> tuple[Fit, dict[str, Any]]:
    """Return what was measured, at a context, with the record of the cache."""
    held = scores.extra.get("cache")
    if not isinstance(held, Mapping):
        what = "These scores say nothing of the cache."
        raise InvalidInput(what, "A fit needs the damage of its formats.", "Measure it: layerbudget plan fit MODEL.")
    space = CacheSpace.read(held, terms.tokens, terms.batch)
    damage, rest = (np.array(held[k], dtype=np.float64) for k in ("damage", "rest"))
    return Fit.of(Table.of(scores), space, terms, damage, rest), dict(held)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """The decision of a fit, from which the plan of every rule follows."""

    scores: Scores
    terms: Terms
    fit: Fit
    decision: Decision
    limit: int
    named: Mapping[str, str]  # the format or mix of rules without a program
    caches: Mapping[str, dict[str, Any]]  # totals of every uniform cache

    @classmethod
    def of(cls, scores: Scores, terms: Terms) -> Fitted:
        """Return the decision under some terms."""
        fit, _ = fit_of(scores, terms)
        table, limit = fit.table, fit.limit(terms.bytes)
        others: dict[str, np.ndarray] = {}
        named: dict[str, str] = {}
        plans = {UNIFORM: fit.uniform_caches(limit), MIX: fit.mixes(limit)}
        for rule, found in plans.items():
            if found:
                named[rule] = min(found, key=lambda n: table.totals(found[n])["predicted"])
                others[rule] = found[named[rule]]
        decision = Decision.of(table, limit, others)
        caches = {n: table.totals(c) for n, c in plans[UNIFORM].items()}
        return cls(scores=scores, terms=terms, fit=fit, decision=decision, limit=limit, named=named, caches=caches)

    def plan(self, rule: str) -> Plan:
        """Return the plan of a rule."""
        fit, table = self.fit, self.decision.table
        if rule not in self.decision.choices:
            what = f"No plan of the rule {rule} fits {self.terms.bytes:,} bytes."
            raise InvalidInput(what, "Its formats were not measured, or take more.", "Raise the memory, or use --rule choices.")
        chosen = self.decision.choices[rule]
        weights, cache = fit.apart(chosen)
        more = fit.point(self.limit + GIB)
        extra = {
            **extra_of(fit.weights, weights),
            **self.decision.record(rule),
            **few_tokens(fit.weights, self.scores),
            "formats": table.formats_of(chosen),
            **fit.space.terms(self.scores.extra["cache"]["group"]),
            "parts": fit.parts(chosen),
            "part_errors": {"weights": fit.weights.error_of(weights), "cache": fit.cache.error_of(cache)},
            "cache_formats": fit.cache.formats_of(cache),
            "named": dict(self.named),
            "uniform_caches": dict(self.caches),
            "more": {"bytes": GIB, "predicted": more["predicted"]},
            "curve": fit.curve(),
            "asked": rule,
        }
        terms = {k: v for k, v in dataclasses.asdict(self.terms).items() if v} | imatrix_of(self.scores)
        return Plan(
            kind=KIND,
            rule=rule,
            model=self.scores.model,
            blocks=plan_blocks(table, chosen),
            hyperparameters=to_jsonable({**terms, "rule": rule, "method": fit.weights.method, "runtime": fit.weights.runtime}),
            budget={"unit": "bytes", "limit": self.terms.bytes, "spent": self.decision.totals[rule]["spent"] + fit.beside},
            certificate=self.decision.certificate(rule),
            scores_digest=self.scores.digest,
            extra=extra,
        )


def split_fit(plan: Plan) -> tuple[Plan, Plan]:
    """The plan of bits and the plan of the cache in a fit, each as if it had been made alone."""
    if plan.kind != KIND:
        raise InvalidInput(f"A plan of kind {plan.kind} is no fit.", "", "Make one: layerbudget plan fit MODEL.")
    e = plan.extra
    kept = set(e["cache_formats"])
    parts = []
    for name, own in (("weights", False), ("cache", True)):
        blocks = tuple(b for b in plan.blocks if (b.modules[0] in kept) == own)
        formats = {m: e["formats"][m] for b in blocks for m in b.modules}
        spent = int(sum(b.count for b in blocks))
        file = {} if own else {"file": spent + e["fixed_bytes"]}
        said = {"formats": formats, "predicted_error": e["part_errors"][name], "baselines": {}, "near_ties": []}
        said |= {k: e["parts"][name][k] for k in ("bits", "predicted")}
        names = (
            ("runtime", "context", "batch", "group")
            if own
            else ("runtime", "family", "method", "fixed_bytes", "head_bytes", "signature")
        )
        parts.append(
            dataclasses.replace(
                plan,
                kind="cache" if own else "bits",
                blocks=blocks,
                budget={"unit": "bytes", "limit": spent, "spent": spent, **file},
                hyperparameters={"bits": None, "budget": f"{file.get('file', spent)} bytes", "rule": plan.rule, "fit": True},
                certificate={},
                extra={**said, **{k: e[k] for k in ("runtime", *names) if k in e}},
            )
        )
    return parts[0], parts[1]


def parts_of(plan: Plan) -> dict[str, Plan]:
    """Return the plans in a plan, by kind: of a fit two, of any other itself."""
    return {p.kind: p for p in split_fit(plan)} if plan.kind == KIND else {plan.kind: plan}


def shares(plan: Plan) -> list[str]:
    """Sentences that say what each part got, and what more memory would bring."""
    e, parts = plan.extra, plan.extra["parts"]
    w, c = parts["weights"], parts["cache"]
    beside = ", ".join(f"{p['bytes']:,.0f} {name}" for name, p in parts.items() if name not in ("weights", "cache"))
    said = [
        f"For {e['runtime']} at {e['context']} tokens x {e['batch']}: weights {w['bytes']:,.0f} bytes ({w['bits']:.3f} bits "
        f"per weight, {w['predicted']:.4g} nats per token), cache {c['bytes']:,.0f} bytes ({c['bits']:.3f} bits per number, "
        f"{c['predicted']:.4g} nats), {beside}."
    ]
    if plan.certificate:
        price, unit = plan.certificate["price"] * GIB, "GiB"
        if plan.budget["limit"] < GIB:
            price, unit = price / 1024, "MiB"
        said.append(
            f"At the margin one {unit} is worth {price:.3g} nats; with one GiB more the best plan would lose "
            f"{e['more']['predicted']:.4g} in all."
        )
    return said


def sentences(plan: Plan) -> list[str]:
    """Sentences that say what a fit decides and what it rests on."""
    e = plan.extra
    damage = f"{e['predicted']:.4g} +- {e['predicted_error']:.1g} nats per token{_others(plan)}"
    check = [e["check"]["verdict"]] if "check" in e else []
    return [*shares(plan), f"Damages of single blocks add up to {damage}.", *check]


def _others(plan: Plan) -> str:
    """The totals of rules without a joint program, in brackets."""
    e = plan.extra
    words = {UNIFORM: "one format for the cache ({})", MIX: "the weights as {}", "choices": "the program"}
    rows = [f"{words[n].format(e['named'].get(n))} {r['predicted']:.4g}" for n, r in e["baselines"].items() if n != plan.rule]
    return f" ({'; '.join(rows)})" if rows else ""
