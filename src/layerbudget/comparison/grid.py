"""Which plans a comparison makes: every score under every rule, a permuted control of each, and uniform. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..decisions.apply import find_rule, maker, rules_of
from ..decisions.bits.program import RULES as BITS
from ..errors import InvalidInput, LayerbudgetError
from ..kinds import KINDS
from ..plan import Plan
from ..planning.rule import Rule, shuffled
from ..records import digest
from ..scores import Scores

UNIFORM = "uniform"
Weighing = Callable[[Scores], Scores]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One plan of a comparison, at one budget and seed.

    Attributes:
        name: ``rule(score)``, ``rule(score, permuted)``, or the rule alone where it ignores the score.
        rule: The rule.
        score: The score; None where the rule ignores it.
        control: ``""``, ``uniform`` or ``permuted``.
        plan: The plan.
    """

    name: str
    rule: str
    score: str | None
    control: str
    plan: Plan

    @property
    def decision(self) -> str:
        """Digest of what the model gets; equal decisions are measured once, whoever made them."""
        return digest({"kind": self.plan.kind, "blocks": [(b.name, b.count) for b in self.plan.blocks]})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """All entries of one budget and one seed.

    Attributes:
        entries: The entries, uniform first.
        ignoring: Rules that make the same plan whatever the score says.
        impossible: ``{entry: reason}`` for combinations that make no plan.
    """

    entries: Sequence[Entry]
    ignoring: Sequence[str]
    impossible: Mapping[str, str]


def permuted(scores: Scores, seed: int) -> Scores:
    """The same values on the wrong blocks; a table of formats goes with its order to the bench, which builds the new one."""
    order = shuffled(len(scores.blocks), seed)
    move = lambda table: tuple(tuple(row[i] for i in order) for row in table)  # noqa: E731
    return dataclasses.replace(
        scores, gain=move(scores.gain), status=move(scores.status), standard_error=move(scores.standard_error),
        noise_floor=move(scores.noise_floor),
        extra={"table": scores.extra["choices"], "order": list(order)} if "choices" in scores.extra else {},
    )  # fmt: skip


def _reversed(scores: Scores) -> Scores:
    """The same values, the largest where the smallest was."""
    row = scores.values()
    turned = np.empty_like(row)
    turned[np.argsort(row, kind="stable")] = np.sort(row)[::-1]
    return dataclasses.replace(
        scores,
        gain=tuple(tuple(turned.tolist()) for _ in scores.damping),
        status=(),
        standard_error=(),
        noise_floor=(),
        extra={},
    )


def planned(kind: str, scores: Scores, rule: str | Any, budget: float, options: Mapping[str, Any]) -> Plan:
    """One plan through the kind's own door; options that this rule does not read are left to those that do."""
    what = KINDS.find(kind)
    value = int(budget) if what.budget == "total" else budget
    read = {k: v for k, v in options.items() if k in _BOUNDS or k in find(kind, rule).options}
    return maker(kind)(scores, **{what.budget: value}, rule=rule, **read)


@dataclasses.dataclass(frozen=True)
class Named:
    """A rule that is no function of a problem: those of bits, which read a table of damages and no options."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def find(kind: str, rule: str | Any) -> Rule | Named:
    """A rule of a kind by its name, or a function of one's own.

    Raises:
        InvalidInput: There is none, or a function for a kind that decides by formats.
    """
    if kind != "bits":
        return find_rule(kind, rule)
    if rule not in BITS:
        raise InvalidInput(f"rule is {rule!r}.", f"Of bits it is one of {', '.join(BITS)}.", "Use 'choices'.")
    return Named(rule)


_BOUNDS = ("max_sparsity", "min_sparsity", "max_rank", "min_rank", "multiple", "max_experts", "min_experts", "expert_rank")


def ignores(
    kind: str, scores: Scores, rule: str | Any, budget: float, options: Mapping[str, Any], weighed: Weighing = lambda s: s
) -> bool:
    """Whether turning the score upside down leaves the plan as it is."""
    first = planned(kind, weighed(scores), rule, budget, options)
    second = planned(kind, weighed(_reversed(scores)), rule, budget, options)
    return bool((first.counts == second.counts).all()) and len(set(scores.values().tolist())) > 1


def _control(
    kind: str, scores: Scores, given: str | Any, rule: Rule | Named, budget: float, seed: int, options: Mapping[str, Any],
    weighed: Weighing,
) -> Plan:  # fmt: skip
    """The rule's own control where it has one, else the rule on permuted scores."""
    own = f"{rule.name}-permuted"
    if own in rules_of(kind):
        return planned(kind, scores, own, budget, {**options, "seed": seed})
    return planned(kind, weighed(permuted(scores, seed)), given, budget, options)


def make_grid(
    kind: str, scores: Mapping[str, Scores], rules: Sequence[str | Any], budget: float, *, seed: int = 0,
    controls: bool = True, options: Mapping[str, Any] | None = None, weighed: Weighing = lambda s: s,
) -> Grid:  # fmt: skip
    """Every score under every rule at one budget.

    Args:
        kind: Kind of plan.
        scores: Score records by the name that they go by.
        rules: Names of rules, or functions.
        budget: In the unit of the kind's door.
        seed: Of the permuted controls.
        controls: Make a permuted control of every pair that reads its score.
        options: Bounds, and options of rules; a rule gets those that it reads.
        weighed: What rules plan from, of a score record.

    Raises:
        InvalidInput: No pair makes a plan, or an option that no rule reads.
    """
    chosen = [find(kind, r) for r in rules]
    options = dict(options or {})
    for name in options:
        if (name not in _BOUNDS or kind == "bits") and not any(name in r.options for r in chosen):
            raise InvalidInput(
                f"No rule here reads {name}.", f"The rules are {', '.join(r.name for r in chosen)}.", "Leave it out."
            )
    entries: dict[str, Entry] = {}
    impossible: dict[str, str] = {}
    ignoring: list[str] = []
    first = next(iter(scores.values()))
    _add(entries, UNIFORM, UNIFORM, None, UNIFORM, planned(kind, weighed(first), UNIFORM, budget, options))
    for given, rule in zip(rules, chosen, strict=True):
        for score, record in scores.items():
            name = f"{rule.name}({score})"
            try:
                if rule.name in ignoring or ignores(kind, record, given, budget, options, weighed):
                    if rule.name not in ignoring:
                        ignoring.append(rule.name)
                    _add(entries, rule.name, rule.name, None, "", planned(kind, weighed(record), given, budget, options))
                    continue
                _add(entries, name, rule.name, score, "", planned(kind, weighed(record), given, budget, options))
                if controls:
                    control = _control(kind, record, given, rule, budget, seed, options, weighed)
                    _add(entries, f"{rule.name}({score}, permuted)", rule.name, score, "permuted", control)
            except LayerbudgetError as error:
                impossible[name] = str(error)
    if len(entries) == 1 and impossible:
        raise InvalidInput(f"No score makes a plan under any rule: {next(iter(impossible.values()))}", "", "Choose others.")
    return Grid(entries=tuple(entries.values()), ignoring=tuple(ignoring), impossible=impossible)


def _add(entries: dict[str, Entry], name: str, rule: str, score: str | None, control: str, plan: Plan) -> None:
    if name not in entries:
        entries[name] = Entry(name=name, rule=rule, score=score, control=control, plan=plan)


def twins(entries: Sequence[Entry]) -> list[list[str]]:
    """Names of entries that decide the same, in groups of two and more."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(entry.decision, []).append(entry.name)
    return [names for names in groups.values() if len(names) > 1]
