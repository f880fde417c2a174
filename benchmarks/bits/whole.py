"""KL of whole plans of a real model at the bytes of llama.cpp's mixes: mix, uniform and plan, by several ways to round.

    python -m benchmarks.bits whole MODEL --fit FILE --held-out FILE ... --name smollm2 [--like Q3_K_M Q4_K_M] [--methods gptq descent]

Damages of all types are measured once for each method, on the text to fit, and planned at the bytes of every mix. The text to fit
gives the moments that rounding reads, too. Other texts decide nothing: KL from the dense model is measured on windows of them, and
differences are paired by window. The mix is rounded as llama-quantize rounds it with an importance matrix of the same text.
Rows are kept under ``results/rows`` and not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.stamp import RESULTS, keep_row, peak_gib, read_rows, write_section

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.formats.payload import WeightsPayload
from layerbudget.decisions.formats.program import formats_of_plan, other_plan
from layerbudget.plan import Plan, payload_of
from layerbudget.sensitivity.sequences import per_token

MIXES = ("Q2_K", "IQ2_M", "Q3_K_M", "IQ3_M", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_M")
METHODS = ("gptq", "descent")


class Bench:
    """A model, its tokens, and its output on windows of texts that decide nothing."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.tokenizer = a, lb.load_tokenizer(a.model)
        self.model = lb.load_model(a.model, dtype=a.dtype)
        self.fit = lb.calibration(a.fit, self.tokenizer, samples=a.samples, length=a.length)
        held = [lb.calibration(f, self.tokenizer, samples=a.windows, length=a.window, seed=1) for f in a.held_out]
        windows = dataclasses.replace(held[0], input_ids=torch.cat([each.input_ids for each in held]))
        self.dense = DenseOutput(self.model, windows, batch_size=a.batch)
        self.measured: dict[str, lb.Scores] = {}

    def scores(self, method: str) -> lb.Scores:
        """Damages of every type under a method; those that an earlier run finished are read."""
        if method not in self.measured:
            file = self.a.scratch / f"{self.a.name}-{method}.json"
            if not file.is_file():
                used = processor_seconds()
                lb.plan_bits(
                    self.model, self.fit, like="Q4_K_M", method=method, tokenizer=self.tokenizer, save_scores=file, batch_size=self.a.batch
                )  # fmt: skip
                row = {"seconds": round(processor_seconds() - used, 1), "peak": round(peak_gib(), 2)}
                keep_row(f"whole_{self.a.name}_damages", {"method": method, **row}, self.a.out)
            self.measured[method] = lb.Scores.load(file)
        return self.measured[method]

    def row(self, plan: Plan, method: str) -> dict[str, Any]:
        """KL of every window with a plan's formats, rounded by a method, and what that took; the model is afterwards as it was."""
        used = processor_seconds()
        rows = self.dense.rows_of(self.model, formats_of_plan(plan), self.fit, method)
        return {
            "seconds": round(processor_seconds() - used, 1),
            "bytes": int(plan.budget["spent"]),
            "predicted": payload_of(plan, WeightsPayload).predicted,
            "kl": [round(v, 6) for v in rows[:, 0]],
            "tokens": rows[:, 1].tolist(),
        }


def processor_seconds() -> float:
    """Seconds of this process and of those that it waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(bench: Bench, mix: str, method: str, *, first: bool) -> list[dict[str, Any]]:
    """Rows of plan and uniform at the bytes of a mix, and at first of the mix as llama-quantize rounds it."""
    plan = lb.plan_bits(bench.scores(method), like=mix)
    rows = [{"rule": rule, "method": method, **bench.row(of_rule(plan, bench, rule), method)} for rule in ("plan", "uniform")]
    if first:
        rows.append({"rule": "mix", "method": "weighted", **bench.row(of_rule(plan, bench, "mix"), "weighted")})
    return [{"like": mix, "asked": method, **row} for row in rows]


def of_rule(plan: Plan, bench: Bench, rule: str) -> Plan:
    """What a rule makes of the budget of a plan."""
    return plan if rule == "plan" else other_plan(plan, bench.scores(plan.hyperparameters["method"]), rule)


def kl_of(row: Mapping[str, Any], part: slice, beside: Mapping[str, Any] | None = None) -> tuple[float, float]:
    """KL per token on some windows and its standard error, or what it is less than another row's."""
    kl, tokens = np.array(row["kl"])[part], np.array(row["tokens"])[part]
    return per_token(kl if beside is None else kl - np.array(beside["kl"])[part], tokens)


