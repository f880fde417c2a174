"""What the released MLP script does with its scores: allocation agreement, sensitivity, exact-budget pruning.

The script's bisections are the programs of :mod:`layerbudget.solvers` under unit costs, the paper's block form and literal
units, so they are solved here exactly. gamma is calibrated by the script's formula, once, on the direct gain.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from layerbudget.solvers import allocate, sparsify
from layerbudget.solvers.published import apportion

from .mlp_released import SeedRun, accuracy, linears
from .mlp_scores import EPSILON

EXPERTS = 20
GRID = {"alpha": (0.25, 0.5, 1.0), "beta": (0.5, 1.0, 2.0), "gamma_scale": (0.5, 1.0, 2.0)}
TARGETS = (0.3, 0.5, 0.7)
CAP = 0.95


def calibrated_gamma(q: np.ndarray, budget: float, *, alpha: float = 0.5, beta: float = 1.0) -> float:
    """The gamma at which the median block would like 1.25 times its equal share: the script's way to make the budget bind."""
    wish = 1.25 * budget / len(q)
    return float(np.median((wish + 1.0) * alpha / np.maximum(q, EPSILON) ** beta))


def allocation(q: np.ndarray, gamma: float, *, alpha: float = 0.5, beta: float = 1.0, budget: float = EXPERTS) -> np.ndarray:
    """Continuous experts per block under unit costs, shape ``(K,)``."""
    solved = allocate(
        q, 1.0, budget, exponent=beta, exponent_on="block", alpha=alpha, gamma=gamma, spend="at_most", units="literal"
    )
    return solved.value


def whole(value: np.ndarray, total: int = EXPERTS) -> np.ndarray:
    """Largest remainders, shape ``(K,)``."""
    return apportion(value, total, minimum=0)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """``sum |a - b| / sum |a|``."""
    return float(np.abs(a - b).sum() / (np.abs(a).sum() + EPSILON))


def overlap(a: np.ndarray, b: np.ndarray, m: int = 3) -> float:
    """Share of the m largest that two vectors have in common."""
    return len(set(np.argsort(-a)[:m]) & set(np.argsort(-b)[:m])) / m


def agreement(run: SeedRun) -> list[dict[str, Any]]:
    """How near the allocation by a proxy, or without scores, comes to the allocation by the direct gain."""
    rows = []
    k = len(run.counts)
    rng = np.random.default_rng(run.seed)
    free = {"uniform": np.ones(k), "random": rng.random(k), "parameters": run.counts}
    for tau, q in run.direct.items():
        if q is None:
            continue
        gamma = calibrated_gamma(q, EXPERTS)
        best = allocation(q, gamma)
        for name, by_tau in run.proxies.items():
            found = allocation(by_tau[tau], gamma)
            rows.append({
                "seed": run.seed, "tau": tau, "by": name, "continuous": difference(best, found),
                "integer": difference(whole(best), whole(found)), "top3": overlap(whole(best), whole(found)),
            })  # fmt: skip
        for name, share in free.items():
            there = whole(share)
            rows.append({
                "seed": run.seed, "tau": tau, "by": name, "continuous": None, "integer": difference(whole(best), there),
                "top3": overlap(whole(best), there),
            })  # fmt: skip
    return rows


def sensitivity(run: SeedRun, tau: float = 1e-2) -> list[dict[str, Any]]:
    """How far alpha, beta and gamma move the allocation by the direct gain."""
    q = run.direct[tau]
    if q is None:
        return []
    best = whole(allocation(q, calibrated_gamma(q, EXPERTS)))
    rows = []
    for alpha in GRID["alpha"]:
        for beta in GRID["beta"]:
            gamma = calibrated_gamma(q, EXPERTS, alpha=alpha, beta=beta)
            for scale in GRID["gamma_scale"]:
                found = whole(allocation(q, scale * gamma, alpha=alpha, beta=beta))
                rows.append({
                    "seed": run.seed, "alpha": alpha, "beta": beta, "gamma_scale": scale,
                    "integer": difference(best, found), "top3": overlap(best, found),
                })  # fmt: skip
    return rows


@torch.no_grad()
def prune_layers(model: nn.Sequential, ratios: np.ndarray) -> nn.Sequential:
    """A copy without the smallest weights of every layer; biases stay, ties with the threshold go."""
    pruned = copy.deepcopy(model)
    for layer, ratio in zip(linears(pruned), ratios, strict=True):
        w = layer.weight
        gone = min(int(round(float(ratio) * w.numel())), w.numel() - 1)
        if gone > 0:
            w.mul_(w.abs() > w.abs().flatten().kthvalue(gone).values)
    return pruned


def pruning(run: SeedRun, tau: float = 1e-2, targets: Sequence[float] = TARGETS) -> list[dict[str, Any]]:
    """Accuracy at equal budgets: uniform against three scores under two penalties (exactly the budget, cap 0.95)."""
    scores = {p: run.proxies[p][tau] for p in ("layerif_style", "grad_norm")}
    direct = run.direct[tau]
    scores |= {} if direct is None else {"direct": direct}
    rows = []
    for target in targets:
        plans: dict[tuple[str, str], np.ndarray] = {("uniform", "none"): np.full(len(run.counts), target)}
        for name, q in scores.items():
            for penalty in ("quadratic", "log-barrier"):
                solved = sparsify(
                    q, run.counts, sparsity=target, max_sparsity=CAP, penalty=penalty, exponent_on="block", spend="exactly"
                )
                plans[name, penalty] = solved.value
        for (name, penalty), ratios in plans.items():
            pruned = prune_layers(run.model, ratios)
            weights = [layer.weight for layer in linears(pruned)]
            zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
            rows.append({
                "seed": run.seed, "target": target, "by": name, "penalty": penalty,
                "accuracy": accuracy(pruned, run.test), "sparsity": zeros,
            })  # fmt: skip
    return rows


def summary(rows: Sequence[dict[str, Any]], keys: Sequence[str], values: Sequence[str]) -> list[dict[str, Any]]:
    """Mean and deviation (ddof 0) over seeds of every value, by key, in the order of the rows."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    found = []
    for key, group in groups.items():
        record = dict(zip(keys, key, strict=True))
        for name in values:
            numbers = np.array([r[name] for r in group if r[name] is not None])
            record[name] = [float(numbers.mean()), float(numbers.std())] if numbers.size else None
        found.append(record)
    return found
