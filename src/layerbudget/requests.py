"""Options of a command or a planner, as fields of a dataclass, each with a type, a default and a sentence.

Flags, help, the page of options and completion are made from the fields; nothing about an option is written twice. A field
whose value is None was not given, so that a request can refuse what it would not read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .errors import InvalidInput, NotFinite
from .registry import Option

EVERY, TEXT, PLACE, ADVANCED = "options of every command", "text", "model in memory", "advanced"
LARGEST = 1 << 53  # beyond it, whole numbers and the arithmetic of budgets part
_AT_LEAST = {
    "batch_size": 1,
    "batch": 1,
    "limit": 1,
    "samples": 1,
    "windows": 1,
    "tokens": 1,
    "length": 2,
    "seed": 0,
    "seeds": 0,
    "machines": 1,
}
_UNREAD = {"table": "show long tables", "dry_run": "take long"}
PRECISIONS = ("auto", "float32", "bfloat16", "float16", "float64")  #: Of weights, as ``--dtype`` names them.
_READ_IN_FOLDERS = ("plan.json", "scores.json", "result.json", "config.json", "tokenizer.json")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str | Callable[[], str],
    metavar: str = "",
    short: str = "",
    flag: str = "",
    group: str = "",
    choices: Callable[[], Sequence[str]] | None = None,
    read: Callable[[str], Any] | None = None,
    role: str = "",
    several: bool = False,
) -> Any:
    """Return a dataclass field that is an option.

    Args:
        default: Its value where it is not given; without one the option must be given.
        help: What it does, a sentence or less, or what gives that. What is chosen where nothing is given stands in it.
        metavar: What a value is called in the help; of a positional argument, its name there.
        short: One more way to type it, such as ``-o``.
        flag: How it is typed, where that is not its name; ``""`` of a field without a default is a positional argument.
        group: Where the help shows it; the groups of text, place and advanced options are in ``--help-all`` only.
        choices: Gives the values that it can have, where a library of this package or of others adds to them.
        read: Makes the value of a text, where its type alone does not say how.
        role: ``reads`` or ``writes`` of an option that names files, ``aside`` of one that changes no number.
        several: Whether several values may follow the flag at once; numbers always may. Else the flag is repeated.
    """
    known: dict[str, Any] = {"help": help, "metavar": metavar, "short": short, "flag": flag, "group": group}
    known |= {"choices": choices, "read": read, "role": role, "several": several}
    return dataclasses.field(default=default, metadata=known)


@dataclasses.dataclass(kw_only=True)
class Request:
    """Options of every command."""

    json: bool = option(False, group=EVERY, role="aside", help="print one JSON document on stdout, everything else on stderr")
    quiet: bool = option(False, group=EVERY, role="aside", help="show no progress and no expected cost")
    overwrite: bool = option(False, group=EVERY, role="aside", help="replace existing output")
    table: bool = option(False, group=EVERY, role="aside", help="show every row of a table, and every sentence")
    dry_run: bool = option(
        False,
        group=EVERY,
        role="aside",
        help="say what would be read, run and written, how long it takes and how much memory; then end (long verbs)",
    )

    machines: int | None = option(
        None,
        group=EVERY,
        role="aside",
        help="with --dry-run: price it for each of so many processes, every one with a card of its own",
    )

    plugin: tuple[str, ...] = option(
        (), group=EVERY, metavar="FILE", help="run this Python file first: what it registers is then there (repeatable)"
    )

    command: ClassVar[str] = ""  #: The words of the command without those of the program, such as ``plan bits``.
    #: Options of every command that this one does not read, such as ``table`` where no table is long.
    unread: ClassVar[tuple[str, ...]] = ()
    #: Whether the command prices others, and so reads ``machines`` without a dry run.
    prices: ClassVar[bool] = False
    #: Options that are known only once another one is (those of a rule, an estimator or a pruner), by name.
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields that are options, by name; those without a default come first."""
        return {f.name: f for f in dataclasses.fields(cls) if "help" in f.metadata}

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the further options that follow from those that were ``typed``, by name; the first word has none."""
        return {}

    def given(self, *names: str) -> dict[str, Any]:
        """Return the options of these names that have another value than None."""
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def changed(self) -> dict[str, Any]:
        """Return every option that has another value than its default."""
        known = self.options()
        return {name: getattr(self, name) for name, field in known.items() if getattr(self, name) != field.default}

    def reads(self) -> list[str]:
        """Return the files and texts that options name, beside the model, as they were typed."""
        fields = {name: f for name, f in self.options().items() if name not in ("model", "source")}
        values = [getattr(self, name) for name, f in fields.items() if f.metadata["role"] == "reads"]
        return [text for v in values if v is not None for text in (v if isinstance(v, (list, tuple)) else [v])]

    def refuse(self, names: Sequence[str], what: str, remedy: str = "Leave it out.") -> None:
        """Refuse options that were given and would be ignored.

        Raises:
            InvalidInput: One of them was given.
        """
        changed = self.changed()
        for name in (n for n in names if n in changed or n in self.more):
            raise InvalidInput(f"{flag_of(self, name)} has no meaning for {what}.", "It would be ignored.", remedy)

    def need_one(self, names: Sequence[str], what: str, example: str) -> None:
        """Refuse all but exactly one of some options; ``what`` they say (``budget``) and an ``example`` stand in the message.

        Raises:
            InvalidInput: None of them was given, or several.
        """
        flags = [flag_of(self, name) for name in names]
        given_flags = [flag for flag, name in zip(flags, names, strict=True) if getattr(self, name) is not None]
        if len(given_flags) != 1:
            wrong = f"{' and '.join(given_flags)} were given together" if given_flags else f"No {what} was given"
            feasible = f"Give one of {', '.join(flags[:-1])} and {flags[-1]}."
            raise InvalidInput(f"{wrong}.", feasible, f"For example {example}.")

    def check(self) -> None:
        """Refuse what no such request can mean, before anything is read; a request with rules of its own adds them.

        Raises:
            NotFinite, InvalidInput: A number that no option can mean, or a file that is both read and written.
        """
        for name in self.unread:
            self.refuse((name,), f"{self.command}: it belongs to commands that {_UNREAD[name]}")
        if not self.prices and not self.dry_run:
            self.refuse(("machines",), "a command that runs", "Add --dry-run, or start it by torchrun.")
        for name, field in self.options().items():
            values = getattr(self, name)
            if values == "" and (field.metadata["role"] == "writes" or name == "resume"):
                raise InvalidInput(f"{flag_of(self, name)} is empty.", "It names a file or folder.", "Name one.")
            for value in values if isinstance(values, (list, tuple)) else [values]:
                _check_number(self, name, value)
                _check_pattern(self, name, value)
        _check_circle(self)


def positional(name: str, field: dataclasses.Field[Any]) -> bool:
    """Return whether an option is typed without a flag."""
    return field.default is dataclasses.MISSING and not field.metadata["flag"]


def flag_of(request: Request | type[Request], name: str) -> str:
    """Return how an option is typed."""
    field = request.options().get(name)
    typed = field.metadata["flag"] if field is not None else ""
    return str(typed) or f"--{name.replace('_', '-')}"


_TYPES: dict[type[Request], dict[str, Any]] = {}  # of the options of every request that was asked for


def kind_of(request: type[Request], name: str) -> Any:
    """Return the type of an option, resolved."""
    if request not in _TYPES:
        _TYPES[request] = typing.get_type_hints(request, include_extras=True)
    return _TYPES[request][name]


def share(text: str) -> float:
    """Return a share as it is typed: ``0.6`` or ``60%``.

    >>> share("60%")
    0.6
    """
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def names(text: str) -> tuple[str, ...]:
    """Return what stands between commas.

    >>> names("Q4_0, Q8_0")
    ('Q4_0', 'Q8_0')
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


