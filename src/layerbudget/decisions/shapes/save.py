"""Write a smaller model as an ordinary checkpoint, or say before it is made why none can hold it.

A plain config has one width and one number of heads for all layers, so uneven shapes work in memory but cannot be written.
Families that derive the size of a head from the number of heads (GPT-2, OPT, GPT-NeoX, BERT) cannot be written with fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import UnknownStructure
from ...models.blocks import config_of, describe, layers, pretrained
from ...models.machine import versions
from ...plan import Plan
from ...records import SCHEMA_VERSION, dumps, write_text
from ...storage.folders import new_folder
from ..sparsity.save import add_metadata
from .layouts import FIND, Attention, Where, described, undescribed


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
    shapes: Mapping[str, Any] = {}
    gone = set[str]()
    if plan is not None:
        plan.validate(describe(model))
        shapes = plan.extra.get("shapes", {})
        gone = set(plan.extra["dropped"] if plan.kind == "shapes" else [b.name for b in plan.blocks if b.count])
    names, built = [n for n, _ in layers(model)], described(model)
    again = [] if isinstance(built, str) else list(zip(names, built, strict=False))
    for kind in ("mlp", "heads"):
        now, said = _all(layers(model), kind), _all(again, kind)
        made = [w.without(int(s["removed"]), s["by"]) if (s := shapes.get(f"{n}.{kind}")) else w for n, w in now.items()]
        left = [w for n, w in zip(now, made, strict=True) if n not in gone]
        if not left or left == [w for n, w in said.items() if n not in gone]:
            continue
        if kind == "mlp":
            first = next(iter((said or now).values()))
            _check_described(model, first, min(left, key=lambda w: w.inputs))
        _check_even(model, left)
        if kind == "heads":
            _check_described(model, left[0], left[0])


def _all(named: Sequence[tuple[str, nn.Module]], kind: str) -> dict[str, Where]:
    """Return what every layer has; nothing where one of them has none, for then nothing was removed."""
    try:
        return {name: FIND[kind](layer, name) for name, layer in named}
    except UnknownStructure:
        return {}


def _check_described(model: nn.Module, now: Where, wanted: Where) -> None:
    """Refuse what the configuration cannot say."""
    why = undescribed(model, now, wanted)
    if why:
        heads = isinstance(wanted, Attention)
        has = f"{wanted.heads} heads per layer" if isinstance(wanted, Attention) else f"MLPs of width {wanted.width}"
        other = "Remove MLP units or blocks instead, or another number of heads."
        raise UnknownStructure(
            f"The model has {has}: {why}.",
            "The model works in memory; transformers could not load the checkpoint.",
            other if heads else "Prune its weights instead: layerbudget plan sparsity MODEL, then apply.",
        )


def _check_even(model: nn.Module, found: Sequence[Where]) -> None:
    fields = ("heads", "key-value heads") if isinstance(found[0], Attention) else ("widths",)
    for field, values in zip(fields, zip(*(w.shape for w in found), strict=True), strict=False):
        if len(set(values)) > 1:
            one = "width" if field == "widths" else f"number of {field}"
            raise UnknownStructure(
                f"The {'MLPs' if field == 'widths' else 'attentions'} have {field} {min(values)} to {max(values)}.",
                f"{type(config_of(model)).__name__} has one {one} for all layers, so transformers could not load the "
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
        record: What :func:`~layerbudget.decisions.shapes.apply.apply_shapes` recounted; written as ``receipt.json``.
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
