"""Training protocols: the numbers of a fine-tuning run, and the paper's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..decision import DECISIONS, decision_of
from ..decisions.capacity import ALPHA_POLICIES
from ..errors import InvalidInput
from ..plan import Plan
from ..registry import options_of, resolve_options
from ..requests import ADVANCED, option

STARTS = ("default", "gradients")
DEVICES = ("auto", "cpu", "cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """Numbers of a fine-tuning run (AdamW, linear decay)."""

    lr: float = option(1e-3, help="peak learning rate")
    epochs: float = option(3.0, help="passes over the training rows")
    batch: int = option(32, help="rows per step of the optimiser")
    accumulation: int = option(
        1,  # for causal LMs only, because transformers drops the item count for BERT heads
        group=ADVANCED,
        help="backward passes per step of the optimiser, of a language model",
    )
    warmup: int = option(50, group=ADVANCED, help="steps of linear warm-up, at most half of all")
    alpha: float = option(16.0, group=ADVANCED, help="LoRA alpha of experts; ranks have --ratio")
    ratio: float = option(
        2.0, group=ADVANCED, help="alpha over rank of ranks, at the plan's mean rank where --alpha-policy lets it vary"
    )
    alpha_policy: str = option(
        "constant-ratio",  # see layerbudget.decisions.ranks.apply
        group=ADVANCED,
        choices=lambda: ALPHA_POLICIES,
        help="how the scale of an update follows its rank",
    )
    dropout: float = option(0.0, group=ADVANCED, help="LoRA dropout")
    cutoff: int = option(
        256, group=ADVANCED, help="longest row in tokens (default: 256; of text 1024, or less if the model was made for less)"
    )
    top_k: int = option(2, group=ADVANCED, help="experts per token")
    balance: float = option(0.0, group=ADVANCED, help="weight of the loss that balances experts")
    on_prompt: bool = option(False, group=ADVANCED, help="take the loss on the prompt as well, of a language model")
    weight_decay: float = option(0.0, group=ADVANCED, help="weight decay of AdamW")
    clip: float = option(1.0, group=ADVANCED, help="largest norm of the gradient")
    start: str = option(
        "default",
        group=ADVANCED,
        choices=lambda: STARTS,
        help="where adapters start: as PEFT does, or with gradients in the top directions of the task's gradient, of ranks",
    )

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

    def check(self, plan: Plan, *, causal: bool | None = None) -> None:
        """Refuse numbers that the adapters of a plan, or a head (``causal`` is false), do not read."""
        read_options = decision_of(plan).protocol_options
        others = {
            name for decision in DECISIONS.all().values() for name in decision.protocol_options if name not in read_options
        }
        for name in (
            f.name for f in dataclasses.fields(self) if f.name in others or (f.name == "on_prompt" and causal is False)
        ):
            if getattr(self, name) != getattr(Protocol, name):
                who = "A classification head" if name == "on_prompt" else f"A plan of {plan.kind}"
                raise InvalidInput(f"{who} does not read {name}.", "It would have no effect.", "Leave it out.")

    def changed(self, values: Mapping[str, Any]) -> Protocol:
        """Return another protocol with these numbers; what is unknown or out of range is refused.

        >>> Protocol().changed({"dropout": 0.1, "cutoff": 512}).cutoff
        512
        """
        options = {name: dataclasses.replace(o, default=getattr(self, name)) for name, o in options_of(Protocol).items()}
        return Protocol(**resolve_options("The protocol", options, values))


# Published protocol of the paper's experiments (Sec. 5 and MoLA's recipe): AdamW 3e-4, r 8, alpha 16, dropout .05, cutoff 256,
# linear decay after 100 warm-up steps, 5 epochs, batch 128, loss on prompt and answer, no balance loss.
PRESETS = {
    "default": Protocol(),
    "paper": Protocol(lr=3e-4, epochs=5, batch=128, warmup=100, alpha=16, ratio=2.0, dropout=0.05, cutoff=256, on_prompt=True),
}
