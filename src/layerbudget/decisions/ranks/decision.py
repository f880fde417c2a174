"""Ranks: a LoRA rank for every matrix, or for every block of matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...budget import rank_parameters
from ...decision import Decision, ScoresAdvice, Summary, check_no_text
from ...plan import Plan, payload_of
from ...records import Receipt
from ...scores import Scores
from ...session import Session
from ..capacity import check_ranks, counted_options
from ..files import load_scores
from ..making import blocks_of
from .describe import MOSTLY_NOISE, advice_on, advises_uniform, noise_alone, summary_of
from .export import EXPORTS
from .gains import gain_of, increments_of, measured
from .payload import RanksPayload, RanksSettings
from .rank_table import RankTable, by_rule_of_thumb, how_much_rank
from .request import RanksRequest

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet


class Ranks(Decision):
    """A LoRA rank for every matrix."""

    name, summary = "ranks", "a LoRA rank for every block"
    decides, counts = "rank", "rank of every matrix"
    whole, swept, trains, budget, command = True, True, True, "mean_rank", "finetune"
    priced, asked = "adapter parameters", "mean rank {}"
    protocol_options = ("ratio", "alpha_policy", "start")
    Payload, Settings, Request, exports = RanksPayload, RanksSettings, RanksRequest, EXPORTS

    def planner(self) -> Callable[..., Plan]:
        """Return :func:`~layerbudget.decisions.ranks.plan.plan_ranks`."""
        from .plan import plan_ranks

        return plan_ranks

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Adapt the model; the receipt has the ``PeftModel``. See :func:`~layerbudget.decisions.ranks.apply.add_ranks`."""
        from ..adapters import AdapterReceipt
        from .apply import adapted_ranks, add_ranks

        check_no_text(self.name, data)
        return AdapterReceipt.of(plan, add_ranks(model, plan, **options), adapted_ranks, options)

    def plan(self, session: Session) -> Plan:
        """Plan ranks from scores."""
        from .plan import plan_ranks

        request: RanksRequest = session.request
        options = request.given("mean_rank", "budget", "max_rank", "min_rank", "multiple", "rule", "bytes_per_parameter")
        options |= counted_options(request.fix, request.latency)
        request.scores = load_scores(request.source)
        return plan_ranks(request.scores, **options, **request.more)

    def check(self, plan: Plan) -> None:
        """Refuse ranks that the matrices do not allow."""
        check_ranks(plan.blocks, plan.counts.tolist())

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan of ranks."""
        return summary_of(plan)

    def verdict_of(self, session: Session, plan: Plan) -> str:
        """Return the rank to take where the scored rows do not tell ranks apart, else the verdict of the plan."""
        table = how_much_rank(plan, session.request.scores)
        return table.recommendation if table is not None and table.decides else self.describe(plan).verdict

    def follow(self, session: Session, plan: Plan) -> str | None:
        """Say the plan that is advised in the place of this one, else its training.

        Where uniform is advised it has the size that was asked for.
        """
        request: RanksRequest = session.request
        table = how_much_rank(plan, request.scores)
        if table is not None and table.decides:
            return session.follow(*table.command(plan, str(request.out), request.source))
        if not advises_uniform(plan):
            return super().follow(session, plan)
        size = ("--budget", str(request.budget)) if request.mean_rank is None else ("--mean-rank", f"{request.mean_rank:g}")
        return session.follow("plan", "ranks", request.source, "--rule", "uniform", *size, "-o", "uniform.json")

    def measured_by(self, scores: Scores) -> bool:
        """Return whether scores have the gain of every further rank."""
        return measured(scores)

    def on_scores(self, scores: Scores) -> ScoresAdvice:
        """Return how much of the gain is noise, in a plan of the usual mean rank, which follows."""
        return advice_on(scores)

    def worth_of(self, plan: Plan, scores: Scores, damping: float | None) -> dict[str, Any] | None:
        """Return the gain of the ranks, where that of every further rank was measured; its price by the rule that buys them."""
        if not measured(scores):
            return None
        payload = payload_of(plan, RanksPayload)
        price = None if payload.rounding is None else payload.rounding.get("price")
        return {
            "value": gain_of(increments_of(scores, damping), plan.counts),
            "status": plan.certificate.get("status") or ("binding" if price else None if price is None else "slack"),
            "shadow_price": price,
            "uniform_share": payload.uniform_share,
            "noise_share": payload.noise_share,
        }

    def on_sweep(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the budgets at which noise alone would give most of the gain."""
        noisy = [row for row in rows if (row.get("noise_share") or 0.0) > MOSTLY_NOISE]
        at = ", ".join(dict.fromkeys(f"{row['budget']:g}" for row in noisy))
        return [f"At {at}, {noise_alone(*(row['noise_share'] for row in noisy))}."] if noisy else []

    def other_budgets(self, plan: Plan, scores: Scores, tokens: int | None = None) -> RankTable | None:
        """Return what every mean rank brings on the scored text."""
        return how_much_rank(plan, scores, tokens)

    def price_of(self, session: Session, plan: Plan) -> Sequence[float] | None:
        """Return the parameters of one rank of every block."""
        scores = session.request.scores
        return None if scores is None else [float(n) for n in rank_parameters(blocks_of(scores))]

    # --- training -------------------------------------------------------------------------------------------------------------

    def before_training(self, plan: Plan, model: Any, tokens: int | None) -> Sequence[str]:
        """Return the size of the adapter beside the tokens that it learns."""
        if tokens is None:
            return ()
        from .apply import adapter_parameters

        parameters = adapter_parameters(plan, model)
        sizes = f"{parameters:,} parameters for {tokens:,} completion tokens"
        return (f"The adapter has {sizes}. {by_rule_of_thumb(parameters, tokens)}",)

    def adapt(self, model: Any, plan: Plan, protocol: Any, start: Any = None, **options: Any) -> Any:
        """Return the model with the ranks of a plan, started in the top directions of gradients where there are some."""
        from .apply import add_ranks
        from .start import initialise_from_gradients

        options |= {"alpha_policy": protocol.alpha_policy, "ratio": protocol.ratio, "dropout": protocol.dropout}
        adapted = add_ranks(model, plan, validate=False, **options)
        if start is not None:
            initialise_from_gradients(adapted, *start)
        return adapted

    def before_saving(self, model: Any, protocol: Any) -> None:
        """Give all modules one scale, as servers assume."""
        from .apply import fold_scales

        if protocol.alpha_policy != "constant-ratio":
            fold_scales(model, protocol.ratio)

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return the slider over mean ranks."""
        from .charts import charts_of

        return charts_of(plan, scores)


DECISION = Ranks()
