"""``layerbudget plan`` and ``apply``: every decision by one handler, which knows none of them by name."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..canonical import to_jsonable
from ..decision import DECISIONS, Decision, check_kind, decision_of
from ..errors import InvalidInput
from ..plan import Plan
from ..registry import Option
from ..requests import Request
from ..session import WriteRequest
from ..storage.folders import check_folder
from ..storage.parts import clear
from ..storage.writing import check_output
from .display import ending
from .session import Session


def run_plan(session: Session, decision: Decision) -> dict[str, Any]:
    """Plan, write the plan, show it, and end with what it comes to and the command that follows."""
    request: Any = session.request
    outputs = (request.out, getattr(request, "save_scores", None)) if request.measures or _is_main() else ()
    for path in filter(None, outputs):  # nothing else keeps processes that measure nothing together: one may be through
        check_output(path, overwrite=request.overwrite)
    if request.out is None and request.measures:
        request.out = "plan.json"
        check_output(request.out, overwrite=request.overwrite)
    plan = decision.plan(session)
    if request.out and _is_main():
        plan.save(request.out, overwrite=request.overwrite)
        if request.resume:
            clear(request.resume)
    return show_plan(session, plan)


def _is_main() -> bool:
    """Whether this process writes, of those that a launcher started together."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return True
    from ..execution.processes import is_main

    return is_main()


def show_plan(session: Session, plan: Plan) -> dict[str, Any]:
    """Show a plan, what is said of it, and the command that follows."""
    from .shown import show_plan as show

    request, decision = session.request, decision_of(plan)
    summary, parts = decision.describe(plan), decision.parts(plan)
    if plan.kind not in parts:
        decision.show(session, plan)
    for part in () if request.json else parts.values():
        show(session, part, decision_of(part).price_of(session, part))
    session.say(*(summary.sentences if request.table else summary.advice))
    if request.out:
        session.say(f"Written to {request.out}; {session.command('explain', request.out)} says what it rests on.")
    if summary.comparison is not None and (request.table or not decision.told_by_verdict):
        session.show(*summary.comparison)
    verdict = f"Verdict: {decision.verdict_of(session, plan)}"
    session.say(verdict)
    if not request.out:
        session.say("Nothing is written: -o plan.json keeps the plan.")
    follows = decision.follow(session, plan) if request.out else None
    result: dict[str, Any] = to_jsonable({**plan.written(), **ending(verdict, follows)})
    return result


@functools.cache
def write_request() -> type[WriteRequest]:
    """Return what ``apply`` can be asked: the options of all decisions, each of which reads its own."""
    requests = dict.fromkeys(d.Write for d in DECISIONS.all().values() if d.Write is not WriteRequest)
    names = dict.fromkeys(name for request in requests for name in request.options())
    fields = []
    for name in names:
        if name in WriteRequest.options():
            continue
        known = [request.options()[name] for request in requests if name in request.options()]
        fields.append((name, known[0].type, dataclasses.field(default=known[0].default, metadata=_merged(known))))

    def more_options(cls: type[Request], typed: Any) -> dict[str, Option]:
        options = {name: option for request in requests for name, option in request.more_options(typed).items()}
        return {name: option for name, option in options.items() if name not in names}

    summary = "Give a model what a plan says, and write it."
    space = {"more_options": classmethod(more_options), "__module__": __name__, "__doc__": summary}
    made = dataclasses.make_dataclass("ApplyRequest", fields, bases=(WriteRequest,), kw_only=True, namespace=space)
    return made  # type: ignore[return-value]


def _merged(fields: Sequence[dataclasses.Field[Any]]) -> dict[str, Any]:
    """Return the metadata of an option that several decisions read: the words and the choices of all."""
    choices = [f.metadata["choices"] for f in fields if f.metadata["choices"] is not None]
    merged = {**fields[0].metadata, "help": "; ".join(dict.fromkeys(str(f.metadata["help"]) for f in fields))}
    if not choices:
        return merged
    return {**merged, "choices": lambda: tuple(dict.fromkeys(n for c in choices for n in c()))}


def run_apply(session: Session) -> dict[str, Any]:
    """Apply a plan by its own decision; an option that this one does not read is refused."""
    request: Any = session.request
    plan = Plan.load(request.plan)
    decision = decision_of(plan)
    check_kind(plan.kind, [n for n, d in DECISIONS.all().items() if d.writes], "does not change a model's weights")
    unread = [name for name in request.changed() if name not in decision.Write.options()]
    request.refuse(unread, f"a plan of kind {plan.kind}")
    single = request.out.endswith(".gguf")
    if single and not request.model.endswith(".gguf"):
        what = f"{request.out} is the name of a file, and {request.model} becomes a folder."
        raise InvalidInput(what, "A GGUF file that gets a plan's types becomes one file.", "Give -o the name of a folder.")
    (check_output if single else check_folder)(request.out, overwrite=request.overwrite)
    result = decision.write(session, plan)
    if request.resume and _is_main() and Path(request.resume).exists():
        clear(request.resume)
    return result
