"""A GGUF file that is written again: its head with other types, shapes or numbers, all else byte for byte. No torch.

The new one is a file by itself (``planned.gguf``), or lies in a folder with what belongs to it.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import CorruptFile, InvalidInput, NotFound
from ..progress import Progress, Steps
from ..storage.checkpoint import GGUF_FILE
from ..storage.folders import check_folder, new_folder
from ..storage.writing import check_apart, check_output, check_space, new_file, whole
from .architectures import CONVERT
from .names import need_gguf

R = TypeVar("R")

_UINT32 = 4  # GGUF's number for a value of 32 bits


@dataclasses.dataclass(frozen=True)
class GgufSource:
    """A GGUF file that is read, to be written again."""

    path: Path
    reader: Any

    @classmethod
    def open(cls, source: Path | str) -> GgufSource:
        """Return the file, checked: whole, of this byte order, in one part.

        Raises:
            NotFound: There is no such file.
            CorruptFile: It is no GGUF file, or is cut off.
            InvalidInput: Another byte order, one part of several, or no language model.
        """
        path, gguf = Path(source), need_gguf()
        if not path.is_file():
            raise NotFound(f"There is no file {path}.", "", "Check the path.")
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, TypeError) as error:
            raise CorruptFile(f"{path} is no GGUF file, or it is cut off.", "", "Copy it again, or convert again.") from error
        opened = cls(path, reader)
        if reader.endianess != gguf.GGUFEndian.LITTLE:
            raise InvalidInput(f"{path} is in the other byte order.", "", "Convert it on this kind of machine.")
        if (opened.value("split.count") or 1) > 1:
            raise InvalidInput(f"{path} is one part of several.", "", "Join them: llama-gguf-split --merge.")
        if opened.value("general.architecture") is None or not opened.layers:
            raise InvalidInput(f"{path} holds no language model.", "", CONVERT)
        return opened

    def value(self, key: str) -> Any:
        """Return a value of the metadata; None where there is none."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def number(self, word: str) -> Any:
        """Return a value that the metadata have under the architecture's name; None where there is none."""
        return self.value(f"{self.value('general.architecture')}.{word}")

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(self.number("block_count") or 0)

    def head(
        self, values: Mapping[str, int], kinds: Mapping[str, Any] | None = None, outermost: Mapping[str, int] | None = None
    ) -> bytes:
        """Return what stands in front of the tensors: metadata as they are but for some values, and the list of tensors.

        Args:
            values: Whole numbers of 32 bits, by key: put in their places, or behind the others where there are none.
            kinds: Types of tensors that change, by name.
            outermost: Length of the outermost axis of tensors that become shorter, by name.
        """
        reader, kinds, outermost = self.reader, kinds or {}, outermost or {}
        fields = [f for key, f in reader.fields.items() if not key.startswith("GGUF.")]
        start, stop = fields[0].offset, reader.tensors[0].field.offset
        keys, count = bytearray(reader.data[start:stop].tobytes()), len(fields)
        for key, value in values.items():
            field = reader.fields.get(key)
            if field is None:
                keys += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<II", _UINT32, value)
                count += 1
            elif field.types == [need_gguf().GGUFValueType.UINT32]:
                place = field.offset - start + sum(p.nbytes for p in field.parts[:-1])
                keys[place : place + 4] = struct.pack("<I", value)
        tensors, offset = bytearray(), 0
        for tensor in reader.tensors:
            kind, shape = kinds.get(tensor.name, tensor.tensor_type), [int(n) for n in tensor.shape]
            shape[-1] = outermost.get(tensor.name, shape[-1])
            tensors += b"".join(p.tobytes() for p in tensor.field.parts[:3])
            tensors += struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)
            offset += self.padded(tensor_bytes(shape, kind))
        version = int(self.value("GGUF.version"))
        first = b"GGUF" + struct.pack("<IQQ", version, len(reader.tensors), count)
        head = first + bytes(keys) + bytes(tensors)
        return head + b"\0" * (self.padded(len(head)) - len(head))

    def padded(self, size: int) -> int:
        """Return the bytes that a part of so many bytes takes in the file."""
        return -(-size // int(self.reader.alignment)) * int(self.reader.alignment)

    def write(self, file: Path, head: bytes, content: Callable[[Any], Iterable[np.ndarray]], progress: Progress | None) -> None:
        """Write a head, and behind it every tensor as ``content`` gives it, part by part; with the padding between them."""
        tick = Steps(progress, len(self.reader.tensors))
        with file.open("wb") as out:
            out.write(head)
            for tensor in self.reader.tensors:
                start = out.tell()
                for part in content(tensor):
                    out.write(np.ascontiguousarray(part).data)
                size = out.tell() - start
                out.write(b"\0" * (self.padded(size) - size))
                tick()


def tensor_bytes(shape: Sequence[int], kind: Any) -> int:
    """Return the bytes of a tensor in a type, without padding."""
    per, size = need_gguf().GGML_QUANT_SIZES[kind]
    return math.prod(int(n) for n in shape) // per * size


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufOutput:
    """The place of a GGUF file that is written again: the file itself where its name ends in ``.gguf``, else a folder."""

    out: Path
    overwrite: bool

    @classmethod
    def checked(cls, out: Path | str, size: float, sources: Iterable[Path | str], *, overwrite: bool) -> GgufOutput:
        """Return it where it can be written; the folder around it is made.

        Args:
            out: The file, or the folder.
            size: Bytes that are written there.
            sources: Files that are read.
            overwrite: Replace what an earlier call wrote.

        Raises:
            InvalidInput: One of the sources is the output, no place to write to, or too little room on the disk.
            AlreadyExists: Something is there.
        """
        output = cls(out=Path(out), overwrite=overwrite)
        check_apart(out if output.single else output.out / GGUF_FILE, *sources)
        check_space({out: size})
        (check_output if output.single else check_folder)(out, overwrite=overwrite)
        output.parent.mkdir(parents=True, exist_ok=True)
        return output

    @property
    def single(self) -> bool:
        """Whether the file stands alone."""
        return self.out.suffix == ".gguf"

    @property
    def parent(self) -> Path:
        """The folder in which the output is made."""
        return self.out.absolute().parent

    def write(self, file: Callable[[Path], R], others: Callable[[Path, R], None]) -> R:
        """Return what ``file`` says of the GGUF file that it wrote; in a folder ``others`` writes what lies beside it."""
        place = self.out.absolute()
        if self.single:
            with whole(place), new_file(self.parent, self.out.name, lambda _: place) as temporary:
                return file(temporary)
        with new_folder(self.out, overwrite=self.overwrite) as folder:
            receipt = file(folder / GGUF_FILE)
            others(folder, receipt)
        return receipt
