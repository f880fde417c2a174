"""Sentences on plans of formats: of bits, of a cache, and of both within one memory."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from ...compressors.formats import FED_BACK
from ...decision import Table, decision_of
from ...llama_cpp.mixes import MIXES
from ...plan import Plan
from ...verdicts import LEVEL_WITH, SAME, less_than, nats, outcome
from ..describe import COMPARE, comparison, damage_figures, expected_damage, on_budget, on_objective, on_program, spent_of
from .baselines import PEER
from .payload import FormatsPayload, WeightsPayload, Whole
from .reasons import types_of_blocks

Damages = dict[str, tuple[float, float]]  #: nats per token and the standard error of the difference to the plan, by choice


def damages_of(plan: Plan, payload: FormatsPayload) -> Damages:
    """Return the damage of the plan and of other formats in as many bytes: on held-out text where a check measured it."""
    if payload.check is not None:
        return {n: (row.kl, row.difference_error or 0.0) for n, row in payload.check.rows.items() if not row.same}
    others = {n: row for n, row in payload.baselines.items() if row["predicted"] != payload.predicted}
    damages = {n: (row["predicted"], row["difference_error"]) for n, row in others.items()}
    return {**damages, plan.rule: (payload.predicted, 0.0)}


def names_of(payload: FormatsPayload, mix: str | None = None) -> dict[str, str]:
    """Return words for the choices beside a plan; ``mix`` is the mix of llama.cpp, or the one format, of the weights."""
    types = f"llama.cpp's {mix}" if mix in MIXES else f"the weights as {mix}"
    if isinstance(payload, WeightsPayload) and payload.check is not None and PEER in payload.check.rows:
        types = f"the types of {mix} with {payload.method}"
    return {
        "mix": types,
        PEER: f"{mix} by llama-quantize",
        "uniform": "uniform",
        "uniform-cache": "one format for the whole cache",
    }


# --- the verdict ------------------------------------------------------------------------------------------------------------


def verdict(plan: Plan, payload: FormatsPayload, size: str, names: Mapping[str, str], *, best: str = "") -> str:
    """Return the verdict: the check on held-out text where there is one, else what the program expects.

    Args:
        plan: The plan.
        payload: What it says.
        size: What is got for the damage: ``4.5 bits per weight``.
        names: Words for other choices.
        best: Words behind the other choices that have the same formats; nothing is said of them where it is empty.
    """
    others = damages_of(plan, payload)
    damage, _ = others.pop(plan.rule)
    if payload.whole is not None:
        return f"{size} for {damage:.3g} nats per token, predicted; {_on_whole(payload.whole)}."
    hidden = "mix" if PEER in others else ""  # the file that one has otherwise is said, not the same types with feedback
    rows = [less_than(damage, kl, names[n], error) for n, (kl, error) in others.items() if n in names and n != hidden]
    on_others = f", {_joined(rows)} within the same limit" if rows else ""
    if best and payload.check is not None:
        same = [names[n] for n, row in payload.check.rows.items() if row.same and n in names]
        on_others += f" ({' and '.join(same)} {best})" if same else ""
    on = "measured on held-out text" if payload.check is not None else "predicted and not checked"
    asked = payload.asked or plan.rule
    name = names.get(plan.rule, plan.rule)
    taken = "" if asked == plan.rule else f" {_on_taken(name, damage, *damages_of(plan, payload)[asked])}"
    return f"{size} for {damage:.3g} nats per token{on_others}, {on}.{taken}{_on_fed_back(payload)}{_on_few_tokens(payload)}"


def _on_whole(whole: Whole) -> str:
    cost, how = whole.measured, "measured on held-out text"
    cost, how = (whole.predicted, "predicted and not checked") if cost is None else (cost, how)
    return f"it is a part of a plan of memory that costs {cost:.3g} in all, {how}"


def _joined(rows: Sequence[str]) -> str:
    """Words on several choices; those that the plan does not differ from are said once."""
    alike = [row.removeprefix(LEVEL_WITH) for row in rows if row.startswith(LEVEL_WITH)]
    others = [row for row in rows if not row.startswith(LEVEL_WITH)]
    return " and ".join([*others, *([f"{LEVEL_WITH}{' or '.join(alike)}"] if alike else [])])


def _on_taken(name: str, damage: float, other: float, error: float) -> str:
    """A sentence on a plan that the check took in the place of the program's, whose damage is the other one."""
    level = ", though they are level" if outcome(damage - other, error=error, small=SAME * other) == "level" else ""
    return f"{name[0].upper()}{name[1:]} measured less damage than the program's choice{level}, so it was taken."


