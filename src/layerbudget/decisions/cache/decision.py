"""The decision cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...decision import Summary, check_no_text
from ...plan import Plan, payload_of
from ...records import Receipt
from ...scores import Scores
from ...session import Session
from ..describe import check_spent
from ..formats.base import FormatsDecision
from . import command
from .export import EXPORTS
from .formats import check_cached
from .payload import CachePayload
from .request import CacheRequest

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet


class Cache(FormatsDecision):
    """See the module."""

    Payload, exports = CachePayload, EXPORTS
    name, summary = "cache", "a format for the keys and values of every layer, in whole bytes; export names it to runtimes"
    decides, counts = "bits per number", "bytes"
    budget = "bits"
    bytes_of = "the cache"
    Request = CacheRequest

    def plan(self, session: Session) -> Plan:
        """Plan by the damage of formats of keys and values to a model."""
        return command.plan(session)

    def follow(self, session: Session, plan: Plan) -> str | None:
        """Say and return the command that gives the plan to its runtime."""
        return command.follow(session, plan)

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Return a receipt with an empty cache, see :func:`~layerbudget.decisions.cache.cache.planned_cache`."""
        from .cache import planned_cache

        check_no_text(self.name, data)
        cache = planned_cache(model, plan, **options)
        return Receipt(plan_digest=plan.digest, identity=plan.model, model=model, cache=cache)

    # --- what is said ---

    def check(self, plan: Plan) -> None:
        """Refuse formats that the runtime does not keep."""
        super().check(plan)
        check_spent(plan)
        payload = payload_of(plan, CachePayload)
        check_cached(payload.formats, payload.runtime)

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of the cache."""
        from .describe import summary_of

        return summary_of(plan)

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the damages that were predicted and measured."""
        from .describe import charts_of

        return {} if plan is None else charts_of(plan)

    def on_evaluation(self, plan: Plan) -> Sequence[str]:
        """Return a sentence where weights were decided with the cache, which figures of the weights alone leave out."""
        whole = payload_of(plan, CachePayload).whole
        if not whole or min(plan.values, default=16) >= 16:
            return ()
        cost, how = (whole.predicted, "predicted") if whole.measured is None else (whole.measured, "measured")
        return (
            "these figures have the rounded weights in them and not the rounded cache, which is in 16 bits here; "
            f"the {cost:.3g} nats per token that were {how} for the plan have both in them.",
        )


DECISION = Cache()
