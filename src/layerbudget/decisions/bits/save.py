"""Write a model in the formats of its plan, count the bytes of the file, and say the plan in the words of other tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...compressors.formats import GGUF
from ...compressors.rounding_packages import need_gguf
from ...errors import InvalidInput
from ...models.provenance import versions
from ...plan import Plan
from ...records import dumps, write_text
from ...storage.folders import check_folder as check_output
from ...storage.folders import new_folder
from .export_recipes import dynamic, layer_config, tensor_types
from .gguf_names import names_by_map
from .packed import ZERO_POINTS, check_loads
from .plans import formats_of_plan
from .receipt import QuantisationReceipt, compare, recount_gguf, recount_safetensors
from .storing import Stored, pieces_of
from .writers import GGUF_FILE, Writer, writer_of


def save_quantised(
    model: nn.Module, tokenizer: Any, plan: Plan, stored: Stored, out_dir: Path | str, *, overwrite: bool = False
) -> QuantisationReceipt:
    """Write a folder: the model, its tokenizer, ``plan.json``, ``receipt.json`` and recipes for other tools.

    The folder appears complete or not at all, and only if the bytes counted from the written file are the planned ones.

    Args:
        model: After :func:`~layerbudget.decisions.bits.apply.apply_bits`.
        tokenizer: Saved beside it where it is not None; of a GGUF file its vocabulary is part.
        plan: The plan that was applied.
        stored: What applying returned.
        out_dir: Must not exist, or be empty.
        overwrite: Replace a folder that an earlier call wrote.

    Returns:
        The receipt.

    Raises:
        AlreadyExists: The folder exists and is not empty.
        CoverageError: The file is not as large as planned, or reads back as other weights.
        InvalidInput: An architecture or a matrix that the format has no place for.
        MissingDependency: The package of the format is not installed.
    """
    check_output(out_dir, overwrite=overwrite)
    with new_folder(out_dir, overwrite=overwrite) as folder:
        writer = writer_of(model, tokenizer, plan, folder)
        for piece in pieces_of(model, stored.formats):
            writer.add(writer.tensors(piece, stored.rounded))
        return finish(folder, tokenizer, plan, writer, stored.method, stored.notes)


def finish(folder: Path, tokenizer: Any, plan: Plan, writer: Writer, method: str, notes: Sequence[str]) -> QuantisationReceipt:
    """Finish the files, count their bytes again, and write what lies beside the weights: recipes, tokenizer, plan, receipt.

    Raises:
        CoverageError: The files are not as large as planned, or do not load.
    """
    formats = formats_of_plan(plan)
    notes = [*notes, *writer.close(), *_kept(plan)]
    found = _found(folder, plan, formats)
    counted = {n: sum(found.get(k, 0) for k in keys) for n, keys in writer.names().items()}
    compare(plan, counted)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if plan.extra["family"] != GGUF and ZERO_POINTS not in notes:
        notes = [*notes, *check_loads(folder, str(plan.extra["runtime"]))]
    spent = sum(counted.values())
    receipt = QuantisationReceipt(
        method=method, family=str(plan.extra["family"]), plan_digest=plan.digest, model=dict(plan.model),
        modules={n: {"format": f, "bytes": counted[n]} for n, f in formats.items()}, bytes=spent,
        planned=int(plan.counts.sum()), tensors=sum(found.values()),
        file=sum(f.stat().st_size for f in (*folder.glob("*.safetensors"), *folder.glob(GGUF_FILE))),
        bits=8 * spent / sum(b.numel for b in plan.blocks), notes=tuple(notes), versions=versions(),
    )  # fmt: skip
    plan.save(folder / "plan.json")
    receipt.save(folder / "receipt.json")
    return receipt


def _kept(plan: Plan) -> list[str]:
    """What a plan leaves in 16 bits because no file holds it in fewer."""
    kept = plan.extra.get("unwritten") or {}
    size = sum(b.count for b in plan.blocks if set(b.modules) <= set(kept))
    return [f"{len(kept)} matrices stay in 16 bits ({size} of the bytes counted): {', '.join(kept)}."] if kept else []


def _found(folder: Path, plan: Plan, formats: Mapping[str, str]) -> dict[str, int]:
    """Bytes of every tensor of the files; writes the recipes beside them."""
    if plan.extra["family"] == GGUF:
        write_text(folder / "tensor-types.txt", tensor_types(formats, names_by_map(need_gguf(), list(formats))))
        return recount_gguf(folder / GGUF_FILE)
    write_recipes(formats, folder)
    return recount_safetensors(folder)


def write_recipes(formats: Mapping[str, str], folder: Path) -> None:
    """The same plan for AutoRound and, where its kernels have the widths, for GPTQModel."""
    write_text(folder / "autoround-layer_config.json", dumps(layer_config(formats)))
    with contextlib.suppress(InvalidInput):
        write_text(folder / "gptqmodel-dynamic.json", json.dumps(dynamic(formats), indent=1) + "\n")
