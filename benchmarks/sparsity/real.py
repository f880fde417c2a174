r"""KL and perplexity of a real model with zeros, by every rule at equal recounted sparsity, paired by window of texts that decide nothing.

    python -m benchmarks.sparsity real MODEL --fit FILE --held-out FILE ... --name smollm2 [--methods wanda sparsegpt]
        [--sparsities 0.5 0.6] [--rules uniform OWL AlphaPruning 'directional (Linear), 4 steps']

Rules are those of ``rules``. The text to fit decides and gives the pruner its moments; ``stdlib`` decides by other files than it
measures. Rows are kept under ``results/rows`` with every window's numbers, and are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.sparsity.rules import SCORED, Bench
from benchmarks.stamp import RESULTS, keep_row, peak_gib, read_rows, write_section

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.sensitivity.sequences import per_token

RULES = ("uniform", "OWL", "AlphaPruning", "directional (Linear), 4 steps")


class RealBench(Bench):
    """A model in the precision that was asked for, the text that decides, and its dense output on the texts that measure."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.tokenizer = a, lb.load_tokenizer(a.model)
        self.model = lb.load_model(a.model, dtype=a.dtype)
        self.blocks = {by: lb.partition(self.model, by) for by in ("layer", "linear")}
        self.scores, self.data, self.last = {}, {}, None
        self.dense = DenseOutput(self.model, windows_of(a, self.tokenizer), batch_size=a.batch)

    def row(self, method: str, sparsity: float, rule: str) -> dict[str, Any]:
        """A plan, and the windows' KL and loss of the model that is pruned by it."""
        plan, forwards, seconds = self.plan(rule, method, sparsity, 0)
        pruned = copy.deepcopy(self.model)
        receipt = prune(pruned, plan, self.calibration(0), method, self.a.batch)
        rows = self.dense.rows(pruned)
        said = {k: getattr(plan.payload, k, None) for k in ("predicted", "measured")}
        return {
            "method": method, "target": sparsity, "rule": rule, "sparsity": receipt.sparsity, "forwards": forwards,
            "seconds": round(seconds, 1), **said, "peak": round(peak_gib(), 2), "tokens": rows[:, 1].tolist(),
            "kl": [round(v, 5) for v in rows[:, 0]], "loss": [round(v, 5) for v in rows[:, 2]],
            "predicted_tokens": rows[:, 3].tolist(), "dense_loss": [round(v, 5) for v in self.dense.own[:, 2]],
        }  # fmt: skip


