"""Directional damage taken apart: what each ingredient brings, and predicted against measured damage matrix by matrix.

    python -m benchmarks.sparsity ingredients ablation [--sparsity 0.7] [--samples 16]
    python -m benchmarks.sparsity ingredients scatter     # pruning (Wanda) and rounding

Rows are kept under ``results/rows`` as they are measured, so that a run that was cut goes on.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

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

EIGHT = {"passes": 27}  # eight steps
ABLATION = {
    "first term": EIGHT,
    "first term, trust 0.03": {**EIGHT, "trust": 0.03},
    "first term, trust 0.12": {**EIGHT, "trust": 0.12},
    "first term, cap 0.9": {**EIGHT, "max_sparsity": 0.9},
    "rows, first term": {**EIGHT, "by": "rows:1"},
}


def ablation(a):
    """Perplexity and passes with one ingredient changed at a time."""
    name = f"{a.name}_ablation"
    done = {(r["what"], r["seed"], r["samples"]) for r in read_rows(name, a.out)}
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
            row |= {"value": perplexity(pruned, held_out).value, "passes": plan.payload.forward_passes}
            row |= {"measured": plan.payload.measured, "held_out": None} | {"steps": len(plan.payload.path) - 1}
            keep_row(name, row, a.out)
    table_of_ablation(a, read_rows(name, a.out))


def table_of_ablation(a, rows):
    lines = ["| plan | sequences | perplexity | forward equivalents | steps | measured nats | held-out nats | seeds |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for samples in sorted({r["samples"] for r in rows}):
        for what in ABLATION:
            found = [r for r in rows if r["what"] == what and r["samples"] == samples]
            if found:
                mean = {k: np.mean([r[k] for r in found if r[k] is not None] or [np.nan]) for k in ("value", "passes", "steps")}
                mean |= {k: np.mean([r[k] for r in found if r[k] is not None] or [np.nan]) for k in ("measured", "held_out")}
                held = "-" if np.isnan(mean["held_out"]) else f"{mean['held_out']:.3f}"
                lines.append(
                    f"| {what} | {samples} | {mean['value']:.2f} | {mean['passes']:.0f} | {mean['steps']:.1f} "
                    f"| {mean['measured']:.3f} | {held} | {len(found)} |"
                )
    title = f"Directional damage, one ingredient at a time ({a.sparsity:.0%} zeros, Wanda, {a.model})"
    write_section("sparsity", title, lines, out=a.out)


def scatter(a):
    """Predicted and measured change of the divergence, every matrix alone, at the dense point and at uniform plans."""
    name = f"{a.name}_scatter"
    tokenizer, model = load_tokenizer(a.model), load_model(a.model)
    data = calibration(a.calibration, tokenizer, samples=a.samples, length=a.length)
    units = Units.by(model, "linear")
    point = TreatedModel(model, data, units, find_treatment("wanda"))
    done = {(r["point"], r["level"]) for r in read_rows(name, a.out)}
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
            keep_row(name, {"point": where, "level": step, "measured": measured, "first": first, "second": second}, a.out)
    point.restore()
    rounding(a, model, data, point, name, done)
    if not read_rows(f"{a.name}_tokens", a.out):
        keep_row(f"{a.name}_tokens", tokens_squared(model, data), a.out)
    table_of_scatter(a, read_rows(name, a.out))


@torch.no_grad()
def changes_of(model, names, name):
    """What rounding to nearest in a format changes, by matrix."""
    quantiser, level = find_quantiser("rtn"), Level(format=name)
    weights = {n: model.get_submodule(n).weight.detach() for n in names}
    return {n: quantiser.apply(w, None, level) - w for n, w in weights.items()}


def rounding(a, model, data, point, name, done):
    """The same for rounding, at the dense point."""
    names = [m.name for m in point.units.modules]
    for form in ("w2-g32", "w3-g32", "w4-g32"):
        if (form, 0.0) in done:
            continue
        deltas = changes_of(model, names, form)
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
        row = {"point": form, "level": 0.0, "measured": measured, "first": [0.0] * len(names), "second": second}
        keep_row(name, row, a.out)


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
    lines = ["Change of the divergence in nats per token. Ratio: predicted over measured, median over matrices.", ""]
    lines += ["| point | level | first: ratio, correlation | second | both |", "|---|---|---|---|---|"]
    for r in sorted(rows, key=lambda r: (str(r["point"]), r["level"])):
        m, first, second = (np.array(r[k]) for k in ("measured", "first", "second"))
        cells = []
        for p in (first, second, first + second):
            known = np.abs(p).max() > 1e-4 * np.abs(m).max()
            cells.append(f"{np.median(p / m):.2f}, {np.corrcoef(p, m)[0, 1]:.3f}" if known else "-")
        name, level = naming(r)
        lines.append(f"| {name} | {level} | " + " | ".join(cells) + " |")
    pairs = np.array(list(read_rows(f"{a.name}_tokens", a.out)[0].values()))
    measured = next((np.array(r["measured"]) for r in rows if (r["point"], r["level"]) == (0.0, 0.3)), None)
    if measured is not None:
        lines += ["", "At the dense point, level 30 %: the sum over a sequence squared, or every token's term by itself:", ""]
        for j, what in enumerate(("sequences", "tokens")):
            x, y = np.log(pairs[:, j]), np.log(measured)
            lines.append(
                f"- {what}: median ratio {np.median(pairs[:, j] / measured):.2f}, correlation of logs {np.corrcoef(x, y)[0, 1]:.3f}"
            )
    title = f"Predicted against measured damage, one matrix at a time (Wanda, {a.model})"
    write_section("sparsity", title, lines, out=a.out)


def naming(row):
    """Point and level in words."""
    if isinstance(row["point"], str):
        return "dense", f"rounded to {row['point']}"
    return "dense" if row["point"] == 0 else f"uniform {row['point']:.0%}", f"{row['point'] + row['level']:.0%}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ablation", "scatter"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="stdlib")
    parser.add_argument("--evaluation", default="stdlib")
    parser.add_argument("--name", default="sparsity", help="of the rows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sparsity", type=float, default=0.7)
    parser.add_argument("--only", nargs="+", choices=tuple(ABLATION), help="these rows of the ablation only")
    for name, default in (("samples", 16), ("length", 128), ("windows", 256), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    torch.set_num_threads(1)
    {"ablation": ablation, "scatter": scatter}[a.part](a)


if __name__ == "__main__":
    main()
