"""llama.cpp's own quantiser on a written ``--tensor-type-file``, beside the file that this package writes by the same plan.

    python benchmarks/llama_quantise.py PATH/TO/llama-quantize [--model demo] [--bits 5] [--out benchmarks/results]

A plan is made, its GGUF file written (rounding to nearest), the model written in 16 bits, and that quantised by llama.cpp with
``tensor-types.txt``. Compared are types, bytes and content of every tensor. No wheel ships ``llama-quantize``; it builds from the
source distribution of llama-cpp-python (cmake target ``llama-quantize``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import rounding_damage


def tensors(file: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(file).tensors}


def compare(quantiser: Path, name: str, bits: float, folder: Path) -> dict[str, Any]:
    """One plan, both ways."""
    tokenizer = lb.load_tokenizer(name)
    text = lb.calibration("stdlib", tokenizer, samples=8, length=64)
    scores = rounding_damage(lb.load_model(name), text, family="gguf", draws=2)
    plan = lb.plan_bits(scores, bits=bits)
    lb.write_bits(lb.load_model(name), lb.plan_bits(scores, bits=16), folder / "whole", tokenizer=tokenizer)
    receipt = lb.write_bits(lb.load_model(name), plan, folder / "ours", tokenizer=tokenizer)
    files = folder / "ours" / "model.gguf", folder / "theirs.gguf"
    types = ["--tensor-type-file", str(folder / "ours" / "tensor-types.txt")]
    command = [str(quantiser), *types, str(folder / "whole" / "model.gguf"), str(files[1]), "Q8_0", "1"]
    subprocess.run(command, check=True, capture_output=True)
    a, b = (tensors(file) for file in files)
    return {
        "model": name, "bits": receipt.bits, "tensors": len(a), "types": dict(Counter(t.tensor_type.name for t in a.values())),
        "same_names": set(a) == set(b), "same_types": sum(a[n].tensor_type == b[n].tensor_type for n in a),
        "same_content": sum(np.array_equal(a[n].data, b[n].data) for n in a),
        "bytes": [sum(int(t.n_bytes) for t in side.values()) for side in (a, b)], "files": [f.stat().st_size for f in files],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantiser", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", type=float, nargs="+", default=[5.0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    rows = []
    for bits in given.bits:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(given.quantiser.resolve(), given.model, bits, Path(folder)))
    lines = ["# llama.cpp's own quantiser on the written `--tensor-type-file`", ""]
    lines += [
        "| model | bits | tensors | types | types as planned | bit-identical | bytes of tensors, ours / theirs | file, ours / theirs |"
    ]
    lines += ["|---" * 8 + "|"]
    for r in rows:
        kinds = ", ".join(f"{n} {k}" for k, n in sorted(r["types"].items()))
        lines.append(
            f"| {r['model']} | {r['bits']:.3f} | {r['tensors']} | {kinds} | {r['same_types']} | {r['same_content']} | "
            f"{r['bytes'][0]:,} / {r['bytes'][1]:,} | {r['files'][0]:,} / {r['files'][1]:,} |"
        )
    (given.out / "llama_quantise.md").write_text("\n".join(lines) + "\n")
    (given.out / "llama_quantise.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
