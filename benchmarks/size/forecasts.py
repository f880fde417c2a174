"""What the first line of every long verb forecasts, beside the processor seconds and the memory that the command then took.

    OMP_NUM_THREADS=1 python -m benchmarks.size forecasts MODEL
    OMP_NUM_THREADS=1 python -m benchmarks.size forecasts MODEL --commands score plan-bits-gguf --samples 16

Every command runs in a process of its own. Seconds are the processor's from the first line to the end, without the start of the
program and the loading of the model, as the forecast says them; with one thread other work on the machine does not count.
The memory is the largest resident size of the whole process, libraries and mapped weights included; N is the size of
the model's files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.size.commands import run
from benchmarks.stamp import ROOT, write_section

_BITS, _SPARSITY, _SHAPES = "plan bits MODEL TEXT CHECK -o", "plan sparsity MODEL TEXT", "plan shapes MODEL TEXT"
COMMANDS = {
    "score": "score MODEL TEXT -o scores.json",
    "score-ranks": "score MODEL TEXT --estimator rank-gain -o gains.json",
    "plan-sparsity": f"{_SPARSITY} -o sparsity.json",
    "plan-bits-rtn": f"{_BITS} rtn.json --like Q4_K_M --method rtn",
    "plan-bits-weighted": f"{_BITS} weighted.json --like Q4_K_M --method weighted",
    "plan-bits-gptq": f"{_BITS} gptq.json --like Q4_K_M --method gptq",
    "plan-bits-descent": f"{_BITS} descent.json --like Q4_K_M --method descent",
    "plan-bits-vllm": f"{_BITS} vllm.json --bits 5 --runtime vllm",
    "plan-bits-vllm-gptq": f"{_BITS} vllm-gptq.json --bits 5 --runtime vllm --method gptq",
    "plan-cache": "plan cache MODEL TEXT CHECK --bits 6 --context 2048 -o cache.json",
    "plan-memory": "plan memory MODEL TEXT CHECK --memory 70% --context 2048 -o memory.json",
    "plan-shapes": f"{_SHAPES} --save 10%flops -o shapes.json",
    "apply-sparsity": "apply MODEL sparsity.json TEXT -o pruned",
    "apply-sparsegpt": "apply MODEL sparsity.json TEXT --method sparsegpt -o sparsegpt",
    "apply-bits-rtn": "apply MODEL rtn.json -o rtn",
    "apply-bits-weighted": "apply MODEL weighted.json -o weighted",
    "apply-bits-gptq": "apply MODEL gptq.json -o gptq",
    "apply-bits-descent": "apply MODEL descent.json -o descent",
    "apply-bits-vllm": "apply MODEL vllm.json -o vllm",
    "apply-bits-vllm-gptq": "apply MODEL vllm-gptq.json -o vllm-gptq",
    "apply-shapes": "apply MODEL shapes.json TEXT -o shaped",
    "evaluate": "evaluate MODEL --windows 8 --length 512 -o evaluated.json",
}  # in this order: plans are made before they are applied


def words_of(command: str, given: argparse.Namespace) -> list[str]:
    """A command's words."""
    size = sum(file.stat().st_size for file in given.model.glob("*.safetensors"))
    named = {
        "MODEL": [str(given.model.resolve())],
        "TEXT": ["--samples", str(given.samples), "--length", str(given.length)],
        "CHECK": ["--check", str(given.check)],
        "70%": [f"{int(0.7 * size)} bytes"],
    }
    return [word for each in command.split() for word in named.get(each, [each])]


def beside(forecast: float, measured: float, digits: int) -> str:
    """Both, and the forecast over what was measured; bold where it is off by more than 1.5."""
    ratio = forecast / max(measured, 1e-9)
    shown = f"{ratio:.2f}" if 1 / 1.5 <= ratio <= 1.5 else f"**{ratio:.2f}**"
    return f"{forecast:.{digits}f} | {measured:.{digits}f} | {shown}"


def main() -> None:
    """Run the commands and write a section after each: a later one may be ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--check", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where plans and models are written, and those of an earlier run are read")
    given = parser.parse_args()
    rows = [
        "| command | forecast s | took s | ratio | forecast GiB | took GiB | ratio | over N |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    size = sum(file.stat().st_size for file in given.model.glob("*.safetensors")) / 2**30
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for name in given.commands:
            _, peak, output = run(ROOT, [*words_of(COMMANDS[name], given), "--json", "--overwrite"], folder)
            result = json.loads(output)
            forecast, took = result["expected"], result["took"]
            times = beside(forecast["seconds"], took["processor"], 1)
            rows.append(f"| `{COMMANDS[name]}` | {times} | {beside(forecast['memory'] / 2**30, peak, 2)} | {peak - size:.2f} |")
            about = f"TEXT is `--samples {given.samples} --length {given.length}`, CHECK is `--check {given.check}`."
            write_section("size", f"forecasts on {given.model.name}, N = {size:.2f} GiB", [about, "", *rows])


if __name__ == "__main__":
    main()
