"""One program for weights and cache, beside deciding them one after the other, at equal total bytes.

    python -m benchmarks.memory plans MODEL [--name NAME] [--runtime llama.cpp] [--method weighted] [--length 512]
        [--batches 2 16] [--samples 16] [--check 4] [--windows 8] [--scratch FOLDER] [--out FOLDER]

MODEL is a folder with calibration.txt and evaluation.txt (``train_second_model.py``), or ``demo`` (the standard library). Memories
are five ratios to the smallest plan's formats, at every number of sequences: with many, the cache of a small model with a short
context weighs as much as that of a large one with a long context. At each memory weights and cache are rounded at once, and the
KL from the dense model is that of held-out windows which decide nothing:

* ``uniform cache``: one format for the whole cache, the rest of the bytes for the best weights (exact program). The three formats
  with the least predicted damage run, and the best *measured* one stands in the table.
* ``mix``: a mix of llama.cpp (or one format for all weights), the rest of the bytes for the best cache. The two with the least
  predicted damage run, and the best measured one stands in the table.
* ``16-bit cache``: weights in what a cache in 16 bits leaves, as most people do it.
* ``program``: the joint choice. ``plan``: what ``plan memory`` takes of these after its check, on text that is none of the above.

Bytes are those of the file that is written for the first memory, and of a cache that is filled; both must be the planned ones. For
llama.cpp, ``--length`` is a multiple of 256, as its cache is.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.compressors import ggml
from layerbudget.decisions.bits.apply import round_matrices
from layerbudget.decisions.bits.plan import describe_rows
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.cache.cache import caching, rounding
from layerbudget.decisions.memory.fitted import Fitted
from layerbudget.decisions.memory.plan import plan_memory, settled, write_memory
from layerbudget.decisions.memory.program import MIX, UNIFORM, Fit, MemoryLimits
from layerbudget.models.blocks import weight_of

RATIOS = (1.08, 1.2, 1.35, 1.6, 2.0)
COLUMNS = ("16-bit cache", "uniform cache", "mix", "program", "plan")


def remember() -> None:
    """Let ggml keep what it rounds, by content: plans share most of their matrices."""
    call, held = ggml.quantise, dict[bytes, np.ndarray]()

    @functools.wraps(call)
    def kept(weight: Any, kind: str, weights: Any = None, **more: Any) -> np.ndarray:
        key = hashlib.blake2b(kind.encode(), digest_size=16)
        for part in (weight, weights):
            key.update(b"" if part is None else np.ascontiguousarray(part).tobytes())
        if key.digest() not in held:
            held[key.digest()] = call(weight, kind, weights, **more)
        return held[key.digest()]

    ggml.quantise = kept


class Runner:
    """A model that runs text with weights and cache rounded."""

    def __init__(self, model: Any, fit_text: Any, method: str, imatrix: Path | None) -> None:
        self.model, self.text, self.method = model, fit_text, method
        self.own = {} if imatrix is None else {"imatrix": str(imatrix)}
        self.seen: dict[tuple[int, bytes], np.ndarray] = {}

    def rows(self, dense: DenseOutput, fit: Fit, chosen: np.ndarray) -> np.ndarray:
        """See :meth:`DenseOutput.rows`, of a choice."""
        weights, cache = fit.apart(chosen)
        key = id(dense), weights.tobytes() + cache.tobytes()
        if key not in self.seen:
            formats = fit.weights.formats_of(weights)
            held = {n: weight_of(self.model, n)[1].detach().clone() for n in formats}
            data = None if self.own or self.method == "rtn" else self.text
            round_matrices(self.model, formats, data, method=self.method, **self.own)
            with caching(self.model, rounding(fit.space.by_layer(cache))):
                self.seen[key] = dense.rows(self.model)
            with torch.no_grad():
                for n, w in held.items():
                    weight_of(self.model, n)[1].copy_(w)
        return self.seen[key]


def check_bytes(a: argparse.Namespace, model: Any, tokenizer: Any, text: Any, plan: Any) -> tuple[str, Path | None]:
    """A sentence on the bytes of the written file and of a filled cache, and the importance matrix where one was written."""
    folder = Path(tempfile.mkdtemp()) / "out"
    data = None if a.method == "rtn" else text
    receipt = write_memory(lb.load_model(a.model, dtype="float32"), plan, folder, data, tokenizer=tokenizer)
    parts = plan.payload.parts
    beside = parts.get("rest of the file", {"bytes": 0})["bytes"]
    counted, planned_file = receipt.file, parts["weights"]["bytes"] + beside  # of folders the headers are an upper bound
    if counted > planned_file or (a.runtime == "llama.cpp" and counted != planned_file):
        raise SystemExit(f"The file has {counted} bytes, planned were {planned_file}.")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(text.input_ids[:1, : plan.payload.context], past_key_values=cache, use_cache=True)
    numbers = plan.payload.batch * sum(x.numel() for layer in cache.layers for x in (layer.keys, layer.values))
    planned = sum(b.numel for b in plan.blocks if b.modules[0] in plan.payload.cache_formats)
    if numbers != planned:
        raise SystemExit(f"A filled cache has {numbers} numbers, planned were {planned}.")
    said = f"Written and counted: {counted:,} bytes of file, {planned_file:,} planned; a filled cache of {plan.payload.batch} sequences has "
    imatrix = folder / "imatrix.gguf"
    return f"{said}{numbers:,} numbers, as planned.", imatrix if imatrix.is_file() else None


def main() -> None:
    """Run the comparison and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--runtime", default="llama.cpp")
    parser.add_argument("--method", default="weighted")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--check", type=int, default=4)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    remember()
    name = f"{a.name or Path(a.model).name}-{a.runtime}"
    model, tokenizer = lb.load_model(a.model, dtype="float32"), lb.load_tokenizer(a.model)
    source, other = ("stdlib", "stdlib") if a.model == "demo" else (f"{a.model}/calibration.txt", f"{a.model}/evaluation.txt")
    text = lb.calibration(source, tokenizer, samples=a.samples + a.check, length=a.length)
    fit_text, check = text.select(slice(0, a.samples)), text.select(slice(a.samples, None))
    held = lb.evaluation_set(other, tokenizer, length=a.length)
    held = held.select(list(range(0, held.samples, max(1, held.samples // a.windows)))[: a.windows])
    scores = a.scratch / f"fit-{name}.json"
    own: dict[str, Any] = {"runtime": a.runtime, "method": a.method, "draws": a.draws, "tokenizer": tokenizer}
    if not scores.is_file():
        plan_memory(model, fit_text, memory="1 TiB", context=a.length, save_scores=scores, **own)
    measured = lb.Scores.load(scores)
    terms = MemoryLimits(memory="1 TiB", context=a.length, batch=a.batches[0])
    smallest = Fitted.of(measured, terms).fit
    least = int(smallest.table.smallest.sum())
    first = Fitted.of(
        measured, MemoryLimits(memory=f"{least * 2 + smallest.beside} bytes", context=a.length, batch=a.batches[0])
    )
    said, imatrix = check_bytes(a, model, tokenizer, fit_text, first.plan("exact"))
    runner = Runner(model, fit_text, a.method, imatrix)
    dense, checked = DenseOutput(model, held, 4), DenseOutput(model, check, 4)
    lines = [
        f"`{a.method}`, {fit_text.samples} x {a.length} calibration tokens, {check.samples} windows that check, "
        f"{held.samples} held-out windows of {a.length}; dense perplexity {describe_rows(dense.rows(model))['perplexity']:.1f}. "
        + said, "",
        "| tokens | memory for formats | weights, cache (bits) of the program | " + " | ".join(COLUMNS)
        + " | plan against the better of both | predicted |", "|" + "---|" * (5 + len(COLUMNS)),
    ]  # fmt: skip
    for batch in a.batches:
        fit = Fitted.of(measured, MemoryLimits(memory="1 TiB", context=a.length, batch=batch)).fit
        least = int(fit.table.smallest.sum())
        for ratio in RATIOS:
            memory = int(ratio * least) + fit.beside
            found = Fitted.of(measured, MemoryLimits(memory=f"{memory} bytes", context=a.length, batch=batch))
            lines.append(line(found, runner, dense, checked, f"{a.length} x {batch}"))
            print(lines[-1], flush=True)
    write_section("memory", f"Weights and cache: {name}, {a.length} tokens", lines, out=a.out)


def line(found: Fitted, runner: Runner, dense: DenseOutput, checked: DenseOutput, tokens: str) -> str:
    """One row: what every way measures at a memory."""
    fit, limit, table = found.fit, found.limit, found.decision.table

    def best(plans: dict[str, np.ndarray], count: int) -> tuple[str, np.ndarray | None]:
        order = sorted(plans, key=lambda n: table.totals(plans[n])["predicted"])[:count]
        rows = {n: runner.rows(dense, fit, plans[n]) for n in order}
        name = min(rows, key=lambda n: describe_rows(rows[n])["kl"], default="")
        return name, rows.get(name)

    caches = fit.uniform_caches(limit)
    plain = caches.get(fit.cache.formats[-1])
    ways = {"16-bit cache": ("", None if plain is None else runner.rows(dense, fit, plain))}
    ways |= {"uniform cache": best(caches, 3), "mix": best(fit.mixes(limit), 2)}
    found, rows = settled(found, lambda picks: {name: runner.rows(checked, fit, pick.chosen) for name, pick in picks.items()})
    choices = found.decision.choices
    ways["program"] = "", runner.rows(dense, fit, choices["exact"])
    kl = {rule: describe_rows(each)["kl"] for rule, each in rows.items()}
    taken = min(kl, key=lambda rule: (kl[rule], rule != "exact"))
    ways["plan"] = {UNIFORM: "uniform cache", MIX: "mix"}.get(taken, ""), runner.rows(dense, fit, choices[taken])
    cells = []
    for name in COLUMNS:
        note, rows = ways[name]
        cells.append("" if rows is None else f"{describe_rows(rows)['kl']:.3g}{f' ({note})' if note else ''}")
    others = [ways[n][1] for n in ("uniform cache", "mix") if ways[n][1] is not None]
    least = min(others, key=lambda rows: describe_rows(rows)["kl"])
    paired = describe_rows(ways["plan"][1], least)
    less = f"{paired['kl'] / describe_rows(least)['kl'] - 1:+.0%} ({paired['difference']:+.1g} +- {paired['difference_error']:.0g})"
    parts = fit.parts(choices["exact"])
    bits = ", ".join(f"{parts[n]['bits']:.2f}" for n in ("weights", "cache"))
    cells += [less, f"{found.decision.totals[taken]['predicted']:.3g}"]
    return f"| {tokens} | {limit:,} | {bits} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
