"""LoRA experts: how many experts of a mixture of adapters every block gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...decision import Decision, Summary, check_no_text
from ...plan import Plan, payload_of
from ...records import Receipt
from ...scores import Scores
from ...session import Session
from ..capacity import counted_options
from ..describe import expected_damage, on_budget, on_flat_scores, on_price, on_program, on_published, on_rounding
from ..files import load_scores
from .payload import LoraExpertsPayload
from .request import LoraExpertsRequest

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet


class LoraExperts(Decision):
    """LoRA experts for every block."""

    name, summary = "lora-experts", "LoRA experts for every block"
    decides, counts = "experts", "experts of every matrix"
    whole, swept, trains, budget, command = True, True, True, "total", "finetune"
    budget_type, asked = int, "{} experts in all"
    protocol_options, adapter_type, merges = ("alpha", "top_k", "balance"), "LORA_EXPERTS", False
    Payload, Request = LoraExpertsPayload, LoraExpertsRequest

    def planner(self) -> Callable[..., Plan]:
        """Return :func:`~layerbudget.decisions.lora_experts.plan.plan_lora_experts`."""
        from .plan import plan_lora_experts

        return plan_lora_experts

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Adapt the model; the receipt has the ``PeftModel``.

        See :func:`~layerbudget.decisions.lora_experts.method.add_lora_experts`.
        """
        from ..adapters import AdapterReceipt
        from .method import adapted_experts, add_lora_experts

        check_no_text(self.name, data)
        return AdapterReceipt.of(plan, add_lora_experts(model, plan, **options), adapted_experts, options)

    def plan(self, session: Session) -> Plan:
        """Plan experts from scores."""
        from .plan import plan_lora_experts

        request: LoraExpertsRequest = session.request
        names = ("total", "budget", "max_experts", "min_experts", "lower", "expert_rank", "rule", "bytes_per_parameter")
        options = request.given(*names) | counted_options(request.fix, request.latency)
        scores = load_scores(request.source)
        plan = plan_lora_experts(scores, **options, **request.more)
        if isinstance(scores, Scores) and (sentence := on_published(plan.rule, scores.estimator)):
            session.say(sentence)
        return plan

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of experts."""
        payload, c = payload_of(plan, LoraExpertsPayload), plan.certificate
        slack = [c["message"]] if "multiplier" in c and c["status"] != "binding" else []
        flat = on_flat_scores(plan, payload.flat_scores)
        program = on_program(plan, on_price(plan, "budget", "utility", "gamma", 0.9) if c else "")
        return Summary(
            title=f"{plan.counts.sum()} LoRA experts for",
            verdict=_verdict(plan),
            expected=expected_damage(None),
            sentences=(*on_budget(plan), *_on_routers(plan), *program, *on_rounding(plan, payload.rounding), *flat),
            advice=(*slack, *_on_routers(plan), *flat),
        )

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the slider over experts per block."""
        from .charts import charts_of

        return charts_of(plan, scores)

    # --- training -------------------------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Make the mixture known to PEFT."""
        from . import method  # noqa: F401  (it registers when it is imported)

    def adapt(self, model: Any, plan: Plan, protocol: Any, start: Any = None, **options: Any) -> Any:
        """Return the model with the experts of a plan."""
        from .method import add_lora_experts

        options |= {"lora_alpha": protocol.alpha, "lora_dropout": protocol.dropout, "balance_coefficient": protocol.balance}
        return add_lora_experts(model, plan, validate=False, top_k=protocol.top_k, **options)

    def callbacks(self, protocol: Any) -> Sequence[Any]:
        """Return what divides the loss of the balance by the accumulation steps."""
        if not protocol.balance:
            return ()
        from .method import BalanceScale

        return (BalanceScale(),)


DECISION = LoraExperts()


def _on_routers(plan: Plan) -> list[str]:
    """A sentence on what a budget in other units than experts leaves out."""
    if plan.budget["unit"] not in ("params", "bytes", "flops") or plan.counts.max() < 2:
        return []
    return [
        "Routers come on top of the budget: a matrix with n inputs and E experts, two or more, has one of E x n numbers. The "
        "adapter's receipt counts them."
    ]


def _verdict(plan: Plan) -> str:
    low, high = int(plan.counts.min()), int(plan.counts.max())
    if low == high:
        return f"every block gets {low} experts: this is uniform."
    return (
        f"{low} to {high} experts a block. No rule has beaten uniform in our own trainings: train both plans, and pair them by "
        "finetune --against."
    )
