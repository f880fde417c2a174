"""Capacity that trains: LoRA ranks by module and mixtures of LoRA experts by layer.

Names are imported on first use: the mixture needs torch and PEFT, a look at a plan does not.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "to_lora_config": "ranks",
    "add_ranks": "ranks",
    "adapted_ranks": "ranks",
    "fold_scales": "ranks",
    "serving_hint": "..planning.serving",
    "to_experts_config": "mixtures",
    "add_experts": "mixtures",
    "adapted_experts": "mixtures",
    "expert_costs": "mixtures",
    "ExpertsConfig": "experts",
    "load_adapter": "loading",
    "initialise_from_gradients": "initialise",
    "Replan": "replan",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _PUBLIC[name]
    return getattr(importlib.import_module(home if home.startswith(".") else f".{home}", __name__), name)
