"""How many LoRA experts every block gets. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .method import add_lora_experts as add_lora_experts
    from .plan import plan_lora_experts as plan_lora_experts

__getattr__ = lazy_names(
    __name__,
    {
        "method": "add_lora_experts",
        "plan": "plan_lora_experts",
    },
)
