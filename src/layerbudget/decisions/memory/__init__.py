"""Formats of weights and cache under one memory. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .plan import plan_memory as plan_memory
    from .plan import write_memory as write_memory
    from .program import share_of as share_of

__getattr__ = lazy_names(
    __name__,
    {
        "plan": "plan_memory write_memory",
        "program": "share_of",
    },
)
