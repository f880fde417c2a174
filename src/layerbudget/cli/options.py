"""Options that several commands share, what they name, and the command line that a result repeats."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..registry import Option, options_of

# Verbs in the order of the flow: module, which has register(subparsers) and is imported for its own verbs only, and summary.
COMMANDS = {
    "demo": ("report", "run the main job on the embedded model: score, plan, prune, evaluate, compare with uniform"),
    "doctor": ("doctor", "check a model, and price every long command, before hours are spent"),
    "score": ("score", "measure what each layer can still gain; writes scores.json"),
    "plan": ("plan", "decide sparsity, bits, shapes, ranks or experts of a model or from its scores; writes plan.json"),
    "apply": ("apply", "give a model what a plan says: write it pruned, quantised or smaller, and recount"),
    "finetune": ("finetune", "train the LoRA ranks or experts of a plan"),
    "evaluate": ("evaluate", "measure perplexity and task accuracy"),
    "compare": ("compare", "measure every score under every rule at equal budgets, beside uniform and permuted controls"),
    "export": ("report", "write a plan in the files of other tools: LoraConfig, llm-compressor, CSV"),
    "report": ("report", "write one HTML page of a results folder"),
    "explain": ("explain", "say what a plan does and rests on; compare, sweep, transfer and certify"),
}
COMMON = "--json, --quiet and --overwrite may follow every command: see layerbudget --help."
DATA = ("data", "samples", "length", "seed", "batch_size")
PLACE = ("dtype", "device", "stream")
_LARGEST = 1 << 53  # beyond it, whole numbers and the arithmetic of budgets part


def add_verb(
    subparsers: Any, name: str, handler: Callable[..., Any], summary: str | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Return the parser of a command, or of one kind of it."""
    summary = summary or COMMANDS[name][1]
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, epilog=COMMON, **options)
    parser.set_defaults(handler=handler, leaf=parser)
    return parser


def add_model(parser: argparse.ArgumentParser, what: str = "demo, a local folder, or a hub id (owner/name[@revision])") -> None:
    """``MODEL``."""
    parser.add_argument("model", metavar="MODEL", help=what)


def add_data(parser: argparse.ArgumentParser, *, samples: int = 128, length: int = 256, dtype: str = "auto") -> None:
    """Text, and the place where the model runs.

    What is not given stays ``None``, so that a command can refuse what it would not read; :func:`load` fills in the defaults.
    """
    parser.set_defaults(data_defaults={"data": "stdlib", "samples": samples, "length": length, "seed": 0})
    group = parser.add_argument_group("text")
    group.add_argument("--data", help="stdlib, c4, wikitext2, name[:config[:split[:column]]], or local files (default: stdlib)")
    group.add_argument("--samples", type=int, help=f"number of calibration sequences (default: {samples})")
    group.add_argument("--length", type=int, help=f"tokens per sequence (default: {length})")
    group.add_argument("--seed", type=int, help="seed of the draw of the text, and of whatever else is random (default: 0)")
    group.add_argument("--batch-size", type=int, help="sequences per forward pass (default: 8, fewer where memory is short)")
    add_place(parser, dtype)


def add_place(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """``--dtype --device --stream``: the same for every command that loads a model, up to the default precision."""
    group = parser.add_argument_group("model in memory")
    group.add_argument("--dtype", help=f"float32, bfloat16, float16; auto: what the checkpoint holds (default: {dtype})")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ...; auto (default): the accelerator where there is one")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="leave the weights in their files and bring one layer at a time (default: above half of the memory)",
    )


def add_partition(parser: argparse.ArgumentParser) -> None:
    """``--by --include --exclude``: the blocks of a model."""
    parser.add_argument("--by", default="layer", help="blocks: layer, linear, or a regular expression (default: layer)")
    parser.add_argument("--include", metavar="REGEX", help="take only matrices whose full name matches")
    parser.add_argument("--exclude", metavar="REGEX", help="leave out matrices whose full name matches")


