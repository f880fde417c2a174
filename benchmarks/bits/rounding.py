"""KL of ways to round at equal formats and bytes, from the same moments: nearest, weighted, gptq and descent.

    python -m benchmarks.bits rounding MODEL --fit FILE --held-out FILE [--name smollm2] [--formats w3-g32 ...] [--ablation Q4_0 ...]

The matrices of every third layer are rounded and the others stay. Second moments of the inputs are those of the dense model on
the text to fit, gathered once for all. KL is from the dense model on windows of another text, which decided nothing, and
differences are paired by window. Seconds are processor time of the rounding alone, the factor of gptq included. ``--ablation``
names formats in which parts of descent are measured by themselves too. Rows are kept under ``results/rows`` and not measured again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

import layerbudget as lb
from layerbudget.compressors import descent, feedback, quantisers
from layerbudget.compressors.base import Level
from layerbudget.compressors.feedback import Factors
from layerbudget.compressors.formats import Format, find_format
from layerbudget.compressors.quantisers import Descent, Rounded, Weighted
from layerbudget.compressors.treating import matrices
from layerbudget.decisions.bits.pieces import quantiser_of
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.execution.inputs import InputStatistics
from layerbudget.models.blocks import partition, weight_of
from layerbudget.sensitivity.directional.trials import Originals
from layerbudget.sensitivity.sequences import per_token

Way = tuple[str, dict[str, Any], tuple[Any, ...]]  #: a method, its options, and what stands in the place of its steps
FORMATS = ("w3-g32", "w4-g32", "nvfp4", "Q4_0", "IQ4_NL", "Q3_K", "Q4_K")
METHODS: dict[str, Way] = {
    **{method: (method, {}, ()) for method in ("weighted", "gptq", "descent")},
    "descent, 2 sweeps": ("descent", {"sweeps": 2}, ()),
    "gptq, equal tokens": ("gptq", {"equal_tokens": True}, ()),
    "descent, equal tokens, not shrunk": ("descent", {"equal_tokens": True, "shrinkage": 0.0}, ()),
}


def _nothing(*_: Any) -> None:
    """A step that is left out."""


def _no_change(state: descent._State, panel: slice, pull: torch.Tensor, where: Any) -> torch.Tensor:
    width = state.layout.block if isinstance(where, int) else where.stop - where.start
    return torch.zeros(width, pull.shape[1])


def _nearest(quantiser: Descent, weight: torch.Tensor, prepared: Factors, form: Format) -> Rounded:
    return Weighted().onto(weight, prepared.moment.diagonal(), form)


def _nearest_in_ggml(weight: torch.Tensor, factors: Factors, name: str) -> np.ndarray:
    return Weighted().in_ggml(weight, factors.moment.diagonal(), find_format(name))


_WITH_WORDS = functools.partial(feedback.feed_back, words=True)
_CODES = (descent._State, "_choose_codes", _nothing)
_SCALES = ((descent._State, "_solve_sub", _no_change), (descent._State, "_solve_block", _no_change))
_NEAREST = ((Descent, "begin", _nearest), (quantisers, "feed_back", _nearest_in_ggml))
#: What a line of the ablation is made by: the method, its options, and what stands in the place of steps of descent.
PARTS: dict[str, Way] = {
    "gptq": ("gptq", {}, ()),
    "gptq, moments shrunk": ("gptq", {"shrinkage": 0.2}, ()),
    "gptq, words of lattices chosen in every block": ("gptq", {}, ((quantisers, "feed_back", _WITH_WORDS),)),
    "descent": ("descent", {}, ()),
    "no sweep, scales kept": ("descent", {"sweeps": 0}, (_CODES, *_SCALES)),
    "no sweep, scales solved": ("descent", {"sweeps": 0}, ()),
    "2 sweeps": ("descent", {"sweeps": 2}, ()),
    "2 sweeps, scales kept": ("descent", {"sweeps": 2}, _SCALES),
    "2 sweeps, from nearest codes": ("descent", {"sweeps": 2}, _NEAREST),
    "2 sweeps, shrinkage 0": ("descent", {"sweeps": 2, "shrinkage": 0.0}, ()),
    "2 sweeps, shrinkage .1": ("descent", {"sweeps": 2, "shrinkage": 0.1}, ()),
    "2 sweeps, shrinkage .4": ("descent", {"sweeps": 2, "shrinkage": 0.4}, ()),
    "4 sweeps": ("descent", {"sweeps": 4}, ()),
}


class Bench:
    """A model, the moments of its inputs, and its output on text that decided nothing."""

    def __init__(self, a: argparse.Namespace) -> None:
        tokenizer = lb.load_tokenizer(a.model)
        self.model, self.a = lb.load_model(a.model, dtype="float32"), a
        self.blocks = [b for i, b in enumerate(partition(self.model, "layer")) if i % a.every == 0]
        self.modules = {m.name: m for b in self.blocks for m in b.modules}
        fit = lb.calibration(a.fit, tokenizer, samples=a.samples, length=a.length)
        modules = list(self.modules.values())
        ways = [*(METHODS[m] for m in a.methods), *(PARTS[p] for p in a.parts if a.ablation)]
        wanted = {bool(options.get("equal_tokens")) for _, options, _ in ways}
        kinds = {equal: InputStatistics(self.model, modules, "gram", equal_tokens=equal) for equal in wanted}
        with torch.no_grad():
            for batch in fit.batches(8, torch.device("cpu")):
                with ExitStack() as stack:
                    for statistics in kinds.values():
                        stack.enter_context(statistics.listening(None))
                    self.model(**batch)
        self.found = {equal: statistics.found for equal, statistics in kinds.items()}
        held = lb.calibration(a.held_out, tokenizer, samples=a.windows, length=a.window, seed=1)
        self.dense = DenseOutput(self.model, held)

    def round(self, form: str, method: str, options: Mapping[str, Any]) -> tuple[float, int]:
        """Round every matrix that the format divides; return seconds of the processor and bytes."""
        quantiser, made, spent, size = quantiser_of(method).with_options(options), dict[int, Any](), 0.0, 0
        for name, module in self.modules.items():
            if not find_format(form).fits(module.d_in):
                continue
            (view,), (moments,) = matrices(*weight_of(self.model, name)), self.found[quantiser.equal_tokens][name]
            start = time.process_time()
            if id(moments) not in made and quantiser.statistic != "none":
                mean = quantiser.statistic == "diagonal"
                made[id(moments)] = quantiser.prepare(moments.value.diagonal() / moments.rows if mean else moments.value)
            view.copy_(quantiser.apply(view, made.get(id(moments)), Level(format=form)))
            spent += time.process_time() - start
            size += find_format(form).bytes(module.d_out, module.d_in)
        return spent, size

    def row(self, form: str, method: str, options: Mapping[str, Any], steps: Sequence[Any] = ()) -> dict[str, Any]:
        """KL of every window, seconds and bytes; the model is afterwards as it was."""
        held = Originals(self.model, self.blocks)
        try:
            with torch.no_grad(), ExitStack() as stack:
                for owner, name, step in steps:
                    stack.enter_context(patch.object(owner, name, step))
                spent, size = self.round(form, method, options)
            rows = self.dense.rows(self.model)
        finally:
            held.restore()
        return {
            "seconds": round(spent, 2),
            "bytes": size,
            "kl": [round(v, 6) for v in rows[:, 0]],
            "tokens": rows[:, 1].tolist(),
        }


def _paired(row: Mapping[str, Any], beside: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """KL and its error, and what it is more than another's, in shares of that, with the paired error."""
    kl, other, tokens = (np.array(x) for x in (row["kl"], beside["kl"], row["tokens"]))
    base = per_token(other, tokens)[0]
    difference, error = per_token(kl - other, tokens)
    return (*per_token(kl, tokens), difference / base, error / base)


