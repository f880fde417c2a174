"""The package ``gguf``'s reader of files, quick on vocabularies.

That package makes two numpy arrays of every token and of every merge: 300,000 words take seconds and 0.2 GiB. Here an array
of the header becomes a list at once.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from .names import need_gguf


def read_gguf(path: Path) -> Any:
    """Return a ``gguf.GGUFReader`` of a file, with ``values()``: what its header says, by key.

    Raises:
        MissingDependency: The package is not installed.
        ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, TypeError, OSError: It is no GGUF file, or cut off.
    """
    return _reader()(path)


@functools.cache
def _reader() -> Any:
    gguf = need_gguf()
    kinds, base = gguf.GGUFValueType, gguf.GGUFReader

    class Reader(base):  # type: ignore[valid-type, misc]
        """See :func:`read_gguf`."""

        def __init__(self, path: Path) -> None:
            self._lists: dict[int, list[Any]] = {}
            super().__init__(path)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            """Pass over an array, and keep its values by the place of its first byte."""
            kind = kinds(int(self._get(orig_offs, np.uint32)[0])) if kinds(raw_type) == kinds.ARRAY else None
            if kind in (None, kinds.ARRAY) or self.byte_order != "I":
                found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return found
            count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            if kind == kinds.STRING:
                values, stop = _strings(memoryview(self.data), start, count)
            else:
                number = np.dtype(self.gguf_scalar_to_np[kind])
                stop = start + count * number.itemsize
                if stop > len(self.data):
                    raise IndexError("an array of its header ends behind the file")
                values = self._get(start, number, count).tolist()
            self._lists[orig_offs] = values
            return stop - orig_offs, [self.data[orig_offs:stop]], [0], [kinds.ARRAY, kind]

        def values(self) -> dict[str, Any]:
            """Return what the header says, by key: numbers, words, and lists of them."""
            found = {}
            for key, field in self.fields.items():
                place = field.offset + sum(int(part.nbytes) for part in field.parts[:3])  # behind the key and the type
                found[key] = self._lists[place] if place in self._lists else field.contents()
            return found

    return Reader


def _strings(data: memoryview, start: int, count: int) -> tuple[list[str], int]:
    """Read so many words, and where they end."""
    words, place = [], start
    for _ in range(count):
        first = place + 8
        place = first + int.from_bytes(data[place:first], "little")
        if place > len(data):
            raise IndexError("a word of its header ends behind the file")
        words.append(str(data[first:place], "utf-8"))
    return words, place