def line_of(request: Request) -> str:
    """Return the whole command that makes the same again: every option that changes a number, given or filled in."""
    words, known = ["layerbudget", *request.command.split()], request.options()
    for name, field in sorted(known.items(), key=lambda item: not positional(*item)):
        value = getattr(request, name)
        value = ",".join(value) if value and field.metadata["read"] is names else value
        if field.metadata["role"] != "aside" and value is not None and value is not False and value != ():
            words += _typed(flag_of(request, name), value, place=positional(name, field))
        elif value is False and field.default is not False:
            words.append(flag_of(request, name).replace("--", "--no-", 1))
    for name, value in request.more.items():
        words += _typed(flag_of(request, name), value)
    return shlex.join(words)


def _typed(flag: str, value: Any, *, place: bool = False) -> list[str]:
    """One option as it is typed."""
    values = [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
    if place:
        return values
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        return [word for v in values for word in ((f"{flag}={v}",) if v.startswith("-") else (flag, v))]
    return [f"{flag}={values[0]}"] if values[0].startswith("-") else [flag, values[0]]


def _check_number(request: Request, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    flag, least = flag_of(request, name), _AT_LEAST.get(name, -LARGEST)
    if not math.isfinite(value):
        raise NotFinite(f"{flag} is {value}.", "It is a finite number.", "Correct it.")
    if name in ("epochs", "lr", "damping") and value <= 0:
        raise InvalidInput(f"{flag} is {value}.", "It is above 0.", "Correct it.")
    if not least <= value <= LARGEST and (isinstance(value, int) or name in _AT_LEAST):
        remedy = "Leave it out for all." if name in ("limit", "windows") else "Correct it."
        raise InvalidInput(f"{flag} is {value}.", f"It is a whole number from {least} to {LARGEST}.", remedy)


def _check_pattern(request: Request, name: str, value: Any) -> None:
    if isinstance(value, str) and request.options()[name].metadata["metavar"] == "REGEX":
        try:
            re.compile(value)
        except re.error as error:
            what = f"{flag_of(request, name)} {value!r} is not a regular expression ({error})."
            raise InvalidInput(what, "", "Correct it: a bracket that is meant as such has a backslash before it.") from error


def _check_circle(request: Request) -> None:
    """Refuse an output that is a file or folder which the command reads, and one that lies in another or holds the parts.

    An output in the folder of ``--resume`` is apart from them.
    """
    from .storage.writing import check_apart, real

    outputs = list(_files(request, "writes"))
    written = {
        flag_of(request, n): v
        for n, f in request.options().items()
        if f.metadata["role"] == "writes" and (v := getattr(request, n))
    }
    parts = {flag_of(request, name): value for name, value in request.given("resume").items()}
    for (flag, place), (other, inner) in itertools.permutations((written | parts).items(), 2):
        if flag in written and real(inner).is_relative_to(real(place)):
            same = real(inner) == real(place)
            what = f"{other} and {flag} are both {place}." if same else f"{other}, {inner}, lies in {flag}, {place}."
            raise InvalidInput(
                what, "What is written to one would be in the way of the other.", "Choose another place for one."
            )
    read = list(_files(request, "reads"))
    for output in outputs:
        check_apart(output, *read, *(Path(word) / name for word in read for name in _READ_IN_FOLDERS))


def _files(request: Request, role: str) -> Iterator[str]:
    """Yield the names that options of a role give: each of several, the part behind an equals sign, those between commas."""
    for name, field in request.options().items():
        value = getattr(request, name)
        if field.metadata["role"] != role or value is None:
            continue
        for text in value if isinstance(value, (list, tuple)) else [value]:
            words = {text, text.partition("=")[2], *text.split(",")} if role == "reads" else {text}
            yield from (word for word in words if word not in ("", "demo"))


# --- options that several requests share -------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class PlaceRequest(Request):
    """Where a model runs, and in which precision."""

    dtype: str | None = option(
        None,
        group=PLACE,
        choices=lambda: PRECISIONS,
        help="float32, bfloat16, float16; auto (default): what the checkpoint holds, if the CPU can",
    )
    device: str | None = option(
        None, group=PLACE, help="cpu, cuda, cuda:1, ...; auto (default): the accelerator where there is one"
    )
    stream: bool | None = option(
        None,
        group=PLACE,
        help="leave the weights in their files and bring one layer at a time (default: above half of the memory)",
    )


@dataclasses.dataclass(kw_only=True)
class TextRequest(PlaceRequest):
    """Which text is read, and how much of it."""

    usual: ClassVar[Mapping[str, Any]] = {"data": "stdlib", "samples": 128, "length": 256, "seed": 0}  #: Where none is given.

    data: str | None = option(
        None,
        group="",
        role="reads",
        metavar="TEXT",
        help="stdlib (default), c4, wikitext2, name[:config[:split[:column]]], or local files",
    )
    samples: int | None = option(None, group=TEXT, help="number of calibration sequences (default: 128)")
    length: int | None = option(None, group=TEXT, help="tokens per sequence (default: 256)")
    seed: int | None = option(None, group=TEXT, help="of the draw of the text, and of whatever else is random (default: 0)")
    batch_size: int | None = option(
        None, group=TEXT, help="sequences per forward pass (default: 8, fewer where memory is short)"
    )


READING = ("data", "samples", "length", "seed", "batch_size")  #: Options of the text, by name.
PLACING = ("dtype", "device", "stream")  #: Options of the place, by name.


def resume_option() -> Any:
    """Return the option ``--resume``."""
    words = "keep what is finished here; the same command then goes on from it"
    return option(None, metavar="DIR", role="aside", group=ADVANCED, help=words)


def out_option(help: str, *, metavar: str = "FILE", default: Any = None) -> Any:
    """Return the option ``--out``, which must be given where its default is missing."""
    return option(default, short="-o", flag="--out", metavar=metavar, role="writes", help=help)


def model_option(help: str = "demo, a local folder, a hub id (owner/name[@revision]), or a GGUF file") -> Any:
    """Return the positional argument MODEL."""
    return option(metavar="MODEL", role="reads", help=help)


def four_bit_option() -> Any:
    """Return the option ``--four-bit``."""
    return option(False, group=PLACE, help="hold the model's matrices in 4 bits (NF4, needs bitsandbytes)")
