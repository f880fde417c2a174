"""What a treatment returned is what it was asked for: shape, count, pattern, finite. Its caller looks, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CoverageError
from .base import Level, Treatment
from .select import by_groups

_ROUNDING = 10_000  # an update of 45 million weights in float32 ends at an exact zero about twice: one in so many may


def treated(
    treatment: Treatment, weight: torch.Tensor, prepared: Any, level: Level, options: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """What a matrix becomes, looked at before it is used.

    Args:
        treatment: Any.
        weight: ``(d_out, d_in)``.
        prepared: What the treatment prepared, see :meth:`Treatment.apply`.
        level: How far; with ``rows`` every group of rows goes its own way.
        options: Of the treatment.

    Returns:
        ``(d_out, d_in)``.

    Raises:
        CoverageError: Another shape, values that are not finite, another count of zeros, or a pattern that is not kept.
    """
    version, own = _version(weight), options or {}
    if level.rows is None:
        made = treatment.apply(weight, prepared, level, **own)
    else:
        made = treatment.apply_rows(weight, prepared, *level.rows, **own)
    if _version(weight) != version:
        raise _broken(
            treatment, "wrote into the matrix that it was given.", "It returns a new one.", "Begin with weight.clone()."
        )
    check(treatment, weight, made, level)
    return made


def check(treatment: Treatment, weight: torch.Tensor, made: Any, level: Level) -> None:
    """Refuse what a treatment made of a matrix where it is not what the level says; see :func:`treated`."""
    if not isinstance(made, torch.Tensor) or made.shape != weight.shape:
        seen = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise _broken(treatment, f"made {seen} of a matrix {tuple(weight.shape)}.", "The shape stays.", "Return (d_out, d_in).")
    if not bool(torch.isfinite(made.to(weight.dtype)).all()):
        raise _broken(
            treatment, f"made values that are not finite in {weight.dtype}.", "Weights are finite.",
            "Divide by no zero; of the package's own: use more calibration text, more damping, or float32.",
        )  # fmt: skip
    if level.format is not None or level.ratio is not None:
        return  # formats make zeros where they round to them; the references' counts are off by ties
    gone = made == 0
    if level.pattern is not None:
        _check_pattern(treatment, gone, *level.pattern)
    if level.rows is not None:
        size, wanted = level.rows
        held = by_groups(gone.sum(1)[:, None], size, 0).sum(1).cpu().numpy()
        if (held < wanted).any():
            g = int((held < wanted).argmax())
            raise _count(
                treatment,
                int(held[g]),
                int(wanted[g]),
                f"the {size} rows from {g * size}",
                "exactly zeros[g] entries of group g",
            )
    found, most = int(gone.sum()), level.zeros + 1 + weight.numel() // _ROUNDING
    if found < level.zeros:
        raise _count(treatment, found, level.zeros, "a matrix", "exactly level.zeros entries")
    if level.pattern is None and found > most and int((gone & (weight != 0)).sum()) > most:
        raise _count(treatment, found, level.zeros, "a matrix", "exactly level.zeros entries")


def _check_pattern(treatment: Treatment, gone: torch.Tensor, zeroed: int, group: int) -> None:
    short = int((gone.reshape(-1, group).sum(1) < zeroed).sum())
    if short:
        raise _broken(
            treatment, f"left {short} of {gone.numel() // group} groups of {group} inputs with fewer than {zeroed} zeros.",
            f"The pattern {zeroed}:{group} is level.pattern of apply.",
            "Mark them with treatments.select.smallest_per_group(scores, *level.pattern), or leave the pattern out.",
        )  # fmt: skip


def _count(treatment: Treatment, found: int, wanted: int, where: str, what: str) -> CoverageError:
    return _broken(
        treatment, f"left {found} zeros in {where}, {wanted} were asked for.", "The count is exact.", f"Zero {what}, no others."
    )


def _broken(treatment: Treatment, what: str, feasible: str, remedy: str) -> CoverageError:
    return CoverageError(f"The method {treatment.name} {what}", feasible, remedy)


def _version(weight: torch.Tensor) -> int:
    """Counts what was written into a tensor, where torch counts it."""
    return 0 if weight.is_inference() else weight._version
