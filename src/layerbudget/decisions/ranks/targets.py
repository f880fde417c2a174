"""From a plan to module names in a model, and back: what will be adapted, and a recount of what was.

A plan names weight matrices. PEFT wraps modules found by patterns, skips silently what a pattern misses, and gives a tied
weight an adapter on one side only. So names are checked before, and parameters counted after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from ...errors import CoverageError, InvalidInput, UnknownBlock
from ...models.blocks import adaptable, describe, is_conv1d, partition
from ...plan import Plan


def counts_by_module(plan: Plan, kind: str) -> dict[str, int]:
    """Rank or number of experts of every module that the plan names.

    Raises:
        InvalidInput: The plan is of another kind.
    """
    if plan.kind != kind:
        raise InvalidInput(
            f"This plan is of kind {plan.kind!r}.",
            f"A plan of kind {kind!r} is needed here.",
            f"Make one with `layerbudget plan {kind}`.",
        )
    return {module: block.count for module, block in plan.by_module().items()}


def pattern(name: str) -> str:
    r"""Escaped full name, the only kind of PEFT pattern that means the same after saving.

    >>> pattern("model.layers.1.mlp.up_proj")
    'model\\.layers\\.1\\.mlp\\.up_proj'
    """
    return "".join(c if c.isalnum() or c == "_" else f"\\{c}" for c in name)


def check(model: nn.Module, plan: Plan, counts: Mapping[str, int], *, validate: bool = True) -> dict[str, tuple[int, int]]:
    """``(d_in, d_out)`` of every module that gets capacity, in the plan's order.

    Args:
        model: The model before any adapter.
        plan: The plan, for its model digest.
        counts: Rank or experts by module name.
        validate: Refuse a model whose content digest is not the plan's.

    Raises:
        ModelMismatch: The plan was made for another model.
        UnknownBlock: The model has no such module (a typo, or a projection that this model holds fused with others).
        CoverageError: A module that an adapter cannot stand beside: fused three-dimensional experts, or a weight that is
            tied to another module's.
    """
    if validate and plan.model.get("digest"):
        plan.validate({**describe(model), "id": type(model).__name__})
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            owners.setdefault(id(weight), []).append(name)
    shapes: dict[str, tuple[int, int]] = {}
    for name, count in counts.items():
        if count == 0:
            continue
        if name not in modules:
            raise _missing(name, modules)
        module = modules[name]
        if isinstance(module, nn.Linear):
            shapes[name] = (module.in_features, module.out_features)
        elif is_conv1d(module):
            d_in, d_out = module.weight.shape
            shapes[name] = (d_in, d_out)
        else:
            raise CoverageError(
                f"{name} is a {type(module).__name__}.",
                "Adapters stand beside Linear layers and Conv1D.",
                "Exclude it in the plan.",
            )
        others = [o for o in owners[id(module.weight)] if o != name]
        if others:
            raise CoverageError(
                f"{name} shares its weight with {', '.join(others)}: an adapter beside one of them would untie the two.",
                "A plan adapts modules that own their weight.",
                f"Exclude {name} from the plan (--exclude), or untie the model first.",
            )
    return shapes


def adapt(
    model: nn.Module, plan: Plan, kind: str, config: Callable[[], Any], found: Callable[[nn.Module, str], Mapping[str, int]], *,
    adapter_name: str, validate: bool,
) -> tuple[Any, dict[str, int], dict[str, tuple[int, int]]]:  # fmt: skip
    """Check the plan's names, adapt the model with PEFT, and recount.

    Args:
        model: The model before any adapter.
        plan: The plan.
        kind: ``ranks`` or ``experts``.
        config: Makes the PEFT configuration; called once the names are known to be right.
        found: Reads rank or experts by module from the adapted model.
        adapter_name: Name of the adapter in PEFT.
        validate: Refuse a model whose content digest is not the plan's.

    Returns:
        The ``PeftModel``, the plan's count and ``(d_in, d_out)`` by module.

    Raises:
        InvalidInput: A plan of another kind.
        ModelMismatch, UnknownBlock, CoverageError: As :func:`check` and :func:`recount` raise them.
    """
    from peft import get_peft_model

    counts = counts_by_module(plan, kind)
    shapes = check(model, plan, counts, validate=validate)
    lost = adaptable(model, partition(model, "linear"))[1] if kind == "ranks" else []
    if lost := [n for n in lost if counts.get(n)]:
        raise CoverageError(
            f"PEFT refuses this plan's modules: it puts no adapter on {lost[0]} ({len(lost)} such matrices).",
            "It refuses outputs of state space mixers, and takes plain gate, up and down beside fused experts for the experts.",
            f"Score with --exclude and a regular expression of those ('{_matching(lost)}'), and plan again.",
        )
    settings = config()
    try:
        adapted = get_peft_model(model, settings, adapter_name=adapter_name)
    except ValueError as error:
        raise CoverageError(
            f"PEFT refuses this plan's modules: {error}", "",
            "Score with --exclude and a regular expression of that module (for a Mamba mixer '\\.out_proj$'), and plan again.",
        ) from error  # fmt: skip
    unit = "rank" if kind == "ranks" else "experts"
    recount(found(adapted, adapter_name), {m: c for m, c in counts.items() if c}, unit)
    return adapted, counts, shapes


def _matching(names: Sequence[str]) -> str:
    """An expression that the last words of some names match."""
    return "[.](" + "|".join(sorted({n.rpartition(".")[2] for n in names})) + ")$"


def _missing(name: str, modules: Mapping[str, nn.Module]) -> Exception:
    """Return the error for a name that is not a module: a fused parameter, a fused projection, or a typo."""
    parent, _, leaf = name.rpartition(".")
    owner = modules.get(parent)
    if owner is not None and isinstance(getattr(owner, leaf, None), nn.Parameter):
        return CoverageError(
            f"{name} is a parameter of {type(owner).__name__} that holds several experts in one tensor.",
            "LoRA of PEFT stands beside modules.",
            "Exclude it in the plan (--exclude), or use PEFT's target_parameters by hand.",
        )
    siblings = [n for n in modules if n.rpartition(".")[0] == parent and n] or [n for n in modules if n.endswith("." + leaf)]
    fused = [n for n in siblings if "qkv" in n or "c_attn" in n or "query_key_value" in n or "gate_up" in n]
    return UnknownBlock(
        f"The model has no module {name!r}" + (f"; it holds that projection fused in {fused[0]}." if fused else "."),
        f"Beside it are {', '.join(siblings[:4])}." if siblings else "",
        "Partition and score this model, then plan again."
        if fused
        else "Correct the name, or score and plan this model again.",
    )


def recount(found: Mapping[str, int], expected: Mapping[str, int], unit: str) -> None:
    """Compare what is in the adapted model with the plan, module by module.

    Args:
        found: Rank or experts by module, read from the adapted model.
        expected: The same by the plan, zeros left out.
        unit: ``rank`` or ``experts``, for the message.

    Raises:
        CoverageError: Names the first module that differs.
    """
    for name in sorted(set(found) | set(expected)):
        got, planned = found.get(name, 0), expected.get(name, 0)
        if got != planned:
            what = "was not adapted" if not got else f"got {unit} {got}"
            raise CoverageError(
                f"{name} {what}; the plan gives it {unit} {planned}.",
                f"{len(expected)} modules are planned, {len(found)} were adapted.",
                "Use the patterns of to_lora_config or to_experts_config unchanged.",
            )


def leaf(holder: nn.ModuleDict, adapter: str) -> nn.Linear:
    """One adapter's matrix among those that an adapted module holds."""
    return cast(nn.Linear, holder[adapter])


def adapter_config(model: nn.Module, adapter: str) -> Any:
    """Configuration of one adapter of a ``PeftModel``, whose fields differ by method."""
    return cast(Any, model).peft_config[adapter]


def base_name(name: str) -> str:
    """Name of a wrapped module as the plain model has it."""
    return name.removeprefix("base_model.model.")
