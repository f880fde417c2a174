r"""Gains as bits of codelength (paper, section 3): ``n zeta_k^2 / (2 ln 2)``.

``zeta_k^2 / 2`` is the decrease of the mean loss, in nats, that the damped quadratic model lets block k make; over n predicted
tokens that is ``n zeta_k^2 / 2`` nats of the code of the data given the model. It is a model's promise for one block moving
alone, up to damping and the Taylor remainder: blocks do not add up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidInput, ModelMismatch
from ..plan import Plan
from ..records import Result
from ..scores import Scores


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Codelengths(Result):
    """Bits per block.

    Attributes:
        tokens: n.
        bits: ``{block: n zeta^2 / (2 ln 2)}``.
        per_parameter: ``{block: bits per parameter of the block}``.
        sentences: In words.
    """

    tokens: int
    bits: dict[str, float]
    per_parameter: dict[str, float]
    sentences: Sequence[str]


def codelengths(plan: Plan, scores: Scores, tokens: int | None = None) -> Codelengths:
    """What each block's gain is worth in bits.

    Args:
        plan: The plan.
        scores: Its scores.
        tokens: n; by default the predicted tokens of the scores' calibration set.

    Raises:
        ModelMismatch: Other blocks, or other scores than the plan's.
        InvalidInput: Scores that are no gains in nats, or an unknown n.
    """
    other = plan.scores_digest is not None and plan.scores_digest != scores.digest
    if scores.names != plan.names or other:
        raise ModelMismatch(
            "The plan was made from other scores.", f"Its scores have the digest {plan.scores_digest}.", "Name that file."
        )
    if scores.unit != "nats of average loss":
        raise InvalidInput(
            f"Scores of {scores.estimator} are in {scores.unit}.", "Bits are those of gains in nats.", "Score a gain."
        )
    n = _tokens(scores.data) if tokens is None else tokens
    gains = scores.values(plan.hyperparameters.get("damping"))
    bits = {name: float(n * g / (2.0 * math.log(2.0))) for name, g in zip(scores.names, gains, strict=True)}
    each = {b.name: bits[b.name] / b.numel for b in scores.blocks}
    best, least = max(bits, key=lambda k: bits[k]), min(bits, key=lambda k: bits[k])
    sentences = [
        f"Over {n:,} predicted tokens the gain of {best} is worth {bits[best]:,.4g} bits of codelength (n zeta^2 / (2 ln 2)), "
        f"that of {least} {bits[least]:,.4g}: {each[best]:.2g} and {each[least]:.2g} bits per parameter of the block. Each is "
        "for that block moving alone; they do not add up.",
    ]
    return Codelengths(tokens=n, bits=bits, per_parameter=each, sentences=sentences)


def _tokens(data: Any) -> int:
    """Predicted tokens of a calibration set without padding."""
    if not {"samples", "length"} <= set(data):
        raise InvalidInput("The scores do not say how many tokens they are over.", "", "Give it: --tokens, or tokens=.")
    return int(data["samples"]) * (int(data["length"]) - 1)
