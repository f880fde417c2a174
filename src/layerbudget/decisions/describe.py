"""Sentences that hold of plans of several decisions: what is spent, how far it is proven, and what it is compared with.

Every decision puts its own :class:`~layerbudget.decision.Summary` together from these and from sentences of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..decision import Table, decision_of
from ..errors import CorruptFile
from ..plan import Plan
from ..solvers.inputs import spoken_amount
from ..verdicts import CONVENTION, SAME, less_than, named, outcome, plus_minus

NEARLY_UNIFORM = 0.05  # standard deviation over mean
EVEN = "equal layers"  # what uniform is where whole units go
COMPARE = "compare it with the dense model on text of your own"
#: A published score, and the rule that it was published with.
PUBLISHED = {"outlier-ratio": "owl", "spectral-tail": "alphapruning", "layerif": "layerif"}
_CALLED = {"owl": "OWL", "alphapruning": "AlphaPruning", "layerif": "LayerIF"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvenUneven:
    """Predicted damage of one budget with equal layers, ``even``, and with any, ``uneven``; nats per token.

    ``error`` is the standard error of the difference, where sequences give one.
    """

    even: float
    uneven: float
    error: float | None = None


def percent(share: float) -> str:
    """Return a share as it is read.

    >>> percent(0.25)
    '25 %'
    """
    return f"{100 * share:.3g} %"


def is_uniform(plan: Plan) -> bool:
    """Return whether every block gets the same."""
    return float(np.ptp(plan.values)) <= 1e-9 * float(np.abs(plan.values).max(initial=0.0))


def spent_of(plan: Plan) -> str:
    """Return what is spent of a budget, in its unit: ``500 of 500 parameters``."""
    spent, limit, unit = plan.budget["spent"], plan.budget["limit"], plan.budget.get("unit")
    amount = f"{spoken_amount(float(spent))} of {spoken_amount(float(limit))} {'units' if unit in (None, 'count') else unit}"
    bytes_of = decision_of(plan).bytes_of
    return f"{amount} of {bytes_of}" if bytes_of else amount


def on_further(plan: Plan, *, kept: bool = True) -> list[str]:
    """A sentence on the layers that predict further tokens, where the model's checkpoint has some.

    Args:
        plan: The plan; its model says how many tensors they are.
        kept: Whether they fit the model that the plan makes, which then has them as they are.
    """
    further = plan.model.get("further")
    if not further:
        return []
    what = f"{further['tensors']} tensors of layers that predict further tokens (MTP), {further['bytes']:,} bytes"
    after = "apply copies them as they are" if kept else "they do not fit the smaller model, and apply leaves them out"
    return [f"Not planned: {what}; {after}."]


def on_budget(plan: Plan, uses: str = "", *, by_size: str = "", units: str = "blocks") -> list[str]:
    """Sentences on what is decided, what it uses, and which blocks get most and least.

    Args:
        plan: The plan.
        uses: The end of the first sentence; what is spent of the budget by default.
        by_size: Words behind the mean over blocks.
        units: What the blocks are called.
    """
    name, value, low, high = plan.names, plan.values, int(plan.counts.min()), int(plan.counts.max())
    kind = decision_of(plan)
    first = f"The rule {plan.rule} decides {kind.decides} for {len(name)} {units} and {uses or f'uses {spent_of(plan)}'}."
    if is_uniform(plan):
        whole = f", in whole numbers {low} to {high}" if kind.whole and low < high else ""
        return [first, f"Every block gets {value[0]:.4g}{whole}."]
    order = np.argsort(value, kind="stable")
    return [
        first,
        f"Most goes to {name[order[-1]]} ({value[order[-1]]:.4g}), least to {name[order[0]]} ({value[order[0]]:.4g}); "
        f"the mean over blocks is {value.mean():.4g}{by_size}, the standard deviation {value.std():.4g}.",
    ]


def on_program(plan: Plan, price: str = "") -> list[str]:
    """Sentences on the certificate of a program: how far the decision is proven, and what bounds it.

    Args:
        plan: The plan.
        price: A sentence on what one percent more budget would bring, said where the budget binds.
    """
    c = plan.certificate
    if not c:
        return ["This rule solves no program, so there is no certificate."]
    sentences = [c["message"]]
    if "kkt_residual" in c:
        optimal = f"Duality gap {c['gap']:.1e}, KKT residual {c['kkt_residual']:.1e}: the continuous decision is optimal."
        sentences.append(optimal)
    if price and c["status"] == "binding" and c.get("shadow_price"):
        sentences.append(price)
    if c["at_lower"] or c["at_upper"]:
        sentences.append(f"Blocks at their floor: {c['at_lower']}, at their cap: {c['at_upper']}.")
    inert = [n for n in c["inert"] if n == "weights" or plan.hyperparameters.get(n) is not None]
    if inert := ["scores" if name == "weights" else name for name in inert]:
        sentences.append(f"These settings cannot change this plan: {', '.join(inert)}.")
    return sentences


def on_price(plan: Plan, more_of: str, what: str, weight: str, default: float) -> str:
    """A sentence on what one percent more budget brings to the objective of a program with weights.

    Args:
        plan: The plan.
        more_of: What there is more of: ``zeros``.
        what: What then rises: ``penalty``.
        weight: The hyperparameter that scales the objective.
        default: Its value where none was given.
    """
    mean = plan.hyperparameters.get(weight) or default
    literal = plan.hyperparameters.get("units") == "literal"
    scaled = "" if literal else f", where the weights of the blocks have the mean {mean:g}"
    change = (plan.certificate.get("shadow_price") or 0.0) * 0.01 * abs(float(plan.budget["limit"]))
    return f"With one percent more {more_of} the {what} is about {change:.3g} higher{scaled}."


def on_objective(plan: Plan) -> str:
    """A sentence on what one percent more budget takes from an objective."""
    change = plan.certificate.get("multiplier", 0.0) * 0.01 * abs(float(plan.budget["limit"]))
    return f"With one percent more budget the objective is about {change:.3g} lower."


def on_rounding(plan: Plan, rounding: Mapping[str, object] | None) -> list[str]:
    """A sentence on how whole numbers were found."""
    if not rounding:
        return []
    r: Mapping[str, float] = rounding  # type: ignore[assignment]  # numbers, but for what is compared here
    proof = "proven optimal" if r["exact"] else f"within {r['gap']:.1e} of the best integers"
    worth = "expected gain" if rounding["method"] == "increments" else "utility"
    return [
        f"Whole numbers, {proof}: {worth} {r['value']:.6g}, and {r['optimum']:.6g} if fractions were allowed; "
        f"{spoken_amount(r['spent'])} of {spoken_amount(r['budget'])} is spent."
    ]


def on_flat_scores(plan: Plan, flat: float | None, better: str = "") -> list[str]:
    """Sentences on scores, or on a plan by the program of the paper, that hardly tell blocks apart.

    Args:
        plan: The plan.
        flat: By how much the scores differ, as a share of their mean, where that is little.
        better: What else tells blocks of this kind apart.
    """
    damping = "score with --damping-unit median"
    if flat is not None:
        return [
            f"The scores are nearly equal (they differ by {flat:.1%} of their mean): this plan follows what {plan.kind} "
            f"cost. One damping for all blocks ({damping}) tells blocks apart{better}."
        ]
    spread = plan.values.std() / max(abs(plan.values.mean()), 1e-300)
    if plan.rule != "mdl" or len(plan.blocks) < 2 or spread >= NEARLY_UNIFORM:
        return []
    return [
        f"This is nearly uniform (the values differ by {spread:.1%} of their mean). Gains damped relative to each block's "
        f"own curvature are often so: one damping for all blocks ({damping}) tells them apart."
    ]


def on_published(rule: str, estimator: str) -> str:
    """A sentence where a published score is under another rule than its own, or a published rule reads another score.

    >>> on_published("mdl", "outlier-ratio")
    'outlier-ratio is the score of OWL, and mdl is not its rule: --rule owl is OWL as published.'
    """
    score = next((name for name, published_rule in PUBLISHED.items() if published_rule == rule), estimator)
    if estimator in PUBLISHED and PUBLISHED[estimator] != rule and rule not in ("uniform", "size", "permuted"):
        published_rule = PUBLISHED[estimator]
        called = _CALLED[published_rule]
        remedy = f"--rule {published_rule} is {called} as published"
        return f"{estimator} is the score of {called}, and {rule} is not its rule: {remedy}."
    if score != estimator:
        return f"{rule} is the rule of {_CALLED[rule]}, whose score is {score}; these scores are {estimator}."
    return ""


def expected_damage(damage: float | None, where: str = "") -> str:
    """A sentence on the damage of a plan that was applied, by what was known when it was made.

    >>> expected_damage(None)
    'Verdict: nothing measured the damage of this plan; compare it with the dense model on text of your own.'
    """
    if damage is None:
        return f"Verdict: nothing measured the damage of this plan; {COMPARE}."
    return f"Verdict: planned to cost {damage:.3g} nats per token{f' {where}' if where else ''}; {COMPARE}."


def damage_figures(
    predicted: float | None,
    measured: float | None = None,
    *,
    error: float = 0.0,
    of: str = "",
    on: str = "the text that decided",
) -> dict[str, str]:
    """Return the rows of a model card on the damage, in nats per token beside the dense model; what is None has no row.

    Args:
        predicted: Predicted damage.
        measured: Damage that was measured when it was planned.
        error: Standard error of the prediction.
        of: Words behind the prediction, such as ``, on other text``.
        on: The text that measured it.

    >>> damage_figures(0.0123)
    {'predicted KL divergence': '0.0123 nats per token'}
    """
    rows = dict[str, str]()
    if predicted is not None:
        rows["predicted KL divergence"] = f"{predicted:.4g}{plus_minus(error)} nats per token{of}{named(error)}"
    if measured is not None:
        rows["measured when planned"] = f"{measured:.4g} nats per token, on {on}"
    return rows


def on_even(damages: EvenUneven | None, *, alike: bool) -> str:
    """How the predicted damage of a plan stands beside that of equal layers, or of others where its layers are ``alike``."""
    if damages is None:
        return ""
    damage, other = (damages.even, damages.uneven) if alike else (damages.uneven, damages.even)
    error = damages.error or 0.0
    if not alike:
        return f"; its predicted damage is {less_than(damage, other, f'that of {EVEN}', error)}"
    if outcome(other - damage, error=error, small=SAME * damage) != "lower":
        return "; the prediction sees nothing to gain from layers that differ"
    return f"; the predicted damage of layers that differ is {less_than(other, damage, 'that of this plan', error)}"


def compared_with_even(
    plan: Plan, damages: EvenUneven | None, where: str, *, alike: bool, passes: float | None = None
) -> Table | None:
    """Return the predicted damage of a plan of whole units beside that of equal layers, or of others; None where unknown.

    Args:
        plan: The plan, whose layers are ``alike`` or not.
        damages: Both damages.
        where: Of which model they were predicted, as in "predicted before anything was cut".
        alike: Whether all its layers have the same.
        passes: Forward equivalents that planning took.
    """
    if damages is None:
        return None
    even, uneven = (plan.rule, "layers that differ") if alike else (EVEN, plan.rule)
    error = damages.error or 0.0
    damage = {even: (damages.even, error), uneven: (damages.uneven, error)}
    title = f"damage predicted {where}; the verdict has the damage to go by"
    return comparison(plan, title, damage, {even: EVEN}, column="predicted", passes=passes)


def comparison(
    plan: Plan,
    where: str,
    damage: Mapping[str, tuple[float, float]],
    against: Mapping[str, str],
    *,
    names: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    counted: str = "",
    column: str = "nats per token",
    legend: str = "",
    passes: float | None = None,
) -> Table | None:
    """Return the damage of a plan beside that of other choices, as a table; None where nothing else is known.

    A change of the plan comes with two standard errors of it.

    Args:
        plan: The plan, whose own row is named by its rule.
        where: Where damages were measured, for the title.
        damage: By choice: nats per token, and the standard error of the difference to the plan.
        against: Choices that every row is compared with, and what they are called in the header.
        names: What choices are called in the rows.
        sizes: Bytes by choice, where they differ.
        counted: What those are of.
        column: Header of the damages.
        legend: Words behind the title.
        passes: Forward equivalents that planning took.
    """
    if len(damage) < 2:
        return None
    known = {**(names or {}), plan.rule: "this plan"}
    rows = list[tuple[str, ...]]()
    for name, (kl, _) in damage.items():
        size = ((f"{sizes[name]:,}" if name in sizes else "–"),) if sizes else ()
        changes = (_change(plan.rule, damage, name, other) for other in against)
        rows.append((known.get(name, name), *size, f"{kl:.3g}", *changes))
    ended = any(" (to " in cell for row in rows for cell in row[1:])
    title = where
    title += f", {CONVENTION}" if ended or any("+-" in cell for row in rows for cell in row) else ""
    title += " (to: their upper end)" if ended else ""
    took = f"; planning took {passes:.0f} forward equivalents" if passes else ""
    head = ("plan", *([counted] if sizes else []), column, *(f"against {called}" for called in against.values()))
    return Table(f"{title}{legend}{took}", head, rows)


def _change(rule: str, damage: Mapping[str, tuple[float, float]], name: str, base: str) -> str:
    """The change of one damage against another in per cent of that, with two standard errors where they are known."""
    other, row = damage.get(base, (0.0, 0.0)), damage[name]
    if name == base or other[0] <= 0:
        return "–"
    error = (other[1] if name == rule else row[1] if base == rule else 0.0) / other[0]
    change, digits = row[0] / other[0] - 1, 0 if error >= 0.05 else 1
    level = outcome(change, error=error, small=SAME) == "level"
    if error and not level and change - 2 * error < -1:  # no damage is below zero
        return f"{change:+.1%} (to {change + 2 * error:+.{digits}%})"
    return f"{change:+.1%}{f' +-{2 * error:.{digits}%}' if error else ''}{', level' if level else ''}"


def check_shares(plan: Plan) -> None:
    """Refuse a plan whose shares of zeros are no shares.

    Raises:
        CorruptFile: One of them is not.
    """
    for b in plan.blocks:
        if not (0 <= b.value <= 1 + 1e-9 and b.count <= b.numel):
            what = f"{b.name} of this plan of {plan.kind} has {b.value:.4g} and {b.count:,} of {b.numel:,} weights."
            raise CorruptFile(what, "A share of zeros is from 0 to 1.", "Make the plan again.")
        if abs(b.count - b.value * b.numel) > 2 + 1e-6 * b.numel:  # the nearest whole numbers with the sum that was asked for
            what = f"{b.name} has the value {b.value:.4g} and the count {b.count:,} of {b.numel:,} ({b.count / b.numel:.4g})"
            raise CorruptFile(f"{what}: they contradict each other.", "", "Make the plan again.")


def check_spent(plan: Plan) -> None:
    """Refuse a plan that spends another amount than the sum of its counts, where these are in the unit of its budget.

    Raises:
        CorruptFile: It does.
    """
    spent, total = plan.budget["spent"], int(plan.counts.sum())
    if spent != total:
        what = f"This plan of {plan.kind} spends {spent:,} {plan.budget['unit']}, and its counts are {total:,} in all"
        raise CorruptFile(f"{what}: they contradict each other.", "", "Make the plan again.")
