r"""The MLP experiment as the released script runs it (``mdl/direct_curvature_exp.py`` of the authors' repository), rewritten.

scikit-learn's digits, 75 : 25, stratified, one random state; eight linear layers of width 96 with ReLU; a block is a layer's
weights *and* biases. One batch of 128 gives the direct gain ``g'(H + tau I)^-1 g`` by conjugate gradients of at most 80 steps
that stop, and are kept, where a direction of negative curvature turns up. The proxies read the first 96 samples of that batch.

Six switches (:class:`Recipe`) turn what the script does into what :mod:`paper.mlp` does, one at a time, so
that each difference can be held responsible for what it changes. The order in which random numbers are drawn is the script's,
so that its seeds are its seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from layerbudget.errors import MissingDependency
from layerbudget.progress import Progress, Steps

from .mlp import DAMPINGS, PROXIES, digits
from .mlp_scores import (
    EPSILON,
    Batch,
    Parameters,
    diagonal_gain,
    influence_gain,
    kendall,
    loss_of,
    sample_gradients,
    spearman,
    truncated_gain,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the released script does, and a switch for each of its six peculiarities.

    Attributes:
        activation: ``relu`` or ``gelu``.
        biases: Whether a block holds its biases.
        direct_samples: Samples of the direct gain; batches of 128 are joined.
        fisher: ``fixed``: the diagonal Fisher is damped by 0.001 on 96 samples; ``tau``: by tau on all direct samples.
        split: ``stratified`` (75 : 25, random state 0) or ``seeded`` (80 : 20, by the seed).
        truncated: Keep what conjugate gradients had when a direction of negative curvature turned up.
        width, layers, epochs, batch, rate, steps: Sizes and training.
    """

    activation: str = "relu"
    biases: bool = True
    direct_samples: int = 128
    fisher: str = "fixed"
    split: str = "stratified"
    truncated: bool = True
    width: int = 96
    layers: int = 8
    epochs: int = 40
    batch: int = 128
    rate: float = 1e-3
    steps: int = 80
    proxy_samples: int = 96
    proxy_damping: float = 1e-2
    fisher_damping: float = 1e-3


RELEASED = Recipe()
# The six differences, in the order of mlp.DIFFERENCES: what is changed, and to what.
SWITCHES: dict[str, dict[str, Any]] = {
    "GELU in the place of ReLU": {"activation": "gelu"},
    "blocks without biases": {"biases": False},
    "the direct gain on 512 samples": {"direct_samples": 512},
    "the diagonal Fisher damped by tau": {"fisher": "tau"},
    "a split by the seed": {"split": "seeded"},
    "indefinite layers without a value": {"truncated": False},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One trained network with its scores.

    Attributes:
        seed: Its seed.
        model: The network.
        test: Test images and labels.
        accuracy: On them.
        direct: ``{tau: scores (K,)}``, normalised to sum one; None where a layer is indefinite and ``truncated`` is off.
        negative: ``{tau: layers in which conjugate gradients met negative curvature}``.
        converged: ``{tau: layers in which they converged}``.
        proxies: ``{name: scores (K,)}``; the diagonal Fisher ``{tau: ...}``.
        counts: Parameters per block, biases included as the script counts them.
    """

    seed: int
    model: nn.Sequential
    test: Batch
    accuracy: float
    direct: dict[float, np.ndarray | None]
    negative: dict[float, int]
    converged: dict[float, int]
    proxies: dict[str, dict[float, np.ndarray]]
    counts: np.ndarray


def split_digits(recipe: Recipe, seed: int) -> tuple[Batch, Batch]:
    """Training and test images in [0, 1].

    Raises:
        MissingDependency: scikit-learn is not installed.
    """
    if recipe.split == "seeded":
        fit, held = digits(seed)
        return (fit.inputs, fit.labels), (held.inputs, held.labels)
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingDependency("The MLP experiment needs scikit-learn.", "", "pip install scikit-learn") from error
    x, y = load_digits(return_X_y=True)
    a, b, c, d = train_test_split((x / 16.0).astype(np.float32), y, test_size=0.25, random_state=0, stratify=y)
    return (torch.tensor(a), torch.tensor(c)), (torch.tensor(b), torch.tensor(d))


def build(recipe: Recipe) -> nn.Sequential:
    """The network, its weights drawn from torch's generator."""
    sizes = [64, *[recipe.width] * (recipe.layers - 1), 10]
    parts: list[nn.Module] = []
    for i, (d_in, d_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        parts.append(nn.Linear(d_in, d_out))
        if i < recipe.layers - 1:
            parts.append(nn.ReLU() if recipe.activation == "relu" else nn.GELU())
    return nn.Sequential(*parts)


def linears(model: nn.Sequential) -> list[nn.Linear]:
    """Its linear layers, in order."""
    return [m for m in model if isinstance(m, nn.Linear)]


def groups(model: nn.Sequential, recipe: Recipe) -> list[Parameters]:
    """Parameters of every block."""
    return [[m.weight, m.bias] if recipe.biases else [m.weight] for m in linears(model)]


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch) -> float:
    """Share of images that get their label."""
    return float((model(batch[0]).argmax(1) == batch[1]).double().mean())


def _normal(values: Sequence[float]) -> np.ndarray:
    v = np.maximum(np.asarray(values, dtype=np.float64), 0.0)
    return v / (v.sum() + EPSILON)


def _joined(loader: Iterator[Batch], samples: int) -> Batch:
    """Batches put together until there are so many samples."""
    x, y = next(loader)
    while len(y) < samples:
        more = next(loader)
        x, y = torch.cat([x, more[0]]), torch.cat([y, more[1]])
    return x[:samples], y[:samples]


def trained(recipe: Recipe, seed: int) -> tuple[nn.Sequential, Batch, Batch, float]:
    """Train one network; random numbers are drawn in the script's order.

    Returns:
        The network, the samples of the direct gain, the test set and the accuracy on it.
    """
    torch.manual_seed(seed)
    fit, held = split_digits(recipe, seed)
    loader = DataLoader(TensorDataset(*fit), batch_size=recipe.batch, shuffle=True)
    tests = DataLoader(TensorDataset(*held), batch_size=recipe.batch)
    model = build(recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.rate)
    for _ in range(recipe.epochs):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, (x, y)).backward()
            optimizer.step()
    iter(tests)  # the script's evaluation draws one number
    return model, _joined(iter(loader), recipe.direct_samples), held, accuracy(model, held)


