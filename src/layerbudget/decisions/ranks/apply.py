r"""A plan of adapters on a model by PEFT: checked before, recounted after. Ranks become a ``peft.LoraConfig``.

A plan names weight matrices. PEFT wraps modules found by patterns, skips silently what a pattern misses, and gives a tied
weight an adapter on one side only. So names are checked before, and parameters counted after.

Rank ``r`` on a matrix of shape ``(d_out, d_in)`` costs ``r (d_in + d_out)`` trained parameters. A stack of experts is a
parameter and no module: every expert has that rank of its own (PEFT's ``target_parameters``). PEFT scales an update by
``alpha / r`` (``alpha / sqrt(r)`` under rsLoRA), so a rank that varies by module also varies the *step* of the module unless
alpha follows it. The policies:

- ``constant-ratio`` (default): ``alpha = ratio * r``. Every module has the same scale; this also serves correctly where a
  server reads one alpha and one rank for the whole adapter.
- ``rslora``: one alpha, scale ``alpha / sqrt(r)`` (Kalajdzievski 2023).
- ``constant-alpha``: one alpha; scale ``alpha / r`` falls with rank (what a bare ``rank_pattern`` does).

A module of the plan's mean rank has the scale ``ratio``: a uniform plan trains alike under all three. With a common scale the
first steps of Adam grow with the rank, with ``rslora`` by its root, with ``constant-alpha`` not at all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...arguments import checked
from ...errors import InvalidInput
from ...models.blocks import weight_of
from ...plan import Plan
from ...records import stacks
from ..adapters import adapter_config, attach, base_name, check_modules, counts_by_module, pattern, targets_of
from ..capacity import ALPHA_POLICIES

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


@checked
def to_lora_config(
    plan: Plan, *, alpha_policy: str = "constant-ratio", ratio: float = 2.0, dropout: float = 0.0, **options: Any
) -> LoraConfig:
    """A plan of ranks as a ``peft.LoraConfig``: every module by its escaped full name, once, with its own rank and alpha.

    Args:
        plan: A plan of kind ``ranks``; modules of rank zero are excluded.
        alpha_policy: ``constant-ratio``, ``constant-alpha`` or ``rslora`` (see the module's text).
        ratio: Scale of a module of mean rank; of every module under ``constant-ratio``.
        dropout: LoRA dropout.
        options: Passed on to ``LoraConfig`` (``task_type``, by default ``CAUSAL_LM``, ``modules_to_save``, ...).

    Returns:
        The configuration. ``r`` is the largest rank, so that a server which reads it alone reserves enough.

    Raises:
        InvalidInput: A plan of another kind, an unknown policy, or no module with a rank above zero.
    """
    from peft import LoraConfig

    if alpha_policy not in ALPHA_POLICIES:
        raise InvalidInput(f"alpha_policy is {alpha_policy!r}.", f"Policies are {', '.join(ALPHA_POLICIES)}.", "")
    targets, adapted = targets_of(plan, "ranks")
    if stacked := stacks(adapted):
        if dropout:
            raise InvalidInput(
                f"dropout is {dropout:g}, and PEFT has none on stacks of experts such as {stacked[0]}.", "", "Set dropout=0."
            )
        targets["target_modules"] = [n for n in targets["target_modules"] if n not in stacked]
        targets["target_parameters"] = sorted(stacked)
    mean, largest = sum(adapted.values()) / len(adapted), max(adapted.values())
    common = ratio * (math.sqrt(mean) if alpha_policy == "rslora" else mean)
    scale = (lambda r: ratio * r) if alpha_policy == "constant-ratio" else (lambda r: common)
    settings = {
        "task_type": "CAUSAL_LM",
        "r": largest,
        "lora_alpha": scale(largest),
        "lora_dropout": dropout,
        "use_rslora": alpha_policy == "rslora",
        "rank_pattern": {pattern(m): r for m, r in adapted.items()},
        "alpha_pattern": {pattern(m): scale(r) for m, r in adapted.items()},
    }
    return LoraConfig(**{**targets, **settings, **options})


@checked
def add_ranks(
    model: nn.Module, plan: Plan, *, adapter_name: str = "default", config: Any = None, validate: bool = True, **options: Any
) -> PeftModel:
    """The model adapted by a plan of ranks, counted again.

    Args:
        model: The model that the plan was made for.
        plan: A plan of kind ``ranks``.
        adapter_name: Name of the adapter in PEFT.
        config: A configuration of one's own; by default :func:`to_lora_config` makes it from ``options``.
        validate: Refuse a model whose content digest is not the plan's.
        options: Passed to :func:`to_lora_config`; a model that does not generate has no ``task_type`` by default.

    Raises:
        ModelMismatch: The plan was made for another model.
        UnknownBlock: The plan names a module that the model does not have.
        CoverageError: A fused or tied module, or a recount that differs from the plan; names the module.
    """
    ranks = counts_by_module(plan, "ranks")
    check_modules(model, plan, ranks, validate=validate, stacked=stacks(ranks))
    if not hasattr(model, "prepare_inputs_for_generation"):
        options = {"task_type": None, **options}
    return attach(model, config or to_lora_config(plan, **options), ranks, adapted_ranks, "rank", adapter_name)


def lora_layers(model: nn.Module, adapter_name: str = "default") -> dict[str, Any]:
    """Return the LoRA layers of an adapted model, by their names in the plain model."""
    from peft.tuners.lora import LoraLayer

    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer) and adapter_name in m.lora_A}
    stacked = {n: f".{p}" for n, m in layers.items() if (p := getattr(m, "parameter_name", None))}  # one wrapped in the other
    return {base_name(n.replace(".base_layer", "")) + stacked.get(n, ""): m for n, m in layers.items()}


def adapter_parameters(plan: Plan, model: nn.Module) -> int:
    """Return the parameters of the factors of the planned ranks; every expert of a stack has its own."""
    shapes = [(b.count, weight_of(model, name)[1].shape) for b in plan.blocks for name in b.modules if b.count]
    return sum(rank * math.prod(shape[:-2]) * sum(shape[-2:]) for rank, shape in shapes)


def _copies(module: Any) -> int:
    """How many matrices a LoRA layer adapts: the experts of a stack, else one."""
    return int(getattr(module, "num_experts", 1))


def adapted_ranks(model: nn.Module, adapter_name: str = "default") -> dict[str, int]:
    """Return the rank by module, read from the tensors of an adapted model."""
    layers = lora_layers(model, adapter_name).items()
    return {n: m.lora_A[adapter_name].weight.shape[0] // _copies(m) for n, m in layers}


@checked
def fold_scales(model: nn.Module, ratio: float = 2.0, adapter_name: str = "default") -> None:
    """Give every module the scale ``ratio`` and its B the rest: the same update, ``alpha = ratio * r`` everywhere.

    After training under ``rslora`` or ``constant-alpha`` this makes an adapter that a server which reads one alpha and one
    rank for all modules applies correctly.

    Raises:
        InvalidInput: A ratio that is not positive, no LoRA adapter of that name, or a variant whose update is no product.
    """
    config, layers = _foldable(model, ratio, adapter_name)
    for module in layers.values():
        _scale(module, ratio, ratio * module.r[adapter_name], adapter_name)
    config.alpha_pattern = {pattern(name): ratio * module.r[adapter_name] for name, module in layers.items()}
    config.use_rslora, config.lora_alpha = False, ratio * config.r


@checked
def pad_ranks(model: nn.Module, ratio: float = 2.0, adapter_name: str = "default") -> int:
    """Give every module the largest rank, by zeros, and the scale ``ratio``: the same update, one rank and one alpha.

    llama.cpp reads one alpha and divides it by the rank of *each* tensor, so ranks that differ get scales that differ. After
    this, all tools apply the same update. The file grows to that of the largest rank everywhere. Call it before
    ``save_pretrained``.

    Returns:
        The rank that every module has now.

    Raises:
        InvalidInput: A ratio that is not positive, no LoRA adapter of that name, or a variant whose update is no product.
    """
    config, layers = _foldable(model, ratio, adapter_name)
    rank = max(module.r[adapter_name] for module in layers.values())
    for module in layers.values():
        _scale(module, ratio, ratio * rank, adapter_name)
        missing, copies = rank - module.r[adapter_name], _copies(module)
        a, b = _factors(module, adapter_name)
        rows, columns = a.detach().unflatten(0, (copies, -1)), b.detach().unflatten(1, (-1, copies))
        a.data = nn.functional.pad(rows, (0, 0, 0, missing)).flatten(0, 1)
        b.data = nn.functional.pad(columns, (0, 0, 0, missing)).flatten(1, 2)
        a.grad = b.grad = None
        if adapter_name in module.lora_A:
            module.lora_A[adapter_name].out_features = module.lora_B[adapter_name].in_features = rank * copies
        module.r[adapter_name] = rank
    config.use_rslora, config.r, config.lora_alpha = False, rank, ratio * rank
    config.rank_pattern, config.alpha_pattern = {}, {}
    return rank


def _foldable(model: nn.Module, ratio: float, adapter_name: str) -> tuple[Any, dict[str, Any]]:
    """The configuration and the layers of a LoRA adapter, those of embeddings too, whose scale can move into B."""
    from peft.tuners.lora import LoraLayer

    if not 0 < ratio < math.inf:
        raise InvalidInput(f"ratio is {ratio}.", "It must be positive.", "")
    names = list(getattr(model, "peft_config", {}))
    if adapter_name not in names:
        there = f"Its adapters are {', '.join(names)}." if names else "It is no PeftModel."
        raise InvalidInput(f"The model has no adapter {adapter_name!r}.", there, "Give the name of one of its adapters.")
    config = adapter_config(model, adapter_name)
    layers = lora_layers(model, adapter_name)
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter_name in module.lora_embedding_A:
            layers[base_name(name)] = module
    if not layers:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise InvalidInput(f"The adapter {adapter_name!r} is of the type {kind}.", "Ranks and scales are those of LoRA.", "")
    for name, module in layers.items():
        variant = module.lora_variant.get(adapter_name)
        kind = type(module.get_base_layer()).__name__ if variant is None else type(variant).__name__.removesuffix("Variant")
        if (variant is not None and not kind.startswith("Dora")) or _factors(module, adapter_name)[0].ndim != 2:
            raise InvalidInput(
                f"{name} has a {kind} adapter, whose update is more than scale times B times A.",
                "LoRA and DoRA of matrices and embeddings can be folded and padded.",
                "Serve this adapter as it was trained.",
            )
    owners = [t.data_ptr() for m in layers.values() for t in _factors(m, adapter_name)]
    if len(set(owners)) < len(owners):
        raise InvalidInput(
            "Embedding and head share the tensors of their adapter (ensure_weight_tying): one scale cannot move into both.",
            "",
            "Merge the adapter (load_adapter with merge=True).",
        )
    return config, layers


def _factors(module: Any, adapter_name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B of a LoRA layer, ``(rank, d_in)`` and ``(d_out, rank)``."""
    if adapter_name in module.lora_A:
        return module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
    return module.lora_embedding_A[adapter_name], module.lora_embedding_B[adapter_name]


def _scale(module: Any, ratio: float, alpha: float, adapter_name: str) -> None:
    """Move what the scale of a module differs from ``ratio`` into its B, and into the bias of B where it has one."""
    bias = getattr(module.lora_B[adapter_name], "bias", None) if adapter_name in module.lora_B else None
    with torch.no_grad():
        for tensor in (_factors(module, adapter_name)[1], bias):
            if tensor is not None:
                tensor.mul_(module.scaling[adapter_name] / ratio)
    module.scaling[adapter_name], module.lora_alpha[adapter_name] = ratio, alpha
    module.use_rslora[adapter_name] = False