def table(rows: Sequence[Mapping[str, Any]], part: slice) -> list[str]:
    """A line for each way at each mix's bytes, beside the plan by gptq, with two standard errors."""
    lines = [
        "| bytes of | rounding | rule | bytes | predicted | KL | beside plan by `gptq` | |",
        "|---|---|---|---:|---|---|---|---|",
    ]
    for mix, group in itertools.groupby(rows, key=lambda r: r["like"]):
        own = list(group)
        base = next((r for r in own if (r["rule"], r["method"]) == ("plan", "gptq")), own[0])
        for row in own:
            (kl, error), (more, noise) = kl_of(row, part), kl_of(row, part, base)
            share = "" if row is base else f"{more / kl_of(base, part)[0]:+.0%}"
            shown = "" if row is base else f"{more:+.2g} +- {2 * noise:.1g}"
            lines.append(
                f"| {mix} | `{row['method']}` | {row['rule']} | {row['bytes']:,} | {row['predicted']:.3g} "
                f"| {kl:.4f} +- {2 * error:.4f} | {shown} | {share} |"
            )
    return lines


def main() -> None:
    """Parse, measure and write a section."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", required=True, help="text that decides")
    p.add_argument("--held-out", nargs="+", required=True, help="texts that KL is measured on")
    p.add_argument("--name", required=True, help="what the page calls the model")
    p.add_argument("--like", nargs="+", default=list(MIXES))
    p.add_argument("--methods", nargs="+", default=list(METHODS))
    p.add_argument("--samples", type=int, default=64)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--windows", type=int, default=24, help="of each text")
    p.add_argument("--window", type=int, default=256)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--dtype", default="float32", help="precision of the model that is measured")
    p.add_argument("--scratch", type=Path, required=True, help="folder for damages, which other runs may read")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    a.scratch.mkdir(parents=True, exist_ok=True)
    kept, bench = f"whole_{a.name}", None
    for mix, method in itertools.product(a.like, a.methods):
        done = [r for r in read_rows(kept, a.out) if r["like"] == mix]
        if not any(r["asked"] == method for r in done):
            bench = bench or Bench(a)
            for row in measure(bench, mix, method, first=not done):
                keep_row(kept, row, a.out)
                print(mix, method, row["rule"], kl_of(row, slice(None)), row["seconds"], flush=True)
    rows = [r for m in MIXES for r in read_rows(kept, a.out) if r["like"] == m and r["asked"] in a.methods]
    lines = [
        f"Damages and moments of {a.samples} x {a.length} tokens of {Path(a.fit).name}. KL in nats per token, with two standard errors.",
        "",
        "| method | processor (s) of the damages | peak memory (GiB) |",
        "|---|---:|---:|",
        *(f"| `{r['method']}` | {r['seconds']:.0f} | {r['peak']} |" for r in read_rows(f"{kept}_damages", a.out)),
    ]
    for i, file in enumerate(a.held_out):
        lines += ["", f"On {a.windows} windows of {a.window} tokens of {Path(file).name}:", ""]
        lines += table(rows, slice(i * a.windows, (i + 1) * a.windows))
    write_section("whole", a.name, lines, out=a.out, peers=("gguf", "xllamacpp"))


if __name__ == "__main__":
    main()
