"""Things by name, and their options. No torch.

A :class:`Registry` holds what this package has, what a decorator adds, what an installed package brings and what a file of the
user registers. Options of any of them are the keyword-only parameters of its function, or the fields of its dataclass:
:func:`options_of` lists them, :func:`resolve_options` checks and converts what was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from .errors import InvalidInput, NotFound

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option; ``help`` is a line from ``Annotated[type, "line"]``."""

    name: str
    type: Any = Any
    default: Any = None
    help: str = ""

    @property
    def kind(self) -> str:
        """Its type in words, such as ``a number``; empty where there are none, as for an array."""
        words = describe_type(self.type)
        if words == "Any" or "_" in words:
            return "a number" if isinstance(self.default, (int, float)) else ""
        return words

    def listed(self, value: Any) -> Any:
        """Return a value that was typed: of a list of texts ``A,B`` split at commas, of a table of texts ``NAME=A,OTHER=B``."""
        kinds = typing.get_args(self.type) if isinstance(self.type, types.UnionType) else (self.type,)
        if isinstance(value, str) and "=" in value and Mapping[str, str] in kinds:
            return {name: text for name, _, text in (part.partition("=") for part in value.split(","))}
        return value.split(",") if isinstance(value, str) and Sequence[str] in kinds and str not in kinds else value

    def read(self, value: Any, what: str) -> Any:
        """Return a value that was given for this option of something; lists become tuples where the type says so.

        Raises:
            InvalidInput: It is no value of that type.
        """
        plain = value.tolist() if type(value).__module__ == "numpy" else value
        try:
            converted = msgspec.convert(plain, self.type)
        except msgspec.ValidationError:
            problem = f"The option {self.name} of {what} is {value!r}."
            raise InvalidInput(problem, f"It is {describe_type(self.type)}.", "Correct it.") from None
        except TypeError:  # a type that is checked by whoever reads the option
            return value
        return converted if isinstance(value, list) else value


def describe_type(declared: Any) -> str:
    """A type in words, such as ``a number or a list of numbers``."""
    origin, parts = typing.get_origin(declared), typing.get_args(declared)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe_type(part) for part in parts if part not in (types.NoneType, Any))
    if origin is typing.Literal:
        return ", ".join(map(str, parts))
    if origin is Mapping:
        return f'JSON such as {{"name": {describe_type(parts[1])}}}'
    if parts:
        return f"a list of {describe_type(parts[0]).removeprefix('a ')}s"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(declared, getattr(declared, "__name__", str(declared)))


def options_of(source: Callable[..., Any], *, without: Collection[str] = ()) -> dict[str, Option]:
    """Options of a function (its keyword-only parameters) or a dataclass (its fields), by name.

    >>> options_of(lambda model, *, rank=8, progress=None: rank, without=("progress",))
    {'rank': Option(name='rank', type=<class 'int'>, default=8, help='')}
    """
    fields = dataclasses.is_dataclass(source)
    parameters = [
        p
        for p in inspect.signature(source).parameters.values()
        if (fields or p.kind is p.KEYWORD_ONLY) and p.name not in without
    ]
    written = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    module = sys.modules.get(source.__module__)
    try:
        types_of = typing.get_type_hints(
            types.SimpleNamespace(__annotations__=written), vars(module) if module else {}, include_extras=True
        )
    except NameError as error:
        raise InvalidInput(
            f"The type of an option of {source.__module__} is not known when it runs ({error}).",
            "Options are checked by their types.",
            "Import that type outside of `if TYPE_CHECKING`.",
        ) from error
    return {p.name: _option(p, types_of.get(p.name)) for p in parameters}


def _option(parameter: inspect.Parameter, declared: Any) -> Option:
    """An option by its parameter and declared type; without one, the type of a plain default."""
    default, line = parameter.default, ""
    if declared is None:
        declared = type(default) if isinstance(default, (bool, int, float, str)) else Any
    if typing.get_origin(declared) is typing.Annotated:
        declared, line = typing.get_args(declared)[:2]
    return Option(name=parameter.name, type=declared, default=default, help=line)


