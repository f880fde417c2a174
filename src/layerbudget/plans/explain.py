"""Say in sentences what a plan does and what it rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..decisions.joint.recipe import sentences as of_recipe
from ..decisions.ranks.plan import serving_note
from ..kinds import KINDS
from ..plan import Plan
from ..planning.codelength import codelengths
from ..records import Result
from ..scores import Scores


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Explanation(Result):
    """A plan in words.

    Attributes:
        kind, rule, budget, certificate: The plan's own.
        sentences: Budget, status, price, which blocks get most and least, and what had no influence.
        most: Names of the blocks that get most, the first before.
        least: Names of those that get least.
    """

    kind: str
    rule: str
    budget: Mapping[str, Any]
    certificate: Mapping[str, Any]
    sentences: Sequence[str]
    most: Sequence[str]
    least: Sequence[str]


def explain_plan(plan: Plan, scores: Scores | None = None, *, tokens: int | None = None) -> Explanation:
    """Say in sentences what a plan does and what it rests on.

    Args:
        plan: The plan.
        scores: The scores that it was made from: their gains are then said in bits, ``n zeta^2 / (2 ln 2)`` (paper, section 3).
        tokens: n, the predicted tokens that the mean loss is over; by default those of the scores' calibration set.

    Raises:
        ModelMismatch: Scores of other blocks, or other scores than the plan's.
        InvalidInput: Scores that are no gains in nats.
    """
    order = np.argsort(plan.values, kind="stable")
    name, value = plan.names, plan.values
    word = KINDS.find(plan.kind).decides
    spent, limit, unit = float(plan.budget["spent"]), float(plan.budget["limit"]), plan.budget.get("unit")
    of = f"{_amount(spent)} of {_amount(limit)} {'units' if unit in (None, 'count') else unit}"
    sentences = [f"The rule {plan.rule} decides {word} for {len(name)} blocks and uses {of}."]
    equal = float(np.ptp(value)) <= 1e-9 * float(np.abs(value).max(initial=0.0))
    sentences.append(
        f"Every block gets {value[0]:.4g}{_in_whole(plan)}."
        if equal
        else f"Most goes to {name[order[-1]]} ({value[order[-1]]:.4g}), least to {name[order[0]]} ({value[order[0]]:.4g}); "
        f"the mean is {value.mean():.4g}, the standard deviation {value.std():.4g}."
    )
    c = plan.certificate
    if c:
        sentences.append(c["message"])
        if "kkt_residual" in c:
            sentences.append(
                f"Duality gap {c['gap']:.1e}, KKT residual {c['kkt_residual']:.1e}: the continuous decision is optimal."
            )
        if c["status"] == "binding" and c.get("shadow_price"):
            sentences.append(
                f"One percent more budget changes the objective by about {abs(c['multiplier']) * 0.01 * abs(limit):.3g}."
            )
        if c["at_lower"] or c["at_upper"]:
            sentences.append(f"{c['at_lower']} blocks sit at their floor and {c['at_upper']} at their cap.")
        if c["inert"]:
            sentences.append(f"No influence here: {', '.join(c['inert'])}.")
    elif (price := plan.extra.get("rounding", {}).get("price")) is not None:
        sentences.append(
            f"Units are bought in the order of gain per cost; one percent more budget adds about {price * 0.01 * limit:.3g}."
        )
    else:
        sentences.append("This rule solves no program, so there is no certificate.")
    sentences += _on_integers(plan) + _on_spread(plan) + _on_serving(plan) + _on_formats(plan)
    sentences += [] if scores is None else codelengths(plan, scores, tokens).sentences
    return Explanation(
        kind=plan.kind, rule=plan.rule, budget=dict(plan.budget), certificate=dict(c), sentences=sentences,
        most=[name[i] for i in order[::-1][:5]], least=[name[i] for i in order[:5]],
    )  # fmt: skip


def _in_whole(plan: Plan) -> str:
    """What is given in whole numbers where they differ from block to block."""
    low, high = int(plan.counts.min()), int(plan.counts.max())
    return f", in whole numbers {low} to {high}" if plan.kind in ("ranks", "experts") and low < high else ""


def _amount(value: float) -> str:
    """A whole number with its thousands, another one in six digits."""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.6g}"


NEARLY_UNIFORM = 0.05
TAKE_UNIFORM = 0.95  # share of the gain


def _on_spread(plan: Plan) -> list[str]:
    spread = plan.values.std() / max(abs(plan.values.mean()), 1e-300)
    if plan.rule != "mdl" or len(plan.blocks) < 2 or spread >= NEARLY_UNIFORM:
        return []
    return [
        f"This is nearly uniform (the values differ by {spread:.1%} of their mean). Gains damped relative to each block's own "
        "curvature are often so: one damping for all blocks (score with --damping-unit median) tells them apart."
    ]


def _on_serving(plan: Plan) -> list[str]:
    if plan.kind != "ranks" or not plan.counts.any():
        return []
    return [f"To serve it with vLLM: {serving_note(plan)}"]


def _on_formats(plan: Plan) -> list[str]:
    """What a plan of bits predicts, what noise leaves open, and what the check of the whole plan found."""
    if plan.kind == "recipe":
        return [*of_recipe(plan)]
    if plan.kind != "bits":
        return []
    e, sentences = plan.extra, []
    others = ", ".join(f"{n} {r['predicted']:.4g} in {r['spent']} bytes" for n, r in e["baselines"].items() if n != plan.rule)
    forced = e.get("forced")
    if forced:
        sentences.append(
            f"The budget leaves nothing to decide: every block has its {forced['format']} format. There is a choice from "
            f"{forced['from_bits']:.4f} bits per weight ({forced['from_bytes']} bytes in all) to {forced['to_bits']:.4f}."
        )
    sentences.append(
        f"{e['bits']:.4f} bits per weight, {plan.budget['spent'] + e['fixed_bytes']} bytes with what stays as it is. "
        f"Damages of single blocks add up to {e['predicted']:.4g} +- {e['predicted_error']:.1g} nats per token"
        f"{'' if forced else f' (without a program: {others})'}."
    )
    kept = e.get("unwritten") or {}
    if kept:
        size = sum(b.count for b in plan.blocks if set(b.modules) <= set(kept))
        sentences.append(
            f"{len(kept)} matrices stay in 16 bits and count as such ({size} bytes), first {next(iter(kept))}: "
            f"{kept[next(iter(kept))]}."
        )
    if len(e.get("steps", ())) > 1:
        first, last = e["steps"][0], e["steps"][-1]
        sentences.append(
            f"{len(e['steps']) - 1} steps from there: on the text that decided, KL fell from {first['divergence']:.4g} to "
            f"{last['divergence']:.4g} ({e['passes']:g} passes in all)."
        )
    if plan.certificate:
        price = plan.certificate["price"] * 0.01 * plan.budget["limit"]
        sentences.append(f"One percent more bytes would save about {price:.2g} nats.")
    ties = e["near_ties"]
    if ties:
        first = ties[0]
        sentences.append(
            f"{len(ties)}{' or more' if len(ties) >= 20 else ''} single changes cannot be told from the plan within the noise, "
            f"for example {first['instead']} for {first['chosen']} in {first['block']}."
        )
    return [*sentences, e["check"]["verdict"]] if "check" in e else sentences


def _on_integers(plan: Plan) -> list[str]:
    sentences = []
    r = plan.extra.get("rounding")
    if r:
        proof = "proven optimal" if r["exact"] else f"within {r['gap']:.1e} of the best integers"
        sentences.append(
            f"Integers by {r['method']}, {proof}: utility {r['value']:.6g}, {r['optimum']:.6g} for the continuous optimum, "
            f"{r['spent']:.6g} of {r['budget']:.6g} spent."
        )
    share = plan.extra.get("uniform_share")
    if share is not None:
        if share >= TAKE_UNIFORM:
            sentences.append(f"Verdict: uniform already has {share:.1%} of the gain: take uniform.")
        else:
            sentences.append(f"Verdict: uniform would have {share:.1%} of this gain: the rest is what there is to win.")
    smaller = plan.extra.get("smaller_reserve")
    if smaller is not None:
        times = smaller["reserved"] / smaller["max_rank"]
        less = "halves" if times == 2 else f"divides by {times:g}"
        sentences.append(
            f"--max-rank {smaller['max_rank']} keeps {smaller['share']:.1%} of the gain and {less} what vLLM reserves."
        )
    bent = plan.extra.get("convexified") or {}
    if bent:
        worst = max(bent, key=lambda name: bent[name])
        sentences.append(f"{len(bent)} measured curves were not convex and were replaced by their hulls; {worst} moved most.")
    return sentences
