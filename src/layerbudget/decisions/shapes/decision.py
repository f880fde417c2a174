"""Smaller shapes: which heads, MLP channels and layers go."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Any

from ...compressors.formats import GGUF, NEMOTRON
from ...decision import Decision, Summary
from ...errors import InvalidInput, LayerbudgetError
from ...plan import Plan, payload_of
from ...records import Receipt
from ...scores import Scores
from ...session import Session
from ...solvers.inputs import spoken_amount
from ...storage.checkpoint import GGUF_FILE
from ..describe import (
    compared_with_even,
    damage_figures,
    expected_damage,
    on_budget,
    on_even,
    on_further,
    on_objective,
    on_program,
    percent,
)
from ..written import end_of_gguf
from .payload import ShapesPayload, ShapesSettings
from .program import layers_differ
from .request import ShapesRequest, ShapesWrite

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet

_SEARCH = ("passes", "strides", "trust", "draws", "damping", "threads", "seed", "resume")
_ALLOWED = ("by", "multiple", "max_removed", "depth", "even", "runtime", "compensate")


class Shapes(Decision):
    """Heads, MLP widths and layers that go: smaller matrices."""

    name, summary = "shapes", "heads, MLP widths and layers to remove: smaller matrices"
    decides, counts = "removed parameters", "removed parameters"
    harms, writes, told_by_verdict, command = True, True, True, "apply"
    Payload, Settings, Request, Write = ShapesPayload, ShapesSettings, ShapesRequest, ShapesWrite

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Make the model smaller in place, see :func:`~layerbudget.decisions.shapes.apply.apply_shapes`."""
        from .apply import apply_shapes

        if data is None:
            raise InvalidInput("Smaller shapes need calibration tokens.", "They say which units go.", "Pass data.")
        return apply_shapes(model, plan, data, **options)

    def plan(self, session: Session) -> Plan:
        """Plan by the damage of smaller shapes to a model."""
        from .forecast import shaping
        from .plan import plan_shapes

        request: ShapesRequest = session.request
        model, _, data = session.load()
        what = f"heads and widths{session.on_text(data)}"
        session.expect(what, model, shaping(session.size(data), request.passes))
        options = {"kinds": request.parts, **request.given(*_ALLOWED, *_SEARCH)}
        with session.progress("measuring heads and widths, passes") as progress:
            options["bytes_per_parameter"] = 2 if request.runtime == "llama.cpp" else session.written_bytes()
            batch = session.batch(model, data)
            plan = plan_shapes(model, data, request.budget, batch_size=batch, progress=progress, **options)
        request.written_as = _written_as(model, plan)
        return plan

    def write(self, session: Session, plan: Plan) -> dict[str, Any]:
        """Remove what the plan says, refit, recount, and save an ordinary smaller checkpoint, or what a runtime reads."""
        return _write(session, plan)

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of smaller shapes."""
        payload, budget = payload_of(plan, ShapesPayload), plan.budget
        damage, where = _damage(payload)
        first = "of the first plan, before anything was cut"
        return Summary(
            title=f"{budget['spent'] / budget['base']:.0%} fewer {budget['unit']} for",
            verdict=_verdict(plan, payload),
            expected=expected_damage(damage, where),
            sentences=(
                *on_budget(plan, _saves(plan)),
                *_on_program(plan, payload),
                *_on_damage(payload),
                *on_further(plan, kept=False),
            ),
            advice=tuple(on_further(plan, kept=False)),
            comparison=compared_with_even(
                plan, payload.beside, first, alike=not layers_differ(plan), passes=payload.forward_passes
            ),
            passes=payload.forward_passes,
            figures=damage_figures(
                payload.predicted,
                payload.measured,
                of=", on other text" if payload.crossed else "",
            ),
        )

    def show(self, session: Session, plan: Plan) -> bool:
        """Show which units go, a row for every layer, and what is saved."""
        _show(session, plan)
        return True

    def follow(self, session: Session, plan: Plan) -> str | None:
        """Say how the plan is written, or which one to make where no file holds it."""
        request: ShapesRequest = session.request
        if request.written_as is None:
            session.say("apply writes no file of this architecture whose layers differ.")
            return session.follow("plan", "shapes", request.model, "--save", request.budget, "--even", "-o", "even.json")
        words = ["--format", request.written_as] if request.written_as else []
        return session.follow("apply", request.model, str(request.out), "-o", "DIR", *words)

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the slider over the steps of the search, and the damages of each."""
        from .charts import charts_of

        return {} if plan is None else charts_of(plan)

    def runs(self, pattern: str | None = None) -> str:
        """One honest paragraph about a smaller model."""
        return (
            "What you have: heads, MLP width or whole blocks removed. What it changes: file and memory: smaller by the removed "
            "parameters; time: less, by somewhat under the removed FLOPs' share, everywhere; key-value cache: smaller by the "
            "removed key-value groups and blocks only."
        )


