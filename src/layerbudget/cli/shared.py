"""What several commands share: options for text and place, reading their values, loading."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

DATA = ("data", "samples", "length", "seed", "batch_size", "skip_bad_rows")


def add_data_options(parser: argparse.ArgumentParser, *, samples: int = 128, length: int = 256, dtype: str = "auto") -> None:
    """``--data --samples --length --seed --batch-size --dtype --device``.

    What is not given stays ``None``, so that a command can refuse what it would not read; :func:`load` fills in the defaults.
    """
    parser.set_defaults(data_defaults={"data": "stdlib", "samples": samples, "length": length, "seed": 0})
    parser.add_argument(
        "--data", help="stdlib, c4, wikitext2, name[:config[:split[:column]]], or local files (default: stdlib)"
    )
    parser.add_argument("--samples", type=int, help=f"calibration sequences (default {samples})")
    parser.add_argument("--length", type=int, help=f"tokens per sequence (default {length})")
    parser.add_argument("--seed", type=int, help="of the draw of the text, and of whatever else is random (default 0)")
    add_skip(parser)
    parser.add_argument("--batch-size", type=int, help="sequences per forward pass (default 8, fewer where memory is short)")
    add_place_options(parser, dtype)


def add_skip(parser: argparse.ArgumentParser) -> None:
    """``--skip-bad-rows``."""
    parser.add_argument("--skip-bad-rows", action="store_true", help="leave out rows that cannot be read, and say how many")


def add_partition_options(parser: argparse.ArgumentParser) -> None:
    """``--by --include --exclude``: the blocks of a model."""
    parser.add_argument("--by", default="layer", help="layer, linear, or a regular expression (default %(default)s)")
    parser.add_argument("--include", help="only matrices whose full name matches this regular expression")
    parser.add_argument("--exclude", help="drop matrices whose full name matches this regular expression")


def add_treating_options(
    parser: argparse.ArgumentParser, plan: str, methods: Sequence[str], method: str, dtype: str = "auto"
) -> None:
    """``MODEL PLAN --method --set`` and text: what every verb has that does to a model what a plan says.

    Args:
        parser: Of the verb.
        plan: Help of the plan.
        methods: Names of the methods.
        method: Help of the method.
        dtype: Default precision.
    """
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    parser.add_argument("plan", metavar="PLAN", help=plan)
    parser.add_argument("--method", choices=methods, help=method)
    parser.add_argument(
        "--set", dest="own", action="append", default=[], metavar="NAME=VALUE",
        help="an option of the method, for example --set damping=0.1 (may be repeated)",
    )  # fmt: skip
    add_data_options(parser, dtype=dtype)


def add_place_options(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """``--dtype --device --revision --stream``: the same for every verb that loads a model, up to the default precision."""
    parser.add_argument("--dtype", help=f"float32, bfloat16, float16, ...; auto: what the checkpoint holds (default: {dtype})")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; auto (default): the accelerator where there is one")
    parser.add_argument("--revision", help="hub revision of the model")
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction,
        help="leave the weights in their files and bring one layer at a time (default: above half of the memory)",
    )  # fmt: skip


def load_named(arguments: argparse.Namespace, **options: Any) -> Any:
    """The model that the options name, in the precision and place that they name."""
    from ..models.loading import load_model

    return load_model(
        arguments.model, dtype=arguments.dtype or "auto", revision=arguments.revision, device=arguments.device or "auto",
        stream=arguments.stream, **options,
    )  # fmt: skip


def announce(arguments: argparse.Namespace, sentence: str) -> None:
    """Say on stderr what is about to run, unless ``--quiet``."""
    if getattr(arguments, "quiet", False):
        return
    from .terminal import Terminal

    Terminal(stderr=True).print(sentence, style="dim")


def add_out(parser: argparse.ArgumentParser, default: str | None = None, what: str = "plan.json", **options: Any) -> None:
    """``-o``, ``--out`` and ``--overwrite``."""
    parser.add_argument("-o", "--out", default=default, metavar="PLAN", help=f"write {what}", **options)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")


def refuse(arguments: argparse.Namespace, names: Sequence[str], what: str) -> None:
    """Refuse options that were given and would be ignored.

    Raises:
        InvalidInput: Names the first flag.
    """
    from ..errors import InvalidInput

    for name in names:
        if getattr(arguments, name, None) not in (None, False, []):
            flag = "--set" if name in ("options", "own") else f"--{name.replace('_', '-')}"
            raise InvalidInput(f"{flag} has no meaning for {what}.", "It would be ignored.", "Leave it out.")


_LARGEST = 1 << 53  # beyond it, whole numbers and the arithmetic of budgets part


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse numbers that no option can mean: not finite, beyond what a float counts, a seed or a size below zero.

    Raises:
        InvalidInput: Names the flag.
    """
    from ..errors import InvalidInput, NotFinite

    for name, given in vars(arguments).items():
        flag = f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, list) else [given]:
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


