"""Expert pruning: which experts of a mixture stay, and how many of each layer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...decision import Decision, Summary, Table, check_no_text
from ...plan import Plan, payload_of
from ...records import Receipt
from ...requests import PLACING, READING
from ...scores import Scores
from ...session import Session
from ...storage.checkpoint import GGUF_FILE
from ...verdicts import named, plus_minus
from ..describe import (
    compared_with_even,
    damage_figures,
    expected_damage,
    on_budget,
    on_even,
    on_further,
    on_objective,
    on_program,
)
from .payload import ExpertPruningPayload
from .program import bend
from .request import ExpertPruningRequest

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet


class ExpertPruning(Decision):
    """Experts that stay in every layer: fewer experts, the same routing."""

    name, summary = "expert-pruning", "the experts that stay in every layer: fewer experts, the same routing"
    decides, counts = "the share of experts that stay", "experts that stay"
    predicts, writes, told_by_verdict, command = True, True, True, "apply"
    Payload, Request = ExpertPruningPayload, ExpertPruningRequest

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Remove experts in place, see :func:`~layerbudget.decisions.expert_pruning.apply.keep_experts`."""
        from .apply import keep_experts

        check_no_text(self.name, data)
        return keep_experts(model, plan, **options)

    def plan(self, session: Session) -> Plan:
        """Plan by the damage of masked experts to a model."""
        from .forecast import removing
        from .plan import plan_expert_pruning

        request: ExpertPruningRequest = session.request
        model, _, data = session.load()
        session.expect(f"experts{session.on_text(data)}", model, removing(session.size(data), draws=request.draws))
        options = request.given("budget", "damage", "even", "rule", "draws", "seed")
        with session.progress("looking at experts") as progress:
            options |= {"batch_size": session.batch(model, data), "bytes_per_parameter": session.written_bytes()}
            return plan_expert_pruning(model, data, progress=progress, **options)

    def write(self, session: Session, plan: Plan) -> dict[str, Any]:
        """Remove the experts that go, recount and save a checkpoint; of a GGUF file, write it again without them."""
        return _write(session, plan)

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of experts that stay."""
        payload = payload_of(plan, ExpertPruningPayload)
        bent = bend(payload.forecast)
        return Summary(
            title=f"{plan.counts.sum()} experts stay in",
            verdict=_verdict(plan, payload),
            expected=expected_damage(payload.measured, _where(payload)),
            sentences=(
                *on_budget(plan, f"keeps {plan.counts.sum()} of {_experts(plan)} experts", units="layers"),
                *on_program(plan, on_objective(plan)),
                *_on_damage(plan, payload),
                *on_further(plan, kept=False),
            ),
            advice=(*_on_limit(plan), *([bent] if bent else []), *on_further(plan, kept=False)),
            comparison=_comparison(plan, payload),
            passes=payload.forward_passes,
            figures=damage_figures(
                payload.predicted,
                payload.measured,
                error=payload.predicted_error,
                of=", on other text" if payload.crossed else "",
                on="other text of its kind" if payload.crossed else "the text that decided",
            ),
        )

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the slider over shares of the experts, and the forecast at each."""
        from .charts import charts_of

        return {} if plan is None else charts_of(plan)


DECISION = ExpertPruning()


# --- commands ---------------------------------------------------------------------------------------------------------------


def _write(session: Session, plan: Plan) -> dict[str, Any]:
    from ...execution.processes import one_process
    from ...models.blocks import describe
    from ..sparsity import check_room
    from .apply import keep_experts
    from .save import save_experts_kept

    request = session.request
    one_process("Experts are removed")
    request.refuse((*READING, "resume"), f"a plan of kind {plan.kind}")
    if request.model.endswith(".gguf"):
        return _write_gguf(session, plan)
    model, tokenizer, _ = session.load(data=False)
    check_room(model, request.out, plan=plan)
    plan.validate(describe(model))
    session.expect("experts go, no text is read", model, [])
    with session.progress("remove experts, layers") as progress:
        receipt = keep_experts(model, plan, progress=progress)
    out = save_experts_kept(model, tokenizer, plan, receipt, request.out, overwrite=request.overwrite)
    end = session.end(plan, *_on_written(receipt, out))
    return {**receipt.counted(), "output": str(out), **end}


