"""What all ``plan_*`` functions share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInput, UnknownBlock
from ..plan import Plan, PlanBlock
from ..program import rules
from ..program.inputs import Vector
from ..program.solution import Solution
from ..records import Block, to_jsonable
from ..scores.record import Scores


def blocks_of(scores: Scores | Sequence[Block]) -> tuple[Block, ...]:
    """The blocks of a score record, or the blocks themselves."""
    return scores.blocks if isinstance(scores, Scores) else tuple(scores)


def oriented(scores: Scores | Sequence[Block], damping: float | None) -> Vector:
    """Scores with larger = deserves more capacity, shape ``(K,)``.

    Raises:
        InvalidInput: Blocks without scores were given.
    """
    record = need_scores(scores)
    return record.values(damping) if record.orientation == "gain" else -record.values(damping)


def weights_of(scores: Scores | Sequence[Block], damping: float | None, smoothing: float, rule: str, seed: int) -> Vector:
    """Normalised weights of a score record; shuffled for the rule ``permuted``."""
    q = need_scores(scores).weights(damping, smoothing=smoothing)
    return rules.permuted(q, seed) if rule == "permuted" else q


def need_scores(scores: Scores | Sequence[Block]) -> Scores:
    """The score record.

    Raises:
        InvalidInput: Blocks without scores were given.
    """
    if isinstance(scores, Scores):
        return scores
    raise InvalidInput("This rule needs scores and only blocks were given.", "", "Score first, or use rule='uniform'.")


def matching(blocks: Sequence[Block], pattern: str) -> list[int]:
    """Indices of the blocks with this name, or of those whose name the regular expression matches (``re.search``).

    Raises:
        UnknownBlock: None does.
        InvalidInput: The expression does not compile.
    """
    found = [i for i, b in enumerate(blocks) if b.name == pattern]
    try:
        found = found or [i for i, b in enumerate(blocks) if re.search(pattern, b.name)]
    except re.error as error:
        raise InvalidInput(f"{pattern!r} is not a regular expression ({error}).", "", "Correct it.") from error
    if not found:
        raise UnknownBlock(
            f"No block matches {pattern!r}.",
            f"The blocks are {', '.join(b.name for b in blocks[:3])}, ...",
            "Correct the name.",
        )
    return found


def make_plan(
    scores: Scores | Sequence[Block], kind: str, rule: str, blocks: Sequence[Block], value: Vector, counts: np.ndarray,
    budget: Mapping[str, Any], hyperparameters: Mapping[str, Any], solution: Solution | None, **extra: Any,
) -> Plan:  # fmt: skip
    """Bind a decision into a plan."""
    rows = tuple(
        PlanBlock(name=b.name, value=float(v), count=int(c), numel=b.numel, modules=tuple(m.name for m in b.modules))
        for b, v, c in zip(blocks, value, counts, strict=True)
    )
    return Plan(
        kind=kind,
        rule=rule,
        model=dict(scores.model) if isinstance(scores, Scores) else {},
        blocks=rows,
        budget=dict(budget),
        hyperparameters=to_jsonable(dict(hyperparameters)),
        certificate=to_jsonable(solution.certificate()) if solution is not None else {},
        scores_digest=scores.digest if isinstance(scores, Scores) else None,
        extra=to_jsonable(extra),
    )
