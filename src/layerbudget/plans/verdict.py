"""One sentence on a plan: what one gets, beside uniform, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..compressors.formats import GGUF
from ..decisions.bits.mixes import MIXES
from ..decisions.bits.program import PEER
from ..decisions.fit.smaller import of_rule
from ..decisions.ranks.plan import FEW, TAKE_UNIFORM
from ..decisions.shapes.program import layers_differ
from ..kinds import KINDS
from ..plan import Plan
from ..verdicts import CONVENTION, LEVEL_WITH, SAME, less_than, outcome

MOSTLY_NOISE = 0.9  # share of it that noise alone gives, above which it decides nothing
PUBLISHED = {"outlier-ratio": "owl", "spectral-tail": "alphapruning", "layerif": "layerif"}  # a score and its own rule
_CALLED = {"owl": "OWL", "alphapruning": "AlphaPruning", "layerif": "LayerIF"}
_BESIDE = "compare it with the dense model on text of your own"
_ALIKE = "equal layers"  # what uniform is where units go


def verdict(plan: Plan) -> str:
    """One sentence on a plan of any kind: what it decides, its damage or gain beside uniform, and the passes that it took."""
    own = _VERDICTS.get(plan.kind)
    return f"Verdict: {_in_general(plan) if own is None else own(plan)}"


def expected(plan: Plan) -> str:
    """One sentence on the damage of a plan that was applied: measured or predicted when it was made."""
    e = plan.extra
    if plan.kind in ("bits", "cache", "fit") and e.get("check"):
        cost = f"{e['check']['rows'][plan.rule]['kl']:.3g} nats per token were measured on held-out text"
        return f"Verdict: when it was planned, {cost} ({e['predicted']:.3g} predicted); {_BESIDE}."
    if plan.kind in ("shapes", "kept-experts"):
        damage, where = _of_shapes(plan) if plan.kind == "shapes" else _of_kept(plan)
        return f"Verdict: planned to cost {damage:.3g} nats per token {where}; {_BESIDE}."
    damage = e.get("measured", e.get("predicted"))
    if damage is None:
        return f"Verdict: scores decided, and nothing is known of the damage; {_BESIDE}."
    return f"Verdict: planned to cost {damage:.3g} nats per token; {_BESIDE}."


def of_published(rule: str, estimator: str) -> str:
    """A sentence where a published score is under another rule than its own, or a published rule reads another score.

    >>> of_published("mdl", "outlier-ratio")
    'outlier-ratio is the score of OWL, and mdl is not its rule: --rule owl is OWL as published.'
    """
    score = next((name for name, own in PUBLISHED.items() if own == rule), estimator)
    if estimator in PUBLISHED and PUBLISHED[estimator] != rule and rule not in ("uniform", "size", "permuted"):
        own = PUBLISHED[estimator]
        called = _CALLED[own]
        return f"{estimator} is the score of {called}, and {rule} is not its rule: --rule {own} is {called} as published."
    if score != estimator:
        return f"{rule} is the rule of {_CALLED[rule]}, whose score is {score}; these scores are {estimator}."
    return ""


def beside_uniform(share: float, noise: float | None = None) -> str:
    """Words on a gain of ranks of which uniform has a share and noise alone another one: the share, and what to take."""
    if noise is not None and noise > MOSTLY_NOISE:
        return noise_alone(noise)
    told = f"uniform ranks with as many parameters have {share_of_uniform(share)} of the plan's gain"
    if share >= TAKE_UNIFORM:
        return f"{told} ({TAKE_UNIFORM:.0%} or more): take uniform"
    return f"{told} (less than {TAKE_UNIFORM:.0%}): train both, and pair them by finetune --against"


def share_of_uniform(share: float) -> str:
    """The share of the gain that uniform has, in words; never rounded up to the share from which on uniform is advised.

    >>> share_of_uniform(0.951), share_of_uniform(0.9499)
    ('95.1%', '94.9%')
    """
    return f"{share if share >= TAKE_UNIFORM else min(share, TAKE_UNIFORM - 0.001):.1%}"


def noise_alone(*shares: float) -> str:
    """Words on the shares of gains of ranks that noise alone would give, and what to take where that is most of them."""
    ends = list(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares))))
    told = f"noise alone would give {' to '.join(ends)} of the gain"
    return f"{told}, so it decides nothing: take uniform, or score more rows" if min(shares) > MOSTLY_NOISE else told


def advises_uniform(plan: Plan) -> bool:
    """Whether the words on a plan of uneven ranks end in taking uniform."""
    share, noise = plan.extra.get("uniform_share"), plan.extra.get("noise_share") or 0.0
    advised = share is not None and (share >= TAKE_UNIFORM or noise > MOSTLY_NOISE or "scored_rows" in plan.extra)
    return advised and len(set(plan.counts.tolist())) > 1


def of_noise(noise: float) -> str:
    """A sentence on the share of a gain of ranks that noise alone would give."""
    return f"Noise alone would give {noise:.0%} of this gain: two halves of the text disagree by that much."


# What the rule ends is, of matrices and of a cache.
ENDS = (
    "first and last layers, embedding and head in larger formats",
    "first and last layers in a larger format, and further ones as the bytes allow",
)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def passes_of(plan: Plan) -> float | None:
    """Forward equivalents that planning took; None of scores that were there before."""
    return plan.extra.get("passes" if plan.kind in ("bits", "cache", "fit") else "forward_passes")


def standing(plan: Plan) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]] | None:
    """The damage of a plan beside that of other choices, as a table.

    Returns:
        A title, a header, and rows of name, bytes (of formats), nats per token, and the change against uniform and, of bits,
        against llama.cpp's mix. A change of the plan comes with two standard errors of it. None where nothing else is known.
    """
    found = _measured(plan)
    if found is None or len(found[1]) < 2:
        return None
    on, damage, base = found
    size, typed = _sizes(plan), plan.kind in ("bits", "cache", "fit")
    against = [base] * (base in damage)
    peer = PEER if PEER in damage else "mix"
    against += [peer] if peer in damage and plan.rule != peer and plan.kind == "bits" else []
    names = {"choices": "the exact program", **names_of(plan), plan.rule: "this plan"}
    rows = list[tuple[str, ...]]()
    for name, (kl, _) in damage.items():
        bytes_of = (f"{size[name]:,}" if name in size else "–",) if size else ()
        changes = (_change(plan, damage, name, other) for other in against)
        rows.append((names.get(name, name), *bytes_of, f"{kl:.3g}", *changes))
    passes = passes_of(plan)
    took = f"; planning took {passes:.0f} forward equivalents" if passes else ""
    legend = f". ends: {ENDS[plan.kind == 'cache']}" if "ends" in damage else ""
    shown = {"mix": str(plan.extra.get("mix")), PEER: PEER} if plan.kind == "bits" else {}
    shown |= {base: _ALIKE if plan.kind in ("kept-experts", "shapes") else names[base] if plan.kind == "fit" else "uniform"}
    column = ("measured" if plan.extra.get("check") else "predicted") if typed else "nats per token"
    column = "predicted" if plan.kind in ("kept-experts", "shapes") else column
    counted = f"bytes of {'the file' if plan.extra.get('family') == GGUF else 'all tensors'}"
    head = ("plan", *([counted] if size else []), column)
    told = f"damage in nats per token, {on}" if typed else f"damage {on}"
    ended = any(" (to " in cell for row in rows for cell in row[1:])
    told += f", {CONVENTION}" if ended or any("+-" in cell for row in rows for cell in row) else ""
    told += " (to: their upper end)" if ended else ""
    return f"{told}{legend}{took}", (*head, *(f"against {shown[n]}" for n in against)), rows


def _change(plan: Plan, damage: Mapping[str, tuple[float, float]], name: str, base: str) -> str:
    """The change of one damage against another in per cent of that, with two standard errors where they are known."""
    other, own = damage.get(base, (0.0, 0.0)), damage[name]
    if name == base or other[0] <= 0:
        return "–"
    error = (other[1] if name == plan.rule else own[1] if base == plan.rule else 0.0) / other[0]
    change, digits = own[0] / other[0] - 1, 0 if error >= 0.05 else 1
    level = outcome(change, error=error, small=SAME) == "level"
    if error and not level and change - 2 * error < -1:  # no damage is below zero
        return f"{change:+.1%} (to {change + 2 * error:+.{digits}%})"
    return f"{change:+.1%}{f' +-{2 * error:.{digits}%}' if error else ''}{', level' if level else ''}"


def _sizes(plan: Plan) -> dict[str, int]:
    """Bytes of the GGUF file, else of all tensors, in a plan of bits and in the choices beside it; of no other kind."""
    if plan.kind != "bits" or "fixed_bytes" not in plan.extra:
        return {}
    e = plan.extra
    beside = e["fixed_bytes"] + (e.get("head_bytes", 0) if e.get("family") == GGUF else 0)
    spent = {name: row["spent"] for name, row in e["baselines"].items()} | {plan.rule: plan.budget["spent"]}
    spent |= {PEER: spent["mix"]} if "mix" in spent else {}
    return {name: int(size + beside) for name, size in spent.items()}


def _measured(plan: Plan) -> tuple[str, dict[str, tuple[float, float]], str] | None:
    """Where damages were measured; those of a plan and of other choices, with errors of the differences; which is uniform."""
    e = plan.extra
    if plan.kind == "sparsity" and "measured" in e:
        rows = {plan.rule: (e["measured"], 0.0), "uniform": (e["path"][0]["divergence"], 0.0)}
        return "on the text that decided", rows, "uniform"
    if plan.kind in ("bits", "cache", "fit"):
        size = "" if plan.kind == "bits" else f" in {plan.budget['spent']:,.0f} bytes of {KINDS.find(plan.kind).bytes_of}"
        on = f"measured on held-out text{size}" if e.get("check") else f"predicted{size}"
        rows = _checked(plan)
        alone = "uniform-cache" if "uniform-cache" in rows else "mix"
        return on, rows, alone if plan.kind == "fit" else "uniform"
    if plan.kind in ("kept-experts", "shapes") and (found := e.get("beside")):
        alike = not layers_differ(plan) if plan.kind == "shapes" else len(set(plan.counts.tolist())) == 1
        names = (plan.rule, "layers that differ") if alike else (_ALIKE, plan.rule)
        error = found.get("error", 0.0)
        rows = {names[0]: (found["even"], error), names[1]: (found["uneven"], error)}
        first = "of the first plan, before anything was cut" if plan.kind == "shapes" else "before anything was masked"
        return f"predicted {first}; the verdict has the damage to go by", rows, names[0]
    return None


def _is_uniform(plan: Plan) -> bool:
    return float(np.ptp(plan.values)) <= 1e-9 * float(np.abs(plan.values).max(initial=0.0))


# --- kinds ------------------------------------------------------------------------------------------------------------------


def _on_sparsity(plan: Plan) -> str:
    e, share = plan.extra, _percent(plan.sparsity)
    if "measured" not in e:
        if _is_uniform(plan):
            return f"every block loses {share} of its weights: this is uniform."
        low, high = (_percent(v) for v in (plan.values.min(), plan.values.max()))
        return (
            f"{share} of the weights become zero, {low} to {high} of a block. Scores do not say what uniform would cost: "
            "plan from the model, or apply both plans and evaluate them."
        )
    beside = less_than(e["measured"], e["path"][0]["divergence"], "uniform")
    return f"{share} of the weights become zero for {e['measured']:.3g} nats per token, {beside}, on the text that decided."


def _on_formats(plan: Plan) -> str:
    """Of bits, of a cache or of both: the check on held-out text where there is one, else what the program expects."""
    e, found = plan.extra, _checked(plan)
    own, _ = found.pop(plan.rule)
    on = "measured on held-out text" if e.get("check") else "predicted and not checked"
    size = f"{e['bits']:.4g} bits per {'cached number' if plan.kind == 'cache' else 'weight'}"
    size = f"{KINDS.find(plan.kind).bytes_of} in {plan.budget['spent']:,.0f} bytes" if plan.kind == "fit" else size
    if whole := e.get("whole"):
        cost, how = whole["measured"], "measured on held-out text"
        cost, how = (whole["predicted"], "predicted and not checked") if cost is None else (cost, how)
        return f"{size} for {own:.3g} nats per token, predicted; it is a part of a fit that costs {cost:.3g} in all, {how}."
    names = names_of(plan)
    hidden = "mix" if PEER in found else ""  # the file that one has otherwise is said, not the same types with feedback
    rows = [less_than(own, kl, names[n], error) for n, (kl, error) in found.items() if n in names and n != hidden]
    beside = f", {_joined(rows)} within the same limit" if rows else ""
    alike = [names[n] for n, r in (e.get("check") or {"rows": {}})["rows"].items() if r.get("same") and n in names]
    beside += f" ({' and '.join(alike)} is the best choice here)" if alike and plan.kind == "fit" else ""
    asked = e.get("asked", plan.rule)
    took = "" if asked == plan.rule else f" {_on_taken(plan, names.get(plan.rule, plan.rule))}"
    return f"{size} for {own:.3g} nats per token{beside}, {on}.{took}{_on_few_tokens(plan)}"


def _joined(rows: Sequence[str]) -> str:
    """Words on several choices; those that the plan does not differ from are said once."""
    alike = [row.removeprefix(LEVEL_WITH) for row in rows if row.startswith(LEVEL_WITH)]
    others = [row for row in rows if not row.startswith(LEVEL_WITH)]
    return " and ".join([*others, *([f"{LEVEL_WITH}{' or '.join(alike)}"] if alike else [])])


def _on_taken(plan: Plan, name: str) -> str:
    """A sentence on a plan that the check took in the place of the program's."""
    (kl, error), own = _checked(plan)[plan.extra["asked"]], plan.extra["check"]["rows"][plan.rule]["kl"]
    level = ", though they are level" if outcome(own - kl, error=error, small=SAME * kl) == "level" else ""
    return f"{name[0].upper()}{name[1:]} measured less damage than the program's choice{level}, so it was taken."


