"""Arguments of the public functions: what is of another type is refused by name, before any work. No torch here."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from .errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])
SHOWN = 40  #: characters of a refused value in its message


class Kind(NamedTuple):
    """What an argument is called, the classes that it may have, and the call that makes one."""

    called: str
    classes: tuple[str, ...]
    made: str


_NAME = Kind("the name, folder or file of a model", ("builtins.str", "pathlib.PurePath"), "")
_TOKENIZER = Kind("a loaded tokenizer", (), "layerbudget.load_tokenizer(NAME)")
_SET = "layerbudget.data.calibration.CalibrationSet"
_TEXT = Kind("a calibration set", (_SET,), "layerbudget.calibration(SOURCE, tokenizer)")
_BLOCKS = Kind("blocks", ("layerbudget.records.Block", "layerbudget.plan.PlanBlock"), "layerbudget.partition(model)")
#: The annotations that are looked at. A parameter that has another one beside them is let through.
KINDS = {
    "nn.Module": Kind("a loaded model", ("torch.nn.modules.module.Module",), "layerbudget.load_model(NAME)"),
    "Scores": Kind("scores", ("layerbudget.scores.Scores",), "layerbudget.Scores.load(FILE)"),
    "Plan": Kind("a plan", ("layerbudget.plan.Plan",), "layerbudget.Plan.load(FILE)"),
    "CalibrationSet": _TEXT,
    "Data": _TEXT._replace(classes=(_SET, "layerbudget.execution.loss.FeatureSet")),
    "Sequence[Block]": _BLOCKS,
    "Iterable[Block | PlanBlock]": _BLOCKS,
}
#: Parameters that are known by their names: annotations say less of them.
NAMED: dict[str, list[Kind | None]] = {"tokenizer": [_TOKENIZER, None], "name": [_NAME]}


def checked(function: F) -> F:
    """The same function, but a model, its name, tokenizer, text, scores, plan or blocks of another type are refused.

    The usual mistake is a name or a path in the place of what it names. Types are those of the annotations.
    """
    parameters = inspect.signature(function).parameters
    wanted = {name: kinds for name, p in parameters.items() if (kinds := kinds_of(name, str(p.annotation)))}

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(parameters, args, strict=False), *kwargs.items()):
            if name in wanted and not any(_is(value, kind) for kind in wanted[name]):
                _refuse(name, value, [kind for kind in wanted[name] if kind is not None])
        return function(*args, **kwargs)

    return door  # type: ignore[return-value]


def kinds_of(name: str, annotation: str) -> list[Kind | None]:
    """What a parameter of this name and annotation may be, None among it; empty where that is not looked at."""
    if name in NAMED:
        return NAMED[name]
    parts = re.split(r" \| (?![^\[]*\])", annotation)
    kinds = [KINDS.get(part) for part in parts if part != "None"]
    return [*kinds, *([None] if "None" in parts else [])] if all(kinds) else []


def _is(value: Any, kind: Kind | None) -> bool:
    if kind is None:
        return value is None
    if kind is _TOKENIZER:
        return callable(value)
    if kind is _BLOCKS:
        if isinstance(value, str) or not isinstance(value, Iterable):
            return False
        return not isinstance(value, Sequence) or all(_has_class(item, kind) for item in value)
    return _has_class(value, kind)


def _has_class(value: Any, kind: Kind) -> bool:
    return any(f"{c.__module__}.{c.__qualname__}" in kind.classes for c in type(value).__mro__)


def _refuse(name: str, value: Any, kinds: Sequence[Kind]) -> None:
    shown = repr(value) if isinstance(value, str | int | float | None) else ""
    shown = f"{shown[:SHOWN]}..." if len(shown) > SHOWN else shown
    problem = f"{name} is {shown + ', ' if shown else ''}of type {type(value).__name__}."
    takes = f"It should be {' or '.join(kind.called for kind in kinds)}."
    made = " or ".join(kind.made for kind in kinds)
    raise InvalidInput(problem, takes, f"Make it with {made}." if made else "For example 'demo'.")
