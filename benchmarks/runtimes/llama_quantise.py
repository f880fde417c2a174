"""llama.cpp's own quantiser on a written ``--tensor-type-file``, beside the file that this package writes by the same plan.

    python -m benchmarks.runtimes llama_quantise PATH/TO/llama-quantize [--model demo] [--bits 5] [--method weighted] [--out FOLDER]

A plan is made, its GGUF file written (``rtn``: rounding to nearest; ``weighted``: with the importance matrix that is written
beside it), the model written in 16 bits (its weights are rounded to those first), and that quantised by llama.cpp with
``tensor-types.txt`` and the importance matrix. Compared are types, bytes and content of every tensor. No wheel ships
``llama-quantize``; it builds from the source distribution of llama-cpp-python (cmake target ``llama-quantize``).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.stamp import RESULTS, write_section

import gguf
import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import rounding_damage


def tensors(file: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(file).tensors}


def loaded(name: str) -> Any:
    """The model, with weights that 16 bits hold."""
    model = lb.load_model(name, dtype="float32")
    for p in model.parameters():
        p.data = p.data.half().float()
    return model


def compare(quantiser: Path, bits: float, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One plan, both ways."""
    tokenizer, name, types = lb.load_tokenizer(given.model), Path(given.model).name, given.types
    text = lb.calibration(given.data or "stdlib", tokenizer, samples=8, length=64)
    how: dict[str, Any] = {"family": "gguf", "formats": types, "method": given.method}
    scores = rounding_damage(loaded(given.model), text, draws=1, **how)
    plan = lb.plan_bits(scores, bits=bits)
    lb.write_bits(loaded(given.model), lb.plan_bits(scores, bits=16), folder / "whole", text, tokenizer=tokenizer)
    own = None if given.method == "rtn" else text
    receipt = lb.write_bits(loaded(given.model), plan, folder / "ours", own, tokenizer=tokenizer)
    files = folder / "ours" / "model.gguf", folder / "theirs.gguf"
    options = ["--tensor-type-file", str(folder / "ours" / "tensor-types.txt")]
    if own is not None:
        options += ["--imatrix", str(folder / "ours" / "imatrix.gguf")]
    command = [str(quantiser), *options, str(folder / "whole" / "model.gguf"), str(files[1]), "Q8_0", "1"]
    subprocess.run(command, check=True, capture_output=True)
    a, b = (tensors(file) for file in files)
    return {
        "model": name, "method": given.method, "bits": receipt.bits, "tensors": len(a), "types": dict(Counter(t.tensor_type.name for t in a.values())),
        "same_names": set(a) == set(b), "same_types": sum(a[n].tensor_type == b[n].tensor_type for n in a),
        "same_content": sum(np.array_equal(a[n].data, b[n].data) for n in a),
        "bytes": [sum(int(t.n_bytes) for t in side.values()) for side in (a, b)], "files": [f.stat().st_size for f in files],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantiser", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", type=float, nargs="+", default=[5.0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--types", nargs="+", help="to choose among; by default all of the menu")
    parser.add_argument("--data", help="calibration text; by default the standard library")
    given = parser.parse_args()
    rows = []
    for bits in given.bits:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(given.quantiser.resolve(), bits, given, Path(folder)))
    lines = [
        "| model | method | bits | tensors | types | types as planned | bit-identical | bytes of tensors, ours / theirs | file, ours / theirs |"
    ]
    lines += ["|---" * 9 + "|"]
    for r in rows:
        kinds = ", ".join(f"{n} {k}" for k, n in sorted(r["types"].items()))
        lines.append(
            f"| {r['model']} | {r.get('method', 'rtn')} | {r['bits']:.3f} | {r['tensors']} | {kinds} | {r['same_types']} | {r['same_content']} | "
            f"{r['bytes'][0]:,} / {r['bytes'][1]:,} | {r['files'][0]:,} / {r['files'][1]:,} |"
        )
    title = f"llama.cpp's own quantiser by our types: {Path(given.model).name}, {given.method}"
    write_section("runtimes", title, lines, out=given.out, peers=("gguf",))


if __name__ == "__main__":
    main()