DECISION = Shapes()


# --- commands ---------------------------------------------------------------------------------------------------------------


def _written_as(model: Any, plan: Plan) -> str | None:
    """Return the ``--format`` by which ``apply`` writes a plan, empty where it needs none; None where none can."""
    from .nemotron import check_nemotron
    from .save import check_exportable, check_gguf

    if plan.hyperparameters.get("runtime"):
        return ""
    for name, check in (("", check_exportable), (GGUF, check_gguf), (NEMOTRON, check_nemotron)):
        with contextlib.suppress(LayerbudgetError):
            check(model, plan)
            return name
    return None


def _write(session: Session, plan: Plan) -> dict[str, Any]:
    from ...cost.work import WorkItem, treating
    from ...execution.processes import is_main
    from ..sparsity import check_room
    from .apply import apply_shapes
    from .nemotron import check_nemotron, save_nemotron
    from .save import check_exportable, check_gguf, save_gguf, save_smaller

    request: ShapesWrite = session.request
    request.refuse(("resume",), f"a plan of kind {plan.kind}")
    usual = {"llama.cpp": GGUF, "vllm": NEMOTRON if layers_differ(plan) else None}
    request.family = request.family or usual.get(plan.hyperparameters.get("runtime", ""))
    ways: dict[str | None, tuple[Any, Any]] = {GGUF: (check_gguf, save_gguf), NEMOTRON: (check_nemotron, save_nemotron)}
    check, save = ways.get(request.family, (check_exportable, save_smaller))
    session.use_text_of(plan)
    request.dtype = request.dtype or ("float32" if request.family == GGUF else None)  # sixteen bits of GGUF are not bfloat16
    model, tokenizer, data = session.load()
    check_room(model, request.out, plan=plan)  # type: ignore[arg-type]  # apply always has an output
    check(model, plan)
    text = session.size(data)
    parts = [*treating("sparsegpt", text), WorkItem("refit", text, times=0.5)]
    session.expect(f"smaller shapes{session.on_text(data)}", model, parts)
    before = sum(p.numel() for p in model.parameters())
    with session.progress("remove heads and widths, layers") as progress:
        receipt = apply_shapes(model, plan, data, batch_size=session.batch(model, data), progress=progress)
    out = request.out
    if is_main():
        out = save(model, tokenizer, out, plan=plan, record=receipt, overwrite=request.overwrite)
    after = sum(p.numel() for p in model.parameters())
    session.say(
        f"Removed {receipt.saved:,.0f} {receipt.unit} (planned {receipt.planned:,.0f}); parameters {before:,} -> {after:,} "
        f"({after / before:.3f}x, embeddings included); saved to {out}."
    )
    counted = {**receipt.counted(), "parameters_before": before, "parameters_after": after, "output": str(out)}
    return {**counted, **_end(session, plan)}


