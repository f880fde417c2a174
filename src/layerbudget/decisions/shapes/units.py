r"""Which units of a layer go, judged at the matrix that reads them, and how many of them can.

The output of a layer's attention, or MLP, is ``sum_u W_u x_u`` with ``W_u`` the columns of its last matrix that belong to unit
u (a head; an inner channel) and ``x_u`` their inputs. Removing the units outside a set S changes it by

    E(S) = min_V  E_x || W x - V x_S ||^2,     V = W H_{:S} H_{SS}^-1,     H = E[x x'],

the layer-wise objective of Wanda (arXiv 2306.11695) and SparseGPT (arXiv 2301.00774) with whole units. One unit G costs
``tr(W_G ([H^-1]_GG)^-1 W_G')`` (optimal brain surgeon, for a group); units go one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InvalidInput, UnknownStructure
from ...execution.panels import symmetric
from ...models.blocks import layers, matrix_of, partition
from ...records import Block, Module
from .layouts import FIND, Attention, Where, find_attention, find_mlp, per_unit
from .program import KINDS, NEITHER, OTHER_KIND, UNITS, PrunablePart

_LATE = 64  # channels that go before the matrices follow
Remake = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (W, H, S) -> (d_out, kept)


def find_parts(
    model: nn.Module,
    *,
    kinds: Sequence[str] = KINDS,
    by: str = "auto",
    multiple: int = 8,
    prices: Mapping[str, int] | None = None,
    able: Callable[[str], bool] = lambda kind: True,
) -> list[PrunablePart]:
    """Return the attention, MLP and other matrices of every layer, in order, with the units that they can lose.

    Args:
        model: The model; only its structure is read.
        kinds: ``heads``, ``mlp`` or both; a layer that lacks one of them is refused.
        by: Units of heads: ``groups`` (key-value heads with their query heads), ``queries`` (one query head of every group) or
            ``auto``.
        multiple: Channels of one MLP unit; a remainder always stays.
        prices: Those of :meth:`layerbudget.decisions.shapes.speed.Speed.prices`, where latency is saved.
        able: Whether a kind can be planned. A refusal advises the other kind where all layers have it and it is able.
    """
    if not isinstance(multiple, int) or multiple < 1:
        raise InvalidInput(f"multiple is {multiple}.", "It must be a whole number of at least 1.", "Use 8.")
    blocks, parts = {b.name: b for b in partition(model)}, list[PrunablePart]()
    for name, layer in layers(model):
        left = {m.name: m for m in blocks[name].modules}
        for kind, find in FIND.items():
            try:
                where = find(layer, name)
            except UnknownStructure as error:
                if kind in kinds:
                    raise UnknownStructure(error.what, error.feasible, other_kind(model, kind, able)) from error
                continue
            mine = [left.pop(n) for n in (*where.producers, where.consumer)]
            units = _units(where, mine, by, multiple)
            parts.append(_part(name, kind, mine, **units, **_priced(where, units["by"], prices)))
        if left:
            parts.append(_part(name, "rest", list(left.values())))
    widths = [p.units for p in parts if p.kind == "mlp"] if "mlp" in kinds else []
    if widths and max(widths) == 0:
        widest = max(find_mlp(layer, name).width for name, layer in layers(model))
        raise InvalidInput(
            f"multiple is {multiple}, and no MLP has as many channels.",
            f"The widest has {widest} channels, and one unit of it stays.",
            f"Use {min(8, max(1, widest // 2))}.",
        )
    return parts


def other_kind(model: nn.Module, kind: str, able: Callable[[str], bool]) -> str:
    """The remedy where parts of a kind cannot go: the other kind, where all layers have it and it is ``able``."""
    other = "mlp" if kind == "heads" else "heads"
    try:
        for name, layer in layers(model):
            FIND[other](layer, name)
    except UnknownStructure:
        return NEITHER
    return OTHER_KIND[kind] if able(other) else NEITHER


def _part(layer: str, kind: str, modules: Sequence[Module], **units: Any) -> PrunablePart:
    block = Block(name=layer, modules=tuple(modules))
    names = tuple(m.name for m in modules)
    sizes: dict[str, Any] = {"parameters": block.numel, "flops": block.flops_per_token, "modules": names}
    return PrunablePart(name=f"{layer}.{kind}", layer=layer, kind=kind, **sizes, **units)


def _units(where: Where, modules: Sequence[Module], by: str, multiple: int) -> dict[str, Any]:
    if not isinstance(where, Attention):
        each = sum(m.d_in * where.stacked for m in modules[:-1]) + modules[-1].d_out
        by = f"{multiple} channels"
        return {"by": by, "units": where.units(by), "unit_parameters": each * multiple}
    by, d_in = unit_of(where, by), modules[0].d_in
    queries = (where.per_group if by == "groups" else where.groups) * where.head_dim
    keys = 2 * d_in * where.head_dim if by == "groups" else 0
    return {"by": by, "units": where.units(by), "unit_parameters": (d_in + modules[-1].d_out) * queries + keys}


def _priced(where: Where, by: str, prices: Mapping[str, int] | None) -> dict[str, int]:
    """Cost of a part and of a unit of it; the layer's own price lies with its heads, which never go alone."""
    if prices is None:
        return {}
    left = where.without(1, by)
    if isinstance(where, Attention) and isinstance(left, Attention):
        each, now, then = prices["attention"], where.heads + where.groups, left.heads + left.groups
        return {"price": prices["layer"] + each * now, "unit_price": each * (now - then)}
    return {"price": prices["channel"] * where.inputs, "unit_price": prices["channel"] * (where.inputs - left.inputs)}


