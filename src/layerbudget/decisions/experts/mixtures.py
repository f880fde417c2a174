"""Experts by layer: a plan becomes an ``ExpertsConfig`` that holds exactly the planned counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import InvalidInput
from ...plan import Plan
from ..ranks import targets

if TYPE_CHECKING:
    from peft import PeftModel

    from .method import ExpertsConfig


def to_experts_config(plan: Plan, *, rank: int | None = None, top_k: int = 2, **options: Any) -> ExpertsConfig:
    """Turn a plan of experts into an ``ExpertsConfig``: one escaped full name per module.

    Args:
        plan: A plan of kind ``experts``; a block's count goes to each of its modules.
        rank: Rank of every expert; by default the plan's ``expert_rank``, else 8.
        top_k: Experts per token.
        options: Passed on (``lora_alpha``, ``lora_dropout``, ``balance_coefficient``, ``task_type``, ``modules_to_save``, ...).

    Raises:
        InvalidInput: A plan of another kind, or no module with an expert.
    """
    from .method import ExpertsConfig

    counts = targets.counts_by_module(plan, "experts")
    adapted = {m: e for m, e in counts.items() if e > 0}
    if not adapted:
        raise InvalidInput(
            "Every block of this plan has zero experts.", "", "Plan with a larger budget, or a minimum per layer."
        )
    settings = {
        "r": int(rank or plan.hyperparameters.get("expert_rank", 8)),
        "target_modules": sorted(adapted),
        "exclude_modules": sorted(m for m, e in counts.items() if e == 0) or None,
        "experts": 0,
        "experts_pattern": {targets.pattern(m): e for m, e in adapted.items()},
        "top_k": top_k,
    }
    return ExpertsConfig(**{**settings, **options})


def adapted_experts(model: nn.Module, adapter_name: str = "default") -> dict[str, int]:
    """Experts by module, read from the tensors of an adapted model."""
    from .method import ExpertsLinear

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLinear) and adapter_name in module.lora_experts_A:
            stacked = targets.leaf(module.lora_experts_A, adapter_name).weight.shape[0]
            found[targets.base_name(name)] = stacked // module.lora_experts_r[adapter_name]
    return found


def add_experts(
    model: nn.Module, plan: Plan, *, adapter_name: str = "default", config: Any = None, validate: bool = True, **options: Any
) -> PeftModel:
    """Adapt a model by a plan of experts, and count again.

    Args:
        model: The model that the plan was made for.
        plan: A plan of kind ``experts``.
        adapter_name: Name of the adapter in PEFT.
        config: A configuration of one's own; by default :func:`to_experts_config` makes it from ``options``.
        validate: Refuse a model whose content digest is not the plan's.
        options: Passed to :func:`to_experts_config`.

    Returns:
        The ``PeftModel``.

    Raises:
        ModelMismatch: The plan was made for another model.
        UnknownBlock: The plan names a module that the model does not have.
        CoverageError: A fused or tied module, or a recount that differs from the plan; names the module.
    """
    adapted, _, _ = targets.adapt(
        model, plan, "experts", lambda: config or to_experts_config(plan, **options), adapted_experts,
        adapter_name=adapter_name, validate=validate,
    )  # fmt: skip
    return adapted


def expert_costs(
    shapes: dict[str, tuple[int, int]], rank: int, experts: int, *, top_k: int = 2, length: int = 256
) -> dict[str, float]:
    """What ``experts`` experts on the given modules cost, every module counted once.

    Args:
        shapes: ``(d_in, d_out)`` by module.
        rank: Rank of every expert.
        experts: Experts per module.
        top_k: Experts per token.
        length: Tokens per sequence, for merged execution.

    Returns:
        ``parameters`` (experts and routers) and FLOPs per token of the forward pass, two per multiply-add:
        ``flops_dense`` (every expert on every token, what the fused form runs) and ``flops_top_k``, both with the router;
        ``flops_paper``, the paper's charge ``c_k e_k`` with ``c_k = 2 r (d_in + d_out)`` for every stored expert, no router;
        ``flops_merged``, the execution of MEO (He et al. 2023): the chosen experts' products are merged into one matrix
        once per sequence, ``top_k * 2 r d_in d_out`` FLOPs shared by ``length`` tokens, and tokens then pay nothing
        beyond the base.

    >>> expert_costs({"m": (512, 512)}, rank=8, experts=8)["flops_dense"]
    139264
    """
    total: dict[str, float] = dict.fromkeys(("parameters", "flops_dense", "flops_top_k", "flops_paper", "flops_merged"), 0)
    chosen = min(top_k, experts)
    for d_in, d_out in shapes.values():
        unit = rank * (d_in + d_out)
        router = d_in * experts if experts > 1 else 0
        total["parameters"] += unit * experts + router
        total["flops_dense"] += 2 * unit * experts + 2 * router
        total["flops_top_k"] += 2 * unit * chosen + 2 * router
        total["flops_paper"] += 2 * unit * experts
        total["flops_merged"] += (chosen * 2 * rank * d_in * d_out + 2 * router) / length
    return total
