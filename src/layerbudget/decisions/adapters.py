"""Parts that plans of adapters share: the modules that they name, checks before PEFT wraps them, and a recount after."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

from torch import nn

from ..budget import OWN_UNITS
from ..decision import check_kind
from ..errors import CoverageError, InvalidInput, UnknownBlock
from ..models.blocks import adaptable, describe, is_conv1d, partition
from ..plan import Plan
from ..records import Receipt, stacks


def counts_by_module(plan: Plan, kind: str) -> dict[str, int]:
    """Rank or number of experts of every module that the plan names."""
    check_kind(plan.kind, (kind,), f"gives no {OWN_UNITS[kind]}")
    return {module: block.count for module, block in plan.by_module().items()}


def targets_of(plan: Plan, kind: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The modules that a PEFT configuration names, and the rank or experts of those that get some."""
    counts = counts_by_module(plan, kind)
    adapted = {m: c for m, c in counts.items() if c > 0}
    if not adapted:
        raise InvalidInput(
            f"Every block of this plan has zero {OWN_UNITS[kind]}.", "", "Plan with a larger budget, or a minimum per block."
        )
    return {"target_modules": sorted(adapted), "exclude_modules": sorted(set(counts) - set(adapted)) or None}, adapted


def pattern(name: str) -> str:
    r"""The escaped full name, the only kind of PEFT pattern that means the same after saving.

    >>> pattern("model.layers.1.mlp.up_proj")
    'model\\.layers\\.1\\.mlp\\.up_proj'
    """
    return "".join(c if c.isalnum() or c == "_" else f"\\{c}" for c in name)


def base_name(name: str) -> str:
    """Return the name of a wrapped module as the plain model has it."""
    return name.removeprefix("base_model.model.")


def adapter_config(model: nn.Module, adapter: str) -> Any:
    """Return the configuration of one adapter of a ``PeftModel``, whose fields differ by method."""
    return cast(Any, model).peft_config[adapter]


def check_modules(
    model: nn.Module, plan: Plan, counts: Mapping[str, int], *, validate: bool = True, stacked: Collection[str] = ()
) -> None:
    """Refuse a model that does not have the modules that get capacity, before it is adapted.

    Args:
        model: The model.
        plan: The plan.
        counts: What every module gets.
        validate: Refuse a model whose content digest is not the plan's.
        stacked: Names that may be stacks of experts, which are parameters and no modules.
    """
    if validate and plan.model.get("digest"):
        plan.validate({**describe(model), "id": type(model).__name__})
    modules: dict[str, Any] = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            owners.setdefault(id(module.weight), []).append(name)
    for name in (n for n, count in counts.items() if count):
        if name not in modules:
            if name in stacked and getattr(_parameter(name, modules), "ndim", 0) == 3:
                continue
            raise _missing(name, modules)
        module = modules[name]
        if isinstance(module, nn.Linear) and hasattr(module, "top_k"):
            raise CoverageError(
                f"{name} is a router that also returns whom it chose: PEFT's adapters return a product alone.",
                "",
                f"Score with --exclude '{name.rpartition('.')[2]}$' and plan again.",
            )
        if not isinstance(module, nn.Linear) and not is_conv1d(module):
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
    lost = [n for n in adaptable(model, partition(model, "linear"))[1] if counts.get(n)]
    if lost:
        raise CoverageError(
            f"PEFT refuses this plan's modules: it puts no adapter on {lost[0]} ({len(lost)} such matrices).",
            "It refuses outputs of state space mixers, and takes plain gate, up and down beside fused experts for the experts.",
            _excluding(model, stacked=any(counts.get(n) for n in stacked)),
        )


