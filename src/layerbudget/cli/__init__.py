"""The command line: one thin command per verb.

Results go to the terminal as tables, or as one JSON document on stdout with ``--json`` (everything else then goes to stderr).
A user's mistake ends with one sentence and exit code 2. Files are written atomically and never overwritten silently.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from .options import COMMANDS, check_circle, check_numbers, line_of, refuse

PROCESSES = ("score", "plan sparsity", "apply", "finetune", "evaluate")  # these can run in several
TABLES = ("score", "plan", "compare", "explain")  # these show tables that may be long
LONG = ("demo", "score", "plan", "apply", "finetune", "evaluate", "compare", "explain")  # these can be asked what they would do


# Options that a verb does not have, and how it says the same.
_ANY = {"source": "demo", "context": "128"}  # what stands for an argument that is missing beside --set help
_INSTEAD = {"--exclude": ("--fix", "--fix 'BLOCK=0', which leaves out the blocks of a name or regular expression")}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say which option was meant, in two lines."""

    def error(self, message: str) -> NoReturn:
        known = options_below(self) | options_below(_common())
        strange = [w.partition("=")[0].rstrip(":") for w in message.split() if w.startswith("--")]
        meant = [m for w in strange if w not in known for m in difflib.get_close_matches(w, known, n=1, cutoff=0.75)]
        meant += [words for w in strange if w not in known for own, words in (_INSTEAD.get(w, ("", "")),) if own in known]
        instead = f" Did you mean {', '.join(meant)}?" if meant else ""
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}.{instead}\n{self.prog} --help says what there is.\n")


def options_below(parser: argparse.ArgumentParser) -> set[str]:
    """Return how the options of a parser, and of the commands in it, are typed."""
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {*parser._option_string_actions, *(o for a in actions for p in a.choices.values() for o in options_below(p))}


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_common(parser)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command."""
    group = parser.add_argument_group("options of every command")
    group.add_argument("--json", action="store_true", help="print one JSON document on stdout, everything else on stderr")
    group.add_argument("--quiet", action="store_true", help="show no progress and no expected cost")
    group.add_argument("--overwrite", action="store_true", help="replace existing output")
    group.add_argument("--table", action="store_true", help="show every row of a table, and every sentence")
    words = "say what would be read, run and written, how long it takes and how much memory; then end (long verbs)"
    group.add_argument("--dry-run", action="store_true", help=words)


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands with all their options, from which shtab writes the completion of a shell."""
    parser, action = _empty_parser(common=True)
    for module in dict.fromkeys(module for module, _ in COMMANDS.values()):
        importlib.import_module(f".{module}", __name__).register(action)
    files = getattr(sys.modules.get("shtab"), "FILE", None)
    for leaf in leaves_below(parser):
        _add_common(leaf)
        for each in leaf._actions:
            if each.nargs != 0 and each.choices is None and each.type is None and files is not None:
                each.complete = files  # type: ignore[attr-defined]  # what shtab reads
    return parser


