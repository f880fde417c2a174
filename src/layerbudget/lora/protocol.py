"""Training protocols: the numbers of a fine-tuning run, and the paper's."""

from __future__ import annotations

import dataclasses

from ..errors import InvalidInput

STARTS = ("default", "gradients")
ALPHA_POLICIES = ("constant-ratio", "constant-alpha", "rslora")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """Numbers of a fine-tuning run (AdamW, linear decay).

    Attributes:
        lr: Peak learning rate.
        epochs: Passes over the training rows.
        batch: Rows per optimiser step.
        accumulation: Backward passes per optimiser step (causal LMs only: transformers drops the item count for BERT heads).
        warmup: Steps of linear warm-up, at most half of all.
        alpha: LoRA alpha of experts, and of ranks whose policy reads one alpha.
        ratio: ``alpha / r`` of ranks under ``constant-ratio``.
        alpha_policy: How the scale of an update follows its rank: see :mod:`layerbudget.lora.ranks`.
        dropout: LoRA dropout.
        cutoff: Longest sequence in tokens.
        top_k: Experts per token.
        balance: Weight of the load-balancing loss.
        on_prompt: Take the loss on the prompt as well (causal LMs).
        weight_decay: AdamW's.
        clip: Largest gradient norm.
        start: ``default`` (PEFT's), or ``gradients``: ranks start in the top directions of the task's gradient.
    """

    lr: float = 1e-3
    epochs: float = 3
    batch: int = 32
    accumulation: int = 1
    warmup: int = 50
    alpha: float = 16
    ratio: float = 2.0
    alpha_policy: str = "constant-ratio"
    dropout: float = 0.0
    cutoff: int = 256
    top_k: int = 2
    balance: float = 0.0
    on_prompt: bool = False
    weight_decay: float = 0.0
    clip: float = 1.0
    start: str = "default"

    def __post_init__(self) -> None:
        for name in ("lr", "epochs", "batch", "accumulation", "cutoff", "top_k"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}.", "It must be positive.", "")
        if self.start not in STARTS:
            raise InvalidInput(f"start is {self.start!r}.", f"Starts are {' and '.join(STARTS)}.", "")
        if self.alpha_policy not in ALPHA_POLICIES:
            raise InvalidInput(f"alpha_policy is {self.alpha_policy!r}.", f"Policies are {', '.join(ALPHA_POLICIES)}.", "")
        if self.batch % self.accumulation:
            raise InvalidInput(
                f"A batch of {self.batch} does not split into {self.accumulation} parts.", "", "Choose a divisor of the batch."
            )


# Published protocol of the paper's experiments (Sec. 5 and MoLA's recipe): AdamW 3e-4, r 8, alpha 16, dropout .05, cutoff 256,
# linear decay after 100 warm-up steps, 5 epochs, batch 128, loss on prompt and answer, no balance loss.
PRESETS = {
    "default": Protocol(),
    "paper": Protocol(lr=3e-4, epochs=5, batch=128, warmup=100, alpha=16, ratio=2.0, dropout=0.05, cutoff=256, on_prompt=True),
}
