"""A plan of ranks in the files of other tools: PEFT's LoraConfig, and the YAML of axolotl, LLaMA-Factory and mlx_lm."""

from __future__ import annotations

import json
from typing import Any

import yaml

from ...decision import Export
from ...errors import InvalidInput, MissingDependency
from ...plan import Plan
from ...records import stacks

_RATIO = 2  # alpha over rank, as to_lora_config has it by default; with one rank all policies of alpha agree


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


def llama_factory(plan: Plan, *, dropout: float = 0.0) -> str:
    """Return the rank, alpha and modules of LLaMA-Factory as YAML: ``lora_rank``, ``lora_alpha``, ``lora_target``.

    Raises:
        InvalidInput: Ranks that differ, or experts: LLaMA-Factory has one rank for all modules, and adapts modules alone.
    """
    rank, modules = _one_rank(
        plan,
        "LLaMA-Factory",
        "Or save lb.add_ranks(model, plan) with save_pretrained, and name that folder as adapter_name_or_path: "
        "LLaMA-Factory trains it with the ranks that it has.",
    )
    lines = {"finetuning_type": "lora", "lora_rank": rank, "lora_alpha": _RATIO * rank, "lora_dropout": dropout}
    return str(yaml.safe_dump({**lines, "lora_target": ",".join(modules)}, sort_keys=False, width=10**6))


def mlx_lora(plan: Plan, *, dropout: float = 0.0) -> str:
    """Return ``lora_parameters`` of ``mlx_lm.lora --config`` as YAML, with the full name of every module as a key.

    Raises:
        InvalidInput: Ranks that differ, or experts: mlx_lm has one rank for all modules.
    """
    rank, modules = _one_rank(plan, "mlx_lm", "Or train with PEFT: layerbudget finetune, or export --to lora.")
    parameters = {"rank": rank, "scale": float(_RATIO), "dropout": dropout, "keys": modules}
    lines = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    return str(yaml.safe_dump(lines, sort_keys=False, width=1000))


def _one_rank(plan: Plan, tool: str, otherwise: str) -> tuple[int, list[str]]:
    """The rank of all modules that have one, for a tool that takes no other, and their names."""
    from ..adapters import targets_of

    _, ranks = targets_of(plan, "ranks")
    if stacked := stacks(ranks):
        raise InvalidInput(
            f"{stacked[0]} is a stack of experts, which {tool} does not give the rank of a plan.",
            "",
            f"Score with --exclude experts and plan again. {otherwise}",
        )
    least, largest = min(ranks.values()), max(ranks.values())
    if least < largest:
        raise InvalidInput(
            f"{tool} takes one rank for all modules, and this plan has ranks from {least} to {largest}.",
            "It takes any choice of modules.",
            f"Plan with --min-rank 0 --max-rank {largest} --multiple {largest}: a module then has rank {largest} or none. "
            f"{otherwise}",
        )
    return largest, list(ranks)


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
        use="peft.LoraConfig(**json.load(open({file!r}))) has every rank and alpha.",
    ),
    Export(
        name="axolotl",
        call=axolotl_yaml,
        kinds=("ranks",),
        file="axolotl-ranks.yaml",
        summary="the part of axolotl's YAML that says ranks",
        use="Put the lines of {file} into the YAML of your run; older versions of axolotl than #3673 refuse them.",
    ),
    Export(
        name="llama-factory",
        call=llama_factory,
        kinds=("ranks",),
        file="llama-factory-ranks.yaml",
        summary="the part of LLaMA-Factory's YAML that says one rank and its modules",
        use="Put the lines of {file} into the YAML of llamafactory-cli train.",
    ),
    Export(
        name="mlx-lora",
        call=mlx_lora,
        kinds=("ranks",),
        file="mlx-lora.yaml",
        summary="mlx_lm's lora_parameters: one rank and its modules",
        use="mlx_lm.lora --config {word} --model MODEL --train --data DATA trains by it.",
    ),
)
