r"""Attention heads: which ones go, judged at the matrix that reads them.

The output of a layer's attention is ``sum_h W_h x_h`` with ``W_h`` the columns of the output projection that belong to head h
and ``x_h`` its channels. Removing the heads outside a set S changes it by

    E(S) = min_V  E_x || W x - V x_S ||^2,     V = W H_{:S} H_{SS}^-1,     H = E[x x'],

the layer-wise objective of Wanda (arXiv 2306.11695) and SparseGPT (arXiv 2301.00774), taken at the output projection with whole
heads as the units. Three scores of one head G:

    wanda           sum_{j in G} ||W_j||^2 H_jj       no cross terms, no compensation
    uncompensated   tr(W_G H_GG W_G')                 exact without compensation
    obs             tr(W_G ([H^-1]_GG)^-1 W_G')       exact with compensation (optimal brain surgeon, for a group)
"""

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
from .attention import Attention, channels, expressible, find_attention, keep_heads, set_heads
from .mlp import check_layers
from .width import Remake, damped, kept, refitted

CRITERIA = ("obs", "uncompensated", "wanda")
UNITS = ("auto", "groups", "queries")
Progress = Callable[[int, int], None]


def head_scores(weight: torch.Tensor, h: torch.Tensor, members: Sequence[torch.Tensor], criterion: str) -> torch.Tensor:
    """What removing each unit alone costs, in the units of ``||W x||^2`` per token.

    Args:
        weight: ``(d_out, d)`` of the output projection.
        h: Second moments of its inputs, ``(d, d)``, positive definite.
        members: Channels of each unit.
        criterion: ``obs``, ``uncompensated`` or ``wanda``.

    Returns:
        Shape ``(units,)``.

    Raises:
        InvalidInput: Another criterion.

    >>> w, h = torch.tensor([[1.0, 1.0, 2.0, 0.0]]), torch.eye(4)
    >>> head_scores(w, h, [torch.tensor([0, 1]), torch.tensor([2, 3])], "obs").tolist()
    [2.0, 4.0]
    """
    _check_criterion(criterion)
    if criterion == "wanda":
        each = weight.square().sum(0) * h.diagonal()
        return torch.stack([each[g].sum() for g in members])
    inner = h if criterion == "uncompensated" else torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.stack([_cost(weight, inner, g, criterion) for g in members])


def _check_criterion(criterion: str) -> None:
    if criterion not in CRITERIA:
        raise InvalidInput(f"There is no criterion {criterion!r}.", f"Criteria are {', '.join(CRITERIA)}.", "Use obs.")


def _cost(weight: torch.Tensor, inner: torch.Tensor, group: torch.Tensor, criterion: str) -> torch.Tensor:
    w, block = weight[:, group], inner[group][:, group]
    return (w * (w @ block if criterion == "uncompensated" else torch.linalg.solve(block, w.T).T)).sum()


