r"""Accuracy on tasks of a real model with zeros: dense, and by several rules at equal recounted sparsity, paired.

    python -m benchmarks.sparsity tasks MODEL --fit FILE --held-out FILE --name smollm2 --data-dir FOLDER
        [--methods wanda] [--sparsities 0.5] [--rules uniform OWL 'directional (Linear), 4 steps']

Every question is answered by every model, without examples before it, by lm-eval. Differences from the directional plan are tested
by McNemar's exact test over the questions of all tasks: of right answers, and of answers that flipped beside the dense model. Rows are kept under ``results/rows`` and are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.bits.tasks import COLUMNS, accuracy, answers
from benchmarks.bits.whole import processor_seconds
from benchmarks.sparsity.real import RealBench, per_window
from benchmarks.stamp import RESULTS, keep_row, peak_gib, read_rows, write_section

from layerbudget.decisions.sparsity.apply import prune
from layerbudget.sensitivity.sequences import per_token

RULES = ("uniform", "OWL", "directional (Linear), 4 steps")
LIMITS = {"arc_easy": 500, "boolq": 100, "hellaswag": 200}


class TaskBench(RealBench):
    """A real model, its rules, and the questions that it is asked."""

    def answered(self, method: str, sparsity: float, rule: str) -> dict[str, Any]:
        """Answers, KL and loss of a model that is pruned by a rule; of the dense one where no rule is named."""
        used, row, dense = processor_seconds(), {"method": method, "target": sparsity, "rule": rule}, self.model
        if rule != "dense":
            plan, forwards, _ = self.plan(rule, method, sparsity, 0)
            self.model = copy.deepcopy(dense)
            receipt = prune(self.model, plan, self.calibration(0), method, self.a.batch)
            rows = self.dense.rows(self.model)
            row |= {"sparsity": receipt.sparsity, "forwards": forwards, "kl": [round(v, 5) for v in rows[:, 0]]}
            row["tokens"] = rows[:, 1].tolist()
        row["tasks"] = answers(self, self.a)
        self.model = dense
        return row | {"seconds": round(processor_seconds() - used), "peak": round(peak_gib(), 2)}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each model: accuracy by task, their mean, flips, and the paired differences from the directional plan."""
    tasks = list(rows[0]["tasks"])
    lines = [
        f"| pruner | zeros | rule | KL | {' | '.join(tasks)} | {' | '.join(COLUMNS)} |",
        f"|---|---|---|---|{'---|' * (len(tasks) + len(COLUMNS))}",
    ]
    for row in rows:
        same = [r for r in rows if (r["method"], r["target"]) == (row["method"], row["target"])]
        plan = next((r for r in same if r["rule"].startswith("directional")), row)
        size = ["", "", "dense", ""] if row["rule"] == "dense" else [row["method"], f"{row['sparsity']:.0%}", row["rule"]]
        if "kl" in row:
            size.append(f"{per_token(*per_window(row, slice(None), 'kl'))[0]:.3f}")
        lines.append(f"| {' | '.join([*size, *accuracy(row, plan, rows[0])])} |")
    return lines


def main() -> None:
    """Parse, measure what is missing, and write a section."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", required=True, help="text that decides")
    p.add_argument("--held-out", nargs="+", required=True, help="texts that KL is measured on")
    p.add_argument("--name", required=True, help="what the page calls the model")
    p.add_argument("--data-dir", required=True, help="folder with the tasks' files")
    p.add_argument("--tasks", nargs="+", default=list(LIMITS))
    p.add_argument("--limit", type=int, help=f"questions of each task (default: {LIMITS})")
    p.add_argument("--methods", nargs="+", default=["wanda"])
    p.add_argument("--sparsities", type=float, nargs="+", default=[0.5])
    p.add_argument("--rules", nargs="+", default=list(RULES))
    for name, default in (("samples", 8), ("length", 256), ("windows", 16), ("window", 256), ("batch", 8)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--cap", type=float, default=0.9, help="largest sparsity of a unit, of rules that are not directional")
    p.add_argument("--dtype", default="float32", help="precision of the model")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    a.calibration, a.limits = a.fit, LIMITS
    torch.set_num_threads(1)
    kept, bench = f"tasks_zeros_{a.name}", None
    order = [("", 0.0, "dense"), *itertools.product(a.methods, a.sparsities, a.rules)]
    for job in order:
        if not any((r["method"], r["target"], r["rule"]) == job for r in read_rows(kept, a.out)):
            bench = bench or TaskBench(a)
            row = bench.answered(*job)
            keep_row(kept, row, a.out)
            print(*job, {t: round(r["acc"], 3) for t, r in row["tasks"].items()}, row["seconds"], flush=True)
    rows = [r for job in order for r in read_rows(kept, a.out) if (r["method"], r["target"], r["rule"]) == job]
    asked = ", ".join(f"{r['samples']} of {t}" for t, r in rows[0]["tasks"].items())
    lines = [
        f"Questions, without examples: {asked}. {a.samples} x {a.length} tokens of {Path(a.fit).name} decide; KL in nats per token on "
        f"{a.windows} windows of {a.window} tokens of each of {', '.join(Path(f).name for f in a.held_out)}. "
        f"Processor: {sum(r['seconds'] for r in rows):,} s.", "", *table(rows),
    ]  # fmt: skip
    write_section("tasks", f"{a.name}, zeros", lines, out=a.out, peers=("lm_eval",))


if __name__ == "__main__":
    main()
