"""Sparsity: how many weights of every block become zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...decision import Decision, Summary
from ...errors import InvalidInput
from ...plan import Plan, PlanBlock, payload_of
from ...records import Receipt, check_fraction
from ...registry import options_of
from ...requests import READING
from ...scores import Scores
from ...session import Session
from ...verdicts import less_than
from ..describe import (
    check_shares,
    check_spent,
    comparison,
    damage_figures,
    expected_damage,
    is_uniform,
    on_budget,
    on_flat_scores,
    on_further,
    on_price,
    on_program,
    on_published,
    percent,
)
from ..files import load_scores, read_curves, read_fixed
from .export import EXPORTS
from .payload import SparsityPayload
from .request import SparsityRequest, SparsityWrite

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet

RUNS = "What you have: {}. What it changes: file and memory: unchanged; time: unchanged {}."  #: What zeros do for speed.


class Sparsity(Decision):
    """A share of zeros for every layer, matrix or group of rows."""

    name, summary = "sparsity", "a sparsity for every layer, matrix or group of rows"
    decides, counts = "sparsity", "pruned parameters"
    harms, swept, writes, budget, command = True, True, True, "sparsity", "apply"
    asked = "sparsity {}"
    shown_in = "in percent"
    Payload, Request, Write, exports = SparsityPayload, SparsityRequest, SparsityWrite, EXPORTS

    def check(self, plan: Plan) -> None:
        """Refuse shares of zeros that are none, or contradict the counts, and counts that contradict the budget."""
        check_shares(plan)
        check_spent(plan)

    def planner(self) -> Callable[..., Plan]:
        """Return :func:`~layerbudget.decisions.sparsity.plan.plan_by_scores`."""
        from .plan import plan_by_scores

        return plan_by_scores

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Prune the model in place, see :func:`~layerbudget.decisions.sparsity.apply.prune`."""
        from .apply import prune

        return prune(model, plan, data, **options)

    def plan(self, session: Session) -> Plan:
        """Plan by the damage to a model, or from scores."""
        return _by_damage(session) if session.request.measures else _by_scores(session)

    def write(self, session: Session, plan: Plan) -> dict[str, Any]:
        """Prune, recount and save an ordinary checkpoint."""
        return _write(session, plan)

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of sparsity."""
        payload = payload_of(plan, SparsityPayload)
        table = None
        if payload.measured is not None and payload.path:
            damage = {plan.rule: (payload.measured, 0.0), "uniform": (payload.path[0]["divergence"], 0.0)}
            where, passes = "damage on the text that decided", payload.forward_passes
            table = comparison(plan, where, damage, {"uniform": "uniform"}, passes=passes)
        return Summary(
            title=f"{plan.sparsity:.0%} sparsity for",
            verdict=_verdict(plan, payload),
            expected=expected_damage(payload.measured if payload.measured is not None else payload.predicted),
            sentences=(
                *on_budget(plan),
                *_on_program(plan, payload),
                *_on_curves(payload),
                *on_flat_scores(plan, payload.flat_scores),
                *on_further(plan),
            ),
            advice=(*_advice(plan, payload), *on_further(plan)),
            comparison=table,
            figures=damage_figures(payload.predicted, payload.measured),
            passes=payload.forward_passes,
        )

    def show(self, session: Session, plan: Plan) -> bool:
        """Show the steps of a measured plan by ``--table``; the plan itself is drawn as every one."""
        payload = payload_of(plan, SparsityPayload)
        if session.request.table and payload.path:
            title = f"steps: {payload.forward_passes:.0f} forward equivalents"
            if payload.held_out is not None:
                title += f"; on text that did not decide {payload.held_out:.4f} nats (half of the text deciding)"
            names = ("step", "predicted", "measured", "divergence", "held_out", "passes")
            head = ("step", "predicted", "measured", "nats per token", "held out", "passes")
            rows = [["–" if step.get(name) is None else step[name] for name in names] for step in payload.path]
            session.show(title, head, rows)
        return False

    def word(self, block: PlanBlock) -> str:
        """Return the sparsity of a block in per cent."""
        return f"{100 * block.value:.0f}"

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the slider over budgets of plans from scores, or over the steps of a measured plan."""
        from .charts import charts_of

        return charts_of(plan, scores)

    def runs(self, pattern: str | None = None) -> str:
        """One honest paragraph about a checkpoint with zeros, of an n:m ``pattern``."""
        if pattern:
            kernels = "unless your runtime has kernels for exactly this pattern on your GPU"
            return RUNS.format("n:m zeros, stored densely", f"{kernels} (2:4 only; vLLM removed its 2:4 kernels)")
        return RUNS.format("unstructured zeros, stored densely", "in every common runtime")


DECISION = Sparsity()


# --- commands ---------------------------------------------------------------------------------------------------------------