def _on_few_tokens(plan: Plan) -> str:
    """A sentence on a text that is too short for error feedback."""
    if not (few := plan.extra.get("few_tokens")):
        return ""
    return (
        f" The text is short for gptq: {few['tokens']:,} tokens, rows of {few['columns']:,}. Its codes fit this text better "
        f"than other text; give {few['wanted']:,} tokens or more (--samples)."
    )


def _checked(plan: Plan) -> dict[str, tuple[float, float]]:
    """Damage of the plan and of other formats in as many bytes, with the standard error of the difference to the plan's."""
    e = plan.extra
    if check := e.get("check"):
        return {n: (r["kl"], r.get("difference_error", 0.0)) for n, r in check["rows"].items() if not r.get("same")}
    other = {n: r for n, r in e["baselines"].items() if r["predicted"] != e["predicted"]}
    others = {n: (r["predicted"], r["difference_error"]) for n, r in other.items()}
    return {**others, plan.rule: (e["predicted"], 0.0)}


def names_of(plan: Plan) -> dict[str, str]:
    """Return words for the baselines of a plan of formats; of a fit with what stays of a smaller model."""
    mix = (plan.extra.get("named") or {}).get("mix") or plan.extra.get("mix")
    types = f"llama.cpp's {mix}" if mix in MIXES else f"the weights as {mix}"
    if PEER in (plan.extra.get("check") or {"rows": {}})["rows"]:
        types = f"the types of {mix} with gptq"
    return {
        "mix": types + of_rule(plan, "mix"),
        PEER: f"{mix} by llama-quantize",
        "uniform": "uniform",
        "uniform-cache": f"one format for the whole cache{of_rule(plan, 'uniform-cache')}",
        "all-experts": "all experts",
        "all-shapes": "all shapes",
    }


