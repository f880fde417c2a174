"""``plan memory``, ``apply`` of such a plan, and the commands that follow both."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ...budget import rounded_up, unit_of
from ...compressors.formats import RUNTIMES, find_runtime
from ...plan import Plan
from ..bits import command as bits
from ..files import need_scores
from ..formats.request import need_samples, on_check
from .fitted import Fitted
from .parts import parts_of
from .program import MemoryLimits, measured_for, share_of

if TYPE_CHECKING:
    from ...session import Session
    from .request import MemoryRequest

_MEASURED = (  # of a model
    *("formats", "by", "group", "method", "unwritten", "draws", "rows", "whole", "imatrix"),
    *("seed", "save_scores", "resume", "utilization"),
)


def plan(session: Session) -> Plan:
    """Return the plan by the damage to a model, checked as a whole, or from what was measured before."""
    return _by_damage(session) if session.request.measures else _from_scores(session)


def _from_scores(session: Session) -> Plan:
    request: MemoryRequest = session.request
    scores = need_scores(request.source, "plan memory MODEL --memory SIZE --context TOKENS --save-scores FILE")
    request.check_measured(scores)
    terms = MemoryLimits(**request.terms, utilization=share_of(measured_for(scores), request.utilization))
    terms.check(request.rule)
    return Fitted.of(scores, terms).plan(request.rule)


def _by_damage(session: Session) -> Plan:
    from ..bits import choosing
    from ..cache import measuring
    from .plan import plan_memory

    request: MemoryRequest = session.request
    runtime = request.target
    MemoryLimits(**request.terms, utilization=share_of(runtime, request.utilization)).check(request.rule)  # before it is loaded
    need_samples(session, request.method)
    model, tokenizer, data, check = session.load_checked(8 if request.checked is None else request.checked)
    text, draws = session.size(data), request.draws or 4
    checked = None if check is None else session.size(check)
    counted = bits.counted_of(request, find_runtime(runtime, RUNTIMES[runtime].family), model)
    parts = choosing(text, checked, draws=draws, **counted)
    parts += measuring(text, draws=draws)
    session.expect(f"weights and cache{session.on_text(data)}{on_check(check)}", model, parts)
    options = {**request.given(*_MEASURED), **request.terms, "runtime": runtime, "rule": request.rule}
    with session.progress("measuring formats") as progress:
        options |= {"tokenizer": tokenizer, "batch_size": session.batch(model, data), "progress": progress}
        result = plan_memory(model, data, check, overwrite=request.overwrite, **options)
    session.facts["no file"] = request.unwritten == "plan" and bits.has_no_file(model, parts_of(result)["bits"])
    return result


def show_curve(session: Session, plan: Plan) -> None:
    """Show the best plans of several memories."""
    unit, name = unit_of(plan.budget["limit"])
    head = ("memory", "weights", "cache", "bits per weight", "per cached number", "predicted KL", f"KL less per {name}")
    rows = []
    *_, last = plan.payload.curve
    for row in plan.payload.curve:
        saves = "-" if row is last else row["price"] * unit / 2**30
        sizes = [rounded_up(row["memory"] / unit), *(f"{row[n] / unit:.2f}" for n in ("weights_bytes", "cache_bytes"))]
        rows.append((*sizes, row["weights_bits"], row["cache_bits"], row["predicted"], saves))
    both = "; of the card, and what lies with the processor alone" if plan.payload.placement else ""
    title = f"best plans over memory ({name}{both}) at {plan.payload.context} tokens x {plan.payload.batch}"
    more = f"last column: by how much each further {name} lowers the predicted KL, up to the next row"
    session.show(f"{title}; {more}", head, rows)


def write(session: Session, plan: Plan) -> dict[str, Any]:
    """Write the weights of a plan, and beside them the plan of the cache."""
    from ..cache import llama_cache
    from .plan import files_of

    parts, request = parts_of(plan), session.request
    types = ""
    if plan.payload.runtime == "llama.cpp":
        types = llama_cache(parts["cache"]).partition(" --ctx-size")[0]
    placement = plan.payload.placement
    types += f" {placement.options}" if placement else ""
    result = bits.write(session, plan, parts["bits"], text_files=files_of(plan), cache=types)
    if request.out.endswith(".gguf"):
        session.say(f"The cache: layerbudget export {shlex.quote(request.plan)} --to llama-cache")
    return result


def follow(session: Session, plan: Plan) -> str | None:
    """Say and return the command that writes the files of a plan, or gives its weights to the tool that does."""
    return bits.follow(session, plan, parts_of(plan)["bits"])
