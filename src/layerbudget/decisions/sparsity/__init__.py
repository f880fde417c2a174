"""How many weights of every layer, matrix or group of rows become zero. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .apply import prune as prune
    from .forecast import searching as searching
    from .plan import default_cap as default_cap
    from .plan import plan_sparsity as plan_sparsity
    from .receipt import recount as recount
    from .save import BESIDE as BESIDE
    from .save import check_room as check_room
    from .save import save_pruned as save_pruned

__getattr__ = lazy_names(
    __name__,
    {
        "apply": "prune",
        "forecast": "searching",
        "plan": "default_cap plan_sparsity",
        "receipt": "recount",
        "save": "BESIDE check_room save_pruned",
    },
)
