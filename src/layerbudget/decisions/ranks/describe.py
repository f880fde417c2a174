"""Sentences on a plan of ranks: the verdict beside uniform, noise, what was measured, and how its adapter is served."""

from __future__ import annotations

from ...decision import ScoresAdvice, Summary
from ...errors import LayerbudgetError
from ...plan import Plan, payload_of
from ...scores import Scores
from ..describe import expected_damage, on_budget, on_flat_scores, on_price, on_program, on_rounding
from .gains import FEW, TAKE_UNIFORM
from .payload import RanksPayload
from .plan import plan_ranks, serving_note

USUAL_RANK = 8  # mean rank of the plan that follows scores
MOSTLY_NOISE = 0.9  # share of a gain that noise alone gives, above which it decides nothing


def summary_of(plan: Plan) -> Summary:
    """Return what is said of a plan of ranks."""
    payload, c = payload_of(plan, RanksPayload), plan.certificate
    slack = [c["message"]] if "multiplier" in c and c["status"] != "binding" else []
    measured, reserve = _on_measured_ranks(payload), _on_reserve(plan, payload)
    flat, serving = on_flat_scores(plan, payload.flat_scores, "; for ranks score with --estimator rank-gain"), _on_serving(plan)
    return Summary(
        title=f"LoRA ranks {plan.counts.min()} to {plan.counts.max()} for",
        verdict=_verdict(plan, payload),
        expected=expected_damage(None),
        sentences=(
            *on_budget(plan, by_size=_by_size(plan)),
            *_on_program(plan, payload),
            *on_rounding(plan, payload.rounding),
            *_on_uniform(payload),
            *measured,
            *reserve,
            *flat,
            *serving,
        ),
        advice=(*slack, *measured, *reserve, *flat, *serving),
        advises_other=advises_uniform(plan),
    )


def advises_uniform(plan: Plan) -> bool:
    """Return whether the words on a plan of uneven ranks end in taking uniform."""
    payload = payload_of(plan, RanksPayload)
    share, noise = payload.uniform_share, payload.noise_share or 0.0
    few = payload.scored_rows is not None
    advised = share is not None and (share >= TAKE_UNIFORM or noise > MOSTLY_NOISE or few)
    return advised and len(set(plan.counts.tolist())) > 1


def beside_uniform(share: float, noise: float | None = None) -> str:
    """Return words on a gain of which uniform has a share and noise alone another one: the share, and what to take."""
    if noise is not None and noise > MOSTLY_NOISE:
        return noise_alone(noise)
    words = f"uniform ranks with as many parameters have {share_of_uniform(share)} of the plan's gain"
    if share >= TAKE_UNIFORM:
        return f"{words} ({TAKE_UNIFORM:.0%} or more): take uniform"
    return f"{words} (less than {TAKE_UNIFORM:.0%}): train both, and pair them by finetune --against"


def share_of_uniform(share: float) -> str:
    """Return the share of the gain that uniform has; never rounded up to the share from which on uniform is advised.

    >>> share_of_uniform(0.951), share_of_uniform(0.9499)
    ('95.1%', '94.9%')
    """
    return f"{share if share >= TAKE_UNIFORM else min(share, TAKE_UNIFORM - 0.001):.1%}"


def noise_alone(*shares: float) -> str:
    """Return words on the shares of gains that noise alone would give, and what to take where that is most of them."""
    ends = list(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares))))
    words = f"noise alone would give {' to '.join(ends)} of the gain"
    return f"{words}, so it decides nothing: take uniform, or score more rows" if min(shares) > MOSTLY_NOISE else words


def advice_on(scores: Scores) -> ScoresAdvice:
    """Return what is said of the gain of every further rank before a plan is made."""
    noise, scored = _noise_in(scores), scores.data.get("samples", FEW)
    words = "" if noise is None else f"; at mean rank {USUAL_RANK}, {noise_alone(noise)}"
    only_noise = (noise or 0.0) > MOSTLY_NOISE
    if scored < FEW and not only_noise:
        few = f"{scored} scored rows, fewer than {FEW}, do not tell ranks apart"
        words += f". {few}: the plan says which uniform rank to take"
    return ScoresAdvice(words, ("ranks", "--mean-rank", f"{USUAL_RANK}"), only_noise)


def _noise_in(scores: Scores) -> float | None:
    """The share of the gain that noise alone would give in a plan of the usual mean rank; None where none is known."""
    if "increments_floor" not in scores.extra:
        return None
    try:
        return payload_of(plan_ranks(scores, mean_rank=USUAL_RANK), RanksPayload).noise_share
    except LayerbudgetError:  # fewer ranks were measured than that plan needs
        return None


