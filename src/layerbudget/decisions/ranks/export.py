"""A plan of ranks in the files of other tools: PEFT's LoraConfig, and the YAML of axolotl."""

from __future__ import annotations

import json
from typing import Any

import yaml

from ...decision import Export
from ...errors import InvalidInput, MissingDependency
from ...plan import Plan


def lora_json(plan: Plan, *, alpha_policy: str = "constant-ratio", dropout: float = 0.0) -> str:
    """Return ``LoraConfig`` as JSON; see :func:`~layerbudget.decisions.ranks.apply.to_lora_config`.

    Raises:
        MissingDependency: peft is not installed.
    """
    config = _lora_config(plan, alpha_policy, dropout)
    record = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def axolotl_yaml(plan: Plan, *, alpha_policy: str = "constant-ratio", dropout: float = 0.0) -> str:
    """Return ``lora_rank_pattern``, ``lora_alpha_pattern`` and what belongs to them, as YAML.

    Raises:
        InvalidInput: An alpha that is no whole number, which axolotl does not read.
        MissingDependency: peft is not installed.
    """
    config = _lora_config(plan, alpha_policy, dropout)
    alphas = {config.lora_alpha, *config.alpha_pattern.values()}
    if any(alpha != int(alpha) for alpha in alphas):
        raise InvalidInput(
            f"axolotl reads whole alphas, and {alpha_policy} gives {next(a for a in sorted(alphas) if a != int(a)):g}.",
            "With --alpha-policy constant-ratio alpha is twice the rank.",
            "Use that, or export --to lora.",
        )
    lines: dict[str, Any] = {"adapter": "lora", "lora_r": config.r, "lora_alpha": int(config.lora_alpha)}
    lines |= {"lora_dropout": config.lora_dropout, **({"peft_use_rslora": True} if config.use_rslora else {})}
    lines |= {"lora_target_modules": sorted(config.target_modules), "lora_rank_pattern": dict(config.rank_pattern)}
    lines |= {"lora_target_parameters": sorted(config.target_parameters)} if config.target_parameters else {}
    lines["lora_alpha_pattern"] = {k: int(v) for k, v in config.alpha_pattern.items()}
    head = "# lora_r and lora_alpha are a fallback: every module has a rank and an alpha of its own below\n"
    return head + str(yaml.safe_dump(lines, sort_keys=False, width=1000))


def _lora_config(plan: Plan, alpha_policy: str, dropout: float) -> Any:
    try:
        from .apply import to_lora_config

        return to_lora_config(plan, alpha_policy=alpha_policy, dropout=dropout)
    except ImportError as error:
        raise MissingDependency("A LoraConfig needs peft.", "", "pip install '.[peft]' in the clone.") from error


EXPORTS = (
    Export(
        name="lora",
        call=lora_json,
        kinds=("ranks",),
        file="adapter_config.json",
        summary="PEFT's LoraConfig as JSON",
        use="peft.LoraConfig(**json.load(open('{file}'))) has every rank and alpha.",
    ),
    Export(
        name="axolotl",
        call=axolotl_yaml,
        kinds=("ranks",),
        file="axolotl-ranks.yaml",
        summary="the part of axolotl's YAML that says ranks",
        use="Put the lines of {file} into the YAML of your run; older versions of axolotl than #3673 refuse them.",
    ),
)