def one_seed(recipe: Recipe, seed: int, dampings: Sequence[float] = DAMPINGS) -> SeedRun:
    """Train one network, and compute its direct gains and proxies."""
    model, batch, held, score = trained(recipe, seed)
    blocks = groups(model, recipe)
    direct: dict[float, np.ndarray | None] = {}
    negative, converged, squares = {}, {}, []
    for tau in dampings:
        loss = loss_of(model, batch)
        found = [truncated_gain(loss, block, tau, steps=recipe.steps) for block in blocks]
        negative[tau] = sum(how == "negative curvature" for _, _, how in found)
        converged[tau] = sum(how == "converged" for _, _, how in found)
        indefinite = negative[tau] and not recipe.truncated
        direct[tau] = None if indefinite else _normal([gain for gain, _, _ in found])
        squares = [square for _, square, _ in found]
    return SeedRun(
        seed=seed, model=model, test=held, accuracy=score, direct=direct, negative=negative, converged=converged,
        proxies=_proxies(recipe, model, batch, blocks, squares, dampings),
        counts=np.array([float(sum(p.numel() for p in (m.weight, m.bias))) for m in linears(model)]),
    )  # fmt: skip


def _proxies(
    recipe: Recipe, model: nn.Sequential, batch: Batch, blocks: Sequence[Parameters], squares: Sequence[float],
    dampings: Sequence[float],
) -> dict[str, dict[float, np.ndarray]]:  # fmt: skip
    """The three proxies, each by damping (the script's do not depend on it)."""
    few = (batch[0][: recipe.proxy_samples], batch[1][: recipe.proxy_samples])
    rows = sample_gradients(model, few, blocks)
    means = [row.mean(0) for row in rows]
    influence = _normal([influence_gain(r, g, recipe.proxy_damping) for r, g in zip(rows, means, strict=True)])
    wide = sample_gradients(model, batch, blocks) if recipe.fisher == "tau" else rows
    diagonal = {
        tau: _normal([
            diagonal_gain(r, r.mean(0), tau if recipe.fisher == "tau" else recipe.fisher_damping) for r in wide
        ])
        for tau in dampings
    }  # fmt: skip
    norms = _normal(squares)
    return {
        "layerif_style": dict.fromkeys(dampings, influence), "diag_fisher": diagonal,
        "grad_norm": dict.fromkeys(dampings, norms),
    }  # fmt: skip


def correlations(runs: Sequence[SeedRun], tau: float, proxy: str) -> dict[str, Any]:
    """Mean and deviation (ddof 0) over seeds of both rank correlations, and how many seeds count."""
    pairs = []
    for run in runs:
        direct = run.direct[tau]
        if direct is not None:
            pairs.append([f(direct, run.proxies[proxy][tau]) for f in (spearman, kendall)])
    if not pairs:
        return {"spearman": None, "kendall": None, "seeds": 0}
    found = np.array(pairs)
    mean, deviation = found.mean(0), found.std(0)
    return {
        "spearman": [float(mean[0]), float(deviation[0])], "kendall": [float(mean[1]), float(deviation[1])],
        "seeds": len(pairs),
    }  # fmt: skip


def tables(
    recipe: Recipe = RELEASED,
    seeds: Sequence[int] = (0, 1, 2),
    dampings: Sequence[float] = DAMPINGS,
    progress: Progress | None = None,
) -> tuple[list[SeedRun], dict[str, dict[str, dict[str, Any]]]]:
    """Run the experiment under a recipe.

    Returns:
        The runs, and ``{tau: {proxy: {spearman: [mean, deviation], kendall, seeds}}}``.

    Raises:
        MissingDependency: scikit-learn is not installed.
    """
    runs = []
    tick = Steps(progress, len(seeds))
    for seed in seeds:
        runs.append(one_seed(recipe, seed, dampings))
        tick()
    return runs, {str(tau): {p: correlations(runs, tau, p) for p in PROXIES} for tau in dampings}
