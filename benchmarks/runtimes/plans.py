"""Tokens per second in llama.cpp of a planned GGUF file, of uniform and of the runtime's own mix at equal bytes.

    python -m benchmarks.runtimes plans MODEL [--bits 5] [--threads 1] [--rounds 5] [--out FOLDER]

The three files are loaded by llama.cpp one after another in every round (``xllamacpp``), so that whatever else the machine does
meets all of them. Reading is 256 tokens in one batch, writing is 64 tokens one at a time; medians over rounds, and the median of
the ratio to uniform within a round. Speed depends on types and shapes, not on what weights say: a model of random weights serves.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import xllamacpp
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import rounding_damage

RULES = {"planned": "exact", "uniform": "uniform", "runtime's mix": "mix"}
READ, WRITTEN = 256, 64


def files(name: str, bits: float, folder: Path) -> dict[str, dict[str, Any]]:
    """Three files at one budget."""
    tokenizer, how = lb.load_tokenizer(name), {"dtype": "float32", "stream": name != "demo"}
    text = lb.calibration("stdlib", tokenizer, samples=2, length=128)
    scores = rounding_damage(lb.load_model(name, **how), text, family="gguf", draws=1)
    made = {}
    for label, rule in RULES.items():
        plan = lb.plan_bits(scores, bits=bits, rule=rule)
        receipt = lb.write_bits(lb.load_model(name, **how), plan, folder / rule, tokenizer=tokenizer)
        kinds = sorted(set(plan.payload.formats.values()))
        held = list(plan.payload.formats.values())
        made[label] = {"file": folder / rule / "model.gguf", "bits": receipt.bits, "types": {k: held.count(k) for k in kinds}}
    return made


def speed(file: Path, threads: int) -> tuple[float, float]:
    """Tokens per second read and written."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_batch, options.n_ubatch = str(file), 512, READ, READ
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.warmup, options.n_parallel = True, 1
    server = xllamacpp.Server(options)
    asked = {
        "prompt": list(range(3, 3 + READ)),
        "max_tokens": WRITTEN,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    found = server.handle_completions(asked)["timings"]
    return found["prompt_per_second"], found["predicted_per_second"]


def measured(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model."""
    with tempfile.TemporaryDirectory(dir=given.scratch) as folder:
        made = files(name, given.bits, Path(folder))
        rounds = [{label: speed(m["file"], given.threads) for label, m in made.items()} for _ in range(given.rounds)]
        sizes = {label: m["file"].stat().st_size for label, m in made.items()}
    rows = []
    for label, m in made.items():
        row = {"model": given.label or name, "rule": label, "bits": m["bits"], "bytes": sizes[label], "types": m["types"]}
        for i, what in enumerate(("read", "written")):
            row[what] = statistics.median(r[label][i] for r in rounds)
            row[f"{what}_over_uniform"] = statistics.median(r[label][i] / r["uniform"][i] for r in rounds)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown."""
    lines = ["Tokens per second; in brackets the median ratio to uniform within a round.", ""]
    lines += ["| model | plan | bits | bytes of the file | types | read | written |", "|---|---|---:|---:|---|---:|---:|"]
    for r in rows:
        kinds = ", ".join(f"{n} {k}" for k, n in r["types"].items())
        lines.append(
            f"| {r['model']} | {r['rule']} | {r['bits']:.3f} | {r['bytes']:,} | {kinds} | {r['read']:.0f} ({r['read_over_uniform']:.2f}) | "
            f"{r['written']:.1f} ({r['written_over_uniform']:.2f}) |"
        )
    return lines


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--label", help="what to call the model")
    parser.add_argument("--bits", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="folder for the files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    title = f"Planned GGUF files in llama.cpp, beside uniform: {given.label or given.model}"
    write_section("runtimes", title, table(measured(given.model, given)), out=given.out, peers=("xllamacpp",))


if __name__ == "__main__":
    main()
