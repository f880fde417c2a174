"""The decision of a plan of weights and cache: every rule's choice, and the plans that follow. No torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...canonical import to_jsonable
from ...errors import InvalidInput
from ...plan import Plan
from ...scores import Scores
from ...solvers.choices import Choice
from ..formats.program import FormatDecision, few_tokens, imatrix_of, of_weights, plan_blocks
from .payload import MemoryPayload, PartErrors, Placement
from .placement import Placed, place
from .program import KIND, MIX, UNIFORM, Fit, MemoryLimits, curve, fit_of, with_more

_PASSES = ("formats", "cache")  # what was measured, each with its forward equivalents
_NEAR = {UNIFORM: 3, MIX: 2}  # plans of a rule that may be measured as a whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pick:
    """The decision of a rule: the formats of all blocks of a plan of memory.

    Attributes:
        name: The format or mix of a rule without a program.
    """

    fit: Fit
    chosen: np.ndarray
    name: str = ""

    @property
    def totals(self) -> dict[str, Any]:
        """Damage and bytes, of which those count that formats change."""
        return self.fit.table.totals(self.chosen)

    @property
    def spent(self) -> int:
        """Bytes of memory."""
        return int(self.totals["spent"]) + self.fit.beside

    def same(self, other: Pick) -> bool:
        """Whether both have the same formats."""
        return np.array_equal(self.chosen, other.chosen)

    @property
    def key(self) -> list[str]:
        """Names of all that it decides. Places of formats would be others where other formats are chosen among."""
        return [t.formats[j] for t, c in self.fit.shown(self.chosen) for j in c]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """The decision of a plan of memory, from which the plan of every rule follows.

    Attributes:
        fit, limit: What is decided, and the bytes that its formats may take.
        memory: Bytes in all. Of two memories: those of the card, and what lies with the processor alone.
        choice: The program's choice with its certificate.
        picks: What every rule decides.
        near: The plans of a rule that come next in predicted damage, the least first.
        caches: Totals of every uniform cache.
        placed: The best plans of two memories, the best of all first, then of every number of layers; empty of one.
        given: The next fewer layers, where the bytes that their best plan takes of the processor's memory give that plan.
    """

    scores: Scores
    terms: MemoryLimits
    fit: Fit
    memory: int
    limit: int
    choice: Choice
    picks: Mapping[str, Pick]
    near: Mapping[str, Sequence[Pick]]
    caches: Mapping[str, dict[str, Any]]
    placed: Sequence[Placed] = ()
    given: int | None = None

    @classmethod
    def of(cls, scores: Scores, terms: MemoryLimits) -> Fitted:
        """Return the decision under some terms."""
        fit = fit_of(scores, terms)

        def freed() -> list[tuple[str, Fit]]:
            return [(f"leave out {terms.given}", fit_of(scores, terms.free))]

        memory, placed, given = terms.bytes, list[Placed](), None
        every = fit.table
        if terms.ram is not None:
            whole = fit
            fit, memory, placed = place(fit, terms.bytes, terms.beside)
            given = _given(whole, terms.bytes, placed)
        limit, choice = fit.limit(memory, freed, terms.utilization), fit.best(memory)
        if placed:
            own_best = every.damage[np.arange(len(choice.chosen)), choice.chosen] == every.damage.min(axis=1)
            status = "optimal" if choice.status == "slack" and not own_best.all() else choice.status
            among = " of two memories, each within its own limit,"
            choice = dataclasses.replace(choice, status=status, among=among)
        caches, mixes = _picks(fit, fit.uniform_caches(limit)), _picks(fit, fit.mixes(limit))
        picks, near = {"exact": Pick(fit=fit, chosen=choice.chosen)}, {}
        for rule, plans in ((UNIFORM, caches), (MIX, mixes)):
            if some := sorted(plans, key=lambda pick: pick.totals["predicted"]):
                picks[rule], *near[rule] = some[: _NEAR[rule]]
        return cls(
            scores=scores,
            terms=terms,
            fit=fit,
            memory=memory,
            limit=limit,
            choice=choice,
            picks=picks,
            near=near,
            caches={pick.name: pick.totals for pick in caches},
            placed=placed,
            given=given,
        )

    @functools.cached_property
    def decision(self) -> FormatDecision:
        """The program's choice beside the damages of all picks."""
        return FormatDecision(
            table=self.fit.table,
            choices={rule: pick.chosen for rule, pick in self.picks.items()},
            totals={rule: pick.totals for rule, pick in self.picks.items()},
            choice=self.choice,
        )

    def pick(self, rule: str) -> Pick:
        """Return what a rule decides."""
        if rule not in self.picks:
            what = f"No plan of the rule {rule} fits {self.memory:,} bytes."
            raise InvalidInput(what, "Its formats were not measured, or take more.", "Leave the rule out.")
        return self.picks[rule]

    def placement_of(self, pick: Pick) -> Placement | None:
        """Return where the tensors of a choice lie; what lies with the processor is the same in all."""
        if not self.placed:
            return None
        gpu, ram = self.terms.bytes, self.terms.beside
        best, *plans = self.placed
        others = [(each, each.split.placement(gpu, ram, each.chosen)) for each in plans]
        rows = [
            {"layers": p.layers, "gpu_bytes": p.card.bytes, "ram_bytes": p.processor.bytes, "predicted": each.damage}
            | ({"given": 1} if p.layers == self.given else {})
            for each, p in others
        ]
        return dataclasses.replace(best.split.placement(gpu, ram, pick.chosen), others=rows)

    def plan(self, rule: str) -> Plan:
        """Return the plan of a rule."""
        pick = self.pick(rule)
        fit, chosen = self.fit, pick.chosen
        weights, cache = fit.apart(chosen)
        formats = {m: f for t, c in fit.shown(chosen) for m, f in t.formats_of(c).items()}
        passes = [measured["passes"] for name in _PASSES if "passes" in (measured := self.scores.extra.get(name) or {})]
        fields = of_weights(fit.weights, weights) | fit.space.terms(self.scores.extra["cache"]["group"])
        payload = MemoryPayload(
            **{**fields, **self.decision.record(rule), **few_tokens(fit.weights, self.scores), "formats": formats},
            utilization=self.terms.utilization if self.terms.utilization < 1 else None,
            parts=fit.parts(chosen),
            part_errors=PartErrors(weights=fit.weights.error_of(weights), cache=fit.cache.error_of(cache)),
            cache_formats=fit.cache.formats_of(cache),
            named={name: each.name for name, each in self.picks.items() if each.name},
            uniform_caches=dict(self.caches),
            more=with_more(fit, self.memory),
            curve=curve(fit),
            asked=rule,
            placement=self.placement_of(pick),
            passes=sum(passes) if passes else None,
        )
        terms = {k: v for k, v in dataclasses.asdict(self.terms).items() if v} | imatrix_of(self.scores)
        return Plan(
            kind=KIND,
            rule=rule,
            model=self.scores.model,
            blocks=tuple(b for t, c in fit.shown(chosen) for b in plan_blocks(t, c)),
            hyperparameters=to_jsonable({**terms, "rule": rule, "method": fit.weights.method, "runtime": fit.weights.runtime}),
            budget={"unit": "bytes", "limit": self.memory, "spent": pick.spent},
            certificate=self.decision.certificate(rule),
            scores_digest=self.scores.digest,
            data=self.scores.data,
            payload=payload,
        )


def _given(fit: Fit, gpu: int, placed: Sequence[Placed]) -> int | None:
    """See :attr:`Fitted.given`: in the same bytes a plan of more layers may be better."""
    best, *plans = placed
    if not (fewer := [plan for plan in plans if plan.split.layers < best.split.layers]):
        return None
    _, processor = fewer[-1].split.sides(*fit.apart(fewer[-1].chosen))
    layers = place(fit, gpu, processor.bytes)[2][0].split.layers
    return layers if layers == fewer[-1].split.layers else None


def _picks(fit: Fit, plans: Mapping[str, np.ndarray]) -> list[Pick]:
    return [Pick(fit=fit, chosen=chosen, name=name) for name, chosen in plans.items()]