def _by_damage(session: Session) -> Plan:
    from ...compressors.base import TREATMENTS
    from ...models.blocks import partition
    from .directional import plan_by_damage
    from .forecast import searching

    request: SparsityRequest = session.request
    check_fraction(request.sparsity, "sparsity")
    request.by, request.method = request.by or "linear", request.method or "wanda"
    unknown = next((name for name in request.more if name not in options_of(TREATMENTS.find(request.method))), None)
    if unknown is not None:
        raise InvalidInput(f"The method {request.method} has no option {unknown}.", "", "Correct the name.")
    model, _, data = session.load()
    session.share(model, partition(model, "linear" if request.by.startswith("rows:") else request.by))
    what = f"{request.method} on {session.text(data)}"
    session.expect(what, model, searching(session.size(data), request.passes or 24.0))
    options = request.given("sparsity", "max_sparsity", "by", "method", "passes", "trust", "resume")
    with session.progress(f"stepping down, {request.method}") as progress:
        batch = session.batch(model, data)
        return plan_by_damage(model, data, batch_size=batch, progress=progress, **options, **request.more)


def _by_scores(session: Session) -> Plan:
    import dataclasses

    from .plan import plan_by_scores

    request: SparsityRequest = session.request
    curves, method = read_curves(request.curves) if request.curves else (None, None)
    options = request.given("sparsity", "max_sparsity", "min_sparsity", "exclude", "rule") | dict(request.more)
    options |= {"penalty": curves} if curves else {}
    options |= {"seed": request.seed} if request.seed is not None else {}
    scores = load_scores(request.source)
    plan = plan_by_scores(scores, fixed=read_fixed(request.fix), **options)
    if method is not None:
        plan = dataclasses.replace(plan, hyperparameters={**plan.hyperparameters, "method": method})
    if isinstance(scores, Scores) and (sentence := on_published(plan.rule, scores.estimator)):
        session.say(sentence)
    return plan


def _write(session: Session, plan: Plan) -> dict[str, Any]:
    from ...compressors.base import TREATMENTS
    from ...cost.work import treating
    from ...execution.processes import is_main
    from .apply import method_of, other_pruner, prune
    from .save import check_room, save_pruned

    request: SparsityWrite = session.request
    method, options = method_of(plan, request.method, request.more)
    blind = TREATMENTS.find(method).statistic == "none"
    if blind:
        request.refuse((*READING, "resume"), method)
    else:
        session.use_text_of(plan, as_drawn=False)
    model, tokenizer, data = session.load(data=not blind)
    check_room(model, request.out, resume=request.resume, plan=plan)
    parts = treating(method, session.size(data), again=5.0 if request.true_sequential else 1.0)
    session.expect(f"{method} to {plan.budget['spent']:,} zeros{session.on_text(data)}", model, parts)
    session.share(model, plan.blocks)
    notes = other_pruner(plan, method, request.pattern)
    session.say(*notes)
    options |= request.given("pattern", "resume", "store", "autocast") | {"true_sequential": request.true_sequential}
    with session.progress(f"prune by {method}") as progress:
        batch = session.batch(model, data)
        receipt = prune(model, plan, data, method, batch_size=batch, progress=progress, **options)
    out = save_pruned(model, tokenizer, plan, receipt, request.out, overwrite=request.overwrite) if is_main() else request.out
    counted = f"Recounted sparsity {receipt.sparsity:.6f} (planned {receipt.planned:.6f}) in {receipt.seconds:.1f} s"
    session.say(f"{counted}; saved to {out}.", *receipt.notes[: len(receipt.notes) - len(notes)])
    end = session.end(plan, DECISION.runs(request.pattern))
    blocks = {name: record["sparsity"] for name, record in receipt.blocks.items()}
    return {"sparsity": receipt.sparsity, "blocks": blocks, "output": str(out), **end}


# --- what is said -----------------------------------------------------------------------------------------------------------


def _verdict(plan: Plan, payload: SparsityPayload) -> str:
    share = percent(plan.sparsity)
    if payload.measured is not None:
        change = less_than(payload.measured, payload.path[0]["divergence"], "uniform")
        return (
            f"{share} of the weights become zero for {payload.measured:.3g} nats per token, {change}, on the text that decided."
        )
    if is_uniform(plan):
        return f"every block loses {share} of its weights: this is uniform."
    low, high = percent(plan.values.min()), percent(plan.values.max())
    return (
        f"{share} of the weights become zero, {low} to {high} of a block. Scores do not say what uniform would cost: "
        "plan from the model, or apply both plans and evaluate them."
    )


def _on_program(plan: Plan, payload: SparsityPayload) -> list[str]:
    c = plan.certificate
    if not payload.path or "kkt_residual" not in c:
        return on_program(plan, on_price(plan, "zeros", "penalty", "eta", 2.0) if c else "")
    # The program of a step, whose floors and caps are how far a step may go.
    sentences = [f"The plan was reached step by step; the last step is optimal (duality gap {c['gap']:.1e})."]
    if c["at_lower"] or c["at_upper"]:
        moved = f"In that step {c['at_lower']} blocks fell and {c['at_upper']} rose as far as one step may."
        sentences.append(moved)
    return sentences


def _on_curves(payload: SparsityPayload) -> list[str]:
    if not (bent := payload.convexified):
        return []
    worst = max(bent, key=lambda name: bent[name])
    return [f"{len(bent)} measured curves were not convex and were replaced by their hulls; {worst} moved most."]


def _advice(plan: Plan, payload: SparsityPayload) -> list[str]:
    c = plan.certificate
    binding = [c["message"]] if "multiplier" in c and c["status"] != "binding" else []
    return [*binding, *on_flat_scores(plan, payload.flat_scores)]
