"""A grid of budgets and exponents, solved in advance, for a page without a server: its slider only looks up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..decisions.experts.plan import plan_experts
from ..decisions.ranks.plan import plan_ranks
from ..decisions.sparsity.plan import default_cap, plan_sparsity
from ..errors import LayerbudgetError
from ..scores import Scores

EXPONENTS = (0.0, 0.5, 1.0, 2.0)
SPARSITIES = tuple(round(0.05 * i, 2) for i in range(1, 18))
RANKS = (1, 2, 4, 8, 16, 32, 64)
PER_BLOCK = (1, 2, 3, 4, 5, 6, 8, 10)
LARGEST = 400  # blocks; beyond them a grid would make the page heavy


def solved_grid(scores: Scores, kind: str) -> dict[str, Any] | None:
    """Plans for a grid of budgets and exponents.

    Args:
        scores: The scores.
        kind: ``sparsity``, ``ranks`` or ``experts``.

    Returns:
        ``{kind, budgets, exponents, unit, plans: [[{values, cap, uniform, gain}]]}`` by exponent and budget, or None where
        these scores make no such plan.
    """
    if kind not in ("sparsity", "ranks", "experts") or not 1 < len(scores.blocks) <= LARGEST:
        return None
    by_rank = kind == "ranks" and "increments" in scores.extra
    exponents: Sequence[float] = () if by_rank else EXPONENTS
    found: dict[float, list[dict[str, Any]]] = {}
    for budget in {"sparsity": SPARSITIES, "ranks": RANKS, "experts": PER_BLOCK}[kind]:
        row = []
        for exponent in exponents or (None,):
            try:
                row.append(_one(scores, kind, budget, exponent))
            except LayerbudgetError:  # beyond the ranks that were measured, or below the floors: no place on the slider
                break
        if len(row) == len(exponents or (None,)):
            found[budget] = row
    if len(found) < 2:
        return None
    unit = {"sparsity": "sparsity", "ranks": "mean rank", "experts": "experts per block"}[kind]
    plans = [list(column) for column in zip(*found.values(), strict=True)]
    return {"kind": kind, "budgets": list(found), "exponents": list(exponents), "unit": unit, "plans": plans}


def _one(scores: Scores, kind: str, budget: float, exponent: float | None) -> dict[str, Any]:
    given: dict[str, Any] = {} if exponent is None else {"exponent": exponent}
    if kind == "sparsity":
        plan, cap = plan_sparsity(scores, sparsity=budget, **given), default_cap(budget)
        values = plan.values
    else:
        total = int(budget * len(scores.blocks))
        plan = plan_ranks(scores, mean_rank=budget, **given) if kind == "ranks" else plan_experts(scores, total=total, **given)
        values, cap = plan.counts.astype(float), None
    return {
        "values": [float(f"{v:.4g}") for v in values], "cap": cap, "uniform": budget,
        "share": plan.extra.get("uniform_share"), "status": plan.certificate.get("status"),
    }  # fmt: skip
