r"""LoRA ranks by module: a plan becomes a ``peft.LoraConfig`` that holds exactly the planned ranks.

Rank ``r`` on a matrix of shape ``(d_out, d_in)`` costs ``r (d_in + d_out)`` trained parameters. PEFT scales an update by
``alpha / r`` (``alpha / sqrt(r)`` under rsLoRA), so a rank that varies by module also varies the *step* of the module unless
alpha follows it. The policies:

- ``constant-ratio`` (default): ``alpha = ratio * r``. Every module has the same scale; this also serves correctly where a
  server reads one alpha and one rank for the whole adapter.
- ``rslora``: one alpha, scale ``alpha / sqrt(r)`` (Kalajdzievski 2023).
- ``constant-alpha``: one alpha; scale ``alpha / r`` falls with rank (what a bare ``rank_pattern`` does).

Unless an alpha is given, it is the one for which a module of the plan's mean rank has the scale ``ratio``: a uniform plan then
trains alike under all three, and a learning rate tuned for it serves each. With a common scale the first steps of Adam grow
with the rank (every rank adds a step of its own), with ``rslora`` by its root, with ``constant-alpha`` not at all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import CoverageError, InvalidInput
from ...plan import Plan
from . import targets
from .plan import ALPHA_POLICIES

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def to_lora_config(
    plan: Plan,
    *,
    alpha_policy: str = "constant-ratio",
    ratio: float = 2.0,
    alpha: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> LoraConfig:
    """Turn a plan of ranks into a ``peft.LoraConfig``.

    Every module is named by its escaped full name, once, with its own rank and alpha: PEFT saves patterns with sorted keys and
    takes the first match, so overlapping patterns would mean something else after loading. Modules of rank zero are excluded.

    Args:
        plan: A plan of kind ``ranks``.
        alpha_policy: ``constant-ratio``, ``constant-alpha`` or ``rslora`` (see the module's text).
        ratio: Scale of a module of mean rank; of every module under ``constant-ratio``.
        alpha: Alpha under the other two policies, instead of the one that ``ratio`` implies.
        dropout: LoRA dropout.
        options: Passed on to ``LoraConfig`` (``task_type``, ``modules_to_save``, ``init_lora_weights``, ...).

    Returns:
        The configuration. ``r`` is the largest rank, so that a server which reads it alone reserves enough.

    Raises:
        InvalidInput: A plan of another kind, an unknown policy, or no module with a rank above zero.
    """
    from peft import LoraConfig

    if alpha_policy not in ALPHA_POLICIES:
        raise InvalidInput(f"alpha_policy is {alpha_policy!r}.", f"Policies are {', '.join(ALPHA_POLICIES)}.", "")
    ranks = targets.counts_by_module(plan, "ranks")
    adapted = {m: r for m, r in ranks.items() if r > 0}
    if not adapted:
        raise InvalidInput("Every rank of this plan is zero.", "", "Plan with a larger budget.")
    excluded = sorted(m for m, r in ranks.items() if r == 0)
    mean, largest = sum(adapted.values()) / len(adapted), max(adapted.values())
    implied = ratio * (math.sqrt(mean) if alpha_policy == "rslora" else mean)
    common = implied if alpha is None else alpha
    scale = (lambda r: ratio * r) if alpha_policy == "constant-ratio" else (lambda r: common)
    settings = {
        "r": largest,
        "lora_alpha": scale(largest),
        "lora_dropout": dropout,
        "use_rslora": alpha_policy == "rslora",
        "target_modules": sorted(adapted),
        "exclude_modules": excluded or None,
        "rank_pattern": {targets.pattern(m): r for m, r in adapted.items()},
        "alpha_pattern": {targets.pattern(m): scale(r) for m, r in adapted.items()},
    }
    return LoraConfig(**{**settings, **options})


def adapted_ranks(model: nn.Module, adapter_name: str = "default") -> dict[str, int]:
    """Rank by module, read from the tensors of an adapted model."""
    from peft.tuners.lora import LoraLayer

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter_name in module.lora_A:
            found[targets.base_name(name)] = targets.leaf(module.lora_A, adapter_name).weight.shape[0]
    return found


def add_ranks(
    model: nn.Module, plan: Plan, *, adapter_name: str = "default", config: Any = None, validate: bool = True, **options: Any
) -> PeftModel:
    """Adapt a model by a plan of ranks, and count again.

    Args:
        model: The model that the plan was made for.
        plan: A plan of kind ``ranks``.
        adapter_name: Name of the adapter in PEFT.
        config: A configuration of one's own; by default :func:`to_lora_config` makes it from ``options``.
        validate: Refuse a model whose content digest is not the plan's.
        options: Passed to :func:`to_lora_config`.

    Returns:
        The ``PeftModel``.

    Raises:
        ModelMismatch: The plan was made for another model.
        UnknownBlock: The plan names a module that the model does not have.
        CoverageError: A fused or tied module, or a recount that differs from the plan; names the module.
    """
    adapted, ranks, shapes = targets.adapt(
        model, plan, "ranks", lambda: config or to_lora_config(plan, **options), adapted_ranks, adapter_name=adapter_name,
        validate=validate,
    )  # fmt: skip
    planned = sum(ranks[m] * (d_in + d_out) for m, (d_in, d_out) in shapes.items())
    saved, counted = f".modules_to_save.{adapter_name}.", ("lora_A.", "lora_B.")  # DoRA trains magnitudes beside them
    adapters = [p for n, p in adapted.named_parameters() if saved not in n and any(part in n for part in counted)]
    trained = sum(p.numel() for p in adapters if p.requires_grad)
    if trained != planned:
        raise CoverageError(
            f"{trained:,} adapter parameters are trained; the plan's ranks make {planned:,}.",
            "",
            "Use the plan's own configuration.",
        )
    return adapted


def fold_scales(model: nn.Module, ratio: float = 2.0, adapter_name: str = "default") -> None:
    """Give every module the scale ``ratio`` and its B the rest: the same update, ``alpha = ratio * r`` everywhere.

    After training under ``rslora`` or ``constant-alpha`` this makes an adapter that a server which reads one alpha and one
    rank for all modules applies correctly.

    Args:
        model: A model with LoRA ranks.
        ratio: The common ``alpha / r``.
        adapter_name: Name of the adapter.

    Raises:
        InvalidInput: A ratio that is not positive.
    """
    from peft.tuners.lora import LoraLayer

    if not 0 < ratio < math.inf:
        raise InvalidInput(f"ratio is {ratio}.", "It must be positive.", "")
    config = targets.adapter_config(model, adapter_name)
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or adapter_name not in module.lora_A:
            continue
        rank = module.r[adapter_name]
        with torch.no_grad():
            targets.leaf(module.lora_B, adapter_name).weight.mul_(module.scaling[adapter_name] / ratio)
        module.scaling[adapter_name], module.lora_alpha[adapter_name] = ratio, ratio * rank
        module.use_rslora[adapter_name] = False
        config.alpha_pattern[targets.pattern(targets.base_name(name))] = ratio * rank
    config.use_rslora, config.lora_alpha = False, ratio * config.r
