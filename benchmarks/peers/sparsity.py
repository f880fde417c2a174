"""Directional plans beside peers' own code, unmodified, from their checkouts.

    python -m benchmarks.peers sparsity ratios --path WANDA      # locuslab/wanda prunes by our per-matrix ratios
    python -m benchmarks.peers sparsity search --path EVOPRESS   # IST-DASLab/EvoPress searches beside ours

``search`` runs EvoPress's own ``evo_prune_search.py`` from its command line: 64 offspring, survivors 8, 2, 1, and tokens per
selection in its published proportion of the text (1/256, 1/32, 1/8), until our passes, and ten times as many, are spent. What is
patched, in memory: the text is ours, "cuda" is the processor. Its levels are Wanda's (or SparseGPT's) weights at steps of an
equal number of parameters, written in its format. Rows are kept under ``results/rows``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from benchmarks.peers import references
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

from layerbudget.data.text import calibration
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.models.blocks import describe, partition
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.plan import Plan, PlanBlock

OFFSPRING, SURVIVORS, PARTS = 64, (8, 2, 1), (256, 32, 8)


def by_matrix(model, counts):
    """A plan of counts by matrix."""
    blocks = partition(model, "linear")
    chosen = tuple(PlanBlock.of(b, counts[b.name] / b.numel, int(counts[b.name])) for b in blocks)
    total = sum(int(c) for c in counts.values())
    budget = {"unit": "parameters", "limit": total, "spent": total}
    return Plan(kind="sparsity", rule="given", model=describe(model), blocks=chosen, budget=budget)


def whole_rows(plan, sizes):
    """Counts of a plan as whole entries of every row, as the reference counts; the sum within one row of the plan's."""
    each = {b.modules[0]: b.count / sizes[b.modules[0]][0] for b in plan.blocks}
    found = {name: int(x) for name, x in each.items()}
    left = sum(b.count for b in plan.blocks) - sum(k * sizes[n][0] for n, k in found.items())
    for name in sorted(each, key=lambda n: found[n] - each[n]):
        if left >= sizes[name][0]:
            found[name], left = found[name] + 1, left - sizes[name][0]
    return found


def ratios(bench, a):
    """Perplexity after locuslab/wanda's own code with our counts per matrix, and after ours."""
    model, data = bench.model, bench.data
    sizes = {m.name: (m.d_out, m.d_in) for b in partition(model, "linear") for m in b.modules}
    for method in a.methods:
        run = references.wanda_repository(a.path, method)
        for sparsity in a.sparsities:
            uniform = plan_sparsity(partition(model, "linear"), sparsity=sparsity, rule="uniform")
            directional = plan_sparsity(model, data, sparsity=sparsity, method=method)
            for rule, plan in (("uniform", uniform), ("directional", directional)):
                if bench.has(part="ratios", method=method, sparsity=sparsity, rule=rule):
                    continue
                rows = whole_rows(plan, sizes)
                ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
                counts = {name: k * sizes[name][0] for name, k in rows.items()}
                receipt = prune(ours, by_matrix(model, counts), data, method, 1)
                # half an entry more, so that their int() meets the count
                run(theirs, data.input_ids, {name: (k + 0.5) / sizes[name][1] for name, k in rows.items()})
                zeros = sum(int((theirs.get_submodule(n).weight == 0).sum()) for n in sizes)
                same = np.mean([
                    float(((theirs.get_submodule(n).weight == 0) == (ours.get_submodule(n).weight == 0)).float().mean())
                    for n in sizes
                ])  # fmt: skip
                bench.keep(
                    part="ratios", method=method, sparsity=sparsity, rule=rule, ours=bench.perplexity(ours),
                    theirs=bench.perplexity(theirs), recounted=receipt.sparsity,
                    recounted_theirs=zeros / sum(o * i for o, i in sizes.values()), same_entries=float(same),
                )  # fmt: skip


