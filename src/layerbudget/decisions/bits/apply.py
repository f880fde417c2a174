"""Round a model by a plan of bits: in place, or into files.

The model goes piece by piece (:mod:`layerbudget.decisions.bits.pieces`). Of the written files the bytes are counted again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from ...arguments import checked
from ...compressors.formats import GGUF, RUNTIMES, find_format, find_runtime
from ...compressors.treating import InputStats
from ...data.calibration import CalibrationSet
from ...errors import CoverageError
from ...execution.processes import broadcast, process_group
from ...execution.sharing import SharedParts, together
from ...llama_cpp.check import Followed, check_file
from ...llama_cpp.imatrix import IMATRIX_FILE, imatrix_digest, write_imatrix
from ...llama_cpp.writer import GgufWriter, recount_gguf
from ...models.blocks import check_finite, describe
from ...models.machine import computation, versions
from ...models.offload import mapped
from ...models.packed import UNREAD
from ...plan import Plan, payload_of
from ...progress import Progress
from ...records import Receipt
from ...storage.checkpoint import GGUF_FILE
from ...storage.folders import check_folder, new_folder
from ...storage.source import complete, write_readers
from ...storage.writing import write_text
from ..formats.program import formats_of_plan
from .blocks import check_bytes, check_writable
from .card import model_card
from .counted import Counted
from .export import auto_round, llama_cpp
from .packed import PackedWriter, check_loads, recount_safetensors
from .payload import BitsPayload
from .pieces import ModelRounding, Shared
from .placed import PlacedRows
from .receipt import QuantisationReceipt


def apply_bits(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet | None = None,
    *,
    method: str | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
    **options: Any,
) -> Receipt:
    """Round a model by a plan of bits, in place: afterwards it computes what a runtime computes from the written file.

    Arguments and errors are those of :func:`write_bits`.
    """
    formats = formats_of_plan(plan)
    plan.validate(describe(model))
    check_finite(model)
    method = method or payload_of(plan, BitsPayload).method
    notes = round_matrices(model, formats, data, method=method, batch_size=batch_size, progress=progress, **options)
    return Receipt(plan_digest=plan.digest, identity=plan.model, notes=tuple(notes), model=model)


def round_matrices(
    model: nn.Module,
    formats: Mapping[str, str],
    data: CalibrationSet | None = None,
    *,
    method: str = "rtn",
    batch_size: int = 8,
    placed: PlacedRows | None = None,
    follow: Callable[[int], None] | None = None,
    shared: Shared | None = None,
    importances: InputStats | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> list[str]:
    """Round matrices in place, those without a format stay; see :func:`apply_bits`. Returns notes.

    Embedding and head come first, the head with the inputs that it has in the model as it was; then the layers, each with the
    inputs that the rounded model below it gives. An embedding that is no head is rounded to nearest. ``placed`` takes the bytes
    of all of them for a file. ``follow`` is called with -1 when both ends are rounded, and with the number of every layer when
    that is. Of a streamed model a layer is then as it was again, and in the end so are both ends. What is ``shared`` with
    other plans of the dense model is made once. ``importances`` that are known stand in the place of text, by matrix.
    """
    rounding = ModelRounding(model, formats, method, data, options, importances)
    rounding.writer, rounding.follow, rounding.shared = placed, follow, shared
    rounding.dealt.coded = placed is not None
    rounding.run(batch_size, progress)
    if placed is not None:
        placed.sums = rounding.sums
    return rounding.notes


@checked
def write_bits(
    model: nn.Module,
    plan: Plan,
    out_dir: Path | str,
    data: CalibrationSet | None = None,
    *,
    tokenizer: Any = None,
    method: str | None = None,
    batch_size: int = 8,
    resume: Path | str | None = None,
    overwrite: bool = False,
    text_files: Mapping[str, str] | None = None,
    check: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> QuantisationReceipt:
    """Round a model by a plan of bits and write it: the weights, ``plan.json``, ``receipt.json`` and recipes for other tools.

    The folder appears complete or not at all, and only if the bytes counted from the written file are the planned ones: of
    every matrix, of all tensors, and of the file where a size was asked for. Several processes share the work. Only the main
    one needs the folders, and writes; all have its record.

    Args:
        model: A streamed one is afterwards as it was, but perhaps for what lies outside its layers; one in memory is rounded.
        plan: Of kind ``bits``, made for this model.
        out_dir: Must not exist, or be empty.
        data: Calibration tokens, for quantisers that read inputs.
        tokenizer: Saved beside the model where it is not None; of a GGUF file its vocabulary is part.
        method: ``rtn``, ``weighted``, ``gptq`` or ``descent``; by default the one that was measured when the plan was made.
        batch_size: Sequences per forward.
        resume: Folder that keeps finished layers; an interrupted run continues from it, to the same bytes. They stay there
            until :func:`layerbudget.storage.parts.clear`.
        overwrite: Replace a folder that an earlier call wrote.
        text_files: Further text files of the folder, by name.
        check: Load a written GGUF file by llama.cpp, where the package xllamacpp is installed, and compare tokens and
            probabilities: see :func:`~layerbudget.llama_cpp.check.check_file`.
        progress: Called with (pieces done, pieces).
        **options: Options of the quantiser.

    Raises:
        ModelMismatch: The plan belongs to another model, or ``resume`` to another run.
        AlreadyExists: The folder exists and is not empty.
        InvalidInput: A plan of another kind, an unknown method, missing data, fewer sequences than processes, an architecture
            or a matrix that the format has no place for; a file that would be larger than the size in bytes that was planned
            for, with this tokenizer.
        CoverageError: A matrix that reads back as other weights, or is not as large as planned; a file that is larger than was
            asked for; a GGUF file that llama.cpp refuses, or computes otherwise.
        BadModel: Weights that are not finite.
        MissingDependency: The package of the format is not installed.
    """
    formats, payload = formats_of_plan(plan), payload_of(plan, BitsPayload)
    plan.validate(describe(model))
    group, gguf = process_group(), payload.family == GGUF
    together(lambda: check_folder(out_dir, overwrite=overwrite) if group.is_main else None)
    check_finite(model)
    target = find_runtime(payload.runtime, payload.family)
    check_writable(model, formats, target)
    check_bytes(model, plan, target)
    rounding = ModelRounding(model, formats, method or payload.method, data, options)
    rounding.dealt.coded = True
    if rounding.data is not None:
        group.check_shares([rounding.data.samples])

    def begin() -> tuple[Counted, Path] | None:
        """The count that the main process makes before, and where it writes."""
        if not group.is_main:
            return None
        counted = Counted.of(model, plan, tokenizer)
        folder = stack.enter_context(new_folder(out_dir, overwrite=overwrite))
        packed = not gguf and PackedWriter(model, formats, folder, payload.runtime)
        rounding.writer = packed or GgufWriter(model, tokenizer, formats, folder, plan.model.get("id"))
        if isinstance(rounding.writer, GgufWriter) and check:
            known = tokenizer if rounding.writer.head.has_vocabulary else None
            rounding.checked = Followed.of(model, known, formats)
            rounding.follow = None if rounding.checked is None else rounding.checked.follow
        return counted, folder

    def finish() -> QuantisationReceipt | None:
        """The files that the main process wrote."""
        if begun is None:
            return None
        for name, text in (text_files or {}).items():
            write_text(begun[1] / name, text)
        writer = cast(PackedWriter | GgufWriter, rounding.writer)
        return _finish(begun[1], tokenizer, plan, rounding, writer, begun[0], check=check)

    with contextlib.ExitStack() as stack:
        begun = together(begin)
        request: dict[str, Any] = {"plan": plan.digest, "method": rounding.quantiser.name, "options": dict(rounding.options)}
        request |= request_of(model, computing=rounding.data is not None)
        request |= {} if rounding.data is None else {"data": rounding.data.digest, "batch_size": batch_size}
        if rounding.quantiser.imatrix is not None:
            request["imatrix"] = imatrix_digest(rounding.quantiser.imatrix)
        rounding.parts = SharedParts(resume, request)
        rounding.run(batch_size, progress)
        receipt = together(finish)
    told = broadcast(lambda: None if receipt is None else dataclasses.replace(receipt, model=None))  # the folder has its name
    return dataclasses.replace(cast(QuantisationReceipt, told), model=model)


def request_of(model: nn.Module, *, computing: bool) -> dict[str, Any]:
    """Return what numbers depend on beside text and options: the model and its precision, and what computes with it."""
    offloaded = mapped(model)
    dtype = next(model.parameters()).dtype if offloaded is None else offloaded.dtype
    request = {"model": describe(model)["digest"], "versions": versions(), "precision": str(dtype)}
    return {**request, "computation": computation(model)} if computing else request


def _finish(
    folder: Path,
    tokenizer: Any,
    plan: Plan,
    rounding: ModelRounding,
    writer: PackedWriter | GgufWriter,
    expected: Counted,
    *,
    check: bool,
) -> QuantisationReceipt:
    """Finish the files, count their bytes again, and write what lies beside the weights."""
    formats, gguf = formats_of_plan(plan), isinstance(writer, GgufWriter)
    notes = [*rounding.notes, *writer.close(), *_kept(plan), *expected.notes]
    if gguf:
        write_readers(rounding.model, tokenizer, folder)
    else:
        planned = [name for names in writer.names().values() for name in names]
        notes += complete(rounding.model, tokenizer, folder, keep=planned, halved=True, precision=False)
    tensor_bytes = recount_gguf(folder / GGUF_FILE) if gguf else recount_safetensors(folder)
    counted = {n: sum(tensor_bytes.get(k, 0) for k in keys) for n, keys in writer.names().items()}
    for block in plan.blocks:
        spent = sum(counted[m] for m in block.modules)
        if spent != block.count:
            what = f"{block.name} takes {spent:,} bytes in the file, {block.count:,} were planned."
            raise CoverageError(what, "", "Report this; nothing is kept.")
    tensors = sum(tensor_bytes.values())
    file = sum(f.stat().st_size for f in (*folder.glob("*.safetensors"), *folder.glob(GGUF_FILE)))
    notes += expected.check(plan, tensors, file)
    if gguf:
        write_text(folder / "tensor-types.txt", llama_cpp(plan))
        if rounding.quantiser.imatrix is not None:
            shutil.copyfile(rounding.quantiser.imatrix, folder / IMATRIX_FILE)
        elif rounding.sums and rounding.data is not None:
            write_imatrix(folder / IMATRIX_FILE, rounding.sums, rounding.data.describe())
    elif not any(find_format(f).floating for f in formats.values()):
        write_text(folder / "autoround-layer_config.json", auto_round(plan))
    runtime = payload_of(plan, BitsPayload).runtime
    notes += [needs] if (needs := RUNTIMES[runtime].needs(formats)) else []
    if not gguf and UNREAD.isdisjoint(notes):
        notes += check_loads(folder, runtime)
    said = ""
    if isinstance(writer, GgufWriter) and check:
        known = tokenizer if writer.head.has_vocabulary else None
        said = check_file(folder / GGUF_FILE, rounding.model, known, formats, rounding.checked)
    total = sum(counted.values())
    receipt = QuantisationReceipt(
        method=rounding.quantiser.name,
        family=payload_of(plan, BitsPayload).family,
        plan_digest=plan.digest,
        identity=plan.model,
        model=rounding.model,
        modules={n: {"format": f, "bytes": counted[n]} for n, f in formats.items()},
        bytes=total,
        planned=int(plan.counts.sum()),
        tensors=tensors,
        file=file,
        bits=8 * total / sum(b.numel for b in plan.blocks),
        llama_cpp=said,
        notes=tuple(notes),
        versions=versions(),
    )
    write_text(folder / "README.md", model_card(plan, receipt))
    plan.save(folder / "plan.json")
    receipt.save(folder / "receipt.json")
    return receipt


def _kept(plan: Plan) -> list[str]:
    """A note on the matrices that stay in 16 bits because no file holds them in fewer."""
    kept = payload_of(plan, BitsPayload).unwritten or {}
    size = sum(b.count for b in plan.blocks if set(b.modules) <= set(kept))
    return (
        [f"{len(kept)} matrices stay in 16 bits ({size:,} of the bytes of the planned matrices): {', '.join(kept)}."]
        if kept
        else []
    )
