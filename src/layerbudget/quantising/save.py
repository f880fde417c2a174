"""Write a model in the formats of its plan, count the bytes of the file, and say the plan in the words of other tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InvalidInput
from ..plan import Plan
from ..provenance import versions
from ..pruning.save import check_output, new_folder
from ..records import dumps, write_text
from ..treatments.formats import GGUF
from ..treatments.storing import Stored
from .gguf_file import write_gguf
from .packed import write_packed
from .receipt import QuantisationReceipt, compare, recount_gguf, recount_safetensors
from .recipes import dynamic, layer_config, tensor_types

GGUF_FILE = "model.gguf"


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
    write = _gguf if plan.extra["family"] == GGUF else _packed
    with new_folder(out_dir, overwrite=overwrite) as folder:
        counted, tensors, file, notes = write(model, tokenizer, stored, folder)
        compare(plan, counted)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        spent = sum(counted.values())
        receipt = QuantisationReceipt(
            method=stored.method, family=str(plan.extra["family"]), plan_digest=plan.digest, model=dict(plan.model),
            modules={n: {"format": f, "bytes": counted[n]} for n, f in stored.formats.items()}, bytes=spent,
            planned=int(plan.counts.sum()), tensors=tensors, file=file, bits=8 * spent / sum(b.numel for b in plan.blocks),
            notes=(*stored.notes, *notes), versions=versions(),
        )  # fmt: skip
        plan.save(folder / "plan.json")
        receipt.save(folder / "receipt.json")
    return receipt


Written = tuple[dict[str, int], int, int, list[str]]


def _gguf(model: nn.Module, tokenizer: Any, stored: Stored, folder: Path) -> Written:
    """Bytes by matrix and in all, size of the file, notes."""
    file = folder / GGUF_FILE
    names, notes = write_gguf(model, tokenizer, stored, file)
    found = recount_gguf(file)
    write_text(folder / "tensor-types.txt", tensor_types(stored.formats, names))
    return {n: found[f"{other}.weight"] for n, other in names.items()}, sum(found.values()), file.stat().st_size, notes


def _packed(model: nn.Module, tokenizer: Any, stored: Stored, folder: Path) -> Written:
    write_packed(model, stored, folder)
    found = recount_safetensors(folder)
    counted = {
        n: sum(size for k, size in found.items() if k.rpartition(".")[0] == n and ".weight" in k) for n in stored.formats
    }
    write_recipes(stored.formats, folder)
    notes = []
    if any(f.endswith("-asym") for f in stored.formats.values()):
        notes.append("transformers 5.23 does not load packed zero points (compressed-tensors 0.20); vLLM reads them.")
    return counted, sum(found.values()), sum(f.stat().st_size for f in folder.glob("*.safetensors")), notes


def write_recipes(formats: Mapping[str, str], folder: Path) -> None:
    """The same plan for AutoRound and, where its kernels have the widths, for GPTQModel."""
    write_text(folder / "autoround-layer_config.json", dumps(layer_config(formats)))
    with contextlib.suppress(InvalidInput):
        write_text(folder / "gptqmodel-dynamic.json", json.dumps(dynamic(formats), indent=1) + "\n")
