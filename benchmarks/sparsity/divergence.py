r"""What plans of sparsity were made for, on text that decided nothing: the divergence from the dense model, beside perplexity.

    python -m benchmarks.sparsity divergence --models demo MODEL --labels embedded books --calibration stdlib FILE \
        --evaluation stdlib FILE

A directional plan minimises the Kullback-Leibler divergence from the dense model; perplexity asks something else, and a model
that lies closer to the dense one may have the larger. Rules are those of ``rules``; differences from the first of
``--rules`` are paired by window. Rows are kept under ``results/rows`` as they are measured.
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import torch
from benchmarks.sparsity.rules import Bench
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

from layerbudget.decisions.bits.plan import describe_rows
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.sparsity.apply import prune

RULES = ("uniform", "directional (Linear), 24 passes", "directional (Linear), 8 steps")


def measured(bench, reference, rule, method, sparsity):
    """Rows of windows of a plan, and what the plan cost."""
    plan, forwards, _ = bench.plan(rule, method, sparsity, 0)
    pruned = copy.deepcopy(bench.model)
    prune(pruned, plan, bench.calibration(0), method, 8)
    return reference.rows(pruned), forwards


def model_rows(a, place, done):
    """Every pruner, sparsity and rule of one model."""
    own = {"model": a.models[place], "calibration": a.calibration[place], "evaluation": a.evaluation[place]}
    bench = Bench(argparse.Namespace(**vars(a) | own))
    reference = DenseOutput(bench.model, bench.held_out, batch_size=16)
    for method in a.methods:
        for sparsity in a.sparsities:
            first = None
            for rule in a.rules:
                key = (a.labels[place], method, sparsity, rule)
                if key in done:
                    first = None if rule == a.rules[0] else first
                    continue
                if first is None and rule != a.rules[0]:
                    first, _ = measured(bench, reference, a.rules[0], method, sparsity)
                rows, forwards = measured(bench, reference, rule, method, sparsity)
                first = rows if first is None else first
                row = dict(zip(("model", "method", "target", "rule"), key, strict=True)) | {"forwards": forwards}
                row |= describe_rows(rows, first) | {"loss": _loss(rows, first)}
                keep_row("sparsity_divergence", row, a.out)


def _loss(rows, first):
    """Paired difference of the mean next-token loss, with its standard error."""
    each = (rows[:, 2] - first[:, 2]) / rows[:, 3]
    return [float(each.mean()), float(each.std(ddof=1) / math.sqrt(len(each)))]


def table(rows, a):
    """As Markdown."""
    lines = [
        f"KL from the dense model in nats per token and perplexity on {a.windows} windows of {a.length} tokens, plans from 16 sequences;"
    ]
    lines += [
        f"differences from {a.rules[0]}, paired by window, with standard errors.",
        "",
    ]
    lines += [
        "| model | pruner | zeros | rule | forwards | KL | difference | perplexity | difference of the loss |",
        "|---" * 9 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r['model']} | {r['method']} | {r['target']:.0%} | {r['rule']} | {r['forwards']:.0f} | {r['kl']:.4f} | "
            f"{r['difference']:+.4f} +- {r['difference_error']:.4f} | {r['perplexity']:.2f} | {r['loss'][0]:+.4f} +- {r['loss'][1]:.4f} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("models", "labels", "calibration", "evaluation"):
        parser.add_argument(f"--{name}", nargs="+", required=True)
    parser.add_argument("--methods", nargs="+", default=["wanda", "sparsegpt"])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.6, 0.7])
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    for name, default in (("samples", 16), ("length", 128), ("windows", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cap", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    done = {(r["model"], r["method"], r["target"], r["rule"]) for r in read_rows("sparsity_divergence", a.out)}
    for place in range(len(a.models)):
        model_rows(a, place, done)
    lines = table(read_rows("sparsity_divergence", a.out), a)
    write_section("sparsity", "What directional plans minimise, on held-out text", lines, out=a.out)


if __name__ == "__main__":
    main()
