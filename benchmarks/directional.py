"""Directional damage taken apart: what each ingredient brings, and predicted against measured damage matrix by matrix.

    python benchmarks/directional.py ablation [--sparsity 0.7] [--samples 16]
    python benchmarks/directional.py scatter        # pruning (Wanda) and rounding, and directional_scatter.png

Rows are appended to a .jsonl file as they are measured, so that a run that was cut continues and a partial table is a table.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import torch

from layerbudget.compressors.base import Level, find_quantiser, find_treatment
from layerbudget.data.text import calibration
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.decisions.sparsity.treated import TreatedModel, Units
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.execution.loss import IGNORE, logits_of, sampled_targets, summed_loss, unlabelled
from layerbudget.execution.sites import Collector
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.sensitivity.directional.directions import Written
from layerbudget.sensitivity.directional.terms import quadratic_terms
from layerbudget.solvers.rounding import round_parameters

RESULTS = Path(__file__).parent / "results"
EIGHT = {"passes": 27}  # eight steps
ABLATION = {
    "first term": EIGHT,
    "first term, trust 0.03": {**EIGHT, "trust": 0.03},
    "first term, trust 0.12": {**EIGHT, "trust": 0.12},
    "first term, cap 0.9": {**EIGHT, "max_sparsity": 0.9},
    "rows, first term": {**EIGHT, "by": "rows:1"},
}
# what was tried with options that are gone
RECORDED = (
    "second term only, 2 draws", "both, 1 draw", "both, 2 draws", "both, 4 draws", "both, 8 draws",
    "first term, cross-fitted", "rows, cross-fitted",
)  # fmt: skip


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(path, row):
    with path.open("a") as f:
        f.write(json.dumps(row) + "\n")


def ablation(a):
    """Perplexity and passes with one ingredient changed at a time."""
    path = RESULTS / f"{a.name}_ablation.jsonl"
    done = {(r["what"], r["seed"], r["samples"]) for r in rows_of(path)}
    tokenizer, model = load_tokenizer(a.model), load_model(a.model)
    held_out = evaluation_set(a.evaluation, tokenizer, length=a.length, windows=a.windows)
    for seed in range(a.seeds):
        data = calibration(a.calibration, tokenizer, samples=a.samples, length=a.length, seed=seed)
        for what in a.only or ABLATION:
            if (what, seed, a.samples) in done:
                continue
            started = time.process_time()
            plan = plan_sparsity(model, data, sparsity=a.sparsity, **ABLATION[what])
            seconds, pruned = time.process_time() - started, copy.deepcopy(model)
            receipt = prune(pruned, plan, data, "wanda")
            row = {"what": what, "seed": seed, "samples": a.samples, "sparsity": receipt.sparsity, "seconds": seconds}
            row |= {"value": perplexity(pruned, held_out).value, "passes": plan.extra["forward_passes"]}
            row |= {"measured": plan.extra["measured"], "held_out": None} | {"steps": len(plan.extra["path"]) - 1}
            keep(path, row)
    table_of_ablation(a, rows_of(path))


def table_of_ablation(a, rows):
    lines = [f"# Directional damage, one ingredient at a time ({a.sparsity:.0%} zeros, Wanda, embedded model)", ""]
    lines += ["| plan | sequences | perplexity | forward equivalents | steps | measured nats | held-out nats | seeds |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for samples in sorted({r["samples"] for r in rows}):
        for what in (*ABLATION, *RECORDED):
            found = [r for r in rows if r["what"] == what and r["samples"] == samples]
            if found:
                mean = {k: np.mean([r[k] for r in found if r[k] is not None] or [np.nan]) for k in ("value", "passes", "steps")}
                mean |= {k: np.mean([r[k] for r in found if r[k] is not None] or [np.nan]) for k in ("measured", "held_out")}
                held = "-" if np.isnan(mean["held_out"]) else f"{mean['held_out']:.3f}"
                lines.append(
                    f"| {what} | {samples} | {mean['value']:.2f} | {mean['passes']:.0f} | {mean['steps']:.1f} "
                    f"| {mean['measured']:.3f} | {held} | {len(found)} |"
                )
    text = "\n".join([*lines, ""])
    (RESULTS / f"{a.name}_ablation.md").write_text(text)
    print(text)


def scatter(a):
    """Predicted and measured change of the divergence, every matrix alone, at the dense point and at uniform plans."""
    path = RESULTS / f"{a.name}_scatter.jsonl"
    tokenizer, model = load_tokenizer(a.model), load_model(a.model)
    data = calibration(a.calibration, tokenizer, samples=a.samples, length=a.length)
    units = Units.by(model, "linear")
    point = TreatedModel(model, data, units, find_treatment("wanda"))
    done = {(r["point"], r["level"]) for r in rows_of(path)}
    for where, steps in ((0.0, (0.3, 0.5, 0.7)), (0.5, (-0.1, 0.1)), (0.7, (-0.1, -0.03, 0.03, 0.1))):
        if all((where, step) in done for step in steps):
            continue
        total = round(where * int(units.numel.sum()))
        counts = round_parameters(np.full(len(units), where), units.numel, total)
        point.move(counts, point.dense)
        levels = np.tile(where + np.array(steps), (len(units), 1))
        look = quadratic_terms(
            model, point.reference.data, units.first, point.directions(counts, point.dense, levels), levels.shape,
            clean=point.reference.clean, draws=4, batch_size=point.batch_size,
        )  # fmt: skip
        here = look.divergence
        for j, step in enumerate(steps):
            if (where, step) in done:
                continue
            measured = []
            for k in range(len(units)):
                moved = counts.copy()
                moved[k] = round(levels[k, j] * units.numel[k])
                point.move(moved, point.dense)
                measured.append(point.reference.measure() - here)
            first, second = look.first[:, j].tolist(), look.second[:, j].tolist()
            keep(path, {"point": where, "level": step, "measured": measured, "first": first, "second": second})
    point.restore()
    rounding(a, model, data, point, path, done)
    if not (RESULTS / f"{a.name}_tokens.json").exists():
        (RESULTS / f"{a.name}_tokens.json").write_text(json.dumps(tokens_squared(model, data)))
    table_of_scatter(a, rows_of(path))
    draw_scatter(a, rows_of(path))


@torch.no_grad()
def changes_of(model, names, name):
    """What rounding to nearest in a format changes, by matrix."""
    quantiser, level = find_quantiser("rtn"), Level(format=name)
    weights = {n: model.get_submodule(n).weight.detach() for n in names}
    return {n: quantiser.apply(w, None, level) - w for n, w in weights.items()}


def rounding(a, model, data, point, path, done):
    """The same for rounding, at the dense point."""
    names = [m.name for m in point.units.modules]
    for name in ("w2-g32", "w3-g32", "w4-g32"):
        if (name, 0.0) in done:
            continue
        deltas = changes_of(model, names, name)
        units = {n: i for i, n in enumerate(deltas)}
        found = quadratic_terms(model, data, units, lambda n, d=deltas: Written([d[n]]), (len(units), 1), draws=4)
        measured = []
        for n, delta in deltas.items():
            weight = model.get_submodule(n).weight.data
            dense = weight.clone()
            weight.add_(delta)
            measured.append(point.reference.measure())
            weight.copy_(dense)
        second = found.second[:, 0].tolist()
        keep(path, {"point": name, "level": 0.0, "measured": measured, "first": [0.0] * len(names), "second": second})


def tokens_squared(model, data, level=0.3, draws=4):
    """The form with sequences' sums squared and with single tokens' terms squared, along Wanda's change at ``level``."""
    units = Units.by(model, "linear")
    point = TreatedModel(model, data, units, find_treatment("wanda"))
    counts = np.rint(level * units.numel).astype(np.int64)
    dense = {m.name: model.get_submodule(m.name).weight.detach().clone() for m in units.modules}
    point.move(counts, point.dense)
    deltas = {name: model.get_submodule(name).weight.detach() - held for name, held in dense.items()}
    point.restore()
    sums = {name: [0.0, 0.0] for name in deltas}

    def consume(site):
        for name, b in site.b.items():
            each = ((site.a @ deltas[name].T) * b).sum(-1).double()
            sums[name][0] += float(each.sum(1).square().sum())
            sums[name][1] += float(each.square().sum())

    tokens = 0
    with Collector(model, units.blocks, consume) as collector:
        for batch in unlabelled(model, data, 8):
            logits = logits_of(model, batch)
            tokens += int((batch.targets != IGNORE).sum())
            for draw in range(draws):
                loss = summed_loss(logits, sampled_targets(logits.detach(), batch, draw))
                collector.backward(loss, size=batch.size, length=data.length, retain=draw + 1 < draws)
    return {name: [v / (2 * tokens * draws) for v in pair] for name, pair in sums.items()}


