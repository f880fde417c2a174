"""A plan of the experts that stay: what goes is predicted from one look, and measured with masks before anything is removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arguments import checked
from ...budget import Budget
from ...canonical import to_jsonable
from ...data.calibration import CalibrationSet
from ...errors import InfeasibleBudget, InvalidInput
from ...execution.loss import count_scored_tokens
from ...execution.processes import process_group
from ...models.blocks import check_finite, describe
from ...models.experts import ExpertLayer, check_experts, find_experts
from ...plan import Plan, PlanBlock
from ...progress import Progress
from .masks import Masked, folds_for
from .payload import ExpertPruningPayload
from .program import DRAWS, RIVAL, RULES, Fold, KeptProgram, crossed, even_and_uneven, forecast, parse_limit
from .sensitivity import expert_removals, folds_of

if TYPE_CHECKING:
    from torch import nn


@checked
def plan_expert_pruning(
    model: nn.Module,
    data: CalibrationSet,
    budget: str | float | None = None,
    *,
    damage: float | None = None,
    even: bool = False,
    rule: str = "directional",
    bytes_per_parameter: float | None = None,
    draws: int = DRAWS,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Decide which experts stay, and how many of each layer, so that the output changes least.

    Args:
        model: A model with routed experts; left as it was.
        data: Calibration tokens: the text that the model is for.
        budget: What stays at most: a share of all experts (``0.5``, ``"50%"``), ``"96 experts"``, or the bytes of the whole
            model's weights (``"12 GiB"``).
        damage: Instead: the most that is to be measured on this text, in nats per token. So few experts stay that one step
            fewer measures more.
        even: The same number in all layers, so that every runtime loads the model.
        rule: ``directional``; or the scores that others rank experts by: ``reap``, ``frequency``, ``norm``, ``random``.
        bytes_per_parameter: For budgets in bytes; those of the model as it is by default.
        draws: Draws of labels.
        batch_size: Sequences per forward.
        seed: Of the draws, and of the rule ``random``.
        progress: Called with (sequences done, sequences).

    Returns:
        A plan of kind ``expert-pruning``; ``count`` is the number of experts that a layer keeps. Its payload has their indices
        (``kept``), the damage on other text of this kind, ``predicted`` and ``measured`` with the others masked, with standard
        errors, the same at other shares (``forecast``), and what is ``measured_here``, on the text that chose.

    Raises:
        UnknownStructure: No routed experts, or experts that are called in an unknown way.
        InfeasibleBudget: Fewer experts than the routers need, or a damage that even they exceed.
        InvalidInput: Not exactly one of ``budget`` and ``damage``, an option outside its domain, or a text with fewer
            sequences in one of its halves than there are processes.
    """
    limit = _check(budget, damage, rule, draws)
    check_finite(model)
    expert_layers = find_experts(model)
    check_experts(expert_layers)
    room = None if limit is None else _room(model, expert_layers, limit, even, bytes_per_parameter)
    parts_of_text = [int(fold.sum()) for fold in folds_of(count_scored_tokens(model, data))]
    process_group().check_shares(parts_of_text or [data.samples], "parts of the text")
    settings = {"draws": draws, "seed": seed, "batch_size": batch_size}
    rules = (rule, RIVAL) if rule == "directional" else (rule,)
    removals, passes = expert_removals(model, expert_layers, data, rules=rules, progress=progress, **settings)
    program, *others = (KeptProgram(r[rule], r.get(RIVAL), even=even, exact=rule == "directional") for r in removals)
    whole_text = Masked(model, expert_layers, data, batch_size)
    if room is None:
        steps, choice = program.least(float(damage or 0.0), whole_text.measure)
        spending: dict[str, Any] = {"unit": "nats per token", "limit": damage, "spent": 0.0}
        most, price = int(program.left(steps).sum()), np.ones(len(expert_layers), dtype=np.int64)
    else:
        most, price, rest = room
        steps, choice = program.within(most, price)
        spent = int(price @ program.left(steps)) + rest
        spending = {"unit": "bytes" if limit and limit.unit == "bytes" else "experts", "limit": most + rest, "spent": spent}
    best = program.refined(steps, whole_text.measure)
    kept = best.kept(steps)
    spending |= {"spent": whole_text.measure(kept)} if limit is None else {}
    judged, parts = folds_for(model, expert_layers, data, batch_size, others)
    judged = judged or [Fold(program=program, measure=whole_text.measure, judge=whole_text.judge)]
    shares = forecast(judged)
    payload = ExpertPruningPayload(
        kept=to_jsonable(kept),
        measured_here=whole_text.measure(kept),
        crossed=len(judged) > 1,
        **crossed(judged, most, price),
        beside=even_and_uneven(judged, most, price),
        forecast=to_jsonable(shares),
        forward_passes=float(passes + sum(part.passes for part in (whole_text, *parts))),
        curve=to_jsonable(_curve(program, shares)),
    )
    blocks = [_block(e, kept[e.name]) for e in expert_layers]
    return Plan(
        kind="expert-pruning",
        rule=rule,
        model=describe(model),
        blocks=tuple(blocks),
        budget=spending,
        payload=payload,
        hyperparameters={**settings, "even": even},
        certificate={} if choice is None else choice.certificate(),
    )


def _curve(program: KeptProgram, rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The plan of every share of the forecast, whose ``values`` are the shares of the experts that stay."""
    price, experts = np.ones(len(program.removals), dtype=np.int64), np.array([r.experts for r in program.removals])
    left = (program.left(program.within(int(row["experts"]), price)[0]) / experts for row in rows)
    return [
        {"keep": row["keep"], "forecast": row["measured"], "values": shares.tolist()}
        for row, shares in zip(rows, left, strict=True)
    ]


def _check(budget: str | float | None, damage: float | None, rule: str, draws: int) -> Budget | None:
    """Refuse options outside their domains; return what may stay, where a damage does not decide it."""
    if (budget is None) == (damage is None):
        raise InvalidInput("Give either a budget or a damage.", "One of them is the limit.", "For example budget=0.5.")
    if rule not in RULES:
        raise InvalidInput(f"There is no rule {rule!r} here.", f"Rules are {', '.join(RULES)}.", "Use directional.")
    if draws < 1:
        raise InvalidInput(f"draws is {draws}.", "It must be at least 1.", f"Use draws={DRAWS}.")
    if damage is not None and not damage > 0:
        raise InvalidInput(f"damage is {damage:g}.", "It is in nats per token, above 0.", "Give damage=0.05, for example.")
    return None if budget is None else parse_limit(budget)


def _room(
    model: nn.Module, expert_layers: Sequence[ExpertLayer], limit: Budget, even: bool, bytes_per_parameter: float | None
) -> tuple[int, np.ndarray, int]:
    """The budget of the experts that stay, what one of every layer costs, and the rest: experts, or bytes."""
    counts, floors = np.array([e.count for e in expert_layers]), np.array([e.floor for e in expert_layers])
    if even:
        floors = np.maximum(floors, floors.max())
    if limit.unit != "bytes":
        price, rest = np.ones(len(expert_layers), dtype=np.int64), 0
        most = int(counts.sum() * limit.amount + 1e-9) if limit.unit == "share" else int(limit.amount)
    else:
        width = bytes_per_parameter or next(expert_layers[0].experts.parameters()).element_size()
        price = np.array([e.numel * width for e in expert_layers], dtype=np.int64)
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
