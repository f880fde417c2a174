"""What a rule is: a name, the options that it reads, and a function from a problem to a decision.

An option that a rule does not read is refused, never ignored and never recorded. Budgets, floors, caps and fixed blocks bind
every rule of their kind and are part of the problem. A rule of one's own is one function::

    from layerbudget.planning.rule import Decision, rule

    @rule("sparsity", "later-is-cheaper", summary="sparsity that grows with depth", slope=0.2)
    def later_is_cheaper(problem, options):
        depth = np.linspace(-1, 1, len(problem.blocks))
        return Decision(value=problem.share + options["slope"] * depth)

The decorator registers it; so does an entry point of the group ``layerbudget.rules`` that names its module.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInput
from ..records import Block
from ..registry import Registry, options_of, resolve_options
from ..scores import Scores
from ..solvers.inputs import Vector
from ..solvers.separable import Solution
from .options import DEFAULTS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What a rule is to decide.

    Attributes:
        kind: Kind of plan.
        blocks: The K blocks.
        scores: Their scores; None where only blocks were given.
        amount: Budget per unit of a block's value, shape ``(K,)``: parameters of the block (sparsity), price of one expert or
            rank.
        target: Parameters that must go, or what may be spent.
        low, high: Bounds of the values, shape ``(K,)``; equal for blocks that are fixed.
        held: Mask of the fixed blocks.
        base: Capacity that every block has anyway and that earns nothing, shape ``(K,)`` (experts).
        multiple: Counts are multiples of this.
    """

    kind: str
    blocks: Sequence[Block]
    scores: Scores | None
    amount: Vector
    target: float
    low: Vector
    high: Vector
    held: np.ndarray
    base: Vector | None = None
    multiple: int = 1

    @property
    def share(self) -> float:
        """Mean value of the blocks that are not fixed, when the target is met exactly."""
        free = ~self.held
        left = self.target - float(np.dot(self.amount[self.held], self.low[self.held]))
        return left / float(self.amount[free].sum()) if free.any() else 0.0

    def need_scores(self) -> Scores:
        """The score record.

        Raises:
            InvalidInput: Blocks without scores were given.
        """
        if self.scores is not None:
            return self.scores
        raise InvalidInput("This rule needs scores and only blocks were given.", "", "Score first, or use rule='uniform'.")

    def oriented(self, damping: float | None) -> Vector:
        """Scores with larger = deserves more capacity, shape ``(K,)``."""
        record = self.need_scores()
        return record.values(damping) if record.orientation == "gain" else -record.values(damping)

    def weights(self, options: Mapping[str, Any]) -> Vector:
        """Normalised weights of the scores; shuffled where the rule reads a seed."""
        q = self.need_scores().weights(options["damping"], smoothing=options["smoothing"])
        return q[shuffled(q.size, options["seed"])] if "seed" in options else q


def shuffled(size: int, seed: int) -> np.ndarray:
    """The order in which a control puts values on the wrong blocks.

    Raises:
        InvalidInput: A seed below zero.
    """
    if seed < 0:
        raise InvalidInput(f"seed is {seed}.", "It is zero or more.", "Use 0.")
    return np.random.default_rng(seed).permutation(size)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """What a rule decided.

    Attributes:
        value: Sparsity, experts or rank per block, shape ``(K,)``. Without counts it is made to fit the budget and the bounds:
            sparsities are shifted by one number, capacities scaled.
        counts: Whole numbers, where the rule makes them itself.
        solution: The certified solution, for rules that solve a program.
        target: Parameters that go, where the rule departs from the target (published behaviour).
        extra: What the plan should say beside it.
    """

    value: Vector
    counts: np.ndarray | None = None
    solution: Solution | None = None
    target: int | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Decide = Callable[[Problem, Mapping[str, Any]], Decision]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One rule of one kind of plan.

    Attributes:
        kind: Kind of plan.
        name: What users write.
        decide: ``(problem, options) -> decision``.
        reads: Shared options that it reads.
        own: Options that only this rule has, with their defaults.
        summary: A line for the help and the docs.
        pattern: Regular expression of all names, for a family (``mola-2468``, ``mola-8642``, ...); the name is in
            ``options["rule"]``.
    """

    kind: str
    name: str
    decide: Decide
    reads: tuple[str, ...] = ()
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    summary: str = ""
    pattern: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Every option that it reads, with its default."""
        return {**{name: DEFAULTS[name] for name in self.reads}, **self.own}

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options, see :func:`layerbudget.registry.resolve_options`."""
        return resolve_options(f"The rule {self.name}", options_of(self.options), given)


# One table per kind of plan; a kind of one's own gets a table with its first rule.
RULES: dict[str, Registry[Rule]] = {}


def rule(
    kind: str, name: str, *, reads: Sequence[str] = (), summary: str = "", pattern: str | None = None, **own: Any
) -> Callable[[Decide], Decide]:
    """Register a function as a rule.

    Args:
        kind: ``sparsity``, ``experts`` or ``ranks``.
        name: What users write; a name that is taken is replaced.
        reads: Shared options that it reads, see ``OPTIONS``.
        summary: A line for the help.
        pattern: See :class:`Rule`.
        **own: Options of its own, with their defaults; a shared one among them gets another default.

    Raises:
        InvalidInput: A shared option that does not exist.
    """
    wrong = [n for n in reads if n not in DEFAULTS]
    if wrong:
        raise InvalidInput(
            f"{wrong[0]!r} cannot be read by {name}.", f"Shared options are {', '.join(DEFAULTS)}.", "Give it a default."
        )

    def add(decide: Decide) -> Decide:
        made = Rule(kind=kind, name=name, decide=decide, reads=tuple(reads), own=own, summary=summary, pattern=pattern)
        RULES.setdefault(kind, Registry("rule", group="layerbudget.rules")).add(name, made)
        return decide

    return add


def rules_of(kind: str) -> dict[str, Rule]:
    """Rules of a kind of plan by name, the default (``mdl``) first."""
    known = RULES[kind].all() if kind in RULES else {}
    return {name: known[name] for name in sorted(known, key=lambda name: name != "mdl")}


def as_rule(kind: str, rule: str | Callable[..., Any]) -> Rule:
    """A rule by its name, or a function of one's own as a rule.

    Args:
        kind: Kind of plan.
        rule: A name, or a function of a :class:`Problem` (and of the options, where it takes two arguments) that returns one
            value per block, or a :class:`Decision`. Values that miss the budget or the bounds are fitted.

    Raises:
        InvalidInput: No such rule.
    """
    if isinstance(rule, str):
        return find_rule(kind, rule)
    function = rule
    two = len(inspect.signature(function).parameters) > 1

    def decide(problem: Problem, options: Mapping[str, Any]) -> Decision:
        made = function(problem, options) if two else function(problem)
        return made if isinstance(made, Decision) else Decision(value=np.asarray(made, dtype=np.float64))

    return Rule(kind=kind, name=getattr(function, "__name__", type(function).__name__), decide=decide)


def find_rule(kind: str, name: str) -> Rule:
    """The rule of that name.

    Raises:
        InvalidInput: There is none.
    """
    known = rules_of(kind)
    if name in known:
        return known[name]
    for family in known.values():
        if family.pattern is not None and re.fullmatch(family.pattern, name):
            return dataclasses.replace(family, name=name, own={**family.own, "rule": name})
    raise InvalidInput(f"rule is {name!r}.", f"It is one of {', '.join(known)}.", f"Use rule={next(iter(known))!r}.")
