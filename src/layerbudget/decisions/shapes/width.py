"""Width: inner units of the MLPs go, the layer after them is refitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.inputs import gram_of
from ...execution.modes import inference
from ...execution.walk import Walk
from ...models.blocks import config_of, layers, matrix_of, text_config
from .mlp import Mlp, check_layers, find_mlp, keep_units, set_width, undescribed

Progress = Callable[[int, int], None]
Remake = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (W, H, S) -> (d_out, kept)


def narrow(
    model: nn.Module,
    data: CalibrationSet,
    fraction: float | Mapping[str, float],
    *,
    multiple: int = 8,
    damping: float = 0.01,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Remove inner units of the MLPs, in place; the layer after them is refitted by least squares on the calibration text.

    With ``H`` the second moments of the inner units, unit j costs ``||W_j||^2 / [H^-1]_jj`` (the optimal brain surgeon);
    the kept set S gets ``W' = W H_{:S} H_{SS}^-1``. Sizes of the matrices shrink, and with them file, memory and time.

    Args:
        model: The model.
        data: Calibration tokens.
        fraction: Share of the units that goes, for all layers or per layer name.
        multiple: Widths are rounded up to a multiple of this.
        damping: Relative to the mean of H's diagonal.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Returns:
        ``{layer: width}``. The config follows when all widths are equal.

    Raises:
        UnknownStructure: A layer without a plain MLP (mixtures of experts).
        UnknownBlock: A fraction for a layer that the model does not have.
        InvalidInput: A fraction outside [0, 1).
    """
    found = {name: find_mlp(layer, name) for name, layer in layers(model)}
    check_layers(fraction, found)
    widths = {
        n: _width(m, fraction.get(n, 0.0) if isinstance(fraction, Mapping) else fraction, multiple) for n, m in found.items()
    }
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        walk.capture()
        for i, (name, mlp) in enumerate(found.items()):
            if widths[name] < mlp.width:
                cut_units(model, mlp, gram_of(model, walk, mlp.consumer, mlp.width), widths[name], damping)
            walk.position = i
            walk.advance()
            if progress:
                progress(i + 1, len(found))
        walk.close()
    follow_width(model, [m.width for m in found.values()], list(widths.values()))
    return widths


def follow_width(model: nn.Module, before: Sequence[int], after: Sequence[int]) -> None:
    """Write the width into the config where it changed, all layers have the same and the config can say so."""
    if len(set(after)) == 1 and list(before) != list(after) and undescribed(model, before[0], after[0]) is None:
        set_width(text_config(config_of(model)), before[0], after[0])


def _width(mlp: Mlp, fraction: float, multiple: int) -> int:
    if not (isinstance(fraction, int | float) and 0 <= fraction < 1 and math.isfinite(fraction)):
        raise InvalidInput(f"The fraction is {fraction}.", "It must lie in [0, 1).", "Give 0.25, for example.")
    return min(mlp.width, max(multiple, multiple * math.ceil(mlp.width * (1 - fraction) / multiple - 1e-9)))


def cut_units(
    model: nn.Module, mlp: Mlp, upper: torch.Tensor, width: int, damping: float = 0.01, remake: Remake | None = None
) -> None:
    """Shrink one MLP to ``width`` units, given ``sum x x'`` of its inner units (upper triangle), in place."""
    h = damped(upper, damping)
    weight = matrix_of(model.get_submodule(mlp.consumer)).double()
    keep = obs_solver(weight, h, width)
    keep_units(model, mlp, keep, (remake or refitted)(weight, h, keep))


def damped(upper: torch.Tensor, damping: float) -> torch.Tensor:
    """Second moments in full and in double precision, ``damping`` times the mean of their diagonal added to it."""
    h = (upper.triu() + upper.triu(1).T).double()
    h.diagonal().add_(damping * float(h.diagonal().mean()) + 1e-12)
    return h


def kept(weight: torch.Tensor, h: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """``W_S``: the columns that stay, as they are."""
    return weight[:, keep]


def refitted(weight: torch.Tensor, h: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """``W H_{:S} H_{SS}^-1``: the columns that stay do what they can of those that go, ``(d_out, kept)``."""
    return torch.linalg.solve(h[keep][:, keep], h[keep] @ weight.T).T


def obs_solver(weight: torch.Tensor, h: torch.Tensor, width: int) -> torch.Tensor:
    """Indices of the units that stay, increasing: those that :func:`removal_order` has not taken.

    Args:
        weight: ``(d_out, d)``.
        h: Second moments of the units, ``(d, d)``, positive definite.
        width: How many stay.
    """
    alive = torch.ones(len(h), dtype=torch.bool, device=h.device)
    alive[removal_order(weight, h, len(h) - width)] = False
    return torch.nonzero(alive).flatten()


def removal_order(weight: torch.Tensor, h: torch.Tensor, count: int) -> torch.Tensor:
    """So many units in the order in which they go: one after the other, each time the one that costs least.

    Costs are updated after every removal (of a few units at once above 1024), so that of two copies one stays. The units of a
    smaller count are the first of a larger one's.

    Args:
        weight: ``(d_out, d)``.
        h: Second moments of the units, ``(d, d)``, positive definite.
        count: How many go.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    work, alive = weight.clone(), torch.ones(len(h), dtype=torch.bool, device=h.device)
    chunk, order = max(1, len(h) // 1024), [torch.zeros(0, dtype=torch.long, device=h.device)]
    while (left := count - sum(map(len, order))) > 0:
        cost = (work.square().sum(0) / inverse.diagonal()).masked_fill(~alive, math.inf)
        gone = torch.topk(cost, min(chunk, left), largest=False).indices
        factor = torch.linalg.solve(inverse[gone][:, gone], inverse[gone])
        work -= work[:, gone] @ factor
        inverse = inverse - inverse[:, gone] @ factor
        alive[gone] = False
        inverse.diagonal()[gone] = 1.0
        order.append(gone)
    return torch.cat(order)
