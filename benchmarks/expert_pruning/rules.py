"""Which experts stay: rules beside each other on a trained mixture, predicted beside measured; held-out KL and perplexity.

    python -m benchmarks.expert_pruning rules --model FOLDER [--books FOLDER] [--name NAME]

FOLDER has calibration.txt and evaluation.txt beside the model, as ``benchmarks.train_second_model`` leaves them. Every rule sees
the same calibration windows, three seeds. --books: also choose by code and by books, and evaluate on code and on the books'
ends; alone where --seeds names none.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.data import stdlib
from layerbudget.decisions.expert_pruning.masks import Masked, folds_for
from layerbudget.decisions.expert_pruning.program import KeptProgram, Removal, crossed, per_token
from layerbudget.decisions.expert_pruning.sensitivity import expert_removals
from layerbudget.execution.divergence import Reference
from layerbudget.execution.modes import inference
from layerbudget.models.experts import find_experts, masked

SHARES = (0.875, 0.75, 0.625, 0.5)
RULES = ("random", "frequency", "norm", "reap", "directional")
EVOLVED, TRIED, CHILDREN = "evolution over REAP's order", 64, 8


class Bench:
    """A model with held-out texts, and what plans cost there."""

    def __init__(self, model, texts):
        self.model, self.found = model, find_experts(model)
        self.texts, self.seen = {name: next(data.batches(data.samples)) for name, data in texts.items()}, {}
        self.whole = {name: self.output(name) for name in self.texts}

    @torch.no_grad()
    def output(self, name):
        """Log-probabilities, ``(samples, length, vocabulary)``."""
        with inference(self.model):
            return torch.cat(
                [self.model(input_ids=ids).logits.log_softmax(-1) for ids in self.texts[name]["input_ids"].split(8)]
            )

    def cost(self, kept, name):
        """KL from the whole model, nats per token, and perplexity, from one forward."""
        key = (name, tuple(map(tuple, kept.values())))
        if key not in self.seen:
            with masked(self.found, kept):
                now = self.output(name)
            clean = self.whole[name]
            self.seen[key] = float((clean.exp() * (clean - now)).sum(-1).mean()), self.perplexity(name, now)
        return self.seen[key]

    def perplexity(self, name, now=None):
        now, ids = self.whole[name] if now is None else now, self.texts[name]["input_ids"]
        return math.exp(-float(now[:, :-1].gather(-1, ids[:, 1:, None]).mean()))


def singly(bench, data):
    """KL on the calibration text without every expert alone, ``(layers, E)``: one forward each."""
    reference, rows = Reference(bench.model, data, 8), []
    for layer in bench.found:
        row = []
        for expert in range(layer.count):
            with masked([layer], {layer.name: [e for e in range(layer.count) if e != expert]}):
                row.append(reference.measure())
        rows.append(np.array(row))
    return rows


def by_singles(found, rows):
    """Removals by damages of single experts, added up."""
    out = []
    for layer, row in zip(found, rows, strict=True):
        order = np.argsort(row)[: layer.count - layer.floor]
        terms = np.append(0.0, row[order].cumsum())[:, None]
        out.append(Removal(name=layer.name, experts=layer.count, order=tuple(order.tolist()), after=np.arange(len(terms)),
                           terms=terms, counts=np.ones(1), choosers=np.ones(1, dtype=bool), single=row, scores=row))  # fmt: skip
    return out


def plans_of(bench, data, seed, rules=RULES, singles=True):
    """Programs by rule, passes that they cost, those of folds, and damages of single experts: predicted, measured."""
    programs = {}
    (removals, *others), passes = expert_removals(bench.model, bench.found, data, rules=rules, seed=seed)
    for rule in rules:
        programs[rule] = removals[rule], passes if rule == "directional" else 0.0 if rule == "random" else 1.0
    measured = singly(bench, data) if singles else None
    if singles:
        programs["measured singly"] = by_singles(bench.found, measured), 1.0 + sum(map(len, measured))
    predicted = np.concatenate([r.single for r in programs["directional"][0]])
    return programs, others, predicted, None if measured is None else np.concatenate(measured)


def evolved(program, steps, measure, seed):
    """Numbers by layer from an evolutionary search as EvoESAP's (arXiv 2603.06003): who goes is the program's order.

    Of every generation's children, which trade one to three experts between layers, and their parent the one with the least
    measured KL on the calibration text lives on. ``TRIED`` forwards for every share.
    """
    rng, best, cost = np.random.default_rng(seed), list(steps), measure(program.kept(steps))
    for _ in range(TRIED // CHILDREN):
        for child in [traded(program, best, rng) for _ in range(CHILDREN)]:
            if (found := measure(program.kept(child))) < cost:
                best, cost = child, found
    return best


def traded(program, steps, rng):
    """The same with one to three experts more gone from some layers, and fewer from others."""
    child = list(steps)
    for _ in range(rng.integers(1, 4)):
        more = rng.choice([i for i, r in enumerate(program.removals) if child[i] + 1 < len(r.after)])
        less = rng.choice([i for i in range(len(child)) if child[i] > 0])
        if more != less:
            child[more], child[less] = child[more] + 1, child[less] - 1
    return child


def ranks(values):
    return np.argsort(np.argsort(values))


def within(program, share):
    total = sum(r.experts for r in program.removals)
    return program.within(int(share * total), np.ones(len(program.removals), dtype=np.int64))[0]


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def figure(values):
    mean = f"{np.mean(values):.3g}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.3g} to {max(values):.3g})"


def compare(bench, seeds, take):
    """Tables of all rules, and of what was predicted."""
    costs, said, single, passes = {}, {}, [], {}
    for seed in seeds:
        data = take(seed)
        programs, others, predicted, measured = plans_of(bench, data, seed)
        there = measured > 1e-9
        ratio, a, b = predicted[there] / measured[there], np.log(predicted[there] + 1e-12), np.log(measured[there])
        single.append((np.corrcoef(ranks(predicted), ranks(measured))[0, 1], np.corrcoef(a, b)[0, 1], np.median(ratio)))
        own = Masked(bench.model, bench.found, data)
        programs["predicted alone"] = programs["directional"]
        for (rule, (removals, spent)), even in itertools.product(programs.items(), (True, False)):
            exact = rule in ("directional", "predicted alone", "measured singly")
            rivals = programs["reap"][0] if rule == "directional" else None
            program = KeptProgram(removals, rivals, even=even, exact=exact)
            if rule == "directional":
                theirs = [KeptProgram(r["directional"], r["reap"], even=even) for r in others]
                folds = folds_for(bench.model, bench.found, data, 8, theirs)[0]
            for share in SHARES:
                steps, before = within(program, share), len(own.seen)
                best = program.refined(steps, own.measure) if rule == "directional" else program
                passes.setdefault((rule, even), []).append(spent + len(own.seen) - before)
                costs.setdefault((rule, even, share), []).append(bench.cost(best.kept(steps), "held-out"))
                if rule == "directional":
                    told = crossed(folds, int(program.left(steps).sum()), np.ones(len(steps), dtype=np.int64))
                    here = own.measure(best.kept(steps))
                    told |= {
                        "looked": per_token(*best.predicted(steps))[0],
                        "here": here,
                        "held-out": costs[rule, even, share][-1][0],
                    }
                    said.setdefault((even, share), []).append(told)
        program, even = KeptProgram(programs["reap"][0]), KeptProgram(programs["reap"][0], even=True)
        for share in SHARES:
            best = evolved(program, within(even, share), Masked(bench.model, bench.found, data).measure, seed)
            passes.setdefault((EVOLVED, False), []).append(2.0 + TRIED)
            costs.setdefault((EVOLVED, False, share), []).append(bench.cost(program.kept(best), "held-out"))
    return costs, said, single, passes


def report(bench, a, costs, said, single, passes):
    found = bench.found
    shape = f"{len(found)} layers of {found[0].count} experts, {found[0].top_k} per token"
    size = f"{sum(p.numel() for p in bench.model.parameters()) / 1e6:.1f} M parameters"
    lines = [f"{type(bench.model).__name__}, {size}, {shape}. Perplexity "
             f"{bench.perplexity('held-out'):.2f} on the held-out text ({a.windows} x {a.length} tokens), calibration "
             f"{a.samples} x {a.length} tokens, mean of {len(a.seeds)} seeds (least to largest).", "",
             "KL from the whole model on held-out text, nats per token:", ""]  # fmt: skip
    names = [
        (rule, even)
        for even in (True, False)
        for rule in (*RULES[:-1], EVOLVED, "predicted alone", "directional", "measured singly")
        if (rule, even) in passes
    ]
    head = ("rule", "counts", "passes", *(f"{100 * (1 - s):g} % gone" for s in SHARES))
    for which, title in ((0, None), (1, "Perplexity there:")):
        lines += [title, ""] if title else []
        lines += table(head, [(rule, "even" if even else "uneven", f"{np.mean(passes[rule, even]):.0f}",
                               *(figure([c[which] for c in costs[rule, even, s]]) for s in SHARES)) for rule, even in names])  # fmt: skip
    lines += [
        "`predicted alone` is the plan before heavy layers are measured against REAP's sets. The evolutionary search is run again for",
        "every share, with the passes of one; the other rules' passes are for all shares, but for the plan's own measurements.",
        "",
        "The forecast, from the calibration text alone, beside held-out text. *Predicted* and *measured* are on the half of the",
        "calibration text that did not choose (see the guide); the last columns are on the text that chose.",
        "",
    ]
    rows, ratios = [], []
    for (even, share), values in said.items():
        got = {name: np.array([v[name] for v in values]) for name in values[0]}
        held = got["held-out"]
        rows.append(("even" if even else "uneven", f"{100 * (1 - share):g} %",
                     *(figure(got[n]) for n in ("predicted", "predicted_error", "measured", "measured_error", "held-out")),
                     *(figure(got[n] / held) for n in ("predicted", "measured", "looked", "here"))))  # fmt: skip
        ratios += [(share, v["predicted"] / v["held-out"], v["measured"] / v["held-out"]) for v in values]
    lines += table(("counts", "gone", "predicted", "standard error", "measured", "standard error", "held-out", "predicted over held-out",
                    "measured over held-out", "predicted where it chose over held-out", "measured where it chose over held-out"), rows)  # fmt: skip
    for title, wanted in (("up to 25 %", lambda s: s >= 0.75), ("at all shares", lambda s: True)):
        some = np.array([r[1:] for r in ratios if wanted(r[0])])
        near = [int((np.abs(np.log(some[:, i])) <= math.log(1.5)).sum()) for i in (0, 1)]
        lines.append(
            f"Within a factor of 1.5 of held-out {title}: {near[0]} of {len(some)} predicted, {near[1]} of {len(some)} measured."
        )
    lines.append("")
    r, log, ratio = np.array(single).T
    lines += [f"Single experts, predicted beside measured on the calibration text: rank correlation {figure(r)}, correlation of "
              f"logarithms {figure(log)}, predicted over measured {figure(ratio)} in the median.", ""]  # fmt: skip
    return lines


def specialised(bench, texts):
    """What is kept of code and of books, by the text that chose."""
    measures = {name: Masked(bench.model, bench.found, data).measure for name, data in texts.items()}
    rows = []
    for chose, data in texts.items():
        programs, *_ = plans_of(bench, data, 0, rules=("frequency", "reap", "directional"), singles=False)
        for (rule, (removals, _)), even in itertools.product(programs.items(), (True, False)):
            rivals = programs["reap"][0] if rule == "directional" else None
            program = KeptProgram(removals, rivals, even=even, exact=rule == "directional")
            plans = [within(program, share) for share in (0.75, 0.5)]
            kept = [(program.refined(p, measures[chose]) if rivals else program).kept(p) for p in plans]
            costs = [bench.cost(k, name) for name in ("code", "books") for k in kept]
            rows.append((chose, rule, "even" if even else "uneven", *(f"{kl:.3g} ({ppl:.0f})" for kl, ppl in costs)))
    head = ("chose", "rule", "counts", "code, 25 % gone", "code, 50 %", "books, 25 %", "books, 50 %")
    whole = " and ".join(f"{bench.perplexity(name):.0f} on {name}" for name in ("code", "books"))
    return [f"Perplexity of the whole model: {whole}. Held-out KL (perplexity), one seed, by the text that chose:", "", *table(head, rows)]  # fmt: skip


def parts_of_books(folder, start, end):
    """Joined pieces of all books, from one share of their lengths to another."""
    texts = [f.read_text(errors="ignore") for f in sorted(folder.glob("*.txt"))]
    return "\n".join(t[int(start * len(t)) : int(end * len(t))] for t in texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name")
    parser.add_argument("--books", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    a = parser.parse_args()
    a.name = a.name or Path(a.model).name
    torch.set_num_threads(1)
    model, tokenizer = lb.load_model(a.model), lb.load_tokenizer(a.model)

    def read(source, samples, seed=0):
        return lb.calibration(source, tokenizer, samples=samples, length=a.length, seed=seed)

    if a.seeds:
        bench = Bench(model, {"held-out": read(f"{a.model}/evaluation.txt", a.windows)})
        lines = report(bench, a, *compare(bench, a.seeds, lambda seed: read(f"{a.model}/calibration.txt", a.samples, seed)))
        write_section("expert_pruning", f"Experts that stay: {a.name}", lines, out=a.out)
    if a.books:
        written = {"books": parts_of_books(a.books, 0.95, 1.0), "chooses": parts_of_books(a.books, 0.9, 0.95),
                   "code": "\n".join(text for _, text in stdlib.read("evaluation")[0])}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            for name, text in written.items():
                (Path(folder) / f"{name}.txt").write_text(text)
            held = {name: read(f"{folder}/{name}.txt", a.windows) for name in ("code", "books")}
            chose = {"code": read("stdlib", a.samples), "books": read(f"{folder}/chooses.txt", a.samples)}
        lines = specialised(Bench(model, held), chose)
        write_section("expert_pruning", f"Experts by the text that chose: {a.name}", lines, out=a.out)


if __name__ == "__main__":
    main()
