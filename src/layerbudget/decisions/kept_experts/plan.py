"""A plan of the experts that stay: what goes is predicted from one look, and measured with masks before anything is removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InfeasibleBudget, InvalidInput
from ...execution.divergence import Reference
from ...execution.processes import process_group
from ...models.blocks import check_finite, describe
from ...models.experts import ExpertLayer, check_experts, find_experts, masked
from ...plan import Plan, PlanBlock
from ...planning.costs import Budget, parse_budget
from ...progress import Progress
from ...records import to_jsonable
from .program import RIVAL, RULES, KeptProgram
from .sensitivity import expert_removals


def plan_kept_experts(
    model: nn.Module,
    data: CalibrationSet,
    keep: str | float | None = None,
    *,
    damage: float | None = None,
    even: bool = False,
    rule: str = "directional",
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
        draws: Draws of labels.
        batch_size: Sequences per forward.
        seed: Of the draws, and of the rule ``random``.
        progress: Called with (sequences done, sequences).

    Returns:
        A plan of kind ``kept-experts``; ``count`` is the number of experts that a layer keeps. ``extra`` has their indices
        (``kept``), the damage ``predicted``, its standard error, and ``measured`` with the others masked, and the ``forecast``.

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
    room = None if limit is None else _room(model, found, limit, even)
    given = {"draws": draws, "seed": seed, "batch_size": batch_size}
    rules = (rule, RIVAL) if rule == "directional" else (rule,)
    removals, passes = expert_removals(model, found, data, rules=rules, progress=progress, **given)
    program = KeptProgram(removals[rule], removals.get(RIVAL), even=even, exact=rule == "directional")
    reference, measured = Reference(model, data, batch_size), dict[tuple[tuple[int, ...], ...], float]()

    def measure(kept: Mapping[str, list[int]]) -> float:
        key = tuple(map(tuple, kept.values()))
        if key not in measured:
            with masked(found, kept):
                measured[key] = reference.measure()
        return measured[key]

    if room is None:
        steps, choice = program.least(float(damage or 0.0), measure)
        budget = {"unit": "nats per token", "limit": damage, "spent": 0.0}
    else:
        most, price, rest = room
        steps, choice = program.within(most, price)
        spent = int(price @ program.left(steps)) + rest
        budget = {"unit": "bytes" if limit and limit.unit == "bytes" else "experts", "limit": most + rest, "spent": spent}
    best = program.refined(steps, measure)
    kept, (predicted, error) = best.kept(steps), best.predicted(steps)
    budget |= {"spent": measure(kept)} if room is None else {}
    told = {"predicted": predicted, "predicted_error": error, "measured": measure(kept), "kept": kept}
    told |= {"forecast": program.forecast(measure), "forward_passes": passes + 1 + len(measured)}
    blocks = [_block(e, kept[e.name]) for e in found]
    return Plan(
        kind="kept-experts", rule=rule, model=describe(model), blocks=tuple(blocks), budget=budget, extra=to_jsonable(told),
        hyperparameters={**given, "even": even}, certificate={} if choice is None else choice.certificate(),
    )  # fmt: skip


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
        f"keep is {keep!r}.", "It is a share of all experts above 0 and at most 1, experts, or bytes of the whole model.",
        "Write 0.5, '96 experts' or '12 GiB'.",
    )  # fmt: skip


def _room(model: nn.Module, found: Sequence[ExpertLayer], limit: Budget, even: bool) -> tuple[int, np.ndarray, int]:
    """The budget of the experts that stay, what one of every layer costs, and the rest: experts, or bytes."""
    counts, floors = np.array([e.count for e in found]), np.array([e.floor for e in found])
    if even:
        floors = np.maximum(floors, floors.max())
    if limit.unit != "bytes":
        price, rest = np.ones(len(found), dtype=np.int64), 0
        most = int(counts.sum() * limit.amount + 1e-9) if limit.unit == "share" else int(limit.amount)
    else:
        width = next(found[0].experts.parameters()).element_size()
        price = np.array([e.numel * width for e in found], dtype=np.int64)
        rest = sum(p.numel() * p.element_size() for p in model.parameters()) - int(price @ counts)
        most = int(limit.amount) - rest
    least = int(price @ floors)
    if most < least:
        word = "experts" if limit.unit != "bytes" else "bytes"
        raise InfeasibleBudget(
            f"{most + rest:,} {word} are fewer than the routers need.", f"At least {least + rest:,} {word}.", "Keep more."
        )
    return min(most, int(price @ counts)), price, rest


def _block(layer: ExpertLayer, kept: Sequence[int]) -> PlanBlock:
    share = len(kept) / layer.count
    return PlanBlock(name=layer.name, value=share, count=len(kept), numel=layer.count * layer.numel, modules=layer.modules)
