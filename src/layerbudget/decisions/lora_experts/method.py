"""Mixture of LoRA experts as a PEFT method: every module holds its own number of experts and a router over them.

Importing this module registers the method with PEFT, so import it before ``PeftModel.from_pretrained``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from peft.config import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, register_peft_method
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...arguments import checked
from ...errors import CoverageError, InvalidInput, LayerbudgetError
from ...plan import Plan
from ..adapters import attach, base_name, check_modules, counts_by_module, pattern, targets_of
from .layer import NAME, PREFIX, ExpertsConfig, ExpertsLinear, Routing, peft_type_of_experts, shape_of

if TYPE_CHECKING:
    from peft import PeftModel


class ExpertsModel(BaseTuner):
    """A model whose chosen modules carry LoRA experts; made by ``peft.get_peft_model(model, ExpertsConfig(...))``."""

    prefix = PREFIX
    tuner_layer_cls = ExpertsLinear
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # type: ignore[assignment]  # as PEFT's own do

    @property
    def routing(self) -> Routing:
        """Padding mask and loss scale that all routers of this model share."""
        return cast(Routing, self.__dict__.setdefault("_routing", Routing()))

    def _create_and_replace(  # type: ignore[override]  # PEFT calls it with the configuration of this tuner only
        self,
        config: ExpertsConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        experts = config.experts_of(current_key)
        if experts == 0:
            return
        if isinstance(target, ExpertsLinear):
            target.update_layer(adapter_name, experts, config)
            return
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if shape_of(base) is None:
            raise InvalidInput(
                f"{current_key} is a {type(base).__name__}.",
                "Experts go beside Linear layers, GPT-2's Conv1D and quantised Linears.",
                "Leave it out of target_modules.",
            )
        new = ExpertsLinear(target, adapter_name, experts, config, self.routing)
        if adapter_name not in self.active_adapters:
            new.requires_grad_(False)
        self._replace_module(parent, target_name, new, target)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add the experts of one adapter, and divide its balance coefficient so that a layer counts once."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        coefficient = cast(ExpertsConfig, self.peft_config[adapter_name]).balance_coefficient
        groups: dict[str, list[ExpertsLinear]] = {}
        for name, module in model.named_modules():
            if isinstance(module, ExpertsLinear) and adapter_name in module.lora_experts_router:
                match = re.match(r"(.*?\.\d+)\.", name)
                groups.setdefault(match.group(1) if match else name, []).append(module)
        for modules in groups.values():
            for module in modules:
                module.lora_experts_balance[adapter_name] = coefficient / len(modules)

    def _check_merge_allowed(self) -> None:
        """Refuse before anything is merged."""
        super()._check_merge_allowed()
        for module in self.model.modules():
            if isinstance(module, ExpertsLinear):
                module.merge()

    def _pre_injection_hook(self, model: nn.Module, config: PeftConfig, adapter_name: str) -> None:
        """Watch the calls of the model itself: not every wrapper of PEFT calls the tuner's forward."""
        model.register_forward_pre_hook(self.routing.observe, with_kwargs=True)

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> nn.Module:  # type: ignore[override]  # PEFT's says None
        model: nn.Module = super()._unload_and_optionally_merge(*args, **kwargs)  # type: ignore[assignment]
        for key, hook in list(model._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Routing):
                del model._forward_pre_hooks[key]
        return model

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        """Select the adapter's tensors, also where FSDP wrapped nested units."""
        tensors = {k.replace("_fsdp_wrapped_module.", ""): v for k, v in state_dict.items() if f".{PREFIX}" in k}
        if not tensors:
            raise CoverageError(
                f"No tensor of the experts {adapter_name!r} is in the state dict.",
                "",
                "Gather the full state dict before saving.",
            )
        return tensors


class BalanceScale(TrainerCallback):
    """Divides the balance gradient by the accumulation steps, which the Trainer does not do for losses inside a model."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Read the accumulation steps."""
        for tuner in (m for m in getattr(model, "module", model).modules() if isinstance(m, ExpertsModel)):
            tuner.routing.scale = 1.0 / max(1, args.gradient_accumulation_steps)


def to_experts_config(plan: Plan, *, rank: int | None = None, top_k: int = 2, **options: Any) -> ExpertsConfig:
    """A plan of experts as an ``ExpertsConfig``: one escaped full name per module, with the block's count.

    ``rank`` is that of every expert (the plan's ``expert_rank`` by default), ``top_k`` experts read a token; options are passed
    on (``lora_alpha``, ``lora_dropout``, ``balance_coefficient``, ``task_type``, ``modules_to_save``, ...).
    """
    targets, adapted = targets_of(plan, "lora-experts")
    settings = {
        "r": int(rank or plan.hyperparameters.get("expert_rank", 8)),
        "experts": 0,
        "experts_pattern": {pattern(m): e for m, e in adapted.items()},
        "top_k": top_k,
    }
    return ExpertsConfig(**{**targets, **settings, **options})


def adapted_experts(model: nn.Module, adapter_name: str = "default") -> dict[str, int]:
    """Experts by module, read from the tensors of an adapted model."""
    experts = {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLinear) and adapter_name in module.lora_experts_A:
            stacked = cast(nn.Linear, module.lora_experts_A[adapter_name]).weight.shape[0]
            experts[base_name(name)] = stacked // module.lora_experts_config[adapter_name].r
    return experts


@checked
def add_lora_experts(
    model: nn.Module, plan: Plan, *, adapter_name: str = "default", config: Any = None, validate: bool = True, **options: Any
) -> PeftModel:
    """The model adapted by a plan of experts, counted again.

    Arguments and errors are those of ``add_ranks``.
    ``options`` are passed to :func:`to_experts_config`, unless a ``config`` is given.
    """
    counts = counts_by_module(plan, "lora-experts")
    check_modules(model, plan, counts, validate=validate)
    config = config or to_experts_config(plan, **options)
    return cast("PeftModel", attach(model, config, counts, adapted_experts, "experts", adapter_name))


_registered = PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type_of_experts())
if _registered is not None and _registered is not ExpertsConfig:
    raise LayerbudgetError(
        f"PEFT already has a method named {NAME!r} ({_registered.__module__}).",
        "",
        "Import layerbudget without the other package.",
    )
if _registered is None:
    register_peft_method(name=NAME, config_cls=ExpertsConfig, model_cls=ExpertsModel, prefix=PREFIX)
