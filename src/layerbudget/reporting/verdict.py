"""Sentences on a plan in a sentence or a table: its decision says it, in :meth:`~layerbudget.decision.Decision.describe`."""

from __future__ import annotations

from ..decision import Table, decision_of
from ..plan import Plan


def verdict(plan: Plan) -> str:
    """Return one sentence: what a plan decides, its damage or gain beside uniform, and the passes that it took."""
    return f"Verdict: {decision_of(plan).describe(plan).verdict}"


def expected(plan: Plan) -> str:
    """Return one sentence on the damage of a plan that was applied: measured or predicted when it was made."""
    return decision_of(plan).describe(plan).expected


def comparison_table(plan: Plan) -> Table | None:
    """Return the damage of a plan beside that of other choices, as a table; None where nothing else is known."""
    return decision_of(plan).describe(plan).comparison


def passes_of(plan: Plan) -> float | None:
    """Return the forward equivalents that planning took; None of scores that were there before."""
    return decision_of(plan).describe(plan).passes
