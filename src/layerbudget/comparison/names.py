"""Scores and plans of a comparison, by the name that they go by: estimators, files of scores, plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import InvalidInput, NotFound
from ..models.blocks import describe
from ..plan import Plan
from ..scores import Scores
from ..sensitivity.estimators import ESTIMATORS
from ..sensitivity.importing import import_scores
from ..storage import reading
from .bench import Bench, TextBench

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "gain": "fisher-gram",
        "owl": "outlier-ratio",
        "alphapruning": "spectral-tail",
        "gradient": "gradient-norm",
        "shortgpt": "block-influence",
    }
)
METHODS = {"owl": "OWL", "alphapruning": "AlphaPruning"}  # published methods: a score under a rule of the same name
Given = str | Scores | Mapping[str, float]


def is_file(source: Any) -> bool:
    """Return whether a score is named by a file of numbers, or of a plan."""
    return isinstance(source, str) and Path(source).suffix.lower() in (".csv", ".json")


def by_name(sources: Sequence[str]) -> dict[str, str]:
    """Return what was named by the names of rows: ``kurt`` of ``my.py:kurt``, ``m`` of ``m.csv``, ``a/m`` where two are ``m``.

    Raises:
        InvalidInput: Two functions of one name: a registered name belongs to one of them.

    >>> by_name(["gain", "my.py:kurt", "a/m.csv", "b/m.csv"])
    {'gain': 'fisher-gram', 'kurt': 'my.py:kurt', 'a/m': 'a/m.csv', 'b/m': 'b/m.csv'}
    """
    distinct = list(dict.fromkeys(sources))
    short = {g: Path(g).stem if is_file(g) else _own_name(g) for g in distinct}
    named: dict[str, str] = {}
    for item in distinct:
        same = [g for g in distinct if short[g] == short[item]]
        if len([g for g in same if not is_file(g)]) > 1:
            raise InvalidInput(
                f"{' and '.join(same)} have the same name, {short[item]}.",
                "Results are listed by name, so every score needs its own.",
                "Register one of them under another name.",
            )
        name = _told_apart(item, same) if is_file(item) and len(same) > 1 else short[item]
        named[name] = ALIASES.get(item, item)
    return named


def _own_name(source: str) -> str:
    file, _, name = source.rpartition(":")
    return name if file.endswith(".py") else source


def _told_apart(item: str, same: Sequence[str]) -> str:
    """The end of a file's path, as long as it takes: ``a/m`` beside ``b/m``, ``m.csv`` beside ``m.json``."""
    paths = {g: Path(g).resolve() if is_file(g) else Path(_own_name(g)) for g in same}
    for length in range(1, 1 + max(len(p.parts) for p in paths.values())):
        for bare in (True, False):
            ends = {g: (*p.parts[-length:-1], p.stem if bare and is_file(g) else p.name) for g, p in paths.items()}
            if len(set(ends.values())) == len(same):
                return "/".join(ends[item])
    return item


def read_given(bench: Bench, kind: str, named: Mapping[str, Given]) -> dict[str, Given | Plan]:
    """Return the same with the files read, scores or plans; estimators stay names. All are checked before any is measured.

    Raises:
        InvalidInput: No such estimator, a file that does not fit the model, or a plan of another kind or pruner.
        NotFound: No such file.
    """
    scores: dict[str, Given | Plan] = {}
    for name, source in named.items():
        if not isinstance(source, str):
            scores[name] = source
        elif not is_file(source):
            ESTIMATORS.find(source)
            scores[name] = source
        elif not Path(source).is_file():
            raise NotFound(f"There is no file {source}.", "", "Name an estimator, or a file of scores or a plan.")
        elif _is_plan(source):
            scores[name] = _fitting(bench, kind, source, Plan.load(source))
        else:
            scores[name] = import_scores(source, bench.blocks, estimator=name)
    return scores


def _is_plan(path: str) -> bool:
    record = reading.read(path, "JSON") if path.lower().endswith(".json") else None
    return isinstance(record, Mapping) and "rule" in record and "budget" in record


def _fitting(bench: Bench, kind: str, path: str, plan: Plan) -> Plan:
    """The plan, if it is one that this comparison can measure."""
    if plan.kind != kind:
        raise InvalidInput(f"{path} is a plan of {plan.kind}.", f"This compares {kind}.", "Name a plan of that kind.")
    plan.validate(describe(bench.model))
    method, pruner_options = plan.pruner
    if isinstance(bench, TextBench) and method is not None and (method != bench.method or pruner_options):
        options = " with options of its own" if pruner_options else ""
        raise InvalidInput(
            f"{path} was measured for {method}{options}, and every plan here is applied by {bench.method}.",
            "A plan is compared under its own pruner.",
            "Compare it by layerbudget evaluate A --against B." if pruner_options else f"Use --method {method}.",
        )
    return plan
