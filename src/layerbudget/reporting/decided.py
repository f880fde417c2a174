"""Which texts decided the plan of a folder: they are no judge of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from ..decisions.files import text_of_plan
from ..errors import LayerbudgetError
from ..plan import Plan

_SPLIT = ("stdlib", "c4", "wikitext2")  # sources with a part of their own for evaluation


def texts_of(plan: Plan) -> set[str]:
    """Return the source of the text that a plan, or the scores that it was made from, was made on.

    A source that has a part of its own for evaluation is left out.
    """
    return {text_of_plan(plan).get("data", "")} - {"", *_SPLIT}


def texts_of_folder(folder: Path | str) -> set[str]:
    """Return those of the plan in a folder that ``apply`` wrote; none of other models."""
    file = Path(folder).expanduser() / "plan.json"
    with contextlib.suppress(LayerbudgetError, OSError):
        if file.is_file():
            return texts_of(Plan.load(file))
    return set()


def is_same_text(source: str, decided: Iterable[str]) -> bool:
    """Return whether a source is one of those, or has a file of one of them: by name, wherever the commands were run.

    >>> is_same_text("texts/my.txt", {"my.txt"}), is_same_text("other.txt", {"my.txt"})
    (True, False)
    """
    names = {_name(part) for part in source.split(",")}
    return any(names & {_name(part) for part in other.split(",")} for other in decided)


def on_flattery(text: str, plan: str) -> str:
    """Return a sentence on a text that decided a plan: it is no judge of it.

    >>> on_flattery("my.txt", "the plan of out")
    'my.txt decided the plan of out, which flatters it: judge it on other text.'
    """
    return f"{text} decided {plan}, which flatters it: judge it on other text."


def _name(part: str) -> str:
    return Path(part.strip()).name or part