def add_set(parser: Any, what: str) -> None:
    """``--set NAME=VALUE``."""
    parser.add_argument(
        "--set", dest="set", action="append", default=[], metavar="NAME=VALUE", help=f"set {what} (may be repeated)"
    )


def add_resume(parser: Any, what: str) -> None:
    """``--resume DIR``."""
    parser.add_argument("--resume", metavar="DIR", help=f"keep {what} here; the same command then goes on from them")


def split_revision(name: str) -> tuple[str, str | None]:
    """Return a model's name and its revision: ``owner/name@revision``, or a folder.

    >>> split_revision("owner/name@v2"), split_revision("demo")
    (('owner/name', 'v2'), ('demo', None))
    """
    where, at, revision = name.rpartition("@")
    return (where, revision) if at and "/" in where and not Path(name).exists() else (name, None)


def load_model(arguments: argparse.Namespace, **options: Any) -> Any:
    """Return the model that the options name, in the precision and place that they name."""
    from ..models import loading
    from ..models.machine import keep_freed

    keep_freed()
    name, revision = split_revision(arguments.model)
    given = {"device": arguments.device or "auto"}
    if "dtype" not in options:
        given["dtype"] = arguments.dtype or "auto"
    if "stream" not in options:
        given["stream"] = arguments.stream
    if getattr(arguments, "four_bit", False):
        given["four_bit"] = True
    return loading.load_model(name, revision=revision, **{**given, **options})


def load_tokenizer(arguments: argparse.Namespace, *, missing: bool = False) -> Any:
    """Return the model's tokenizer; None where it has none and ``missing`` allows that."""
    from ..errors import BadModel
    from ..models import loading

    name, revision = split_revision(arguments.model)
    try:
        return loading.load_tokenizer(name, revision=revision)
    except BadModel:
        if missing:
            return None
        raise


def load(arguments: argparse.Namespace, *, data: bool = True) -> tuple[Any, Any, Any]:
    """Return model, tokenizer and calibration set that the options name; no text is read where ``data`` is false."""
    from ..data.text import calibration

    tokenizer, found = load_tokenizer(arguments, missing=not data), None
    if data:
        wanted = {
            name: default if getattr(arguments, name) is None else getattr(arguments, name)
            for name, default in arguments.data_defaults.items()
        }
        arguments.read = dict(wanted)  # what a command that repeats this one names
        found = calibration(wanted.pop("data"), tokenizer, **wanted)
    return load_model(arguments), tokenizer, found


def batch_of(arguments: argparse.Namespace, model: Any = None, data: Any = None, *, most: int = 8) -> int:
    """Return the sequences per forward pass: what was given, else at most ``most``, as many as fit into the memory."""
    if arguments.batch_size is not None:
        return int(arguments.batch_size)
    if model is None or data is None:
        return most
    from ..execution.memory import fitting
    from ..execution.processes import broadcast

    return broadcast(lambda: fitting(model, data.length, most))


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options of these names that were given."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def flag_of(arguments: argparse.Namespace, name: str) -> str:
    """Return how an option is typed."""
    strings = next((a.option_strings for a in arguments.leaf._actions if a.dest == name), ())
    return next((s for s in strings if s.startswith("--")), f"--{name.replace('_', '-')}")


