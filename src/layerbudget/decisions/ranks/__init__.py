"""A LoRA rank for every matrix. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .apply import add_ranks as add_ranks
    from .apply import fold_scales as fold_scales
    from .apply import pad_ranks as pad_ranks
    from .apply import to_lora_config as to_lora_config
    from .plan import plan_ranks as plan_ranks

__getattr__ = lazy_names(
    __name__,
    {
        "apply": "add_ranks fold_scales pad_ranks to_lora_config",
        "plan": "plan_ranks",
    },
)
