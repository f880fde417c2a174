"""A plan of the experts that stay: what goes is predicted from one look, and measured with masks before anything is removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...compressors.formats import GGUF
from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InfeasibleBudget, InvalidInput, ModelMismatch
from ...execution.processes import process_group
from ...models.blocks import check_finite, describe
from ...models.experts import ExpertLayer, check_experts, find_experts
from ...plan import Plan, PlanBlock
from ...planning.costs import Budget, parse_budget
from ...progress import Progress
from ...records import to_jsonable
from ...scores import Scores
from .masks import Masked, folds_for
from .program import RIVAL, RULES, Fold, KeptProgram, beside, crossed, forecast
from .sensitivity import expert_removals
from .typed import Rounding, TypedProgram

if TYPE_CHECKING:
    from torch import nn


def plan_kept_experts(
    model: nn.Module,
    data: CalibrationSet,
    keep: str | float | None = None,
    *,
    damage: float | None = None,
    even: bool = False,
    rule: str = "directional",
    types: Scores | None = None,
    bytes_per_parameter: float | None = None,
    draws: int = 4,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Decide which experts stay, and how many of each layer, so that the output changes least.

    Args:
        model: A model with routed experts; left as it was.
        data: Calibration tokens: the text that the model is for.
        keep: What stays at most: a share of all experts (``0.5``), ``"96 experts"``, or the bytes of the whole model's weights
            (``"12 GiB"``).
        damage: Instead: the most that is to be measured on this text, in nats per token; as few experts stay as that allows.
        even: The same number in all layers, so that every runtime loads the model.
        rule: ``directional``; or the scores that others rank experts by: ``reap``, ``frequency``, ``norm``, ``random``.
        types: A record of what every format of every matrix costs this model (``save_scores`` of
            :func:`~layerbudget.decisions.bits.plan.plan_bits`). Then ``keep`` is the bytes of the whole file, and one program
            decides how many experts stay and in which types, together with the types of all other matrices.
        bytes_per_parameter: For budgets in bytes; those of the model as it is by default.
        draws: Draws of labels.
        batch_size: Sequences per forward.
        seed: Of the draws, and of the rule ``random``.
        progress: Called with (sequences done, sequences).

    Returns:
        A plan of kind ``kept-experts``; ``count`` is the number of experts that a layer keeps. ``extra`` has their indices
        (``kept``), the damage on other text of this kind, ``predicted`` and ``measured`` with the others masked, with standard
        errors, the same at other shares (``forecast``), and what is ``measured_here``, on the text that chose; with types
        also ``typed``: the types, and the damage of removal and of rounding.

    Raises:
        UnknownStructure: No routed experts, or experts that are called in an unknown way.
        InfeasibleBudget: Fewer experts than the routers need, or a damage that even they exceed.
        InvalidInput: Not exactly one of ``keep`` and ``damage``, or an option outside its domain.
        CoverageError: Several processes.
    """
    limit = _check(keep, damage, rule, draws)
    check_finite(model)
    found = find_experts(model)
    check_experts(found)
    rounding = None if types is None else _rounding(model, found, limit, rule, types, even)
    room = None if limit is None or rounding is not None else _room(model, found, limit, even, bytes_per_parameter)
    given = {"draws": draws, "seed": seed, "batch_size": batch_size}
    rules = (rule, RIVAL) if rule == "directional" else (rule,)
    removals, passes = expert_removals(model, found, data, rules=rules, progress=progress, **given)
    way: dict[str, Any] = {"even": even, "exact": rule == "directional"}
    if rounding is not None:
        way = {"even": even, "rounding": rounding}
    program, *others = ((KeptProgram if rounding is None else TypedProgram)(r[rule], r.get(RIVAL), **way) for r in removals)
    own, told = Masked(model, found, data, batch_size), dict[str, Any]()
    if isinstance(program, TypedProgram) and limit is not None:
        most, price = int(limit.amount), np.ones(len(found), dtype=np.int64)
        steps, choice = program.within(most, price)
        told["typed"] = program.told(most)
        budget = {"unit": "bytes", "limit": most, "spent": told["typed"]["bytes"]}
    elif room is None:
        steps, choice = program.least(float(damage or 0.0), own.measure)
        budget = {"unit": "nats per token", "limit": damage, "spent": 0.0}
        most, price = int(program.left(steps).sum()), np.ones(len(found), dtype=np.int64)
    else:
        most, price, rest = room
        steps, choice = program.within(most, price)
        spent = int(price @ program.left(steps)) + rest
        budget = {"unit": "bytes" if limit and limit.unit == "bytes" else "experts", "limit": most + rest, "spent": spent}
    best = program.refined(steps, own.measure)
    kept = best.kept(steps)
    budget |= {"spent": own.measure(kept)} if limit is None else {}
    folds, parts = folds_for(model, found, data, batch_size, others)
    folds = folds or [Fold(program=program, measure=own.measure, judge=own.judge)]
    told |= {"kept": kept, "measured_here": own.measure(kept), "crossed": len(folds) > 1, **crossed(folds, most, price)}
    told |= {
        "beside": None if "typed" in told else beside(folds, most, price),
        "forecast": forecast([_plain(fold) for fold in folds]),
        "forward_passes": passes + sum(part.passes for part in (own, *parts)),
    }
    told["curve"] = _curve(program, told["forecast"])
    blocks = [_block(e, kept[e.name]) for e in found]
    return Plan(
        kind="kept-experts",
        rule=rule,
        model=describe(model),
        blocks=tuple(blocks),
        budget=budget,
        extra=to_jsonable(told),
        hyperparameters={**given, "even": even},
        certificate={} if choice is None else choice.certificate(),
    )


