"""Every command: its summary, its request and its handler, which are imported when the command is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import LayerbudgetError
from ..registry import load_function, run_file
from ..requests import EVERY, Request, flag_of

if TYPE_CHECKING:
    from .session import Session

Handler = Callable[["Session"], dict[str, Any]]


class Command(NamedTuple):
    """A line for the help, and where request and handler are; ``plan`` and ``apply`` ask the decision for theirs."""

    summary: str
    request: str = ""  #: ``module:NAME`` in this folder
    handler: str = ""


class Asked(NamedTuple):
    """A command line after it was read."""

    request: type[Request]
    words: list[str]  #: the words that say it, behind those of the command
    handler: Handler


class UnknownCommand(LayerbudgetError):
    """There is no such command."""


# Verbs in the order of the flow.
VERBS = {
    "demo": Command("run the main job on the embedded model", "report:DemoRequest", "report:run_demo"),
    "doctor": Command("check a model, and price every long command", "doctor:DoctorRequest", "doctor:run"),
    "score": Command("measure what each layer can still gain", "score:ScoreRequest", "score:run"),
    "plan": Command("decide what every layer gets: sparsity, bits, ranks, ..."),
    "apply": Command("give a model what a plan says, and write it"),
    "finetune": Command("train the LoRA ranks or experts of a plan", "finetune:FinetuneRequest", "finetune:run"),
    "evaluate": Command("measure perplexity and task accuracy", "evaluate:EvaluateRequest", "evaluate:run"),
    "compare": Command("measure scores and rules at equal budgets", "compare:CompareRequest", "compare:run"),
    "export": Command("write a plan in the files of other tools", "report:ExportRequest", "report:run_export"),
    "report": Command("write one HTML page of a results folder", "report:ReportRequest", "report:run_report"),
    "explain": Command("say what a plan does and rests on; compare plans"),
}
QUESTIONS = {
    "plan": Command("what a plan does and what it rests on", "explain:PlanQuestion", "explain:run_plan"),
    "diff": Command("what differs between two plans", "explain:DiffQuestion", "explain:run_diff"),
    "sweep": Command("a grid of budgets and exponents", "explain:SweepQuestion", "explain:run_sweep"),
    "transfer": Command("what a plan costs on other scores", "explain:TransferQuestion", "explain:run_transfer"),
    "certify": Command("which blocks the gain orders for certain", "explain:CertifyQuestion", "explain:run_certify"),
}
FLAGS = tuple(
    flag_of(Request, name)
    for name, field in Request.options().items()
    if field.metadata["group"] == EVERY and field.default is False
)
_HELP = ("-h", "--help", "--help-all")


def run_plugins(words: Sequence[str]) -> None:
    """Run the files that ``--plugin`` names, before anything that they may register is looked for."""
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word == "--plugin" or word.startswith("--plugin="):
            run_file(Path(word.partition("=")[2] or value))


def find_command(words: Sequence[str]) -> Asked:
    """Return what a command line asks for.

    Options of every command may stand anywhere in it.

    Raises:
        UnknownCommand: The message names the command that may have been meant.
    """
    flags = [word for word in words if word in FLAGS]
    rest = [word for word in words if word not in FLAGS]
    verb, below = rest[0] if rest else "", rest[1:]
    if verb not in VERBS:
        raise UnknownCommand(_unknown("command", verb, VERBS, ""))
    if verb == "plan":
        return _plan(below, flags)
    if verb == "apply":
        return _apply(below, flags)
    command = VERBS[verb]
    if verb == "explain":
        name, below = _question(below)
        command = QUESTIONS[name]
    return Asked(load_function(f".{command.request}", __package__), [*below, *flags], _handler(command))


def _handler(command: Command) -> Handler:
    """Return the function that runs a command; its module is imported already, with its request."""
    handler: Handler = load_function(f".{command.handler}", __package__)  # type: ignore[assignment]
    return handler


def _question(words: Sequence[str]) -> tuple[str, list[str]]:
    """The question to ``explain`` and the words behind it; the word ``plan`` may be left out."""
    name = words[0] if words else ""
    if name in QUESTIONS:
        return name, list(words[1:])
    close_matches = difflib.get_close_matches(name, QUESTIONS, n=1, cutoff=0.75)
    if not name or (close_matches and not Path(name).exists()):
        raise UnknownCommand(_unknown("question", name, QUESTIONS, "explain "))
    return "plan", list(words)


def _plan(words: Sequence[str], flags: Sequence[str]) -> Asked:
    from ..decision import DECISIONS

    name = words[0] if words else ""
    if ".py:" not in name and name not in DECISIONS.names():
        raise UnknownCommand(_unknown("kind of plan", name, DECISIONS.names(), "plan "))
    decision = DECISIONS.find(name)
    from .decide import run_plan

    file = name.rpartition(":")[0]
    plugin = ["--plugin", file] if file and file not in words else []
    return Asked(decision.Request, [*words[1:], *plugin, *flags], lambda session: run_plan(session, decision))


def _apply(words: Sequence[str], flags: Sequence[str]) -> Asked:
    from .decide import run_apply, write_request

    return Asked(write_request(), [*words, *flags], run_apply)


def _unknown(what: str, name: str, known: Mapping[str, Any] | Sequence[str], before: str) -> str:
    if not name or name.startswith("-"):
        place = f"layerbudget {before}".strip()
        missing = "is missing" if not name else f"must stand before {name}"
        return f"The {what} {missing}.\n{place} --help lists them."
    close_matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean {before}{close_matches[0]}?" if close_matches else ""
    return f"There is no {what} {name}.{hint}\n{f'layerbudget {before}'.strip()} --help lists them."


def requests_of_all() -> dict[str, type[Request]]:
    """Return the request of every command, by its words: completion and the page of options are made from them."""
    from ..decision import DECISIONS
    from .decide import write_request

    known: dict[str, type[Request]] = {}
    for verb, command in VERBS.items():
        if verb == "plan":
            known |= {f"plan {name}": decision.Request for name, decision in DECISIONS.all().items()}
        elif verb == "apply":
            known["apply"] = write_request()
        elif verb == "explain":
            known |= {f"explain {name}": load_function(f".{c.request}", __package__) for name, c in QUESTIONS.items()}
        elif command.request:
            known[verb] = load_function(f".{command.request}", __package__)
    return known


# --- help -------------------------------------------------------------------------------------------------------------------


def overview(words: Sequence[str]) -> str | None:
    """Return the help of the program, of ``plan`` or of ``explain``; None where words ask for something else."""
    rest = [word for word in words if word not in FLAGS]
    asked = next((word for word in rest if word in _HELP), None)
    before = [word for word in rest if word not in _HELP]
    if asked is None or len(before) > 1 or before not in ([], ["plan"], ["explain"]):
        return None
    everything = asked == "--help-all"
    if before == ["plan"]:
        from ..decision import DECISIONS

        said = {name: decision.summary for name, decision in DECISIONS.all().items()}
        short = {name: summary.partition(";")[0] for name, summary in said.items()}
        lines = _list("KIND", "plan KIND MODEL|SCORES ...", said if everything else short)
        lines += ["", "FILE.py:NAME is a kind of your own.", "layerbudget plan KIND --help lists the options of a kind."]
    elif before == ["explain"]:
        lines = _list("QUESTION", "explain QUESTION ...", {n: c.summary for n, c in QUESTIONS.items()})
        lines += [
            "",
            "layerbudget explain PLAN is the question plan.",
            "layerbudget explain QUESTION --help lists its options.",
        ]
    else:
        lines = _list("COMMAND", "COMMAND ...", {n: c.summary for n, c in VERBS.items()})
        lines += ["", "layerbudget COMMAND --help lists the options of a command, and --help-all every one of them."]
        lines += ["layerbudget --version names the version.", "layerbudget --install-completion completes words in your shell."]
    return "\n".join(lines + (_every() if everything else [])) + "\n"


def _list(what: str, usage: str, entries: Mapping[str, str]) -> list[str]:
    width = max(map(len, entries))
    return [f"Usage: layerbudget {usage}", "", f"{what}:", *(f"  {name:<{width}}  {said}" for name, said in entries.items())]


def _every() -> list[str]:
    """The options of every command."""
    fields = {flag_of(Request, n): str(f.metadata["help"]) for n, f in Request.options().items()}
    width = max(map(len, fields))
    return ["", "Options of every command:", *(f"  {flag:<{width}}  {said}" for flag, said in fields.items())]
