"""A whole plan of bits beside what a plan of bits cannot do without: a forward and backward of its text, and ggml's own rounding.

    OMP_NUM_THREADS=1 python -m benchmarks.size goal MODEL [-- --samples 16]

``plan bits MODEL --like Q4_K_M`` runs with its defaults in a process of its own. An ordinary forward and backward (transformers,
float32, the gradients of all weights) of as many sequences is timed on some of them, before and after the plan. ggml rounds
every matrix to the plan's type, with importances that are all alike. Seconds are the processor's, with one thread.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.size.commands import run
from benchmarks.stamp import ROOT, write_section

import layerbudget as lb
from layerbudget.compressors import ggml
from layerbudget.compressors.formats import find_format
from layerbudget.decisions.formats.payload import WeightsPayload
from layerbudget.decisions.formats.program import formats_of_plan
from layerbudget.models.blocks import weight_of
from layerbudget.plan import Plan, payload_of

BATCH = 2  # sequences of a forward and backward: more of them take as long each


def passes(model: torch.nn.Module, data: lb.CalibrationSet, sequences: int) -> float:
    """Processor seconds of one forward and backward of some sequences."""
    model.train(False).requires_grad_(True)
    start = time.process_time()
    for first in range(0, sequences, BATCH):
        ids = data.input_ids[first : first + BATCH]
        model(input_ids=ids, labels=ids).loss.backward()
    return time.process_time() - start


def rounding(model: torch.nn.Module, plan: Plan) -> float:
    """Processor seconds in which ggml rounds every matrix to its type in a plan."""
    used = 0.0
    for name, form in formats_of_plan(plan).items():
        weight = weight_of(model, name)[1].detach()
        if find_format(form).plain:
            continue
        values, counts = weight.to(torch.float32).numpy(), torch.ones(weight.shape[-1]).numpy()
        start = time.process_time()
        ggml.quantise(values, form, counts)
        used += time.process_time() - start
    return used


def main() -> None:
    """Run the command between two timings of the passes, and write a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--timed", type=int, default=8, help="sequences whose forward and backward is timed")
    words, more = sys.argv[1:], list[str]()
    if "--" in words:
        words, more = words[: words.index("--")], words[words.index("--") + 1 :]
    given = parser.parse_args(words)
    tokenizer, asked = lb.load_tokenizer(given.model), f"plan bits MODEL --like Q4_K_M --method {given.method} -o plan.json"
    data = lb.calibration("stdlib", tokenizer, samples=given.timed, length=256)
    each = list[float]()

    def time_passes() -> None:
        each.append(passes(lb.load_model(given.model), data, given.timed) / given.timed)

    with tempfile.TemporaryDirectory() as folder:
        time_passes()
        command = [str(given.model.resolve()) if word == "MODEL" else word for word in asked.split()]
        used, peak, output = run(ROOT, [*command, *more, "--json"], Path(folder))
        time_passes()
        plan = Plan.load(Path(folder) / "plan.json")
        quantised = rounding(lb.load_model(given.model), plan)
    result, check = json.loads(output), payload_of(plan, WeightsPayload).check
    samples = int(plan.data["samples"])
    text = samples * sum(each) / len(each)
    goal = 6 * text + quantised
    size = sum(file.stat().st_size for file in given.model.glob("*.safetensors")) / 2**30
    rows = [
        "| what | processor seconds |",
        "|---|---:|",
        f"| forward and backward of {samples} sequences of 256 tokens ({each[0]:.2f} s each before the plan, {each[1]:.2f} s behind) | {text:.0f} |",
        f"| ggml's rounding to the types of the plan | {quantised:.0f} |",
        f"| the goal: six times the first, and the second | {goal:.0f} |",
        f"| `{shlex.join([*asked.split(), *more])}` | {used:.0f} |",
        "",
        f"The command took **{used / goal:.2f}** of the goal, and {used / text:.2f} forwards and backwards. Its peak was {peak:.2f} GiB, "
        f"N is {size:.2f}; {result['expected']['memory'] / 2**30:.2f} GiB and {result['expected']['seconds']:.0f} s were forecast.",
        *([] if check is None else ["", f"{check.data['samples']} other sequences: {check.verdict}"]),
    ]
    write_section("size", f"goal of plan bits on {given.model.name}", rows)


if __name__ == "__main__":
    main()