def lines_of(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """A table with one row per measurement, each beside gptq in the same format."""
    lines = [
        f"| format | {key} | bytes | KL | beside `gptq` | processor (s) | of gptq's |",
        "|---|---|---:|---|---|---:|---:|",
    ]
    for row in rows:
        beside = next((r for r in rows if r["format"] == row["format"] and r[key] == "gptq"), None)
        kl, error, more, noise = _paired(row, beside or row)
        shown = "" if beside is None or beside is row else f"{more:+.0%} +- {noise:.0%}"
        times = "" if beside is None else f"{row['seconds'] / beside['seconds']:.1f}"
        name = f"`{row[key]}`" if key == "method" else row[key]
        lines.append(
            f"| {row['format']} | {name} | {row['bytes']:,} | {kl:.4f} +- {error:.4f} | {shown} | {row['seconds']:.1f} | {times} |"
        )
    return lines


def main() -> None:
    """Parse and run."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", required=True, help="text whose inputs decide")
    p.add_argument("--held-out", required=True, help="text that KL is measured on")
    p.add_argument("--name", default="smollm2", help="what the page calls the model")
    p.add_argument("--every", type=int, default=3)
    p.add_argument("--formats", nargs="+", default=list(FORMATS))
    p.add_argument("--methods", nargs="+", default=list(METHODS))
    p.add_argument("--ablation", nargs="*", default=[], help="formats in which parts of descent are measured too")
    p.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="which parts")
    p.add_argument("--samples", type=int, default=64)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--windows", type=int, default=24)
    p.add_argument("--window", type=int, default=256)
    p.add_argument("--kept", action="store_true", help="write the page of the rows that are kept, and measure none")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    bench = None if a.kept else functools.cache(lambda: Bench(a))
    tables = {
        "": ("method", a.formats, {m: METHODS[m] for m in a.methods}),
        "_ablation": ("part", a.ablation, {part: PARTS[part] for part in a.parts}),
    }
    lines = [
        f"All matrices of one layer in {a.every} are rounded to one format and the others stay, as do matrices whose rows the format "
        f"does not divide. Inputs of {a.samples} x {a.length} tokens of {Path(a.fit).name}; KL from the dense model, in nats per "
        f"token, on {a.windows} windows of {a.window} tokens of {Path(a.held_out).name}, paired by window."
    ]
    early = 0
    for suffix, (key, formats, ways) in tables.items():
        early += len(read_rows(f"rounding_{a.name}{suffix}", a.out)) if formats else 0
        rows = measure(bench, f"rounding_{a.name}{suffix}", key, formats, ways, a.out)
        lines += ["", *lines_of(rows, key)] if rows else []
    if early:
        lines += ["", f"{early} rows are of earlier runs: the stamp has neither their commit nor their time and memory."]
    write_section("rounding", a.name, lines, out=a.out, peers=("gguf", "xllamacpp"))


def measure(
    bench: Callable[[], Bench] | None, kept: str, key: str, formats: Sequence[str], ways: Mapping[str, Way], out: Path
) -> list[dict[str, Any]]:
    """Rows of ways to round, in every format; those that an earlier run kept are not measured again."""
    done = {(r["format"], r[key]): r for r in read_rows(kept, out)}
    for form, (name, way) in itertools.product(formats, ways.items()):
        if (form, name) not in done and bench is not None:
            done[form, name] = {"format": form, key: name, **bench().row(form, *way)}
            keep_row(kept, done[form, name], out)
            kl, error, *_ = _paired(done[form, name], done[form, name])
            print(f"{form} {name}: {kl:.4f} +- {error:.4f}, {done[form, name]['seconds']} s", flush=True)
    return [done[form, name] for form in formats for name in ways if (form, name) in done]


if __name__ == "__main__":
    main()
