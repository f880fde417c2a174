"""Whether the disk has room for a model that is about to be made."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...models.offload import mapped
from ...plan import Plan
from ...storage.writing import check_space

_SHARD = 1e9  # bytes of the largest file of a streamed model; otherwise the model may be one file
BESIDE = 1 << 22  # bytes of tokenizer, plan and receipt


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all distinct parameters and buffers as they are held."""
    held = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(held.values())


def check_room(model: nn.Module, out: Path | str, *, resume: Path | str | None = None, plan: Plan | None = None) -> None:
    """Refuse to make a checkpoint as large as this model where it could not be saved.

    A file is written twice while its metadata are added. A folder of parts holds the weights that the plan changes.

    Args:
        model: The model.
        out: Where its checkpoint will lie.
        resume: Where finished layers are kept meanwhile.
        plan: The plan, whose matrices those layers are.

    Raises:
        InvalidInput: Says what is needed and what is free.
    """
    size = weight_bytes(model)
    needs: dict[Path | str, float] = {out: size + min(size, _SHARD if mapped(model) is not None else size) + BESIDE}
    if resume is not None and plan is not None:
        parameters = next(iter(model.parameters()))
        kept = sum(f.stat().st_size for f in Path(resume).iterdir() if f.is_file()) if Path(resume).is_dir() else 0
        needs[resume] = max(0, int(plan.numel.sum()) * parameters.element_size() - kept)
    check_space(needs)
