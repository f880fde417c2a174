"""Say in sentences what a plan does and what it rests on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import checked
from ..decision import OtherBudgets, decision_of
from ..errors import InvalidInput
from ..plan import Plan
from ..records import Result
from ..scores import Scores, tokens_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Explanation(Result):
    """A plan in sentences: budget, status, price, what had no influence; ``most`` and ``least`` name the blocks at either end.

    ``codelengths`` is there where scores of a gain were given, see :func:`codelengths`; ``matrices`` of a plan of formats, see
    :meth:`~layerbudget.decision.Decision.matrices`; ``budgets`` where the scores say what other budgets would bring.
    """

    sentences: Sequence[str]
    most: Sequence[str]
    least: Sequence[str]
    codelengths: Mapping[str, Any] | None = None
    matrices: Sequence[Mapping[str, Any]] = ()
    budgets: OtherBudgets | None = None


@checked
def explain_plan(plan: Plan, scores: Scores | None = None, *, tokens: int | None = None) -> Explanation:
    """Return in sentences what a plan does and what it rests on; with its scores also what their gains are worth in bits.

    Scores that are damages, no gains, give the standard error of the damage of every matrix.

    Raises:
        ModelMismatch, InvalidInput: As :func:`codelengths` and :meth:`~layerbudget.decision.Decision.matrices` raise them.
    """
    order, decision = np.argsort(plan.values, kind="stable"), decision_of(plan)
    summary = decision.describe(plan)
    sentences = list(summary.sentences)
    matrices = decision.matrices(plan, None if decision.from_gains else scores)
    if scores is not None and tokens is not None and not decision.from_gains:
        what = f"tokens has no meaning for a plan of {plan.kind}."
        raise InvalidInput(what, "Its scores are damages, no gains.", "Leave it out.")
    bits = None if scores is None or not decision.from_gains else codelengths(plan, scores, tokens)
    budgets = None if scores is None or bits is None else decision.other_budgets(plan, scores, tokens)
    if budgets is not None and budgets.decides:  # what the plan's own verdict advises is left out
        sentences = [*(s for s in sentences if s[1:].rstrip(".") not in f"Verdict: {summary.verdict}"), budgets.recommendation]
    sentences += [] if bits is None else [_on_codelengths(bits)]
    return Explanation(
        sentences=sentences,
        most=[plan.names[i] for i in order[::-1][:5]],
        least=[plan.names[i] for i in order[:5]],
        codelengths=bits,
        matrices=matrices,
        budgets=budgets,
    )


def codelengths(plan: Plan, scores: Scores, tokens: int | None = None) -> dict[str, Any]:
    r"""Return what each block's gain is worth in bits of codelength (paper, section 2): ``n zeta_k^2 / (2 ln 2)``.

    ``zeta_k^2 / 2`` is the decrease of the mean loss, in nats, that the damped quadratic model lets block k make; over n
    predicted tokens that is ``n zeta_k^2 / 2`` nats of the code of the data given the model. It is a model's promise for one
    block moving alone, up to damping and the Taylor remainder: blocks do not add up.

    Returns:
        ``{tokens, bits: {block: bits}, per_parameter: {block: bits}}``; n is :func:`tokens_of` the scores by default.

    Raises:
        ModelMismatch: Other blocks, or other scores than the plan's.
        InvalidInput: Scores that are no gains in nats, or an unknown n.
    """
    if scores.unit != "nats of average loss":
        raise InvalidInput(
            f"The unit of the scores by {scores.estimator} is {scores.unit!r}, not nats of loss, as bits of codelength need.",
            f"What is known of a plan of {plan.kind} is explained without them.",
            "Leave out --scores (in Python: scores).",
        )
    plan.check_scores(scores)
    n = tokens_of(scores) if tokens is None else tokens
    gains = scores.values(plan.hyperparameters.get("damping"))
    bits = {b.name: float(n * g / (2.0 * math.log(2.0))) for b, g in zip(scores.blocks, gains, strict=True)}
    return {"tokens": n, "bits": bits, "per_parameter": {b.name: bits[b.name] / b.numel for b in scores.blocks}}


def _on_codelengths(lengths: Mapping[str, Any]) -> str:
    bits, each = lengths["bits"], lengths["per_parameter"]
    best, least = max(bits, key=lambda k: bits[k]), min(bits, key=lambda k: bits[k])
    return (
        f"Over {lengths['tokens']:,} predicted tokens the gain of {best} is worth {bits[best]:,.4g} bits of codelength "
        f"(n zeta^2 / (2 ln 2)), that of {least} {bits[least]:,.4g}: {each[best]:.2g} and {each[least]:.2g} bits per parameter "
        "of the block. Each is for that block moving alone; they do not add up."
    )
