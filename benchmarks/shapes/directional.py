"""Heads, MLP widths and layers: directional damage beside uniform widths and FLAP, at equal recounted FLOPs.

    python -m benchmarks.shapes directional [--budgets 16.3% 35% --seeds 2 --model demo --data stdlib]

Query heads go one per group at a time, MLP channels by 8, everywhere. "none", "refit" and "stream" are what the matrices behind
removed units become (layerbudget.decisions.shapes.compensation); they share the plan where the search is the same. Rows are kept
under ``results/rows`` as they are measured, and are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import time
from pathlib import Path

import torch
from benchmarks.shapes.flap import cut_by_fluctuation
from benchmarks.shapes.smaller import flops, seconds
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

from layerbudget.data.text import calibration
from layerbudget.decisions.shapes.apply import apply_shapes, remove_units
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.shapes.units import find_parts
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.models.loading import load_model, load_tokenizer

BY = {"by": "queries"}


class Bench:
    """One model and its texts; rows are made once."""

    def __init__(self, a):
        self.a = a
        self.tokenizer, self.model = load_tokenizer(a.model), load_model(a.model)
        self.held_out = evaluation_set(a.evaluation or a.data, self.tokenizer, length=a.length, windows=a.windows)
        self.base = flops(self.model)
        self.rows = read_rows(a.name, a.out)

    def has(self, way, budget, seed):
        return any((r["way"], r["budget"], r["seed"]) == (way, budget, seed) for r in self.rows)

    def data(self, seed):
        return calibration(self.a.data, self.tokenizer, samples=self.a.samples, length=self.a.length, seed=seed)

    def row(self, way, budget, seed, smaller, passes, **more):
        started = time.process_time()
        row = {"way": way, "budget": budget, "seed": seed, "passes": passes, "value": perplexity(smaller, self.held_out).value}
        row |= {"flops": more.pop("flops", flops(smaller) / self.base), **more, "evaluation": time.process_time() - started}
        self.rows.append(row)
        keep_row(self.a.name, row, self.a.out)
        print(row, flush=True)

    def applied(self, way, budget, seed, plan, passes, data, compensate):
        """Apply a plan with one kind of compensation."""
        name = f"{way}, {compensate}" if compensate else way
        if self.has(name, budget, seed):
            return
        if compensate:
            plan = dataclasses.replace(plan, hyperparameters={**plan.hyperparameters, "compensate": compensate})
        smaller = copy.deepcopy(self.model)
        receipt = apply_shapes(smaller, plan, data)
        extra = {"dropped": len(receipt.dropped), "measured": plan.payload.measured}
        if plan.hyperparameters.get("depth"):
            extra["flops"] = 1.0 - receipt.saved / receipt.before
        if plan.hyperparameters.get("even"):
            times = seconds({"dense": self.model, "even": smaller}, data.input_ids, 5)
            extra["time"] = times["even"] / times["dense"]
        self.row(name, budget, seed, smaller, passes, **extra)

    def uniform(self, budget, seed, data, share):
        if self.has("uniform width, refit", budget, seed):
            return
        smaller = copy.deepcopy(self.model)
        mlp = sum(p.flops for p in find_parts(self.model) if p.kind == "mlp") / self.base
        remove_units(smaller, data, min(share / mlp, 0.9), kind="mlp", multiple=1)
        times = seconds({"dense": self.model, "even": smaller}, data.input_ids, 5)
        self.row("uniform width, refit", budget, seed, smaller, 2.0, time=times["even"] / times["dense"])

    def flap(self, budget, seed, data, share):
        if not self.has("FLAP (score, allocation, bias)", budget, seed):
            smaller = copy.deepcopy(self.model)
            cut_by_fluctuation(smaller, data, share * self.base)
            self.row("FLAP (score, allocation, bias)", budget, seed, smaller, 1.0)

    def directional(self, name, budget, seed, data, ways, **options):
        ways = [w for w in ways if not self.has(f"{name}, {w}" if w else name, budget, seed)]
        if ways:
            plan = plan_shapes(self.model, data, budget, **BY, **options)
            for way in ways:
                self.applied(name, budget, seed, plan, plan.payload.forward_passes, data, way)


def run(bench, a):
    longer = {"passes": 40.0, "strides": 2}
    for seed in range(a.seeds):
        data = bench.data(seed)
        for budget in a.budgets:
            share = float(budget.split("%")[0]) / 100
            bench.uniform(budget, seed, data, share)
            bench.flap(budget, seed, data, share)
            bench.directional("directional, 2 strides", budget, seed, data, ("refit", "stream"), **longer)
            bench.directional("directional, 1 stride", budget, seed, data, ("refit", "stream"), passes=26.0)
    for budget, data in ((b, bench.data(0)) for b in a.budgets):
        bench.directional("directional, 2 strides, even", budget, 0, data, ("stream",), even=True, **longer)
        bench.directional("directional, 2 strides, with depth", budget, 0, data, ("stream",), depth=4, **longer)


def table(bench, dense):
    lines = [
        f"Perplexity on {bench.a.windows} held-out windows of {bench.a.length} tokens; dense {dense:.2f}. Calibration text: "
        f"{bench.a.samples} x {bench.a.length} tokens. Means over seeds of that text, all values behind. FLOPs of the layers' "
        "matrices recounted after cutting. Time: one forward on this "
        "machine, dense 1, where all layers are alike (CPU seconds, medians of 5).",
        "",
        "| asked for | way | FLOPs left | perplexity | by seed | forwards | layers gone | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for budget in dict.fromkeys(r["budget"] for r in bench.rows):
        ways = {}
        for r in bench.rows:
            if r["budget"] == budget:
                ways.setdefault(r["way"], []).append(r)
        for way, rows in sorted(ways.items(), key=lambda w: -sum(r["value"] for r in w[1]) / len(w[1])):
            mean = {k: sum(r[k] for r in rows) / len(rows) for k in ("value", "passes", "flops")}
            seeds = ", ".join(f"{r['value']:.2f}" for r in sorted(rows, key=lambda r: r["seed"]))
            timed = [r["time"] for r in rows if "time" in r]
            lines.append(
                f"| {budget} | {way} | {mean['flops']:.3f} | {mean['value']:.2f} | {seeds} | {mean['passes']:.0f} "
                f"| {rows[0].get('dropped', 0)} | {f'{sum(timed) / len(timed):.2f}' if timed else ''} |"
            )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--evaluation", help="text for the perplexity (default: as --data)")
    parser.add_argument("--name", default="shapes", help="of the rows")
    parser.add_argument("--budgets", nargs="+", default=["35% flops", "16.3% flops", "50% flops"])
    for name, default in (("samples", 16), ("length", 128), ("windows", 96), ("seeds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the table of the rows that are there, measure nothing")
    a = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(a)
    if not a.table:
        run(bench, a)
    lines = table(bench, perplexity(bench.model, bench.held_out).value)
    write_section("shapes", f"Heads, MLP widths and layers by directional damage: {a.model}", lines, out=a.out)


if __name__ == "__main__":
    main()
