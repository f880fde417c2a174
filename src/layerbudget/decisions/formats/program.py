"""From the damage of every format to a plan of bits: the exact program, and what people do without one. No torch.

A plan gives every block one format: ``value`` is its bits per weight, everything counted, ``count`` its bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...compressors.formats import BY_MOMENTS, GGUF, TOKENS
from ...decision import DECISIONS, check_kind
from ...errors import InvalidInput
from ...llama_cpp.mixes import MIXES, find_mix
from ...plan import Plan, PlanBlock, payload_of
from ...scores import Scores
from ...solvers.choices import Choice, choose
from .baselines import BASELINES, RULES, best_mix, bytes_saved_elsewhere, check_mixes, mix_of, types_in_mix
from .limits import Limits
from .payload import WeightsPayload
from .table import CACHE, FormatTable

CURVE = 8  # best plans of other budgets that a plan keeps
SHOWN = 400  # blocks; of larger models the curve does not keep what every block gets


def plan_from_table(scores: Scores, limits: Limits, rule: str = "exact") -> Plan:
    """Return a plan from damages that are known: :func:`~layerbudget.decisions.bits.plan.plan_bits` of scores."""
    if rule not in RULES:
        raise InvalidInput(f"There is no rule {rule!r} for bits.", f"There are {', '.join(RULES)}.", "Choose one of those.")
    limits.check()
    table = FormatTable.of(scores)
    limit = limits.bytes(limits.restrict(table))
    hyperparameters = {**limits.record(), "rule": rule, "method": table.method, "runtime": table.runtime}
    hyperparameters |= imatrix_of(scores)
    plan = _plan(scores, limits, limit, hyperparameters, free=rule != "mix")
    return plan.with_payload(curve=curve(limits.restrict(table)))


def curve(table: FormatTable) -> list[dict[str, Any]]:
    """Return the best plans from the smallest to the largest, evenly in the ratio of bytes; none of more than 400 blocks.

    Each has its mean ``bits`` per weight, the ``predicted`` damage, and the bits per weight of every block as ``values``.
    """
    if len(table.blocks) > SHOWN:
        return []
    low, high = int(table.smallest.sum()), int(np.where(table.has, table.size, 0).max(axis=1).sum())
    rows = []
    for limit in np.geomspace(low, high, CURVE).round():
        chosen = choose(table.damage, table.size, int(limit)).chosen
        totals, values = table.totals(chosen), bits_of(table, chosen)
        rows.append({"bits": 8 * totals["spent"] / table.numel, "predicted": totals["predicted"], "values": values})
    return rows


def bits_of(table: FormatTable, chosen: np.ndarray) -> list[float]:
    """Return the bits per weight of every block in four digits, as a page shows them."""
    size = table.size[np.arange(len(table.blocks)), chosen]
    return [float(f"{8 * s / b.numel:.4g}") for b, s in zip(table.blocks, size, strict=True)]


def imatrix_of(scores: Scores) -> dict[str, str]:
    """Return the importance matrix that damages were measured with, where it came from a file."""
    imatrix = scores.extra["formats"].get("imatrix")
    return {} if imatrix is None else {"imatrix": imatrix}


def other_plan(plan: Plan, scores: Scores, rule: str) -> Plan:
    """Return the plan that another rule makes of the same budget. The mix is llama.cpp's own: see :func:`is_allowed`."""
    limit, hyperparameters = int(plan.budget["limit"]), {**plan.hyperparameters, "rule": rule}
    return _plan(scores, Limits.of(plan), limit, hyperparameters, free=True)


def is_allowed(plan: Plan, scores: Scores) -> bool:
    """Return whether a plan keeps to the limits that it was asked for with: a mix has formats of its own."""
    table, formats = Limits.of(plan).restrict(FormatTable.of(scores)), payload_of(plan, WeightsPayload).formats
    wanted = [table.formats.index(formats[b.modules[0].name]) for b in table.blocks]
    return bool(table.has[np.arange(len(wanted)), wanted].all()) and plan.budget["spent"] <= plan.budget["limit"]


