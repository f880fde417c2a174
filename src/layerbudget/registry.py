"""Things by name: those of this package, those that a decorator adds, and those that an installed package brings. No torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, TypeVar

from .errors import InvalidInput

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])


def load_function(home: str | Call, package: str | None) -> Call:
    """The function that an entry names: itself, or ``module:function`` below a package, imported when it is asked for."""
    if not isinstance(home, str):
        return home
    module, function = home.split(":")
    found: Call = getattr(importlib.import_module(module, package), function)
    return found


def keywords(function: Callable[..., Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Keyword-only parameters of a function, which are its options, with their defaults.

    >>> keywords(lambda model, *, rank=8, progress=None: rank, without=("progress",))
    {'rank': 8}
    """
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in without}


class Registry(Generic[T]):
    """A table of names that others can add to.

    Args:
        what: What one entry is called in a sentence.
        group: Entry-point group; its modules are imported before the table is read.
        own: This package's entries: objects, or ``module:name`` strings that are imported when they are used.
        home: Package that ``own`` is relative to.

    >>> numbers = Registry("number", group="layerbudget.none", own={"half": "fractions:Fraction"})
    >>> numbers.add("one", 1)
    1
    >>> numbers.names(), numbers.find("one")
    (('half', 'one'), 1)
    """

    def __init__(self, what: str, *, group: str, own: Mapping[str, T | str] | None = None, home: str | None = None) -> None:
        self.what, self.group, self.home = what, group, home
        self._items: dict[str, T | str] = dict(own or {})
        self._loaded = False

    def add(self, name: str, item: T) -> T:
        """Add an entry; a name that is taken is replaced. Returns the entry."""
        self._items[name] = item
        return item

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, entries may come and go; afterwards the table is as it was."""
        self._load()
        held = dict(self._items)
        try:
            yield
        finally:
            self._items.clear()
            self._items.update(held)

    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they came."""
        self._load()
        return tuple(self._items)

    def all(self) -> dict[str, T]:
        """All entries by name."""
        return {name: self.find(name) for name in self.names()}

    def find(self, name: str) -> T:
        """The entry of that name.

        Raises:
            InvalidInput: There is none.
        """
        self._load()
        if name not in self._items:
            raise InvalidInput(
                f"There is no {self.what} {name!r}.", f"There are {', '.join(self._items)}.", "Choose one of those."
            )
        item = self._items[name]
        if isinstance(item, str):
            module, attribute = item.split(":")
            item = self._items[name] = getattr(importlib.import_module(module, self.home), attribute)
        return item

    def _load(self) -> None:
        """Import what installed packages bring, once."""
        if not self._loaded:
            self._loaded = True
            for entry in importlib.metadata.entry_points(group=self.group):
                entry.load()
