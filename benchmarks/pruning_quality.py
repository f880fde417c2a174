"""Does a plan pay? Perplexity at equal recounted sparsity for every rule, pruner and seed, and beside an evolutionary search.

    python benchmarks/pruning_quality.py --model demo [--calibration stdlib] [--evaluation stdlib] --name quality_stdlib

Rows are appended to a .jsonl file as they are measured, so that a run that was cut continues and a partial table is a table.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from layerbudget.data.text import calibration
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.directional import PASSES
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.models.blocks import describe, partition
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.plan import Plan, PlanBlock
from layerbudget.sensitivity.gain import score

RESULTS = Path(__file__).parent / "results"
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
RECORDED = ("calibrated (block)", "calibrated (Linear)", "calibrated (Linear), measured again")  # a search that is gone
BY = {"block": "layer", "Linear": "linear", "rows": "rows:1", "8 rows": "rows:8"}
STEPS, DEFAULT = (1, 2, 4, 8, 12, 20), f"{PASSES:g} passes"
DIRECTIONAL = {
    # label: (by, most steps, options); steps are of three forward equivalents, beside one dense forward and the last measurement
    **{f"directional ({name}), {k} step{'s' if k > 1 else ''}": (by, k, {}) for name, by in BY.items() for k in STEPS},
    **{f"directional ({name}), {DEFAULT}": (by, None, {}) for name, by in BY.items()},
}
RULES = ("uniform", "size-proportional (Linear)", *SCORED, *RECORDED, *DIRECTIONAL)


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
            return plan, plan.extra["forward_passes"], time.process_time() - started
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


def _named(missing):
    return "; ".join(sorted({f"{method} {rule}" for method, rule, *_ in missing}))


def _short(row):
    return {k: v for k, v in row.items() if k != "nll"}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows, a, dense):
    lines = [f"# Perplexity after pruning, {a.name}", ""]
    lines += [
        f"Dense {dense:.3f}. Mean over calibration seeds +- standard error; equal recounted sparsity in every column.",
        "",
    ]
    summary = {}
    for method in a.methods:
        lines += [
            f"## {method}",
            "",
            "| rule | " + " | ".join(f"{s:.0%}" for s in a.sparsities) + " | forwards | CPU s | seeds |",
        ]
        lines += ["|---" * (len(a.sparsities) + 4) + "|"]
        for rule in (*RULES, "evolutionary search"):
            cells, cost, cpu, seeds = [], [], [], set()
            for s in a.sparsities:
                found = [r for r in rows if r["method"] == method and r["rule"] == rule and r["target"] == s and "value" in r]
                cells.append(_cell([r["value"] for r in found]))
                cost += [r["forwards"] for r in found]
                cpu += [r["seconds"] for r in found]
                seeds |= {r["seed"] for r in found}
                summary[f"{method}|{s}|{rule}"] = {r["seed"]: r["nll"] for r in found}
            if seeds:
                mean = f"{statistics.mean(cost):.1f} | {statistics.mean(cpu):.1f}"
                lines.append(f"| {rule} | " + " | ".join(cells) + f" | {mean} | {len(seeds)} |")
        lines.append("")
    lines += ["## Best rule at every point", "", "Tied: the paired difference over windows is within two standard errors.", ""]
    lines += [*_verdicts(summary, a), ""]
    return "\n".join(lines)


def _cell(values):
    if not values:
        return "-"
    error = f" +- {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{error}"


def _tied(best, other):
    """Whether the paired difference over windows (averaged over the seeds both have) is within two standard errors of zero."""
    seeds = sorted(set(best) & set(other))
    difference = np.mean([np.subtract(other[s], best[s]) for s in seeds], axis=0)
    return bool(difference.mean() < 2 * difference.std(ddof=1) / math.sqrt(len(difference)))


def _verdicts(summary, a):
    lines = []
    for method in a.methods:
        for s in a.sparsities:
            found = {r: summary[f"{method}|{s}|{r}"] for r in RULES if summary.get(f"{method}|{s}|{r}")}
            if not found:
                continue
            means = {r: statistics.mean(math.exp(statistics.mean(x)) for x in v.values()) for r, v in found.items()}
            best = min(means, key=means.get)
            text = f"- {method} {s:.0%}: best {best} ({means[best]:.2f})"
            tied = [r for r in found if r != best and _tied(found[best], found[r])]
            text += f", tied with {', '.join(tied)}" if tied else ""
            if "uniform" in means:
                text += f"; uniform {means['uniform']:.2f}, {100 * (means['uniform'] / means[best] - 1):.1f} % above it"
            lines.append(text + ".")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", default="stdlib")
    parser.add_argument("--evaluation", default="stdlib")
    parser.add_argument("--name", default="quality_stdlib")
    parser.add_argument("--label", help="what to call the model in the result (default: its name)")
    for name, default in (("samples", 32), ("length", 256), ("windows", 256), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cap", type=float, default=0.9)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.6, 0.7])
    parser.add_argument("--methods", nargs="+", default=["wanda", "sparsegpt", "magnitude"])
    parser.add_argument("--rules", nargs="+", default=[rule for rule in RULES if rule not in RECORDED])
    parser.add_argument("--evolve", type=int, default=0, help="generations of the evolutionary search (seed 0, Wanda)")
    parser.add_argument("--offspring", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    a = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    log = RESULTS / f"{a.name}.jsonl"
    bench, rows, started = Bench(a), rows_of(log), time.monotonic()
    dense = perplexity(bench.model, bench.held_out).value
    done = {(r["method"], r["rule"], r["target"], r["seed"]) for r in rows}
    jobs = [(m, r, s, seed) for seed in range(a.seeds) for m in a.methods for s in a.sparsities for r in a.rules]
    if a.evolve:
        jobs += [("wanda", "evolutionary search", s, 0) for s in a.sparsities]
    for method, rule, sparsity, seed in jobs:
        if (method, rule, sparsity, seed) in done or time.monotonic() - started > 60 * a.minutes:
            continue
        row = {"method": method, "rule": rule, "target": sparsity, "seed": seed}
        try:
            if rule.startswith("evolutionary"):
                plan, cost, cpu = random_search(bench, method, sparsity, seed, a.evolve, a.offspring)
            else:
                plan, cost, cpu = bench.plan(rule, method, sparsity, seed)
            recounted, value = bench.measure(plan, method, seed)
            row |= {
                "sparsity": recounted,
                "value": value.value,
                "nll": [round(v, 4) for v in value.nll],
                "forwards": cost,
                "seconds": cpu,
                "plan": plan.values.tolist(),
            }
            if rule in DIRECTIONAL:
                row |= {k: plan.extra[k] for k in ("predicted", "measured", "held_out")} | {"by": plan.hyperparameters["by"]}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".split(" (/")[0][:300]
        rows.append(row)
        with log.open("a") as f:
            f.write(json.dumps(row) + "\n")
    import transformers

    environment = {
        "model": a.label or a.model, "parameters": sum(p.numel() for p in bench.model.parameters()), "threads": 1,
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "samples": a.samples, "length": a.length, "windows": a.windows, "cap": a.cap,
    }  # fmt: skip
    text = table(rows, a, dense) + "\nEnvironment: " + json.dumps(environment) + "\n"
    errors = sorted({f"{r['rule']}: {r['error']}" for r in rows if "error" in r})
    missing = [j for j in jobs if not any((r["method"], r["rule"], r["target"], r["seed"]) == j for r in rows)]
    text += "\n" + "\n".join(f"Failed: {e}" for e in errors) + ("\n" if errors else "")
    text += f"\n{len(missing)} of {len(jobs)} points are missing: {_named(missing)}.\n" if missing else ""
    (RESULTS / f"{a.name}.md").write_text(text)
    (RESULTS / f"{a.name}.json").write_text(
        json.dumps({"environment": environment, "dense": dense, "rows": [_short(r) for r in rows]}, indent=0) + "\n"
    )
    print(text)


if __name__ == "__main__":
    main()
