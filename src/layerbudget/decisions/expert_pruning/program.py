r"""How many experts of each layer stay, from the curves of their removal; and the forecast. No torch.

    minimise   sum_l D_l(m_l)      subject to   sum_l c_l (E_l - m_l) <= B,

``D_l(m)`` the predicted damage of layer l without m experts (:mod:`layerbudget.decisions.expert_pruning.sensitivity`), c_l what
one of its experts costs. The curves are the alternatives of a multiple-choice knapsack, solved exactly
(:mod:`layerbudget.solvers.choices`).

The prediction is a form at the whole model, and a large change leaves its reach. So the layers that carry most of a plan's
damage are then tried with the set that another signal would keep, as many experts, and keep whichever measures less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...budget import Budget, parse_budget
from ...errors import InvalidInput, UnknownUnit
from ...sensitivity.sequences import per_token
from ...solvers.choices import Choice, choose
from ..describe import EvenUneven

RULES = ("directional", "reap", "frequency", "norm", "random")
DRAWS = 4  # of labels
RIVAL = "reap"  # the signal that large changes are measured against
SHARES = (0.875, 0.75, 0.625, 0.5)  # of the forecast
_BEND = 3.0  # times the damage of the step before
_MANY = 100  # times as much: more says no more, for the step before cost nearly nothing
_HEAVY = 0.1  # of a plan's predicted damage: layers that carry as much are tried with their other set
Counts = tuple[int, ...]  # for every layer, how many of the steps of its removal are taken
Kept = Mapping[str, list[int]]  # experts that stay, by layer
Measure = Callable[[Kept], float]  # nats per token when the others are masked


def parse_limit(budget: str | float) -> Budget:
    """What stays at most: a share of all experts, a number of them, or bytes of the whole model.

    >>> parse_limit("50%").amount, parse_limit("96 experts").unit, parse_limit("12 GiB").unit
    (0.5, 'experts', 'bytes')
    """
    with contextlib.suppress(UnknownUnit):
        limit = parse_budget(budget, default="experts" if str(budget).strip().endswith("%") else "share")
        if limit.relative and limit.unit == "experts":
            limit = dataclasses.replace(limit, unit="share", relative=False)
        if not limit.relative and (0 < limit.amount <= 1 if limit.unit == "share" else limit.amount >= 1):
            if limit.unit in ("share", "experts", "bytes"):
                return limit
    raise InvalidInput(
        f"The budget is {budget!r}.",
        "It is a share of all experts, above 0 and at most 1; a number of experts; or the bytes of the whole model.",
        "Write 0.5, '96 experts' or '12 GiB'.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Removal:
    """The way from all experts of a layer to the fewest, in the order in which they go.

    Attributes:
        name: Full name of the block with the experts.
        experts: E, how many there are.
        order: The experts that go, first to last.
        after: How many are gone after every step, from 0 on, ``(m,)``: one, or one of every group.
        terms: Nats that each such set costs each sequence, predicted, ``(m, sequences)``.
        counts: Target tokens of the sequences.
        choosers: The sequences whose damage decided who goes: all of them, or those outside a fold, ``(sequences,)``.
        single: Predicted damage of each expert alone, ``(E,)``; infinite where all must stay.
        scores: What the rule ranks experts by, ``(E,)``; the lowest go first.
    """

    name: str
    experts: int
    order: tuple[int, ...]
    after: np.ndarray
    terms: np.ndarray
    counts: np.ndarray
    choosers: np.ndarray
    single: np.ndarray
    scores: np.ndarray

    @property
    def damage(self) -> np.ndarray:
        """Predicted damage of each set to the sequences that chose it, nats per token, ``(m,)``."""
        return self.terms[:, self.choosers].sum(1) / self.counts[self.choosers].sum()

    @property
    def judges(self) -> np.ndarray:
        """The sequences of the fold that others chose for; all of them where all chose."""
        return self.choosers if self.choosers.all() else ~self.choosers

    @property
    def floor(self) -> int:
        """The fewest that can stay."""
        return self.experts - int(self.after[-1])


class KeptProgram:
    """Plans from removals: ``even`` ones, those of the ``exact`` program, or those of one ranking of all experts.

    ``rivals`` are the removals by another signal, to measure against; none by default.
    """

    def __init__(
        self, removals: Sequence[Removal], rivals: Sequence[Removal] | None = None, *, even: bool = False, exact: bool = True
    ) -> None:
        self.removals, self.rivals, self.even, self.exact = removals, rivals or removals, even, exact

    def kept(self, steps: Counts) -> dict[str, list[int]]:
        """Experts that stay, by layer."""
        gone = {r.name: set(r.order[: r.after[s]]) for r, s in zip(self.removals, steps, strict=True)}
        return {r.name: [i for i in range(r.experts) if i not in gone[r.name]] for r in self.removals}

    def left(self, steps: Counts) -> np.ndarray:
        """How many stay in every layer."""
        return np.array([r.experts - r.after[s] for r, s in zip(self.removals, steps, strict=True)])

    def predicted(self, steps: Counts) -> tuple[np.ndarray, np.ndarray]:
        """Predicted nats of a plan on the sequences that judge it, and their tokens; see :func:`per_token`."""
        judges = self.removals[0].judges
        terms = sum(r.terms[s][judges] for r, s in zip(self.removals, steps, strict=True))
        return np.asarray(terms), self.removals[0].counts[judges]

    def within(self, most: int, price: np.ndarray) -> tuple[Counts, Choice | None]:
        """The plan whose experts cost at most so much, ``price`` being what one of every layer costs."""
        if self.even:
            return self._even(most, price), None
        return self._best(most, price) if self.exact else (self._by_scores(most, price), None)

    def _best(self, most: int, price: np.ndarray) -> tuple[Counts, Choice]:
        width = max(len(r.after) for r in self.removals)
        damage, size = np.full((len(price), width), np.inf), np.zeros((len(price), width), dtype=np.int64)
        for i, r in enumerate(self.removals):
            damage[i, : len(r.after)], size[i, : len(r.after)] = r.damage, price[i] * (r.experts - r.after)
        choice = choose(damage, size, most)
        chosen, spent = choice.chosen.copy(), choice.spent
        for i, step in enumerate(choice.chosen):  # experts that cost this text nothing stay while the budget has room for them
            room = most - spent + size[i, step]
            chosen[i] = np.argmax(np.where((damage[i] <= damage[i, step]) & (size[i] <= room), size[i], -1))
            spent += int(size[i, chosen[i]] - size[i, step])
        choice = dataclasses.replace(choice, chosen=chosen, spent=spent)
        return tuple(chosen.tolist()), dataclasses.replace(choice, unit="experts" if price.max() == 1 else "bytes")

    def _even(self, most: int, price: np.ndarray) -> Counts:
        """The largest number that all layers can keep."""
        able = [{int(r.experts - n): s for s, n in enumerate(r.after)} for r in self.removals]
        count = max(n for n in set.intersection(*(set(a) for a in able)) if int(price.sum()) * n <= most)
        return tuple(a[count] for a in able)

    def _by_scores(self, most: int, price: np.ndarray) -> Counts:
        """One ranking of all experts: the lowest go first, wherever they are."""
        steps = [0] * len(self.removals)
        while int(price @ self.left(tuple(steps))) > most:
            able = {
                i: float(r.scores[list(r.order[r.after[s] : r.after[s + 1]])].mean())
                for i, (r, s) in enumerate(zip(self.removals, steps, strict=True))
                if s + 1 < len(r.after)
            }
            steps[min(able, key=lambda i: able[i])] += 1
        return tuple(steps)

    def refined(self, steps: Counts, measure: Measure) -> KeptProgram:
        """The program with removals or rivals, whichever measure less: all of them first, then those of heavy layers."""
        both = list(zip(self.removals, self.rivals, strict=True))
        tried = {id(r): measure(KeptProgram(r).kept(steps)) for r in (self.removals, self.rivals)}
        best = list(min((self.removals, self.rivals), key=lambda r: tried[id(r)]))
        cost, damage = min(tried.values()), [float(r.damage[s]) for r, s in zip(self.removals, steps, strict=True)]
        for i in (i for i in np.argsort(damage)[::-1].tolist() if damage[i] >= _HEAVY * sum(damage)):
            other = [*best[:i], both[i][best[i] is both[i][0]], *best[i + 1 :]]
            if (measured := measure(KeptProgram(other).kept(steps))) < cost:
                best, cost = other, measured
        return KeptProgram(best)

    def least(self, damage: float, measure: Measure) -> tuple[Counts, Choice | None]:
        """Experts that a measured damage allows, so few that the refined plan with fewer of them, by one step, measures more.

        The predicted sets are halved first. Refined ones measure less, so they go on down from there, in growing steps.
        """
        price = np.ones(len(self.removals), dtype=np.int64)
        floors = [r.floor for r in self.removals]
        least = low = max(floors) * len(floors) if self.even else sum(floors)
        high = sum(r.experts for r in self.removals)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if measure(self.kept(self.within(middle, price)[0])) <= damage else (middle + 1, high)
        below, stride = least - 1, 1  # too few, with what is below
        while high - below > 1:
            middle = max(high - stride, (below + high) // 2)
            steps = self.within(middle, price)[0]
            if measure(self.refined(steps, measure).kept(steps)) <= damage:
                high, stride = int(self.left(steps).sum()), 2 * stride
            else:
                below = middle
        return self.within(high, price)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """Sequences that judge what the others choose: the program of the others, and what measures sets of experts.

    ``measure`` gives nats per token on the sequences that choose, ``judge`` the nats and tokens of those that do not.
    """

    program: KeptProgram
    measure: Measure
    judge: Callable[[Kept], tuple[np.ndarray, np.ndarray]]


def crossed(folds: Sequence[Fold], most: int, price: np.ndarray) -> dict[str, float]:
    """Damage of a budget on text that did not choose: ``predicted`` from the look alone, ``measured`` with masks, and errors.

    The plan is made again without each fold, in the same way, and judged there. A plan from more text is better.
    """
    predicted, measured = [], []
    for fold in folds:
        steps, _ = fold.program.within(most, price)
        best = fold.program.refined(steps, fold.measure)
        predicted.append(best.predicted(steps))
        measured.append(fold.judge(best.kept(steps)))
    damages: dict[str, float] = {}
    for name, parts in (("predicted", predicted), ("measured", measured)):
        both = per_token(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        damages |= dict(zip((name, f"{name}_error"), both, strict=True))
    return damages


def even_and_uneven(folds: Sequence[Fold], most: int, price: np.ndarray) -> EvenUneven | None:
    """Predicted damage of a budget, on text that did not choose: with the same number in every layer, and with any numbers.

    Both are of the predictions alone, without what masks told; None where no number that all layers can keep is cheap enough.
    """
    even, uneven = list[tuple[np.ndarray, np.ndarray]](), list[tuple[np.ndarray, np.ndarray]]()
    for fold in folds:
        removals = fold.program.removals
        able = set.intersection(*(set((r.experts - r.after).tolist()) for r in removals))
        if int(price.sum()) * min(able, default=most + 1) > most:
            return None
        for programs, rows in ((KeptProgram(removals, even=True), even), (KeptProgram(removals), uneven)):
            rows.append(programs.predicted(programs.within(most, price)[0]))
    (first, counts), (second, _) = ([np.concatenate(part) for part in zip(*rows, strict=True)] for rows in (even, uneven))
    error = per_token(first - second, counts)[1]
    return EvenUneven(even=per_token(first, counts)[0], uneven=per_token(second, counts)[0], error=error)


def forecast(folds: Sequence[Fold]) -> list[dict[str, float]]:
    """At about every share of ``SHARES``: share and number that stay, and what :func:`crossed` says."""
    removals, even = folds[0].program.removals, folds[0].program.even
    price, floors = np.ones(len(removals), dtype=np.int64), [r.floor for r in removals]
    total, rows = sum(r.experts for r in removals), dict[int, dict[str, float]]()
    least = max(floors) * len(floors) if even else sum(floors)
    for most in (int(share * total) for share in SHARES):
        if most >= least:
            left = int(folds[0].program.left(folds[0].program.within(most, price)[0]).sum())
            rows[left] = rows.get(left) or {"keep": left / total, "experts": left, **crossed(folds, left, price)}
    return list(rows.values())


def bend(forecast: Sequence[Mapping[str, float]]) -> str:
    """Where the forecast bends, in a sentence; empty where it does not.

    >>> bend([{"keep": 0.875, "measured": 0.01}, {"keep": 0.75, "measured": 0.02}, {"keep": 0.625, "measured": 0.08}])
    'Below 75 % of the experts, each one that goes (down to 62.5 %) costs 6 times as much as each one before.'
    """
    rows = [{"keep": 1.0, "measured": 0.0}, *forecast]
    each = [max(b["measured"] - a["measured"], 0.0) / (a["keep"] - b["keep"]) for a, b in itertools.pairwise(rows)]
    ratios = [b / a if a > 0 else 0.0 for a, b in itertools.pairwise(each)]
    worst = int(np.argmax(ratios)) if ratios else 0
    if not ratios or ratios[worst] < _BEND:
        return ""
    near, far = (f"{100 * rows[worst + i]['keep']:.3g} %" for i in (1, 2))
    times = f"{ratios[worst]:.2g}" if ratios[worst] <= _MANY else f"more than {_MANY}"
    return f"Below {near} of the experts, each one that goes (down to {far}) costs {times} times as much as each one before."
