"""FLAP (arXiv 2312.11983), written again for the comparison: a score, a global allocation and a bias instead of a search.

Score of a channel of the matrix that reads the units: the variance of its input times the squared norm of its column. Scores are
standardised within every layer's attention and MLP, and the lowest go first, over the whole model, until enough is saved. What a
removed channel gave on average goes into a bias. One forward. A head has the mean score of its channels, and one of every group
goes at a time, as everywhere in this comparison.
"""

from __future__ import annotations

import torch
from torch import nn

from layerbudget.decisions.shapes.layouts import FIND, Attention
from layerbudget.decisions.shapes.units import find_parts
from layerbudget.models.blocks import layers, matrix_of


def moments(model, data, names):
    """Mean and variance of the inputs of some matrices, one forward."""
    sums = {n: [0.0, 0.0, 0] for n in names}

    def see(name):
        def hook(module, arguments):
            x = arguments[0].flatten(0, 1).double()
            held = sums[name]
            held[0], held[1], held[2] = held[0] + x.sum(0), held[1] + x.square().sum(0), held[2] + len(x)

        return hook

    handles = [model.get_submodule(n).register_forward_pre_hook(see(n)) for n in names]
    with torch.no_grad():
        for batch in data.batches(8, next(model.parameters()).device):
            model(**batch)
    for handle in handles:
        handle.remove()
    return {n: (s / k, q / k - (s / k) ** 2) for n, (s, q, k) in sums.items()}


def units_of(where, score, multiple):
    """Channels of every unit in the order in which they go, and the unit's score."""
    if not isinstance(where, Attention):
        order = torch.argsort(score)
        pieces = [order[i : i + multiple] for i in range(0, len(order) - multiple + 1, multiple)]
        return [(p, float(score[p].mean())) for p in pieces]
    heads = score.view(where.heads, where.head_dim).mean(1).view(where.groups, where.per_group)
    order = heads.argsort(1)
    found = []
    for step in range(where.per_group):
        gone = torch.arange(where.groups) * where.per_group + order[:, step]
        found.append((gone, float(heads.gather(1, order[:, step : step + 1]).mean())))
    return found


def cut_by_fluctuation(model, data, target, *, multiple=8, cap=0.75):
    """Remove units in place until at least ``target`` FLOPs per token are saved; what was saved."""
    parts = {p.name: p for p in find_parts(model, by="queries", multiple=multiple) if p.kind != "rest"}
    wheres = {}
    for name, layer in layers(model):
        wheres |= {f"{name}.{kind}": find(layer, name) for kind, find in FIND.items()}
    seen = moments(model, data, [w.consumer for w in wheres.values()])
    queue = []
    for name, where in wheres.items():
        weight = matrix_of(model.get_submodule(where.consumer)).double()
        score = seen[where.consumer][1] * weight.square().sum(0)
        score = (score - score.mean()) / score.std()
        most = min(int(cap * parts[name].units), parts[name].units - 1)
        queue += [(value, name, gone) for gone, value in units_of(where, score, multiple)[:most]]
    saved, chosen = 0.0, {}
    for _, name, gone in sorted(queue, key=lambda q: q[0]):
        if saved >= target:
            break
        chosen.setdefault(name, []).append(gone)
        saved += 2 * parts[name].unit_parameters
    for name, pieces in chosen.items():
        _cut(model, wheres[name], torch.cat(pieces), seen[wheres[name].consumer][0])
    return saved


def _cut(model, where, gone, mean):
    module = model.get_submodule(where.consumer)
    weight = matrix_of(module).double()
    count = where.heads if isinstance(where, Attention) else where.width
    keep = torch.tensor(sorted(set(range(count)) - set(gone.tolist())))
    columns = where.columns(keep)
    lost = torch.ones(weight.shape[1], dtype=torch.bool)
    lost[columns] = False
    bias = (weight[:, lost] @ mean[lost]).to(module.weight.dtype)
    where.cut(model, keep)
    module.bias = nn.Parameter(bias if module.bias is None else module.bias + bias)
