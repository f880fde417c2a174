"""Pour a budget over layers like water and draw it. Needs numpy and matplotlib only, no model.

python examples/water_filling.py [--budget 24] [--out water.png]

Each layer is a column of ground of height cost/weight; the water level t rises until the water (the capacity) is
worth the budget. Layers whose ground lies above the level stay dry.
"""

from __future__ import annotations

import argparse

import numpy as np

from layerbudget.reporting.figures import new_figure, save_figure
from layerbudget.solvers import allocate, round_capacity


def main() -> None:
    """Solve one small program, print its certificate and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=24.0)
    parser.add_argument("--out", default="water.png")
    arguments = parser.parse_args()
    weights = np.array([0.06, 0.11, 0.10, 0.15, 0.19, 0.16, 0.12, 0.07, 0.03, 0.01])
    cost = np.array([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    solution = allocate(weights, cost, arguments.budget, spend="exactly")
    counts = round_capacity(solution)
    print(solution)
    print(counts)
    ground = cost / weights
    level = float(np.max(ground * (1 + solution.value) * (solution.value > 0)))
    figure = new_figure(7, 4)
    axes = figure.subplots()
    x = np.arange(len(weights))
    axes.bar(x, np.minimum(ground, 2 * level), color="#868e96", label="ground: cost / weight")
    axes.bar(x, np.maximum(level - ground, 0), bottom=ground, color="#4dabf7", label="water: capacity x ground")
    axes.axhline(level, color="#1864ab", lw=1)
    axes.text(-0.45, level * 1.1, f"level t = {level:.1f}", va="bottom", ha="left", fontsize=9, color="#1864ab")
    for k, value in enumerate(solution.value):
        axes.text(k, max(level, min(ground[k], 2 * level)) * 1.02, f"{value:.1f}", ha="center", fontsize=8)
    axes.set_ylim(0, 2 * level)
    axes.set_xlabel("layer")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, arguments.out)


if __name__ == "__main__":
    main()
