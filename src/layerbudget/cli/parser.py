"""The parser of the command line, made from requests by cyclopts: every field is a flag with its type, default and sentence.

cyclopts was chosen for three things: errors are exceptions with words of their own, options may be given as a signature (so
that those of a rule are flags once the rule is named), and help is drawn in panels, of which ``--help`` shows the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts

from ..registry import Option
from ..requests import ADVANCED, EVERY, PLACE, TEXT, Request, flag_of, kind_of, positional

_LATER = {TEXT: 5, PLACE: 6, ADVANCED: 7, EVERY: 8}  # groups of --help-all, in their order
#: Options that name what has options of its own: those of what is named are in ``--help`` too.
_NAMING = {"rule", "rules", "estimator", "method", "to", "import", "kind"}
_METAVAR = "metavar" in inspect.signature(cyclopts.Parameter).parameters  # cyclopts 4, of Python 3.10, shows types instead


class WrongCommand(Exception):
    """A command line that cannot be read; its text says what is wrong and what may have been meant."""


def parse(request: type[Request], words: Sequence[str], summary: str) -> Request | None:
    """Return the request that words say; None where they ask for help, which is then printed.

    Args:
        request: What is asked for.
        words: The command line behind the words of the command.
        summary: What the command does, a line for the help.

    Raises:
        WrongCommand: An unknown or broken option, or one that is missing.
    """
    everything = "--help-all" in words
    words = ["--help" if word == "--help-all" else word for word in words]
    if "-" in words:
        raise WrongCommand(
            "- stands for standard input or output elsewhere. No command here reads or writes these: name a file."
        )
    typed = {"": words[0] if words else "", **dict(_pairs(words))}
    known = {*request.options(), *(f"no_{name}" for name in request.options()), "", "help"}
    asked = "--help" in words or "-h" in words
    named = asked and not _NAMING.isdisjoint(typed)
    more = request.more_options(typed) if everything or named or not known.issuperset(typed) else {}
    app = app_of(request, more, summary, everything=everything, asked=asked)
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False, help_on_error=False)
    except cyclopts.CycloptsError as error:
        raise WrongCommand(_missing(request, error) or f"{error}{_instead(request, typed)}") from error
    if getattr(command, "__name__", "") != "command":
        command(*bound.args, **bound.kwargs)
        return None
    names = [name for name, field in request.options().items() if positional(name, field)]
    values = {**dict(zip(names, bound.args, strict=False)), **bound.kwargs}
    more_values = {name: values.pop(name) for name in more if name in values}
    return request(
        **values, more={n: more[n].read(more[n].listed(_json(v)), f"{request.command}") for n, v in more_values.items()}
    )


def _missing(request: type[Request], error: cyclopts.CycloptsError) -> str:
    """Return a sentence on what was not typed and has no default, with what it is; nothing for other errors."""
    argument = error.argument
    if not isinstance(error, cyclopts.MissingArgumentError) or argument is None or error.keyword:
        return ""
    field = request.options().get(argument.field_info.name)
    if field is None:
        return ""
    value = "" if positional(field.name, field) else f" {field.metadata['metavar'] or ''}".rstrip()
    beside = f" Nothing takes {shlex.join(error.unused_tokens)}." if error.unused_tokens else ""
    return f"{argument.name}{value} is missing: {_help(field).rstrip('.')}.{beside}"


def _help(field: dataclasses.Field[Any]) -> str:
    """The effect of an option."""
    said = field.metadata["help"]
    return str(said() if callable(said) else said)


def _instead(request: type[Request], typed: Mapping[str, str]) -> str:
    """Return a sentence on options that this command does not have, and says otherwise."""
    if "exclude" in typed and "exclude" not in request.options() and "fix" in request.options():
        return " Did you mean --fix 'BLOCK=0', which leaves out the blocks of a name or regular expression?"
    return ""


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options that are typed with a value, as they stand: no type is known yet."""
    for word, value in zip(words, [*words[1:], *[""] * bool(words)], strict=True):
        name, sign, typed = word.partition("=")
        if name.startswith("--"):
            yield name[2:].replace("-", "_"), typed if sign else value


def _json(text: str | bool) -> Any:
    """A value that was typed for an option of a rule or method: JSON where it is JSON, else text; a switch as it is."""
    import json

    if isinstance(text, bool):
        return text

    for read in (json.loads, float):
        with contextlib.suppress(ValueError, RecursionError):
            return read(text)
    return text


