"""Remove the experts that a plan lets go, and recount."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...arguments import checked
from ...decision import check_kind
from ...errors import CoverageError
from ...models.blocks import describe
from ...models.experts import EXPERTS_KEPT, ExpertLayer, cut_experts, find_experts
from ...plan import Plan, payload_of
from ...progress import Progress, Steps
from ...records import Receipt
from .payload import ExpertPruningPayload


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertReceipt(Receipt):
    """Recount of a model that lost experts."""

    experts: Mapping[str, int]  # before, after
    layers: Mapping[str, int]  # experts that stay, by block
    parameters: Mapping[str, int]  # before, after, of the whole model
    active: Mapping[str, int]  # parameters that one token passes through, before and after
    bytes: Mapping[str, int]
    even: bool
    loads: str  # who loads it


@checked
def keep_experts(model: nn.Module, plan: Plan, *, progress: Progress | None = None) -> ExpertReceipt:
    """Remove all experts but those of a plan, with their rows of the router and their biases, in place, and recount.

    ``save_pretrained`` then writes an ordinary checkpoint where all layers keep as many. Where they differ, the config says so
    (``experts_kept``), and :func:`~layerbudget.models.loading.load_model` loads the folder.

    Args:
        model: The model that the plan was made for.
        plan: From :func:`~layerbudget.decisions.expert_pruning.plan.plan_expert_pruning`.
        progress: Called with (layers done, layers).

    Raises:
        InvalidInput: Not a plan of experts that stay.
        ModelMismatch: The plan belongs to another model.
        CoverageError: The recount differs from the plan.
    """
    check_kind(plan.kind, ("expert-pruning",), "does not say which experts stay")
    identity = describe(model)
    plan.validate(identity)
    before = _sizes(model)
    tick = Steps(progress, len(plan.blocks))
    cut_experts(model, payload_of(plan, ExpertPruningPayload).kept)
    tick(len(plan.blocks))
    after = _sizes(model)
    layers = {e.name: e.count for e in find_experts(model)}
    if layers != {b.name: b.count for b in plan.blocks}:
        raise CoverageError(f"The layers are left with {layers}.", "That is not what was planned.", "Report this.")
    sizes: dict[str, Any] = {name: {"before": before[name], "after": after[name]} for name in before}
    even = not hasattr(model.config, EXPERTS_KEPT)
    return ExpertReceipt(
        plan_digest=plan.digest,
        identity=identity,
        model=model,
        **sizes,
        layers=layers,
        even=even,
        loads="transformers, and by what reads its checkpoints (vLLM, ...)" if even else "layerbudget.load_model",
    )


def _sizes(model: nn.Module) -> dict[str, Any]:
    """Experts, parameters, active parameters and bytes of a model."""
    expert_layers = find_experts(model)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "experts": sum(e.count for e in expert_layers),
        "parameters": parameters,
        "active": parameters - sum(_idle(e) for e in expert_layers),
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def _idle(layer: ExpertLayer) -> int:
    """Parameters of the experts that a token is not given."""
    return sum(p.numel() for p in layer.experts.parameters()) // layer.count * (layer.count - layer.top_k)