def _beside(plan: Plan, alike: bool) -> str:
    """How the predicted damage of a plan stands beside that of equal layers, or of others where its layers are ``alike``."""
    found = plan.extra.get("beside")
    if not found:
        return ""
    own, other = (found["even"], found["uneven"]) if alike else (found["uneven"], found["even"])
    error = found.get("error", 0.0)
    if not alike:
        return f"; its predicted damage is {less_than(own, other, f'that of {_ALIKE}', error)}"
    if outcome(other - own, error=error, small=SAME * own) != "lower":
        return "; the prediction sees nothing to gain from layers that differ"
    return f"; the predicted damage of layers that differ is {less_than(other, own, 'that of this plan', error)}"


def _on_kept(plan: Plan) -> str:
    (damage, where), total = _of_kept(plan), round(sum(b.count / b.value for b in plan.blocks if b.value))
    alike, typed = len(set(plan.counts.tolist())) == 1, ""
    if said := plan.extra.get("typed"):
        typed = f". With their types the file takes {said['bytes']:,} bytes"
    even = "" if alike else ". Layers keep different numbers: --even plans the same for all"
    kept = f"{int(plan.counts.sum())} of {total} experts stay"
    return f"{kept} for {damage:.3g} nats per token {where}{_beside(plan, alike)}{even}{typed}."


