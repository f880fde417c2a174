"""Round a model by a plan of bits: in place, or into files.

The model goes piece by piece: what lies outside the layers, then every layer. A piece is rounded, packed and written before
the next one is looked at. Of a streamed model one layer is in memory at a time. Finished pieces can be kept in the form in
which they go to the file, so that a run that was stopped continues; it writes the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level, find_quantiser
from ...compressors.formats import GGUF, RUNTIMES, find_format, find_runtime
from ...compressors.ggml import dequantise
from ...compressors.quantisers import Quantiser, Rounded, rows_together
from ...compressors.treating import InputStats, Job, LayerCompressor, check, matrices
from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput
from ...execution.inputs import InputMoments, InputStatistics
from ...execution.modes import inference
from ...execution.processes import broadcast, process_group, shard
from ...execution.sharing import Part, SharedParts, together
from ...execution.walk import Walk
from ...llama_cpp.check import Followed, check_file
from ...llama_cpp.imatrix import IMATRIX_FILE, counted, entries, imatrix_digest, importances, write_imatrix
from ...llama_cpp.writer import GGUF_FILE, GgufWriter, recount_gguf
from ...models.blocks import check_finite, describe, layers, weight_of
from ...models.machine import computation, versions
from ...models.offload import mapped
from ...plan import Plan, payload_of
from ...progress import Progress, Steps
from ...records import Module, Receipt, write_text
from ...storage.folders import check_folder, new_folder
from ...storage.parts import Parts
from ...storage.source import complete, write_readers
from ...storage.writing import check_space
from ..formats.program import formats_of_plan
from .blocks import check_writable, layers_of, modules_by_name, peaks
from .card import model_card
from .counted import Counted
from .dealt import DealtRows, RowsKey
from .export import auto_round, llama_cpp
from .packed import UNREAD, PackedWriter, check_loads, recount_safetensors
from .payload import BitsPayload
from .placed import PlacedRows
from .receipt import QuantisationReceipt

_PIECE = 1 << 22  # weights that are rounded together: their copies take little memory
_Writer = PackedWriter | GgufWriter | PlacedRows


def quantiser_of(method: str) -> Quantiser:
    """Return a quantiser by name."""
    return cast(Quantiser, find_quantiser(method))


def need_data(quantiser: Quantiser, data: CalibrationSet | None) -> None:
    """Refuse a quantiser without the data that it needs."""
    if quantiser.reads_text and data is None:
        raise InvalidInput(f"{quantiser.name} needs calibration data.", "", "Pass data, or use method rtn.")
    if not quantiser.reads_text and quantiser.imatrix is not None and data is not None:
        raise InvalidInput(
            "Calibration data and an importance matrix were given.", "One says how large inputs are.", "Leave one out."
        )


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
    rounding = _Rounding(model, formats, method, data, options, importances)
    rounding.writer, rounding.follow, rounding.shared = placed, follow, shared
    rounding.dealt.coded = placed is not None
    rounding.run(batch_size, progress)
    return rounding.notes


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
    check_writable(model, formats, find_runtime(payload.runtime, payload.family))
    rounding = _Rounding(model, formats, method or payload.method, data, options)
    rounding.dealt.coded = True
    if rounding.data is not None:
        group.check_shares([rounding.data.samples])

    def begin() -> tuple[Counted, Path] | None:
        """What the main process counts before, and where it writes."""
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
        """What the main process wrote."""
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


def _pieces(model: nn.Module, formats: Mapping[str, str]) -> dict[str, list[Job]]:
    """Jobs by layer, in the order in which the model is rounded: those outside the layers (``""``) first."""
    modules, names = modules_by_name(model, formats), [name for name, _ in layers(model)]
    top = peaks(model, {name for name, form in formats.items() if find_format(form).united})
    pieces: dict[str, list[Job]] = {name: [] for name in ("", *names)}
    for name, layer in layers_of(model, modules).items():
        find_format(formats[name]).check(name, modules[name].d_in)
        job = Job(module=modules[name], level=Level(format=formats[name], peak=top.get(name)))
        pieces["" if layer is None else names[layer]].append(job)
    return pieces


class Shared:
    """Results that plans of one model and one text have in common: the head's inputs in the dense model, and rounded matrices.

    A matrix that is rounded without the inputs that a plan gives it is rounded once to every type of llama.cpp. Its bytes lie
    in a temporary folder, which takes as much as the matrices in all types of the plans.

    Args:
        heard: Whether the forward that shows the head's inputs also hears how much those of all matrices count.

    Attributes:
        inputs: Of the head, by its name.
        importances: Of all matrices, where they were heard.
    """

    def __init__(self, *, heard: bool = False) -> None:
        self.heard = heard
        self.inputs: dict[str, list[InputMoments]] = {}
        self.importances: dict[str, list[InputMoments]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[Any, Path] = {}

    def data(self, key: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return bytes that were made before under a key, or make them."""
        if key not in self._files:
            made = make()
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="layerbudget-", ignore_cleanup_errors=True)
            file = Path(self._folder.name) / f"{len(self._files)}.npy"
            check_space({self._folder.name: made.nbytes})
            np.save(file, made)
            self._files[key] = file
            return made
        return np.asarray(np.load(self._files[key]))


