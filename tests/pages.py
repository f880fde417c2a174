"""Pages that are made from the requests of the commands: every option, and the lists of commands for scripts and agents.

``LAYERBUDGET_WRITE=1 pytest tests/cli/test_pages.py`` writes them anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import zoo

import layerbudget as lb
from layerbudget.cli.commands import QUESTIONS, VERBS, requests_of_all
from layerbudget.cli.parser import say_option
from layerbudget.compressors.base import TREATMENTS
from layerbudget.compressors.formats import FLOATING, RUNTIMES, TYPES, Format
from layerbudget.decision import DECISIONS
from layerbudget.decisions.rules import rules_of
from layerbudget.errors import InvalidInput
from layerbudget.exports import EXPORTS
from layerbudget.registry import describe_type
from layerbudget.requests import ADVANCED, EVERY, PLACE, TEXT, Request, flag_of, kind_of, positional
from layerbudget.sensitivity.estimators import ESTIMATORS

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Every option

A value of several is given after its flag, or with the flag again. Where a sentence names a default, that is taken without the
flag. `layerbudget score --help` shows the usual options of a command, here of `score`, and `--help-all` every one of them.
An option has an effect or is refused: `tests/cli/test_options.py` tries this for plans from scores and for `score`.
`tests/pages.py` makes this page from what the commands themselves read.
"""


def kind_words(request: type[Request], name: str) -> str:
    """The type of an option in words."""
    known, declared = request.options()[name].metadata, kind_of(request, name)
    kinds = typing.get_args(declared) if typing.get_origin(declared) in (types.UnionType, typing.Union) else (declared,)
    kind = next(k for k in kinds if k is not types.NoneType)
    if known["choices"] is not None:
        return " or ".join(f"`{value}`" for value in known["choices"]())
    if kind is bool:
        return "switch"
    if typing.get_origin(kind) is tuple:
        return f"several: {known['metavar'] or describe_type(typing.get_args(kind)[0])}"
    return known["metavar"] or describe_type(kind)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _row(request: type[Request], name: str) -> str:
    field = request.options()[name]
    said = field.metadata["help"]
    said = said() if callable(said) else said
    flag, short = flag_of(request, name), field.metadata["short"]
    typed = f"`{field.metadata['metavar']}`" if positional(name, field) else f"`{flag}`"
    typed += f", `{short}`" if short else ""
    if (
        not positional(name, field)
        and (field.default is None or field.default is True)
        and kind_words(request, name) == "switch"
    ):
        typed += f", `{flag.replace('--', '--no-', 1)}`"
    missing = "; must be given" if field.default is dataclasses.MISSING else ""
    value = "" if positional(name, field) else kind_words(request, name)
    return f"| {_cell(typed)} | {_cell(value)} | {_cell(said + missing)} |"


def further(command: str, request: type[Request]) -> list[tuple[str, dict[str, list[str]]]]:
    """What names further options (``--rule``), and those options in words, each with the names that bring it."""
    kind = command.removeprefix("plan ")
    named = {
        "estimator": ESTIMATORS.names(),
        "method": TREATMENTS.names(),
        "to": EXPORTS.names(),
        "rule": tuple(rules_of(kind)),
    }
    found = []
    for flag, names in named.items():
        rows: dict[str, list[str]] = {}
        for name in names if flag in request.options() else ():
            try:
                options = request.more_options({"": "", flag: name})
            except InvalidInput:  # such as a quantiser, where pruners are meant
                continue
            for option in options.values():
                value = "switch" if option.type is bool else "value"
                rows.setdefault(f"| `--{option.name.replace('_', '-')}` | {value} | {_cell(say_option(option))}", []).append(
                    name
                )
        if rows:
            found.append((flag, rows))
    return found


def _section(command: str, request: type[Request]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, field in request.options().items():
        if field.metadata["group"] != EVERY:
            groups.setdefault(field.metadata["group"], []).append(name)
    order = sorted(groups, key=lambda g: (TEXT, PLACE, ADVANCED).index(g) + 1 if g in (TEXT, PLACE, ADVANCED) else 0)
    lines = [f"## `layerbudget {command}`", "", " ".join((request.__doc__ or "").split()), ""]
    if unread := [f"`{flag_of(request, name)}`" for name in request.unread]:
        lines += [f"Without {' and '.join(unread)}.", ""]
    lines += ["| option | value | what it does |", "|---|---|---|"]
    for group in order:
        names = sorted(groups[group], key=lambda name: not positional(name, request.options()[name]))
        lines += [*([f"| *{group}* | | |"] if group else []), *(_row(request, name) for name in names)]
    for flag, rows in further(command, request):
        lines += ["", f"Further options, by `--{flag}`:", "", "| option | value | what it does | with |", "|---|---|---|---|"]
        lines += [f"{row} | {', '.join(f'`{name}`' for name in names)} |" for row, names in rows.items()]
    return [*lines, ""]


def options_page() -> str:
    """The page of every option."""
    every = [name for name, field in Request.options().items() if field.metadata["group"] == EVERY]
    lines = [HEAD, "## Every command", "", "These may stand anywhere in a command.", ""]
    lines += ["| option | value | what it does |", "|---|---|---|", *(_row(Request, name) for name in every), ""]
    for command, request in requests_of_all().items():
        lines += _section(command, request)
    return "\n".join(lines).rstrip() + "\n"


RULES_HEAD = """# Every rule

A rule says which block gets how much, once it knows the scores, the bounds and the budget. It is named by `--rule`, or by
`rule=` in Python. [How to choose](how-to-choose.md) says which one to take, and [theory](theory.md) derives the program of
`mdl`. [Contributing](contributing.md) shows how to add one. `layerbudget plan sparsity scores.json --rule owl --help` says
what the options of a rule mean, as does [every option](options.md). `tests/pages.py` makes this page from the rules themselves.
"""
_EXAMPLES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sparsity": (lb.plan_sparsity, {"sparsity": 0.3}),
    "lora-experts": (lb.plan_lora_experts, {"total": 12}),
    "ranks": (lb.plan_ranks, {"mean_rank": 4}),
}


