"""What a server must be told to hold a planned adapter."""

from __future__ import annotations

import dataclasses

import numpy as np

from ...errors import InvalidInput
from ...plan import Plan
from .rule import SERVED_RANKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingHint:
    """What a server must be told to hold the adapter.

    Attributes:
        max_rank: Largest rank of the plan.
        vllm_max_lora_rank: Smallest accepted value of vLLM's ``max_lora_rank`` that holds it, ``None`` beyond 512.
        padded_share: Share of the reserved adapter memory that is padding (a server reserves the largest rank everywhere).
        note: One sentence.
    """

    max_rank: int
    vllm_max_lora_rank: int | None
    padded_share: float
    note: str


def serving_hint(plan: Plan, alpha_policy: str = "constant-ratio") -> ServingHint:
    """Say how a plan of ranks is served.

    vLLM (``--enable-lora``) reserves ``max_lora_rank`` for every module, accepts 8, 16, 32, 64, 128, 256, 320 and 512 (recent
    releases also 1), and reads one ``r`` and one ``lora_alpha`` for the whole adapter. Hence ``r`` is the largest rank in the
    configuration, and ``constant-ratio`` is the policy whose scale is the same for every module.

    Raises:
        InvalidInput: A plan of another kind.
    """
    if plan.kind != "ranks":
        raise InvalidInput(
            f"This plan is of kind {plan.kind!r}.", "Ranks have a serving hint.", "Make one with `layerbudget plan ranks`."
        )
    ranks = np.repeat(plan.counts, plan.matrices)
    ranks = ranks[ranks > 0]
    largest = int(ranks.max(initial=0))
    served = next((r for r in SERVED_RANKS if r >= largest), None)
    padded = 1 - int(ranks.sum()) / (ranks.size * served) if ranks.size and served else 0.0
    if served is None:
        note = f"Rank {largest} is above the 512 that vLLM accepts: merge the adapter before serving."
    elif alpha_policy != "constant-ratio":
        note = f"--max-lora-rank {served}; with {alpha_policy} the scale differs by module: merge the adapter before serving."
    else:
        note = f"--enable-lora --max-lora-rank {served}; {padded:.0%} of the reserved adapter memory is padding."
    return ServingHint(max_rank=largest, vllm_max_lora_rank=served, padded_share=padded, note=note)
