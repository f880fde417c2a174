"""Remove the experts that a plan lets go, and recount."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import CoverageError
from ...kinds import check_kind
from ...models.blocks import describe
from ...models.experts import EXPERTS_KEPT, ExpertLayer, cut_experts, find_experts
from ...plan import Plan
from ...planning.card import loading, model_card
from ...records import Result


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExpertReceipt(Result):
    """Recount of a model that lost experts."""

    experts: Mapping[str, int]  # before, after
    layers: Mapping[str, int]  # experts that stay, by block
    parameters: Mapping[str, int]  # before, after, of the whole model
    active: Mapping[str, int]  # parameters that one token passes through, before and after
    bytes: Mapping[str, int]
    even: bool
    loads: str  # who loads it


def keep_experts(model: nn.Module, plan: Plan) -> ExpertReceipt:
    """Remove all experts but those of a plan, with their rows of the router and their biases, in place, and recount.

    ``save_pretrained`` then writes an ordinary checkpoint where all layers keep as many. Where they differ, the config says so
    (``experts_kept``), and :func:`~layerbudget.models.loading.load_model` loads the folder.

    Args:
        model: The model that the plan was made for.
        plan: From :func:`~layerbudget.decisions.kept_experts.plan.plan_kept_experts`.

    Raises:
        InvalidInput: Not a plan of experts that stay.
        ModelMismatch: The plan belongs to another model.
        CoverageError: The recount differs from the plan.
    """
    check_kind(plan.kind, ("kept-experts",), "does not say which experts stay")
    plan.validate(describe(model))
    before = _sizes(model)
    cut_experts(model, plan.extra["kept"])
    after = _sizes(model)
    layers = {e.name: e.count for e in find_experts(model)}
    if layers != {b.name: b.count for b in plan.blocks}:
        raise CoverageError(f"The layers are left with {layers}.", "That is not what was planned.", "Report this.")
    even = not hasattr(model.config, EXPERTS_KEPT)
    return ExpertReceipt(
        **{name: {"before": before[name], "after": after[name]} for name in before},
        layers=layers,
        even=even,
        loads="transformers, and by what reads its checkpoints (vLLM, ...)" if even else "layerbudget.load_model",
    )


def expert_card(plan: Plan, receipt: Mapping[str, Any], name: str) -> str:
    """The model card of a model that lost experts."""
    experts, sizes = receipt["experts"], receipt["parameters"]
    rows = {
        "experts": f"{experts['after']} of {experts['before']}",
        "parameters": f"{sizes['before']:,} before, {sizes['after']:,} now",
        "of a token": f"{receipt['active']['after']:,} parameters",
    }
    use = loading(name, alike=receipt["even"])
    what = "with fewer experts and the same routing among them. `plan.json` says which stay, `receipt.json` what was counted."
    return model_card(plan, "finetune", "left with fewer experts", what, rows, use, architecture=name, tags=("pruned", "moe"))


def _sizes(model: nn.Module) -> dict[str, Any]:
    """Experts, parameters, active parameters and bytes of a model."""
    found = find_experts(model)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "experts": sum(e.count for e in found),
        "parameters": parameters,
        "active": parameters - sum(_idle(e) for e in found),
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def _idle(layer: ExpertLayer) -> int:
    """Parameters of the experts that a token is not given."""
    return sum(p.numel() for p in layer.experts.parameters()) // layer.count * (layer.count - layer.top_k)
