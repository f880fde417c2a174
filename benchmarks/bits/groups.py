"""Perplexity and KL of plans of bits at equal bytes: uniform, protected layers, scores, measured and directional damage.

    python -m benchmarks.bits groups [--model demo] [--name embedded] [--bits 3 4 2.5 3.5] [--methods rtn gptq] [--windows 120] [--out FOLDER]

Weights in groups of 32 (compressed-tensors), calibrated on 16 x 128 tokens; a row's budget is what uniform takes at that width (between two
widths: half way between the two), recounted. Everything is evaluated on held-out windows; differences are paired by window. Passes are
forward equivalents (backward 2) spent on the damages. Finished rows are kept under ``results/rows`` and not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

import layerbudget as lb
from layerbudget.compressors.base import Level, find_quantiser
from layerbudget.decisions.bits.plan import describe_rows, plan_bits
from layerbudget.decisions.bits.sensitivity import DenseOutput, rounding_damage
from layerbudget.execution.divergence import next_tokens, sequence_losses
from layerbudget.models.blocks import weight_of
from layerbudget.scores import Scores
from layerbudget.sensitivity.sequences import per_token

RULES = ("uniform", "protect-ends", "first-order", "measured", "directional")


def first_order(model, data, scores: Scores) -> Scores:
    """AutoScheme's additive score: sum of |gradient of the loss x rounding error| of every matrix and format, 3 passes."""
    blocks, names = scores.blocks, scores.extra["formats"]["formats"]
    weights = {m.name: weight_of(model, m.name)[1] for b in blocks for m in b.modules}
    for batch in data.batches(8, torch.device("cpu")):
        loss = sequence_losses(model(**batch).logits[:, :-1].float(), next_tokens(batch["input_ids"], None)).sum()
        loss.backward()
    quantiser, damage = find_quantiser("rtn"), []
    with torch.no_grad():
        for b in blocks:
            row = []
            for name in names:
                changed = (
                    (quantiser.apply(weights[m.name], None, Level(format=name)) - weights[m.name], m.name) for m in b.modules
                )
                row.append(float(sum((d * weights[n].grad).abs().sum() for d, n in changed)))
            damage.append(row)
    model.zero_grad()
    held = {**scores.extra["formats"], "damage": damage, "passes": 3.0, "measure": "first-order"}
    return dataclasses.replace(scores, extra={"formats": held})


def measured(model, data, scores: Scores) -> Scores:
    """The damage of every format by a forward with one block in it, everything else dense."""
    held, dense, damage = scores.extra["formats"], DenseOutput(model, data), []
    for b, row in zip(scores.blocks, held["damage"], strict=True):
        formats = [None if d is None else {m.name: f for m in b.modules} for f, d in zip(held["formats"], row, strict=True)]
        rows = [None if f is None else dense.rows_of(model, f, data, held["method"]) for f in formats]
        damage.append([None if r is None else per_token(*r[:, :2].T)[0] for r in rows])
    passes = 1.0 + sum(d is not None for row in damage for d in row)
    return dataclasses.replace(scores, extra={"formats": {**held, "damage": damage, "passes": passes, "measure": "measured"}})


def budget_of(scores: Scores, bits: float) -> str:
    """Bytes of uniform at a width, or half way between two, as a budget of the file."""
    held, low = scores.extra["formats"], int(bits)
    size = np.array(held["size"], dtype=np.int64)
    at = {int(n[1]): size[:, j].sum() for j, n in enumerate(held["formats"]) if n.startswith("w")}
    share = bits - low
    return f"{int(at[low] + (share * (at[low + 1] - at[low]) if share else 0)) + held['fixed']} bytes"


