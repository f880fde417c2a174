"""Round a model and write it, layer after layer: every layer goes into its file before the next one is rounded.

One way of writing for models in memory and in files: a piece (what lies outside the layers, then every layer) is rounded,
packed and handed to the writer, which holds one file of limited size. Of a streamed model one layer is at hand at a time and
dropped when it has been written. Finished pieces can be kept, in the form in which they go to the file, so that a run that was
stopped continues; it writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compressors.base import Treatment
from ...data.calibration import CalibrationSet
from ...models.blocks import check_finite, describe
from ...models.offload import mapped
from ...models.provenance import computation, versions
from ...plan import Plan
from ...storage.folders import check_folder, new_folder
from ...storage.parts import Parts
from .plans import formats_of_plan
from .receipt import QuantisationReceipt
from .runtimes import find_runtime
from .save import finish
from .storing import Piece, Storing, in_turn, need_data, pieces_of, quantiser_of
from .writers import Tensors, Writer, writer_of
from .written import check_written

Progress = Callable[[int, int], None]


def quantise(
    model: nn.Module,
    tokenizer: Any,
    plan: Plan,
    out_dir: Path | str,
    data: CalibrationSet | None = None,
    *,
    method: str | None = None,
    batch_size: int = 8,
    resume: Path | str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **own: Any,
) -> QuantisationReceipt:
    """Round a model by a plan of bits and write it, one layer after the other.

    Args:
        model: A streamed one is afterwards as it was (but for what lies outside its layers); one in memory is rounded.
        tokenizer: Saved beside the model where it is not None; of a GGUF file its vocabulary is part.
        plan: Of kind ``bits`` or ``recipe``, made for this model.
        out_dir: Must not exist, or be empty.
        data: Calibration tokens, for quantisers that look at inputs.
        method: ``rtn``, ``weighted`` or ``gptq``; by default the one that was measured when the plan was made.
        batch_size: Sequences per forward.
        resume: Folder that keeps finished layers; an interrupted run continues from it, to the same bytes. They stay there
            until ``keeping.parts.clear``.
        overwrite: Replace a folder that an earlier call wrote.
        progress: Called with (pieces done, pieces).
        **own: Options of the quantiser.

    Returns:
        The receipt. The folder appears complete or not at all.

    Raises:
        ModelMismatch: The plan belongs to another model, or ``resume`` to another run.
        AlreadyExists: The folder exists and is not empty.
        InvalidInput: A plan of another kind, an unknown method, missing data, an architecture or a matrix that the
            format has no place for.
        CoverageError: A matrix that reads back as other weights, or is not as large as planned.
        BadModel: Weights that are not finite.
        MissingDependency: The package of the format is not installed.
    """
    formats = formats_of_plan(plan)
    identity = describe(model)
    plan.validate(identity)
    check_folder(out_dir, overwrite=overwrite)
    check_finite(model)
    chosen = method or str(plan.extra["method"])
    quantiser = quantiser_of(chosen)
    need_data(quantiser, data)
    check_written(model, formats, find_runtime(plan.extra["runtime"], plan.extra["family"]))
    pieces = pieces_of(model, formats)
    storing = Storing(model, quantiser, own)
    with new_folder(out_dir, overwrite=overwrite) as folder:
        writer = writer_of(model, tokenizer, plan, folder)
        run = _Run(storing, writer, _parts(resume, model, plan, data, quantiser, batch_size, storing.options))
        in_turn(storing, pieces, data, batch_size=batch_size, progress=progress, begin=run.begin, end=run.end)
        return finish(folder, tokenizer, plan, writer, chosen, run.notes)


def _parts(
    folder: Path | str | None, model: nn.Module, plan: Plan, data: CalibrationSet | None, quantiser: Treatment, batch_size: int,
    options: Mapping[str, Any],
) -> Parts:  # fmt: skip
    """Finished pieces of this very run: everything that changes a byte of them is its key."""
    if folder is None:
        return Parts(None)
    lies = mapped(model)
    told: dict[str, Any] = {
        "plan": plan.digest, "model": describe(model)["digest"], "method": quantiser.name, "options": dict(options),
        "versions": versions(), "precision": str(next(model.parameters()).dtype if lies is None else lies.dtype),
    }  # fmt: skip
    if quantiser.statistic != "none" and data is not None:
        told |= {"data": data.digest, "batch_size": batch_size, "computation": computation(model)}
    return Parts(folder, told)


class _Run:
    """Pieces on their way from the model to the file."""

    def __init__(self, storing: Storing, writer: Writer, kept: Parts) -> None:
        self.storing, self.writer, self.kept = storing, writer, kept
        self.blind = storing.treatment.statistic == "none"
        self.found: dict[str, torch.Tensor] | None = None
        self.notes: list[str] = []

    def begin(self, piece: Piece) -> bool:
        """Take a piece that was finished before; its weights are only needed where later inputs depend on them."""
        file = self.kept.find(_name(piece))
        if file is None:
            self.found = None
            return False
        from safetensors import safe_open

        with safe_open(file, "pt") as handle:
            self.found = {n: handle.get_tensor(n) for n in handle.metadata()["order"].split("\n")}
            self.notes += json.loads(handle.metadata()["notes"])
        if not self.blind:
            self.writer.back(piece, self.found)
        return True

    def end(self, piece: Piece, notes: Sequence[str]) -> None:
        """Keep and write a piece."""
        found = self.found
        if found is None:
            found = self.writer.tensors(piece, self.storing.rounded)
            self.notes += notes
            self._keep(piece, found, notes)
        self.writer.add(found)
        self.storing.rounded.clear()
        self.found = None

    def _keep(self, piece: Piece, tensors: Tensors, notes: Sequence[str]) -> None:
        if self.kept.folder is None:
            return
        from safetensors.torch import save_file

        told = {"order": "\n".join(tensors), "notes": json.dumps(list(notes))}
        held = {n: t.contiguous() for n, t in tensors.items()}
        self.kept.put(_name(piece), "safetensors", lambda path: save_file(held, path, metadata=told))


def _name(piece: Piece) -> str:
    return "outside" if piece.index < 0 else f"layer-{piece.index}"