def windows_of(a: argparse.Namespace, tokenizer: Any) -> Any:
    """Windows of every text that measures, spread evenly over it."""
    found = []
    for file in a.held_out:
        held = lb.evaluation_set(file, tokenizer, length=a.window, windows=None)
        found.append(held.input_ids[:: max(1, held.samples // a.windows)][: a.windows])
    return dataclasses.replace(held, input_ids=torch.cat(found))


def per_window(row: Mapping[str, Any], part: slice, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Nats and tokens of some windows."""
    return np.array(row[what])[part], np.array(row["tokens" if what == "kl" else "predicted_tokens"])[part]


def beside(row: Mapping[str, Any], other: Mapping[str, Any], part: slice, what: str) -> tuple[float, float]:
    """What a row has more than another per token, paired by window, and two standard errors."""
    (own, tokens), (its, _) = per_window(row, part, what), per_window(other, part, what)
    mean, error = per_token(own - its, tokens)
    return mean, 2 * error


def table(rows: Sequence[Mapping[str, Any]], part: slice) -> list[str]:
    """A line for every rule, beside uniform and, for a directional plan, beside the peer with the least KL."""
    lines = [
        "| pruner | zeros | rule | forwards | KL | beside uniform | beside the best published rule | perplexity | loss beside uniform |",
        "|---|---|---|---:|---|---|---|---:|---|",
    ]

    def kl(row: Mapping[str, Any]) -> tuple[float, float]:
        return per_token(*per_window(row, part, "kl"))

    for (method, target), group in itertools.groupby(rows, key=lambda r: (r["method"], r["target"])):
        own = list(group)
        uniform = next(r for r in own if r["rule"] == "uniform")
        peers = [r for r in own if r["rule"] in SCORED]
        best = min(peers, key=lambda r: kl(r)[0]) if peers else None
        for row in own:
            mean, error = kl(row)
            cells = ["", ""]
            if row is not uniform:
                more, noise = beside(row, uniform, part, "kl")
                cells[0] = f"{more:+.3g} +- {noise:.1g} ({more / kl(uniform)[0]:+.0%})"
            if best is not None and row["rule"].startswith("directional"):
                more, noise = beside(row, best, part, "kl")
                cells[1] = f"{more:+.3g} +- {noise:.1g} ({more / kl(best)[0]:+.0%}, {best['rule']})"
            lost = "" if row is uniform else "{:+.3f} +- {:.1g}".format(*beside(row, uniform, part, "loss"))
            perplexity = math.exp(per_token(*per_window(row, part, "loss"))[0])
            lines.append(
                f"| {method} | {target:.0%} | {row['rule']} | {row['forwards']:.0f} | {mean:.4f} +- {2 * error:.2g} | {cells[0]} | {cells[1]} "
                f"| {perplexity:.2f} | {lost} |"
            )
    return lines


def cost(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What directional plans said themselves, and took."""
    own = [r for r in rows if r["rule"].startswith("directional")]
    lines = [
        "| pruner | zeros | passes | processor (s) of the plan | measured on its own text | peak memory (GiB) |",
        "|" + "---|" * 6,
    ]
    for r in own:
        lines.append(
            f"| {r['method']} | {r['target']:.0%} | {r['forwards']:.0f} | {r['seconds']:.0f} | {r['measured']:.4g} | {r['peak']} |"
        )
    return lines if own else []


def main() -> None:
    """Parse, measure what is missing, and write a section."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", required=True, help="text that decides")
    p.add_argument("--held-out", nargs="+", required=True, help="texts that measure")
    p.add_argument("--name", required=True, help="what the page calls the model")
    p.add_argument("--methods", nargs="+", default=["wanda", "sparsegpt"])
    p.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.6])
    p.add_argument("--rules", nargs="+", default=list(RULES))
    for name, default in (("samples", 8), ("length", 256), ("windows", 16), ("window", 256), ("batch", 8)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--cap", type=float, default=0.9, help="largest sparsity of a unit, of rules that are not directional")
    p.add_argument("--dtype", default="bfloat16", help="precision of the model")
    p.add_argument("--table", action="store_true", help="write the table of the rows that are there, measure nothing")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    a.calibration = a.fit
    torch.set_num_threads(1)
    kept, bench = f"sparsity_real_{a.name}", None
    for job in itertools.product(a.methods, a.sparsities, a.rules):
        if not a.table and not any((r["method"], r["target"], r["rule"]) == job for r in read_rows(kept, a.out)):
            bench = bench or RealBench(a)
            row = bench.row(*job)
            keep_row(kept, row, a.out)
            print(*job, per_token(*per_window(row, slice(None), "kl")), row["seconds"], flush=True)
    order = list(itertools.product(a.methods, a.sparsities, a.rules))
    rows = [r for job in order for r in read_rows(kept, a.out) if (r["method"], r["target"], r["rule"]) == job]
    lines = [
        f"{a.samples} x {a.length} tokens of {Path(a.fit).name} decide and give the moments; the model is in {a.dtype}. KL from the dense model "
        "in nats per token; differences are paired by window, with two standard errors.", "", *cost(rows),
    ]  # fmt: skip
    for i, file in enumerate(a.held_out):
        part = slice(i * a.windows, (i + 1) * a.windows)
        tokens = np.array(rows[0]["predicted_tokens"])[part]
        dense = math.exp(per_token(np.array(rows[0]["dense_loss"])[part], tokens)[0])
        lines += ["", f"On {a.windows} windows of {a.window} tokens of {Path(file).name}; dense perplexity {dense:.2f}:", ""]
        lines += table(rows, part)
    write_section("sparsity", f"A real model at equal sparsity: {a.name}", lines, out=a.out)


if __name__ == "__main__":
    main()