class Bench:
    """One model with its damages, measured once."""

    def __init__(self, a: argparse.Namespace) -> None:
        tokenizer = lb.load_tokenizer(a.model)
        self.a, self.model = a, lb.load_model(a.model)
        self.fit = lb.calibration(a.data, tokenizer, samples=16, length=128)
        held = lb.evaluation_set(a.evaluation or a.data, tokenizer, length=128)
        step = max(1, held.samples // a.windows)
        chosen = torch.arange(0, held.samples, step)[: a.windows]
        self.joint = DenseOutput(self.model, dataclasses.replace(held, input_ids=held.input_ids[chosen]), 20)
        self.dense = describe_rows(self.joint.rows(self.model))["perplexity"]
        self.scores: dict[tuple[str, str], tuple[Scores, float]] = {}

    def damages(self, rule: str, method: str) -> Scores:
        """The record that a rule plans from."""
        key = (rule if rule in ("measured", "first-order") else "directional", method if rule != "first-order" else "rtn")
        if key not in self.scores:
            start = time.process_time()
            if key[0] == "first-order":
                found = first_order(self.model, self.fit, self.damages("directional", "rtn"))
            elif key[0] == "measured":
                found = measured(self.model, self.fit, self.damages("directional", method))
            else:
                found = rounding_damage(self.model, self.fit, method=key[1], group=32)
            self.scores[key] = found, time.process_time() - start
        return self.scores[key][0]

    def row(self, bits: float, method: str, rule: str) -> tuple[dict[str, Any], np.ndarray]:
        """One plan, in the model as a whole."""
        scores = self.damages(rule, method)
        plan = plan_bits(scores, budget=budget_of(scores, bits), rule=rule if rule in ("uniform", "protect-ends") else "exact")
        rows = self.joint.rows_of(self.model, plan.payload.formats, self.fit, method)
        blind = rule in ("uniform", "protect-ends")
        spent = {"passes": 0.0 if blind else scores.extra["formats"]["passes"], "bytes": plan.budget["spent"]}
        return {"bits": bits, "method": method, "rule": rule, "exact_bits": plan.payload.bits, **spent,
                "predicted": plan.payload.predicted, **describe_rows(rows)}, rows  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="demo")
    p.add_argument("--data", default="stdlib")
    p.add_argument("--evaluation", help="text to evaluate on (default: the evaluation part of --data)")
    p.add_argument("--bits", type=float, nargs="+", default=[3, 4, 2.5, 3.5])
    p.add_argument("--methods", nargs="+", default=["rtn", "gptq"])
    p.add_argument("--rules", nargs="+", default=list(RULES))
    p.add_argument("--windows", type=int, default=120)
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--name", default="embedded", help="what the page calls the model")
    a = p.parse_args()
    held = read_rows(f"bits_{a.name}", a.out)
    done = {(r["bits"], r["method"], r["rule"]) for r in held}
    bench = Bench(a)
    for bits in a.bits:
        for method in a.methods:
            if all((bits, method, rule) in done for rule in a.rules):
                continue
            uniform = bench.row(bits, method, "uniform")[1]
            for rule in a.rules:
                if (bits, method, rule) in done:
                    continue
                row, rows = bench.row(bits, method, rule)
                versus = describe_rows(rows, uniform)
                row |= {"versus_uniform": versus["difference"], "versus_error": versus["difference_error"]}
                row |= {"dense_perplexity": bench.dense, "windows": len(rows)}
                held.append(row)
                keep_row(f"bits_{a.name}", row, a.out)
                print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    write(a, held)


def write(a: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda r: (r["bits"], r["method"] != "rtn", list(RULES).index(r["rule"])))
    text = [
        f"Held-out windows of 128 tokens: {rows[0]['windows']}; dense perplexity {rows[0]['dense_perplexity']:.3f}. KL in nats per token",
        "from the dense model; the difference from uniform is paired by window. Exact bits count scales, padding and shapes.", "",
        "| bits | quantiser | rule | bytes | exact bits | KL | - uniform | of uniform | perplexity | predicted | passes |",
        "|---" * 11 + "|",
    ]  # fmt: skip
    for r in rows:
        same = next(u["kl"] for u in rows if (u["bits"], u["method"], u["rule"]) == (r["bits"], r["method"], "uniform"))
        text.append(
            f"| {r['bits']:g} | {r['method']} | {r['rule']} | {r['bytes']:,} | {r['exact_bits']:.3f} | {r['kl']:.4f} +- {r['kl_error']:.4f} | "
            f"{r['versus_uniform']:+.4f} +- {r['versus_error']:.4f} | {r['kl'] / same - 1:+.0%} | {r['perplexity']:.3f} | "
            f"{r['predicted']:.4f} | {r['passes']:g} |"
        )
    write_section("bits", f"Formats in groups: {a.name}", text, out=a.out)


if __name__ == "__main__":
    main()
