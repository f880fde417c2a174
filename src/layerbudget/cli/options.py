"""Options that several commands share, what they name, and the command line that a result repeats."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadModel, InvalidInput, NotFinite
from ..registry import Option, options_of, spoken

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
COMMON = "--json, --quiet, --overwrite, --table and --dry-run may follow every command: see layerbudget --help."
DATA = ("data", "samples", "length", "seed", "batch_size")
PLACE = ("dtype", "device", "stream")
_OUTPUTS = ("out", "save_scores")  # options that name what is written
_READ_IN_FOLDERS = ("plan.json", "scores.json", "result.json", "config.json", "tokenizer.json")
_ASIDE = ("help", "resume", "part")  # change no number: where parts and processes are
_FILLED = (
    "batch_size",
    "progress",
    "folder",
    "fixed",
    "tokenizer",
    "overwrite",
    "kinds",
    "speed",
)  # by the commands themselves
_LARGEST = 1 << 53  # beyond it, whole numbers and the arithmetic of budgets part

# Options of more than one command. What is not given is None, so that a command can refuse what it would not read.
SHARED: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "help": "demo, a local folder, or a hub id (owner/name[@revision])"},
    "--by": {"default": "layer", "help": "blocks: layer, linear, or a regular expression (default: layer)"},
    "--exclude": {"metavar": "REGEX", "help": "leave out matrices whose full name matches"},
    "--damping": {"type": float, "nargs": "+", "help": "one or more dampings"},
    "--data": {"help": "stdlib, c4, wikitext2, name[:config[:split[:column]]], or local files (default: stdlib)"},
    "--samples": {"type": int, "help": "number of calibration sequences"},
    "--length": {"type": int, "help": "tokens per sequence (default: 256)"},
    "--seed": {"type": int, "help": "seed of the draw of the text, and of whatever else is random (default: 0)"},
    "--seeds": {"type": int, "nargs": "+", "default": [0], "help": "one run per seed (default: 0)"},
    "--batch-size": {"type": int, "help": "sequences per forward pass (default: 8, fewer where memory is short)"},
    "--windows": {"type": int, "help": "at most so many held-out windows"},
    "--data-dir": {"metavar": "DIR", "help": "folder with the tasks' original files"},
    "--epochs": {"type": float, "help": "passes over the training rows"},
    "--lr": {"type": float, "help": "peak learning rate"},
    "--dtype": {"help": "float32, bfloat16, float16; auto (default): what the checkpoint holds, if the CPU can"},
    "--device": {"help": "cpu, cuda, cuda:1, ...; auto (default): the accelerator where there is one"},
    "--stream": {
        "action": argparse.BooleanOptionalAction,
        "help": "leave the weights in their files and bring one layer at a time (default: above half of the memory)",
    },
    "--four-bit": {"action": "store_true", "help": "hold the model's matrices in 4 bits (NF4, needs bitsandbytes)"},
    "--resume": {"metavar": "DIR", "help": "keep what is finished here; the same command then goes on from it"},
}


def add_verb(
    subparsers: Any, name: str, handler: Callable[..., Any], summary: str | None = None, aliases: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Return the parser of a command, or of one kind of it; aliases are further names of it."""
    summary, own = summary or COMMANDS[name][1], {"epilog": COMMON, "aliases": list(aliases)}
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, **own)
    parser.set_defaults(handler=handler, leaf=parser)
    return parser


def add(parser: Any, *names: str, **changes: Any) -> None:
    """Add shared options; ``changes`` replace what the table says of them."""
    for name in names:
        parser.add_argument(name, **{**SHARED[name], **changes})


def share(text: str) -> float:
    """A share as it is typed: ``0.6`` or ``60%``.

    >>> share("60%")
    0.6
    """
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def add_out(parser: Any, help: str, **more: Any) -> None:
    """Add ``--out``."""
    parser.add_argument("-o", "--out", help=help, **more)


