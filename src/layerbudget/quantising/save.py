"""Write a model in the formats of its plan, count the bytes of the file, and say the plan in the words of other tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InvalidInput
from ..plan import Plan
from ..provenance import versions
from ..pruning.save import check_output, new_folder
from ..records import dumps, write_text
from ..treatments.formats import GGUF
from ..treatments.rounding_packages import need_gguf
from ..treatments.storing import Stored, pieces_of
from .gguf_names import names_by_map
from .receipt import QuantisationReceipt, compare, recount_gguf, recount_safetensors
from .recipes import dynamic, layer_config, tensor_types
from .writers import GGUF_FILE, writer_of


def save_quantised(
    model: nn.Module, tokenizer: Any, plan: Plan, stored: Stored, out_dir: Path | str, *, overwrite: bool = False
) -> QuantisationReceipt:
    """Write a folder: the model, its tokenizer, ``plan.json``, ``receipt.json`` and recipes for other tools.

    The folder appears complete or not at all, and only if the bytes counted from the written file are the planned ones.

    Args:
        model: After :func:`~layerbudget.quantising.apply.apply_bits`.
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
        return finish(folder, tokenizer, plan, stored.formats, stored.method, [*stored.notes, *writer.close()])


def finish(
    folder: Path, tokenizer: Any, plan: Plan, formats: Mapping[str, str], method: str, notes: Sequence[str]
) -> QuantisationReceipt:
    """Count the written bytes again, and write what lies beside the weights: recipes, tokenizer, plan, receipt.

    Raises:
        CoverageError: The files are not as large as planned.
    """
    found, counted = _counted(folder, plan, formats)
    compare(plan, counted)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
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


def _counted(folder: Path, plan: Plan, formats: Mapping[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of every tensor of the files and of every planned matrix; writes the recipes beside them."""
    if plan.extra["family"] == GGUF:
        found = recount_gguf(folder / GGUF_FILE)
        names = names_by_map(need_gguf(), list(formats))
        write_text(folder / "tensor-types.txt", tensor_types(formats, names))
        return found, {n: found[f"{other}.weight"] for n, other in names.items()}
    found = recount_safetensors(folder)
    write_recipes(formats, folder)
    parts = {n: [k for k in found if k.rpartition(".")[0] == n and ".weight" in k] for n in formats}
    return found, {n: sum(found[k] for k in keys) for n, keys in parts.items()}


def write_recipes(formats: Mapping[str, str], folder: Path) -> None:
    """The same plan for AutoRound and, where its kernels have the widths, for GPTQModel."""
    write_text(folder / "autoround-layer_config.json", dumps(layer_config(formats)))
    with contextlib.suppress(InvalidInput):
        write_text(folder / "gptqmodel-dynamic.json", json.dumps(dynamic(formats), indent=1) + "\n")
