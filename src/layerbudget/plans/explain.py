"""Say in sentences what a plan does and what it rests on."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..compressors.formats import GGUF
from ..decisions.bits.reasons import reasons, types_of_blocks
from ..decisions.cache.export import llama_build
from ..decisions.fit.parts import sentences as of_fit
from ..decisions.fit.parts import shares
from ..decisions.joint.recipe import sentences as of_recipe
from ..decisions.kept_experts.program import bend
from ..decisions.kept_experts.program import sentences as of_kept
from ..decisions.ranks.plan import TAKE_UNIFORM, serving_note
from ..errors import InvalidInput, ModelMismatch
from ..kinds import KINDS
from ..plan import Plan
from ..records import Result
from ..scores import Scores
from ..solvers.inputs import spoken_amount
from ..verdicts import nats
from .rank_table import RankTable, rank_table, terms_of
from .verdict import ENDS, MOSTLY_NOISE, advises_uniform, beside_uniform, of_noise, verdict

NEARLY_UNIFORM = 0.05  # standard deviation over mean


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Explanation(Result):
    """A plan in sentences: budget, status, price, what had no influence; ``most`` and ``least`` name the blocks at either end.

    ``codelengths`` is there where scores of a gain were given, see :func:`codelengths`; ``matrices`` of a plan of formats, see
    :func:`~layerbudget.decisions.bits.reasons.reasons`; ``ranks`` of a plan of ranks with scores of every further rank.
    """

    sentences: Sequence[str]
    most: Sequence[str]
    least: Sequence[str]
    codelengths: Mapping[str, Any] | None = None
    matrices: Sequence[Mapping[str, Any]] = ()
    ranks: RankTable | None = None


def explain_plan(plan: Plan, scores: Scores | None = None, *, tokens: int | None = None) -> Explanation:
    """Return in sentences what a plan does and what it rests on; with its scores also what their gains are worth in bits.

    The scores of a plan of bits are damages, no gains: they give the standard error of the damage of every matrix.

    Raises:
        ModelMismatch, InvalidInput: As :func:`codelengths` raises them.
    """
    order = np.argsort(plan.values, kind="stable")
    parts = [*_on_budget(plan), *_on_certificate(plan), *_on_decision(plan)]
    parts += _on_serving(plan)
    if plan.kind in ("bits", "cache", "recipe"):
        parts += of_recipe(plan) if plan.kind == "recipe" else _on_formats(plan)
    parts += _on_shapes(plan) if plan.kind == "shapes" else []
    parts += of_kept(plan) if plan.kind == "kept-experts" else of_fit(plan) if plan.kind == "fit" else []
    damages = scores is not None and plan.kind == "bits" and "choices" in scores.extra
    if damages and tokens is not None:
        raise InvalidInput("tokens has no meaning for a plan of bits.", "Its scores are damages, no gains.", "Leave it out.")
    if scores is not None and not damages and plan.kind in ("bits", "cache", "fit"):
        what = f"A plan of {plan.kind} needs no scores here."
        if plan.kind == "bits":
            what = f"These scores, by {scores.estimator}, hold no damages of formats."
        raise InvalidInput(what, "", "Leave out --scores (in Python: scores).")
    bits = None if scores is None or damages else codelengths(plan, scores, tokens)
    ranks = None if bits is None else how_much_rank(plan, scores, tokens)
    if ranks is not None and ranks.few_rows:  # what the gains of these rows advise is left out
        parts = [*(s for s in parts if s[1:].rstrip(".") not in verdict(plan)), ranks.recommendation]
    parts += [] if bits is None else [_on_codelengths(bits)]
    return Explanation(
        sentences=parts,
        most=[plan.names[i] for i in order[::-1][:5]],
        least=[plan.names[i] for i in order[:5]],
        codelengths=bits,
        matrices=reasons(plan, scores if damages else None),
        ranks=ranks,
    )


def how_much_rank(plan: Plan, scores: Any, tokens: int | None = None) -> RankTable | None:
    """Return what every mean rank brings under the plan's caps; None where the scores do not say it, or no rank can be planned.

    Args:
        plan: A plan of ranks.
        scores: Its scores; only those of ``rank-gain`` have the gain of every further rank.
        tokens: Completion tokens of the training rows, by default those of the scored file.
    """
    gains = isinstance(scores, Scores) and plan.kind == "ranks" and {"tokens", "increments"} <= set(scores.extra)
    if not gains or scores.unit != "nats of average loss":
        return None
    with contextlib.suppress(InvalidInput):  # no power of two can be planned under the caps
        return rank_table(scores, tokens or scores.data.get("completion_tokens") or tokens_of(scores), **terms_of(plan))
    return None


def advice(plan: Plan) -> list[str]:
    """Sentences that call for something: a budget that does not bind, what stays as it is, how to serve or load the result."""
    e, c, said = plan.extra, plan.certificate, shares(plan) if plan.kind == "fit" else []
    said += [c["message"]] if "multiplier" in c and c["status"] != "binding" and plan.kind != "shapes" else []
    said += _on_unwritten(plan) + _on_measured_ranks(plan) + _on_reserve(plan) + _on_nearly_uniform(plan) + _on_serving(plan)
    return [*said, bent] if plan.kind == "kept-experts" and (bent := bend(e["forecast"])) else said


def _on_serving(plan: Plan) -> list[str]:
    """What vLLM is told to hold an adapter, and that llama.cpp cannot apply ranks that differ as they are."""
    if plan.kind != "ranks" or not plan.counts.any():
        return []
    said = [f"To serve it with vLLM: {serving_note(plan)}"]
    if len({int(n) for n in plan.counts if n}) > 1:
        said.append(
            "llama.cpp applies one scale, which is wrong for ranks that differ: merge the adapter first, or pad its ranks."
        )
    return said


def _on_budget(plan: Plan) -> list[str]:
    name, value, low, high = plan.names, plan.values, int(plan.counts.min()), int(plan.counts.max())
    spent, limit, unit = plan.budget["spent"], plan.budget["limit"], plan.budget.get("unit")
    what = KINDS.find(plan.kind)
    of = f"{spoken_amount(float(spent))} of {spoken_amount(float(limit))} {'units' if unit in (None, 'count') else unit}"
    of += f" of {what.bytes_of}" if what.bytes_of else ""
    told = f"The rule {plan.rule} decides {what.decides} for {len(name)} blocks and uses {of}."
    if plan.kind == "kept-experts":
        whole = sum(round(n / share) for n, share in zip(plan.counts, value, strict=True))
        kept = f"{int(plan.counts.sum())} of {whole} experts"
        told = f"The rule {plan.rule} decides {what.decides} for {len(name)} layers and keeps {kept}."
    if plan.kind == "shapes":
        of = f"{spoken_amount(float(spent))} {unit}; at least {spoken_amount(float(limit))} were to go"
        told = f"The rule {plan.rule} decides {what.decides} for {len(name)} blocks and saves {of}."
    if (kinds := types_of_blocks(plan)) is not None:
        uses = "" if plan.kind == "bits" else f" and uses {of}"
        return [f"The rule {plan.rule} decides the format of {len(name)} blocks{uses}.", _on_types(plan, kinds)]
    if float(np.ptp(value)) <= 1e-9 * float(np.abs(value).max(initial=0.0)):
        whole = f", in whole numbers {low} to {high}" if plan.kind in ("ranks", "experts") and low < high else ""
        return [told, f"Every block gets {value[0]:.4g}{whole}."]
    order = np.argsort(value, kind="stable")
    mean = plan.hyperparameters.get("mean_rank") if plan.kind == "ranks" else None
    by_size = f" ({spent / limit * mean:.4g} where large matrices count for more, as in --mean-rank)" if mean and limit else ""
    return [
        told,
        f"Most goes to {name[order[-1]]} ({value[order[-1]]:.4g}), least to {name[order[0]]} ({value[order[0]]:.4g}); "
        f"the mean over blocks is {value.mean():.4g}{by_size}, the standard deviation {value.std():.4g}.",
    ]


def _on_types(plan: Plan, kinds: Sequence[str]) -> str:
    """How many matrices have each format, and one of them, the largest format first."""
    many, first, bits = collections.Counter(kinds), dict[str, str](), dict[str, float]()
    for block, kind in zip(plan.blocks, kinds, strict=True):
        first.setdefault(kind, block.name)
        bits[kind] = max(bits.get(kind, 0.0), block.value)
    names = sorted(many, key=lambda kind: -bits[kind])
    if len(names) == 1:
        return f"Every one has {names[0]}."
    ends = {names[0], names[-1]}
    told = []
    for kind in names:
        one = f" ({'' if many[kind] == 1 else 'one is '}{first[kind]})" if kind in ends else ""
        told.append(f"{many[kind]} {'has' if many[kind] == 1 else 'have'} {kind}{one}")
    return f"From the largest format to the smallest: {', '.join(told)}."


def _on_certificate(plan: Plan) -> list[str]:
    c, limit = plan.certificate, float(plan.budget["limit"])
    if not c and plan.hyperparameters.get("fit"):
        return [f"It is a part of a fit, which decides all its parts at once by the rule {plan.rule}."]
    if not c:
        price = plan.extra.get("rounding", {}).get("price")
        if price is None:
            return ["This rule solves no program, so there is no certificate."]
        value = plan.extra["rounding"]["value"]
        return [
            f"Ranks are bought in the order of gain per cost; one percent more budget would add about "
            f"{price * 0.01 * limit:.3g} to the expected gain of {value:.4g}."
        ]
    if plan.extra.get("path") and "kkt_residual" in c:  # the program of a step, whose floors and caps are how far a step may go
        said = [f"The plan was reached step by step; the last step is optimal (duality gap {c['gap']:.1e})."]
        if c["at_lower"] or c["at_upper"]:
            said.append(f"In that step {c['at_lower']} blocks fell and {c['at_upper']} rose as far as one step may.")
        return said
    stepwise = plan.kind == "shapes" and plan.extra.get("path")
    said = [f"The plan was reached step by step. Of the last step: {c['message']}" if stepwise else c["message"]]
    if "kkt_residual" in c:
        said.append(f"Duality gap {c['gap']:.1e}, KKT residual {c['kkt_residual']:.1e}: the continuous decision is optimal.")
    if c["status"] == "binding" and c.get("shadow_price"):
        said.append(_on_price(plan, 0.01 * abs(limit)))
    if c["at_lower"] or c["at_upper"]:
        said.append(f"{c['at_lower']} blocks sit at their floor and {c['at_upper']} at their cap.")
    given = plan.hyperparameters
    if inert := ["scores" if n == "weights" else n for n in c["inert"] if n == "weights" or given.get(n) is not None]:
        said.append(f"These settings cannot change this plan: {', '.join(inert)}.")
    return said


def _on_price(plan: Plan, more: float) -> str:
    """A sentence on the gain of one percent more budget."""
    c, given = plan.certificate, plan.hyperparameters
    if plan.kind not in ("sparsity", "ranks", "experts"):
        return f"With one percent more budget the objective is about {c['multiplier'] * more:.3g} lower."
    zeros = plan.kind == "sparsity"
    more_of, what, name, default = ("zeros", "penalty", "eta", 2.0) if zeros else ("budget", "utility", "gamma", 0.9)
    mean = given.get(name) or default
    scaled = "" if given.get("units") == "literal" else f", where the weights of the blocks have the mean {mean:g}"
    return f"With one percent more {more_of} the {what} is about {c['shadow_price'] * more:.3g} higher{scaled}."


def _on_decision(plan: Plan) -> list[str]:
    """How whole numbers were found, and what uniform, a smaller reserve and straight curves would change."""
    e, said = plan.extra, []
    if (r := e.get("rounding")) and plan.rule != "uniform":
        proof = "proven optimal" if r["exact"] else f"within {r['gap']:.1e} of the best integers"
        said.append(
            f"Whole numbers, {proof}: {'expected gain' if r['method'] == 'increments' else 'utility'} {r['value']:.6g}, and "
            f"{r['optimum']:.6g} if fractions were allowed; {spoken_amount(r['spent'])} of {spoken_amount(r['budget'])} is "
            "spent."
        )
    share = e.get("uniform_share")
    if share is not None and "scored_rows" not in e:  # of few rows the verdict says it all
        told, noise = beside_uniform(share, e.get("noise_share")), e.get("noise_share")
        said += [f"{told[0].upper()}{told[1:]}."]
        said += [of_noise(noise)] if noise is not None and noise <= MOSTLY_NOISE else []
    said += _on_measured_ranks(plan) + _on_reserve(plan)
    if bent := e.get("convexified"):
        worst = max(bent, key=lambda name: bent[name])
        said.append(f"{len(bent)} measured curves were not convex and were replaced by their hulls; {worst} moved most.")
    return said + _on_nearly_uniform(plan)


def _on_reserve(plan: Plan) -> list[str]:
    """A lower cap of ranks that a server would reserve less for."""
    smaller, share = plan.extra.get("smaller_reserve"), plan.extra.get("uniform_share")
    if not smaller or advises_uniform(plan):
        return []
    if share is None or share >= TAKE_UNIFORM * smaller["share"]:  # the plan under the cap: little above uniform
        return []
    times = smaller["reserved"] / smaller["max_rank"]
    less = "halves" if times == 2 else f"divides by {times:g}"
    return [f"--max-rank {smaller['max_rank']} keeps {smaller['share']:.1%} of the gain and {less} what vLLM reserves."]


def _on_measured_ranks(plan: Plan) -> list[str]:
    """Blocks that have all the ranks whose gains were measured."""
    if not (ends := plan.extra.get("at_measured")):
        return []
    most = max(ends.values())
    who = f"{len(ends)} blocks have" if len(ends) > 1 else f"{next(iter(ends))} has"
    return [f"{who} all {most} ranks that were measured, and may earn more: score with --set largest={2 * most} to know."]


def _on_nearly_uniform(plan: Plan) -> list[str]:
    if (flat := plan.extra.get("flat_scores")) is not None:
        better = "; for ranks score with --estimator rank-gain" if plan.kind == "ranks" else ""
        return [
            f"The scores are nearly equal (they differ by {flat:.1%} of their mean): this plan follows what {plan.kind} "
            f"cost. One damping for all blocks (score with --set damping_unit=median) tells blocks apart{better}."
        ]
    spread = plan.values.std() / max(abs(plan.values.mean()), 1e-300)
    if plan.rule != "mdl" or len(plan.blocks) < 2 or spread >= NEARLY_UNIFORM:
        return []
    return [
        f"This is nearly uniform (the values differ by {spread:.1%} of their mean). Gains damped relative to each block's "
        "own curvature are often so: one damping for all blocks (score with --set damping_unit=median) tells them apart."
    ]


def _on_unwritten(plan: Plan) -> list[str]:
    """Matrices that no file holds in fewer bits."""
    if not (kept := plan.extra.get("unwritten")):
        return []
    size = sum(b.count for b in plan.blocks if set(b.modules) <= set(kept))
    first = next(iter(kept))
    return [f"{len(kept)} matrices stay in 16 bits and count as such ({size:,} bytes), first {first}: {kept[first]}."]


def _on_shapes(plan: Plan) -> list[str]:
    """The damages of smaller shapes, each with the text that it was measured on."""
    e = plan.extra
    other = (
        f" On other text expect {e['predicted']:.4g}: parts of the text were judged by refits to the others."
        if e.get("crossed")
        else ""
    )
    return [f"On the text that decided, cut and refitted, it costs {e['measured']:.4g} nats per token.{other}"]


def _on_formats(plan: Plan) -> list[str]:
    """Prediction of a plan of bits or of a cache, changes that noise leaves open, and the check of the whole plan."""
    e, said = plan.extra, []
    names = {"ends": f"ends ({ENDS[plan.kind == 'cache']})"}
    apart = {plan.rule, *(["mix"] if plan.kind == "bits" else [])}
    rows = [f"{names.get(n, n)} {r['predicted']:.4g}" for n, r in e["baselines"].items() if n not in apart]
    others = f" Predicted of choices without a program, within the same limit: {', '.join(rows)}." if rows else ""
    if plan.kind == "cache":
        told = f"bits per number at {e['context']:,} tokens x {e['batch']}, for {e['runtime']}."
        told += llama_build(plan) if e["runtime"] == "llama.cpp" else ""
    else:
        told = "bits per weight: the bytes of the planned matrices over their weights."
    said.append(
        f"{e['bits']:.4g} {told} "
        f"Predicted damage, the sum over all blocks: {nats(e['predicted'], e['predicted_error'])}.{others}"
    )
    said += _on_unwritten(plan)
    if plan.certificate:
        price = plan.certificate["price"] * 0.01 * plan.budget["limit"]
        more = f"With one percent more bytes for {KINDS.find(plan.kind).bytes_of}"
        said.append(f"{more} the damage is about {price:.2g} nats per token lower.")
    if ties := e["near_ties"]:
        many = (
            f"{len(ties)}{' or more' if len(ties) >= 20 else ''} single changes cannot be told from the plan within the noise"
        )
        left = plan.budget["limit"] - plan.budget["spent"]
        fit = next((tie for tie in ties if tie.get("bytes", left + 1) <= left), None)
        example = f", for example {fit['instead']} for {fit['chosen']} in {fit['block']}" if fit else ""
        said.append(f"{many}{example}.")
    said += [e["check"]["verdict"]] if "check" in e else []
    return [*said, _on_bytes(plan) + _on_mix(plan)] if plan.kind != "cache" and "fixed_bytes" in e else said


def _on_bytes(plan: Plan) -> str:
    """The bytes of the file as a sum: the matrices of the plan, the other tensors, metadata."""
    e, spent = plan.extra, int(plan.counts.sum())
    fixed, head = e["fixed_bytes"], e.get("head_bytes", 0)
    limit = "" if plan.kind != "bits" else f" (limit {plan.budget['limit']:,})"
    parts = [f"{spent:,} of the planned matrices{limit}", f"{fixed:,} of other tensors"]
    parts += [f"{'' if e.get('family') == GGUF else 'at most '}{head:,} of metadata"] if head else []
    most = "at most " if head and e.get("family") != GGUF else ""
    return f"Bytes: {' + '.join(parts)} = {most}{spent + fixed + head:,} bytes of {'the whole file' if head else 'all tensors'}"


def _on_mix(plan: Plan) -> str:
    """The mix of llama.cpp that a plan is to be compared with; continues the sentence on bytes."""
    e, mix = plan.extra, plan.extra.get("mix")
    if e.get("family") != GGUF or (mix is None and not e["baselines"]):
        return "."
    if mix is None:
        return "; no mix of llama.cpp fits in types that were measured and are allowed."
    if plan.rule == "mix":
        return f": the plan is llama.cpp's {mix}."
    row, own = e["baselines"]["mix"], e["predicted"]
    less = f" ({1 - own / row['predicted']:.0%} less)" if row["predicted"] > own > 0 else ""
    size = row["spent"] + e["fixed_bytes"] + e.get("head_bytes", 0)
    return (
        f". llama.cpp's {mix}, {size:,} bytes of the file: predicted damage {row['predicted']:.4g} nats per token, "
        f"of the plan {own:.4g}{less}."
    )


def codelengths(plan: Plan, scores: Scores, tokens: int | None = None) -> dict[str, Any]:
    r"""Return what each block's gain is worth in bits of codelength (paper, section 3): ``n zeta_k^2 / (2 ln 2)``.

    ``zeta_k^2 / 2`` is the decrease of the mean loss, in nats, that the damped quadratic model lets block k make; over n
    predicted tokens that is ``n zeta_k^2 / 2`` nats of the code of the data given the model. It is a model's promise for one
    block moving alone, up to damping and the Taylor remainder: blocks do not add up.

    Returns:
        ``{tokens, bits: {block: bits}, per_parameter: {block: bits}}``; n is :func:`tokens_of` the scores by default.

    Raises:
        ModelMismatch: Other blocks, or other scores than the plan's.
        InvalidInput: Scores that are no gains in nats, or an unknown n.
    """
    if scores.unit != "nats of average loss":
        raise InvalidInput(
            f"The unit of the scores by {scores.estimator} is {scores.unit!r}, not nats of loss, as bits of codelength need.",
            f"What is known of a plan of {plan.kind} is explained without them.",
            "Leave out --scores (in Python: scores).",
        )
    if scores.names != plan.names or plan.scores_digest not in (None, scores.digest):
        raise ModelMismatch(
            "The plan was made from other scores.", f"Its scores have the digest {plan.scores_digest}.", "Name that file."
        )
    n = tokens_of(scores) if tokens is None else tokens
    gains = scores.values(plan.hyperparameters.get("damping"))
    bits = {b.name: float(n * g / (2.0 * math.log(2.0))) for b, g in zip(scores.blocks, gains, strict=True)}
    return {"tokens": n, "bits": bits, "per_parameter": {b.name: bits[b.name] / b.numel for b in scores.blocks}}


def tokens_of(scores: Scores) -> int:
    """Tokens that the loss of the scored text counts: of conversations the answers, without prompts and padding.

    Raises:
        InvalidInput: The record does not say it.
    """
    if "tokens" in scores.extra:
        return int(scores.extra["tokens"])
    if {"samples", "length"} <= set(scores.data):
        return int(scores.data["samples"]) * (int(scores.data["length"]) - 1)
    raise InvalidInput("The scores do not say how many tokens they are over.", "", "Give it: --tokens, or tokens=.")


def _on_codelengths(found: Mapping[str, Any]) -> str:
    bits, each = found["bits"], found["per_parameter"]
    best, least = max(bits, key=lambda k: bits[k]), min(bits, key=lambda k: bits[k])
    return (
        f"Over {found['tokens']:,} predicted tokens the gain of {best} is worth {bits[best]:,.4g} bits of codelength "
        f"(n zeta^2 / (2 ln 2)), that of {least} {bits[least]:,.4g}: {each[best]:.2g} and {each[least]:.2g} bits per parameter "
        "of the block. Each is for that block moving alone; they do not add up."
    )
