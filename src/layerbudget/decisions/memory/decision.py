"""The decision memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...decision import Summary
from ...errors import CorruptFile
from ...plan import Plan, payload_of
from ...records import Receipt
from ...scores import Scores
from ...session import Session
from ..bits import BitsWrite
from ..cache import check_cached
from ..formats.base import FormatsDecision, check_weights
from . import command
from .payload import MemoryPayload
from .request import MemoryRequest

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet


class Memory(FormatsDecision):
    """See the module."""

    summary = (
        "formats of the weights and of the cache under one memory; apply writes the weights, and the cache's plan beside them"
    )
    Payload = MemoryPayload
    name, decides, counts = "memory", "bits per number", "bytes"
    budget = "memory"
    command = "apply"
    bytes_of = "file, cache and buffers"
    writes, Request, Write = True, MemoryRequest, BitsWrite

    def plan(self, session: Session) -> Plan:
        """Plan by the damage to a model, or from what was measured before."""
        return command.plan(session)

    def show(self, session: Session, plan: Plan) -> bool:
        """Show the best plans of several memories, and let both parts be drawn below."""
        command.show_curve(session, plan)
        return False

    def write(self, session: Session, plan: Plan) -> dict[str, Any]:
        """Write the weights, and beside them the plan of the cache."""
        return command.write(session, plan)

    def follow(self, session: Session, plan: Plan) -> str | None:
        """Say and return the command that writes the files, or gives the plan of the weights to the tool that does."""
        return command.follow(session, plan)

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Round the model in place; the receipt has a cache, see :func:`~layerbudget.decisions.memory.plan.apply_memory`."""
        from .plan import apply_memory

        return apply_memory(model, plan, data, **options)

    # --- what is said ---

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not say what weights and cache get, or gives them formats that cannot be."""
        super().check(plan)
        payload = payload_of(plan, MemoryPayload)
        check_weights(plan, [b for b in plan.blocks if b.modules[0] not in payload.cache_formats])
        check_cached({n: form for n, form in payload.formats.items() if n in payload.cache_formats}, payload.runtime)
        parts = payload.parts
        if any(not {"bytes", "bits", "predicted"} <= set(parts.get(name, {})) for name in ("weights", "cache")):
            what = "This plan of memory does not say bytes, bits and damage of the weights and of the cache."
            raise CorruptFile(what, "", "Make the plan again.")

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of memory."""
        from .describe import summary_of

        return summary_of(plan)

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the memory by parts, and the slider over memories."""
        from .describe import charts_of

        return {} if plan is None else charts_of(plan)

    def parts(self, plan: Plan) -> dict[str, Plan]:
        """Return the plan of bits and the plan of the cache."""
        from .parts import parts_of

        return parts_of(plan)


DECISION = Memory()
