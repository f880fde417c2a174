"""Rounds a model piece after piece: what lies outside the layers, then every layer; each is packed before the next one.

Of a streamed model one layer is in memory at a time. A piece can be kept in the form in which it goes to the file.
So a run that was stopped continues, and writes the same bytes.
"""

from __future__ import annotations

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
from ...compressors.formats import GGUF, find_format
from ...compressors.ggml import dequantise
from ...compressors.quantisers import Quantiser, Rounded, rows_together
from ...compressors.treating import InputStats, Job, LayerCompressor, check, matrices
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.inputs import InputMoments, InputStatistics
from ...execution.modes import inference
from ...execution.processes import broadcast, process_group, shard
from ...execution.sharing import Part, together
from ...execution.tied import BITS, is_tied, tied_moments
from ...execution.walk import Walk
from ...llama_cpp.check import Followed
from ...llama_cpp.imatrix import counted, entries, importances
from ...llama_cpp.writer import GgufWriter
from ...models.blocks import layers, weight_of
from ...models.offload import mapped
from ...progress import Progress, Steps
from ...records import Module
from ...storage.parts import Parts
from ...storage.writing import Scratch, check_space
from .blocks import layers_of, modules_by_name, peaks
from .dealt import DealtRows, RowsKey
from .packed import PackedWriter
from .placed import PlacedRows

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


def pieces_of(model: nn.Module, formats: Mapping[str, str]) -> dict[str, list[Job]]:
    """Return jobs by layer, in the order in which the model is rounded: those outside the layers (``""``) first."""
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
        tied: What takes their place where the head is the embedding too.
        importances: Of all matrices, where they were heard.
    """

    def __init__(self, *, heard: bool = False) -> None:
        self.heard = heard
        self.inputs: dict[str, list[InputMoments]] = {}
        self.tied: dict[str, list[InputMoments]] = {}
        self.importances: dict[str, list[InputMoments]] = {}
        self._scratch: Scratch | None = None
        self._files: dict[Any, Path] = {}

    def data(self, key: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return bytes that were made before under a key, or make them."""
        if key not in self._files:
            made = make()
            self._scratch = self._scratch or Scratch()
            file = self._scratch.path / f"{len(self._files)}.npy"
            check_space({tempfile.gettempdir(): made.nbytes})
            np.save(file, made)
            self._files[key] = file
            return made
        return np.asarray(np.load(self._files[key]))


class ModelRounding(LayerCompressor):
    """Rounds piece after piece, and writes each where there is a ``writer``."""

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
        self.pieces, self.importances = pieces_of(model, formats), dict(importances_known or {})
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
            if isinstance(self.writer, GgufWriter | PlacedRows) and not self.importances:
                self.sums |= entries(module_moments, module.d_in, self.writer.names()[name])
        return [*notes, *super().jobs(work, whole, made)]

    def run(self, batch_size: int, progress: Progress | None) -> None:
        """Round all pieces, and write them; what was written into a streamed model leaves the memory after that."""
        walk, self.batch_size, self.progress = None, batch_size, progress
        if self.data is not None:
            size = self.group.batch(self.data.samples, batch_size)
            walk = Walk(self.model, shard(self.data, size), batch_size=size)
        offloaded, tick = self.offloaded, Steps(progress, len(self.pieces))
        with inference(self.model):
            try:
                for index, (layer, jobs) in enumerate(self.pieces.items(), -1):
                    if not jobs and walk is None and not self.dealt.coded and self.follow is None:
                        continue
                    passing = offloaded is not None and bool(layer) and (self.dealt.coded or self.follow is not None)
                    written = [weight_of(self.model, job.module.name)[1] for job in jobs]
                    copies = offloaded.copied(written) if offloaded is not None and passing else []
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
                    if offloaded is not None and passing:
                        offloaded.leave()
                        if not offloaded.converts:  # there the copies are gone, and with them what was written into them
                            offloaded.fresh([offloaded.names[id(parameter)] for parameter in written])
                        for parameter, values in copies:
                            parameter.data.copy_(values)
                    tick()
            finally:
                if walk is not None:
                    walk.close()
                if offloaded is not None and self.follow is not None:
                    offloaded.rest_ends()

    def _of_head(self, walk: Walk, jobs: Sequence[Job]) -> Mapping[str, list[InputMoments]]:
        """Inputs of the head in the model as it was: an embedding that is tied to it is rounded before the layers.

        With error feedback such a matrix is rounded for both, by moments of its own, where its type has few bits.
        """
        forms = {job.module: find_format(str(job.level.format)) for job in jobs}
        fed_back, equal = self.quantiser.statistic == "gram", self.quantiser.equal_tokens
        tied = [m for m, form in forms.items() if fed_back and form.bits < BITS and is_tied(self.model, m.name)]
        modules = [m for m, form in forms.items() if not form.plain and m not in tied]
        statistics = InputStatistics(self.model, modules, self.quantiser.statistic, equal_tokens=equal)
        shared = self.shared or Shared()
        several = [] if set(statistics.owners) <= set(shared.inputs) else [statistics]
        unseen = [m for m in tied if m.name not in shared.tied]
        if shared.heard and (several or unseen):
            every = [job.module for jobs in self.pieces.values() for job in jobs]
            several.append(InputStatistics(self.model, every, "diagonal"))
        if several:
            InputStatistics.of_model(walk, several)
            shared.importances |= several[-1].found if shared.heard else {}
            shared.inputs |= statistics.found
        if unseen:
            data = cast(CalibrationSet, self.data)
            shared.tied |= tied_moments(self.model, unseen, data, self.batch_size, self.progress)
        known = {n: shared.inputs[n] for n in statistics.owners if n in shared.inputs}
        return known | {m.name: shared.tied[m.name] for m in tied}

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
