"""A rule: a name, its options, and a function from a problem to a decision.

Budgets, floors, caps and fixed blocks bind every rule of their kind and are part of the problem. :func:`rule` registers a rule
of one's own; so does an entry point of the group ``layerbudget.rules`` that names its module.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from ..decision import DECISIONS
from ..errors import InvalidInput
from ..records import Block
from ..registry import Option, Registry, options_of, resolve_options
from ..scores import Scores
from ..solvers.inputs import Vector
from ..solvers.rounding import METHODS
from ..solvers.separable import Solution
from ..solvers.utilities import PENALTIES, UTILITIES

_Penalty: TypeAlias = Literal[tuple(PENALTIES)] | Any  # type: ignore[valid-type]
_Utility: TypeAlias = Literal[tuple(UTILITIES)] | Any  # type: ignore[valid-type]
_Spend = Literal["exactly", "at_most", "at_least"]
_Method: TypeAlias = Literal[METHODS]  # type: ignore[valid-type]


def _shared(
    *,
    exponent: Annotated[float, "power of the scores in the weights; beta and kappa of the paper"] = 1.0,
    exponent_on: Annotated[Literal["density", "block"], "the power of the score per parameter, or of all of it"] = "density",
    penalty: Annotated[_Penalty, "damage of a block by its sparsity"] = "quadratic",
    utility: Annotated[_Utility, "worth of a block's capacity"] = "log",
    spend: Annotated[_Spend, "all of the budget; at_most that is for capacity, at_least that for zeros"] = "exactly",
    alpha: Annotated[float | None, "default: 0.5; price of a unit of cost, without effect where the budget binds"] = None,
    gamma: Annotated[float | None, "default: 0.9; weight of the utility, without effect where the budget binds"] = None,
    bits: Annotated[float | None, "default: 16; bits that a zero saves, without effect where the budget binds"] = None,
    eta: Annotated[float | None, "default: 2; weight of the penalty, without effect where the budget binds"] = None,
    units: Annotated[Literal["relative", "literal"] | None, "default: relative; to their means, or as they are"] = None,
    method: Annotated[_Method, "how whole numbers are found: the best or nearly so, or rounded down"] = "auto",
    damping: Annotated[float | None, "default: the middle one of the scores; another one of those"] = None,
    smoothing: Annotated[float, "added to every score, as a share of the mean score"] = 0.0,
    seed: Annotated[int, "of the shuffle"] = 0,
    width: float | None = None,
) -> None: ...


# Options that several rules share: a rule names them, their types are here.
OPTIONS: Mapping[str, Option] = options_of(_shared)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The input of a rule.

    Attributes:
        scores: None where only blocks were given.
        amount: Budget per unit of a block's value, shape ``(K,)``: its parameters, or the price of an expert or rank.
        target: Parameters that must go, or what may be spent.
        low, high: Bounds of the values, shape ``(K,)``; equal for the blocks that are fixed, whose mask is ``held``.
        base: Experts that every block has anyway and that earn nothing, shape ``(K,)``.
        multiple: Counts are multiples of this.
        order: For a control, the order in which it puts measured values on the wrong blocks.
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
    order: np.ndarray | None = None

    @property
    def share(self) -> float:
        """Mean value of the blocks that are not fixed, when the target is met exactly."""
        free = ~self.held
        left = self.target - float(np.dot(self.amount[self.held], self.low[self.held]))
        return left / float(self.amount[free].sum()) if free.any() else 0.0

    def need_scores(self) -> Scores:
        """Return the score record; blocks alone are refused."""
        if self.scores is not None:
            return self.scores
        raise InvalidInput("This rule needs scores and only blocks were given.", "", "Score first, or use rule='uniform'.")

    def oriented(self, damping: float | None = None) -> Vector:
        """Return scores with larger = deserves more capacity, shape ``(K,)``."""
        record = self.need_scores()
        return record.values(damping) if record.orientation == "gain" else -record.values(damping)

    def weights(self, damping: float | None = None, smoothing: float = 0.0) -> Vector:
        """Return the normalised weights of the scores, on the wrong blocks for a control."""
        q = self.need_scores().weights(damping, smoothing=smoothing)
        return q if self.order is None else q[self.order]


def shuffled(size: int, seed: int) -> np.ndarray:
    """Return the order in which a control puts values on the wrong blocks."""
    if seed < 0:
        raise InvalidInput(f"seed is {seed}.", "It is zero or more.", "Use 0.")
    return np.random.default_rng(seed).permutation(size)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RuleResult:
    """The result of a rule.

    Attributes:
        value: Sparsity, experts or rank per block, shape ``(K,)``. Without counts it is made to fit the budget and the bounds:
            sparsities are shifted by one number; experts and ranks are in proportion to the values, whose unit changes nothing.
        counts: Whole numbers, where the rule makes them itself. They keep the budget and the bounds, or the plan is refused.
        solution: The certified solution, for rules that solve a program.
        target: Parameters that go, where the program prunes more than was asked for.
        payload: Fields of the plan's payload: what it should say beside its blocks.
    """

    value: Vector
    counts: np.ndarray | None = None
    solution: Solution | None = None
    target: int | None = None
    payload: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One rule of one kind of plan, see :func:`rule`; its function goes from a problem and options to a decision or values."""

    kind: str
    name: str
    function: Callable[..., Any]
    summary: str = ""
    pattern: str | None = None
    control: bool = False

    @property
    def options(self) -> dict[str, Option]:
        """Every option that it has; of a shared one the default is its own."""
        declared = options_of(self.function, without=("rule",))
        shared = {n: OPTIONS[n] for n in declared if n in OPTIONS}
        known = {
            n: dataclasses.replace(o, default=declared[n].default, help=declared[n].help or o.help) for n, o in shared.items()
        }
        return {**declared, **known, **({"seed": OPTIONS["seed"]} if self.control else {})}

    def resolve_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options; one that it does not have is refused, never ignored and never recorded."""
        return resolve_options(f"The rule {self.name}", self.options, options)

    def decide(self, problem: Problem, options: Mapping[str, Any]) -> RuleResult:
        """Return the decision under resolved options; a function's own value per block is checked."""
        arguments = dict(options)
        if self.control:
            problem = dataclasses.replace(problem, order=shuffled(len(problem.blocks), arguments.pop("seed")))
        if self.pattern is not None:
            arguments["rule"] = self.name
        made = self.function(problem, **arguments)
        made = made if isinstance(made, RuleResult) else RuleResult(value=made)
        value = np.asarray(made.value, dtype=np.float64)
        if value.shape != problem.amount.shape or not np.isfinite(value).all():
            raise InvalidInput(
                f"The rule {self.name} gave values of shape {value.shape}.",
                f"It must give {problem.amount.size} finite ones.",
                "Correct it.",
            )
        return dataclasses.replace(made, value=value)


