"""Layers of different shapes beside equal ones, at 10, 25 and 40 % fewer FLOPs: perplexity, and tokens per second in llama.cpp.

    python -m benchmarks.shapes uneven MODEL --scratch DIR [--saves 10 25 40] [--samples 16] [--passes 32] [--rounds 7]
        [--by auto] [--compensate auto] [--depth N] [--fit FILE --held-out FILE] [--steps plan quality speed table] [--out FOLDER]

MODEL is a folder of Llama's kind, or demo. --fit decides and refits, --held-out is only read by the perplexity; without them they are
MODEL's calibration.txt and evaluation.txt. Uneven and even shapes come from the same search, with the same text and passes. Every model is written as
GGUF in 16 bits, as are the dense one and the dense one in Q8_0, which is smaller than all of them. Plans and models stay in DIR,
so that the steps can be run apart and speed again on a quiet machine. The step ``once`` stands for ``plan`` where that takes too long:
all plans of a way then follow from one look at the dense model. Without the step ``speed`` no bytes and speeds are in the table, and with
``--no-files`` no file is written, for models that llama.cpp does not load with layers that differ. ``--flap`` adds FLAP (``flap.py``),
``--depth N`` plans in which up to N whole layers may go as well (of the step ``plan``).

Speed: llama.cpp computes in this process on one thread, and its processor time is what counts, so that other programs take nothing
from it but caches. A prompt of 256 tokens is read, and some tokens are written; files take turns, the least time of all rounds counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.shapes.flap import cut_by_fluctuation
from benchmarks.shapes.smaller import flops
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.shapes.compensation import ways_of
from layerbudget.decisions.shapes.layouts import find_attention, find_mlp
from layerbudget.decisions.shapes.path import LEVELS, every_width
from layerbudget.decisions.shapes.plan import _spaces
from layerbudget.decisions.shapes.point import ShapePoint
from layerbudget.decisions.shapes.program import DAMPING, KINDS, ShapeSpace
from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.decisions.shapes.speed import request_seconds
from layerbudget.decisions.shapes.units import head_units
from layerbudget.errors import InfeasibleBudget
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.evaluation.statistics import ratio
from layerbudget.models.blocks import describe, layers

LABELS = {
    "uneven": "uneven",
    "even": "nearest even shape",
    "gone": "uneven, whole layers may go",
    "flap": "FLAP (a bias, no refit)",
}


def plan_all(a: argparse.Namespace) -> None:
    """Plan every row that is not there yet."""
    data = text_of(a)
    for save in a.saves:
        ways: dict[str, dict[str, Any]] = {"uneven": {"runtime": "llama.cpp"}, "even": {"even": True}}
        if a.depth:
            ways["gone"] = {"runtime": "llama.cpp", "depth": a.depth}
        for way, own in ways.items():
            file = a.scratch / f"{way}-{save:g}.json"
            if not file.is_file():
                model, started = lb.load_model(a.model, dtype=a.dtype), time.process_time()
                more = {"multiple": a.multiple, "strides": a.strides, "by": a.by, "compensate": a.compensate, **own}
                plan = lb.plan_shapes(model, data, f"{save}% flops", passes=a.passes, **more)
                plan.save(file)
                print(way, save, plan.payload.measured, f"{time.process_time() - started:.0f} s", flush=True)


def plan_at_once(a: argparse.Namespace) -> None:
    """Plan all rows from one look at the dense model for each way."""
    model, data, started = lb.load_model(a.model, dtype=a.dtype), text_of(a), time.process_time()
    for way in ("uneven", "even"):
        plans, passes = one_look(a, model, data, even=way == "even")
        print(f"{way}: {passes} forward equivalents, {time.process_time() - started:.0f} s", flush=True)
        for save, plan in zip(a.saves, plans.values(), strict=True):
            plan.save(a.scratch / f"{way}-{save:g}.json")
            print(way, save, plan.payload.predicted, flush=True)


def one_look(a: argparse.Namespace, model: Any, data: Any, *, even: bool) -> tuple[dict[str, lb.Plan], float]:
    """Plans of all savings from one look at the dense model for each unit of heads, and the forward equivalents that it took."""
    budgets = [f"{save}% flops" for save in a.saves]
    hyper = {"multiple": a.multiple, "compensate": ways_of(model, data, a.compensate), "draws": 2, "seed": 0}
    own: dict[str, Any] = {"kinds": KINDS, "max_removed": 0.75, "depth": 0, "even": even}
    own["bytes_per_parameter"] = float(next(model.parameters()).element_size())
    plans, passes = dict[str, lb.Plan](), 0.0
    for word in head_units(model, KINDS, a.by):
        spaces = dict[str, ShapeSpace]()
        for budget in budgets:
            with contextlib.suppress(InfeasibleBudget):
                spaces[budget] = _spaces(model, word, a.multiple, None, budget=budget, **own)[0]
        if not spaces:
            continue
        first = next(iter(spaces.values()))
        point, start = ShapePoint(model, data, first, DAMPING, 8), first.start()
        around = first.around(start, 1.0, LEVELS)
        try:
            seen = point.evaluate(start, around, point.dense, draws=2, seed=0).forms.total
        finally:
            point.restore()
        passes += point.passes
        alternatives, damage = every_width(first, around, seen)
        for budget, space in spaces.items():
            with contextlib.suppress(InfeasibleBudget):
                state, choice = space.step(alternatives, damage)
                if budget not in plans or choice.damage < plans[budget].payload.predicted:
                    unit = next((p.by for p in space.parts if p.kind == "heads"), word)
                    plans[budget] = space.plan(state, choice.damage, choice, {**hyper, "by": unit}, describe(model))
    return {budget: plans[budget] for budget in budgets if budget in plans}, passes


def text_of(a: argparse.Namespace) -> Any:
    """The text that decides."""
    source = a.fit or ("stdlib" if a.model == "demo" else f"{a.model}/calibration.txt")
    return lb.calibration(source, lb.load_tokenizer(a.model), samples=a.samples, length=a.length)


def note(a: argparse.Namespace, name: str, **found: Any) -> None:
    """Add what was found of a row to the rows that are kept."""
    file = a.scratch / "rows.json"
    rows = json.loads(file.read_text()) if file.is_file() else {}
    rows[name] = {**rows.get(name, {}), **found}
    file.write_text(json.dumps(rows, indent=1))
    print(name, {k: v for k, v in found.items() if k not in ("nll", "tokens")}, flush=True)


def quality(a: argparse.Namespace) -> None:
    """Apply and write every plan, and measure perplexity on the text that decided nothing."""
    data, tokenizer = text_of(a), lb.load_tokenizer(a.model)
    source = a.held_out or ("stdlib" if a.model == "demo" else f"{a.model}/evaluation.txt")
    held = evaluation_set(source, tokenizer, length=a.length, windows=a.windows)
    rows = json.loads((a.scratch / "rows.json").read_text()) if (a.scratch / "rows.json").is_file() else {}
    ways = ["uneven", "even", *(["gone"] if a.depth else []), *(["flap"] if a.flap else [])]
    for name in ("dense", *(f"{way}-{save:g}" for save in a.saves for way in ways)):
        if name in rows:
            continue
        model, plan, saved = lb.load_model(a.model, dtype=a.dtype), None, 0.0
        if name.startswith("flap"):
            base = flops(model)
            saved = cut_by_fluctuation(model, data, float(name.removeprefix("flap-")) / 100 * base, multiple=a.multiple) / base
        elif name != "dense":
            plan = lb.Plan.load(a.scratch / f"{name}.json")
            lb.apply_shapes(model, plan, data)
        found = [(find_attention(m, n), find_mlp(m, n).width) for n, m in layers(model)]
        loss = perplexity(model, held)
        row = {
            "perplexity": loss.value,
            "nll": loss.nll,
            "tokens": loss.counts,
            "heads": [h.heads for h, _ in found],
            "widths": [w for _, w in found],
            "layers gone": len(plan.payload.dropped) if plan else 0,
        }
        row["saved"] = saved if plan is None else plan.budget["spent"] / plan.budget["base"]
        if a.files and not saved:
            save_gguf(model, tokenizer, a.scratch / name, plan=plan)
            row["bytes"] = (a.scratch / name / "model.gguf").stat().st_size
        note(a, name, **row)
    if a.files and "q8" not in rows:
        model = lb.load_model(a.model, dtype=a.dtype)
        scores = rounding_damage(model, data.select(slice(0, 2)), family="gguf", formats=["Q8_0", "F16"], draws=1)
        lb.write_bits(model, lb.plan_bits(scores, bits=8.5, rule="uniform"), a.scratch / "q8", tokenizer=tokenizer)
        note(
            a, "q8", perplexity=perplexity(model, held).value, bytes=(a.scratch / "q8" / "model.gguf").stat().st_size, saved=0.0
        )


def speed(a: argparse.Namespace) -> None:
    """Least times of every file, in turns."""
    names = [n for n in json.loads((a.scratch / "rows.json").read_text()) if (a.scratch / n / "model.gguf").is_file()]
    times = request_seconds([a.scratch / name / "model.gguf" for name in names], rounds=a.rounds)
    for name, (read, written) in zip(names, times.tolist(), strict=True):
        note(a, name, read=1 / read, written=1 / written)


def table(a: argparse.Namespace) -> str:
    """The rows as Markdown."""
    rows = json.loads((a.scratch / "rows.json").read_text())
    dense = rows["dense"]

    def line(label: str, r: dict[str, Any]) -> str:
        ratios = " | ".join(f"{r[k] / dense[k]:.2f}" if k in dense else "" for k in ("bytes", "read", "written"))
        sizes = f"{spread(r['heads'])}, {spread(r['widths'])}" if "heads" in r else ""
        if r.get("layers gone"):
            sizes += f"; {r['layers gone']} layers gone"
        return f"| {label} | {r['saved']:.1%} | {sizes} | {ratios} | {r['perplexity']:.2f} | {beside(r)} |"

    def beside(r: dict[str, Any]) -> str:
        """Change of the perplexity from the even shape of the same request, with two standard errors over the windows."""
        own = next((name for name in rows if rows[name] is r), "")
        if not own.startswith(("uneven-", "flap-", "gone-")):
            return ""
        even = rows[f"even-{own.split('-')[1]}"]
        counts = np.array(r["tokens"])
        mean, error, _ = ratio(np.array(r["nll"]) - np.array(even["nll"]), counts)
        return f"{math.expm1(mean):+.1%} +- {2 * error:.1%}"

    speeds = "Bytes and speed were not measured."
    if "read" in dense:
        speeds = f"Bytes and speed are ratios to the dense file; it reads {dense['read']:.0f} and writes {dense['written']:.0f} tokens per second of one thread."
    lines = [
        f"{a.samples} x {a.length} tokens decide, {a.windows} held-out windows of {a.length}; differences with two standard errors. {speeds}", "",
        "| shapes | FLOPs gone | heads, widths | bytes | reading | writing | perplexity | against even |",
        "|---|---|---|---:|---:|---:|---:|---|",
        line("dense, F16", dense), *([line("dense, Q8_0", rows["q8"])] if "q8" in rows else []),
    ]  # fmt: skip
    for save in a.saves:
        ways = [w for w in ("even", "flap", "uneven", "gone") if f"{w}-{save:g}" in rows]
        lines += [line(f"{LABELS[way]}, {save:g} % asked", rows[f"{way}-{save:g}"]) for way in ways]
    return "\n".join(lines)


def spread(values: list[int]) -> str:
    """One number, or the least and the largest."""
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def main() -> None:
    """Run the steps that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--saves", type=float, nargs="+", default=[10, 25, 40])
    for name, default in (("samples", 16), ("length", 128), ("windows", 64), ("rounds", 7), ("multiple", 16), ("strides", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--passes", type=float, default=32.0)
    parser.add_argument("--by", default="auto")
    parser.add_argument("--compensate", default="auto")
    parser.add_argument("--fit", help="text that decides and refits")
    parser.add_argument("--held-out", help="text that measures")
    parser.add_argument("--dtype", default="float32", help="precision of the model")
    parser.add_argument("--flap", action="store_true", help="FLAP's shapes too")
    parser.add_argument("--depth", type=int, default=0, help="plans in which up to so many layers may go, too")
    parser.add_argument("--no-files", dest="files", action="store_false", help="write no GGUF files")
    parser.add_argument("--steps", nargs="+", default=["plan", "quality", "speed", "table"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    if a.depth and "once" in a.steps:
        parser.error("--depth is for the step plan, not for once")
    torch.set_num_threads(1)
    a.scratch.mkdir(parents=True, exist_ok=True)
    for step in a.steps:
        if step == "table":
            title = f"Shapes that differ by layer: {a.name or Path(a.model).name}"
            write_section("shapes", title, table(a), out=a.out, peers=("xllamacpp",))
        else:
            {"plan": plan_all, "once": plan_at_once, "quality": quality, "speed": speed}[step](a)


if __name__ == "__main__":
    main()
