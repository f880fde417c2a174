"""Zeros and adapters under one budget of bytes. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .plan import plan_joint as plan_joint
    from .plan import split_joint as split_joint

__getattr__ = lazy_names(
    __name__,
    {
        "plan": "plan_joint split_joint",
    },
)
