r"""The adapted module: a frozen base layer with LoRA experts and a router, and the loss that balances the experts.

For tokens ``x (T, d_in)``, stacked factors ``A (E r, d_in)`` and ``B (d_out, E r)`` and a gate ``(T, E)`` that is zero for
experts that were not chosen, the update is ``y_t = scale * sum_e gate_{t,e} B_e A_e x_t``. Two matrix products compute it for
all experts, with the gate applied in between, in rank space (``T x E r`` numbers): adapters of rank 8 are bound by memory
traffic, not by arithmetic.

Balance: for a module with E experts, ``loss = E sum_e f_e P_e``: ``f_e`` is the share of the top-k choices that went to expert
e, ``P_e`` the mean of its full softmax. It is 1 at perfect balance (Shazeer et al. 2017; Fedus et al. 2021; MoLA). The loss is
attached inside the layer: the layer's output passes through unchanged, and the backward pass adds the loss's own gradient. So
it reaches the router under every trainer, also where a trainer recomputes the loss from the logits or where checkpointing runs
the first pass without gradients.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, cast

import torch
from peft.config import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.peft_types import PeftType
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import InvalidInput
from ...models.blocks import is_conv1d

NAME, PREFIX = "lora_experts", "lora_experts_"


def peft_type_of_experts() -> PeftType:
    """``PeftType.LORA_EXPERTS``: PEFT asks that this enumeration, which has no extension point, have a member of the name."""
    name = NAME.upper()
    if name not in PeftType.__members__:
        member = str.__new__(PeftType, name)
        member._name_ = member._value_ = name
        PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
        PeftType._member_names_.append(name)
        type.__setattr__(PeftType, name, member)
    return PeftType[name]


@dataclasses.dataclass
class ExpertsConfig(PeftConfig):
    """Which modules get how many LoRA experts, and how a token chooses among them.

    A module with weight ``W`` and ``E`` experts computes, for a token ``x``,

        ``y = W x + sum_{e in top-k} w_e (alpha / r) B_e A_e dropout(x)``,  ``w = softmax(R x)`` over the k chosen experts,

    with ``A_e`` of shape ``(r, d_in)``, ``B_e`` of shape ``(d_out, r)`` and a bias-free router ``R`` of shape ``(E, d_in)``
    that sees the module's own input. One expert is plain LoRA without a router; zero experts leave the module untouched.
    Routing follows the published MoLA (softmax in float32 over all experts, top-k, renormalised to one).

    A pattern is one escaped full name per key: PEFT saves patterns with sorted keys and the first match wins, so overlapping
    patterns would mean something else after loading.

    Attributes:
        r: Rank of every expert.
        lora_alpha: Numerator of the scale alpha / r.
        lora_dropout: Dropout on the experts' input, one mask per module; the router sees it without.
        target_modules, exclude_modules, modules_to_save: As everywhere in PEFT.
        experts: Experts of a module that no pattern names.
        experts_pattern: Experts by escaped full name.
        top_k: Experts per token; a module with fewer experts uses all of its own.
        balance_coefficient: Weight of the load-balancing loss, averaged over the modules of a layer and summed over layers.
        init_weights: Start every B at zero: the adapted model equals the base model.
    """

    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    experts: int = 1
    experts_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    top_k: int = 2
    balance_coefficient: float = 0.0
    modules_to_save: list[str] | None = None
    init_weights: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = peft_type_of_experts()
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), (list, tuple)):
                setattr(self, name, set(getattr(self, name)))
        for name, low in (("r", 1), ("top_k", 1), ("experts", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < low:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}.", f"It is an integer of at least {low}.", "")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise InvalidInput(f"lora_dropout is {self.lora_dropout}.", "It lies in [0, 1).", "The paper used 0.05.")
        for name, count in self.experts_pattern.items():
            if not isinstance(count, int) or count < 0:
                raise InvalidInput(f"{name} asks for {count!r} experts.", "A count is an integer of at least 0.", "")

    def experts_of(self, name: str) -> int:
        """Return the experts of a module by its full name."""
        named = (count for key, count in self.experts_pattern.items() if re.match(rf"(.*\.)?({key})$", name))
        return next(named, self.experts)


def route(logits: Tensor, top_k: int) -> Tensor:
    """Return the gate ``(..., E)`` of router logits: softmax over all experts, top-k, renormalised, in float32; zero elsewhere.

    >>> route(torch.tensor([[0.0, 1.0, 1.0]]), 2)
    tensor([[0.0000, 0.5000, 0.5000]])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if top_k >= logits.shape[-1]:
        return logits.softmax(-1)
    values, index = logits.topk(top_k, dim=-1)
    return torch.zeros_like(logits).scatter(-1, index, values.softmax(-1))


