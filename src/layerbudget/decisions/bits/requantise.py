"""Give a GGUF file the types of a plan: everything else in it stays as it is, byte for byte.

This is the road for every model that llama.cpp's converter knows. Tensors go through the memory one after the other, some rows
at a time; ggml rounds them. Rows may stand in another order than in the model: types hold every row by itself. Where the model
is given too, its matrices are rounded with their inputs, by error feedback if that is the method, and put into the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn

from ...compressors import ggml
from ...compressors.formats import BY_MOMENTS, find_format
from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput, ModelMismatch
from ...execution.processes import one_process
from ...gguf.header import is_read, open_gguf
from ...gguf.names import ACROSS, Names, need_gguf
from ...gguf.rewriting import GgufOutput, GgufSource, tensor_bytes
from ...llama_cpp.check import check_alike
from ...llama_cpp.imatrix import IMATRIX_FILE, read_imatrix, write_imatrix
from ...llama_cpp.writer import file_type, recount_gguf
from ...models.blocks import check_finite, describe
from ...models.machine import versions
from ...plan import Plan, payload_of
from ...progress import Progress
from ...storage.writing import write_text
from ..formats.program import formats_of_plan
from ..formats.table import signature_at
from .apply import round_matrices
from .card import model_card
from .export import llama_cpp
from .payload import BitsPayload
from .pieces import quantiser_of
from .placed import ROWS_TOLD, PlacedRows
from .receipt import QuantisationReceipt
from .terms import whole_bytes

_ROWS = 1 << 22  # weights that are rounded at a time
# Least cosine between some values of two embeddings of one model: in 16 or 32 bits, and where the file was quantised before.
_EQUAL, _ALIKE, _TINY = 0.9999, 0.9, 1e-30
_PLAIN = ("F32", "F16", "BF16", "F64")
_ENDS = ("token_embd.weight", "output.weight")  # a row of them is a token


def requantise(
    source: Path | str,
    plan: Plan,
    out: Path | str,
    *,
    method: str | None = None,
    imatrix: str | None = None,
    inputs: Annotated[Any, "the model that the file was converted from, for descent, gptq and weighted"] = None,
    data: CalibrationSet | None = None,
    batch_size: int = 8,
    overwrite: bool = False,
    text_files: Mapping[str, str] | None = None,
    check: bool = True,
    progress: Progress | None = None,
) -> QuantisationReceipt:
    """Write a GGUF file again with the types of a plan, and return its record; metadata and other tensors are copied.

    Args:
        source: The file, in 16 or 32 bits as ``convert_hf_to_gguf.py`` writes it. One that is quantised is read back first.
        plan: Of kind ``bits`` for GGUF, made from the same model in transformers.
        out: The file to write (``planned.gguf``), or a folder for it with the plan, the record and a model card. With
            ``weighted`` the folder has the importance matrix too.
        method: ``rtn``, ``weighted``, ``gptq`` or ``descent``; by default what the plan was measured with.
        imatrix: An importance matrix of llama.cpp, for ``weighted``.
        inputs: The model that the file was converted from, in float32: its matrices' inputs on ``data`` are what ``descent``,
            ``gptq`` and ``weighted`` read. It is rounded too.
        data: Calibration tokens, for ``inputs``.
        batch_size: Sequences per forward of it.
        overwrite: Replace what an earlier call wrote.
        text_files: Further text files of a folder, by name.
        check: Load the file by llama.cpp: see :func:`~layerbudget.llama_cpp.check.check_alike`.
        progress: Called with (tensors done, tensors), after (pieces done, pieces) of the model.

    Raises:
        NotFound: There is no such file.
        CorruptFile: It is no GGUF file, or is cut off.
        ModelMismatch: The plan, the importance matrix or ``inputs`` is of another model.
        InvalidInput: A plan of another kind, a method that needs the model, a type that needs an importance matrix.
        CoverageError: Weights that a type does not reach, or a file that llama.cpp refuses where it takes the source.
    """
    one_process("A GGUF file gets other types")
    formats, source_file = formats_of_plan(plan), GgufSource.open(source)
    method = _method(plan, method, imatrix, inputs is not None)
    work = _Work(source_file, formats, plan, None if imatrix is None else read_imatrix(imatrix), read=inputs is not None)
    sources = [source, *([] if imatrix is None else [imatrix])]
    output = GgufOutput.checked(out, work.size * (1 if inputs is None else 2), sources, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        if inputs is not None:
            aside = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=output.parent, prefix=".rounded-")))
            work.round(inputs, data, method, batch_size, aside, progress)

        def write_others(folder: Path, receipt: QuantisationReceipt) -> None:
            """Write what lies beside the file in a folder."""
            if imatrix is not None:
                shutil.copyfile(imatrix, folder / IMATRIX_FILE)
            elif work.sums and data is not None:
                write_imatrix(folder / IMATRIX_FILE, work.sums, data.describe())
            for name, text in (text_files or {}).items():
                write_text(folder / name, text)
            _write_others(plan, folder, receipt)

        return output.write(partial(work.write, method=method, check=check, progress=progress), write_others)


def check_source(source: Path | str, plan: Plan, *, method: str | None, imatrix: str | None, reads: bool) -> None:
    """Refuse what :func:`requantise` refuses of a file, a plan and a method; ``reads``: a model will be given too."""
    formats_of_plan(plan)
    _method(plan, method, imatrix, reads)
    GgufSource.open(source)


def reads_itself(source: Path | str, plan: Plan, *, method: str | None, imatrix: str | None) -> bool:
    """Return whether a file is the model whose inputs a method needs: a plan was made on a file, and this one is read as one.

    It has 8 bits or more: rows of fewer cannot be told any more.
    """
    method = method or payload_of(plan, BitsPayload).method
    if imatrix is not None or method not in ("weighted", *BY_MOMENTS) or not str(plan.model.get("id")).endswith(".gguf"):
        return False
    file = Path(source)
    return file.is_file() and is_read(file) and set(open_gguf(file).types()) <= {*ROWS_TOLD}


def _write_others(plan: Plan, folder: Path, receipt: QuantisationReceipt) -> None:
    """Write what lies beside the file: its types, a model card, the plan and the record."""
    write_text(folder / "tensor-types.txt", llama_cpp(plan))
    write_text(folder / "README.md", model_card(plan, receipt))
    plan.save(folder / "plan.json")
    receipt.save(folder / "receipt.json")


def _method(plan: Plan, method: str | None, imatrix: str | None, reads: bool) -> str:
    """The method that rounds; what the file alone does not suffice for is refused, unless it ``reads`` the model too."""
    method = method or ("weighted" if imatrix is not None else payload_of(plan, BitsPayload).method)
    if payload_of(plan, BitsPayload).family != "gguf":
        raise InvalidInput("This plan holds no gguf formats.", "", "Plan with --format gguf.")
    if reads and (imatrix is not None or method == "rtn"):
        what = "An importance matrix and the model were given." if imatrix is not None else "rtn reads no inputs."
        raise InvalidInput(what, "The model's inputs are for descent, gptq and weighted.", "Leave one out.")
    if reads:
        quantiser_of(method)
        return method
    if method in BY_MOMENTS:
        raise InvalidInput(
            f"{method} needs the inputs of the model's matrices, and a GGUF file has none.",
            "The model that it was converted from has them.",
            "Add --inputs MODEL; or use --method weighted --imatrix FILE, or --method rtn.",
        )
    if method == "weighted" and imatrix is None:
        raise InvalidInput(
            "weighted needs an importance matrix of the file.",
            "llama-imatrix makes one. apply MODEL PLAN --method weighted -o DIR leaves imatrix.gguf, where it writes the file.",
            "Add --imatrix FILE, or --inputs MODEL. (--method rtn needs none, and costs more than the plan says.)",
        )
    if method not in ("rtn", "weighted") or (method == "rtn" and imatrix is not None):
        raise InvalidInput(
            f"{method} {'reads no importance matrix' if method == 'rtn' else 'does not round a GGUF file'}.",
            "A file is rounded by rtn without one, or by weighted with one.",
            "Use --method rtn alone, or --method weighted --imatrix FILE.",
        )
    return method


class _Work:
    """One file, the types that its tensors get, and how they are rounded."""

    def __init__(
        self,
        source: GgufSource,
        formats: Mapping[str, str],
        plan: Plan,
        importances: Mapping[str, Any] | None,
        *,
        read: bool = False,
    ) -> None:
        self.source, self.plan, self.formats, self.importances = source, plan, formats, importances
        self.gguf, self.notes, self.made, self.read = need_gguf(), list[str](), dict[str, Path](), read
        self.sums: dict[str, torch.Tensor] = {}
        self.left_out: dict[str, int] = {}  # rows of the model that a tensor of the file does not have
        self.tensors = {t.name: t for t in source.reader.tensors}
        self.stored = self._names()
        types = {t: formats[m] for m, tensors in self.stored.items() for t in tensors}
        if any(types[t] != formats[m] for m, tensors in self.stored.items() for t in tensors):
            raise InvalidInput("The experts of a tensor have several types.", "In GGUF they have one.", "Plan with --by layer.")
        self.kinds = {t: self.gguf.GGMLQuantizationType[find_format(f).name] for t, f in types.items()}
        self._check()
        self.head = source.head(
            {
                "general.file_type": int(file_type(self.gguf, list(formats.values()))),
                "general.quantization_version": self.gguf.GGML_QUANT_VERSION,
            },
            self.kinds,
        )
        left = (source.padded(tensor_bytes(t.shape, self.kinds.get(n, t.tensor_type))) for n, t in self.tensors.items())
        self.size = len(self.head) + sum(left)

    def _names(self) -> dict[str, tuple[str, ...]]:
        """Tensors of every planned matrix; gate and up of experts may be one tensor in the file too."""
        names = Names(str(self.source.value("general.architecture")), self.source.layers)
        stored = {}
        for matrix in self.formats:
            known = names.find(matrix)
            tensors = [f"{t}.weight" for t in known]
            if known and ACROSS.search(known[0]):
                what = f"This plan has a type for {matrix}. It is two tensors in the file, and in one its rows are columns."
                raise InvalidInput(what, "They stay in 16 bits.", "Make the plan again: layerbudget plan bits.")
            if len(tensors) == 2 and tensors[0] not in self.tensors:
                tensors = [tensors[0].replace("ffn_gate_exps", "ffn_gate_up_exps")]
            if not tensors or any(t not in self.tensors for t in tensors):
                raise self._other(f"{matrix} is not in it")
            stored[matrix] = tuple(tensors)
        return stored

    def _check(self) -> None:
        """Refuse a plan whose matrices have other sizes than the file's, which may have fewer tokens."""
        for block in self.plan.blocks:
            tensors = {t for m in block.modules for t in self.stored[m]}
            shared = any(t in names for m, names in self.stored.items() if m not in block.modules for t in tensors)
            numel = sum(math.prod(int(n) for n in self.tensors[t].shape) for t in tensors)
            if shared or numel == block.numel:
                continue
            (first, *others), width = tensors, int(self.tensors[min(tensors)].shape[0])
            if others or first not in _ENDS or numel > block.numel or block.numel % width:
                raise self._other(f"{block.name} has {block.numel} weights in the plan and {numel} in the file")
            self.left_out[first] = (block.numel - numel) // width
        self._check_values()
        self._check_importances()
        for name, kind in self.kinds.items():
            find_format(kind.name).check(name, int(self.tensors[name].shape[0]))
        blind = [n for n, k in self.kinds.items() if find_format(k.name).needs_inputs and n not in (self.importances or ())]
        if self.importances is None and blind and not self.read:
            kind = self.kinds[blind[0]].name
            raise InvalidInput(
                f"{kind} is rounded with an importance matrix only.", "", "Use --method weighted --imatrix FILE."
            )
        if self.importances is not None and not set(self.importances) & set(self.kinds):
            raise ModelMismatch("The importance matrix names none of the file's tensors.", "", "Make one of this model.")
        if blind and not self.read:
            message = f"The importance matrix has nothing for {len(blind)} tensors whose types need it, first {blind[0]}"
            raise ModelMismatch(f"{message} ({self.kinds[blind[0]].name}).", "", "Make one of this model.")

    def _check_importances(self) -> None:
        """Refuse an importance matrix whose tensors have other shapes than the file's."""
        for name, (sums, counts) in (self.importances or {}).items():
            if name not in self.kinds:
                continue
            shape = [int(n) for n in self.tensors[name].shape]
            copies, width = math.prod(shape[2:]), shape[0]
            if sums.size != copies * width or copies % len(counts):
                message = f"{name} has {sums.size} values there, the file {copies} x {width}"
                raise ModelMismatch(f"The importance matrix is of another model: {message}.", "", "Make one of this model.")

    def _check_values(self) -> None:
        """Refuse a file whose embedding is another one than the plan's model had; one that was quantised is near enough."""
        expected, tensor = payload_of(self.plan, BitsPayload).signature, self.tensors.get("token_embd.weight")
        if not expected or tensor is None:
            return
        width, tokens = (int(n) for n in tensor.shape)
        at = [place for place in signature_at(tokens + self.left_out.get(tensor.name, 0), width) if place[0] < tokens]
        rows = self._read(np.stack([tensor.data[i] for i, _ in at]), tensor.tensor_type)
        values, expected = rows[np.arange(len(at)), [j for _, j in at]], expected[: len(at)]
        alike = float(np.dot(values, expected)) / max(float(np.linalg.norm(values) * np.linalg.norm(expected)), _TINY)
        if alike < (_EQUAL if tensor.tensor_type.name in _PLAIN else _ALIKE):
            raise self._other("its embedding holds other values")

    def _other(self, why: str) -> ModelMismatch:
        message = f"The plan is of another model than {self.source.path}: {why}."
        return ModelMismatch(message, "", "Plan for the model that the file was converted from.")

    def round(
        self,
        model: nn.Module,
        data: CalibrationSet | None,
        method: str,
        batch_size: int,
        aside: Path,
        progress: Progress | None,
    ) -> None:
        """Round the matrices with the model's inputs, and keep them in a folder as the file has them."""
        self.plan.validate(describe(model))
        check_finite(model)
        placed = PlacedRows(model, self.stored, self.tensors, self.source.path, aside)
        options: dict[str, Any] = {"method": method, "batch_size": batch_size, "progress": progress}
        self.notes += round_matrices(model, self.formats, data, placed=placed, **options)
        self.made, self.sums = placed.made, placed.importances()

    def write(self, file: Path, method: str, check: bool, progress: Progress | None) -> QuantisationReceipt:
        """Write the file, count it again, load it, and return the record."""
        self.source.write(file, self.head, self._content, progress)
        receipt = self._receipt(file, method)
        tokens = int(self.tensors[_ENDS[0]].shape[1]) if _ENDS[0] in self.tensors else 0
        return dataclasses.replace(receipt, llama_cpp=check_alike(file, self.source.path, tokens) if check else "")

    def _content(self, tensor: Any) -> Iterator[np.ndarray]:
        """The bytes of a tensor, some rows at a time."""
        name, kind = tensor.name, self.kinds.get(tensor.name, tensor.tensor_type)
        if name in self.made:
            yield np.load(self.made[name])
            return
        if name not in self.kinds:
            yield tensor.data
            return
        width = int(tensor.shape[0])
        stack = tensor.data.reshape(-1, *tensor.data.shape[-2:])
        importance = None if kind == tensor.tensor_type else self._importance(name, len(stack), width)
        step = max(1, _ROWS // width)
        for i, matrix in enumerate(stack):
            for start in range(0, len(matrix), step):
                rows, matrix_importance = matrix[start : start + step], None if importance is None else importance[i]
                part = rows if kind == tensor.tensor_type else self._rounded(rows, tensor.tensor_type, kind, matrix_importance)
                self._check_finite(part, name, kind)
                yield part

    def _rounded(self, rows: np.ndarray, before: Any, kind: Any, importance: np.ndarray | None) -> np.ndarray:
        """Rows of a type in another one."""
        values = self._read(rows, before)
        if not find_format(kind.name).plain:
            return ggml.quantise(values, kind.name, importance, threads=torch.get_num_threads())
        with np.errstate(over="ignore"):  # said by the check that follows
            return np.asarray(self.gguf.quantize(values, kind))

    def _check_finite(self, data: np.ndarray, name: str, kind: Any) -> None:
        """Refuse weights that a type does not reach: scales, and plain numbers, have 16 bits."""
        plain = kind.name in _PLAIN
        if np.isfinite(self.gguf.dequantize(data, kind)).all() if plain else ggml.is_finite(data, kind.name):
            return
        if kind == self.tensors[name].tensor_type:
            raise CoverageError(f"{self.source.path} holds numbers that are not finite.", "", "Convert the model again.")
        what = f"{name} has weights that are too large for {kind.name}."
        far = f"Plan again with --keep '{name}=Q8_0'." if kind.name != "Q8_0" else "Check the model."
        raise CoverageError(what, "F16 ends at 65,504, Q8_0 at 8 million.", far)

    def _read(self, rows: np.ndarray, kind: Any) -> np.ndarray:
        """Rows as numbers; a type that is no plain number is read back by ggml."""
        values = self.gguf.dequantize(rows, kind) if kind.name in _PLAIN else ggml.dequantise(rows, kind.name)
        if not np.isfinite(values).all():
            raise CoverageError(f"{self.source.path} holds numbers that are not finite.", "", "Convert the model again.")
        return np.asarray(values, dtype=np.float32)

    def _importance(self, name: str, copies: int, width: int) -> np.ndarray | None:
        """Mean squares of the inputs, ``(copies, width)``; ones for experts that no token reached."""
        if self.importances is None or name not in self.importances:
            return None
        sums, counts = self.importances[name]
        sums, counts = sums.reshape(copies, width), np.repeat(counts, copies // len(counts))[:, None]
        seen = counts > 0
        return np.asarray(np.where(seen, sums / np.where(seen, counts, 1), 1), dtype=np.float32)

    def _receipt(self, file: Path, method: str) -> QuantisationReceipt:
        tensor_bytes, plan = recount_gguf(file), self.plan
        total, planned = sum(tensor_bytes[t] for t in self.kinds), int(plan.counts.sum())
        for name, rows in self.left_out.items():
            form, (width, tokens) = find_format(self.kinds[name].name), (int(n) for n in self.tensors[name].shape)
            planned -= form.bytes(tokens + rows, width) - form.bytes(tokens, width)
        if total != planned or file.stat().st_size != self.size:
            raise CoverageError(
                f"The matrices take {total} bytes, {planned} were planned.", "", "Report this; nothing is kept."
            )
        shares = {t: sum(t in names for names in self.stored.values()) for t in self.kinds}
        return QuantisationReceipt(
            method=method,
            family="gguf",
            plan_digest=plan.digest,
            identity=plan.model,
            modules={
                m: {"format": f, "bytes": sum(tensor_bytes[t] // shares[t] for t in self.stored[m])}
                for m, f in self.formats.items()
            },
            bytes=total,
            planned=planned,
            tensors=sum(tensor_bytes.values()),
            file=self.size,
            bits=8 * total / sum(math.prod(int(n) for n in self.tensors[t].shape) for t in self.kinds),
            notes=tuple(self._notes()),
            versions=versions(),
        )

    def _notes(self) -> list[str]:
        """Notes for the user: types that were quantised before, and tensors without importances."""
        before = [self.tensors[n].tensor_type.name for n, k in self.kinds.items() if self.tensors[n].tensor_type != k]
        again = sorted({k for k in before if k not in _PLAIN})
        notes = list(self.notes)
        notes += [
            f"{n} has {rows:,} tokens fewer than the plan: the converter left out those that the tokenizer does not have."
            for n, rows in self.left_out.items()
        ]
        if again:
            notes.append(
                f"{self.source.path.name} was quantised before ({', '.join(again)}): its errors stay, and those of the plan "
                "come on top, so that this file costs more than the plan says. A file in 16 bits gives a better one."
            )
        counted, known = whole_bytes(self.plan), payload_of(self.plan, BitsPayload).head_bytes
        if known and self.size > counted:
            notes.append(
                f"The whole file has {self.size - counted:,} bytes more than the plan counted ({counted:,}): what is not "
                f"planned, metadata among it, is as it was in {self.source.path.name}."
            )
        bare = [n for n in self.kinds if self.importances is not None and n not in self.importances]
        if bare:
            notes.append(
                f"Without importances, and so rounded to nearest: {len(bare)} of the tensors, first {', '.join(bare[:3])}."
            )
        return notes