def leaves_below(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of single commands in a parser, each once."""
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found = [leaf for a in actions for p in a.choices.values() for leaf in leaves_below(p)]
    return list(dict.fromkeys(found)) if actions else [parser]


def _empty_parser(*, common: bool) -> tuple[argparse.ArgumentParser, Any]:
    """Return a parser without commands, and what takes them."""
    from .. import __version__

    parser = _Parser(
        prog="layerbudget", description="Give every layer the capacity it earns.", parents=[_common()] if common else []
    )
    parser.add_argument("--version", action="version", version=f"layerbudget {__version__}")
    return parser, parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser; with a verb, only that command's module is imported."""
    parser, action = _empty_parser(common=verb not in COMMANDS)
    if verb in COMMANDS:
        importlib.import_module(f".{COMMANDS[verb][0]}", __name__).register(action)
    else:
        for name, (_, summary) in COMMANDS.items():
            action.add_parser(name, help=summary)
    return parser


def parse(argv: Sequence[str], *, whole: bool = True) -> argparse.Namespace:
    """Return the arguments of a command; the options of every command may stand anywhere in it.

    Unless it is ``whole``, what it needs may be missing.
    """
    common, words = _common().parse_known_args(argv)
    verb = next((w for w in words if not w.startswith("-")), None)
    if verb not in COMMANDS:
        words = list(argv)  # the help of the program lists the options of every command
    if verb == "explain":
        from .explain import complete

        words = complete(words)
    parser = build_parser(verb)
    for leaf in () if whole else leaves_below(parser):
        for action in leaf._actions:
            action.required = False
            if action.dest in _ANY and str(action.metavar).startswith(("MODEL|", "TOKENS")):
                action.default = _ANY[action.dest]
        for group in leaf._mutually_exclusive_groups:
            group.required = False
    found, strange = parser.parse_known_args(words, common)
    found.overwrite = found.overwrite or not whole  # nothing is written then
    if strange:
        getattr(found, "leaf", parser).error(f"unrecognized arguments: {' '.join(strange)}")
    return found


def _asks_for_settings(words: Sequence[str]) -> bool:
    """Whether ``--set help`` stands in a command: it is answered whatever else is missing."""
    return "--set=help" in words or ("--set", "help") in zip(words, words[1:], strict=False)


def _settings_of(arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Answer ``--set help`` of a command in which something may be missing; where that decides the answer, ask for it."""
    try:
        found: dict[str, Any] = arguments.handler(arguments)
        return found
    except Exception:
        parse(argv)  # ends with what is missing
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: the entry point of the console script."""
    # Waiting threads that sleep instead of spinning halve the time on a machine that others use too (read when torch loads).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if argv is None else argv)
    asked = _asks_for_settings(words)
    arguments = parse(words, whole=not asked)
    from ..errors import LayerbudgetError
    from ..records import dumps, running
    from .display import DryRun, conclude, nothing_written, terminal

    arguments.console, errors = terminal(stderr=arguments.json), terminal()
    _quiet_libraries()
    try:
        check_numbers(arguments)
        check_circle(arguments)
        for name, verbs in (("table", TABLES), ("dry_run", LONG)):
            if arguments.verb not in verbs:
                refuse(arguments, (name,), f"{arguments.verb}: it belongs to {', '.join(verbs)}")
        writes = _join(arguments)
        given = dict(vars(arguments))
        with running(lambda: line_of(arguments, given)):
            with nothing_written(arguments):
                done = _settings_of(arguments, words) if asked else arguments.handler(arguments)
                result = conclude(arguments, done)
    except DryRun as told:
        result = told.result
    except LayerbudgetError as error:
        errors.print(f"layerbudget: {error}", style="red")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # no space, no permission, a folder in its place
        where = error.filename or error.filename2
        said = f"{error.strerror or error}{f': {where}' if where else ''}. Free the path or choose another one."
        errors.print(f"layerbudget: {said}", style="red")
        return 2
    except KeyboardInterrupt:
        errors.print("layerbudget: interrupted; finished stages are kept.")
        return 130
    if arguments.json and writes:
        sys.stdout.write(dumps(result))
    return int(result.get("exit_code", 0))


def _join(arguments: argparse.Namespace) -> bool:
    """Join the processes of a launcher, and return whether this one writes and prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return True
    from ..errors import InvalidInput
    from ..execution.processes import join

    words = f"plan {arguments.kind}" if arguments.verb == "plan" else arguments.verb
    if words not in PROCESSES:
        raise InvalidInput(
            f"{words} runs in one process, and the launcher started {os.environ['WORLD_SIZE']}.",
            f"Work is shared by {', '.join(PROCESSES)}.",
            "Start it without torchrun.",
        )
    if join(getattr(arguments, "device", None)).is_main:
        return True
    arguments.quiet = arguments.console.quiet = True
    return False


def _quiet_libraries() -> None:
    """Show warnings of this package alone."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):  # read when they load
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if (loaded := sys.modules.get("transformers.utils.logging")) is not None:  # by a program that calls the command line
        loaded.disable_progress_bar()
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes"):  # of their own insides
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)", category=category)
    for name in ("transformers", "datasets", "huggingface_hub", "httpx", "filelock", "compressed_tensors"):
        logging.getLogger(name).setLevel(logging.ERROR)
