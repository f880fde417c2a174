"""What all ``plan_*`` functions share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInput, UnknownBlock
from ..plan import Plan, PlanBlock
from ..records import Block, to_jsonable
from ..scores import Scores
from ..solvers.inputs import Vector
from ..solvers.separable import Solution
from .options import CONSTANTS


def blocks_of(scores: Scores | Sequence[Block]) -> Sequence[Block]:
    """The blocks of a score record, or the blocks themselves."""
    if isinstance(scores, Scores):
        return scores.blocks
    return tuple(scores)


def record_of(scores: Scores | Sequence[Block]) -> Scores | None:
    """The score record, where there is one."""
    return scores if isinstance(scores, Scores) else None


def matching(blocks: Sequence[Block], pattern: str) -> list[int]:
    """Indices of the blocks with this name, or of those whose name the regular expression matches (``re.search``).

    Raises:
        UnknownBlock: None does.
        InvalidInput: The expression does not compile.
    """
    names = [b.name for b in blocks]
    found = [i for i, name in enumerate(names) if name == pattern]
    try:
        search = re.compile(pattern).search
        found = found or [i for i, name in enumerate(names) if search(name)]
    except re.error as error:
        raise InvalidInput(f"{pattern!r} is not a regular expression ({error}).", "", "Correct it.") from error
    if not found:
        raise UnknownBlock(
            f"No block matches {pattern!r}.",
            f"The blocks are {', '.join(names[:3])}, ...",
            "Correct the name.",
        )
    return found


def make_plan(
    scores: Scores | Sequence[Block], kind: str, rule: str, value: Vector, counts: np.ndarray, budget: Mapping[str, Any],
    hyperparameters: Mapping[str, Any], solution: Solution | None, extra: Mapping[str, Any],
) -> Plan:  # fmt: skip
    """Bind a decision into a plan."""
    record = record_of(scores)
    return Plan(
        kind=kind,
        rule=rule,
        model=dict(record.model) if record is not None else {},
        blocks=tuple(PlanBlock.of(b, v, c) for b, v, c in zip(blocks_of(scores), value, counts, strict=True)),
        budget=dict(budget),
        hyperparameters=to_jsonable(dict(hyperparameters)),
        certificate=to_jsonable(solution.certificate()) if solution is not None else {},
        scores_digest=record.digest if record is not None else None,
        extra=to_jsonable(dict(extra)),
    )


def recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a plan records them: functions by their name, constants of the programs where they were given."""
    silent = {name for name in CONSTANTS if options.get(name) is None}
    return {k: getattr(v, "name", v) for k, v in options.items() if k not in ("curves", "rule", *silent)}
