"""Heads, widths and layers that go: smaller matrices. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .apply import apply_shapes as apply_shapes
    from .apply import remove_units as remove_units
    from .forecast import shaping as shaping
    from .plan import plan_shapes as plan_shapes
    from .speed import Speed as Speed
    from .speed import measure_speed as measure_speed
    from .units import find_parts as find_parts

__getattr__ = lazy_names(
    __name__,
    {
        "apply": "apply_shapes remove_units",
        "forecast": "shaping",
        "plan": "plan_shapes",
        "speed": "Speed measure_speed",
        "units": "find_parts",
    },
)
