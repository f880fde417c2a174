r"""How much better codes can be chosen at given steps: what searches find, and what no choice of codes can pass.

    python -m benchmarks.bits limits MODEL --fit FILE --name smollm2 [--layer 10] [--matrices q_proj o_proj up_proj]

Some rows of matrices are rounded to Q4_0 with the steps that ggml gives them, which stay. What counts is the form
``(w - q) H (w - q)'`` of the damped second moments H of the inputs, added over the rows. Codes come from the nearest, error
feedback, sweeps over the columns that move one code at a time until nothing falls, and the best of some ways that error
feedback can go (a beam: where the second nearest code is worth it, both are followed), with sweeps behind it.

**The bound.** With H = R'R and steps s, codes are the points of a lattice whose cells have the volume ``prod_j R_jj s_j``.
Where what is rounded lies anywhere in a cell with the same chance, the mean error of any rule is at least that of a ball of this
volume around its middle, ``n / (n + 2) V_n^(-2/n) (prod_j R_jj s_j)^(2/n)``, V_n the volume of a ball of radius one. Error
feedback has ``sum_j (R_jj s_j)^2 / 12``, which is printed beside what it was measured to have. Codes that end at a range have more.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.compressors import ggml
from layerbudget.compressors.feedback import Factors
from layerbudget.execution.inputs import InputStatistics
from layerbudget.models.blocks import partition, weight_of

TYPE, BLOCK, LEAST, MOST = "Q4_0", 32, -8, 7


@dataclasses.dataclass
class Problem:
    """Rows ``(rows, columns)`` in the order of error feedback, their steps, the damped moments and the factor of their inverse."""

    weight: torch.Tensor
    steps: torch.Tensor
    moment: torch.Tensor
    upper: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, moment: torch.Tensor) -> Problem:
        """From a matrix and the second moments of its inputs."""
        factors = Factors(moment)
        order, upper = factors.of(BLOCK)
        data = ggml.quantise(weight.float().numpy(), TYPE, factors.whole.diagonal().numpy())
        halves = data.reshape(len(weight), -1, 18)[:, :, :2].copy().view(np.float16)[..., 0]
        steps = torch.from_numpy(halves.astype(np.float64)).repeat_interleave(BLOCK, 1)
        whole = factors.whole.double()[order][:, order]
        return cls(weight.double()[:, order], steps[:, order], whole, upper.double())

    def form(self, codes: torch.Tensor) -> float:
        """The error of all rows together."""
        error = self.weight - codes * self.steps
        return float(((error @ self.moment) * error).sum())

    def nearest(self) -> torch.Tensor:
        """Every code by itself."""
        return (self.weight / self.steps).round().clamp(LEAST, MOST)

    def beam(self, width: int) -> torch.Tensor:
        """The best of ``width`` ways of error feedback; of one, error feedback itself."""
        rows, columns = self.weight.shape
        work, cost = self.weight[:, None, :].clone(), torch.zeros(rows, 1, dtype=torch.float64)
        codes = torch.zeros_like(work)
        for j in range(columns):
            wanted = work[:, :, j] / self.steps[:, None, j]
            first = wanted.round().clamp(LEAST, MOST)
            second = (first + (wanted - first).sign()).clamp(LEAST, MOST)
            each = torch.stack([first, second], -1)
            error = (wanted[..., None] - each) * (self.steps[:, None, j, None] / self.upper[j, j])
            total = cost[..., None] + error.square()
            total[..., 1].masked_fill_(second == first, math.inf)
            cost, best = total.flatten(1).topk(min(width, total[0].numel()), 1, largest=False)
            parent = (best // 2)[..., None].expand(-1, -1, columns)
            work, codes = work.gather(1, parent), codes.gather(1, parent)
            codes[:, :, j] = each.flatten(1).gather(1, best)
            work[:, :, j + 1 :] -= error.flatten(1).gather(1, best)[..., None] * self.upper[j, j + 1 :]
            cost = cost.masked_fill(cost.isinf(), 1e300)
        return codes[torch.arange(rows), cost.argmin(1)]

    def sweeps(self, codes: torch.Tensor, most: int = 50) -> torch.Tensor:
        """Codes moved one at a time to where the form is least, until none moves."""
        codes = codes.clone()
        pull = (codes * self.steps - self.weight) @ self.moment
        for _ in range(most):
            before = codes.clone()
            for j in range(codes.shape[1]):
                step = self.steps[:, j]
                moved = (codes[:, j] - pull[:, j] / (self.moment[j, j] * step)).round().clamp(LEAST, MOST)
                pull += ((moved - codes[:, j]) * step)[:, None] * self.moment[j]
                codes[:, j] = moved
            if torch.equal(codes, before):
                break
        return codes

    def bound(self) -> tuple[float, float]:
        """The least mean error of any rule, and that of error feedback, by their formulas."""
        sizes = (self.steps / self.upper.diagonal()).square()
        n = sizes.shape[1]
        ball = n / (n + 2) * math.exp(-2 / n * (n / 2 * math.log(math.pi) - math.lgamma(n / 2 + 1)))
        return float(ball * sizes.log().mean(1).exp().sum()), float(sizes.sum() / 12)


def line(name: str, problem: Problem, width: int) -> str:
    """A row of the table: every rule's form beside that of error feedback."""
    fed = problem.beam(1)
    base, (least, expected) = problem.form(fed), problem.bound()
    wide = problem.beam(width)
    forms = [problem.nearest(), problem.sweeps(fed), wide, problem.sweeps(wide)]
    shown = [f"{problem.form(codes) / base:.3f}" for codes in forms]
    return " | ".join([f"| `{name}`", *shown, f"{least / base:.3f}", f"{base / expected:.2f} |"])


def main() -> None:
    """Parse, measure and write a section."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", required=True, help="text of the inputs")
    p.add_argument("--name", required=True, help="what the page calls the model")
    p.add_argument("--layer", type=int, default=10)
    p.add_argument("--matrices", nargs="+", default=["q_proj", "o_proj", "up_proj"])
    p.add_argument("--rows", type=int, default=64, help="of each matrix")
    p.add_argument("--width", type=int, default=16, help="ways of error feedback that are followed")
    p.add_argument("--samples", type=int, default=32)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    model = lb.load_model(a.model, dtype="float32")
    fit = lb.calibration(a.fit, lb.load_tokenizer(a.model), samples=a.samples, length=a.length)
    modules = [m for m in partition(model, "layer")[a.layer].modules if m.name.split(".")[-1] in a.matrices]
    statistics = InputStatistics(model, modules, "gram")
    with torch.no_grad(), statistics.listening(None):
        for batch in fit.batches(8, torch.device("cpu")):
            model(**batch)
    lines = [
        f"The first {a.rows} rows of matrices of layer {a.layer}, inputs of {a.samples} x {a.length} tokens of {Path(a.fit).name}. "
        "The error of the output beside that of error feedback with the same steps.",
        "",
        f"| matrix | nearest | sweeps until no code moves | the best of {a.width} ways | and sweeps | no rule has a mean below | error feedback, of its formula |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for m in modules:
        weight = weight_of(model, m.name)[1].detach()[: a.rows]
        lines.append(line(m.name.split(".")[-1], Problem.of(weight, statistics.found[m.name][0].value), a.width))
        print(lines[-1], flush=True)
    write_section("rounding", f"{a.name}, what is left in the codes", lines, out=a.out)


if __name__ == "__main__":
    main()
