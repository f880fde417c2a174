"""The adapted module: a frozen base layer, stacked experts and a router, each an ``nn.Linear`` leaf."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import InvalidInput
from ...models.blocks import is_conv1d
from ..ranks.targets import leaf
from .balance import Routing, attach, balance_loss
from .config import ExpertsConfig
from .forms import fused, route, spread


def shape_of(base: Any) -> tuple[int, int] | None:
    """``(d_in, d_out)`` of a base layer that can be adapted, else ``None`` (quantised Linears included)."""
    if is_conv1d(base):
        d_in, d_out = base.weight.shape
        return d_in, d_out
    if hasattr(base, "in_features") and hasattr(base, "out_features"):
        return base.in_features, base.out_features
    return None


class ExpertsLayer(BaseTunerLayer):
    """State of the experts of one module, by adapter name."""

    adapter_layer_names = ("lora_experts_A", "lora_experts_B", "lora_experts_router")
    other_param_names = (
        "lora_experts_r", "lora_experts_count", "lora_experts_top_k", "lora_experts_scale", "lora_experts_dropout",
        "lora_experts_balance",
    )  # fmt: skip

    def __init__(self, base_layer: nn.Module, routing: Routing) -> None:
        self.base_layer = base_layer
        self.d_in, self.d_out = cast(tuple[int, int], shape_of(self.get_base_layer()))  # the tuner refuses what has none
        self.routing = routing
        self.lora_experts_A = nn.ModuleDict()
        self.lora_experts_B = nn.ModuleDict()
        self.lora_experts_router = nn.ModuleDict()
        self.lora_experts_dropout = nn.ModuleDict()
        self.lora_experts_r: dict[str, int] = {}
        self.lora_experts_count: dict[str, int] = {}
        self.lora_experts_top_k: dict[str, int] = {}
        self.lora_experts_scale: dict[str, float] = {}
        self.lora_experts_balance: dict[str, float] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def update_layer(self, adapter_name: str, experts: int, config: ExpertsConfig) -> None:
        """Add the experts of one adapter, initialised so that the output does not change."""
        self.lora_experts_r[adapter_name] = config.r
        self.lora_experts_count[adapter_name] = experts
        self.lora_experts_top_k[adapter_name] = min(config.top_k, experts)
        self.lora_experts_scale[adapter_name] = config.lora_alpha / config.r
        self.lora_experts_balance[adapter_name] = config.balance_coefficient
        self.lora_experts_A[adapter_name] = nn.Linear(self.d_in, experts * config.r, bias=False)
        self.lora_experts_B[adapter_name] = nn.Linear(experts * config.r, self.d_out, bias=False)
        if experts > 1:
            self.lora_experts_router[adapter_name] = nn.Linear(self.d_in, experts, bias=False)
        if config.lora_dropout > 0:
            self.lora_experts_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        self.reset(adapter_name, config.init_weights)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def reset(self, adapter_name: str, init_weights: bool = True) -> None:
        """Initialise as published: uniform in ``1/sqrt(d_in)`` for A and the router, zero for B."""
        nn.init.kaiming_uniform_(leaf(self.lora_experts_A, adapter_name).weight, a=math.sqrt(5))
        if adapter_name in self.lora_experts_router:
            nn.init.kaiming_uniform_(leaf(self.lora_experts_router, adapter_name).weight, a=math.sqrt(5))
        if init_weights:
            nn.init.zeros_(leaf(self.lora_experts_B, adapter_name).weight)
        else:
            nn.init.kaiming_uniform_(leaf(self.lora_experts_B, adapter_name).weight, a=math.sqrt(5))


def _plain(*leaves: nn.Module) -> bool:
    """Whether weights may be read directly: plain Linears that no wrapper (FSDP, ZeRO-3) or hook watches."""
    return all(type(m) is nn.Linear and not (m._forward_pre_hooks or m._forward_hooks) for m in leaves)


class ExpertsLinear(nn.Module, ExpertsLayer):
    """A Linear (or GPT-2's ``Conv1D``, or a quantised Linear) with LoRA experts beside it."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, experts: int, config: ExpertsConfig, routing: Routing) -> None:
        super().__init__()
        ExpertsLayer.__init__(self, base_layer, routing)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, experts, config)

    def _project(self, x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """Rank space ``(..., E r)`` and router logits ``(..., E)``, from one product where nothing stands between."""
        a = leaf(self.lora_experts_A, name)
        router = leaf(self.lora_experts_router, name) if name in self.lora_experts_router else None
        dropout = self.lora_experts_dropout[name] if name in self.lora_experts_dropout and self.training else None
        if router is None:
            return a(x if dropout is None else dropout(x)), None
        if dropout is not None or not _plain(a, router):
            return a(x if dropout is None else dropout(x)), router(x)
        # One pass over the input for both: the second pass, forward and backward, is most of what a router costs.
        both = F.linear(x, torch.cat([a.weight, router.weight]))
        return both.split([a.out_features, router.out_features], dim=-1)

    def _update(self, x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """Update ``(..., d_out)`` of one adapter and its balance loss, where there is one to take."""
        scale = self.lora_experts_scale[name]
        x = self._cast_input_dtype(x, leaf(self.lora_experts_A, name).weight.dtype)
        hidden, logits = self._project(x, name)
        if logits is None:
            return self.lora_experts_B[name](hidden * scale), None
        gate = route(logits, self.lora_experts_top_k[name])
        b, rank = leaf(self.lora_experts_B, name), self.lora_experts_r[name]
        if _plain(b):
            update = fused(hidden, gate, b.weight, rank, scale)
        else:
            update = b(hidden * spread(gate * scale, rank, hidden.dtype))
        coefficient = self.lora_experts_balance[name] * self.routing.scale
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return update, None
        return update, coefficient * balance_loss(logits, gate, self.routing.tokens(x.shape[:-1]))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Add to the base layer's output the update of every active adapter."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for name in self.active_adapters:
            if name not in self.lora_experts_A:
                continue
            update, loss = self._update(x, name)
            result = result + update.to(result.dtype)
            if loss is not None:
                result = attach(result, loss)
        return result

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Weight update ``(d_out, d_in)`` of an adapter with one expert.

        Raises:
            InvalidInput: The module has a router: its update depends on the token, so no weight holds it.
        """
        if self.lora_experts_count[adapter] > 1:
            raise InvalidInput(
                f"A module with {self.lora_experts_count[adapter]} experts cannot be merged: its update depends on the token.",
                "Only modules with one expert, and plain LoRA ranks, can be merged.",
                "Keep the adapter beside the model, or plan ranks instead of experts.",
            )
        a, b = leaf(self.lora_experts_A, adapter).weight, leaf(self.lora_experts_B, adapter).weight
        delta = (b @ a) * self.lora_experts_scale[adapter]
        return delta.T if is_conv1d(self.get_base_layer()) else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the update to the base weight (modules with one expert).

        Raises:
            InvalidInput: The module has a router, or the merged weight would not be finite.
        """
        from peft.tuners.tuners_utils import check_adapters_to_merge

        for name in check_adapters_to_merge(self, adapter_names) or ():
            if name not in self.lora_experts_A:
                continue
            weight = self._base_weight()
            merged = weight.data + self.get_delta_weight(name).to(weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise InvalidInput(f"Merging adapter {name!r} gives weights that are not finite.", "", "Retrain the adapter.")
            weight.data = merged
            self.merged_adapters.append(name)

    def _base_weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.get_base_layer().weight)

    def unmerge(self) -> None:
        """Take merged updates out of the base weight again."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            weight = self._base_weight()
            weight.data -= self.get_delta_weight(name).to(weight.dtype)

    def __repr__(self) -> str:
        return "experts." + super().__repr__()