class _GatedProduct(torch.autograd.Function):
    """``(hidden * gate) B'``, keeping rank space and gate for the backward pass; their product is made again there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, gate: Tensor, b: Tensor, rank: int) -> Tensor:
        return F.linear(hidden * gate.repeat_interleave(rank, dim=-1), b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        hidden, gate, b, ctx.rank = inputs
        ctx.save_for_backward(hidden, gate, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of hidden states, gate and factors."""
        hidden, gate, b = ctx.saved_tensors
        factor = gate.repeat_interleave(ctx.rank, dim=-1)
        gradient = gradient.to(hidden.dtype)
        inner = gradient @ b.to(hidden.dtype)
        gated = (hidden * factor).reshape(-1, hidden.shape[-1])
        for_b = gradient.reshape(-1, gradient.shape[-1]).T @ gated
        for_gate = (inner * hidden).unflatten(-1, (gate.shape[-1], ctx.rank)).sum(-1)
        return inner * factor, for_gate, for_b.to(b.dtype), None


class Routing:
    """State that all layers of one adapted model share."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None  # padding (batch, length) of the batch at work, 1 for real tokens; None counts all
        self.scale = 1.0  # of the balance gradient: 1 / gradient_accumulation_steps

    def observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the batch's padding mask: a forward pre-hook of the adapted model."""
        mask = kwargs.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def tokens(self, shape: torch.Size) -> Tensor | None:
        """Return the flat mask for an input of leading shape ``shape``; ``None`` where the mask does not fit it (packing)."""
        if self.mask is None or tuple(self.mask.shape) != tuple(shape):
            return None
        return self.mask.reshape(-1).bool()

    def __deepcopy__(self, memo: dict[int, Any]) -> Routing:
        copy = memo[id(self)] = Routing()
        copy.scale = self.scale
        return copy


def balance_loss(logits: Tensor, gate: Tensor, tokens: Tensor | None = None) -> Tensor:
    """``E sum_e f_e P_e`` of router logits and gate ``(..., E)``; ``tokens`` is a flat mask of the tokens that count."""
    experts = logits.shape[-1]
    probabilities = logits.float().reshape(-1, experts).softmax(-1)
    chosen = (gate.detach().reshape(-1, experts) > 0).float()
    count: Any = len(probabilities)
    if tokens is not None:
        weight = tokens.float().unsqueeze(-1)
        probabilities, chosen, count = probabilities * weight, chosen * weight, weight.sum().clamp(min=1)
    share = chosen.sum(0) / chosen.sum().clamp(min=1)
    return experts * (share * (probabilities.sum(0) / count)).sum()


