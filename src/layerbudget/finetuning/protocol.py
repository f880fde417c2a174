"""Training protocols: the numbers of a fine-tuning run, and the paper's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..decisions.ranks.plan import ALPHA_POLICIES
from ..errors import InvalidInput
from ..registry import options_of, resolve_options

STARTS = ("default", "gradients")
DEVICES = ("auto", "cpu", "cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """Numbers of a fine-tuning run (AdamW, linear decay)."""

    lr: float = 1e-3  #: Peak learning rate.
    epochs: float = 3.0  #: Passes over the training rows.
    batch: int = 32  #: Rows per optimiser step.
    #: Backward passes per optimiser step, for causal LMs only, because transformers drops the item count for BERT heads.
    accumulation: int = 1
    warmup: int = 50  #: Steps of linear warm-up, at most half of all.
    alpha: float = 16.0  #: LoRA alpha of experts; ranks use ``ratio``.
    ratio: float = 2.0  #: ``alpha / r`` of ranks, at the plan's mean rank where the policy lets it vary.
    #: How the scale of an update follows its rank (:mod:`layerbudget.decisions.ranks.apply`).
    alpha_policy: str = "constant-ratio"
    dropout: float = 0.0  #: LoRA dropout.
    cutoff: int = 256  #: Longest sequence in tokens.
    top_k: int = 2  #: Experts per token.
    balance: float = 0.0  #: Weight of the load-balancing loss.
    on_prompt: bool = False  #: Take the loss on the prompt as well (causal LMs).
    weight_decay: float = 0.0  #: AdamW's.
    clip: float = 1.0  #: Largest gradient norm.
    start: str = "default"  #: ``default`` (PEFT's), or ``gradients``: ranks start in the top directions of the task's gradient.

    def __post_init__(self) -> None:
        for name in ("lr", "epochs", "batch", "accumulation", "alpha", "ratio", "cutoff", "top_k", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidInput(f"{name} is {getattr(self, name)}.", "It must be positive.", "")
        for name in ("dropout", "warmup", "balance", "weight_decay"):
            limit = 1.0 if name == "dropout" else float("inf")
            if not 0 <= getattr(self, name) < limit:
                raise InvalidInput(f"{name} is {getattr(self, name)}.", f"It lies in [0, {limit:g}).", "")
        for name, known in (("start", STARTS), ("alpha_policy", ALPHA_POLICIES)):
            if getattr(self, name) not in known:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}.", f"It is one of {', '.join(known)}.", "")
        if self.batch % self.accumulation:
            raise InvalidInput(
                f"A batch of {self.batch} does not split into {self.accumulation} parts.", "", "Choose a divisor of the batch."
            )

    def check(self, kind: str, *, causal: bool | None = None) -> None:
        """Refuse numbers that a plan of this kind, or a head (``causal`` is false), does not read."""
        by_kind = {"ranks": ("alpha", "top_k", "balance"), "experts": ("ratio", "alpha_policy", "start")}
        for name in (*by_kind.get(kind, ()), *(("on_prompt",) if causal is False else ())):
            if getattr(self, name) != getattr(Protocol, name):
                who = "A classification head" if name == "on_prompt" else f"A plan of {kind}"
                raise InvalidInput(f"{who} does not read {name}.", "It would have no effect.", "Leave it out.")

    def changed(self, values: Mapping[str, Any]) -> Protocol:
        """Return another protocol with these numbers; what is unknown or out of range is refused.

        >>> Protocol().changed({"dropout": 0.1, "cutoff": 512}).cutoff
        512
        """
        own = {name: dataclasses.replace(o, default=getattr(self, name)) for name, o in options_of(Protocol).items()}
        return Protocol(**resolve_options("The protocol", own, values))


# Published protocol of the paper's experiments (Sec. 5 and MoLA's recipe): AdamW 3e-4, r 8, alpha 16, dropout .05, cutoff 256,
# linear decay after 100 warm-up steps, 5 epochs, batch 128, loss on prompt and answer, no balance loss.
PRESETS = {
    "default": Protocol(),
    "paper": Protocol(lr=3e-4, epochs=5, batch=128, warmup=100, alpha=16, ratio=2.0, dropout=0.05, cutoff=256, on_prompt=True),
}
