"""The work that ``plan bits`` and ``apply`` of its plans count.

Beside the work of all pruners and quantisers these are the errors along which damages are measured, and what is written:
packing, reading back and the vocabulary, timed on a few rows here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import struct
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level, find_quantiser
from ...compressors.formats import BY_MOMENTS, GGUF, HEAD_ROWS, ROWS, RUNTIMES, find_format, find_runtime
from ...cost import timing
from ...cost.sizes import Shape, Text
from ...cost.work import WorkItem, collecting_seconds, derivatives_bytes, moments_bytes, treating
from ...execution.tied import BITS, is_tied, tied_columns, wanted
from ...gguf.names import need_gguf
from ...models.blocks import end_modules
from ...plan import Plan, payload_of
from ..formats.program import formats_of_plan
from .packed import _pack, _unpack
from .payload import BitsPayload
from .pieces import quantiser_of
from .sensitivity import judging_folds

_LABELS = 30.0  # different ones, over the root of those that are drawn
_ROWS, _COLUMNS = 2048, 1024  # of the matrix that is timed: every format fits, and no cache holds it
_WORDS = 4096  # of a vocabulary, timed
_TOUCHES = 200  # packings that take as long as a word of a vocabulary: in tokenizers that are read again, and in heads of files
_BYTES = 1500  # of a token of the vocabulary in the memory: as words, as bytes, and in dictionaries


def choosing(
    text: Text,
    check: Text | None,
    *,
    draws: int = 4,
    runtime: str = "llama.cpp",
    method: str = "rtn",
    names: Sequence[str] | None = None,
    group: int | None = None,
    rows: int = 16,
    anchors: Sequence[str] = ("Q3_K", "Q4_K", "Q6_K", "Q5_0", "Q8_0"),
    tied: int = 0,
) -> list[WorkItem]:
    """Parts of ``plan bits``: ``1 + 2 draws`` passes along the rounding errors, and the check of whole plans.

    Some ``rows`` of every matrix are rounded to all formats of the menu, and ``ROWS`` of
    them to the ``anchors``, along whose errors damages are measured. The check rounds the whole model by the ``method``.
    ``tied`` are the columns of a matrix that is embedding and head.
    """
    target, statistic = find_runtime(runtime, RUNTIMES[runtime].family), find_quantiser(method).statistic
    gram = statistic == "gram"
    most, together = 6 if gram else 4, HEAD_ROWS if target.ends else 0

    def seconds(form: str, rows: int, columns: int) -> float:
        return timing.treating_seconds(find_quantiser, method, form, rows, columns)

    def sampled(menu: Sequence[str], rows: int, columns: int) -> float:
        return timing.sampling_seconds(find_quantiser, method, [*menu, *anchors], rows, columns)

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model."""
        menu = [f.name for f in target.formats(shape.inputs, names, group, inputs=statistic != "none")]

        def fit(columns: int) -> list[str]:
            return [f for f in anchors if not find_format(f).plain and find_format(f).fits(columns)][:most]

        def each(out: int, columns: int) -> float:
            kept = out if gram else min(out, ROWS)
            rounded = sum(seconds(f, kept, columns) for f in fit(columns)) + sampled(menu, rows, columns)
            return rounded + draws * text.samples * kept * columns * timing.written_seconds(len(fit(columns)), text.length)

        def end(out: int, columns: int) -> float:
            labels = out if out <= HEAD_ROWS else min(out, int(_LABELS * (draws * text.tokens) ** 0.5))  # that are drawn
            rounded = sum(seconds(f, labels, columns) for f in fit(columns)) + sampled(menu, 4 * rows, columns)
            met = text.samples * out * columns * timing.written_seconds(len(fit(columns)), text.length, head=True)
            return rounded + (met if labels == out else 0.0)

        ends = sum(end(m.d_out, m.d_in) for m in shape.ends if target.ends)
        return shape.over(each) + ends + collecting_seconds(statistic, shape, text)

    def codes(shape: Shape, text: Text) -> float:
        """The rows that are measured, rounded to every anchor, in a byte for each weight."""

        def each(out: int, columns: int) -> float:
            fit = sum(not find_format(f).plain and find_format(f).fits(columns) for f in anchors)
            return min(fit, most) * (columns + 4.0) * (out if gram else min(out, ROWS))

        return shape.over(each, ends=target.ends) + derivatives_bytes(17, text.samples)(shape, text)

    way: dict[str, Any] = {"job": job, "sent": codes, "together": together}
    measured = [WorkItem("directional", text, 1.0 + 2.0 * draws, losses=draws, **way)]
    if gram:  # some sequences show the inputs, and the others have twice as many draws
        judging = max(1, text.samples // judging_folds(text.samples))
        judges = dataclasses.replace(text, samples=judging, drawn=text.samples)
        shown = dataclasses.replace(text, samples=max(1, text.samples - judging), drawn=text.samples)
        look = WorkItem("directional", judges, 1.0 + 4.0 * draws, losses=2 * draws, **way)
        measured = [look, WorkItem("norms", shown, 2.0, sent=moments_bytes)]
    elif statistic == "diagonal":
        measured.append(WorkItem("norms", text, 1.0))
    if check is None:
        return measured
    quantised = runtime == "llama.cpp" and method in BY_MOMENTS  # then the mix is rounded as llama-quantize does
    plans = 3.0 if runtime == "llama.cpp" and not quantised else 2.0
    whole = treating(method, text, formats=anchors, ends=target.ends, forwards=0.0)
    whole = [dataclasses.replace(part, times=plans) for part in whole]
    whole += both_uses(method, text, tied) if target.ends else []
    if quantised:
        whole += [dataclasses.replace(part, forwards=1.0) for part in treating("weighted", text, formats=anchors, ends=True)]
    return [*measured, *whole, WorkItem("forward", check, 1.0 + plans + quantised)]


def both_uses(method: str, text: Text, columns: int) -> list[WorkItem]:
    """The forward and backward for a matrix of so many columns that is embedding and head; empty where there is none."""
    if not columns or method not in BY_MOMENTS:
        return []
    return [WorkItem("gradient-norm", dataclasses.replace(text, samples=min(text.samples, wanted(columns, text.length))))]


def applying(method: str, text: Text, plan: Plan, model: nn.Module) -> list[WorkItem]:
    """Parts of ``apply``: what every method takes, and what it takes of a matrix that is embedding and head."""
    small = {name for name, form in formats_of_plan(plan).items() if find_format(form).bits < BITS}
    tied = any(m.name in small and is_tied(model, m.name) for m in end_modules(model))
    return [*treating(method, text, **rounded_of(plan)), *(both_uses(method, text, tied_columns(model)) if tied else ())]


def rounded_of(plan: Plan) -> dict[str, Any]:
    """Return what applying a plan rounds and writes, as :func:`~layerbudget.cost.work.treating` takes it."""
    formats, gguf = formats_of_plan(plan), payload_of(plan, BitsPayload).family == GGUF
    return {"formats": formats, "ends": gguf, "forwards": 0.0, "more": _writing(gguf), "held": _held(gguf)}


def _writing(gguf: bool) -> Callable[[Shape, Text, dict[str, float]], float]:
    """Seconds of writing so many weights in every format."""

    def job(shape: Shape, text: Text, weights: dict[str, float]) -> float:
        return shape.vocabulary * _TOUCHES * _word() + sum(count * _weight(form, gguf) for form, count in weights.items())

    return job


def _held(gguf: bool) -> Callable[[Shape], float]:
    """Bytes of an embedding that is rounded beside its head, of the vocabulary, and of a folder that is loaded once written."""

    def held(shape: Shape) -> float:
        sizes = sorted((m.numel for m in shape.ends), reverse=True)
        loaded = 0 if gguf else 2 * (shape.layers * shape.numel + sum(sizes))
        return sum(sizes[1:]) * shape.width * shape.converts + _BYTES * shape.vocabulary * gguf + loaded

    return held


@functools.cache
def _weight(name: str, gguf: bool) -> float:
    """Seconds of a weight on its way into the file, and of reading it back."""
    form, weight = find_format(name), torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(1))
    made = quantiser_of("rtn").quantise(weight, None, Level(format=name, peak=float(weight.abs().max())))

    halved = weight.to(torch.bfloat16)

    def write() -> torch.Tensor:
        """Convert, look at every number, write and read back; a packed folder is loaded, and all files are read once more."""
        torch.isfinite(weight.copy_(halved)).all()
        weight.copy_(made.weight)
        if gguf and not form.plain:
            package = need_gguf()
            np.array_equal(package.dequantize(made.data, package.GGMLQuantizationType[form.name]), made.weight.numpy())
            _write(made.data)
            return weight
        written = weight.to(torch.float16 if gguf else torch.bfloat16)
        if not form.plain:
            packed = {f"x.{key}": tensor for key, tensor in _pack(made.weight, made, form, "x").items()}
            written = _unpack(packed, form, "x").to(written)
        _write(written.view(torch.uint8).numpy())
        torch.isfinite(written).all()
        return weight

    return timing.seconds_of(write) / weight.numel()


def _write(data: Any) -> None:
    """Write an array to a file without a name, and take its checksum."""
    with tempfile.TemporaryFile() as file:
        file.write(memoryview(data))
    hashlib.blake2b(memoryview(data))


@functools.cache
def _word() -> float:
    """Seconds of packing one word."""
    words = [f"word{i}" for i in range(_WORDS)]

    def pack() -> bytes:
        return b"".join(struct.pack("<Q", len(data := word.encode())) + data for word in words)

    return timing.seconds_of(pack) / _WORDS