def add_set(parser: Any, what: str) -> None:
    """Add ``--set NAME=VALUE``."""
    words = f"set {what} (may be repeated; --set help lists them)"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=words)


def add_data(
    parser: argparse.ArgumentParser, *, samples: int = 128, length: int = 256, dtype: str = "auto", check: int = 0
) -> None:
    """Add options of text, and of the place where the model runs; :func:`load` fills in the defaults.

    ``check`` further sequences check a plan where nothing else is set.
    """
    parser.set_defaults(data_defaults={"data": "stdlib", "samples": samples, "length": length, "seed": 0})
    group = parser.add_argument_group("text")
    add(group, "--data", "--seed", "--batch-size")
    more = f"; {check} more check the plan, or --set check=N" if check else ""
    add(group, "--samples", help=f"number of calibration sequences (default: {samples}{more})")
    add(group, "--length", help=f"tokens per sequence (default: {length})")
    add_place(parser, dtype)


def add_place(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """Add ``--dtype --device --stream``."""
    group = parser.add_argument_group("model in memory")
    add(
        group, "--dtype", help=f"float32, bfloat16, float16; auto: what the checkpoint holds, if the CPU can (default: {dtype})"
    )
    add(group, "--device", "--stream")


# --- what options name ------------------------------------------------------------------------------------------------------


def split_revision(name: str) -> tuple[str, str | None]:
    """Return a model's name and its revision: ``owner/name@revision``, or a folder.

    >>> split_revision("owner/name@v2"), split_revision("demo")
    (('owner/name', 'v2'), ('demo', None))
    """
    where, at, revision = name.rpartition("@")
    return (where, revision) if at and "/" in where and not Path(name).exists() else (name, None)


def load_model(a: argparse.Namespace, **options: Any) -> Any:
    """Return the model that the options name, in the precision and place that they name."""
    from ..models import loading
    from ..models.machine import keep_freed

    keep_freed()
    name, revision = split_revision(a.model)
    place = {n: getattr(a, n, None) or "auto" for n in ("dtype", "device")}
    if place["dtype"] == "auto" and a.verb != "apply":  # what is written stays in the precision of the checkpoint
        place["dtype"] = "quick"
    held = {"stream": getattr(a, "stream", None), "four_bit": getattr(a, "four_bit", False)}
    return loading.load_model(name, revision=revision, **{**place, **held, **options})


def written_bytes(a: argparse.Namespace) -> int:
    """Return the bytes of a parameter in the checkpoint that ``apply`` writes, whatever the model computes in."""
    from ..models import loading

    name, revision = split_revision(a.model)
    return loading.held_dtype(loading.find_checkpoint(name, revision=revision, device="cpu", four_bit=False).config).itemsize


def load_tokenizer(a: argparse.Namespace) -> Any:
    """Return the model's tokenizer."""
    from ..models import loading

    name, revision = split_revision(a.model)
    return loading.load_tokenizer(name, revision=revision)


def load(a: argparse.Namespace, *, data: bool = True) -> tuple[Any, Any, Any]:
    """Return model, tokenizer and calibration set that the options name.

    Where ``data`` is false no text is read, and a tokenizer that the model does not have is None.
    """
    from ..data.text import calibration

    try:
        tokenizer = load_tokenizer(a)
    except BadModel:
        if data:
            raise
        tokenizer = None
    if not data:
        return load_model(a), tokenizer, None
    a.read = {**a.data_defaults, **given(a, *a.data_defaults)}  # what a command that repeats this one names
    wanted = dict(a.read)
    found = calibration(wanted.pop("data"), tokenizer, **wanted)
    return load_model(a), tokenizer, found


def batch_of(a: argparse.Namespace, model: Any = None, data: Any = None, *, most: int = 8) -> int:
    """Return the sequences per forward pass: what was given, else at most ``most``, as many as fit into the memory."""
    if a.batch_size is not None:
        return int(a.batch_size)
    if model is None or data is None:
        return most
    from ..execution.memory import fitting
    from ..execution.processes import broadcast

    return broadcast(lambda: fitting(model, data.length, most))


def given(a: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options of these names that were given."""
    return {name: value for name in names if (value := getattr(a, name, None)) is not None}


def settings(a: argparse.Namespace, *sources: Callable[..., Any] | Mapping[str, Option], what: str = "") -> dict[str, Any]:
    """Return the options given as ``--set NAME=VALUE``; a value is read as JSON where it is JSON, as text otherwise.

    Args:
        a: Arguments of the command.
        sources: What reads them: functions, whose keyword-only parameters they are, or tables. A function that passes others
            on is the judge of those. ``--set help`` prints all of them and ends the command.
        what: Whose options they are, in messages; the command's where nothing is said.

    A list of texts may be typed as ``A,B``.
    """
    flags = {action.dest for action in a.leaf._actions}
    tables = [source if isinstance(source, Mapping) else options_of(source) for source in sources]
    known = {n: option for table in tables for n, option in table.items() if n not in flags and n not in _FILLED}
    if "help" in a.set:
        for name, option in known.items():
            default = "" if option.default in (None, inspect.Parameter.empty) else f"default: {option.default}"
            says = spoken(option.type)
            if re.search(r"\b_", says):  # an array's type has no words
                says = "a number" if isinstance(option.default, (int, float)) else ""
            plain = "" if says == "Any" else says
            a.console.print(f"{name}: {'; '.join(filter(None, (plain, default, option.help)))}")
        raise SystemExit(0)
    parameters = [p for s in sources if not isinstance(s, Mapping) for p in inspect.signature(s).parameters.values()]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    what, values = what or f"the command {a.leaf.prog}", dict[str, Any]()
    for text in a.set:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise InvalidInput(f"--set {text} is not NAME=VALUE.", "", "Write for example --set draws=4.")
        if name in flags:
            own = f"Use {flag_of(a, name)}."
            raise InvalidInput(f"{name} cannot be given by --set.", "The command has an option of its own for it.", own)
        if name in _FILLED or (name not in known and not open_ended):
            raise InvalidInput(
                f"{what[:1].upper()}{what[1:]} has no option {name}.", f"--set takes {', '.join(known)}.", "Correct the name."
            )
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = value
        values[name] = known[name].read(known[name].listed(read), what) if name in known else read
    return values


def options_for(a: argparse.Namespace, *sources: Callable[..., Any] | Mapping[str, Option]) -> dict[str, Any]:
    """Return the options of functions or tables that were given, by flags of the command or as :func:`settings`."""
    tables = [source if isinstance(source, Mapping) else options_of(source) for source in sources]
    names = [name for table in tables for name in table if name not in _FILLED]
    return {**given(a, *names), **settings(a, *sources)}


# --- refusals ---------------------------------------------------------------------------------------------------------------


def flag_of(a: argparse.Namespace, name: str) -> str:
    """Return how an option is typed."""
    strings = next((action.option_strings for action in a.leaf._actions if action.dest == name), ())
    return next((s for s in strings if s.startswith("--")), f"--{name.replace('_', '-')}")


def refuse(a: argparse.Namespace, names: Sequence[str], what: str, remedy: str = "Leave it out.") -> None:
    """Refuse options that were given and would be ignored."""
    for name in names:
        if getattr(a, name, None) not in (None, False, []):
            raise InvalidInput(f"{flag_of(a, name)} has no meaning for {what}.", "It would be ignored.", remedy)


def check_measured(a: argparse.Namespace, held: Mapping[str, Any], command: str) -> None:
    """Refuse another format, runtime or method than that which scores of formats were measured for; they then say nothing."""
    for name in ("family", "runtime", "method"):
        asked, own = getattr(a, name, None), held.get(name)
        if asked is None or own is None:
            continue
        if asked != own:
            flag = flag_of(a, name)
            raise InvalidInput(
                f"{a.source} was measured with {flag} {own}, not {asked}.",
                "Damages hold for what they were measured with.",
                f"Leave {flag} out, or measure again: layerbudget {command} MODEL {flag} {asked} --save-scores FILE.",
            )
        setattr(a, name, None)


def check_numbers(a: argparse.Namespace) -> None:
    """Refuse numbers that no option can mean: not finite, beyond what a float counts, no rows at all, a seed below zero."""
    least = {name: 1 for name in ("batch_size", "batch", "limit", "samples", "windows", "tokens")} | {"length": 2}
    least |= {"seed": 0, "seeds": 0}
    for name, found in vars(a).items():
        for value in found if isinstance(found, list) else [found]:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value):
                raise NotFinite(f"{flag_of(a, name)} is {value}.", "It is a finite number.", "Correct it.")
            if name in ("epochs", "lr") and value <= 0:
                raise InvalidInput(f"{flag_of(a, name)} is {value}.", "It is above 0.", "Correct it.")
            if not least.get(name, -_LARGEST) <= value <= _LARGEST and (isinstance(value, int) or name in least):
                room = f"It is a whole number from {least.get(name, -_LARGEST)} to {_LARGEST}."
                remedy = "Leave it out for all." if name in ("limit", "windows") else "Correct it."
                raise InvalidInput(f"{flag_of(a, name)} is {value}.", room, remedy)


def check_circle(a: argparse.Namespace) -> None:
    """Refuse an output that is a file or folder which the command reads, and one file for two outputs."""
    from ..storage.writing import check_apart, real

    outputs = [path for name in _OUTPUTS if (path := getattr(a, name, None))]
    if len({real(path) for path in outputs}) < len(outputs):
        raise InvalidInput(f"{outputs[0]} is named for two outputs.", "", "Choose another one.")
    read = [word for action in a.leaf._actions if _is_read(action) for word in _words(getattr(a, action.dest, None))]
    for output in outputs:
        check_apart(output, *read, *(Path(word) / name for word in read for name in _READ_IN_FOLDERS))


def _is_read(action: argparse.Action) -> bool:
    """Whether an option names what is read: a positional argument, a text, a file or a folder."""
    known = action.dest in ("data", "set", "against") or action.metavar in ("FILE", "DIR", "DATA", "MODEL")
    named = known or not action.option_strings
    return named and action.choices is None and action.dest not in (*_OUTPUTS, "resume")


def _words(value: Any) -> list[str]:
    """What a value may name: each of several, the part behind a sign of equality, those between commas."""
    values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
    return [w for v in values for w in {v, v.partition("=")[2], *v.split(",")} if w not in ("", "demo")]


def one_process(what: str) -> None:
    """Refuse several processes."""
    from ..execution.processes import process_group

    if process_group().size > 1:
        raise InvalidInput(f"{what} in one process.", "A launcher started several.", "Leave torchrun out.")


# --- the command that repeats a result ----------------------------------------------------------------------------------------


def line_of(a: argparse.Namespace, parsed: Mapping[str, Any]) -> str:
    """Return the whole command that makes the same again: every option that changes the result, given or not.

    Args:
        a: Arguments of the command; what it has filled in where nothing was given counts.
        parsed: The arguments as they were parsed.
    """
    now, read = vars(a), getattr(a, "read", {})
    held = {name: now.get(name) if value is None and name not in DATA else value for name, value in parsed.items()}
    held |= {name: value for name, value in read.items() if held.get(name) is None}
    words = a.leaf.prog.split()
    for action in sorted(a.leaf._actions, key=lambda action: bool(action.option_strings)):
        value = held.get(action.dest)
        off = value is False and not isinstance(action, argparse.BooleanOptionalAction)
        if value is not None and not off and action.dest not in _ASIDE:
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
