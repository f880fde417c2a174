"""Accuracy on tasks with whole plans of a real model: dense, mix, uniform and plan at the bytes of llama.cpp's mixes, paired.

    python -m benchmarks.bits tasks MODEL --fit FILE --held-out FILE --name smollm2 --data-dir FOLDER [--like Q2_K Q4_K_M]

Damages are those that ``benchmarks.bits whole`` left in ``--scratch``. Every question is answered by every model, without
examples before it, by lm-eval. Differences from the plan are tested by McNemar's exact test over the questions of all tasks: of
right answers, and of answers that flipped, which are right in one of the dense model and this one, and wrong in the other.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.bits.whole import Bench, of_rule, processor_seconds
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

import layerbudget as lb
from layerbudget.decisions.formats.program import formats_of_plan
from layerbudget.evaluation.harness import evaluate_tasks
from layerbudget.evaluation.statistics import compare_means, flipped, mcnemar, mean_accuracy
from layerbudget.sensitivity.sequences import per_token

RULES = (("mix", "weighted"), ("uniform", "gptq"), ("plan", "gptq"))
LIMITS = {"arc_easy": 500, "hellaswag": 200}
COLUMNS = ("mean", "minus the plan", "flipped: lost + gained", "flips minus the plan's")


def answers(bench: Any, a: argparse.Namespace) -> dict[str, Any]:
    """Results of every task of a bench's model as it is now."""
    result = {}
    for task in a.tasks:
        limit = a.limit or a.limits.get(task)
        result |= evaluate_tasks(bench.model, bench.tokenizer, [task], data_dir=a.data_dir, limit=limit, batch_size=a.batch)
    return result


def measure(bench: Bench, a: argparse.Namespace, like: str, rule: str, method: str) -> dict[str, Any]:
    """Answers of a rule's formats at the bytes of a mix, with the KL of the windows; the model is afterwards as it was."""
    row: dict[str, Any] = {"like": like, "rule": rule, "method": method}

    @contextlib.contextmanager
    def asked() -> Iterator[None]:
        row["tasks"] = answers(bench, a)
        yield

    used = processor_seconds()
    if rule == "dense":
        row["tasks"] = answers(bench, a)
    else:
        plan = of_rule(lb.plan_bits(bench.scores("gptq"), like=like), bench, rule)
        kl = bench.dense.rows_within(bench.model, formats_of_plan(plan), [asked], bench.fit, method)[0]
        row |= {"bytes": int(plan.budget["spent"]), "kl": round(per_token(kl[:, 0], kl[:, 1])[0], 5)}
    return row | {"seconds": round(processor_seconds() - used)}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each model: accuracy by task, their mean, flips, and the paired differences from the plan of the same bytes."""
    tasks = list(rows[0]["tasks"])
    lines = [
        f"| bytes of | rule | rounding | bytes | KL | {' | '.join(tasks)} | {' | '.join(COLUMNS)} |",
        f"|---|---|---|---:|---|{'---|' * (len(tasks) + len(COLUMNS))}",
    ]
    for row in rows:
        plan = next((r for r in rows if r["like"] == row["like"] and r["rule"] == "plan"), row)
        size = [f"{row['bytes']:,}", f"{row['kl']:.4f}"] if "kl" in row else ["", ""]
        lines.append(f"| {' | '.join([row['like'], row['rule'], row['method'], *size, *accuracy(row, plan, rows[0])])} |")
    return lines


def accuracy(row: Mapping[str, Any], plan: Mapping[str, Any], dense: Mapping[str, Any]) -> list[str]:
    """Cells of a row: accuracy by task and those of ``COLUMNS``, with the p of McNemar's test; flips are of all questions."""
    own, base = row["tasks"], dense["tasks"]
    cells = [f"{each['acc']:.1%}" for each in own.values()] + [f"{mean_accuracy(own)['acc']:.1%}"]
    if row is dense:
        return [*cells, "", "", ""]
    now, then = (np.concatenate([each["correct"] for each in side.values()]) for side in (own, base))
    turned = f"{(now != then).mean():.1%}: {(now < then).sum()} + {(now > then).sum()}"
    if plan is row:
        return [*cells, "", turned, ""]
    here, there = (np.concatenate(list(flipped(side, base).values())) for side in (own, plan["tasks"]))
    tests = compare_means(own, plan["tasks"]), mcnemar((here, there))
    right, flips = (f"{100 * test.difference:+.1f} points (p = {test.p:.2g})" for test in tests)
    return [*cells, right, turned, flips]


def main() -> None:
    """Parse, measure and write a section."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", required=True, help="text that decides")
    p.add_argument("--held-out", nargs="+", required=True, help="texts that KL is measured on")
    p.add_argument("--name", required=True, help="what the page calls the model")
    p.add_argument("--data-dir", required=True, help="folder with the tasks' files")
    p.add_argument("--tasks", nargs="+", default=list(LIMITS))
    p.add_argument("--limit", type=int, help=f"questions of each task (default: {LIMITS})")
    p.add_argument("--like", nargs="+", default=["Q2_K", "Q3_K_M", "Q4_K_M"])
    p.add_argument("--samples", type=int, default=32)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--windows", type=int, default=8)
    p.add_argument("--window", type=int, default=256)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--scratch", type=Path, required=True, help="folder with damages")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    a.limits = LIMITS
    kept, bench = f"tasks_{a.name}", None
    for like, rule, method in [("", "dense", ""), *((like, *way) for like in a.like for way in RULES)]:
        if not any((r["like"], r["rule"]) == (like, rule) for r in read_rows(kept, a.out)):
            bench = bench or Bench(a)
            row = measure(bench, a, like, rule, method)
            keep_row(kept, row, a.out)
            print(like, rule, {t: round(r["acc"], 3) for t, r in row["tasks"].items()}, row["seconds"], flush=True)
    rows = read_rows(kept, a.out)
    asked = ", ".join(f"{r['samples']} of {t}" for t, r in rows[0]["tasks"].items())
    used = np.sum([r["seconds"] for r in rows])
    lines = [f"Questions, without examples: {asked}. Processor: {used:,} s.", "", *table(rows)]
    write_section("tasks", a.name, lines, out=a.out, peers=("gguf", "lm_eval"))


if __name__ == "__main__":
    main()
