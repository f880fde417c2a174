"""Size and speed of depth- and width-pruned models against dense, as ratios measured in one run.

python benchmarks/structured.py --model demo [--rounds 7]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from layerbudget.data.text import calibration
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.loading import load_model, load_tokenizer
from layerbudget.pruning.prune import prune
from layerbudget.pruning.recovery import recover
from layerbudget.pruning.structured import apply_depth, narrow, plan_depth, save_smaller

RESULTS = Path(__file__).parent / "results"


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
    with tempfile.TemporaryDirectory() as folder:
        save_smaller(model, None, Path(folder) / "out")
        return sum(f.stat().st_size for f in (Path(folder) / "out").glob("*.safetensors"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--label")
    parser.add_argument("--data", default="stdlib")
    for name, default in (("samples", 16), ("length", 128), ("windows", 32), ("rounds", 7), ("remove", 3), ("steps", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fraction", type=float, default=0.25)
    a = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, model = load_tokenizer(a.model), load_model(a.model)
    data = calibration(a.data, tokenizer, samples=a.samples, length=a.length)
    held_out = evaluation_set(a.data, tokenizer, length=a.length, windows=a.windows)
    models = {"dense": model}
    plan = plan_depth(model, data, remove=a.remove)
    models[f"depth: {a.remove} of {len(plan.blocks)} blocks removed"] = apply_depth(copy.deepcopy(model), plan)
    width = copy.deepcopy(model)
    narrow(width, data, a.fraction)
    models[f"width: {a.fraction:.0%} of the MLP units removed"] = width
    from layerbudget.blocks import partition
    from layerbudget.planning import plan_sparsity

    sparse = copy.deepcopy(model)
    uniform = plan_sparsity(partition(model), sparsity=0.5, rule="uniform")
    prune(sparse, uniform, data, "wanda")
    models["unstructured: 50 % zeros (Wanda)"] = sparse
    if a.steps:
        for name in list(models)[1:]:
            recovered = copy.deepcopy(models[name])
            recover(recovered, calibration(a.data, tokenizer, samples=8 * a.steps // 2, length=a.length, seed=1), steps=a.steps)
            models[f"{name}, {a.steps} steps of masked LoRA recovery"] = recovered
    times = seconds(models, data.input_ids, a.rounds)
    rows = [
        {
            "model": name, "parameters": sum(p.numel() for p in m.parameters()), "bytes": size(m), "seconds": times[name],
            "perplexity": perplexity(m, held_out).value,
        }
        for name, m in models.items()
    ]  # fmt: skip
    dense = rows[0]
    lines = ["# What gets smaller and faster", "", "One forward, one thread, medians of CPU time.", ""]
    lines += ["| model | parameters | file | time | perplexity |", "|---|---|---|---|---|"]
    for r in rows:
        ratio = " | ".join(f"{r[k] / dense[k]:.3f}x" for k in ("parameters", "bytes", "seconds"))
        lines.append(f"| {r['model']} | {ratio} | {r['perplexity']:.2f} |")
    environment = {
        "model": a.label or a.model, "threads": 1, "torch": torch.__version__, "python": platform.python_version(),
        "removed": plan.extra["removed"], "rounds": a.rounds, "tokens": a.samples * a.length,
    }  # fmt: skip
    text = "\n".join(lines) + "\n\nEnvironment: " + json.dumps(environment) + "\n"
    (RESULTS / "structured.md").write_text(text)
    (RESULTS / "structured.json").write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
