"""Cells of a table that several processes fill, each with its ``--part I/N``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from layerbudget.storage import parts

T = TypeVar("T")


class NotThisWorker(Exception):
    """Another process of ``--part I/N`` measures this cell."""


class Cells(parts.Cells):
    """The cells of a table; see :class:`layerbudget.storage.parts.Cells`."""

    def own(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The cell of a key: read, or made and kept.

        Raises:
            NotThisWorker: Another part makes it.
        """
        found = self.get(key, make)
        if found is None:
            raise NotThisWorker(f"{self.part[0]}/{self.part[1]}")
        return found

    def here(self, make: Callable[[], T]) -> T | None:
        """Return what ``make`` makes of cells, or None where another part makes one of them."""
        try:
            return make()
        except NotThisWorker:
            return None

    def check(self) -> None:
        """Go on where every cell that was asked for is there.

        Raises:
            NotThisWorker: Another part makes one of them.
        """
        if self.missing:
            raise NotThisWorker(f"{self.made} cells made, {self.kept} found, {self.missing} left to other parts")
