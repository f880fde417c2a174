"""Arguments of the public functions: what is of another type is refused by name, before any work. No torch here."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from .errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
SHOWN = 40  #: characters of a refused value in its message


class Kind(NamedTuple):
    """One kind of argument: how it is called, whether a value is one, and how one is had."""

    called: str
    fits: Callable[[Any], bool]
    remedy: str


def of_class(*names: str) -> Callable[[Any], bool]:
    """A test whether a value is of a class of one of these full names, which are not imported for it."""
    return lambda value: any(f"{c.__module__}.{c.__qualname__}" in names for c in type(value).__mro__)


def each(fits: Callable[[Any], bool], *, some: bool = False) -> Callable[[Any], bool]:
    """A test whether a value holds several that fit, and is no text. ``some`` lets what can be read only once through."""

    def fit(value: Any) -> bool:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            return False
        return all(fits(item) for item in value) if isinstance(value, Sized) else some

    return fit


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


_SET = "layerbudget.data.calibration.CalibrationSet"
_MAKE_TEXT = "Make it with layerbudget.calibration(SOURCE, tokenizer)."
_BLOCK = of_class("layerbudget.records.Block", "layerbudget.plan.PlanBlock")
_MAKE_BLOCKS = "Make them with layerbudget.partition(model)."
_NAME = Kind("the name, folder or file of a model", lambda v: isinstance(v, str | PurePath), "For example 'demo'.")
_TOKENIZER = Kind("a loaded tokenizer", callable, "Make it with layerbudget.load_tokenizer(NAME).")
_NONE = Kind("None", lambda v: v is None, "")
#: The annotations that are looked at. A parameter that has another one beside them is let through.
KINDS = {
    "nn.Module": Kind(
        "a loaded model", of_class("torch.nn.modules.module.Module"), "Make it with layerbudget.load_model(NAME)."
    ),
    "Scores": Kind("scores", of_class("layerbudget.scores.Scores"), "Read them with layerbudget.Scores.load(FILE)."),
    "Plan": Kind("a plan", of_class("layerbudget.plan.Plan"), "Read it with layerbudget.Plan.load(FILE)."),
    "CalibrationSet": Kind("a calibration set", of_class(_SET), _MAKE_TEXT),
    "Data": Kind("a calibration set", of_class(_SET, "layerbudget.execution.loss.FeatureSet"), _MAKE_TEXT),
    "Sequence[Block]": Kind("blocks", each(_BLOCK), _MAKE_BLOCKS),
    "Iterable[Block | PlanBlock]": Kind("blocks", each(_BLOCK, some=True), _MAKE_BLOCKS),
    "int": Kind("a whole number", _whole, "For example 8."),
    "float": Kind("a number", _number, "For example 0.5."),
    "str": Kind("a string", _text, "Write it in quotes."),
    "Path": Kind("a path", lambda v: isinstance(v, PurePath), "Write it in quotes."),
    "Sequence[str]": Kind("a list of strings", each(_text), "For example ['one', 'two']."),
    "Sequence[float]": Kind("a list of numbers", each(_number), "For example [1, 2]."),
    "Sequence[int]": Kind("a list of whole numbers", each(_whole), "For example [1, 2]."),
    "Sequence[float | str]": Kind("a list", each(lambda v: _number(v) or _text(v)), "For example [1, 2]."),
    "Mapping": Kind("a dictionary", lambda v: isinstance(v, Mapping), "For example {'name': 1}."),
    "Callable": Kind("a function", callable, "Give the function itself."),
    "None": _NONE,
}
#: Classes that wrap a model, by the attribute that holds it.
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "module",
}
#: Parameters that are known by their names: annotations say less of them.
NAMED = {"tokenizer": [_TOKENIZER, _NONE], "name": [_NAME]}


def checked(function: F) -> F:
    """The same function, but an argument of another type than its annotation says is refused with a sentence.

    Usual mistakes are the name or the path of a thing in its place, a number in quotes, one name where there is a list.
    Where the caller is in torch's inference mode, in which nothing has a gradient, the function is not.
    """
    parameters = inspect.signature(function).parameters
    wanted = {name: kinds for name, p in parameters.items() if (kinds := kinds_of(name, str(p.annotation)))}
    models = {name for name, kinds in wanted.items() if KINDS["nn.Module"] in kinds}

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(parameters, args, strict=False), *kwargs.items()):
            if name in wanted and not any(kind.fits(value) for kind in wanted[name]):
                _refuse(name, value, [kind for kind in wanted[name] if kind is not _NONE])
            if name in models:
                _refuse_wrapped(name, value)
            if name == "batch_size" and _whole(value) and value < 1:
                raise InvalidInput(f"batch_size is {value}.", "It must be at least 1.", "Use 8.")
        torch = sys.modules.get("torch")
        if torch is None or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return door  # type: ignore[return-value]


def checked_fields(cls: C) -> C:
    """The same class, but a field of another type than its annotation says is refused as :func:`checked` refuses arguments."""
    cls.__init__ = checked(cls.__init__)  # type: ignore[misc]
    return cls


def _refuse_wrapped(name: str, value: Any) -> None:
    """Refuse a model inside a wrapper, whose names, configuration and outputs are others."""
    for wrapper, inside in WRAPPERS.items():
        if of_class(wrapper)(value):
            called = wrapper.rpartition(".")[2]
            what = f"{name} is a model inside {called}."
            raise InvalidInput(what, "Layers are read by their own names.", f"Give the model itself: {name}.{inside}.")


def kinds_of(name: str, annotation: str) -> list[Kind]:
    """The kinds that a parameter of this name and annotation may be; empty where that is not looked at."""
    if name in NAMED:
        return NAMED[name]
    parts = [p if p in KINDS else p.partition("[")[0] for p in re.split(r" \| (?![^\[]*\])", annotation)]
    return [KINDS[part] for part in parts] if all(part in KINDS for part in parts) else []


def _refuse(name: str, value: Any, kinds: Sequence[Kind]) -> None:
    shown = repr(value) if isinstance(value, str | int | float | None) else ""
    shown = f"{shown[:SHOWN]}..." if len(shown) > SHOWN else shown
    problem = f"{name} is {shown + ', ' if shown else ''}of type {type(value).__name__}."
    called = dict.fromkeys(kind.called for kind in kinds)
    raise InvalidInput(problem, f"It should be {' or '.join(called)}.", " ".join(dict.fromkeys(kind.remedy for kind in kinds)))