def database(bench, method, sparsity, folder):
    """Weights of every matrix at levels of equal steps, by statistics of the model pruned uniformly, as EvoPress makes its own."""
    model, levels = bench.model, 8
    width = model.config.hidden_size
    step = int(0.5 * min(sparsity, 1 - sparsity) / levels * width**2)  # its default
    uniform = {b.name: round(sparsity * b.numel) for b in partition(model, "linear")}
    numel = {b.name: b.numel for b in partition(model, "linear")}
    counts = {}
    for level in range(-levels, levels + 1):
        wanted = {n: c + level * step for n, c in uniform.items()}
        fits = {n: 0 <= c <= numel[n] for n, c in wanted.items()}
        pruned = copy.deepcopy(model)
        prune(pruned, by_matrix(model, {n: c if fits[n] else uniform[n] for n, c in wanted.items()}), bench.data, method, 8)
        for name in (n for n in wanted if fits[n]):
            (folder / name).mkdir(parents=True, exist_ok=True)
            torch.save(pruned.get_submodule(name).weight.data.clone(), folder / name / f"{level}.pth")
            counts[name, level] = wanted[name]
    return counts


def evopress(bench, path, counts, folder, generations, seed):
    """Run its main; ``(counts by matrix, forwards of the whole text, CPU seconds)``."""
    data, length = bench.data, bench.data.length
    tokens, seen = data.samples * length, [0]
    texts = [row[None] for row in data.input_ids]
    held = Path(tempfile.mkdtemp(dir=folder.parent))
    bench.model.save_pretrained(held)
    bench.tokenizer.save_pretrained(held)
    to, load = torch.Tensor.to, importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained

    def counted(*args, **kwargs):
        kwargs.pop("device_map", None)
        model = load(*args, **kwargs)
        model.register_forward_pre_hook(lambda m, x: seen.__setitem__(0, seen[0] + x[0].numel()))
        return model

    arguments = [
        "evo_prune_search.py", "--model_name_or_path", str(held), "--calibration_data", "ours", "--calibration_tokens", str(tokens),
        "--calibration_sequence_length", str(length), "--eval_every", "1000000", "--eval_datasets", "none",
        "--eval_sequence_length", str(length), "--fitness_fn", "kl", "--generations", str(generations),
        "--offspring", str(OFFSPRING), "--sparse_weights_path", str(folder), "--dtype", "float32", "--memory_efficient",
        "--seed", str(seed), "--survivors_per_selection", *map(str, SURVIVORS),
        "--tokens_per_selection", *(str(max(tokens // part, bench.least)) for part in PARTS),
    ]  # fmt: skip
    started = time.process_time()
    with references._on_path(path, ("src", "evo_prune_search")), mock.patch.object(sys, "argv", arguments):
        module = importlib.import_module("evo_prune_search")
        module.get_data = lambda name, *args, **kwargs: texts if name == "ours" else texts[:1]
        module.AutoModelForCausalLM = type("Loader", (), {"from_pretrained": staticmethod(counted)})
        with mock.patch.object(torch.Tensor, "to", lambda x, *a, **k: to(x, *("cpu" if i == "cuda" else i for i in a), **k)):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                module.main()
    lines = (folder / "final_configuration.txt").read_text().splitlines()
    chosen = {name: int(level) for name, level in (line.split(": ") for line in lines)}
    # its evaluations between generations are no part of the search: three of them on the first generation and at the end
    seen[0] -= 2 * (tokens + length)
    return {n: counts[n, level] for n, level in chosen.items()}, seen[0] / tokens, time.process_time() - started


def search(bench, a):
    """EvoPress at our passes and at ten times as many; its levels cost two forwards each and are counted."""
    for method in a.methods:
        for sparsity in a.sparsities:
            started = time.process_time()
            plan = plan_sparsity(bench.model, bench.data, sparsity=sparsity, method=method)
            seconds = time.process_time() - started
            ours = plan.payload.forward_passes
            if not bench.has(part="search", method=method, sparsity=sparsity, rule="directional"):
                value = bench.applied(plan, method)
                bench.keep(part="search", method=method, sparsity=sparsity, rule="directional", forwards=ours, seconds=seconds,
                           value=value, measured=plan.payload.measured)  # fmt: skip
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "levels"
                folder.mkdir()
                counts = database(bench, method, sparsity, folder)
                for times in a.times:
                    for seed in range(a.seeds):
                        rule = f"EvoPress, {times} x our passes"
                        if bench.has(part="search", method=method, sparsity=sparsity, rule=rule, seed=seed):
                            continue
                        each = bench.generation()
                        generations = max(1, int((times * ours - 1) / each))
                        chosen, forwards, cpu = evopress(bench, a.path, counts, folder, generations, seed)
                        value = bench.applied(by_matrix(bench.model, chosen), method)
                        bench.keep(part="search", method=method, sparsity=sparsity, rule=rule, seed=seed, value=value,
                                   generations=generations, forwards=forwards, levels=34.0, seconds=cpu)  # fmt: skip


class Bench:
    """Model, texts and rows."""

    def __init__(self, a):
        self.a, self.tokenizer, self.model = a, load_tokenizer(a.model), load_model(a.model)
        self.data = calibration(a.calibration, self.tokenizer, samples=a.samples, length=a.length, seed=0)
        self.held_out = evaluation_set(a.evaluation, self.tokenizer, length=a.length, windows=a.windows)
        self.least, self.rows = a.least, read_rows(a.name, a.out)

    def has(self, **what):
        return any(all(r.get(k) == v for k, v in what.items()) for r in self.rows)

    def keep(self, **row):
        self.rows.append(row)
        keep_row(self.a.name, row, self.a.out)
        print(row, flush=True)

    def perplexity(self, model):
        return perplexity(model, self.held_out).value

    def applied(self, plan, method):
        pruned = copy.deepcopy(self.model)
        prune(pruned, plan, self.data, method, 8)
        return self.perplexity(pruned)

    def generation(self):
        """Forwards of the whole text that one generation of EvoPress takes."""
        tokens, alive, found = self.data.samples * self.data.length, OFFSPRING, 0.0
        for part, survivors in zip(PARTS, SURVIVORS, strict=True):
            alive += survivors == SURVIVORS[-1]
            found, alive = found + alive * max(tokens // part, self.least) / tokens, survivors
        return found


def table(bench, a):
    """Write a section of each part that has rows."""
    parts = [r for r in bench.rows if r["part"] == "ratios"]
    if parts:
        lines = [
            "| pruner | sparsity | counts | perplexity, ours | theirs | difference | entries alike |",
            "|---|---|---|---|---|---|---|",
        ]
        for r in parts:
            lines.append(
                f"| {r['method']} | {r['sparsity']:.0%} | {r['rule']} | {r['ours']:.3f} | {r['theirs']:.3f} "
                f"| {r['theirs'] - r['ours']:+.3f} | {r['same_entries']:.3%} |"
            )
        write_section("peers", f"locuslab/wanda prunes by our counts per matrix: {a.model}", lines, out=a.out)
    parts = [r for r in bench.rows if r["part"] == "search"]
    if parts:
        lines = [
            "Forwards: of the search alone; its 17 levels of every matrix cost 34 more. Value: after our pruner applied the counts.",
            "",
        ]
        lines += [
            "| pruner | sparsity | plan | perplexity | forwards | levels | CPU s | seeds |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for key in dict.fromkeys((r["method"], r["sparsity"], r["rule"]) for r in parts):
            rows = [r for r in parts if (r["method"], r["sparsity"], r["rule"]) == key]
            mean = {k: np.mean([r.get(k, 0.0) for r in rows]) for k in ("value", "forwards", "levels", "seconds")}
            spread = f" ({min(r['value'] for r in rows):.2f} to {max(r['value'] for r in rows):.2f})" if len(rows) > 1 else ""
            lines.append(
                f"| {key[0]} | {key[1]:.0%} | {key[2]} | {mean['value']:.2f}{spread} | {mean['forwards']:.0f} | {mean['levels']:.0f} "
                f"| {mean['seconds']:.0f} | {len(rows)} |"
            )
        write_section("peers", f"IST-DASLab/EvoPress, its own search: {a.model}", lines, out=a.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ratios", "search", "table"))
    parser.add_argument("--path", type=Path, help="checkout of the peer")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="stdlib")
    parser.add_argument("--evaluation", default="stdlib")
    parser.add_argument("--name", default="peers_sparsity", help="of the rows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--methods", nargs="+", default=["wanda"])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.6, 0.7])
    parser.add_argument("--times", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--least", type=int, default=1, help="fewest tokens of one selection")
    for name, default in (("samples", 16), ("length", 128), ("windows", 256), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(a)
    if a.part != "table":
        {"ratios": ratios, "search": search}[a.part](bench, a)
    table(bench, a)


if __name__ == "__main__":
    main()
