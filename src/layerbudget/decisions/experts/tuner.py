"""The PEFT tuner: finds the modules, gives each its experts, hands the padding mask to the routers."""

from __future__ import annotations

import re
from typing import Any, cast

from peft.config import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor, nn

from ...errors import CoverageError, InvalidInput
from .balance import Routing
from .config import ExpertsConfig
from .layer import ExpertsLayer, ExpertsLinear, shape_of
from .naming import PREFIX


class ExpertsModel(BaseTuner):
    """A model whose chosen modules carry LoRA experts; made by ``peft.get_peft_model(model, ExpertsConfig(...))``."""

    prefix = PREFIX
    tuner_layer_cls = ExpertsLayer
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # type: ignore[assignment]  # as PEFT's own do

    @property
    def routing(self) -> Routing:
        """Padding mask and loss scale that all routers of this model share."""
        if "_routing" not in self.__dict__:
            self.__dict__["_routing"] = Routing()
        return self.__dict__["_routing"]

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
                found = re.match(r"(.*?\.\d+)\.", name)
                groups.setdefault(found.group(1) if found else name, []).append(module)
        for modules in groups.values():
            for module in modules:
                module.lora_experts_balance[adapter_name] = coefficient / len(modules)

    def _check_merge_allowed(self) -> None:
        """Refuse before anything is merged.

        Raises:
            InvalidInput: Some module has a router.
        """
        super()._check_merge_allowed()
        for name, module in self.model.named_modules():
            if isinstance(module, ExpertsLinear) and any(n in module.lora_experts_router for n in module.active_adapters):
                raise InvalidInput(
                    f"{name} has {max(module.lora_experts_count.values())} experts; its update depends on the token.",
                    "Only modules with one expert can be merged.",
                    "Keep the adapter beside the model, or plan ranks instead of experts.",
                )

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
        """Select the adapter's tensors, also where FSDP wrapped nested units.

        Raises:
            CoverageError: Nothing was found to save.
        """
        wrapped = "_fsdp_wrapped_module."
        found = super()._get_adapter_state_dict(
            model=model,
            config=config,
            adapter_name=adapter_name,
            state_dict=state_dict,
            unwanted_adapter_names=unwanted_adapter_names,
        )
        if not found:
            found = {k.replace(wrapped, ""): v for k, v in state_dict.items() if f".{PREFIX}" in k.replace(wrapped, "")}
        if not found:
            raise CoverageError(
                f"No tensor of the experts {adapter_name!r} is in the state dict.",
                "",
                "Gather the full state dict before saving.",
            )
        return found
