"""How long error feedback inside ggml's grids takes beside SparseGPT on the same matrix, and gptq beside weighted on a model.

    python -m benchmarks.bits feedback [--rows 1024] [--columns 2048] [--rounds 2] [--types Q4_K ...] [--model demo] [--out FOLDER]

Both sides make their own factor of the inputs' second moments, with the same threads. SparseGPT then removes half of the weights.
Feedback lets ggml search the scales of every block (``search``), and chooses codes under them (``ours``). ``plain`` is ggml
rounding the whole matrix once, without feedback. Processor time of all threads; of several rounds the least. On the model all
matrices get one type, inputs and layers included: the time of ``gptq`` over that of ``weighted``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.compressors import feedback, ggml
from layerbudget.compressors.formats import find_format
from layerbudget.compressors.sparsegpt import inverse_factor, sparsegpt_update
from layerbudget.decisions.bits.apply import round_matrices
from layerbudget.models.blocks import partition

TYPES = (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_XS",
    "IQ4_NL",
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_S",
    "Q4_0",
    "Q5_1",
    "Q8_0",
    "MXFP4",
    "NVFP4",
)


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def of_type(weight: torch.Tensor, moment: torch.Tensor, name: str, threads: int) -> dict[str, float]:
    """Seconds of one type: the factor, ggml's search, the rest, and ggml without feedback."""
    factors, spent = feedback.Factors(moment), [0.0]

    def search(*given: Any, **options: Any) -> np.ndarray:
        start = time.process_time()
        found = ggml.quantise(*given, **options)
        spent[0] += time.process_time() - start
        return found

    factor = seconds(lambda: factors.of(find_format(name).group or 1))
    with patch.object(feedback, "quantise", search):
        whole = seconds(lambda: feedback.feed_back(weight, factors, name, threads=threads))
    importance = moment.diagonal().numpy()
    plain = seconds(lambda: ggml.quantise(weight.numpy(), name, importance, threads=threads))
    return {"factor": factor, "search": spent[0], "ours": whole - spent[0], "plain": plain}


def matrix(rows: int, columns: int, types: Sequence[str], rounds: int, threads: int) -> list[dict[str, Any]]:
    """Every type beside SparseGPT, all in every round."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=g) * 0.02
    x = torch.randn(2 * columns, columns // 4, generator=g) @ torch.randn(columns // 4, columns, generator=g)
    x += torch.randn(x.shape, generator=g)
    moment = x.T @ x
    for name in types:  # where codes lie is found once a process
        _ = ggml.levels(name) if ggml.code_bits(name) is not None else None
    found: dict[str, list[dict[str, float]]] = {name: [] for name in types}
    removed = []
    for _ in range(rounds):
        factor = seconds(lambda: inverse_factor(moment))
        held = inverse_factor(moment)
        removed.append({"factor": factor, "update": seconds(partial(sparsegpt_update, weight, *held, weight.numel() // 2))})
        for name in types:
            found[name].append(of_type(weight, moment, name, threads))
    beside = {k: min(r[k] for r in removed) for k in removed[0]}
    rows_of = [{"type": n, **{k: min(r[k] for r in all_) for k in all_[0]}} for n, all_ in found.items()]
    for row in rows_of:
        for part in ("factor", "search", "ours", "plain"):
            row[f"{part}_ratio"] = row[part] / sum(beside.values())
        row["ratio"] = row["factor_ratio"] + row["search_ratio"] + row["ours_ratio"]
    return rows_of


def model(name: str, types: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds of gptq over weighted on all matrices of a model."""
    tokenizer = lb.load_tokenizer(name)
    text, rows = lb.calibration("stdlib", tokenizer, samples=16, length=128), []
    for kind in types:
        spent = {}
        for method in ("weighted", "gptq"):
            loaded = lb.load_model(name, dtype="float32")
            wide = find_format(kind)
            own = {m.name: kind for b in partition(loaded, "linear") for m in b.modules if wide.fits(m.d_in)}
            spent[method] = seconds(partial(round_matrices, loaded, own, text, method=method))
        rows.append({"type": kind, "matrices": len(own), **spent, "ratio": spent["gptq"] / spent["weighted"]})
    return rows


def table(record: dict[str, Any]) -> str:
    """The record as readable text."""
    lines = [
        f"A matrix of {record['rows']} x {record['columns']}; processor time over that of SparseGPT with its factor (least of "
        f"{record['rounds']} rounds, {record['threads']} thread(s) on both sides). `search` is ggml's own search of scales, `ours` the choice of codes and the feedback, "
        "`plain` ggml's rounding without feedback.", "",
        "| type | feedback over SparseGPT | factor | search (ggml) | ours | plain (ggml) |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['type']} | {r['ratio']:.2f} | {r['factor_ratio']:.2f} | {r['search_ratio']:.2f} | {r['ours_ratio']:.2f} | "
        f"{r['plain_ratio']:.2f} |"
        for r in record["matrix"]
    ]
    above = [r for r in record["matrix"] if r["ratio"] > 2]
    least = max((r["factor_ratio"] + r["ours_ratio"] for r in record["matrix"]), default=0)
    lines += ["", f"Without ggml's search every type takes at most {least:.2f} of SparseGPT's time."]
    if above:
        names = ", ".join(r["type"] for r in above)
        small = min(r["plain_ratio"] for r in above)
        lines += [
            f"Above 2 are {names}: there ggml's search alone, which rounding without feedback needs too, takes at least {small:.2f}."
        ]
    lines += ["", f"All matrices of {record['model']} in one type, 16 sequences of 128 tokens, inputs and layers included:", ""]
    lines += ["| type | gptq (s) | weighted (s) | ratio |", "|---|---|---|---|"]
    lines += [f"| {r['type']} | {r['gptq']:.2f} | {r['weighted']:.2f} | {r['ratio']:.2f} |" for r in record["whole"]]
    return "\n".join(lines)


def main() -> None:
    """Parse and run."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, default=1024)
    p.add_argument("--columns", type=int, default=2048)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--types", nargs="+", default=list(TYPES))
    p.add_argument("--model", default="demo")
    p.add_argument("--model-types", nargs="+", default=["Q4_0", "IQ4_NL"])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    given = {k: getattr(a, k) for k in ("rows", "columns", "rounds", "threads")}
    record = {**given, "model": Path(a.model).name}
    record["matrix"] = matrix(a.rows, a.columns, a.types, a.rounds, a.threads)
    record["whole"] = model(a.model, a.model_types)
    write_section("bits", "Time of error feedback inside ggml's grids", table(record), out=a.out, peers=("gguf",))


if __name__ == "__main__":
    main()