def _of_kept(plan: Plan) -> tuple[float, str]:
    """The damage of fewer experts to go by, and on which text: on other text, where halves of it judged each other."""
    text = "other text" if plan.extra.get("crossed") else "the text that chose"
    return plan.extra["measured"], f"measured with the others masked, on {text}"


def _on_shapes(plan: Plan) -> str:
    b, (damage, where) = plan.budget, _of_shapes(plan)
    differ, uneven = ". Every runtime loads the result", layers_differ(plan)
    if plan.extra.get("experts_differ"):
        differ = ". Its layers keep different numbers of experts: only layerbudget.load_model loads the result"
    if uneven:
        load = ["llama.cpp (apply --format gguf)"]
        load += [] if layers_differ(plan, ("heads",)) else ["vLLM (apply --format nemotron-nas)"]
        who = f"{' and '.join(load)} load{'s' if len(load) == 1 else ''} the result"
        differ = f". Layers differ: only {who}; --even plans one for every runtime"
    return (
        f"{_percent(b['spent'] / b['base'])} of the layers' {b['unit']} go for {damage:.3g} nats per token "
        f"{where}{_beside(plan, not uneven)}{differ}."
    )


def _of_shapes(plan: Plan) -> tuple[float, str]:
    """The damage of smaller shapes to go by, and on which text: on other text, where parts of it judged refits to the rest."""
    e = plan.extra
    return (e["predicted"], "to be expected on other text") if e.get("crossed") else (e["measured"], "on the text that decided")


