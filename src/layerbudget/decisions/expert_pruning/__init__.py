"""Which experts stay in every layer. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .apply import keep_experts as keep_experts
    from .forecast import removing as removing
    from .plan import plan_expert_pruning as plan_expert_pruning

__getattr__ = lazy_names(
    __name__,
    {
        "apply": "keep_experts",
        "forecast": "removing",
        "plan": "plan_expert_pruning",
    },
)