def reads_of(kind: str, name: str) -> str:
    """What a rule must be given, as plans of four blocks show."""
    plain, (plan, budget) = zoo.scores([1.0, 2.0, 3.0, 4.0]), _EXAMPLES[kind]
    gains = dataclasses.replace(plain, extra={"increments": [[[1.0] * 16] * 4]})
    curves = {"curves": {name: ([0.0, 0.5, 1.0], [0.0, 0.1, 0.4]) for name in plain.names}}
    sources: list[tuple[str, Any, dict[str, Any]]] = [("shapes alone", plain.blocks, {}), ("one score per block", plain, {})]
    sources += [("the gain of every rank", gains, {}), ("damage by sparsity", plain.blocks, curves)]
    for said, source, options in sources:
        with contextlib.suppress(InvalidInput):
            plan(source, rule=name, **budget, **options)
            return said
    raise AssertionError(f"No source makes a plan of {kind} by {name}.")


def rules_page() -> str:
    """The page of every rule."""
    lines = [RULES_HEAD]
    for kind, (plan, _) in _EXAMPLES.items():
        lines += [f"## `{kind}`", "", f"Of `layerbudget plan {kind}` and `lb.{plan.__name__}`.", ""]
        lines += ["| rule | what it does | it reads | options |", "|---|---|---|---|"]
        for name, rule in rules_of(kind).items():
            options = ", ".join(f"`{option}`" for option in rule.options if option not in ("rule", "curves"))
            lines.append(f"| `{name}` | {_cell(rule.summary)} | {reads_of(kind, name)} | {options} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def commands_list() -> str:
    """Every command in a line, with the options that its ``--help`` shows."""
    lines, requests = [], requests_of_all()
    below = {"plan": f" ({', '.join(DECISIONS.names())})", "explain": f" ({', '.join(QUESTIONS)})"}
    for verb, command in VERBS.items():
        flags = f". {_flags(requests[verb])}" if verb in requests else ""
        lines.append(f"- `{verb}`: {command.summary}{below.get(verb, '')}{flags}")
    return "\n".join(lines)


def commands_sentence() -> str:
    """The names of all commands in two sentences."""
    return f"Verbs: {', '.join(VERBS)}. Kinds of plan: {', '.join(DECISIONS.names())}."


def _flags(request: type[Request]) -> str:
    shown = {n: f for n, f in request.options().items() if f.metadata["group"] not in (EVERY, TEXT, PLACE, ADVANCED)}
    places = [field.metadata["metavar"] for name, field in shown.items() if positional(name, field)]
    flags = [flag_of(request, name) for name, field in shown.items() if not positional(name, field)]
    return " ".join([*places, *flags])


SCALES = {
    "bfloat16": "a power of two in bfloat16",
    "float8_e4m3fn": "a scale in e4m3",
    "uint8": "a power of two in 8 bits (e8m0)",
}


def _floating_row(form: Format) -> str:
    floats = form.floats
    assert floats is not None
    scale = SCALES[floats.scale]
    where = f"one row with {scale}" if form.group is None else f"groups of {form.group} with {scale}"
    united = ", one number over all" if form.united else ""
    rows = "any" if form.group is None else f"multiples of {form.group}"
    d_out, d_in = 1 << 12, 1 << 12
    bits = f"{8 * form.bytes(d_out, d_in) / (d_out * d_in):.4g}"
    bits = f"{form.bits} and {8 * form.bytes(1, 64) - 64 * form.bits} per row" if form.group is None else bits
    experts = "yes" if floats.experts else "no"
    code = f"e{form.bits - 1 - floats.mantissa}m{floats.mantissa}"
    return f"| `{form.name}` | {code}, {where}{united} | {bits} | {rows} | {floats.kernel} | {experts} |"


def floating_table() -> str:
    """Formats of floating-point numbers of compressed-tensors, one a row."""
    head = "| format | weights | bits per weight | inputs of a matrix | kernel of vLLM | its experts |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(_floating_row, FLOATING)])


def types_table() -> str:
    """Types of llama.cpp, the smallest first."""
    rows = []
    menus = [{f.name for f in RUNTIMES["llama.cpp"].formats([1 << 12], inputs=inputs)} for inputs in (False, True)]
    for form in TYPES:
        bits = f"{8 * form.block_bytes / (form.group or 1):.4g}"
        menu = "yes" if form.name in menus[0] else "with inputs" if form.name in menus[1] else "by name"
        menu += " and with inputs" if menu == "by name" and form.needs_inputs else ""
        rows.append(f"| `{form.name}` | {bits} | {'any' if form.group == 1 else f'multiples of {form.group}'} | {menu} |")
    return "\n".join(["| type | bits per weight | inputs of a matrix | in the menu |", "|---|---|---|---|", *rows])


def between(text: str, name: str, made: str) -> str:
    """A page with what is made between the marks of that name."""
    start, end = f"<!-- {name}: made by tests/pages.py -->", f"<!-- end of {name} -->"
    assert start in text and end in text, f"The page has no marks of {name}."
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n\n{made}\n\n{end}", text, flags=re.DOTALL)
