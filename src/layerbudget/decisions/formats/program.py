"""From the damage of every format to a plan of bits: the exact program, and what people do without one. No torch.

A plan gives every block one format: ``value`` is its bits per weight, everything counted, ``count`` its bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...budget import parse_budget
from ...compressors.formats import BY_MOMENTS, GGUF, SLOW, TOKENS, find_format
from ...decision import DECISIONS, check_kind
from ...errors import InfeasibleBudget, InvalidInput, UnknownUnit
from ...gguf.names import split_stacks
from ...llama_cpp.mixes import MIXES, Tensor, find_mix, needs_matrix, types_of
from ...plan import Plan, PlanBlock, payload_of
from ...records import Block, to_jsonable
from ...scores import Scores
from ...solvers.choices import Choice, choose
from .payload import WeightsPayload
from .table import CACHE, HUGE, FormatTable

_LARGEST = 16.0  # bits per weight: sixteen bits are always among the formats
_LAYER = re.compile(r"\.(\d+)\.")
CURVE = 8  # best plans of other budgets that a plan keeps
SHOWN = 400  # blocks; of larger models the curve does not keep what every block gets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The budget of a plan, in one of several ways to say it, and the formats that it may use.

    Attributes:
        bits: Mean bits per weight.
        budget: Bytes of the file.
        like: A mix of llama.cpp, whose bytes are the budget.
        forbid: Formats, or classes of them (``SLOW``), that are not used.
        keep: The format of matrices, by a regular expression that is searched in their names here or in the file.
    """

    bits: float | None = None
    budget: str | None = None
    like: str | None = None
    forbid: Sequence[str] = ()
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> Limits:
        """Return the limits that a plan was made with."""
        names = (f.name for f in dataclasses.fields(cls))
        return cls(**{name: plan.hyperparameters[name] for name in names if name in plan.hyperparameters})

    def check(self) -> None:
        """Refuse what no model can make possible."""
        budgets = [name for name in ("bits", "budget", "like") if getattr(self, name) is not None]
        if len(budgets) != 1:
            what = f"{' and '.join(budgets)} were given together" if budgets else "No budget was given"
            raise InvalidInput(f"{what}.", "Give one of bits, budget and like.", "For example bits=3.5, or budget='1.2 GiB'.")
        self.check_formats()

    def check_formats(self) -> None:
        """Refuse bits, sizes, mixes and formats that there are not."""
        check_bits(self.bits)
        if self.budget is not None:
            read_bytes(str(self.budget), "A budget", "1.2 GiB")
        if self.like is not None:
            find_mix(self.like)
        for name in (*self.forbid, *self.keep.values()):
            if name not in SLOW or name in self.keep.values():
                find_format(name)

    def record(self) -> dict[str, Any]:
        """Return what was given, for the plan."""
        return {"bits": self.bits, "budget": self.budget} | {
            name: to_jsonable(value) for name in ("like", "forbid", "keep") if (value := getattr(self, name))
        }

    def restrict(self, table: FormatTable) -> FormatTable:
        """Return the table without the formats that may not be used."""
        gone = {find_format(f, table.family).name for name in self.forbid for f in SLOW.get(name, (name,))}
        has = table.has & np.array([f not in gone for f in table.formats])
        for pattern, kind in self.keep.items():
            has[_matching(table, pattern)] &= np.array([f == find_format(kind, table.family).name for f in table.formats])
        if (empty := np.flatnonzero(~has.any(axis=1))).size:
            raise InvalidInput(
                f"{table.blocks[empty[0]].name} may not have any format that it can have.",
                f"It can have {', '.join(f for f, h in zip(table.formats, table.has[empty[0]], strict=True) if h)}.",
                "Forbid fewer, or keep it in one of those.",
            )
        return dataclasses.replace(table, damage=np.where(has, table.damage, np.inf), size=np.where(has, table.size, 0))

    def bytes(self, table: FormatTable) -> int:
        """Return the bytes that the blocks may take; a budget below the smallest plan is refused."""
        what, per = ("cache", "number") if table.family == CACHE else ("plan", "weight")
        if self.bits is not None:
            limit = int(self.bits * table.numel // 8)
        elif self.like is not None:
            limit = mix_of(table, find_mix(self.like))[0]
        else:
            limit = read_bytes(str(self.budget), "A budget", "1.2 GiB") - table.beside
        least, available = int(table.smallest.sum()), max(limit, 0)
        if limit < least:
            how = "--formats, --method weighted" if table.family == GGUF else "--formats"
            measured = f"measure the model with smaller ones ({how})"
            if table.runtime == "vllm":
                measured = "plan for a runtime that reads smaller ones (--runtime transformers or llama.cpp)"
            others = "forbid and keep less" if self.forbid or self.keep else measured
            others = "plan for a shorter context" if table.family == CACHE else others
            whole_size = f", {least + table.beside:,} with what stays as it is" if table.beside else ""
            asked = f"{available:,} bytes for {len(table.blocks)} blocks ({8 * available / table.numel:.3f} bits per {per})"
            if self.budget is not None and table.beside:
                asked = f"{max(0, limit + table.beside):,} bytes for {len(table.blocks)} blocks and what stays as it is"
            raise InfeasibleBudget(
                f"{asked} are too few.",
                f"The smallest {what} takes {least:,} bytes ({8 * least / table.numel:.4f} bits per {per}){whole_size}.",
                f"Raise the budget to that (--bits {_bits_up(least, table.numel):g}, or --budget {least + table.beside}), "
                f"or {others}.",
            )
        return limit


def _matching(table: FormatTable, pattern: str) -> list[int]:
    """Blocks with a matrix whose name, here or in the file, a regular expression finds."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InvalidInput(f"keep has {pattern!r}, no regular expression ({error}).", "", "Correct it.") from error
    stored = table.stored or [()] * len(table.blocks)
    names = [[*(m.name for m in b.modules), *in_file] for b, in_file in zip(table.blocks, stored, strict=True)]
    matches = [i for i, of_block in enumerate(names) if any(wanted.search(name) for name in of_block)]
    if not matches:
        some = ", ".join(dict.fromkeys(names[i][-1] for i in (0, -1)))
        raise InvalidInput(f"keep has {pattern!r}, which no matrix matches.", f"There are {some}, ...", "Correct it.")
    return matches


def _bits_up(size: int, numel: int) -> float:
    """Bits per weight in four digits, rounded up."""
    return math.ceil(8e4 * size / numel) / 1e4


def read_bytes(text: str, what: str, example: str) -> int:
    """Return bytes that a user wrote, such as ``"1.2 GiB"``.

    Raises:
        UnknownUnit: Another unit than bytes, or a share.
    """
    with contextlib.suppress(UnknownUnit):
        wanted = parse_budget(text, default="bytes")
        if wanted.unit == "bytes" and not wanted.relative:
            return int(wanted.amount)
    units = "Units: bytes, kB, MB, GB, TB, KiB, MiB, GiB, TiB."
    raise UnknownUnit(f"{what} of {text} is not in bytes.", units, f"Write '{example}'.")


def check_bits(bits: float | None) -> None:
    """Refuse mean bits per weight that no plan can have."""
    if bits is not None and not 0 < bits <= _LARGEST:
        why = f"Bits per weight are above 0 and at most {_LARGEST:g}, the largest format."
        raise InvalidInput(f"bits is {bits:g}.", why, "Use for example 5.5.")


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
    alike = {tuple(_mixed(table, mix)[1].values()): mix for mix in names}
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


# ---- formats without a program: one for all, first and last layers protected, llama.cpp's mixes


def uniform(table: FormatTable, limit: int) -> np.ndarray:
    """Return the largest format that fits for all blocks; what is left buys the next one for blocks spread evenly."""
    return _protect(table, np.zeros(len(table.blocks), dtype=bool), limit)


def mix_of(table: FormatTable, mix: str) -> tuple[int, np.ndarray | None]:
    """Return the bytes that the blocks take in a mix of llama.cpp, and the choice of formats, ``(K,)``.

    What it rounds beside them and no plan does, it saves: that is taken off.
    There is no choice where llama.cpp refuses the mix for want of an importance matrix, or where the table does not have its
    types. A block that can have one format only has that.
    """
    refused, types = _mixed(table, mix)
    named_blocks = zip(table.blocks, table.stored, strict=True)
    parts = [(name, m) for block, names in named_blocks for name, m in zip(names, block.modules, strict=True)]
    apart = [(types[name], m, split_stacks(m.name, m.copies)) for name, m in parts]  # gate and up are two tensors
    size = sum(n * find_format(kind, GGUF).bytes(m.d_out // n, m.d_in, m.copies) for kind, m, n in apart)
    size -= bytes_saved_elsewhere(table, mix)
    chosen, has = np.zeros(len(table.blocks), dtype=np.int64), table.has
    for i, names in enumerate(table.stored):
        kinds = {types[name] for name in names}
        allowed = [j for j in np.flatnonzero(has[i]) if {table.formats[j]} == kinds or has[i].sum() == 1]
        if not allowed:
            return size, None
        chosen[i] = allowed[0]
    return size, None if refused else chosen


def _mixed(table: FormatTable, mix: str) -> tuple[bool, dict[str, str]]:
    """Whether llama.cpp refuses a mix for want of an importance matrix, and the type of every tensor (then as with one)."""
    if table.llama is None:
        why = f"This table is for {table.family}." if table.family != GGUF else "llama.cpp's name of the model is not known."
        raise InvalidInput(f"The bytes of {mix} cannot be counted.", why, "Plan for --format gguf, or give --budget.")
    tensors: dict[str, Tensor] = {}
    for block, names in zip(table.blocks, table.stored, strict=True):
        for name, m in zip(names, block.modules, strict=True):
            copies = m.copies + (tensors[name].copies if name in tensors else 0)
            tensors[name] = Tensor(name=name, d_out=m.d_out, d_in=m.d_in, copies=copies)
    whole = [*tensors.values(), *table.llama.tensors]
    types = types_of(mix, table.llama, whole)
    refused = not table.llama.imatrix and needs_matrix(mix, whole, types)
    if refused:
        types = types_of(mix, dataclasses.replace(table.llama, imatrix=True), whole)
    return refused, {t.name: kind for t, kind in zip(whole, types, strict=True)}


def bytes_saved_elsewhere(table: FormatTable, mix: str) -> int:
    """Bytes that a mix saves of the tensors that plans leave in 16 bits."""
    tensors = [] if table.llama is None else table.llama.tensors
    types = _mixed(table, mix)[1] if tensors else {}
    forms = ((find_format("F16", GGUF), find_format(types[t.name], GGUF), t) for t in tensors)
    return sum(plain.bytes(t.d_out, t.d_in, t.copies) - form.bytes(t.d_out, t.d_in, t.copies) for plain, form, t in forms)


def types_like(table: FormatTable, mix: str) -> list[str]:
    """Return the formats of a table and those of a mix, where the table's quantiser can round to them."""
    if table.llama is None:
        return list(table.formats)
    kinds, stored_names = _mixed(table, find_mix(mix))[1], {name for names in table.stored for name in names}
    types = [find_format(kind, GGUF) for name, kind in kinds.items() if name in stored_names]
    known = (f.name for f in types if table.llama.imatrix or not f.needs_inputs)
    return list(dict.fromkeys((*table.formats, *known)))


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


def best_mix(
    table: FormatTable, limit: int, like: str | None = None, *, free: bool = True
) -> tuple[str | None, np.ndarray | None]:
    """Return the mix that a plan of so many bytes is compared with, and its formats: the one named, or the best that fits.

    One that is not ``free`` has to fit as a plan, which spares nothing beside its blocks.
    """
    best: tuple[str | None, np.ndarray | None] = (None, None)
    if table.llama is None:
        return best
    least, k = np.inf, np.arange(len(table.blocks))
    for mix in table.llama.mixes if like is None else (find_mix(like), *table.llama.mixes):
        chosen = mix_of(table, mix)[1]
        if chosen is None or table.size[k, chosen].sum() - (bytes_saved_elsewhere(table, mix) if free else 0) > limit:
            continue
        damage = float(table.damage[k, chosen].sum())
        if damage < least:
            best, least = (mix, chosen), damage
        if like is not None and mix == find_mix(like):
            break
    return best


def _ends(table: FormatTable, limit: int) -> np.ndarray:
    """A better format for embedding, head, and the first and last eighth of the layers (one at least)."""
    numbers, depth = _layers(table.blocks)
    edge = max(1, depth // 8)
    return _protect(table, np.array([n is None or n < edge or n >= depth - edge for n in numbers]), limit)


BASELINES: Mapping[str, Callable[[FormatTable, int], np.ndarray]] = {"uniform": uniform, "protect-ends": _ends}
RULES = ("exact", *BASELINES, "mix")
PEER = "llama-quantize"  # beside plans with error feedback: the mix as that writes it, with importances and no feedback


def _layers(blocks: Sequence[Block]) -> tuple[list[int | None], int]:
    """Layer of every block, None for embedding and head, and the number of layers."""
    matches = [_LAYER.search(b.modules[0].name) for b in blocks]
    numbers = [None if f is None else int(f.group(1)) for f in matches]
    return numbers, 1 + max((n for n in numbers if n is not None), default=0)


def _protect(table: FormatTable, protected: np.ndarray, limit: int) -> np.ndarray:
    """The largest format that fits for all; what is left raises the protected blocks by up to two formats, then the others."""
    size, has, k = table.size, table.has, np.arange(len(table.blocks))
    order = np.argsort(np.where(has, size, 0).sum(0) / np.maximum(has.sum(0), 1), kind="stable")
    everywhere = [_nearest(has, order, n) for n in range(len(order))]
    fits = [n for n, chosen in enumerate(everywhere) if size[k, chosen].sum() <= limit]
    base = fits[-1] if fits else 0
    chosen = everywhere[base] if fits else np.argmin(np.where(has, size, HUGE), axis=1)
    for steps, who in ((1, protected), (2, protected), (1, ~protected)):
        higher = everywhere[min(base + steps, len(everywhere) - 1)]
        chosen = _spread(size, chosen, np.where(who, higher, chosen), limit)
    return chosen


def _nearest(has: np.ndarray, order: np.ndarray, place: int) -> np.ndarray:
    """The format at a place of the order for every block, or the next larger (else smaller) one that it has, ``(K,)``."""
    ranked = [*order[place:], *order[:place][::-1]]
    return np.array([next(j for j in ranked if row[j]) for row in has])


def _spread(size: np.ndarray, low: np.ndarray, high: np.ndarray, limit: int) -> np.ndarray:
    """As many blocks as fit get the higher format, in the order of a van der Corput sequence over depth."""
    chosen, left = low.copy(), limit - int(size[np.arange(len(size)), low].sum())
    for i in sorted(range(len(low)), key=lambda i: int(f"{i:016b}"[::-1], 2)):
        more = int(size[i, high[i]] - size[i, low[i]])
        if 0 < more <= left:
            chosen[i], left = high[i], left - more
    return chosen
