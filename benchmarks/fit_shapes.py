"""Weights, cache and shapes in one program, beside weights and cache alone, at equal total bytes.

    python benchmarks/fit_shapes.py [MODEL] [--name NAME] [--runtime transformers] [--method rtn] [--samples 16] [--length 128]
        [--windows 40] [--context 256] [--batch 4] [--ratios 1 1.1 1.25 1.5 2] [--out benchmarks/results]

MODEL is a folder with calibration.txt and evaluation.txt, or ``demo``. Memories are ratios to the formats of the smallest plan with
all shapes. At each of them the program runs with all shapes and with those that it may choose; weights and cache are rounded at
once. KL is from the dense model, on held-out windows that decide nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import layerbudget as lb
from layerbudget.decisions.bits.plan import describe_rows
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.fit.plan import joint_rows, plan_fit
from layerbudget.decisions.fit.program import Fitted, Terms


def main() -> None:
    """Measure once, decide at every memory, and write the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", default="demo")
    p.add_argument("--name")
    p.add_argument("--runtime", default="transformers")
    p.add_argument("--method", default="rtn")
    for name, value in (("samples", 16), ("length", 128), ("windows", 40), ("context", 256), ("batch", 4), ("draws", 4)):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--ratios", type=float, nargs="+", default=[1, 1.1, 1.25, 1.5, 2])
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    a = p.parse_args()
    torch.set_num_threads(1)
    started, tokenizer = time.process_time(), lb.load_tokenizer(a.model)
    texts = ("stdlib", "stdlib") if a.model == "demo" else (f"{a.model}/calibration.txt", f"{a.model}/evaluation.txt")
    data = lb.calibration(texts[0], tokenizer, samples=a.samples, length=a.length)
    held = lb.evaluation_set(texts[1], tokenizer, length=a.length)
    held = held.select(list(range(0, held.samples, max(1, held.samples // a.windows)))[: a.windows])
    model, terms = lb.load_model(a.model, dtype="float32"), {"context": a.context, "batch": a.batch, "shapes": True}
    with tempfile.TemporaryDirectory() as folder:
        own = {"runtime": a.runtime, "method": a.method, "draws": a.draws, "tokenizer": tokenizer}
        plan = plan_fit(model, data, memory="64 GiB", **terms, **own, save_scores=Path(folder) / "scores.json")
        scores = lb.Scores.load(Path(folder) / "scores.json")
    dense, whole = DenseOutput(model, held), Fitted.of(scores, Terms(memory="64 GiB", **terms)).fits[0]
    lines = []
    for ratio in a.ratios:
        memory = whole.beside + int(ratio * (whole.least - whole.beside))
        found = Fitted.of(scores, Terms(memory=f"{memory} bytes", **terms))
        picks = {name: found.picks[name] for name in ("choices", "all-shapes")}
        rows = joint_rows(model, dense, picks, data)
        own, other = describe_rows(rows["choices"], rows["all-shapes"]), describe_rows(rows["all-shapes"])
        parts, bits = found.plan("choices"), found.plan("all-shapes").extra["parts"]
        e, w = parts.extra["shapes"], parts.extra["parts"]["weights"]
        change, error = (100 * own[k] / other["kl"] for k in ("difference", "difference_error"))
        lines.append(
            f"| {memory:,}, {memory - whole.beside:,} | {other['kl']:.4g} | {own['kl']:.4g} ({change:+.0f} +- {error:.0f} %) | "
            f"{1 - e['share']:.0%} of FLOPs gone, {w['bits']:.2f} bits per weight ({bits['weights']['bits']:.2f} with all) |"
        )
        print(lines[-1], flush=True)
    name, e = a.name or Path(a.model).name, plan.extra
    text = [
        f"# Shapes in a fit: {name}, {a.runtime}", "",
        f"Held-out KL, nats per token, at equal total bytes. `{a.method}`, {a.samples} x {a.length} tokens decide, {held.samples} "
        f"held-out windows, context {a.context} x {a.batch}. {e['passes']:.0f} forward equivalents, {e['shapes']['forward_passes']:.0f} "
        "of them for shapes. Made by `benchmarks/fit_shapes.py`.", "",
        "| bytes in all, of them for formats | all shapes stay | shapes may go | what stays |", "|---|---|---|---|", *lines, "",
        f"{time.process_time() - started:.0f} s of one core.", "",
    ]  # fmt: skip
    (a.out / f"fit_shapes-{name}-{a.runtime}.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
