"""llama.cpp's importance matrices: how large every input of a matrix is, written and read as the files of ``llama-imatrix``.

A file holds two tensors for every matrix: ``NAME.in_sum2``, the sums of squares of its inputs, ``(experts, inputs)``, and
``NAME.counts``, the tokens that were summed, ``(experts, 1)``; a matrix that is no stack of experts has one row.
``llama-quantize --imatrix`` divides one by the other. Inputs of an expert that no token reached count alike, and a matrix
without an entry is rounded without importances. Embeddings have none in any file, and the head after ``--process-output`` only.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInput
from ..execution.inputs import InputMoments
from ..gguf.names import find_names, need_gguf
from ..models.blocks import config_of, layers, text_config
from ..records import Module

IMATRIX_FILE = "imatrix.gguf"
ENDINGS = _SUMS, _COUNTS = ".in_sum2", ".counts"


def counted(moments: Sequence[InputMoments], width: int) -> list[InputMoments]:
    """Return the moments of a matrix's experts, with ones for those that no token reached: so ``llama-quantize`` reads them."""
    return [m if m.value is not None else InputMoments("diagonal", value=torch.ones(width), rows=1) for m in moments]


def entries(moments: Sequence[InputMoments], width: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of an importance matrix for some tensors of the model's file that read the same inputs."""
    sums = torch.stack([torch.zeros(width) if m.value is None else m.value.cpu() for m in moments])
    counts = torch.tensor([[float(m.rows)] for m in moments])
    return {name + ending: values for name in names for ending, values in ((_SUMS, sums), (_COUNTS, counts))}


def write_imatrix(file: Path, tensors: Mapping[str, torch.Tensor], text: Mapping[str, Any]) -> None:
    """Write an importance matrix: :func:`entries` of all matrices, and what describes the text that they are from."""
    writer = need_gguf().GGUFWriter(file, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [str(text["source"])])
    writer.add_uint32("imatrix.chunk_count", int(text["samples"]))
    writer.add_uint32("imatrix.chunk_size", int(text["length"]))
    for name, tensor in sorted(tensors.items()):
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def imatrix_digest(file: Path | str) -> str:
    """Content hash of an importance matrix; a file that is not there is refused."""
    return hashlib.sha256(_found(file).read_bytes()).hexdigest()


def _found(file: Path | str) -> Path:
    path = Path(file)
    if not path.is_file():
        raise InvalidInput(f"There is no file {path}.", "", "Make one with llama-imatrix, or leave imatrix out.")
    return path


def read_imatrix(file: Path | str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the sums ``(experts, inputs)`` and counts ``(experts,)`` of every tensor of an importance matrix.

    Raises:
        InvalidInput: No such file, one of another kind or of the format before August 2025, one that does not end, or one with
            numbers that no text gives.
    """
    path = _found(file)
    with path.open("rb") as stream:
        known = stream.read(4) == b"GGUF"
    if not known:
        raise InvalidInput(
            f"{path} is no GGUF file; llama-imatrix wrote another format before August 2025.",
            "Read are the importance matrices of later builds.",
            f"Convert it: llama-imatrix --in-file {path} --output-format gguf -o imatrix.gguf.",
        )
    try:
        tensors = {t.name: np.array(t.data, dtype=np.float32) for t in need_gguf().GGUFReader(path).tensors}
    except (ValueError, IndexError, KeyError) as error:
        raise InvalidInput(f"{path} is cut off or damaged.", "", "Copy it again.") from error
    names = [n.removesuffix(_SUMS) for n in tensors if n.endswith(_SUMS)]
    if not names or any(n + _COUNTS not in tensors for n in names):
        problem = f"{path} holds no importance matrix."
        raise InvalidInput(problem, "One has tensors NAME.in_sum2 and NAME.counts.", "Make one with llama-imatrix.")
    return {n: _checked(path, n, tensors[n + _SUMS], tensors[n + _COUNTS].reshape(-1)) for n in names}


def _checked(path: Path, name: str, sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of a tensor, refused where no text gives such; experts that no token reached have zeros."""
    if not len(counts) or not sums.size or sums.size % len(counts):
        why = f"{sums.size} sums are not for {len(counts)} counts"
    elif not np.isfinite(sums).all() or not np.isfinite(counts).all():
        why = "values are not finite"
    elif (sums < 0).any() or (counts < 0).any():
        why = "sums of squares or counts are negative"
    elif not (counts > 0).any() or ((counts > 0) & (counts < 1)).any():
        why = "no token was counted"
    elif sums.reshape(len(counts), -1)[counts == 0].any():
        why = "sums have no count"
    else:
        return sums.reshape(len(counts), -1), counts
    raise InvalidInput(
        f"{path} is no importance matrix of a whole run: of {name} {why}.",
        "llama-imatrix counts tokens and sums squares, which are finite.",
        "Make it again with llama-imatrix, from a model that computes finite numbers.",
    )


def importances(file: Path | str, model: nn.Module, modules: Iterable[Module]) -> dict[str, list[InputMoments]]:
    """Return the moments of matrices from an importance matrix, one for each expert; matrices without an entry are left out.

    Raises:
        InvalidInput: See :func:`read_imatrix`; or it is of another model.
    """
    matrix, moments = read_imatrix(file), dict[str, list[InputMoments]]()
    deepest = max((int(n) for name in matrix for n in re.findall(r"^blk\.(\d+)\.", name)), default=0)
    if deepest >= len(layers(model)):
        raise _other(file, f"it has a layer {deepest}, the model has {len(layers(model))} of them")
    members: dict[str, list[Module]] = {}  # experts may be a stack, or one matrix each
    chosen = {m.name: m for m in modules}
    for name, tensors in find_names(chosen, text_config(config_of(model)).model_type).items():
        for tensor in tensors:
            members.setdefault(f"{tensor}.weight", []).append(chosen[name])
    for tensor, experts in members.items():
        if tensor not in matrix:
            twin = tensor.replace("_exps.", ".") if "_exps." in tensor else tensor.replace(".weight", "_exps.weight")
            if twin in matrix and twin not in members:
                raise _other(file, f"it has {twin}, the model {tensor}")
            continue
        (sums, counts), copies, width = matrix[tensor], sum(m.copies for m in experts), experts[0].d_in
        if sums.size != copies * width or copies % len(counts):
            raise _other(file, f"{tensor} has {sums.size} values, the model {copies} x {width}")
        rows = np.repeat(counts, copies // len(counts)).tolist()
        each = iter(zip(torch.from_numpy(sums.reshape(copies, width)), rows, strict=True))
        for module in experts:
            some = itertools.islice(each, module.copies)
            moments[module.name] = counted(
                [InputMoments("diagonal", value=s if c > 0 else None, rows=int(c)) for s, c in some], width
            )
    if not moments:
        raise _other(file, "it names none of the model's matrices")
    return moments


def _other(file: Path | str, why: str) -> InvalidInput:
    return InvalidInput(f"{file} is the importance matrix of another model: {why}.", "", "Make one of this model's file.")