def refuse(arguments: argparse.Namespace, names: Sequence[str], what: str) -> None:
    """Refuse options that were given and would be ignored.

    Raises:
        InvalidInput: Names the first one.
    """
    from ..errors import InvalidInput

    for name in names:
        if getattr(arguments, name, None) not in (None, False, []):
            raise InvalidInput(
                f"{flag_of(arguments, name)} has no meaning for {what}.", "It would be ignored.", "Leave it out."
            )


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse numbers that no option can mean: not finite, beyond what a float counts, a seed or a size below zero.

    Raises:
        InvalidInput: Names the option.
    """
    from ..errors import InvalidInput, NotFinite

    for name, found in vars(arguments).items():
        flag = flag_of(arguments, name)
        for value in found if isinstance(found, list) else [found]:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value):
                raise NotFinite(f"{flag} is {value}.", "It is a finite number.", "Correct it.")
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise InvalidInput(f"{flag} is {value}.", f"Whole numbers go to {_LARGEST}.", "Correct it.")
            if value < 1 and name == "batch_size":
                raise InvalidInput(f"{flag} is {value}.", "A batch has at least one sequence.", "Use 8.")
            if value < 0 and name in ("seed", "seeds"):
                raise InvalidInput(f"{flag} is {value}.", "Seeds are whole numbers of at least 0.", "Use 0.")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options given as ``--set NAME=VALUE``; a value is read as JSON where it is JSON, as text otherwise.

    Raises:
        InvalidInput: It does not parse, or the command has an option of its own for it.
    """
    from ..errors import InvalidInput

    values: dict[str, Any] = {}
    for text in arguments.set:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise InvalidInput(f"--set {text} is not NAME=VALUE.", "", "Write for example --set draws=4.")
        if any(a.dest == name for a in arguments.leaf._actions):
            own = f"Use {flag_of(arguments, name)}."
            raise InvalidInput(f"{name} cannot be given by --set.", "The command has an option of its own for it.", own)
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    return values


def own_of(
    arguments: argparse.Namespace,
    *functions: Callable[..., Any],
    taken: Collection[str] = (),
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what was given by ``--set``: options of the functions, of their types.

    Args:
        arguments: Of the command.
        functions: What reads them; the last one may pass names that it does not know on.
        taken: Options that the command fills in itself.
        also: Further options and their types.

    Raises:
        InvalidInput: There is no such option, or it does not have that value.
    """
    from ..errors import InvalidInput

    what, found = f"The command {arguments.leaf.prog}", settings(arguments)
    known = {name: option for function in functions for name, option in options_of(function, without=taken).items()}
    known |= {name: Option(name=name, type=kind) for name, kind in (also or {}).items()}
    passed_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(functions[-1]).parameters.values())
    for name in found:
        if name in taken or (name not in known and not passed_on):
            raise InvalidInput(f"{what} has no option {name}.", f"--set takes {', '.join(known)}.", "Correct the name.")
    return {name: known[name].read(value, what) if name in known else value for name, value in found.items()}


def one_process(what: str) -> None:
    """Refuse several processes.

    Raises:
        InvalidInput: A launcher started more than one.
    """
    from ..errors import InvalidInput
    from ..execution.processes import process_group

    if process_group() is not None:
        raise InvalidInput(f"{what} in one process.", "A launcher started several.", "Leave torchrun out.")


# What changes no number: where results, caches and processes are.
_ASIDE = ("help", "resume", "part", "cells_only")


def line_of(arguments: argparse.Namespace, parsed: Mapping[str, Any]) -> str:
    """Return the whole command that makes the same again: every option that changes the result, given or not.

    Args:
        arguments: Of the command; what it has filled in where nothing was given counts.
        parsed: The arguments as they were parsed.
    """
    now, read = vars(arguments), getattr(arguments, "read", {})
    held = {name: now.get(name) if value is None and name not in DATA else value for name, value in parsed.items()}
    held |= {name: value for name, value in read.items() if held.get(name) is None}
    words = arguments.leaf.prog.split()
    for action in sorted(arguments.leaf._actions, key=lambda a: bool(a.option_strings)):
        value = held.get(action.dest)
        if value is None or value is False and not isinstance(action, argparse.BooleanOptionalAction):
            continue
        if action.dest not in _ASIDE:
            words += _spelt(action, value)
    return shlex.join(words)


def _spelt(action: argparse.Action, value: Any) -> list[str]:
    """One option as it is typed."""
    values = [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
    if not action.option_strings:
        return values
    flag = next((f for f in action.option_strings if f.startswith("--")), action.option_strings[0])
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={v}" for v in values]
    return [flag, *values] if not values[:1] or not values[0].startswith("-") else [f"{flag}={values[0]}"]