def app_of(
    request: type[Request], more: Mapping[str, Option], summary: str, *, everything: bool, asked: bool, optional: bool = True
) -> cyclopts.App:
    """Return the app of one command.

    Args:
        request: What is asked for.
        more: Its further options, see :meth:`~layerbudget.requests.Request.more_options`.
        summary: What the command does, a line for the help.
        everything: Whether the help shows every option.
        asked: Whether help is asked for.
        optional: Whether options without a default may be None; the completion of a shell knows their types alone.
    """

    def command(*args: Any, **options: Any) -> None: ...

    parameters = [_parameter(request, name, everything=everything, optional=optional) for name in request.options()]
    parameters += [_further(option) for option in more.values()]
    parameters.sort(key=lambda p: p.kind is p.KEYWORD_ONLY)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    name = f"layerbudget {request.command}"
    tail = "" if everything or not asked else f"{name} --help-all shows every option."
    app = cyclopts.App(name=name, help=summary, help_epilogue=tail, version_flags=[], help_format="plaintext")
    app.default(command)
    app["--help"].show = False
    return app


def _parameter(request: type[Request], name: str, *, everything: bool, optional: bool) -> inspect.Parameter:
    field, declared = request.options()[name], kind_of(request, name)
    known, place = field.metadata, positional(name, field)
    kind = _without_none(declared)
    words: dict[str, Any] = {
        "help": _help(field),
        "show_default": False,
        "negative": "" if declared is bool and field.default is not True else None,
    }
    if known["choices"] is not None:
        kind = Literal[tuple(known["choices"]())]
    if known["group"]:
        shown = everything or known["group"] not in _LATER
        group = cyclopts.Group(known["group"], sort_key=_LATER.get(known["group"], 1), show=shown)
        words |= {"group": group, "show": shown}
    if known["metavar"] and _METAVAR:
        words["metavar"] = known["metavar"]
    if typing.get_origin(kind) is tuple:
        words |= {"negative": "", "consume_multiple": known["several"] or typing.get_args(kind)[0] in (int, float)}
    if known["read"] is not None:
        words["converter"] = _converter(known["read"], several=typing.get_origin(kind) is tuple)
    elif kind is int:
        words["converter"] = _converter(int)
    elif kind is str and known["role"] in ("reads", "writes"):
        kind, words["converter"] = Path, _converter(str)  # for a shell, which completes the names of files then
    if place:
        words["name"] = known["metavar"] or None
        annotation: Any = Annotated[kind, cyclopts.Parameter(**words)]  # type: ignore[valid-type]  # known when it runs
        return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=annotation)
    words["name"] = [*([known["short"]] if known["short"] else []), flag_of(request, name)]
    default = inspect.Parameter.empty if field.default is inspect.Parameter.empty else field.default
    missing = default.__class__.__name__ == "_MISSING_TYPE"
    known_type = missing or field.default is not None or not optional
    annotation = Annotated[kind if known_type else kind | None, cyclopts.Parameter(**words)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=inspect.Parameter.empty if missing else default, annotation=annotation
    )


def _further(option: Option) -> inspect.Parameter:
    """The parameter of an option of a rule, an estimator or a pruner: text, which the option itself reads."""
    kind = bool if option.type is bool else str
    words: dict[str, Any] = {"metavar": "VALUE"} if _METAVAR and kind is str else {}
    annotation = cyclopts.Parameter(
        name=[f"--{option.name.replace('_', '-')}"],
        help=say_option(option),
        show_default=False,
        group=cyclopts.Group("options of what is named", sort_key=2),
        **words,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, annotation],
    )


def say_option(option: Option) -> str:
    """Return what is said of an option of a rule, an estimator or a pruner: a sentence, its type and its default."""
    known = option.default not in (None, inspect.Parameter.empty)
    kind = "" if option.type is bool else option.kind
    about = "; ".join(filter(None, (kind, f"default: {option.default}" if known else "")))
    return " ".join(filter(None, (option.help, f"({about})" if about else "")))


def _without_none(declared: Any) -> Any:
    """A type without None: what is not given has no words on the command line."""
    if typing.get_origin(declared) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(declared) if kind is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else typing.Union[tuple(kinds)]  # noqa: UP007 - of types that are known now only
    return declared


def _converter(read: Any, *, several: bool = False) -> Any:
    """Return the function that cyclopts calls with the tokens of an option, which may have ``several`` values."""

    def convert(_: Any, tokens: Sequence[Any]) -> Any:
        values = [read(token.value) for token in tokens]
        if values and all(isinstance(value, tuple) for value in values):  # lists that were typed one after the other
            return tuple(each for value in values for each in value)
        return tuple(values) if several else values[0]

    return convert
