"""What a plan of bits gives every matrix. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import InvalidInput
from ...kinds import check_kind
from ...plan import Plan


def formats_of_plan(plan: Plan) -> Mapping[str, str]:
    """Format of every matrix.

    Raises:
        InvalidInput: A plan of another kind, or one that names no formats.
    """
    formats = plan.extra.get("formats")
    check_kind(plan.kind, ("bits",), "gives no formats")
    if not isinstance(formats, Mapping) or set(formats) != set(plan.by_module()):
        raise InvalidInput(
            "The plan of bits does not name the format of every matrix.", "", "Make it again: layerbudget plan bits."
        )
    return {str(k): str(v) for k, v in formats.items()}
