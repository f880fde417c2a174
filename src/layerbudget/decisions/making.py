"""The plan of what a rule decided, from scores or from blocks alone. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..canonical import to_jsonable
from ..decision import DECISIONS
from ..errors import InvalidInput, UnknownBlock
from ..plan import Plan, PlanBlock
from ..records import Block
from ..scores import Scores
from .rules import RuleResult

# Constants of the programs, recorded where they were given.
_CONSTANTS = ("alpha", "gamma", "bits", "eta", "units")


def blocks_of(scores: Scores | Sequence[Block]) -> Sequence[Block]:
    """Return the blocks of a score record, or the blocks themselves."""
    return scores.blocks if isinstance(scores, Scores) else tuple(scores)


def record_of(scores: Scores | Sequence[Block]) -> Scores | None:
    """Return the score record, where there is one."""
    return scores if isinstance(scores, Scores) else None


def matching(blocks: Sequence[Block], pattern: str) -> list[int]:
    """Return the indices of the blocks with this name, or else of those that the regular expression finds (one at least)."""
    names = [b.name for b in blocks]
    try:
        indices = [i for i, n in enumerate(names) if n == pattern] or [i for i, n in enumerate(names) if re.search(pattern, n)]
    except re.error as error:
        raise InvalidInput(f"{pattern!r} is not a regular expression ({error}).", "", "Correct it.") from error
    if not indices:
        raise UnknownBlock(f"No block matches {pattern!r}.", f"The blocks are {', '.join(names[:3])}, ...", "Correct the name.")
    return indices


def make_plan(
    scores: Scores | Sequence[Block],
    kind: str,
    rule: str,
    decision: RuleResult,
    counts: np.ndarray,
    budget: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
) -> Plan:
    """Return the plan of a decision with its whole numbers.

    Args:
        scores: The scores, or blocks alone for a rule that reads none.
        kind: Of the plan.
        rule: Its name.
        decision: What the rule decided.
        counts: Whole numbers of every block, ``(K,)``.
        budget: What the plan records of its budget.
        hyperparameters: Recorded as they are.

    Raises:
        InvalidInput: The scores are damages of formats.
    """
    record, solution = record_of(scores), decision.solution
    if record is not None and "formats" in record.extra:
        raise InvalidInput(
            f"These scores are damages of formats: they do not plan {kind}.",
            "",
            "Plan bits from them: layerbudget plan bits FILE.",
        )
    return Plan(
        kind=kind,
        rule=rule,
        model=dict(record.model) if record is not None else {},
        blocks=tuple(PlanBlock.of(b, v, c) for b, v, c in zip(blocks_of(scores), decision.value, counts, strict=True)),
        budget=dict(budget),
        hyperparameters=to_jsonable(dict(hyperparameters)),
        certificate=to_jsonable(solution.certificate()) if solution is not None else {},
        scores_digest=record.digest if record is not None else None,
        data=dict(record.data) if record is not None else {},
        payload=_payload(kind, rule, decision.payload),
    )


def _payload(kind: str, rule: str, said: Mapping[str, Any]) -> Any:
    """All that a rule says beside its blocks, as the payload of its kind of plan; a field that there is not is refused."""
    payload = DECISIONS.find(kind).Payload
    known = [field.name for field in dataclasses.fields(payload)]
    for name in said.keys() - set(known):
        what = f"The rule {rule} gave a field {name}."
        raise InvalidInput(what, f"A plan of {kind} has {', '.join(known)}.", "Leave it out of the payload.")
    return payload(**said)


def constants_of(**named: Any) -> dict[str, Any]:
    """Return the constants of a program that were given; the program has the defaults of the others."""
    return {name: value for name, value in named.items() if value is not None}


def recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a plan records them: functions by their name, constants of the programs where they were given."""
    return {k: getattr(v, "name", v) for k, v in options.items() if k != "curves" and not (k in _CONSTANTS and v is None)}
