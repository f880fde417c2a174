"""Which plans a comparison makes: every score under every rule, a permuted control of each, and uniform. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..canonical import digest
from ..decision import DECISIONS
from ..decisions.apply import maker
from ..decisions.rules import find_rule, rules_of, shuffled
from ..errors import InvalidInput, LayerbudgetError
from ..plan import Plan
from ..records import Block
from ..scores import Scores

UNIFORM = "uniform"
_BY_BLOCK = ("increments", "increments_floor")  # of a score's extra: tables with an entry per block, which rules read
BOUNDS = ("max_sparsity", "min_sparsity", "max_rank", "min_rank", "multiple", "max_experts", "min_experts", "expert_rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridEntry:
    """One plan of a comparison, at one budget and seed.

    Its name is ``rule(score)``, ``rule(score, permuted)``, or the rule alone where it ignores the score, which is None then. A
    plan that was given has its own name. ``control`` is ``""``, ``uniform`` or ``permuted``.
    """

    name: str
    rule: str
    score: str | None
    control: str
    plan: Plan

    @property
    def decision(self) -> str:
        """Digest of what the model gets; equal decisions are measured once, whoever made them."""
        content = {"kind": self.plan.kind, "blocks": [(b.name, b.count) for b in self.plan.blocks]}
        return digest({**content, "rows": self.plan.rows.digest} if self.plan.rows else content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanGrid:
    """All entries of one budget and one seed, uniform first.

    ``ignoring`` are rules that make the same plan whatever the score says, ``impossible`` is ``{entry: reason}``.
    """

    entries: Sequence[GridEntry]
    ignoring: Sequence[str]
    impossible: Mapping[str, str]

    def twins(self) -> list[list[str]]:
        """Names of entries that decide the same, in groups of two and more."""
        groups: dict[str, list[str]] = {}
        for entry in self.entries:
            groups.setdefault(entry.decision, []).append(entry.name)
        return [names for names in groups.values() if len(names) > 1]


def moved(scores: Scores, order: np.ndarray) -> Scores:
    """The same numbers on other blocks: block k gets those of block ``order[k]``, with its gains of every further rank."""
    tables: dict[str, Any] = {
        name: tuple(tuple(row[i] for i in order) for row in getattr(scores, name))
        for name in ("gain", "status", "standard_error", "noise_floor")
    }
    by_rank = {n: [[row[i] for i in order] for row in scores.extra[n]] for n in _BY_BLOCK if n in scores.extra}
    return dataclasses.replace(scores, **tables, extra=by_rank)


def planned(kind: str, scores: Scores | Sequence[Block], rule: str | Any, budget: float, options: Mapping[str, Any]) -> Plan:
    """One plan through the kind's own door; options that this rule does not read are left to those that do."""
    what = DECISIONS.find(kind)
    read = {k: v for k, v in options.items() if k in BOUNDS or k in find_rule(kind, rule).options}
    return maker(kind)(scores, **{what.budget: what.budget_type(budget)}, rule=rule, **read)


def ignores(kind: str, scores: Scores, rule: str | Any, budget: float, options: Mapping[str, Any]) -> bool:
    """Whether turning the score upside down leaves the plan as it is."""
    values = scores.values(options.get("damping"))
    ranked = np.argsort(values, kind="stable")
    order = np.empty_like(ranked)
    order[ranked] = ranked[::-1]
    first, second = (planned(kind, s, rule, budget, options) for s in (scores, moved(scores, order)))
    return bool((first.counts == second.counts).all()) and len(set(values.tolist())) > 1


def misfit(plan: Plan, uniform: Plan) -> str:
    """Why a plan cannot stand beside uniform; empty where both spend the same."""
    (spends, unit), (asked, theirs) = ((p.budget["spent"], p.budget["unit"]) for p in (plan, uniform))
    if unit == theirs and abs(spends - asked) <= 1e-3 * asked:
        return ""
    return f"It spends {spends:,.10g} {unit}; uniform spends {asked:,.10g} {theirs}."