def load(arguments: argparse.Namespace, *, data: bool = True) -> tuple[Any, Any, Any]:
    """Model, tokenizer and calibration set that the options name; no text is read where ``data`` is false."""
    from ..data.text import calibration
    from ..models.loading import load_tokenizer

    tokenizer = found = None
    if data:
        tokenizer = load_tokenizer(arguments.model, revision=arguments.revision)
        wanted = {
            name: default if getattr(arguments, name) is None else getattr(arguments, name)
            for name, default in arguments.data_defaults.items()
        }
        arguments.read = dict(wanted)  # what a command that repeats this one names
        found = calibration(wanted.pop("data"), tokenizer, skip_bad_rows=arguments.skip_bad_rows, **wanted)
    options = {"four_bit": True} if getattr(arguments, "four_bit", False) else {}
    return load_named(arguments, **options), tokenizer, found


def batch_of(arguments: argparse.Namespace, model: Any = None, data: Any = None, *, most: int = 8) -> int:
    """Sequences per forward pass: what was given, else as many as fit.

    Args:
        arguments: Of the command.
        model: What they will run through; without it nothing is known of memory.
        data: The sequences.
        most: How many where there is room.
    """
    if arguments.batch_size is not None:
        return int(arguments.batch_size)
    if model is None or data is None:
        return most
    from ..execution.memory import fitting
    from ..execution.processes import broadcast

    return broadcast(lambda: fitting(model, data.length, most))


def say_share(arguments: argparse.Namespace, model: Any, blocks: Sequence[Any]) -> None:
    """Say which share of the matrices the blocks hold, where that is not nearly all."""
    from ..models.blocks import ENOUGH, left_out, share_held

    share = share_held(model, blocks)
    if share < ENOUGH:
        rest = left_out(model, blocks)
        arguments.console.print(
            f"The blocks hold {share:.1%} of the matrices' weights (embeddings and output head aside). Left as they are: "
            f"{len(rest)} tensors, first {next(iter(rest))}."
        )


def named_values(texts: Sequence[str]) -> dict[str, Any]:
    """Options given as ``--set NAME=VALUE``; a value is read as JSON where it is JSON, as text otherwise."""
    from ..errors import InvalidInput

    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise InvalidInput(f"--set {text} is not NAME=VALUE.", "", "Write for example --set draws=4.")
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    return values


# What changes no number: where results, caches and processes are.
_ASIDE = ("help", "json", "quiet", "overwrite", "resume", "part", "cells_only", "workers", "launcher")


def line_of(arguments: argparse.Namespace, given: Mapping[str, Any]) -> str:
    """The whole command that makes the same again: every option that changes the result, with its value, given or not.

    Args:
        arguments: Of the command; what it has filled in where nothing was given counts.
        given: The arguments as they were parsed.
    """
    now, read = vars(arguments), getattr(arguments, "read", {})
    held = {name: now.get(name) if value is None and name not in DATA else value for name, value in given.items()}
    held |= {name: value for name, value in read.items() if held.get(name) is None}
    words = arguments.leaf.prog.split()
    for action in sorted(arguments.leaf._actions, key=lambda a: bool(a.option_strings)):
        value = held.get(action.dest)
        hidden = action.help == argparse.SUPPRESS and action.option_strings
        if value is None or value is False and not isinstance(action, argparse.BooleanOptionalAction) or hidden:
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
