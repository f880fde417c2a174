"""Fine-tuning under FSDP: every process holds its part of the base and of the adapters, and a layer is whole while it runs.

``accelerate launch --use_fsdp --fsdp_version 2`` asks for it. Each decoder layer is one unit (``fully_shard``): its weights
are gathered in front of its forward and backward pass and let go behind it; gradients of the adapters are reduced to the part
that a process holds. What is written is what one process would write: adapters and the optimiser's moments are gathered whole
and process 0 saves them, so a run that began under FSDP goes on under DDP or alone, and the other way round.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import InvalidInput
from ..execution.processes import process_group
from ..models.blocks import layers

_UNHEARD = {  # variables of the launcher that would change what is trained or written
    "FSDP_OFFLOAD_PARAMS": "--fsdp_offload_params", "FSDP_ACTIVATION_CHECKPOINTING": "--fsdp_activation_checkpointing",
    "FSDP_FORWARD_PREFETCH": "--fsdp_forward_prefetch",
}  # fmt: skip


def _set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def wanted() -> bool:
    """Whether the launcher asked several processes to share weights."""
    return _set("ACCELERATE_USE_FSDP") and process_group() is not None


def place(device: torch.device) -> torch.device:
    """Where a model on some device is trained: under FSDP it is loaded on the CPU and shared out from there."""
    together = process_group()
    return together.device if wanted() and together is not None else device


def check() -> None:
    """Refuse what of FSDP is not done here.

    Raises:
        InvalidInput: The first version of FSDP, weights off the device, another policy of wrapping.
    """
    if not wanted():
        return
    for given, option in _UNHEARD.items():
        if _set(given):
            raise InvalidInput(
                f"{option} is not read by a fine-tuning under FSDP.", "It would be ignored.",
                "Use --gradient-checkpointing." if "CHECKPOINTING" in given else "Leave it out.",
            )  # fmt: skip
    version = os.environ.get("FSDP_VERSION", "2")
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    if version != "2":
        raise InvalidInput(
            f"FSDP's version is {version}.", "It is 2: the first one cannot hold frozen weights beside trained ones.",
            "Add --fsdp_version 2.",
        )  # fmt: skip
    if policy not in ("TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        raise InvalidInput(f"FSDP's policy is {policy}.", "Every decoder layer is one unit.", "Leave it out.")


def arguments(model: nn.Module) -> dict[str, Any]:
    """What the Trainer's arguments say of FSDP; nothing without it."""
    if not wanted():
        return {}
    units = sorted({type(layer).__name__ for _, layer in layers(model)})
    config: dict[str, Any] = {
        "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"),
        "transformer_layer_cls_to_wrap": units,
    }  # fmt: skip
    return {"fsdp": True, "fsdp_config": config}


def whole(tensor: Tensor) -> Tensor:
    """A tensor that was shared out, put together on the CPU; every process calls it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, shared out as another one is."""
    value = value.to(tensor.device, tensor.dtype)
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, whole, by name; every process calls it."""
    return {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
