"""Does a plan pay? Perplexity at equal recounted sparsity for every rule, pruner and seed, and beside an evolutionary search.

    python -m benchmarks.sparsity rules --model demo [--name stdlib] [--calibration stdlib] [--evaluation stdlib]

Rows are kept under ``results/rows/sparsity_NAME.jsonl`` as they are measured: a run that was cut goes on, and a run with more
sequences or other rules adds to the table. A second model is another one each time that it is trained: give it a name of its own.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

from layerbudget.data.text import calibration
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.directional import PASSES
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.models.blocks import describe, partition
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.plan import Plan, PlanBlock
from layerbudget.sensitivity.gain import score

SCORED = {
    # label: (estimator, granularity, rule of plan_sparsity)
    "OWL": ("outlier-ratio", "layer", "owl"),
    "ATP": (None, "layer", "atp"),
    "AlphaPruning": ("spectral-tail", "layer", "alphapruning"),
    "LayerIF": ("layerif", "layer", "layerif"),
    "gradient norm": ("gradient-norm", "layer", "mdl"),
    "gain (block)": ("fisher-gram", "layer", "mdl"),
    "permuted gain": ("fisher-gram", "layer", "permuted"),
    "gain (Linear)": ("fisher-gram", "linear", "mdl"),
}
BY = {"block": "layer", "Linear": "linear", "rows": "rows:1", "8 rows": "rows:8"}
STEPS, DEFAULT = (1, 2, 4, 8, 12, 20), f"{PASSES:g} passes"
DIRECTIONAL = {
    # label: (by, most steps, options); steps are of three forward equivalents, beside one dense forward and the last measurement
    **{f"directional ({name}), {k} step{'s' if k > 1 else ''}": (by, k, {}) for name, by in BY.items() for k in STEPS},
    **{f"directional ({name}), {DEFAULT}": (by, None, {}) for name, by in BY.items()},
}
RULES = ("uniform", "size-proportional (Linear)", *SCORED, *DIRECTIONAL)


class Bench:
    """One model with its texts, and everything that is shared between rows."""

    def __init__(self, a):
        self.a = a
        self.tokenizer = load_tokenizer(a.model)
        self.model = load_model(a.model)
        self.held_out = evaluation_set(a.evaluation, self.tokenizer, length=a.length, windows=a.windows)
        self.blocks = {by: partition(self.model, by) for by in ("layer", "linear")}
        self.scores, self.data, self.last = {}, {}, None

    def calibration(self, seed):
        if seed not in self.data:
            a = self.a
            self.data[seed] = calibration(a.calibration, self.tokenizer, samples=a.samples, length=a.length, seed=seed)
        return self.data[seed]

    def scored(self, estimator, by, seed):
        key = (estimator, by, seed)
        if key not in self.scores:
            started = time.process_time()
            found = score(self.model, self.calibration(seed), self.blocks[by], estimator=estimator)
            self.scores[key] = (found, time.process_time() - started)
        return self.scores[key]

    def plan(self, rule, method, sparsity, seed):
        """The plan, what it cost in full forwards of the calibration set, and CPU seconds."""
        cap = self.a.cap
        if rule == "uniform":
            return plan_sparsity(self.blocks["layer"], sparsity=sparsity, max_sparsity=cap, rule="uniform"), 0.0, 0.0
        if rule.startswith("size"):
            return plan_sparsity(self.blocks["linear"], sparsity=sparsity, max_sparsity=cap, rule="size"), 0.0, 0.0
        if rule in DIRECTIONAL:
            by, steps, options = DIRECTIONAL[rule]
            started = time.process_time()
            options = {"passes": PASSES if steps is None else 3.0 + 3.0 * steps, **options}
            plan = plan_sparsity(self.model, self.calibration(seed), sparsity=sparsity, by=by, method=method, **options)
            return plan, plan.payload.forward_passes, time.process_time() - started
        estimator, by, how = SCORED[rule]
        if estimator is None:
            return plan_sparsity(self.blocks[by], sparsity=sparsity, max_sparsity=cap, rule=how), 0.0, 0.0
        found, seconds = self.scored(estimator, by, seed)
        # a forward and a backward count as three forwards; data-free scores as none
        cost = {"spectral-tail": 0.0, "outlier-ratio": 1.0}.get(estimator, 3.0)
        control = {"seed": seed} if how == "permuted" else {}
        return plan_sparsity(found, sparsity=sparsity, max_sparsity=cap, rule=how, **control), cost, seconds

    def measure(self, plan, method, seed):
        if self.last is not None and self.last[0] is plan:
            return self.last[1]
        pruned = copy.deepcopy(self.model)
        receipt = prune(pruned, plan, self.calibration(seed), method, 8)
        self.last = plan, (receipt.sparsity, perplexity(pruned, self.held_out))
        return self.last[1]


def random_search(bench, method, sparsity, seed, generations, offspring):
    """A small evolutionary search in the manner of EvoPress: move a level of sparsity from one block to another, keep the best.

    The fitness is the KL divergence from the dense model on calibration text, after pruning every block by statistics
    of the dense model (levels are pruned once and kept, as EvoPress does), on growing samples.
    """
    model, data = bench.model, bench.calibration(seed)
    blocks, step = bench.blocks["layer"], 0.05
    rng, started = np.random.default_rng(seed), time.process_time()
    levels = [round(sparsity + step * i, 4) for i in range(-4, 5) if 0 < sparsity + step * i < bench.a.cap + 1e-9]
    middle = levels.index(round(sparsity, 4))
    database = [_database(model, data, blocks, method, level) for level in levels]
    work = copy.deepcopy(model)
    names = [[m.name for m in b.modules] for b in blocks]

    def load(choice):
        for k, level in enumerate(choice):
            for name in names[k]:
                work.get_submodule(name).weight.data.copy_(database[level][name])

    def fitness(choice, samples):
        load(choice)
        ids = data.input_ids[:samples]
        with torch.no_grad():
            dense = torch.log_softmax(model(ids).logits.float(), -1)
            now = torch.log_softmax(work(ids).logits.float(), -1)
        return float((dense.exp() * (dense - now)).sum(-1).mean())

    parent, forwards = [middle] * len(blocks), 2.0 * len(levels)
    for _ in range(generations):
        pool = [parent]
        for _ in range(offspring):
            child = list(parent)
            for _ in range(int(min(rng.integers(1, 4), rng.integers(1, 4)))):
                up, down = rng.choice(len(blocks), 2, replace=False)
                if child[up] < len(levels) - 1 and child[down] > 0:
                    child[up], child[down] = child[up] + 1, child[down] - 1
            pool.append(child)
        for samples, keep in ((2, max(2, offspring // 4)), (8, 1)):
            ranked = sorted((fitness(c, samples), i) for i, c in enumerate(pool))
            forwards += len(pool) * samples / len(data)
            pool = [pool[i] for _, i in ranked[:keep]]
        parent = pool[0]
    chosen = tuple(
        PlanBlock(
            name=b.name, value=levels[c], count=round(levels[c] * b.numel), numel=b.numel,
            modules=tuple(m.name for m in b.modules),
        )
        for b, c in zip(blocks, parent, strict=True)
    )  # fmt: skip
    plan = Plan(kind="sparsity", rule="evolutionary", model=describe(model), blocks=chosen, budget={"unit": "parameters"})
    return plan, forwards, time.process_time() - started


def _database(model, data, blocks, method, level):
    pruned = copy.deepcopy(model)
    prune(pruned, plan_sparsity(blocks, sparsity=level, max_sparsity=1.0, rule="uniform"), data, method, 8)
    return {m.name: pruned.get_submodule(m.name).weight.data.clone() for b in blocks for m in b.modules}


def cell(values):
    if not values:
        return "-"
    error = f" +- {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{error}"


def place(rule):
    """Order of the rules in a table."""
    order = ("uniform", "size", "ATP", "Alpha", "LayerIF", "gradient norm", "gain", "permuted", "OWL", "evolution", "EvoPress",
             "directional (block)", "directional (Linear)", "directional (8 rows)", "directional (rows)")  # fmt: skip
    first = next((i for i, o in enumerate(order) if rule.startswith(o)), len(order))
    steps = [int(w) for w in rule.replace("passes", "").split() if w.isdigit()]
    return first, (7.5 if "passes" in rule else steps[-1] if steps else 0), rule


def table(rows, samples):
    found = [r for r in rows if r["samples"] == samples]
    lines = []
    for method in sorted({r["method"] for r in found}):
        mine = [r for r in found if r["method"] == method]
        targets = sorted({r["target"] for r in mine})
        lines += [f"#### {method}, {samples} sequences", ""]
        lines += ["| rule | " + " | ".join(f"{t:.0%}" for t in targets) + " | forwards | CPU s | seeds |"]
        lines += ["|---" * (len(targets) + 4) + "|"]
        # a rule that was measured with several seeds for some targets only shows the seeds of each
        for rule in sorted({r["rule"] for r in mine}, key=place):
            one = [r for r in mine if r["rule"] == rule]
            cells = [cell([r["value"] for r in one if r["target"] == t]) for t in targets]
            seeds = sorted({len({r["seed"] for r in one if r["target"] == t}) for t in targets} - {0})
            forwards = [r["forwards"] for r in one]
            spread = (
                f"{min(forwards):.0f} to {max(forwards):.0f}" if max(forwards) - min(forwards) > 0.5 else f"{forwards[0]:.0f}"
            )
            lines.append(
                f"| {rule} | " + " | ".join(cells) + f" | {spread} | {statistics.mean(r['seconds'] for r in one):.1f} "
                f"| {' or '.join(map(str, seeds))} |"
            )
        lines.append("")
    return lines


def verdicts(rows):
    """Directional plans of at most 26 forwards against the best of the other rules, cell by cell, on the seeds of the plan."""
    lines = [
        "| pruner | zeros | best of the other rules (forwards) | 24 passes by matrix (forwards) | difference | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for method, target in sorted({(r["method"], r["target"]) for r in rows if r["samples"] == 16}):
        mine = [r for r in rows if (r["method"], r["target"], r["samples"]) == (method, target, 16)]
        ours = "directional (Linear), 24 passes"
        seeds = {r["seed"] for r in mine if r["rule"] == ours}
        there = {n: [r for r in mine if r["rule"] == n and r["seed"] in seeds] for n in {r["rule"] for r in mine}}
        there = {n: found for n, found in there.items() if {r["seed"] for r in found} == seeds}
        mean = {n: statistics.mean(r["value"] for r in found) for n, found in there.items() if found}
        cost = {n: statistics.mean(r["forwards"] for r in found) for n, found in there.items() if found}
        others = [n for n in mean if not n.startswith("directional")]
        if seeds and len(others) > 1:
            best = min(others, key=mean.get)
            lines.append(
                f"| {method} | {target:.0%} | {best}: {mean[best]:.2f} ({cost[best]:.0f}) | {mean[ours]:.2f} ({cost[ours]:.0f}) "
                f"| {100 * (mean[ours] / mean[best] - 1):+.1f} % | {len(seeds)} |"
            )
    return [*lines, ""]


def page(a, rows):
    """The section of a model: verdicts, then every rule by pruner and number of sequences."""
    rows = [r for r in rows if "value" in r]
    lines = [
        f"Perplexity on {a.windows} held-out windows of {a.length} tokens at equal recounted sparsity, mean over calibration seeds",
        "+- standard error. A forward counts 1, a backward 2, of the whole calibration text; the dense forward and the last",
        f"measurement by the pruner itself are included. Largest sparsity of one unit: 0.95 for directional plans, {a.cap:g} for the",
        "others.", "", "### At most 26 forwards, against the best of the other rules", "", *verdicts(rows), "### All rules", "",
    ]  # fmt: skip
    for samples in sorted({r["samples"] for r in rows}):
        lines += table(rows, samples)
    errors = sorted({f"{r['rule']}: {r['error']}" for r in read_rows(f"sparsity_{a.name}", a.out) if "error" in r})
    return [*lines, *(f"Failed: {e}" for e in errors)]


def measure(bench, method, rule, sparsity, seed):
    """One row of the table."""
    a = bench.a
    row = {"method": method, "rule": rule, "target": sparsity, "seed": seed, "samples": a.samples}
    try:
        if rule.startswith("evolutionary"):
            plan, cost, cpu = random_search(bench, method, sparsity, seed, a.evolve, a.offspring)
        else:
            plan, cost, cpu = bench.plan(rule, method, sparsity, seed)
        recounted, value = bench.measure(plan, method, seed)
        row |= {"sparsity": recounted, "value": value.value, "forwards": cost, "seconds": cpu}
        if rule in DIRECTIONAL:
            row |= {k: getattr(plan.payload, k) for k in ("predicted", "measured")}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".split(" (/")[0][:300]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="stdlib")
    parser.add_argument("--evaluation", default="stdlib")
    parser.add_argument("--name", default="stdlib", help="of the rows")
    parser.add_argument("--label", default="embedded model", help="what the page calls the model")
    for name, default in (("samples", 16), ("length", 128), ("windows", 256), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cap", type=float, default=0.9)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.6, 0.7])
    parser.add_argument("--methods", nargs="+", default=["wanda", "sparsegpt", "magnitude"])
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--evolve", type=int, default=0, help="generations of the evolutionary search (seed 0, Wanda)")
    parser.add_argument("--offspring", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    name, bench, started = f"sparsity_{a.name}", Bench(a), time.monotonic()
    done = {(r["method"], r["rule"], r["target"], r["seed"], r["samples"]) for r in read_rows(name, a.out)}
    jobs = [(m, r, s, seed) for seed in range(a.seeds) for m in a.methods for s in a.sparsities for r in a.rules]
    if a.evolve:
        jobs += [("wanda", "evolutionary search", s, 0) for s in a.sparsities]
    for job in jobs:
        if (*job, a.samples) not in done and time.monotonic() - started < 60 * a.minutes:
            keep_row(name, measure(bench, *job), a.out)
    write_section("sparsity", f"Rules at equal sparsity: {a.label}", page(a, read_rows(name, a.out)), out=a.out)


if __name__ == "__main__":
    main()
