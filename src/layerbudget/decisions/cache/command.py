"""``plan cache``, and the command that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...plan import Plan
from ..formats.request import on_check
from .export import EXPORT_OF

if TYPE_CHECKING:
    from ...session import Session
    from .request import CacheRequest


def plan(session: Session) -> Plan:
    """Return the plan by the damage of formats of keys and values to a model, checked as a whole."""
    from ...cost.work import WorkItem
    from .forecast import measuring
    from .plan import plan_cache

    request: CacheRequest = session.request
    model, _, data, check = session.load_checked(8 if request.checked is None else request.checked)
    draws = request.draws or 4
    parts = measuring(session.size(data), draws=draws)
    parts += [] if check is None else [WorkItem("forward", session.size(check), times=5.0)]
    session.expect(f"the cache{session.on_text(data)}{on_check(check)}", model, parts)
    options = request.given("bits", "budget", "batch", "formats", "group", "draws", "seed", "rule")
    options |= {"context": request.tokens, "runtime": request.runtime or "transformers"}
    with session.progress("measuring keys and values") as progress:
        batch = session.batch(model, data, most=1)
        return plan_cache(model, data, check, batch_size=batch, progress=progress, **options)


def follow(session: Session, plan: Plan) -> str | None:
    """Say and return the command that gives a plan to its runtime; transformers takes it in Python."""
    out, runtime = session.request.out, plan.payload.runtime
    if runtime == "transformers":
        made = f"layerbudget.apply_plan(model, layerbudget.Plan.load({out!r})).cache"
        session.say(f"Next, in Python: {made} is a cache for generate; packed=True saves its memory.")
        return None
    return session.follow("export", out, "--to", EXPORT_OF[runtime])