def _on_ranks(plan: Plan) -> str:
    low, high, share = int(plan.counts.min()), int(plan.counts.max()), plan.extra.get("uniform_share")
    if low == high:
        b, cap = plan.budget, plan.hyperparameters.get("max_rank")
        if low != cap or not (rest := (b.get("limit") or 0) - b["spent"]) > 0:
            return f"every block gets rank {low}: this is uniform."
        return (
            f"every block gets rank {low}, as much as --max-rank allows: this is uniform, and {rest:,.0f} of {b['limit']:,.0f} "
            f"{b['unit']} stay unused."
        )
    told = f"ranks from {low} to {high}"
    if plan.rule.endswith("permuted"):
        return f"{told}. This is a control on shuffled scores: train it and the plan, and pair them by finetune --against."
    if share is None:
        return f"{told}. The scores do not say what uniform would gain: train both plans, and pair them by finetune --against."
    if scored := plan.extra.get("scored_rows"):
        return f"{told}; {scored} scored rows, fewer than {FEW}, do not tell ranks apart: take uniform, or score more rows."
    return f"{told}; {beside_uniform(share, plan.extra.get('noise_share'))}."


def _on_experts(plan: Plan) -> str:
    low, high = int(plan.counts.min()), int(plan.counts.max())
    if low == high:
        return f"every block gets {low} experts: this is uniform."
    return (
        f"{low} to {high} experts a block. No rule has beaten uniform in our own trainings: train both plans, and pair them by "
        "finetune --against."
    )


def _on_joint(plan: Plan) -> str:
    held, b = plan.extra["capacity"], plan.budget
    counts = [int(c) for c in held["counts"].values()]
    return (
        f"{_percent(plan.sparsity)} of the weights become zero and pay for {min(counts)} to {max(counts)} {held['kind']} a "
        f"block: {b['spent']:,.0f} bytes in all. Scores do not say what uniform would cost: train and evaluate both."
    )


def _on_recipe(plan: Plan) -> str:
    e, b = plan.extra, plan.budget
    return (
        f"{b['base']:,} bytes of base and {b['adapter']:,} of adapter; rounding costs {e['predicted']:.3g} nats per token, and "
        f"training may gain up to {e['adapter']['gain']:.3g} by the quadratic model. Nothing was compared with uniform."
    )


def _in_general(plan: Plan) -> str:
    if _is_uniform(plan):
        return f"every block gets {plan.values[0]:.4g}: this is uniform."
    decides, low, high = KINDS.find(plan.kind).decides, plan.values.min(), plan.values.max()
    return f"{decides} from {low:.3g} to {high:.3g} over {len(plan.blocks)} blocks. Nothing was compared with uniform."


_VERDICTS: Mapping[str, Callable[[Plan], Any]] = {
    "sparsity": _on_sparsity,
    "bits": _on_formats,
    "cache": _on_formats,
    "fit": _on_formats,
    "kept-experts": _on_kept,
    "shapes": _on_shapes,
    "ranks": _on_ranks,
    "experts": _on_experts,
    "joint": _on_joint,
    "recipe": _on_recipe,
}
