"""Options of a mixture of LoRA experts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from peft.config import PeftConfig

from ...errors import InvalidInput
from .naming import peft_type


@dataclass
class ExpertsConfig(PeftConfig):
    """Which modules get how many LoRA experts, and how a token chooses among them.

    A module with weight ``W`` and ``E`` experts computes, for a token ``x``,

        ``y = W x + sum_{e in top-k} w_e (alpha / r) B_e A_e dropout(x)``,  ``w = softmax(R x)`` over the k chosen experts,

    with ``A_e`` of shape ``(r, d_in)``, ``B_e`` of shape ``(d_out, r)`` and a bias-free router ``R`` of shape ``(E, d_in)``
    that sees the module's own input. One expert is plain LoRA without a router; zero experts leave the module untouched.
    Routing follows the published MoLA (softmax in float32 over all experts, top-k, renormalised to one).

    Attributes:
        r: Rank of every expert.
        lora_alpha: Numerator of the scale ``alpha / r``.
        lora_dropout: Dropout on the input of the experts, one mask per module (the router sees the input without dropout).
        target_modules: Names (exact or last parts) or a regular expression, as everywhere in PEFT.
        exclude_modules: Names or a regular expression to leave out.
        experts: Experts of a module that no pattern names.
        experts_pattern: Experts by module: one escaped full name per key (PEFT saves patterns with sorted keys and the first
            match wins, so overlapping patterns would mean something else after loading).
        top_k: Experts per token; a module with fewer experts uses all of its own.
        balance_coefficient: Weight of the load-balancing loss ``E sum_e f_e P_e`` (1 at perfect balance), averaged over the
            modules of a layer and summed over layers; 0 switches it off.
        modules_to_save: Further modules trained and saved in full, for example a classification head.
        init_weights: ``True`` starts every ``B`` at zero, so that the adapted model equals the base model.

    Raises:
        InvalidInput: A rank, a count or a top-k below one, or a dropout outside [0, 1).
    """

    r: int = field(default=8, metadata={"help": "Rank of every expert."})
    lora_alpha: float = field(default=16, metadata={"help": "Numerator of the scale alpha / r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the experts' input."})
    target_modules: list[str] | set[str] | str | None = field(default=None, metadata={"help": "Modules to adapt."})
    exclude_modules: list[str] | set[str] | str | None = field(default=None, metadata={"help": "Modules to leave out."})
    experts: int = field(default=1, metadata={"help": "Experts of a module that no pattern names."})
    experts_pattern: dict[str, int] = field(default_factory=dict, metadata={"help": "Experts by escaped full name."})
    top_k: int = field(default=2, metadata={"help": "Experts per token."})
    balance_coefficient: float = field(default=0.0, metadata={"help": "Weight of the load-balancing loss."})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "Further modules to train and save."})
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "Layer indices to adapt."})
    layers_pattern: list[str] | str | None = field(default=None, metadata={"help": "Name of the layer list."})
    bias: str = field(default="none", metadata={"help": "Only 'none'."})
    init_weights: bool = field(default=True, metadata={"help": "Start at the base model."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = peft_type()
        if isinstance(self.target_modules, (list, tuple)):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, (list, tuple)):
            self.exclude_modules = set(self.exclude_modules)
        for name, low in (("r", 1), ("top_k", 1), ("experts", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < low:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}.", f"It is an integer of at least {low}.", "")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise InvalidInput(f"lora_dropout is {self.lora_dropout}.", "It lies in [0, 1).", "The paper used 0.05.")
        if self.bias != "none":
            raise InvalidInput(f"bias is {self.bias!r}.", "Experts train no biases; it is 'none'.", "Leave it out.")
        for pattern, count in self.experts_pattern.items():
            if not isinstance(count, int) or count < 0:
                raise InvalidInput(f"{pattern} asks for {count!r} experts.", "A count is an integer of at least 0.", "")

    def experts_of(self, name: str) -> int:
        """Experts of a module by its full name."""
        for pattern, count in self.experts_pattern.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return count
        return self.experts
