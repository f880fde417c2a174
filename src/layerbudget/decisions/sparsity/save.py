"""The files of a pruned model: an ordinary transformers checkpoint beside its plan, and a recipe for llm-compressor."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ...arguments import checked
from ...compressors.base import TREATMENTS, find_treatment
from ...errors import InvalidInput
from ...models.blocks import config_of, pretrained
from ...models.card import loading, model_card
from ...models.experts import EXPERTS_KEPT
from ...models.offload import mapped
from ...plan import Plan
from ...records import stacks
from ...storage.folders import write_model
from ...storage.writing import check_space, write_text
from .receipt import PruningReceipt

BESIDE = 1 << 22  # bytes of tokenizer, plan and receipt


def check_room(model: nn.Module, out: Path | str, *, resume: Path | str | None = None, plan: Plan | None = None) -> None:
    """Refuse to make a checkpoint as large as this model where it, or the planned matrices of a resumed run, find no room."""
    sizes = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    needs: dict[Path | str, float] = {out: sum(sizes.values()) + BESIDE}
    if resume is not None and plan is not None:
        parameters = next(iter(model.parameters()))
        kept = sum(f.stat().st_size for f in Path(resume).iterdir() if f.is_file()) if Path(resume).is_dir() else 0
        needs[resume] = max(0, int(plan.numel.sum()) * parameters.element_size() - kept)
    check_space(needs)


@checked
def save_pruned(
    model: nn.Module, tokenizer: Any, plan: Plan, receipt: PruningReceipt, out_dir: Path | str, *, overwrite: bool = False
) -> Path:
    """Write checkpoint, tokenizer, plan, receipt and a model card (README.md); return the folder.

    The folder appears complete or not at all. The weights are stored densely, zeros included, so that every runtime reads
    them; no ``sparsity_config`` is written, because runtimes without sparse kernels refuse such models.

    Args:
        model: The pruned model.
        tokenizer: Saved beside it where it is not None.
        plan: Written as ``plan.json``.
        receipt: Written as ``receipt.json``.
        out_dir: Must not exist, or be empty.
        overwrite: Replace what an earlier call wrote: the files that the folder's ``manifest.json`` names, and no others.

    Raises:
        AlreadyExists: The folder exists and is not empty (with ``overwrite``: and is none of ours).
    """
    limits: dict[str, Any] = {} if mapped(model) is None else {"max_shard_size": "1GB"}
    name = type(pretrained(model)).__name__
    rows = {"zeros": f"{receipt.sparsity:.4%} of the matrices' weights, recounted", "pruned by": receipt.method}
    what = "with zeros where `plan.json` says so; `receipt.json` has what was counted. Zeros save neither disk nor time."
    use = loading(name, alike=not hasattr(config_of(model), EXPERTS_KEPT))
    card = model_card(plan, "finetune", "pruned", what, rows, use, architecture=name, tags=("pruned",))
    side_files: dict[str, Callable[[Path], object]] = {
        "plan.json": plan.save,
        "receipt.json": receipt.save,
        "README.md": partial(write_text, text=card),
    }
    return write_model(pretrained(model), tokenizer, out_dir, side_files, overwrite=overwrite, **limits)


def recipe(plan: Plan, method: str = "wanda", *, pattern: str | None = None) -> str:
    """Return an llm-compressor recipe (YAML) with one modifier per distinct ratio, rounded to four digits.

    Every modifier is a stage of its own: two modifiers of one kind in one stage are one YAML key, and the second would win.
    """
    modifier = find_treatment(method).modifier
    if plan.kind != "sparsity" or modifier is None:
        known = " and ".join(name for name, t in TREATMENTS.all().items() if t.modifier)
        raise InvalidInput(
            f"A recipe for method {method!r} and a plan of kind {plan.kind} cannot be written.",
            f"Methods are {known}, the kind is sparsity.",
            f"Prune with layerbudget instead, or say --method {known.split()[0]}.",
        )
    if plan.rows is not None:
        what = f"The plan decides groups of {plan.rows.size} rows."
        raise InvalidInput(what, "A recipe has one sparsity per matrix.", "Plan with --by linear.")
    if stacked := stacks(m for b in plan.blocks if b.count for m in b.modules):
        raise InvalidInput(
            f"{stacked[0]} is a stack of experts, and llm-compressor takes each expert for a module.",
            "Its recipe would match nothing.",
            "Prune here: layerbudget apply MODEL PLAN.",
        )
    measured, options = plan.pruner
    damped = "damping" in options and method == measured
    more = [f"      dampening_frac: {options['damping']}"] if damped else []  # llm-compressor's default is ours
    groups: dict[float, list[str]] = {}
    for block in plan.blocks:
        if block.count:
            groups.setdefault(round(block.value, 4), []).extend(block.modules)
    lines = [f"# {plan.rule} plan {plan.digest}: {len(groups)} distinct ratios, total sparsity {plan.sparsity:.6f}"]
    for i, (ratio, modules) in enumerate(groups.items()):
        lines += [
            f"prune_{i}_stage:",
            f"  prune_{i}_modifiers:",
            f"    {modifier}:",
            f"      sparsity: {ratio}",
            f"      mask_structure: {json.dumps(pattern or '0:0')}",
            *more,
            f"      targets: {json.dumps(modules)}",
        ]
    return "\n".join(lines) + "\n"
