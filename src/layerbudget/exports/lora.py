"""PEFT's configuration of a plan of ranks, as a file."""

from __future__ import annotations

import json

from ..errors import MissingDependency
from ..plan import Plan


def lora_json(plan: Plan, *, alpha_policy: str = "constant-ratio", dropout: float = 0.0) -> str:
    """Return ``LoraConfig`` as JSON; see :func:`~layerbudget.decisions.ranks.apply.to_lora_config`.

    Args:
        plan: A plan of ranks.
        alpha_policy: How alpha follows the rank.
        dropout: LoRA dropout.

    Raises:
        MissingDependency: peft is not installed.
    """
    try:
        from ..decisions.ranks.apply import to_lora_config

        config = to_lora_config(plan, alpha_policy=alpha_policy, dropout=dropout, task_type="CAUSAL_LM")
    except ImportError as error:
        raise MissingDependency("A LoraConfig needs peft.", "", 'pip install "layerbudget[peft]".') from error
    record = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return json.dumps(record, indent=1, sort_keys=True) + "\n"