def _write_gguf(session: Session, plan: Plan) -> dict[str, Any]:
    """Cut the experts that go out of a GGUF file, without another rounding."""
    from ...gguf.header import is_read
    from .cut_gguf import cut_gguf

    request = session.request
    request.refuse(PLACING, "a GGUF file", "Leave it out: the bytes of the file are copied, and nothing is computed.")
    with session.progress("remove experts, tensors") as progress:
        receipt = cut_gguf(request.model, plan, request.out, overwrite=request.overwrite, progress=progress)
    file = Path(request.out if request.out.endswith(".gguf") else f"{request.out}/{GGUF_FILE}")
    size = f"{receipt.bytes['before']:,} -> {receipt.bytes['after']:,}"
    more = (f"Bytes of the tensors {size}; those that stay were copied, and none was rounded again.",)
    other = "" if is_read(file) else f"llama-cli -m {shlex.quote(str(file))}"
    end = session.end(plan, *_on_written(receipt, request.out), *more, other=other)
    return {**receipt.counted(), "output": str(request.out), **end}


def _on_written(receipt: Any, out: Any) -> tuple[str, str]:
    """Sentence on what stays in the model that was written, and who loads it."""
    experts, size = receipt.experts, receipt.parameters
    return (
        f"{experts['after']} of {experts['before']} experts stay; parameters {size['before']:,} -> {size['after']:,}, of which "
        f"a token passes through {receipt.active['after']:,}; saved to {out}.",
        f"It is loaded by {receipt.loads}.",
    )


# --- what is said -----------------------------------------------------------------------------------------------------------


def _experts(plan: Plan) -> int:
    """The experts that the model has."""
    return round(sum(b.count / b.value for b in plan.blocks if b.value))


def _alike(plan: Plan) -> bool:
    """Whether all layers keep the same number."""
    return len(set(plan.counts.tolist())) == 1


def _where(payload: ExpertPruningPayload) -> str:
    """How and on which text the damage was measured that one goes by: on other text, where halves judged each other."""
    return f"measured with the others masked, on {'other text' if payload.crossed else 'the text that chose'}"


def _verdict(plan: Plan, payload: ExpertPruningPayload) -> str:
    even = "" if _alike(plan) else ". Layers keep different numbers: --even plans the same for all"
    kept = f"{int(plan.counts.sum())} of {_experts(plan)} experts stay"
    compared = on_even(payload.beside, alike=_alike(plan))
    return f"{kept} for {payload.measured:.3g} nats per token {_where(payload)}{compared}{even}."


def _comparison(plan: Plan, payload: ExpertPruningPayload) -> Table | None:
    where, passes = "before anything was masked", payload.forward_passes
    return compared_with_even(plan, payload.beside, where, alike=_alike(plan), passes=passes)


def _on_damage(plan: Plan, payload: ExpertPruningPayload) -> list[str]:
    """Sentences on what the plan is expected to cost, what its forecast says, and who loads the result."""
    measured = _with_error(payload.measured, payload.measured_error)
    alone = f"The look alone predicts {_with_error(payload.predicted, payload.predicted_error)}"
    text = "other text of this kind" if payload.crossed else "the text that chose"
    sentences = [
        f"On {text} expect {measured} nats per token, measured with the others masked{named(payload.measured_error)}. "
        f"It took {payload.forward_passes:.0f} forward equivalents.",
        f"{alone} for that. On the text that chose, the same is measured as {payload.measured_here:.4g}: "
        "go by the first number, on other text."
        if payload.crossed
        else f"This is on the text that chose, and too low for other text: give four sequences or more. {alone}.",
    ]
    for row in payload.forecast:
        expected = _with_error(row["measured"], row["measured_error"])
        predicted = _with_error(row["predicted"], row["predicted_error"])
        sentences.append(f"At {100 * row['keep']:.3g} % of the experts expect {expected} ({predicted} predicted).")
    loads = (
        "All layers keep as many: transformers loads the result as an ordinary checkpoint, and so does what reads those."
        if _alike(plan)
        else "Layers keep different numbers: layerbudget.load_model loads the result, no other runtime does yet. "
        "--even plans one for the others."
    )
    return [*sentences, *filter(None, [bend(payload.forecast)]), loads]


def _with_error(damage: float, error: float) -> str:
    return f"{damage:.4g}{plus_minus(error, '.2g')}"


def _on_limit(plan: Plan) -> list[str]:
    """A sentence on a limit that does not bind."""
    c = plan.certificate
    return [c["message"]] if "multiplier" in c and c["status"] != "binding" else []