class _Rounding(LayerCompressor):
    """Rounds piece after piece, and writes each where there is a writer."""

    def __init__(
        self,
        model: nn.Module,
        formats: Mapping[str, str],
        method: str,
        data: CalibrationSet | None,
        options: Mapping[str, Any],
        importances_known: InputStats | None = None,
    ) -> None:
        quantiser = quantiser_of(method).with_options(options)
        if importances_known is None:
            need_data(quantiser, data)
        super().__init__(model, quantiser)
        self.quantiser, self.options = quantiser, quantiser.resolve_options(options)
        self.data = data if quantiser.reads_text else None
        self.pieces, self.importances = _pieces(model, formats), dict(importances_known or {})
        if quantiser.imatrix is not None:
            modules = [job.module for jobs in self.pieces.values() for job in jobs]
            self.importances, self.lacks = importances(quantiser.imatrix, model, modules), "has no importances"
        self.sums: dict[str, torch.Tensor] = {}
        self.offloaded = mapped(model)
        if self.offloaded is not None:
            self.offloaded.hold_ends()
        self.writer: _Writer | None = None
        self.follow: Callable[[int], None] | None = None
        self.checked: Followed | None = None
        self.shared: Shared | None = None
        self.alike, self.copies = False, dict[str, int]()
        self.parts, self.dealt, self.group = Parts(None), DealtRows(), process_group()
        self.inputs = dict[str, int]()
        self.present: Sequence[Job] = ()
        self.notes: list[str] = []

    def treat(self, name: str, view: torch.Tensor, prepared: Any, level: Level) -> None:
        """See :meth:`LayerCompressor.treat`: some rows at a time. Bytes, scales and zero points wait until they are written."""
        form = find_format(str(level.format))
        if form.floating and form.group is not None and level.peak is None:  # one number is of all rows
            level = dataclasses.replace(level, peak=max(float(view.max()), -float(view.min())))
        self.copies[name] = self.copies.get(name, -1) + 1
        for number, rows in enumerate(view.split(self._rows_together(view))):
            key = (name, self.copies[name], number)
            self.dealt.round(key, rows, functools.partial(self._checked, rows, prepared, level, (*key, level.format)))

    def _checked(self, rows: torch.Tensor, prepared: Any, level: Level, key: Any) -> Rounded:
        """Some rows of a matrix, rounded and looked at."""
        done = self._rounded(rows, prepared, level, key)
        check(self.quantiser, rows, done.weight, level)
        return done

    def _rows_together(self, view: torch.Tensor) -> int:
        """How many rows of a matrix are rounded together."""
        return rows_together(view) if self.quantiser.statistic == "gram" else max(1, _PIECE // view.shape[1])

    def collect(self, walk: Walk, modules: Sequence[Module]) -> InputStatistics | None:
        """See :meth:`LayerCompressor.collect`; which matrices have the same inputs decides who rounds them."""
        statistics = super().collect(walk, modules)
        self.inputs = {} if statistics is None else {name: id(each[0]) for name, each in statistics.found.items()}
        self.dealt.deal(self._units)
        return statistics

    def _units(self) -> dict[RowsKey, Part]:
        """The rows of the present piece that are rounded together, the same for all plans: bytes that they share are kept.

        With error feedback rows cost a step for each pair of inputs, and a factor of the inputs is made wherever it is used.
        """
        units = dict[RowsKey, Part]()
        for name in (job.module.name for job in self.present):
            for copy, view in enumerate(matrices(*weight_of(self.model, name))):
                width, needs = float(view.shape[1]), (self.inputs.get(name, name), copy)
                for number, rows in enumerate(view.split(self._rows_together(view))):
                    fed_back = self.quantiser.statistic == "gram"
                    part = Part(len(rows) * width**2, needs, width**3) if fed_back else Part(rows.numel())
                    units[name, copy, number] = part
        return units

    def _rounded(self, rows: torch.Tensor, prepared: Any, level: Level, key: Any) -> Rounded:
        """Some rows of a matrix, rounded; where all plans give them the same inputs, once for all of them."""
        form, made = find_format(str(level.format)), list[Rounded]()
        if self.shared is None or not self.alike or form.plain or form.family != GGUF:
            return self.quantiser.quantise(rows, prepared, level)

        def make() -> np.ndarray:
            """The bytes."""
            made.append(self.quantiser.quantise(rows, prepared, level))
            return cast(np.ndarray, made[0].data)

        data = self.shared.data(key, make)
        return made[0] if made else Rounded(weight=torch.from_numpy(dequantise(data, form.name)).to(rows.device), data=data)

    def jobs(self, work: Sequence[Job], moments: InputStats, made: dict[InputMoments, Any] | None = None) -> list[str]:
        """See :meth:`LayerCompressor.jobs`. Importances are kept for the file; those of experts without a token are all one."""
        if self.quantiser.statistic != "diagonal" or not moments:
            return super().jobs(work, moments, made)
        notes, whole = [], dict[str, list[InputMoments]]()
        for module in (job.module for job in work if job.module.name in moments):
            name, module_moments = module.name, moments[module.name]
            notes += [
                f"{name}[{i}] {self.lacks}; its inputs count alike." for i, m in enumerate(module_moments) if m.value is None
            ]
            whole[name] = counted(module_moments, module.d_in)
            if isinstance(self.writer, GgufWriter) and not self.importances:
                self.sums |= entries(module_moments, module.d_in, self.writer.names()[name])
        return [*notes, *super().jobs(work, whole, made)]

    def run(self, batch_size: int, progress: Progress | None) -> None:
        """Round all pieces, and write them; what was written into a streamed model leaves the memory after that."""
        walk = None
        if self.data is not None:
            size = self.group.batch(self.data.samples, batch_size)
            walk = Walk(self.model, shard(self.data, size), batch_size=size)
        offloaded, tick = self.offloaded, Steps(progress, len(self.pieces))
        with inference(self.model):
            try:
                for index, (layer, jobs) in enumerate(self.pieces.items(), -1):
                    if not jobs and walk is None and not self.dealt.coded and self.follow is None:
                        continue
                    if offloaded is not None and offloaded.converts and layer:
                        offloaded.bring(layer)
                    self._piece(layer, index, jobs, walk)
                    if offloaded is not None and not layer:
                        offloaded.let_ends_go()
                    if walk is not None and not layer:
                        walk.capture()
                    elif walk is not None and index + 2 < len(self.pieces):
                        walk.advance()
                    if self.follow is not None:
                        self.follow(index)
                    if offloaded is not None and (self.dealt.coded or self.follow is not None) and layer:
                        offloaded.leave()
                        if not offloaded.converts:  # there the copies are gone, and with them what was written into them
                            offloaded.fresh([job.module.name + ".weight" for job in jobs])
                    tick()
            finally:
                if walk is not None:
                    walk.close()
                if offloaded is not None and self.follow is not None:
                    offloaded.rest_ends()

    def _of_head(self, walk: Walk, jobs: Sequence[Job]) -> Mapping[str, list[InputMoments]]:
        """Inputs of the head in the model as it was: an embedding that is tied to it is rounded before the layers."""
        modules = [job.module for job in jobs if not find_format(str(job.level.format)).plain]
        statistics = InputStatistics(self.model, modules, self.quantiser.statistic)
        known = {} if self.shared is None else self.shared.inputs
        if set(statistics.owners) <= set(known):
            return {name: known[name] for name in statistics.owners}
        several = [statistics]
        if self.shared is not None and self.shared.heard:
            every = [job.module for jobs in self.pieces.values() for job in jobs]
            several.append(InputStatistics(self.model, every, "diagonal"))
        InputStatistics.of_model(walk, several)
        if self.shared is not None:
            self.shared.importances |= several[-1].found if self.shared.heard else {}
        known |= statistics.found
        return statistics.found

    def _piece(self, layer: str, index: int, jobs: Sequence[Job], walk: Walk | None) -> None:
        """Round and write a piece, or take it as it was kept."""
        part = f"layer-{index}" if layer else "outside"
        if self.dealt.coded and broadcast(lambda: self.parts.find(part) is not None):
            self._take(part, jobs, needed=walk is not None or self.offloaded is None)
            return
        before, self.alike = set(self.sums), not layer or self.data is None
        self.present, self.inputs = jobs, {}
        if walk is not None and layer:
            notes = self.layer(walk, jobs)
        else:
            inputs = self.importances if walk is None else self._of_head(walk, jobs)
            self.dealt.deal(self._units)
            notes = self.jobs(jobs, inputs)
        rounded = self.dealt.unite()
        self.notes += notes
        if self.dealt.coded:
            together(lambda: self._write(layer, part, rounded, notes, before))

    def _take(self, part: str, jobs: Sequence[Job], *, needed: bool) -> None:
        """Write a piece as it was kept; all processes get its weights where later inputs, or the caller, need them."""
        from safetensors import safe_open

        def take() -> None:
            """Read, restore and write, in the main process."""
            kept = self.parts.find(part)
            if kept is None or self.writer is None:
                return
            with safe_open(kept, "pt") as handle:
                tensors = {n: handle.get_tensor(n) for n in handle.metadata()["order"].split("\n")}
                self.sums |= {n: handle.get_tensor(n) for n in handle.keys() if n not in tensors}
                self.notes += json.loads(handle.metadata()["notes"])
            if (needed or self.follow is not None) and not isinstance(self.writer, PlacedRows):
                self.writer.restore([job.module.name for job in jobs], tensors)
            self.writer.add(tensors)

        together(take)
        for job in jobs if needed else ():
            for view in matrices(*weight_of(self.model, job.module.name)):
                self.group.give(view, 0)

    def _write(
        self, layer: str, part: str, rounded: Mapping[str, Sequence[Rounded]], notes: list[str], before: set[str]
    ) -> None:
        """Write a piece, and keep it, in the main process; ``before`` names the sums of earlier pieces."""
        from safetensors.torch import save_file

        if self.writer is None:
            return
        tensors = {n: t.contiguous() for n, t in self.writer.tensors(layer, rounded).items()}
        words = {"order": "\n".join(tensors), "notes": json.dumps(notes)}
        sums = {n: t.clone() for n, t in self.sums.items() if n not in before}
        self.parts.put(part, "safetensors", lambda path: save_file(tensors | sums, path, metadata=words))
        self.writer.add(tensors)


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
    rounding: _Rounding,
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
        if rounding.sums and rounding.data is not None:
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
