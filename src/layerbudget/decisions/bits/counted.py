"""Bytes of a file beside the planned matrices, counted before it is written: other tensors, and what is no tensor.

The writers of the two families make the same tensors from the same rules: :class:`~layerbudget.llama_cpp.writer.GgufHead`, and
:func:`~layerbudget.storage.source.written_dtype` and :func:`~layerbudget.storage.unread.added` of a folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...compressors.formats import ALIGNMENT, GGUF, Format, find_format
from ...errors import CoverageError, InvalidInput
from ...llama_cpp.writer import fixed_terms, head_bytes
from ...models.blocks import end_modules, pretrained, weight_of
from ...plan import Plan, payload_of
from ...records import Block
from ...storage.source import written_dtype
from ...storage.unread import added, ahead, named_unread, origin, unread
from . import packed
from .payload import BitsPayload
from .saved_names import CheckpointSlice, experts_of, halved, names_of, tensor_names

ENDS, VECTORS, OTHERS = "embedding and head", "norms, biases and other vectors", "other matrices"
AHEAD = "layers that predict further tokens (MTP), copied as they are"
UNREAD = "tensors that transformers does not load, copied as they are"
NOT_THERE = "tensors that transformers does not load: not in the file"
CONVERTED = "tensors that transformers does not load, where llama.cpp's converter keeps them"
_ENTRY = 128  # bytes of the entry of a copied tensor in a header beside its name, at most
_START = 8 + len('{"__metadata__":{"format":"pt"}}') + 7  # of a file: the length of its header, what is always in it, spaces
_LONGEST = "F8_E4M3FNUZ"  # name of a type
_SCALES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}  # of floating-point formats
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


class HeaderEntry(NamedTuple):
    """A tensor of a folder: its name, its type in the words of safetensors, and its shape."""

    name: str
    dtype: str
    shape: Sequence[int]

    def text(self, digits: int) -> int:
        """Return the bytes of its entry in a header whose places have at most so many digits."""
        record = {self.name: {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": ["", ""]}}
        empty = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
        return len(empty.encode()) - len('{}""""') + 2 * digits + 1  # a comma


class Other(NamedTuple):
    """A tensor that no plan changes: what it is, its entry in a header, and its bytes."""

    term: str
    entry: HeaderEntry
    bytes: int


def others_in_folder(model: nn.Module, planned: Collection[str]) -> list[Other]:
    """Return the tensors of a compressed-tensors folder that are no planned matrices, as they will be written.

    What is copied as it is from the checkpoint is not among them: see :func:`~layerbudget.storage.unread.added`.

    Args:
        model: Any transformers model; its values are read where the source has another precision.
        planned: Full names of the planned matrices.
    """
    stored, rest = origin(model), _rest(model, planned)
    names, others = tensor_names(model, {n: t.ndim for n, (t, _) in rest.items()}), list[Other]()
    for name, (tensor, term) in rest.items():
        saved, first = names.get(name, name), torch.bfloat16 if halved(model, name, tensor) else tensor.dtype
        kind = written_dtype(saved, tensor, first, stored)
        entry = HeaderEntry(name=saved, dtype=_NAMES.get(kind, _LONGEST), shape=tuple(tensor.shape))
        others.append(Other(term=term, entry=entry, bytes=tensor.numel() * kind.itemsize))
    return others


def _rest(model: nn.Module, planned: Collection[str]) -> dict[str, tuple[torch.Tensor, str]]:
    """The tensors that are no planned matrices, each once, and what they are."""
    seen, rest = {id(weight_of(model, name)[1]) for name in planned}, dict[str, tuple[torch.Tensor, str]]()
    ends = {f"{m.name}.weight" for m in end_modules(model)}
    for name, tensor in pretrained(model).state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            vector = tensor.ndim < 2 or name.endswith("bias")  # biases of experts are matrices (gpt-oss)
            rest[name] = tensor.detach(), ENDS if name in ends else VECTORS if vector else OTHERS
    return rest


