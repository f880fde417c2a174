"""Heads and MLP widths by directional damage beside measured curves, at equal FLOPs (heads by groups and by queries, the better).

    python benchmarks/structured_directional.py [--budgets 16% 30%]

Forwards of the measured plans are counted layer by layer: tokens that ran through layers, over layers and tokens of the text.
Rows are appended to a .jsonl file as they are measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import torch

from layerbudget.blocks import layers
from layerbudget.data.text import calibration
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.loading import load_model, load_tokenizer
from layerbudget.shrinking.checkpoint import apply_structured, plan_structured
from layerbudget.shrinking.directional import plan_shapes_directional

RESULTS = Path(__file__).parent / "results"


class Counter:
    """Forwards of the whole text, from what runs through the layers."""

    def __init__(self, model, tokens):
        self.seen, self.scale = 0, tokens * len(layers(model))
        self.handles = [layer.register_forward_pre_hook(self._see, with_kwargs=True) for _, layer in layers(model)]

    def _see(self, layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.seen += hidden.shape[0] * hidden.shape[1]

    def close(self):
        for handle in self.handles:
            handle.remove()
        return self.seen / self.scale


def directional(model, data, budget, passes):
    plans = [plan_shapes_directional(model, data, budget, by=by, passes=passes) for by in ("groups", "queries")]
    best = min(plans, key=lambda p: p.extra["measured"])
    return best, sum(p.extra["forward_passes"] for p in plans)


def measured(model, data, budget):
    counter = Counter(model, data.samples * data.length)
    try:
        plan = plan_structured(model, data, budget)
    finally:
        spent = counter.close()
    return plan, spent


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--evaluation", help="text for the perplexity (default: as --data)")
    parser.add_argument("--name", default="structured_directional")
    parser.add_argument("--budgets", nargs="+", default=["16% flops", "30% flops"])
    for name, default in (("samples", 16), ("length", 128), ("windows", 256), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, model = load_tokenizer(a.model), load_model(a.model)
    held_out = evaluation_set(a.evaluation or a.data, tokenizer, length=a.length, windows=a.windows)
    log = RESULTS / f"{a.name}.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    ways = {
        "measured curves": measured, "directional, 24 passes each": lambda *w: directional(*w, 24.0),
        "directional, 48 passes each": lambda *w: directional(*w, 48.0),
    }  # fmt: skip
    for seed in range(a.seeds):
        data = calibration(a.data, tokenizer, samples=a.samples, length=a.length, seed=seed)
        for budget in a.budgets:
            for way, make in ways.items():
                if any((r["way"], r["budget"], r["seed"]) == (way, budget, seed) for r in rows):
                    continue
                started = time.process_time()
                plan, passes = make(model, data, budget)
                seconds, smaller = time.process_time() - started, copy.deepcopy(model)
                apply_structured(smaller, plan, data)
                row = {"way": way, "budget": budget, "seed": seed, "passes": passes, "seconds": seconds}
                row |= {"value": perplexity(smaller, held_out).value, "saved": plan.budget["spent"] / plan.budget["base"]}
                row |= {"by": plan.hyperparameters["by"], "measured": plan.extra["measured"]}
                rows.append(row)
                with log.open("a") as f:
                    f.write(json.dumps(row) + "\n")
    dense = perplexity(model, held_out).value
    lines = [
        "# Heads and MLP widths: directional damage beside measured curves",
        "",
        f"Dense {dense:.2f}; {a.windows} windows.",
        "",
    ]
    lines += [
        "| way | asked for | saved | perplexity | forwards | CPU s | heads by | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for budget in dict.fromkeys(r["budget"] for r in rows):
        for way in dict.fromkeys(r["way"] for r in rows):
            one = [r for r in rows if (r["way"], r["budget"]) == (way, budget)]
            if one:
                mean = {k: sum(r[k] for r in one) / len(one) for k in ("value", "passes", "seconds", "saved")}
                lines.append(
                    f"| {way} | {budget} | {mean['saved']:.2%} | {mean['value']:.2f} | {mean['passes']:.0f} | {mean['seconds']:.0f} "
                    f"| {one[0]['by']} | {len(one)} |"
                )
    (RESULTS / f"{a.name}.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