def unit_of(attention: Attention, by: str) -> str:
    """``groups`` or ``queries``; ``auto`` takes whole groups where there are several."""
    if by not in UNITS:
        raise InvalidInput(f"Heads cannot be removed by {by!r}.", f"Units are {', '.join(UNITS)}.", "Use auto.")
    return by if by != "auto" else ("groups" if attention.groups > 1 else "queries")


def head_units(model: nn.Module, kinds: Sequence[str], by: str) -> tuple[str, ...]:
    """Units of heads to plan with: both, where ``auto`` leaves the choice and grouped queries offer one."""
    if by != "auto" or "heads" not in kinds:
        return (by,)
    name, layer = layers(model)[0]
    a = find_attention(layer, name)
    return ("groups", "queries") if a.groups > 1 and a.per_group > 1 else (unit_of(a, by),)


def where_is(model: nn.Module, part: PrunablePart) -> Where:
    """The matrices of a part, as they are now."""
    return FIND[part.kind](model.get_submodule(part.layer), part.layer)


def stays(where: Where, weight: torch.Tensor, h: torch.Tensor, units: Sequence[int], by: str) -> dict[int, torch.Tensor]:
    """Query heads, or channels of the MLP, that stay when so many units go, by that number; increasing.

    Units go one after the other and costs are updated after every removal, so that of two copies one stays. ``weight`` is of
    the matrix that reads them, ``(d_out, channels)``; ``h`` has the second moments of its inputs.
    """
    if isinstance(where, Attention):
        return {u: _heads_that_stay(where, weight, h, u, by) for u in units}
    each = per_unit(by)
    order = removal_order(weight, h, max(units, default=0) * each)
    return {u: _without(len(h), order[: u * each]) for u in units}


def _without(count: int, gone: torch.Tensor) -> torch.Tensor:
    alive = torch.ones(count, dtype=torch.bool, device=gone.device)
    alive[gone] = False
    return torch.nonzero(alive).flatten()


