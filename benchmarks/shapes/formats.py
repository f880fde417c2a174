"""Smaller shapes and higher formats, or all shapes and lower formats: held-out KL at equal bytes.

    python -m benchmarks.shapes formats [--model demo] [--saves 0 5 10 20] [--bits 2.6 3 3.5 4 5] [--out FOLDER]

Layers become smaller by the uneven shapes of the default search (0: all stay), refitted on the text that planned them. The model that is
left gets the best formats for the bytes of a row, by damages measured on itself. Rounding has error feedback (``gptq``). A row's bytes
are those of a file whose matrices have that mean width with all shapes. KL is from the dense model, on held-out windows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.decisions.bits.plan import describe_rows, plan_bits
from layerbudget.decisions.bits.sensitivity import DenseOutput, rounding_damage


def main() -> None:
    """Run every pair and write the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="demo")
    p.add_argument("--name")
    p.add_argument("--saves", type=float, nargs="+", default=[0, 5, 10, 20])
    p.add_argument("--bits", type=float, nargs="+", default=[2.6, 3, 3.5, 4, 5])
    p.add_argument("--samples", type=int, default=16)
    p.add_argument("--length", type=int, default=128)
    p.add_argument("--windows", type=int, default=60)
    p.add_argument("--group", type=int, default=32)
    p.add_argument("--method", default="gptq")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    sources = ("stdlib", "stdlib") if a.model == "demo" else (f"{a.model}/calibration.txt", f"{a.model}/evaluation.txt")
    tokenizer = lb.load_tokenizer(a.model)
    data = lb.calibration(sources[0], tokenizer, samples=a.samples, length=a.length)
    held = lb.evaluation_set(sources[1], tokenizer, length=a.length)
    held = held.select(list(range(0, held.samples, max(1, held.samples // a.windows)))[: a.windows])
    joint = DenseOutput(lb.load_model(a.model, dtype="float32"), held)
    budgets, columns = [], []
    for save in sorted(a.saves):
        model = lb.load_model(a.model, dtype="float32")
        if save:
            lb.apply_shapes(model, lb.plan_shapes(model, data, f"{save}% flops", multiple=a.group), data)
        shape = describe_rows(joint.rows(model))["kl"]
        scores = rounding_damage(model, data, method=a.method, group=a.group)
        if not budgets:
            beside = scores.extra["formats"]["fixed"]
            budgets = [plan_bits(scores, bits=bits).budget["limit"] + beside for bits in a.bits]
        column = [(save, shape)]
        for limit in budgets:
            plan = plan_bits(scores, budget=f"{limit} bytes")
            rows = joint.rows_of(model, plan.payload.formats, data, a.method)
            column.append((plan.payload.bits, describe_rows(rows)["kl"]))
            print(save, limit, plan.budget["spent"], *column[-1], flush=True)
        columns.append(column)
    head = [f"{save:g} % of FLOPs gone (shape alone {shape:.3g})" for (save, shape), *_ in columns]
    lines = ["| bits | bytes | " + " | ".join(head) + " |", "|---|---|" + "---|" * len(head)]
    for i, (bits, limit) in enumerate(zip(a.bits, budgets, strict=True), 1):
        cells = [f"{column[i][1]:.4g} ({column[i][0]:.2f} bits)" for column in columns]
        lines.append(f"| {bits:g} | {limit:,} | " + " | ".join(cells) + " |")
    name = a.name or Path(a.model).name
    about = "Held-out KL, nats per token, at equal bytes; in brackets the mean bits of the weights that stay. "
    about += (
        f"`{a.method}`, groups of {a.group}, {a.samples} x {a.length} tokens decide, {held.samples} held-out windows. One seed."
    )
    write_section("shapes", f"Smaller shapes or lower formats: {name}", [about, "", *lines], out=a.out)


if __name__ == "__main__":
    main()