def _on_fed_back(payload: FormatsPayload) -> str:
    """A sentence on types whose codes descent does not improve."""
    if not isinstance(payload, WeightsPayload) or payload.method != "descent":
        return ""
    chosen = set(payload.formats.values())
    names = [name for name in FED_BACK if name in chosen]
    return f" Descent does not improve {' and '.join(names)}: they are rounded as by gptq." if names else ""


def _on_few_tokens(payload: FormatsPayload) -> str:
    """A sentence on a text that is too short to choose codes by."""
    if not isinstance(payload, WeightsPayload) or not (few := payload.few_tokens):
        return ""
    return (
        f" The text is short for {payload.method}: {few['tokens']:,} tokens, rows of {few['columns']:,}. Its codes fit this "
        f"text better than other text; give {few['wanted']:,} tokens or more (--samples)."
    )


def expected(plan: Plan, payload: FormatsPayload) -> str:
    """Return a sentence on the damage of a model that was given the plan."""
    if payload.check is None:
        return expected_damage(payload.predicted)
    cost = f"{payload.check.rows[plan.rule].kl:.3g} nats per token were measured on held-out text"
    return f"Verdict: when it was planned, {cost} ({payload.predicted:.3g} predicted); {COMPARE}."


def comparison_of(
    plan: Plan,
    payload: FormatsPayload,
    names: Mapping[str, str],
    against: Mapping[str, str],
    *,
    within: str = "",
    ends: str = "",
    sizes: Mapping[str, int] | None = None,
    counted: str = "",
) -> Table | None:
    """Return the damage of a plan beside that of other choices.

    Args:
        plan: The plan.
        payload: What it says.
        names: Words for other choices.
        against: Choices that every row is compared with where they are there, and what they are called in the header.
        within: Bytes that all choices have, as the title has them.
        ends: What the rule protect-ends is.
        sizes: Bytes by choice, where they differ.
        counted: What those are of.
    """
    damages, checked = damages_of(plan, payload), payload.check is not None
    return comparison(
        plan,
        f"damage in nats per token, {'measured on held-out text' if checked else 'predicted'}{within}",
        damages,
        {name: words for name, words in against.items() if name in damages},
        names={"exact": "the exact program", **names},
        sizes=sizes,
        counted=counted,
        column="measured" if checked else "predicted",
        legend=f". protect-ends: {ends}" if "protect-ends" in damages else "",
        passes=payload.passes,
    )


def within(plan: Plan) -> str:
    """Return the bytes that a plan and all choices beside it have, as the title of a table has them."""
    return f" in {plan.budget['spent']:,.0f} bytes of {decision_of(plan).bytes_of}"


# --- what is decided, and what it rests on ----------------------------------------------------------------------------------


def on_formats(plan: Plan, *, spent: bool = True) -> list[str]:
    """Sentences on how many blocks have which format; with ``spent`` also what is spent of the budget."""
    formats = types_of_blocks(plan)
    if formats is None:
        return on_budget(plan)
    uses = f" and uses {spent_of(plan)}" if spent else ""
    return [f"The rule {plan.rule} decides the format of {len(plan.blocks)} blocks{uses}.", _on_types(plan, formats)]


def _on_types(plan: Plan, formats: Sequence[str]) -> str:
    """How many matrices have each format, and one of them, the largest format first."""
    many, first, bits = collections.Counter(formats), dict[str, str](), dict[str, float]()
    for block, name in zip(plan.blocks, formats, strict=True):
        first.setdefault(name, block.name)
        bits[name] = max(bits.get(name, 0.0), block.value)
    names = sorted(many, key=lambda name: -bits[name])
    if len(names) == 1:
        return f"Every one has {names[0]}."
    ends, words = {names[0], names[-1]}, []
    for name in names:
        one = f" ({'' if many[name] == 1 else 'one is '}{first[name]})" if name in ends else ""
        words.append(f"{many[name]} {'has' if many[name] == 1 else 'have'} {name}{one}")
    return f"From the largest format to the smallest: {', '.join(words)}."