def choose_heads(
    weight: torch.Tensor, h: torch.Tensor, attention: Attention, units: int, *, by: str, criterion: str = "obs"
) -> torch.Tensor:
    """Query heads that stay when ``units`` units go.

    With ``obs`` the units go one after the other and costs are updated after every removal, so that of two copies one
    stays. ``by="groups"``: a unit is a key-value head with its query heads. ``by="queries"``: a unit is one query head
    of every group (not the same one), so that groups stay equally large.

    Args:
        weight: ``(d_out, heads * head_dim)``.
        h: Second moments of the channels, positive definite.
        attention: The layer's heads.
        units: How many units go.
        by: ``groups`` or ``queries``.
        criterion: See :func:`head_scores`.

    Returns:
        Indices of the query heads that stay, increasing.
    """
    per, heads = attention.per_group, torch.arange(attention.heads, device=h.device)
    items = list(heads.split(per)) if by == "groups" else list(heads.split(1))
    members = [channels(i, attention.head_dim) for i in items]
    quota = {0: units} if by == "groups" else dict.fromkeys(range(attention.groups), units)
    pool = [0 if by == "groups" else int(i[0]) // per for i in items]
    if criterion == "obs":
        gone = _one_by_one(weight, h, members, pool, quota)
    else:
        order = torch.argsort(head_scores(weight, h, members, criterion), stable=True).tolist()
        gone = {i for i in order if [j for j in order if pool[j] == pool[i]].index(i) < quota[pool[i]]}
    return torch.cat([heads[:0], *(item for i, item in enumerate(items) if i not in gone)])


def _one_by_one(
    weight: torch.Tensor, h: torch.Tensor, members: Sequence[torch.Tensor], pool: Sequence[int], quota: Mapping[int, int]
) -> set[int]:
    inverse, work = torch.cholesky_inverse(torch.linalg.cholesky(h)), weight.clone()
    left, gone = dict(quota), set[int]()
    while any(left.values()):
        able = [i for i in range(len(members)) if i not in gone and left[pool[i]]]
        costs = [float(_cost(work, inverse, members[i], "obs")) for i in able]
        best = able[min(range(len(able)), key=costs.__getitem__)]
        g = members[best]
        factor = torch.linalg.solve(inverse[g][:, g], inverse[g])
        work -= work[:, g] @ factor
        inverse = inverse - inverse[:, g] @ factor
        inverse[g, g] = 1.0
        gone.add(best)
        left[pool[best]] -= 1
    return gone


def unit_of(attention: Attention, by: str) -> str:
    """``groups`` or ``queries``; ``auto`` takes whole groups where there are several.

    Raises:
        InvalidInput: Another word.
    """
    if by not in UNITS:
        raise InvalidInput(f"Heads cannot be removed by {by!r}.", f"Units are {', '.join(UNITS)}.", "Use auto.")
    return by if by != "auto" else ("groups" if attention.groups > 1 else "queries")


def cut_heads(
    model: nn.Module, attention: Attention, gram: torch.Tensor, units: int, *, by: str, criterion: str = "obs",
    remake: Remake = refitted, damping: float = 0.01,
) -> Attention:  # fmt: skip
    """Take units out of one layer, given ``sum x x'`` of the output projection's inputs (upper triangle), in place."""
    if units == 0:
        return attention
    h = damped(gram, damping)
    weight = matrix_of(model.get_submodule(attention.consumer)).double()
    keep = choose_heads(weight, h, attention, units, by=by, criterion=criterion)
    columns = channels(keep, attention.head_dim)
    return keep_heads(model, attention, keep, remake(weight, h, columns))


def remove_heads(
    model: nn.Module,
    data: CalibrationSet,
    fraction: float | Mapping[str, float],
    *,
    by: str = "auto",
    criterion: str = "obs",
    refit: bool = True,
    damping: float = 0.01,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Remove attention heads, in place; the output projection is refitted by least squares on the calibration text.

    Args:
        model: The model.
        data: Calibration tokens.
        fraction: Share of the units that goes at most, for all layers or per layer name; rounded down to whole units.
        by: ``groups`` (key-value heads with their query heads), ``queries`` (query heads, equally many per group) or ``auto``.
        criterion: See :func:`head_scores`.
        refit: Replace the kept columns by ``W H_{:S} H_{SS}^-1``; else they stay as they are.
        damping: Relative to the mean of H's diagonal.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).

    Returns:
        ``{layer: query heads left}``. The config follows when all layers have equally many and it can say so.

    Raises:
        UnknownStructure: A layer whose heads cannot be taken out.
        UnknownBlock: A fraction for a layer that the model does not have.
        InvalidInput: A fraction outside [0, 1), or an unknown criterion or unit.
    """
    _check_criterion(criterion)
    found = {name: find_attention(layer, name) for name, layer in layers(model)}
    check_layers(fraction, found)
    whole = list(found.values())
    share = {n: fraction.get(n, 0.0) if isinstance(fraction, Mapping) else fraction for n in found}
    units = {n: _units(a, share[n], unit_of(a, by)) for n, a in found.items()}
    with inference(model):
        walk = Walk(model, data, batch_size=batch_size)
        walk.capture()
        for i, (name, a) in enumerate(found.items()):
            walk.position = i
            if units[name]:
                gram = gram_of(model, walk, a.consumer, a.heads * a.head_dim)
                found[name] = cut_heads(
                    model,
                    a,
                    gram,
                    units[name],
                    by=unit_of(a, by),
                    criterion=criterion,
                    damping=damping,
                    remake=refitted if refit else kept,
                )
            walk.advance()
            if progress:
                progress(i + 1, len(found))
        walk.close()
    follow_heads(model, whole, list(found.values()))
    return {n: a.heads for n, a in found.items()}


def _units(attention: Attention, fraction: float, by: str) -> int:
    if not (isinstance(fraction, int | float) and math.isfinite(fraction) and 0 <= fraction < 1):
        raise InvalidInput(f"The fraction is {fraction}.", "It must lie in [0, 1).", "Give 0.25, for example.")
    there = attention.groups if by == "groups" else attention.per_group
    return min(math.floor(there * fraction + 1e-9), there - 1)


def follow_heads(model: nn.Module, before: Sequence[Attention], after: Sequence[Attention]) -> None:
    """Write the head counts into the config where they changed, all layers have the same and the config can say so."""
    old, new = ([(a.heads, a.groups, a.head_dim) for a in found] for found in (before, after))
    if old != new and len(set(new)) == 1 and expressible(model, after[0]) is None:
        config = text_config(config_of(model))
        kind = type(config)
        set_heads(config, after[0])
        for a in after:
            owner = model.get_submodule(a.owner)
            if type(getattr(owner, "config", None)) is kind:
                owner.config = config