def _heads_that_stay(a: Attention, weight: torch.Tensor, h: torch.Tensor, units: int, by: str) -> torch.Tensor:
    """One unit after the other, each the cheapest in the model as it has become; equally many of every group."""
    items = list(torch.arange(a.heads, device=h.device).split(a.per_group if by == "groups" else 1))
    members = [a.columns(i) for i in items]
    pool = [0 if by == "groups" else int(i[0]) // a.per_group for i in items]
    left, gone = dict.fromkeys(pool, units), list[int]()
    inverse, work = torch.cholesky_inverse(torch.linalg.cholesky(h)), weight.clone()
    while any(left.values()):
        able = [i for i in range(len(items)) if i not in gone and left[pool[i]]]
        best = min(able, key=lambda i: float(group_cost(work, inverse, members[i])))
        work, inverse = _removed(work, inverse, members[best])
        gone.append(best)
        left[pool[best]] -= 1
    return torch.cat([items[0][:0], *(item for i, item in enumerate(items) if i not in gone)])


def group_cost(weight: torch.Tensor, inverse: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """``tr(W_G ([H^-1]_GG)^-1 W_G')``: what removing some channels costs, in the units of ``||W x||^2`` per token.

    >>> float(group_cost(torch.tensor([[1.0, 1.0, 2.0, 0.0]]), torch.eye(4), torch.tensor([0, 1])))
    2.0
    """
    w, block = weight[:, group], inverse[group][:, group]
    return (w * torch.linalg.solve(block, w.T).T).sum()


def _removed(work: torch.Tensor, inverse: torch.Tensor, gone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The refitted weight and the inverse moments without some channels, whose own are set to one."""
    factor = torch.linalg.solve(inverse[gone][:, gone], inverse[gone])
    work = work - work[:, gone] @ factor
    inverse = inverse - inverse[:, gone] @ factor
    inverse.diagonal()[gone] = 1.0
    return work, inverse


def removal_order(weight: torch.Tensor, h: torch.Tensor, count: int) -> torch.Tensor:
    """So many channels in the order in which they go: one after the other, each time the one that costs least.

    A removal takes ``u u'`` from the inverse moments and ``b u' + u b'`` from ``W' W``. The costs of all channels follow at
    once, these matrices after every few removals, so that most of the work is products of matrices.
    """
    inverse, gram = torch.cholesky_inverse(torch.linalg.cholesky(h)), weight.T @ weight
    alive, order = torch.arange(len(h), device=h.device), list[int]()
    while (left := min(_LATE, count - len(order))) > 0:
        us, bs = (h.new_zeros(len(alive), left) for _ in range(2))
        errors, scales = gram.diagonal().clone(), inverse.diagonal().clone()
        stays = torch.ones_like(alive, dtype=torch.bool)
        for k in range(left):
            best = int((errors / scales).masked_fill_(~stays, math.inf).argmin())
            u = inverse[best] - us[:, :k] @ us[best, :k]
            u /= u[best].sqrt()
            w = (gram[best] - bs[:, :k] @ us[best, :k] - us[:, :k] @ bs[best, :k]) / u[best]
            b = w - w[best] / u[best] / 2 * u
            us[:, k], bs[:, k] = u, b
            errors -= 2 * b * u
            scales -= u * u
            stays[best] = False
            order.append(int(alive[best]))
        us, bs, alive = us[stays], bs[stays], alive[stays]
        inverse = inverse[stays][:, stays].addmm_(us, us.T, alpha=-1)
        gram = gram[stays][:, stays].addmm_(us, bs.T, alpha=-1).addmm_(bs, us.T, alpha=-1)
    return torch.tensor(order, dtype=torch.long, device=h.device)


def damped(upper: torch.Tensor, damping: float) -> torch.Tensor:
    """Second moments in full and in double precision, ``damping`` times the mean of their diagonal added to it."""
    h = symmetric(upper)
    h.diagonal().add_(damping * float(h.diagonal().mean()) + 1e-12)
    return h


def refitted(weight: torch.Tensor, h: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """``W H_{:S} H_{SS}^-1``: the columns that stay do what they can of those that go, ``(d_out, kept)``."""
    return torch.linalg.solve(h[keep][:, keep], h[keep] @ weight.T).T


def cut(
    model: nn.Module, where: Where, gram: torch.Tensor, units: int, by: str, damping: float = 0.01, remake: Remake = refitted
) -> Where:
    """Take units out of one part of a layer, in place, and return where its matrices are then.

    Args:
        model: The model.
        where: The heads or the MLP.
        gram: ``sum x x'`` of the inputs of the matrix that reads the units, ``(d_in, d_in)``, upper triangle.
        units: How many go.
        by: Units of heads, as in :func:`find_parts`.
        damping: Relative to the mean of the diagonal of ``gram``.
        remake: Makes the matrix that reads the units anew from what stays.
    """
    h, weight = damped(gram, damping), matrix_of(model.get_submodule(where.consumer)).double()
    keep = stays(where, weight, h, [units], by)[units]
    return where.cut(model, keep, remake(weight, h, where.columns(keep)))