def on_certificate(plan: Plan) -> list[str]:
    """Sentences on how far the decision is proven; of a part of a plan of memory, that the whole was decided at once."""
    if not plan.certificate and plan.hyperparameters.get("part"):
        return [f"It is a part of a plan of memory, which decides all its parts at once by the rule {plan.rule}."]
    return on_program(plan, on_objective(plan) if plan.certificate else "")


def on_prediction(plan: Plan, payload: FormatsPayload, bits: str, ends: str, *, without: Sequence[str] = ()) -> str:
    """A sentence on mean bits and predicted damage, of the plan and of choices without a program.

    Args:
        plan: The plan.
        payload: What it says.
        bits: What the bits are, and a full stop.
        ends: What the rule protect-ends is.
        without: Choices that are said elsewhere.
    """
    names = {"protect-ends": f"protect-ends ({ends})"}
    others = {n: row for n, row in payload.baselines.items() if n not in (plan.rule, *without)}
    rows = [f"{names.get(n, n)} {row['predicted']:.4g}" for n, row in others.items()]
    baseline_damages = f" Predicted of choices without a program, within the same limit: {', '.join(rows)}." if rows else ""
    damage = nats(payload.predicted, payload.predicted_error)
    return f"{payload.bits:.4g} {bits} Predicted damage, the sum over all blocks: {damage}.{baseline_damages}"


def on_more_bytes(plan: Plan) -> list[str]:
    """A sentence on the gain of one percent more bytes, where a program decided."""
    if not plan.certificate:
        return []
    price = plan.certificate["price"] * 0.01 * plan.budget["limit"]
    more = f"With one percent more bytes for {decision_of(plan).bytes_of}"
    return [f"{more} the damage is about {price:.2g} nats per token lower."]


def on_ties(plan: Plan, payload: FormatsPayload) -> list[str]:
    """A sentence on the changes that noise leaves open."""
    if not (ties := payload.near_ties):
        return []
    many = f"{len(ties)}{' or more' if len(ties) >= 20 else ''} single changes cannot be told from the plan within the noise"
    left = plan.budget["limit"] - plan.budget["spent"]
    fit = next((tie for tie in ties if tie.get("bytes", left + 1) <= left), None)
    example = f", for example {fit['instead']} for {fit['chosen']} in {fit['block']}" if fit else ""
    return [f"{many}{example}."]


def on_check(payload: FormatsPayload) -> list[str]:
    """The sentence of the check of whole plans, where there was one."""
    return [] if payload.check is None else [payload.check.verdict]


def on_slack(plan: Plan) -> list[str]:
    """A sentence on a budget that does not bind."""
    c = plan.certificate
    return [c["message"]] if "multiplier" in c and c["status"] != "binding" else []


def on_unread(payload: WeightsPayload) -> list[str]:
    """A sentence on tensors that transformers does not load."""
    terms = {name: size for name, size in (payload.fixed_terms or {}).items() if "does not load" in name or "further" in name}
    return [f"Not planned: {name}{f', {size:,} bytes' if size else ''}." for name, size in terms.items()]


def on_unwritten(plan: Plan, payload: WeightsPayload) -> list[str]:
    """A sentence on matrices that no file holds in fewer bits."""
    if not (kept := payload.unwritten):
        return []
    size = sum(b.count for b in plan.blocks if set(b.modules) <= set(kept))
    first = next(iter(kept))
    return [f"{len(kept)} matrices stay in 16 bits and count as such ({size:,} bytes), first {first}: {kept[first]}."]


# --- the model card ---------------------------------------------------------------------------------------------------------


def figures_of(payload: FormatsPayload) -> dict[str, str]:
    """Return the rows of a model card on predicted and measured damage."""
    whole = payload.whole
    of = ", of the weights without the cache" if whole is not None else ""
    rows = damage_figures(payload.predicted, error=payload.predicted_error, of=of)
    if whole is not None:
        both = {"predicted": whole.predicted, "measured": whole.measured}
        cost = [f"{value:.4g} {how}" for how, value in both.items() if value is not None]
        rows["weights and cache together"] = f"{', '.join(cost)} nats per token"
    if payload.check is not None and payload.check.verdict:
        rows["measured"] = payload.check.verdict
    return rows
