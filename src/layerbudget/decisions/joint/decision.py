"""Joint: one byte budget for pruning and adapting; ``split_joint`` gives the two plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...decision import Decision, Summary
from ...errors import CorruptFile
from ...plan import Plan, payload_of
from ...session import Session
from ..capacity import check_ranks
from ..describe import (
    check_shares,
    expected_damage,
    on_budget,
    on_flat_scores,
    on_further,
    on_objective,
    on_program,
    on_rounding,
    percent,
)
from ..files import need_scores
from .payload import JointPayload
from .request import JointRequest

#: Options of the planner.
_NUMBERS = (
    "budget",
    "capacity",
    "expert_rank",
    "min_capacity",
    "max_capacity",
    "max_sparsity",
    "exponent",
    "exponent_on",
    "alpha",
    "gamma",
    "eta",
    "spend",
    "damping",
    "bytes_per_parameter",
)


class Joint(Decision):
    """One byte budget for pruning and adapting."""

    name, summary = "joint", "one byte budget for pruning and adapting; layerbudget.split_joint gives the two plans"
    decides, counts = "sparsity", "pruned parameters"
    harms = True
    Payload, Request = JointPayload, JointRequest

    def check(self, plan: Plan) -> None:
        """Refuse shares of zeros that are none or contradict the counts, and adapters that the blocks cannot have."""
        check_shares(plan)
        capacity = payload_of(plan, JointPayload).capacity
        missing = [n for n in plan.names if n not in capacity.values or n not in capacity.counts]
        if missing:
            raise CorruptFile(f"This joint plan gives {missing[0]} no {capacity.kind}.", "", "Make the plan again.")
        if capacity.kind == "ranks":
            check_ranks(plan.blocks, [capacity.counts[n] for n in plan.names])

    def plan(self, session: Session) -> Plan:
        """Plan zeros and adapters from scores."""
        from .plan import plan_joint

        request: JointRequest = session.request
        return plan_joint(need_scores(request.source), **request.given(*_NUMBERS))

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a joint plan."""
        payload, c = payload_of(plan, JointPayload), plan.certificate
        slack = [c["message"]] if "multiplier" in c and c["status"] != "binding" else []
        flat = on_flat_scores(plan, None)
        return Summary(
            title="A joint plan for",
            verdict=_verdict(plan, payload),
            expected=expected_damage(None),
            sentences=(
                *on_budget(plan),
                *on_program(plan, on_objective(plan)),
                *on_rounding(plan, payload.rounding),
                *flat,
                *on_further(plan),
            ),
            advice=(*slack, *flat, *on_further(plan)),
        )

    def column(self, plan: Plan) -> tuple[str, Sequence[Any]] | None:
        """Return the ranks or experts of every block."""
        counts = payload_of(plan, JointPayload).capacity.counts
        return "capacity", [counts[name] for name in plan.names]


DECISION = Joint()


def _verdict(plan: Plan, payload: JointPayload) -> str:
    counts = list(payload.capacity.counts.values())
    added = f"{min(counts)} to {max(counts)} {payload.capacity.kind} a block"
    return (
        f"{percent(plan.sparsity)} of the weights become zero and pay for {added}: {plan.budget['spent']:,.0f} bytes in all. "
        "Scores do not say what uniform would cost: train and evaluate both."
    )