def _verdict(plan: Plan, payload: RanksPayload) -> str:
    low, high = int(plan.counts.min()), int(plan.counts.max())
    if low == high:
        b, cap = plan.budget, plan.hyperparameters.get("max_rank")
        if low != cap or not (rest := (b.get("limit") or 0) - b["spent"]) > 0:
            return f"every block gets rank {low}: this is uniform."
        return (
            f"every block gets rank {low}, as much as --max-rank allows: this is uniform, and {rest:,.0f} of {b['limit']:,.0f} "
            f"{b['unit']} stay unused."
        )
    words = f"ranks from {low} to {high}"
    if plan.rule.endswith("permuted"):
        return f"{words}. This is a control on shuffled scores: train it and the plan, and pair them by finetune --against."
    if plan.rule == "uniform":
        return f"{words}: this is uniform, as far as bounds and whole numbers allow."
    if payload.uniform_share is None:
        return f"{words}. The scores do not say what uniform would gain: train both plans, and pair them by finetune --against."
    if payload.scored_rows:
        few = f"{payload.scored_rows} scored rows, fewer than {FEW}, do not tell ranks apart"
        return f"{words}; {few}: take uniform, or score more rows."
    return f"{words}; {beside_uniform(payload.uniform_share, payload.noise_share)}."


def _by_size(plan: Plan) -> str:
    """Words on the mean rank that was asked for, in which large matrices count for more."""
    mean, spent, limit = plan.hyperparameters.get("mean_rank"), plan.budget["spent"], plan.budget["limit"]
    return f" ({spent / limit * mean:.4g} where large matrices count for more, as in --mean-rank)" if mean and limit else ""


def _on_program(plan: Plan, payload: RanksPayload) -> list[str]:
    if plan.certificate or payload.rounding is None or payload.rounding.get("price") is None:
        return on_program(plan, on_price(plan, "budget", "utility", "gamma", 0.9) if plan.certificate else "")
    price, value = payload.rounding["price"] or 0.0, payload.rounding["value"]
    return [
        f"Ranks are bought in the order of gain per cost; one percent more budget would add about "
        f"{price * 0.01 * float(plan.budget['limit']):.3g} to the expected gain of {value:.4g}."
    ]


def _on_uniform(payload: RanksPayload) -> list[str]:
    """Sentence on what uniform and noise alone would gain; of few scored rows the verdict says it all."""
    share, noise = payload.uniform_share, payload.noise_share
    if share is None or payload.scored_rows is not None:
        return []
    words = beside_uniform(share, noise)
    sentences = [f"{words[0].upper()}{words[1:]}."]
    if noise is not None and noise <= MOSTLY_NOISE:
        sentences.append(f"Noise alone would give {noise:.0%} of this gain: two halves of the text disagree by that much.")
    return sentences


def _on_measured_ranks(payload: RanksPayload) -> list[str]:
    """Blocks that have all the ranks whose gains were measured."""
    ends = payload.at_measured
    if not ends:
        return []
    most = max(ends.values())
    who = f"{len(ends)} blocks have" if len(ends) > 1 else f"{next(iter(ends))} has"
    return [f"{who} all {most} ranks that were measured, and may earn more: score with --largest {2 * most} to know."]


def _on_reserve(plan: Plan, payload: RanksPayload) -> list[str]:
    """A lower cap of ranks that a server would reserve less for."""
    smaller, share = payload.smaller_reserve, payload.uniform_share
    if smaller is None or advises_uniform(plan):
        return []
    if share is None or share >= TAKE_UNIFORM * smaller.share:  # the plan under the cap: little above uniform
        return []
    times = smaller.reserved / smaller.max_rank
    less = "halves" if times == 2 else f"divides by {times:g}"
    return [f"--max-rank {smaller.max_rank} keeps {smaller.share:.1%} of the gain and {less} what vLLM reserves."]


def _on_serving(plan: Plan) -> list[str]:
    """Sentence on what vLLM is told to hold an adapter, and that llama.cpp cannot apply ranks that differ as they are."""
    if not plan.counts.any():
        return []
    sentences = [f"To serve it with vLLM: {serving_note(plan)}"]
    if len({int(n) for n in plan.counts if n}) > 1:
        sentences.append(
            "llama.cpp applies one scale, which is wrong for ranks that differ: merge the adapter first, or pad its ranks."
        )
    return sentences