def _curve(program: KeptProgram, rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The plan of every share of the forecast, whose ``values`` are the shares of the experts that stay; none with types."""
    if isinstance(program, TypedProgram):
        return []
    price, experts = np.ones(len(program.removals), dtype=np.int64), np.array([r.experts for r in program.removals])
    left = (program.left(program.within(int(row["experts"]), price)[0]) / experts for row in rows)
    return [
        {"keep": row["keep"], "forecast": row["measured"], "values": own.tolist()} for row, own in zip(rows, left, strict=True)
    ]


def _plain(fold: Fold) -> Fold:
    """A fold whose program counts experts and knows no types."""
    program = fold.program
    if not isinstance(program, TypedProgram):
        return fold
    return dataclasses.replace(fold, program=KeptProgram(program.removals, program.rivals, even=program.even))


def _rounding(
    model: nn.Module, found: Sequence[ExpertLayer], limit: Budget | None, rule: str, types: Scores, even: bool
) -> Rounding:
    """Costs of the types of all matrices; refused is what cannot be planned with them."""
    if limit is None or limit.unit != "bytes" or rule != "directional":
        raise InvalidInput(
            "With types the budget is the bytes of the whole file, and damages decide.",
            "",
            "Write keep='6 GiB', rule=directional.",
        )
    if types.extra.get("choices", {}).get("family") == GGUF and not even:
        raise InvalidInput(
            "A GGUF file has one number of experts for all layers.", "Types are planned for such a file.", "Plan with --even."
        )
    if types.model.get("digest") != describe(model)["digest"]:
        raise ModelMismatch(
            "The types were measured on another model.", "", "Measure them on this one: plan bits --save-scores."
        )
    exact = 4 if types.extra["choices"]["family"] == GGUF else 2
    beside = [(e.numel - sum(p.numel() for p in e.experts.parameters()) // e.count) * exact for e in found]
    rounding = Rounding(types, {e.name: e.modules for e in found}, beside)
    least = rounding.least([e.count for e in found], [e.floor for e in found])
    if limit.amount < least:
        raise InfeasibleBudget(
            f"A file of {int(limit.amount):,} bytes is too small.", f"The smallest takes {least:,} bytes.", "Allow more bytes."
        )
    return rounding


def _check(keep: str | float | None, damage: float | None, rule: str, draws: int) -> Budget | None:
    """Refuse options outside their domains; return what may stay, where a damage does not decide it."""
    if (keep is None) == (damage is None):
        raise InvalidInput("Give either keep or damage.", "", "For example keep=0.5.")
    if rule not in RULES:
        raise InvalidInput(f"There is no rule {rule!r} here.", f"Rules are {', '.join(RULES)}.", "Use directional.")
    if draws < 1 or (damage is not None and not damage > 0):
        raise InvalidInput(f"draws is {draws}, damage {damage}.", "Draws are 1 or more, a damage is above 0.", "Use draws=4.")
    if process_group().size > 1:
        raise CoverageError("Experts are chosen in one process.", "", "Use one.")
    if keep is None:
        return None
    limit = parse_budget(keep, default="share")
    if limit.unit == "share" and 0 < limit.amount <= 1:
        return limit
    if limit.unit in ("experts", "bytes") and not limit.relative and limit.amount >= 1:
        return limit
    raise InvalidInput(
        f"keep is {keep!r}.",
        "It is a share of all experts, above 0 and at most 1; a number of experts; or the bytes of the whole model.",
        "Write 0.5, '96 experts' or '12 GiB'.",
    )


def _room(
    model: nn.Module, found: Sequence[ExpertLayer], limit: Budget, even: bool, bytes_per_parameter: float | None
) -> tuple[int, np.ndarray, int]:
    """The budget of the experts that stay, what one of every layer costs, and the rest: experts, or bytes."""
    counts, floors = np.array([e.count for e in found]), np.array([e.floor for e in found])
    if even:
        floors = np.maximum(floors, floors.max())
    if limit.unit != "bytes":
        price, rest = np.ones(len(found), dtype=np.int64), 0
        most = int(counts.sum() * limit.amount + 1e-9) if limit.unit == "share" else int(limit.amount)
    else:
        width = bytes_per_parameter or next(found[0].experts.parameters()).element_size()
        price = np.array([e.numel * width for e in found], dtype=np.int64)
        whole = sum(p.numel() * (bytes_per_parameter or p.element_size()) for p in model.parameters())
        rest = int(whole) - int(price @ counts)
        most = int(limit.amount) - rest
    least, whole = int(price @ floors), int(price @ counts)
    if limit.unit == "experts" and most > whole:
        raise InfeasibleBudget(
            f"{most:,} experts are to stay, and the model has {whole:,}.",
            f"Between {least:,} and {whole:,} can stay.",
            "Keep fewer.",
        )
    if most < least:
        word = "experts" if limit.unit != "bytes" else "bytes"
        raise InfeasibleBudget(
            f"{most + rest:,} {word} are fewer than the routers need.", f"At least {least + rest:,} {word}.", "Keep more."
        )
    return min(most, whole), price, rest


def _block(layer: ExpertLayer, kept: Sequence[int]) -> PlanBlock:
    share = len(kept) / layer.count
    return PlanBlock(name=layer.name, value=share, count=len(kept), numel=layer.count * layer.numel, modules=layer.modules)