# One table per kind of plan; a kind of one's own gets a table with its first rule.
RULES: dict[str, Registry[Rule]] = {}
Function = Callable[..., RuleResult]


def rule(
    kind: str, name: str, *, summary: str = "", pattern: str | None = None, control: bool = False
) -> Callable[[Function], Function]:
    """Register a function of a :class:`Problem` as a rule; its keyword-only parameters are its options.

    Args:
        kind: ``sparsity``, ``lora-experts`` or ``ranks``.
        name: What users write; a name that is taken is replaced.
        summary: A line for the help.
        pattern: Regular expression of all names, for a family (``mola-2468``, ``mola-8642``, ...); the function gets the name
            as its option ``rule``.
        control: Whether it decides on shuffled values: it then has the option ``seed``.
    """

    def add(function: Function) -> Function:
        made = Rule(kind=kind, name=name, function=function, summary=summary, pattern=pattern, control=control)
        RULES.setdefault(kind, Registry("rule", group="layerbudget.rules")).add(name, made)
        return function

    return add


def rules_of(kind: str) -> dict[str, Rule]:
    """Return the rules of a kind of plan by name, the default (``mdl``) first."""
    if kind in DECISIONS.names():
        DECISIONS.find(kind).planner()  # its module registers its rules
    known = RULES[kind].all() if kind in RULES else {}
    return {name: known[name] for name in sorted(known, key=lambda name: name != "mdl")}


def find_rule(kind: str, rule: str | Callable[..., Any]) -> Rule:
    """Return a rule by its name (``my.py:name`` runs that file first), or a function of one's own as a rule."""
    if not isinstance(rule, str) and callable(rule):
        return Rule(kind=kind, name=getattr(rule, "__name__", type(rule).__name__), function=rule)
    known = rules_of(kind)
    if rule in known or (".py:" in str(rule) and kind in RULES):
        return RULES[kind].find(rule)
    for family in known.values():
        if family.pattern is not None and re.fullmatch(family.pattern, str(rule)):
            return dataclasses.replace(family, name=rule)
    raise InvalidInput(f"rule is {rule!r}.", f"It is one of {', '.join(known)}.", f"Use rule={next(iter(known))!r}.")