def resolve_options(what: str, options: Mapping[str, Option], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """All options of ``what`` (``The rule mdl``), those given in the place of the defaults; None means not given.

    Raises:
        InvalidInput: There is no such option, or it does not have that value.

    >>> resolve_options("The rule mdl", options_of(lambda problem, *, slope=0.2: 0), {"slope": 0.5})
    {'slope': 0.5}
    """
    for name, value in chosen.items():
        if name not in options and value is not None and value is not False:
            known = f"Its options: {', '.join(options)}." if options else "It has none."
            raise InvalidInput(f"{what} has no option {name}.", known, f"Leave {name} out, or correct the name.")
    return {
        name: option.default if chosen.get(name) is None else option.read(chosen[name], what[:1].lower() + what[1:])
        for name, option in options.items()
    }


def load_function(home: str | T, package: str | None) -> T:
    """The object that an entry names: itself, or ``module:name`` below a package, imported when it is asked for."""
    if not isinstance(home, str):
        return home
    module, name = home.split(":")
    entry: T = getattr(importlib.import_module(module, package), name)
    return entry


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: names are imported on first use, each from the module that has it.

    Args:
        package: Name of the package.
        homes: Names, separated by blanks, by the module below the package.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


class Registry(Generic[T]):
    """A table of names that others can add to.

    ``what`` is one entry in a sentence. Modules of the entry-point ``group`` are imported before the table is read. The
    ``builtin`` entries are objects, or ``module:name`` strings below the package ``home`` that are imported when they are used.
    With ``summaries`` an unknown name is answered with what every entry is for.

    >>> numbers = Registry("number", group="layerbudget.none", builtin={"half": "fractions:Fraction"})
    >>> numbers.add("one", 1)
    1
    >>> numbers.names(), numbers.find("one")
    (('half', 'one'), 1)
    """

    def __init__(
        self,
        what: str,
        *,
        group: str,
        builtin: Mapping[str, T | str] | None = None,
        home: str | None = None,
        summaries: bool = False,
    ) -> None:
        self.what, self.group, self.home, self.summaries = what, group, home, summaries
        self._items: dict[str, T | str] = dict(builtin or {})
        self._loaded = False

    def add(self, name: str, item: T) -> T:
        """Add an entry; a name that is taken is replaced. Returns the entry."""
        self._items[name] = item
        return item

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, entries may come and go; afterwards the table is as it was."""
        self._load()
        entries = dict(self._items)
        try:
            yield
        finally:
            self._items.clear()
            self._items.update(entries)

    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they came."""
        self._load()
        return tuple(self._items)

    def all(self) -> dict[str, T]:
        """All entries by name."""
        return {name: self.find(name) for name in self.names()}

    def find(self, name: str) -> T:
        """The entry of that name; ``file.py:name`` runs the file first, which registers it.

        Raises:
            InvalidInput: There is none.
            NotFound: No such file.
        """
        file, _, function = name.rpartition(":")
        if file.endswith(".py"):
            run_file(Path(file))
            name = function
        self._load()
        if name not in self._items:
            known = [f"{n} ({getattr(i, 'summary', '')})" if self.summaries else n for n, i in self._items.items()]
            raise InvalidInput(f"There is no {self.what} {name!r}.", f"There are {', '.join(known)}.", "Choose one of those.")
        item = self._items[name] = load_function(self._items[name], self.home)
        return item

    def _load(self) -> None:
        """Import what installed packages bring, once."""
        if not self._loaded:
            import importlib.metadata  # slow to import

            self._loaded = True
            for entry in importlib.metadata.entry_points(group=self.group):
                entry.load()


@functools.cache
def run_file(path: Path) -> None:
    """Run a Python file, once: what it registers is then there.

    Raises:
        NotFound: No such file.
    """
    spec = importlib.util.spec_from_file_location(f"layerbudget_file_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise NotFound(f"There is no file {path}.", "", "Name a Python file that registers the entry: my.py:name.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
