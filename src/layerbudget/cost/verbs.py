"""Parts of verbs that no decision has for itself: training, comparing and certifying."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .sizes import Text
from .work import WORK, WorkItem, scoring, treating


def certifying(curvature: str, text: Text, blocks: int, dampings: int) -> list[WorkItem]:
    """Parts of ``explain certify``: loss and gradient of every block, then three Hessian products and a loss of every damping.

    A product counts seven forwards. Curvatures other than ``fisher`` solve for the steps, at the price of their scores.
    """
    solved = [] if curvature == "fisher" else [WorkItem(curvature, text, WORK[curvature].each * blocks * (1 + dampings))]
    return [WorkItem("direct check", text, blocks * (4.0 + 22.0 * dampings)), *solved]


def training(text: Text, epochs: float, seeds: int, held_out: int) -> list[WorkItem]:
    """Parts of ``finetune``: every row once per epoch, held-out rows after each seed."""
    judged = WorkItem("forward", dataclasses.replace(text, samples=held_out), times=seeds)
    return [WorkItem("train", text, times=epochs * seeds), *([judged] if held_out else [])]


def comparing(text: Text, held_out: Text, scores: Sequence[str], method: str, *, seeds: int, plans: int) -> list[WorkItem]:
    """Parts of ``compare`` on text: every score once per seed; every plan applied and measured.

    Args:
        text: The calibration text.
        held_out: The text that the plans are measured on.
        scores: Estimators.
        method: The pruner.
        seeds: How many seeds.
        plans: How many plans are applied and measured.
    """
    known = [(part, seeds) for name in scores for part in scoring(name, text)]
    applied = [(part, plans) for part in (*treating(method, text), WorkItem("forward", held_out))]
    return [dataclasses.replace(part, times=part.times * count, resident=True) for part, count in (*known, *applied)]