def table_of_scatter(a, rows):
    lines = ["# Predicted against measured damage, one matrix at a time (Wanda, embedded model)", ""]
    lines += ["Change of the divergence in nats per token. Ratio: predicted over measured, median over matrices.", ""]
    lines += ["| point | level | first: ratio, correlation | second | both |", "|---|---|---|---|---|"]
    for r in sorted(rows, key=lambda r: (str(r["point"]), r["level"])):
        m, first, second = (np.array(r[k]) for k in ("measured", "first", "second"))
        cells = []
        for p in (first, second, first + second):
            known = np.abs(p).max() > 1e-4 * np.abs(m).max()
            cells.append(f"{np.median(p / m):.2f}, {np.corrcoef(p, m)[0, 1]:.3f}" if known else "-")
        name, level = naming(r)
        lines.append(f"| {name} | {level} | " + " | ".join(cells) + " |")
    pairs = np.array(list(json.loads((RESULTS / f"{a.name}_tokens.json").read_text()).values()))
    measured = next((np.array(r["measured"]) for r in rows if (r["point"], r["level"]) == (0.0, 0.3)), None)
    if measured is not None:
        lines += ["", "At the dense point, level 30 %: the sum over a sequence squared, or every token's term by itself:", ""]
        for j, what in enumerate(("sequences", "tokens")):
            x, y = np.log(pairs[:, j]), np.log(measured)
            lines.append(
                f"- {what}: median ratio {np.median(pairs[:, j] / measured):.2f}, correlation of logs {np.corrcoef(x, y)[0, 1]:.3f}"
            )
    text = "\n".join([*lines, ""])
    (RESULTS / f"{a.name}_scatter.md").write_text(text)
    print(text)