def _excluding(model: nn.Module, *, stacked: bool) -> str:
    """The remedy for matrices that get no adapter: all of them at once, stacks of experts unless these are ``stacked``."""
    blocks = partition(model, "linear")
    lost = adaptable(model, blocks)[1]
    parents, endings = ("|".join(sorted({n.split(".")[i] for n in lost})) for i in (-2, -1))
    patterns = ["experts[.]"] if stacks(m.name for b in blocks for m in b.modules) and not stacked else []
    patterns += [f"({parents})[.]({endings})$"] if lost else []
    return f"Score with --exclude '{'|'.join(patterns)}' and plan again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterReceipt(Receipt):
    """Recount of a model with adapters; ``model`` is the ``PeftModel``.

    Attributes:
        counts: Rank or experts of every adapted module, by its full name.
        trained: Parameters that are trained.
    """

    counts: Mapping[str, int]
    trained: int

    @classmethod
    def of(
        cls, plan: Plan, model: nn.Module, read: Callable[[nn.Module, str], Mapping[str, int]], options: Mapping[str, Any]
    ) -> AdapterReceipt:
        """Return what was counted in a model that was adapted with ``options``; ``read`` is that of :func:`attach`."""
        counts = read(model, options.get("adapter_name", "default"))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return cls(plan_digest=plan.digest, identity=plan.model, model=model, counts=counts, trained=trained)


@contextlib.contextmanager
def patterns_of_stacks() -> Iterator[None]:
    """Inside, PEFT does not say that patterns of stacks of experts match nothing: it reads them, and looks at modules alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match .*\.experts\\\\\.")
        yield


def attach(
    model: nn.Module,
    config: Any,
    counts: Mapping[str, int],
    read: Callable[[nn.Module, str], Mapping[str, int]],
    unit: str,
    adapter_name: str,
) -> Any:
    """Return the model adapted by PEFT, counted again.

    Args:
        model: The model; PEFT puts the adapters into it.
        config: Of PEFT.
        counts: Planned ranks or experts by module.
        read: Gives the ranks or experts by module that an adapted model has; they must be those of ``counts``.
        unit: What is counted, for the message: ``rank`` or ``experts``.
        adapter_name: Of the adapter.

    Raises:
        CoverageError: Some module has not what was planned.
    """
    from peft import get_peft_model

    with patterns_of_stacks():
        adapted = get_peft_model(cast(Any, model), config, adapter_name=adapter_name)
    actual, expected = read(adapted, adapter_name), {m: c for m, c in counts.items() if c}
    for name in sorted(set(actual) | set(expected)):
        got, planned = actual.get(name, 0), expected.get(name, 0)
        if got != planned:
            raise CoverageError(
                f"{name} {f'got {unit} {got}' if got else 'was not adapted'}; the plan gives it {unit} {planned}.",
                f"{len(expected)} modules are planned, {len(actual)} were adapted.",
                "Use the patterns of to_lora_config or to_experts_config unchanged.",
            )
    return adapted


def _parameter(name: str, modules: Mapping[str, nn.Module]) -> Any:
    """The parameter of that full name; None where there is none."""
    parent, _, last = name.rpartition(".")
    return getattr(modules.get(parent), last, None)


def _missing(name: str, modules: Mapping[str, nn.Module]) -> Exception:
    """The error for a name that is not a module: a fused parameter, a fused projection, or a typo."""
    parent, _, last = name.rpartition(".")
    if isinstance(_parameter(name, modules), nn.Parameter):
        return CoverageError(
            f"{name} is a parameter of {type(modules[parent]).__name__} that holds several experts in one tensor.",
            "Ranks can stand beside it where it is called up_proj, gate_up_proj or down_proj; experts stand beside modules.",
            _excluding(modules[""], stacked=False),
        )
    siblings = [n for n in modules if n.rpartition(".")[0] == parent and n] or [n for n in modules if n.endswith("." + last)]
    fused = [n for n in siblings if "qkv" in n or "c_attn" in n or "query_key_value" in n or "gate_up" in n]
    return UnknownBlock(
        f"The model has no module {name!r}" + (f"; it holds that projection fused in {fused[0]}." if fused else "."),
        f"Beside it are {', '.join(siblings[:4])}." if siblings else "",
        "Partition and score this model, then plan again."
        if fused
        else "Correct the name, or score and plan this model again.",
    )