def check_request(
    kind: str,
    blocks: Sequence[Block],
    rules: Sequence[str | Any],
    budgets: Sequence[float],
    options: Mapping[str, Any] | None = None,
    plans: Mapping[str, Plan] | None = None,
) -> None:
    """Refuse rules that do not exist, options that none of them reads, and budgets that nothing meets, before any work.

    Args:
        kind: Kind of plan.
        blocks: Blocks of the model.
        rules: Names of rules, or functions of one's own.
        budgets: In the unit of the kind.
        options: Bounds of the plans and options of rules.
        plans: Plans that are measured as they are, by name.
    """
    options = dict(options or {})
    try:
        chosen = [find_rule(kind, r) for r in rules]
    except InvalidInput as error:
        if kind != "sparsity" or "directional" not in rules:
            raise
        raise InvalidInput(
            "The rule directional measures the model and reads no score.",
            "A comparison takes its plan as a file.",
            "Make it by layerbudget plan sparsity MODEL -o plan.json, and name plan.json under --scores.",
        ) from error
    for name in options:
        if name not in BOUNDS and not any(name in r.options for r in chosen):
            raise InvalidInput(
                f"No rule here reads {name}.", f"The rules are {', '.join(r.name for r in chosen)}.", "Leave it out."
            )
    uniform = [planned(kind, blocks, UNIFORM, budget, options) for budget in budgets]
    for name, plan in (plans or {}).items():
        problems = [problem for each in uniform if (problem := misfit(plan, each))]
        if len(problems) == len(budgets):
            raise InvalidInput(f"The plan {name} fits no budget here.", problems[0], "Plans are compared at the same budget.")


def make_grid(
    kind: str,
    scores: Mapping[str, Scores],
    rules: Sequence[str | Any],
    budget: float,
    *,
    seed: int = 0,
    controls: bool = True,
    options: Mapping[str, Any] | None = None,
    blocks: Sequence[Block] = (),
    plans: Mapping[str, Plan] | None = None,
) -> PlanGrid:
    """Return every score under every rule at one budget, in the unit of the kind's door.

    A control of every pair that reads its score is the rule's own, or the rule on permuted scores. A rule gets those of the
    ``options`` that it reads; one that no rule reads is refused. ``plans`` come as they are, where they spend what uniform
    spends.

    Args:
        kind: Kind of plan.
        scores: Score records by name.
        rules: Names of rules, or functions of one's own.
        budget: In the unit of the kind.
        seed: Of the permuted controls.
        controls: Add a permuted control of every pair that reads its score.
        options: Bounds of the plans and options of rules.
        blocks: Needed where there is no score.
        plans: Plans that are measured as they are, by name.
    """
    blocks = blocks or next(iter(scores.values())).blocks
    check_request(kind, blocks, rules, [budget], options)
    chosen, options = [find_rule(kind, r) for r in rules], dict(options or {})
    uniform = planned(kind, blocks, UNIFORM, budget, options)
    entries = {UNIFORM: GridEntry(name=UNIFORM, rule=UNIFORM, score=None, control=UNIFORM, plan=uniform)}
    impossible: dict[str, str] = {}
    ignoring: list[str] = []

    def add(name: str, score: str | None, plan: Plan, control: str = "") -> None:
        entries.setdefault(name, GridEntry(name=name, rule=rule.name, score=score, control=control, plan=plan))

    for named_rule, rule in zip(rules, chosen, strict=True):
        for score, record in scores.items():
            try:
                plan = planned(kind, record, named_rule, budget, options)
                if rule.name in ignoring or ignores(kind, record, named_rule, budget, options):
                    ignoring += [] if rule.name in ignoring else [rule.name]
                    add(rule.name, None, plan)
                    continue
                add(f"{rule.name}({score})", score, plan)
                permuted_rule = f"{rule.name}-permuted"
                if controls and permuted_rule in rules_of(kind):
                    control = planned(kind, record, permuted_rule, budget, {**options, "seed": seed})
                elif controls:
                    control = planned(kind, moved(record, shuffled(len(record.blocks), seed)), named_rule, budget, options)
                else:
                    continue
                add(f"{rule.name}({score}, permuted)", score, control, "permuted")
            except LayerbudgetError as error:
                impossible[f"{rule.name}({score})"] = str(error)
    for name, plan in (plans or {}).items():
        if problem := misfit(plan, uniform):
            impossible[name] = problem
        else:
            entries[name] = GridEntry(name=name, rule=plan.rule, score=None, control="", plan=plan)
    if len(entries) == 1 and impossible and not plans:
        raise InvalidInput(
            f"No score makes a plan under any rule: {next(iter(impossible.values()))}", "", "Or choose other scores."
        )
    return PlanGrid(entries=tuple(entries.values()), ignoring=tuple(ignoring), impossible=impossible)