def naming(row):
    """Point and level in words."""
    if isinstance(row["point"], str):
        return "dense", f"rounded to {row['point']}"
    return "dense" if row["point"] == 0 else f"uniform {row['point']:.0%}", f"{row['point'] + row['level']:.0%}"


def draw_scatter(a, rows):
    """Predicted over measured change, one panel per kind of point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = {
        "rounding, dense point": [r for r in rows if isinstance(r["point"], str)],
        "Wanda, dense point": [r for r in rows if r["point"] == 0.0],
        "Wanda, at uniform 50 %": [r for r in rows if r["point"] == 0.5],
        "Wanda, at uniform 70 %": [r for r in rows if r["point"] == 0.7],
    }
    fig, axes = plt.subplots(1, len(kinds), figsize=(15, 3.8))
    for ax, (title, chosen) in zip(axes, kinds.items(), strict=True):
        for r in chosen:
            p, m = np.array(r["first"]) + np.array(r["second"]), np.array(r["measured"])
            ax.plot(m, p, ".", ms=4, label=naming(r)[1])
        dense = chosen and (isinstance(chosen[0]["point"], str) or chosen[0]["point"] == 0.0)
        if dense:
            ax.set_xscale("log")
            ax.set_yscale("log")
        low, high = ax.get_xlim()
        ax.plot([low, high], [low, high], color="0.6", lw=0.8)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("measured change of the divergence, nats", fontsize=7)
        ax.set_ylabel("predicted (both terms)", fontsize=7)
        ax.tick_params(labelsize=7)
        ax.legend(fontsize=6)
    fig.tight_layout()
    fig.savefig(RESULTS / f"{a.name}_scatter.png", dpi=130, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("ablation", "scatter"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="stdlib")
    parser.add_argument("--evaluation", default="stdlib")
    parser.add_argument("--name", default="directional")
    parser.add_argument("--sparsity", type=float, default=0.7)
    parser.add_argument("--only", nargs="+", choices=tuple(ABLATION), help="these rows of the ablation only")
    for name, default in (("samples", 16), ("length", 128), ("windows", 256), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    {"ablation": ablation, "scatter": scatter}[a.part](a)


if __name__ == "__main__":
    main()