def _end(session: Session, plan: Plan) -> dict[str, Any]:
    """Say what the result is expected to cost, and the command that measures or runs it; return both as fields."""
    request: ShapesWrite = session.request
    if request.family == GGUF:
        return end_of_gguf(session, plan, DECISION.runs(), file=f"{request.out}/{GGUF_FILE}")
    serves = f"vllm serve {shlex.quote(str(request.out))} --trust-remote-code"
    return session.end(plan, DECISION.runs(), other=serves if request.family == NEMOTRON else "")


# --- what is said -----------------------------------------------------------------------------------------------------------


def _damage(payload: ShapesPayload) -> tuple[float | None, str]:
    """The damage to go by, and on which text: on other text, where parts of it judged refits to the rest."""
    if payload.crossed or payload.measured is None:
        return payload.predicted, "to be expected on other text" if payload.crossed else "predicted"
    return payload.measured, "on the text that decided"


def _verdict(plan: Plan, payload: ShapesPayload) -> str:
    budget, (damage, where) = plan.budget, _damage(payload)
    uneven, loads = layers_differ(plan), ". Every runtime loads the result"
    if payload.experts_differ:
        loads = ". Its layers keep different numbers of experts: only layerbudget.load_model loads the result"
    if uneven:
        names = ["llama.cpp (apply --format gguf)"]
        names += [] if layers_differ(plan, ("heads",)) else ["vLLM (apply --format nemotron-nas)"]
        who = f"{' and '.join(names)} load{'s' if len(names) == 1 else ''} the result"
        loads = f". Layers differ: only {who}; --even plans one for every runtime"
    cost = "unknown damage" if damage is None else f"{damage:.3g} nats per token {where}"
    share = percent(budget["spent"] / budget["base"])
    return f"{share} of the layers' {budget['unit']} go for {cost}{on_even(payload.beside, alike=not uneven)}{loads}."


def _saves(plan: Plan) -> str:
    spent, limit = (spoken_amount(float(plan.budget[name])) for name in ("spent", "limit"))
    return f"saves {spent} {plan.budget['unit']}; at least {limit} were to go"


def _on_program(plan: Plan, payload: ShapesPayload) -> list[str]:
    first, *rest = on_program(plan, on_objective(plan))
    if payload.path and plan.certificate:
        first = f"The plan was reached step by step. Of the step that chose it: {first}"
    return [first, *rest]


def _on_damage(payload: ShapesPayload) -> list[str]:
    """The damages of smaller shapes, each with the text that it was measured on."""
    if payload.measured is None:
        return []
    other = ""
    if payload.crossed:
        other = f" On other text expect {payload.predicted:.4g}: parts of the text were judged by refits to the others."
    return [f"On the text that decided, cut and refitted, it costs {payload.measured:.4g} nats per token.{other}"]


def _show(session: Session, plan: Plan) -> None:
    """Show which units go: a row for every layer, one row where all are alike."""
    payload, kinds = payload_of(plan, ShapesPayload), dict[str, None]()
    layers: dict[str, dict[str, str]] = {}
    for part in payload.shapes.values():
        kind = f"{part.kind} ({part.by})"
        kinds[kind] = None
        words = "whole layer" if part.layer in payload.dropped else f"{part.removed} of {part.units}"
        layers.setdefault(part.layer, {})[kind] = words
    rows = [(layer.rpartition(".")[2], *(cells.get(kind, "") for kind in kinds)) for layer, cells in layers.items()]
    rows = rows if session.request.table or layers_differ(plan) or payload.dropped else [("every", *rows[0][1:])]
    session.show("removed", ("layer", *kinds), rows)
    budget = plan.budget
    share = f"{budget['spent'] / budget['base']:.2%} of what the layers have ({budget['limit']:,.0f} were asked for)"
    session.say(f"The plan saves {budget['spent']:,.0f} {budget['unit']}, {share}.")
    for name, rate in payload.tokens_per_second.items():
        session.say(f"Tokens {name} per second in llama.cpp: {rate['before']:.4g} before, {rate['after']:.4g} predicted.")
