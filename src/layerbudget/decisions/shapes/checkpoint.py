"""Removal that runs faster today: whole blocks (depth), attention heads, and inner units of the MLPs (width).

The result is an ordinary smaller dense checkpoint. A plain config has one width and one number of heads for all layers, so
uneven shapes work in memory but cannot be exported; :func:`check_exportable` says so with the nearest even ones. Families that
derive the size of a head from the number of heads (GPT-2, OPT, GPT-NeoX, BERT) cannot be exported with fewer heads at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import UnknownStructure
from ...models.blocks import config_of, describe, layers, pretrained
from ...models.provenance import versions
from ...plan import Plan
from ...records import SCHEMA_VERSION, dumps, write_text
from ..sparsity.save import add_metadata, new_folder
from .attention import Attention, expressible, find_attention
from .depth import apply_depth, drop_damage, drop_layers, plan_depth
from .directional import plan_shapes_directional
from .heads import remove_heads
from .mlp import described, find_mlp, undescribed
from .removable import find_parts
from .search import crossed_curves, plan_structured, shape_curves
from .shrink import apply_structured
from .width import narrow

__all__ = [
    "apply_depth", "apply_structured", "check_exportable", "crossed_curves", "drop_damage", "drop_layers", "find_parts",
    "narrow", "plan_depth", "plan_shapes_directional", "plan_structured", "remove_heads", "save_smaller", "shape_curves",
]  # fmt: skip


_ONE = {"widths": "width", "heads": "number of heads", "key-value heads": "number of key-value heads"}


def check_exportable(model: nn.Module, plan: Plan | None = None) -> None:
    """Refuse a model whose MLP widths or heads a plain config cannot describe.

    Args:
        model: The model.
        plan: Of smaller shapes, not applied yet: what it will make of the model is judged.

    Raises:
        UnknownStructure: Layers differ (a plain config has one field for all of them), or the config derives the size of a head
            from the number of heads, or has no field for the width.
        ModelMismatch: The plan belongs to another model.
    """
    names, gone = [n for n, _ in layers(model)], set[str]()
    now = {"mlp": _all(layers(model), find_mlp), "heads": _all(layers(model), find_attention)}
    wanted = now
    if plan is not None:
        plan.validate(describe(model))
        shapes = plan.extra.get("shapes", {})
        gone = set(plan.extra["dropped"] if plan.kind == "structured" else [b.name for b in plan.blocks if b.count])
        wanted = {
            k: [_planned(w, shapes.get(f"{n}.{k}")) for n, w in zip(names, found, strict=False)] for k, found in now.items()
        }
    built = described(model)
    again = [] if isinstance(built, str) else list(zip(names, built, strict=False))
    for kind, find in (("mlp", find_mlp), ("heads", find_attention)):
        left = [w for n, w in zip(names, wanted[kind], strict=False) if n not in gone]
        said = _all(again, find)
        if left and left != [w for n, w in zip(names, said, strict=False) if n not in gone]:
            if kind == "mlp":
                _check_width(model, (said or now[kind])[0].width, min(m.width for m in left))
            _check_even(model, left)
            if kind == "heads":
                _check_heads(model, left[0])


def _check_width(model: nn.Module, now: int, wanted: int) -> None:
    """Refuse a width that the configuration cannot say."""
    why = undescribed(model, now, wanted)
    if why:
        raise UnknownStructure(
            f"The model has MLPs of width {wanted}: {why}.",
            "The model works in memory; transformers could not load the checkpoint.",
            "Prune its weights instead: layerbudget measure, then prune.",
        )


def _check_heads(model: nn.Module, wanted: Attention) -> None:
    """Refuse heads that the configuration cannot say."""
    why = expressible(model, wanted)
    if why:
        raise UnknownStructure(
            f"The model has {wanted.heads} heads per layer: {why}.",
            "The model works in memory; transformers could not load the checkpoint.",
            "Remove MLP units or blocks instead, or another number of heads.",
        )


def _planned(where: Any, shape: Mapping[str, Any] | None) -> Any:
    """Heads or an MLP as a plan will leave them."""
    if shape is None:
        return where
    if isinstance(where, Attention):
        return where.without(int(shape["removed"]), shape["by"])
    return dataclasses.replace(where, width=where.width - int(shape["removed"]) * int(shape["by"].split()[0]))


def _all(named: Sequence[tuple[str, nn.Module]], find: Callable[[nn.Module, str], Any]) -> list[Any]:
    """What every layer has; nothing where one of them has none, for then nothing was removed."""
    try:
        return [find(layer, name) for name, layer in named]
    except UnknownStructure:
        return []


def _check_even(model: nn.Module, found: Sequence[Any]) -> None:
    if isinstance(found[0], Attention):
        sizes = {"heads": [a.heads for a in found], "key-value heads": [a.groups for a in found]}
    else:
        sizes = {"widths": [m.width for m in found]}
    for field, values in sizes.items():
        if len(set(values)) > 1:
            raise UnknownStructure(
                f"The {'MLPs' if field == 'widths' else 'attentions'} have {field} {min(values)} to {max(values)}.",
                f"{type(config_of(model)).__name__} has one {_ONE[field]} for all layers, so transformers could not load the "
                "checkpoint; the model works in memory.",
                f"Give all layers the same (about {round(sum(values) / len(values))} costs the same): plan with --even "
                "(even=True).",
            )


def save_smaller(
    model: nn.Module,
    tokenizer: Any,
    out_dir: Path | str,
    *,
    plan: Plan | None = None,
    record: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a depth-, head- or width-pruned model as an ordinary smaller checkpoint.

    The folder appears complete or not at all.

    Args:
        model: The smaller model.
        tokenizer: Saved beside it where it is not None.
        out_dir: Must not exist, or be empty.
        plan: Written beside it as ``plan.json``.
        record: What :func:`layerbudget.decisions.shapes.shrink.apply_structured` recounted; written as ``receipt.json``.
        overwrite: Replace what an earlier call wrote: the files that the folder's ``manifest.json`` names, and no others.

    Raises:
        UnknownStructure: Uneven shapes, or heads that the config cannot describe.
        AlreadyExists: The folder holds something.
    """
    check_exportable(model)
    with new_folder(out_dir, overwrite=overwrite) as temporary:
        pretrained(model).save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if plan is not None:
            plan.save(temporary / "plan.json")
            for file in temporary.glob("*.safetensors"):
                add_metadata(file, {"layerbudget_plan": plan.digest, "layerbudget_method": plan.kind})
        if record is not None:
            digest = {"plan_digest": plan.digest} if plan is not None else {}
            content = {"schema_version": SCHEMA_VERSION, **digest, **record, "versions": versions()}
            write_text(temporary / "receipt.json", dumps(content))
    return Path(out_dir)
