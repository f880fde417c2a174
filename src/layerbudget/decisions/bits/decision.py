"""The decision bits: a format for every weight matrix, in whole bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...decision import Summary
from ...errors import InvalidInput
from ...plan import Plan, payload_of
from ...records import Receipt
from ...scores import Scores
from ...session import Session
from ..describe import check_spent
from ..formats.base import FormatsDecision, check_weights
from ..formats.reasons import reasons
from . import command
from .export import EXPORTS
from .payload import BitsPayload
from .request import BitsRequest, BitsWrite

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet


class Bits(FormatsDecision):
    """See the module."""

    Payload, exports = BitsPayload, EXPORTS
    name, summary = "bits", "a format for every weight matrix, in whole bytes"
    decides, counts = "bits per weight", "bytes"
    budget = "bits"
    swept = True
    command = "apply"
    bytes_of = "the planned matrices"
    writes, Request, Write = True, BitsRequest, BitsWrite

    def plan(self, session: Session) -> Plan:
        """Plan by the damage of formats to a model, or from what was measured before."""
        return command.plan(session)

    def write(self, session: Session, plan: Plan) -> dict[str, Any]:
        """Round, write an ordinary checkpoint or a GGUF file, and recount its bytes."""
        return command.write(session, plan, plan)

    def follow(self, session: Session, plan: Plan) -> str | None:
        """Say and return the command that writes the file, or gives the plan to the tool that does."""
        return command.follow(session, plan, plan)

    def planner(self) -> Callable[..., Plan]:
        """Return :func:`~layerbudget.decisions.bits.plan.plan_bits`."""
        from .plan import plan_bits

        return plan_bits

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Round the model in place, see :func:`~layerbudget.decisions.bits.apply.apply_bits`."""
        from .apply import apply_bits

        return apply_bits(model, plan, data, **options)

    # --- what is said ---

    def check(self, plan: Plan) -> None:
        """Refuse formats that there are not, that the runtime does not read, or that are not of the bytes of their block."""
        super().check(plan)
        check_spent(plan)
        check_weights(plan, plan.blocks)

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of bits."""
        from .describe import summary_of

        return summary_of(plan)

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the slider over budgets, and the damages that were predicted and measured."""
        from .describe import charts_of

        return {} if plan is None else charts_of(plan)

    def matrices(self, plan: Plan, scores: Scores | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the format of every block and why it has it, see :func:`~layerbudget.decisions.formats.reasons.reasons`."""
        if scores is not None and "formats" not in scores.extra:
            what = f"These scores, by {scores.estimator}, hold no damages of formats."
            raise InvalidInput(what, "", "Leave out --scores (in Python: scores).")
        return reasons(plan, scores)

    def show(self, session: Session, plan: Plan) -> bool:
        """Show what is counted and why every block has its format, where a table is asked for and the plan says it."""
        from .shown import show_terms

        if not session.request.table:
            return False
        show_terms(session, plan)
        if payload_of(plan, BitsPayload).reasons is None:
            return False
        self.show_matrices(session, plan, self.matrices(plan))
        return True

    def show_sweep(
        self, session: Session, rows: Sequence[Mapping[str, Any]], unsolved: Sequence[str], options: Mapping[str, Any]
    ) -> bool:
        """Show plans by size of the file, beside the mixes of llama.cpp."""
        from .sizes import show_sizes

        show_sizes(session, rows, unsolved, options)
        return True

    def show_matrices(self, session: Session, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the reasons for every format; the formats alone where no reasons are known."""
        from .shown import show_reasons

        if any("damage" not in row for row in rows):
            super().show_matrices(session, plan, rows)
        else:
            show_reasons(session, plan, rows)

    def budgets(self, scores: Scores) -> Sequence[float | str]:
        """Return the mixes of llama.cpp whose bytes a plan can have."""
        from ..formats.program import mixes_within

        return mixes_within(scores)

    def budget_option(self, budget: float | str) -> dict[str, Any]:
        """Return ``{bits: ...}``, or ``{like: ...}`` of a mix."""
        from ...llama_cpp.mixes import find_mix

        return {"like": find_mix(budget)} if isinstance(budget, str) else {"bits": budget}

    def swept_row(self, plan: Plan) -> dict[str, Any]:
        """Return bits and bytes of the file, and the mix of llama.cpp to compare with."""
        from ..formats.program import file_of

        return file_of(plan)


DECISION = Bits()
