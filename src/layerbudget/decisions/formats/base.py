"""A decision that gives formats: what is alike for weights, for a cache, and for both. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...compressors.formats import find_format, find_runtime
from ...decision import Decision
from ...errors import CorruptFile, InvalidInput
from ...gguf.names import split_stacks
from ...plan import Plan, PlanBlock, payload_of
from ...scores import Scores
from .payload import FormatsPayload, WeightsPayload
from .reasons import reasons, types_of_blocks

AGAIN = "Make the plan again"
_KEEP = f"{AGAIN}: its --keep REGEX=FORMAT gives matrices a format."


class FormatsDecision(Decision):
    """A decision whose plans give every block a format, by the damage that each format does."""

    predicts = True
    from_gains = False

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not give every matrix a format."""
        formats = payload_of(plan, FormatsPayload).formats
        for block in plan.blocks:
            missing = [name for name in block.modules or (block.name,) if name not in formats]
            if missing:
                raise CorruptFile(
                    f"This plan of {plan.kind} gives {missing[0]} no format.", "Every one has its own.", f"{AGAIN}."
                )
        extra = set(formats) - set(plan.by_module())
        if extra:
            what = f"This plan of {plan.kind} gives a format to {min(extra)}, which is in none of its blocks."
            raise CorruptFile(what, "", f"{AGAIN}.")

    def labels(self, plan: Plan) -> list[str] | None:
        """Return the format of every block."""
        return types_of_blocks(plan)

    def matrices(self, plan: Plan, scores: Scores | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the format of every block, and why it has that, see :func:`~layerbudget.decisions.formats.reasons.reasons`."""
        return super().matrices(plan, scores) or reasons(plan)


def check_weights(plan: Plan, blocks: Sequence[PlanBlock]) -> None:
    """Refuse formats that the runtime of a plan does not read, and such as cannot take the bytes of their block.

    Args:
        plan: A plan that gives formats to weights, all of which it names.
        blocks: Its blocks of weights.

    Raises:
        CorruptFile: One of them.
    """
    payload = payload_of(plan, WeightsPayload)
    try:
        target = find_runtime(payload.runtime, payload.family)
    except InvalidInput as error:
        raise CorruptFile(f"This plan of {plan.kind} cannot be followed. {error.what}", error.feasible, f"{AGAIN}.") from error
    for block in blocks:
        for name in block.modules:
            try:
                form = target.check(find_format(payload.formats[name], payload.family))
            except InvalidInput as error:
                what = f"This plan of {plan.kind} gives {name} the format {payload.formats[name]}. {error.what}"
                raise CorruptFile(what, error.feasible, _KEEP) from error
        tensors = sum(split_stacks(name, 2) for name in block.modules)
        if not form.can_take(block.count, block.numel, tensors):
            what = (
                f"{block.name} has the format {form.name} in this plan, and {block.count:,} bytes for {block.numel:,} weights"
            )
            raise CorruptFile(f"{what}: they contradict each other.", "", _KEEP)
