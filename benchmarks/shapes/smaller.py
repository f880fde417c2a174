"""Size, speed and perplexity of models with fewer blocks, heads and MLP units against dense, as ratios measured in one run.

python -m benchmarks.shapes smaller --model demo [--rounds 7]

Rows "by the program" save at least as many FLOPs as the uniform width does; "permuted" is the control: the same numbers of units
dealt out to the wrong layers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.stamp import RESULTS, write_section

from layerbudget.budget import base_amount
from layerbudget.data.text import calibration
from layerbudget.decisions.shapes.apply import apply_shapes, remove_units
from layerbudget.decisions.shapes.layouts import find_attention, find_mlp
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.shapes.save import save_smaller
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import UnknownStructure
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.models.blocks import layers, partition
from layerbudget.models.loading import load_model, load_tokenizer


def seconds(models, ids, rounds):
    """Median CPU seconds of one forward, rounds interleaved."""
    found = {name: [] for name in models}
    with torch.no_grad():
        for _ in range(rounds):
            for name, model in models.items():
                started = time.process_time()
                model(input_ids=ids, use_cache=False)
                found[name].append(time.process_time() - started)
    return {name: statistics.median(v) for name, v in found.items()}


def size(model):
    """Bytes of the saved file and whether plain transformers can hold the shapes; bytes of the parameters where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_smaller(model, None, Path(folder) / "out")
        except UnknownStructure:
            return sum(p.numel() * p.element_size() for p in model.parameters()), False
        return sum(f.stat().st_size for f in (Path(folder) / "out").glob("*.safetensors")), True


def flops(model):
    return base_amount(partition(model), "flops")


def shapes(model):
    """Query heads and MLP width of every layer."""
    return [(find_attention(layer, n).heads, find_mlp(layer, n).width) for n, layer in layers(model)]


def permuted(plan, seed=0):
    """The same numbers of units of each kind, dealt out to other layers."""
    parts = plan.payload.shapes
    names = {k: [n for n, s in parts.items() if s.kind == k] for k in ("heads", "mlp")}
    source = {
        n: m for group in names.values() for n, m in zip(group, random.Random(seed).sample(group, len(group)), strict=True)
    }
    shapes = {n: dataclasses.replace(s, removed=parts[source[n]].removed) for n, s in parts.items()}
    was = {b.name: b for b in plan.blocks}
    blocks = tuple(
        dataclasses.replace(b, value=was[m].value, count=was[m].count) if (m := source.get(b.name)) else b for b in plan.blocks
    )
    return dataclasses.replace(plan, blocks=blocks).with_payload(shapes=shapes)


def by_program(model, data, budget, a):
    """Smaller copies by the program, and the plans."""
    options = {"by": a.heads, "multiple": a.multiple}
    both = plan_shapes(model, data, budget, **options)
    plans = {
        "MLP width by the program": plan_shapes(model, data, budget, kinds=("mlp",), multiple=a.multiple),
        "heads and width by the program": both,
        "heads and width by the program, permuted control": permuted(both),
        "heads and width by the program, even": plan_shapes(model, data, budget, even=True, **options),
        f"heads, width and up to {a.remove} blocks by the program": plan_shapes(model, data, budget, depth=a.remove, **options),
    }
    models = {name: copy.deepcopy(model) for name in plans}
    for name, plan in plans.items():
        apply_shapes(models[name], plan, data)
    return models, plans


def smaller_models(model, data, a):
    """Every row of the table, and the plans that have something to say."""
    models = {"dense": model}
    width = copy.deepcopy(model)
    remove_units(width, data, a.fraction, kind="mlp", multiple=a.multiple)
    models[f"width: {a.fraction:.0%} of the MLP units removed"] = width
    found = find_attention(layers(model)[0][1], layers(model)[0][0])
    for by, there in (("groups", found.groups), ("queries", found.per_group)):
        if there > 1:
            cut = copy.deepcopy(model)
            left = set(remove_units(cut, data, a.head_fraction, by=by).values()).pop()
            models[f"heads: {found.heads - left} of {found.heads} query heads removed, by {by}"] = cut
    made, plans = by_program(model, data, f"{flops(model) - flops(width)} flops", a)
    models |= made
    sparse = copy.deepcopy(model)
    prune(sparse, plan_sparsity(partition(model), sparsity=0.5, rule="uniform"), data, "wanda")
    models["unstructured: 50 % zeros (Wanda)"] = sparse
    return models, plans


def table(rows):
    dense = rows[0]
    lines = ["One forward, one thread, medians of CPU time; ratios to dense.", ""]
    lines += ["| model | parameters | FLOPs of the layers | file | time | perplexity |", "|---|---|---|---|---|---|"]
    for r in rows:
        ratio = [f"{r[k] / dense[k]:.3f}x" for k in ("parameters", "flops", "bytes", "seconds")]
        ratio[2] += "" if r["exportable"] else " (in memory)"
        lines.append(f"| {r['model']} | {' | '.join(ratio)} | {r['perplexity']:.2f} |")
    note = (
        "In memory: the layers differ in shape, which no plain config can describe; the parameters' bytes stand for the file."
    )
    return [*lines, "", note]


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--label", help="what the page calls the model")
    parser.add_argument("--data", default="stdlib")
    for name, default in (
        ("samples", 16), ("length", 128), ("windows", 32), ("rounds", 7), ("remove", 3), ("multiple", 8),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--head-fraction", type=float, default=0.5)
    parser.add_argument("--heads", default="auto", choices=("auto", "groups", "queries"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main():
    a = parse()
    torch.set_num_threads(1)
    tokenizer, model = load_tokenizer(a.model), load_model(a.model)
    data = calibration(a.data, tokenizer, samples=a.samples, length=a.length)
    held_out = evaluation_set(a.data, tokenizer, length=a.length, windows=a.windows)
    models, plans = smaller_models(model, data, a)
    times = seconds(models, data.input_ids, a.rounds)
    rows = []
    for name, m in models.items():
        stored, exportable = size(m)
        rows.append({
            "model": name, "parameters": sum(p.numel() for p in m.parameters()), "flops": flops(m), "bytes": stored,
            "exportable": exportable, "seconds": times[name], "perplexity": perplexity(m, held_out).value,
            "predicted_damage": plans[name].payload.predicted if name in plans else None,
            "heads_by": plans[name].hyperparameters["by"] if name in plans else None,
            "layers": shapes(m),
        })  # fmt: skip
    note = f"{a.rounds} rounds of {a.samples} x {a.length} tokens."
    write_section("shapes", f"What gets smaller and faster: {a.label or a.model}", [*table(rows), "", note], out=a.out)


if __name__ == "__main__":
    main()