def _plan(scores: Scores, limits: Limits, limit: int, hyperparameters: Mapping[str, Any], *, free: bool) -> Plan:
    """The plan of a rule; whether the mix beside it is ``free`` of the limits of plans, and so what llama-quantize writes."""
    whole = FormatTable.of(scores)
    check_mixes(hyperparameters["rule"], limits.like, whole.family)
    table = limits.restrict(whole)
    mix, mixed = best_mix(whole if free else table, limit, limits.like, free=free)
    others = {name: make(table, limit) for name, make in BASELINES.items()} | ({} if mixed is None else {"mix": mixed})
    if hyperparameters["rule"] == "mix" and mixed is None:
        raise InvalidInput(
            f"No mix of llama.cpp can be the plan of {limit:,} bytes.",
            "It has to fit, in types that were measured and are allowed, for a GGUF file.",
            "Raise the budget, or use --rule exact.",
        )
    decision = FormatDecision.of(table, limit, others, whole)
    chosen, spent = decision.choices[hyperparameters["rule"]], decision.totals[hyperparameters["rule"]]["spent"]
    if free and mix is not None:
        decision.totals["mix"]["spent"] -= bytes_saved_elsewhere(whole, mix)
    return Plan(
        kind="bits",
        rule=hyperparameters["rule"],
        model=scores.model,
        blocks=plan_blocks(table, chosen),
        hyperparameters=dict(hyperparameters),
        budget={"unit": "bytes", "limit": limit, "spent": spent, **sizes_of(spent, table.family, table.fixed, table.head)},
        certificate=decision.certificate(hyperparameters["rule"]),
        scores_digest=scores.digest,
        data=scores.data,
        payload=DECISIONS.find("bits").Payload(
            **of_weights(table, chosen),
            **decision.record(hyperparameters["rule"]),
            **few_tokens(table, scores),
            mix=mix,
            reasons=table.reasons(chosen),
        ),
    )


def sizes_of(spent: int, family: str, fixed: int, head: int) -> dict[str, int]:
    """Return the bytes of all tensors of a file, and of the whole file where they are known exactly.

    Args:
        spent: Bytes of the planned matrices.
        family: ``gguf``, whose metadata are counted exactly, or another one.
        fixed: Bytes of other tensors.
        head: Bytes that are no tensors; 0 where they are not counted.
    """
    tensors = spent + fixed
    return {"tensors": tensors, **({"file": tensors + head} if family == GGUF and head else {})}


def few_tokens(table: FormatTable, scores: Scores) -> dict[str, Any]:
    """Return the tokens of the text and the columns of the widest matrix where they are too few to choose codes by.

    What is known of the inputs is known from this text: the codes fit the text, and other text less.
    """
    tokens = scores.data.get("tokens", scores.data.get("samples", 0) * scores.data.get("length", 0))
    columns = max((m.d_in for b in table.blocks for m in b.modules), default=0)
    few = table.method in BY_MOMENTS and 0 < tokens < TOKENS * columns
    return {"few_tokens": {"tokens": tokens, "columns": columns, "wanted": TOKENS * columns}} if few else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatDecision:
    """Choices of the exact program and of the rules without one within a budget of bytes.

    Attributes:
        choices: Formats of every block, ``(K,)``, by rule; ``exact`` is the program's.
        totals: Damage and bytes of each.
        found: The program's choice with its certificate.
    """

    table: FormatTable
    choices: Mapping[str, np.ndarray]
    totals: Mapping[str, dict[str, Any]]
    choice: Choice

    @classmethod
    def of(
        cls, table: FormatTable, limit: int, others: Mapping[str, np.ndarray], whole: FormatTable | None = None
    ) -> FormatDecision:
        """Return the decision within so many bytes, beside other rules' choices, whose formats may be any of ``whole``."""
        what = DECISIONS.find("cache" if table.family == CACHE else "bits").bytes_of
        choice = dataclasses.replace(choose(table.damage, table.size, limit), among=f" of {what}")
        choices = {"exact": choice.chosen, **others}
        whole = whole or table
        return cls(table=whole, choices=choices, totals={n: whole.totals(c) for n, c in choices.items()}, choice=choice)

    def certificate(self, rule: str) -> dict[str, Any]:
        """Return the certificate of a rule's plan: rules without a program have none."""
        return self.choice.certificate() if rule == "exact" else {}

    def record(self, rule: str) -> dict[str, Any]:
        """Return what the plan of a rule says of the decision."""
        totals = self.totals[rule]

        def baseline(name: str) -> dict[str, Any]:
            error = self.table.error_between(self.choices[rule], self.choices[name])
            return {**self.totals[name], "difference_error": error}

        return {
            "bits": 8 * totals["spent"] / self.table.numel,
            "predicted": totals["predicted"],
            "predicted_error": self.table.error_of(self.choices[rule]),
            "baselines": {n: baseline(n) for n in self.totals if n != "exact" or rule != "exact"},
            "near_ties": self.table.ties(self.choice) if rule == "exact" else [],
        }


