"""KL on other texts by what text, and how much of it, decides the rounding of a real model.

    python -m benchmarks.bits texts MODEL --fit stdlib prose=FILE ... --held-out wiki=FILE code=FILE ... --name smollm2

Every text to fit gives the moments by which the matrices of every third layer are rounded, by each method in each format; the other
layers stay. KL from the dense model is measured on windows of texts that decide nothing, paired by window. Several files joined by
a plus are mixed, half of the tokens of each. ``--sizes`` are numbers of sequences.
Rows are kept under ``results/rows`` and not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.bits.rounding import METHODS
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

import layerbudget as lb
from layerbudget.compressors.base import Level
from layerbudget.compressors.formats import find_format
from layerbudget.compressors.treating import matrices
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.bits.pieces import quantiser_of
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.execution.inputs import InputStatistics
from layerbudget.models.blocks import partition, weight_of
from layerbudget.sensitivity.directional.trials import Originals
from layerbudget.sensitivity.sequences import per_token


class Bench:
    """A model, its output on texts that decide nothing, and the moments of one text at a time."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.tokenizer = a, lb.load_tokenizer(a.model)
        self.model = lb.load_model(a.model, dtype="float32")
        self.blocks = [b for i, b in enumerate(partition(self.model, "layer")) if i % a.every == 0]
        self.modules = {m.name: m for b in self.blocks for m in b.modules}
        held = [lb.calibration(file, self.tokenizer, samples=a.windows, length=256, seed=1) for _, file in a.held_out]
        self.dense = DenseOutput(self.model, joined(held))
        self.known: dict[tuple[str, int], Any] = {}

    def moments(self, text: str, size: int) -> Any:
        """Moments of the inputs of every matrix on sequences of a text, or of several that are mixed."""
        if (text, size) not in self.known:
            files = text.split("+")
            parts = [lb.calibration(f, self.tokenizer, samples=size // len(files), length=256) for f in files]
            statistics = InputStatistics(self.model, list(self.modules.values()), "gram")
            with torch.no_grad():
                for batch in joined(parts).batches(8, torch.device("cpu")):
                    with statistics.listening(None):
                        self.model(**batch)
            self.known = {(text, size): statistics.found}
        return self.known[text, size]

    def row(self, text: str, size: int, form: str, method: str) -> dict[str, Any]:
        """KL of every window of the other texts; the model is afterwards as it was."""
        quantiser, moments = quantiser_of(method).with_options(METHODS[method][1]), self.moments(text, size)
        originals = Originals(self.model, self.blocks)
        try:
            with torch.no_grad():
                for name, module in self.modules.items():
                    if find_format(form).fits(module.d_in):
                        (view,), (stored,) = matrices(*weight_of(self.model, name)), moments[name]
                        view.copy_(quantiser.apply(view, quantiser.prepare(stored.value), Level(format=form)))
            rows = self.dense.rows(self.model)
        finally:
            originals.restore()
        return {"kl": [round(v, 6) for v in rows[:, 0]], "tokens": rows[:, 1].tolist()}


def joined(sets: list[CalibrationSet]) -> CalibrationSet:
    """Sequences of several sets, one set after the other."""
    return dataclasses.replace(sets[0], input_ids=torch.cat([each.input_ids for each in sets]))


def pair(word: str) -> tuple[str, str]:
    """A name and a file, or what is both."""
    name, sign, file = word.partition("=")
    return (name, file) if sign else (word, word)


def main() -> None:
    """Parse, measure and write a section."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", type=pair, nargs="+", required=True, metavar="NAME=FILE", help="texts that decide")
    p.add_argument("--held-out", type=pair, nargs="+", required=True, metavar="NAME=FILE", help="texts that KL is measured on")
    p.add_argument("--name", required=True, help="what the page calls the model")
    p.add_argument("--every", type=int, default=3)
    p.add_argument("--formats", nargs="+", default=["w3-g32", "Q4_0"])
    p.add_argument("--methods", nargs="+", default=["gptq", "descent"])
    p.add_argument("--sizes", type=int, nargs="+", default=[64])
    p.add_argument("--windows", type=int, default=12, help="of each text, of 256 tokens")
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    kept, bench = f"texts_{a.name}", None
    for (name, file), size, form, method in itertools.product(a.fit, a.sizes, a.formats, a.methods):
        key = {"text": name, "size": size, "format": form, "method": method}
        if not any(all(r[k] == v for k, v in key.items()) for r in read_rows(kept, a.out)):
            bench = bench or Bench(a)
            row = {**key, **bench.row(file, size, form, method)}
            keep_row(kept, row, a.out)
            print(key, np.sum(row["kl"]) / np.sum(row["tokens"]), flush=True)
    heads = [name for name, _ in a.held_out]
    lines = [
        f"The matrices of one layer in {a.every} are rounded. KL in nats per token on {a.windows} windows of 256 tokens of each text, "
        "with two standard errors.",
        "",
        f"| format | rounding | text that decides | sequences of 256 | {' | '.join(f'KL on {h}' for h in heads)} |",
        "|---|---|---|---:|" + "---|" * len(heads),
    ]
    rows = sorted(read_rows(kept, a.out), key=lambda r: (r["format"], r["method"], r["text"], r["size"]))
    for row in rows:
        cells = []
        for i in range(len(heads)):
            part = slice(i * a.windows, (i + 1) * a.windows)
            kl, error = per_token(np.array(row["kl"])[part], np.array(row["tokens"])[part])
            cells.append(f"{kl:.4f} +- {2 * error:.4f}")
        lines.append(f"| {row['format']} | `{row['method']}` | {row['text']} | {row['size']} | {' | '.join(cells)} |")
    write_section("texts", a.name, lines, out=a.out)


if __name__ == "__main__":
    main()
