"""The command line: one thin command per verb.

Conventions: results go to the terminal as tables, or as one JSON document on stdout with ``--json`` (everything
else then goes to stderr); a user's mistake ends with one sentence and exit code 2; files are written atomically and never
overwritten silently.
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

# Commands in the order of the flow. Each module has register(subparsers) and is imported for its own verb only.
COMMANDS = {
    "demo": "demo",
    "doctor": "doctor",
    "score": "score",
    "measure": "measure",
    "certify": "certify",
    "plan": "plan",
    "prune": "prune",
    "quantize": "quantize",
    "finetune": "finetune",
    "export": "export",
    "evaluate": "evaluate",
    "compare": "contest",
    "transfer": "plan",
    "report": "report",
}
_SUMMARY = {
    "demo": "the main job on the embedded model: score, plan, prune, evaluate, compare with uniform",
    "doctor": "check a model before GPU hours are spent",
    "score": "measure what each layer can still gain; writes scores.json",
    "measure": "measure what pruning each layer costs, and plan a sparsity with it",
    "certify": "which pairs of blocks the gain orders for certain, and whether the loss agrees",
    "plan": "decide sparsity, experts, ranks or bits; writes plan.json",
    "prune": "prune a model by a plan and recount",
    "quantize": "write a model in the formats of a plan of bits, and recount its bytes",
    "finetune": "train LoRA ranks or experts by a plan",
    "export": "a plan in the files of other tools: LoraConfig, llm-compressor, CSV",
    "evaluate": "perplexity and task accuracy",
    "compare": "every score under every rule, measured at equal budgets beside uniform and permuted controls",
    "transfer": "what a plan made on one set of scores costs on another",
    "report": "one self-contained HTML page of a results folder",
}


def _common() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--json", action="store_true", help="one JSON document on stdout, everything else on stderr")
    parent.add_argument("--quiet", action="store_true", help="no progress bars")
    parent.add_argument("--overwrite", action="store_true", help="replace existing output files")
    return parent


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say which option was meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse; the words are kept for :meth:`error`."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """As argparse, with the nearest options of the command in the place of those that it does not have."""
        parser: argparse.ArgumentParser = self
        for word in self._given:
            below = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})
            parser = below.get(word, parser)
        known = [o for o in parser._option_string_actions if o.startswith("--")]
        given = [w.partition("=")[0] for w in self._given if w.startswith("--")]
        strange = [w for w in given if not any(o.startswith(w) for o in known)]
        meant = [m for w in strange for m in difflib.get_close_matches(w, known, n=1, cutoff=0.75)]
        super().error(f"{message}. Did you mean {', '.join(meant)}?" if meant else message)


class _Subparsers:
    """Adds the common options to every parser that a command module makes, also one level down."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Add one parser with the common options."""
        options.setdefault("help", _SUMMARY.get(name))
        options.setdefault("description", options["help"])
        options.setdefault("conflict_handler", "resolve")
        parents = [_common(), *options.pop("parents", ())]
        parser: argparse.ArgumentParser = self.action.add_parser(name, parents=parents, **options)
        parser.set_defaults(leaf=parser)
        original = parser.add_subparsers
        parser.add_subparsers = lambda **kw: _Subparsers(original(**kw))  # type: ignore[method-assign,assignment]
        return parser


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser; with a verb, only that command's module is imported."""
    from .. import __version__

    parser = _Parser(prog="layerbudget", description="Give every layer the capacity it earns.")
    parser.add_argument("--version", action="version", version=f"layerbudget {__version__}")
    action = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    if verb in COMMANDS:
        importlib.import_module(f".{COMMANDS[verb]}", __name__).register(_Subparsers(action))
    else:
        for name, summary in _SUMMARY.items():
            action.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Waiting threads that sleep instead of spinning halve the time on a machine that others use too (read when torch loads).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    verb = next((a for a in argv if not a.startswith("-")), None)
    arguments = build_parser(verb).parse_args(argv)
    as_json = getattr(arguments, "json", False)
    from rich.logging import RichHandler

    from ..errors import LayerbudgetError
    from ..records import dumps, running
    from .outlook import conclude, dismiss
    from .shared import check_numbers, line_of
    from .terminal import Terminal

    arguments.console = Terminal(stderr=as_json)
    errors = Terminal(stderr=True)
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", force=True,
        handlers=[RichHandler(console=errors, show_time=False, show_path=False)],
    )  # fmt: skip
    _quiet_libraries()
    try:
        check_numbers(arguments)
        _settle_memory(arguments.verb)
        writes = _join(arguments)
        given = dict(vars(arguments))
        with running(lambda: line_of(arguments, given)):
            result = conclude(arguments, arguments.handler(arguments))
    except LayerbudgetError as error:
        errors.print(f"layerbudget: {error}", style="red")
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        errors.print(f"layerbudget: {_no_file(error)}", style="red")
        return 2
    except KeyboardInterrupt:
        errors.print("layerbudget: interrupted; finished stages are kept.")
        return 130
    finally:
        dismiss(arguments)
    if as_json and writes:
        sys.stdout.write(dumps(result))
    return int(result.get("exit_code", 0)) if isinstance(result, dict) else 0


_RUNNING = ("score", "measure", "prune", "quantize", "finetune", "evaluate", "certify", "compare", "demo")
_SHARED = ("score", "measure", "prune", "finetune", "evaluate")


def _settle_memory(verb: str) -> None:
    """Have the memory of freed tensors kept by the verbs that run a model (importing torch would slow the others down)."""
    if verb in _RUNNING:
        from ..models.machine import keep_freed

        keep_freed()


def _join(arguments: argparse.Namespace) -> bool:
    """Join the processes of a launcher; whether this one writes and prints.

    Raises:
        InvalidInput: A command that cannot share its work.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return True
    from ..errors import InvalidInput
    from ..execution.processes import join
    from .terminal import Terminal

    words = (arguments.verb, getattr(arguments, "plan_command", None))
    if arguments.verb not in _SHARED:
        raise InvalidInput(
            f"{' '.join(filter(None, words))} runs in one process, and the launcher started {os.environ['WORLD_SIZE']}.",
            f"Work is shared by {', '.join(_SHARED)}.",
            "Start it without torchrun.",
        )
    together = join(getattr(arguments, "device", None))
    if together is not None and not together.is_main:
        arguments.quiet, arguments.console = True, Terminal(stderr=True)
        arguments.console.quiet = True
    return together is None or together.is_main


def _no_file(error: OSError) -> str:
    """Sentence for a file that the system refused (no space, no permission, a folder in its place)."""
    where = error.filename or error.filename2
    return f"{error.strerror or error}{f': {where}' if where else ''}. Free the path or choose another one."


def _quiet_libraries() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes"):  # of their own insides
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)", category=category)
    for name in ("transformers", "datasets", "huggingface_hub", "httpx", "filelock"):
        logging.getLogger(name).setLevel(logging.ERROR)