def terms_beside(model: nn.Module, planned: Collection[str], family: str) -> dict[str, int]:
    """Return the bytes of the tensors that are no planned matrices, padding included, by what they are.

    Those of a GGUF file that another tool writes are about as many: 16 bits per number, vectors 32. ``planned`` are the full
    names of the planned matrices.
    """
    stored, copied, terms = origin(model), added(model), dict[str, int]()
    size = 0 if stored is None else sum(stored.bytes(name) for name in copied)
    if family == GGUF:
        try:
            return fixed_terms(model, planned) | ({NOT_THERE: 0} if unread(model) else {})
        except InvalidInput:  # another tool writes the file
            for tensor, term in _rest(model, planned).values():
                exact = tensor.numel() * (4 if term == VECTORS else 2)
                terms[term] = terms.get(term, 0) + -(-exact // ALIGNMENT) * ALIGNMENT
            return terms | ({CONVERTED: size} if size else {})
    for other in others_in_folder(model, planned):
        terms[other.term] = terms.get(other.term, 0) + other.bytes
    return terms | ({AHEAD if set(copied) <= set(ahead(copied, model)) else UNREAD: size} if size else {})


def parts_of(form: Format, d_out: int, d_in: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors that a matrix ``(d_out, d_in)`` is in a folder: type and shape of each by the end of its name."""
    groups = form.groups(d_in)
    if form.plain:
        return {"weight": ("BF16", (d_out, d_in))}
    if form.floats is not None:
        whole = form.bits == 8
        codes = ("F8_E4M3", (d_out, d_in)) if whole else ("U8", (d_out, d_in * form.bits // 8))
        united = {"weight_global_scale": ("F32", (1,))} if form.united else {}
        scales = (_SCALES[form.floats.scale], (d_out, groups))
        return {"weight" if whole else "weight_packed": codes, "weight_scale": scales, **united}
    integers = {"weight_packed": ("I32", (d_out, -(-d_in * form.bits // 32))), "weight_scale": ("BF16", (d_out, groups))}
    zeros = {} if form.symmetric else {"weight_zero_point": ("I32", (-(-d_out * form.bits // 32), groups))}
    return {**integers, **zeros, "weight_shape": ("I64", (2,))}


def header_bytes(model: nn.Module, blocks: Sequence[Block], formats: Mapping[str, Collection[str]], runtime: str) -> int:
    """Return the bytes of the headers of a folder's files, or a few more than they have.

    Which tensors a matrix has depends on its format, so the longest entries count; and every place has the digits of the last.

    Args:
        model: Any transformers model.
        blocks: What is planned.
        formats: Names of the formats that every block can have, by its name.
        runtime: What reads the folder, ``transformers`` or ``vllm``.
    """
    planned = {m.name: m for b in blocks for m in b.modules}
    forms = {m.name: [find_format(f) for f in formats[b.name]] for b in blocks for m in b.modules}
    apart = experts_of(model, list(planned)) if runtime == "vllm" else {}
    saved = names_of(model, [n for n in planned if n not in apart]) if runtime == "vllm" else {}
    others, copied, stored = others_in_folder(model, list(planned)), added(model), origin(model)
    size = sum(other.bytes for other in others) + (0 if stored is None else sum(stored.bytes(n) for n in copied))
    size += sum(max(form.bytes(m.d_out, m.d_in, m.copies) for form in forms[n]) for n, m in planned.items())
    digits, files = len(str(size)), 1 + 2 * size // packed.SHARD  # half full at least
    total = sum(other.entry.text(digits) for other in others) + sum(len(n.encode()) + _ENTRY for n in copied)
    for name, m in planned.items():
        for part in apart.get(name, (CheckpointSlice(name=saved.get(name, name)),)):
            rows, stack = m.d_out // part.runs, [m.copies] if m.copies > 1 and name not in apart else []
            total += max(_entries(part.name, form, rows, m.d_in, stack, digits) for form in forms[name])
    if files > 1:
        return total + (files + bool(copied)) * _START
    return (total + _START) // 8 * 8  # the length of a header is a multiple of 8


def _entries(name: str, form: Format, rows: int, d_in: int, stack: Sequence[int], digits: int) -> int:
    """Bytes of the entries of a matrix in a format."""
    parts = parts_of(form, rows, d_in).items()
    return sum(HeaderEntry(f"{name}.{part}", kind, (*stack, *shape)).text(digits) for part, (kind, shape) in parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes of a file beside its planned matrices, as it is now known: model, source and tokenizer are at hand.

    Attributes:
        fixed: Bytes of other tensors.
        head: Bytes of a GGUF file that are no tensors; those that the plan counted for the headers of a folder.
        notes: What is otherwise than the plan counted, and tensors that transformers does not load.
    """

    fixed: int
    head: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, tokenizer: Any) -> Counted:
        """Return it before anything is rounded.

        Raises:
            InvalidInput: It is more than the plan counted, and a size in bytes was asked for.
        """
        payload, gguf = payload_of(plan, BitsPayload), payload_of(plan, BitsPayload).family == GGUF
        terms = terms_beside(model, [m for b in plan.blocks for m in b.modules], payload.family)
        head = head_bytes(model, tokenizer, plan.model.get("id")) if gguf else payload.head_bytes
        parts = {"other tensors": sum(terms.values()) - payload.fixed_bytes}
        parts |= {"metadata and vocabulary": head - payload.head_bytes} if payload.head_bytes else {}
        more, notes = sum(parts.values()), _on_unread(model, terms)
        which = " and ".join(name for name, size in parts.items() if size)
        if more > 0 and plan.hyperparameters.get("budget") is not None:
            raise InvalidInput(
                f"The file would take {more:,} bytes more than the plan counted, of {which}.",
                "A plan with a size in bytes counts the model's own folder, and the tokenizer that it was given.",
                "Plan again from the same folder and with the same tokenizer (in Python: plan_bits(..., tokenizer=tokenizer)).",
            )
        if which:
            notes.append(f"The file takes {abs(more):,} bytes {'more' if more > 0 else 'fewer'} than were planned, of {which}.")
        return cls(fixed=sum(terms.values()), head=head, notes=tuple(notes))

    def check(self, plan: Plan, tensors: int, file: int) -> list[str]:
        """Compare the bytes of all tensors and of the whole file, counted again from it, with what was counted before.

        Returns:
            A note where they differ.

        Raises:
            CoverageError: They are more, and a size in bytes was asked for.
        """
        payload, notes = payload_of(plan, BitsPayload), list[str]()
        planned = int(plan.counts.sum()) + self.fixed
        exact = payload.family == GGUF
        rest = file - tensors - self.head
        if tensors != planned:
            notes.append(f"All tensors take {tensors:,} bytes in the file, {planned:,} were counted before it was written.")
        if rest > 0 if not exact else rest:
            notes.append(f"What is no tensor takes {file - tensors:,} bytes in the file, {self.head:,} were counted.")
        notes = notes if self.head else notes[: int(tensors != planned)]
        if notes and plan.hyperparameters.get("budget") is not None and self.head and file > planned + self.head:
            raise CoverageError(" ".join(notes), "The size that was asked for is exceeded.", "Report this; nothing is kept.")
        return [f"{note} Report this." for note in notes]


def _on_unread(model: nn.Module, terms: Mapping[str, int]) -> list[str]:
    """A note on the tensors that transformers does not load: copied, or not in the file."""
    size, named = terms.get(AHEAD, terms.get(UNREAD, 0)), named_unread(model)
    copied = f"are copied as they are: {size:,} bytes, which the plan counted."
    return [f"{named} {copied if size else 'are not in the file.'}"] if named else []