def file_of(plan: Plan) -> dict[str, Any]:
    """Return bits per weight and bytes of the file of a plan, and the mix of llama.cpp that it is to be compared with."""
    payload = payload_of(plan, WeightsPayload)
    mix, rest = payload.baselines.get("mix", {}), payload.fixed_bytes + payload.head_bytes
    row = {"bits": payload.bits, "bytes": plan.budget["spent"] + rest, "mix": getattr(payload, "mix", None)}
    return row | {"mix_value": mix.get("predicted"), "mix_bytes": mix["spent"] + rest if mix else None}


def mixes_within(scores: Scores) -> list[str]:
    """Return the mixes of llama.cpp whose bytes a plan can have, the smallest first; of several with the same types one."""
    table = FormatTable.of(scores)
    names = MIXES if table.llama is None else table.llama.mixes
    size = {mix: mix_of(table, mix)[0] for mix in names}
    alike = {tuple(types_in_mix(table, mix)[1].values()): mix for mix in names}
    distinct = sorted(alike.values(), key=lambda mix: size[mix])
    return [mix for mix in distinct if size[mix] >= table.smallest.sum()]


def plan_blocks(table: FormatTable, chosen: np.ndarray) -> tuple[PlanBlock, ...]:
    """Return the blocks of a plan: bits per weight and bytes."""
    size = table.size[np.arange(len(table.blocks)), chosen]
    return tuple(PlanBlock.of(b, 8 * s / b.numel, s) for b, s in zip(table.blocks, size, strict=True))


def of_weights(table: FormatTable, chosen: np.ndarray) -> dict[str, Any]:
    """Return the fields of a :class:`WeightsPayload` that follow from a table and a choice, ``(K,)``."""
    fields = {name: getattr(table, name) for name in ("family", "runtime", "method")}
    return {"formats": table.formats_of(chosen), "fixed_bytes": table.fixed, "head_bytes": table.head, **fields, **table.kept}


def formats_of_plan(plan: Plan) -> Mapping[str, str]:
    """Return the format of every matrix."""
    check_kind(plan.kind, ("bits",), "gives no formats")
    formats = payload_of(plan, WeightsPayload).formats
    if set(formats) != set(plan.by_module()):
        raise InvalidInput(
            "The plan of bits does not name the format of every matrix.", "", "Make it again: layerbudget plan bits."
        )
    return dict(formats)


def formats_of_rules(table: FormatTable, limits: Limits) -> list[str]:
    """Return the formats that the rules without a program may use within the limits, by bytes alone; no damage is read."""
    allowed, k = limits.restrict(table), np.arange(len(table.blocks))
    limit = limits.bytes(allowed)
    ways = [make(allowed, limit) for make in BASELINES.values()]
    mixes = () if table.llama is None else table.llama.mixes if limits.like is None else (find_mix(limits.like),)
    for mix in mixes:
        chosen = mix_of(table, mix)[1]
        if chosen is not None and table.size[k, chosen].sum() - bytes_saved_elsewhere(table, mix) <= limit:
            ways.append(chosen)
    used = {int(j) for chosen in ways for j in chosen}
    return [name for j, name in enumerate(table.formats) if j in used]