class _Attach(torch.autograd.Function):
    """Identity on ``output``; in the backward pass ``loss`` receives the gradient one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.dtype, device=ctx.device)


def shape_of(base: Any) -> tuple[int, int] | None:
    """Return ``(d_in, d_out)`` of a base layer that can be adapted, else ``None`` (quantised Linears included)."""
    if is_conv1d(base):
        d_in, d_out = base.weight.shape
        return d_in, d_out
    if hasattr(base, "in_features") and hasattr(base, "out_features"):
        return base.in_features, base.out_features
    return None


def _plain(*leaves: nn.Module) -> bool:
    """Whether weights may be read directly: plain Linears that no wrapper (FSDP, ZeRO-3) or hook watches."""
    return all(type(m) is nn.Linear and not (m._forward_pre_hooks or m._forward_hooks) for m in leaves)


class ExpertsLinear(nn.Module, BaseTunerLayer):
    """A Linear (or GPT-2's ``Conv1D``, or a quantised Linear) with LoRA experts beside it, by adapter name."""

    adapter_layer_names = ("lora_experts_A", "lora_experts_B", "lora_experts_router")
    other_param_names = ("lora_experts_config", "lora_experts_dropout", "lora_experts_balance")

    def __init__(self, base_layer: nn.Module, adapter_name: str, experts: int, config: ExpertsConfig, routing: Routing) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.d_in, self.d_out = cast(tuple[int, int], shape_of(self.get_base_layer()))  # the tuner refuses what has none
        self.routing = routing
        self.lora_experts_A = nn.ModuleDict()
        self.lora_experts_B = nn.ModuleDict()
        self.lora_experts_router = nn.ModuleDict()
        self.lora_experts_dropout = nn.ModuleDict()
        self.lora_experts_config: dict[str, ExpertsConfig] = {}
        self.lora_experts_balance: dict[str, float] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, experts, config)

    def update_layer(self, adapter_name: str, experts: int, config: ExpertsConfig) -> None:
        """Add the experts of one adapter as published: A and router uniform in ``1/sqrt(d_in)``, B zero (no change)."""
        self.lora_experts_config[adapter_name] = config
        self.lora_experts_balance[adapter_name] = config.balance_coefficient
        a = self.lora_experts_A[adapter_name] = nn.Linear(self.d_in, experts * config.r, bias=False)
        b = self.lora_experts_B[adapter_name] = nn.Linear(experts * config.r, self.d_out, bias=False)
        router = nn.Linear(self.d_in, experts, bias=False) if experts > 1 else None
        if config.lora_dropout > 0:
            self.lora_experts_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
        if router is not None:
            self.lora_experts_router[adapter_name] = router
            nn.init.kaiming_uniform_(router.weight, a=math.sqrt(5))
        if config.init_weights:
            nn.init.zeros_(b.weight)
        else:
            nn.init.kaiming_uniform_(b.weight, a=math.sqrt(5))
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _project(self, x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """Rank space ``(..., E r)`` and router logits ``(..., E)``, from one product where nothing stands between."""
        a = cast(nn.Linear, self.lora_experts_A[name])
        router = cast(nn.Linear, self.lora_experts_router[name]) if name in self.lora_experts_router else None
        dropout = self.lora_experts_dropout[name] if name in self.lora_experts_dropout and self.training else None
        if router is None or dropout is not None or not _plain(a, router):
            return a(x if dropout is None else dropout(x)), None if router is None else router(x)
        # One pass over the input for both: the second pass, forward and backward, is most of what a router costs.
        both = F.linear(x, torch.cat([a.weight, router.weight]))
        return both.split([a.out_features, router.out_features], dim=-1)

    def _update(self, x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """Update ``(..., d_out)`` of one adapter and its balance loss, where there is one to take."""
        config = self.lora_experts_config[name]
        scale, rank = config.lora_alpha / config.r, config.r
        b = cast(nn.Linear, self.lora_experts_B[name])
        x = self._cast_input_dtype(x, cast(nn.Linear, self.lora_experts_A[name]).weight.dtype)
        hidden, logits = self._project(x, name)
        if logits is None:
            return b(hidden * scale), None
        gate = route(logits, config.top_k)
        scaled = (gate * scale).to(hidden.dtype)
        if _plain(b):
            update = _GatedProduct.apply(hidden, scaled, b.weight, rank)
        else:
            update = b(hidden * scaled.repeat_interleave(rank, dim=-1))
        coefficient = self.lora_experts_balance[name] * self.routing.scale
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return update, None
        return update, coefficient * balance_loss(logits, gate, self.routing.tokens(x.shape[:-1]))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the base layer's output plus the update of every active adapter."""
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name not in self.lora_experts_A:
                continue
            update, loss = self._update(x, name)
            result = result + update.to(result.dtype)
            if loss is not None:
                result = _Attach.apply(result, loss)
        return result

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse: no weight holds an update that depends on the token."""
        raise InvalidInput(
            "A mixture of experts cannot be merged: its update depends on the token.",
            "Plain LoRA ranks can be merged.",
            "Keep the adapter beside the model, or plan ranks instead of experts.",
        )

    def __repr__(self) -> str:
        return "experts." + super().__repr__()
