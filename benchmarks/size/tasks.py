"""Time and memory of the long verbs on a model of any size, beside one ordinary forward and backward in the same run.

    python -m benchmarks.size random_models llama-1b MODEL
    python -m benchmarks.size tasks MODEL --samples 4 --length 256

Each task runs in a process of its own. Its memory is the anonymous memory at the peak (mapped weights are the system's to
drop), the interpreter's included; its time is divided by that of a forward and backward of every layer on the same
tokens in the same process, and by the *bound*: that, and what else the task must multiply at least (its products of tokens,
timed on one layer). Of plans of bits the layers alone are timed too: with few layers the ends count for too much. With one thread
(``OMP_NUM_THREADS=1``) on a CPU all seconds are the processor's; else they are the clock's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.cost.price import pace_of_shape, price
from layerbudget.cost.sizes import Text, shape_of_config
from layerbudget.cost.work import WorkItem
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.bits.rounding import RoundingErrors
from layerbudget.execution.backward import Accumulator, feed
from layerbudget.execution.modes import prepared
from layerbudget.execution.replay import Replay
from layerbudget.models.blocks import describe, layers, partition
from layerbudget.models.machine import keep_freed

TASKS = (
    "fisher-gram",
    "fisher-trace",
    "kfac",
    "rank-gain",
    "layerif",
    "wanda",
    "sparsegpt",
    "magnitude",
    "measure",
    "perplexity",
    "plan-bits",
    "plan-gguf-3",
    "plan-gguf",
    "plan-gguf-gptq",
    "plan-gptq",
    "quantize-rtn",
    "quantize-gptq",
)
BITS = (
    "plan-bits",
    "plan-gguf-3",
    "plan-gguf",
    "plan-gguf-gptq",
    "plan-gptq",
    "quantize-rtn",
    "quantize-gptq",
)  # computed in float32, as their commands do by default

FORECAST = {
    "fisher-gram": "fisher-gram", "rank-gain": "rank-gain", "kfac": "kfac", "measure": "directional", "wanda": "norms",
    "sparsegpt": "gram", "perplexity": "forward",
}  # fmt: skip


def anonymous() -> float:
    """Anonymous memory of this process in GiB."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("RssAnon"))
    return int(line.split()[1]) / 2**20


class Peak(threading.Thread):
    """The largest anonymous memory while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = self.largest = anonymous()
        self.ended = threading.Event()

    def run(self) -> None:
        """Look every 20 ms."""
        while not self.ended.wait(0.02):
            self.largest = max(self.largest, anonymous())


def now(device: torch.device | str) -> float:
    """Seconds, when the device has done what it was given: of the processor for one thread, so that other work does not count."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if alone(device) else time.perf_counter()


def alone(device: torch.device | str) -> bool:
    """Whether one thread of the processor does the work."""
    return torch.device(device).type == "cpu" and torch.get_num_threads() == 1


def peak(device: torch.device | str) -> float:
    """Operations per second of the largest products in bfloat16 that are worth their time here."""
    size = 8192 if torch.device(device).type == "cuda" else 1024
    a, best = torch.randn(size, size, device=device).bfloat16(), float("inf")
    for _ in range(5):
        start = now(device)
        a @ a
        best = min(best, now(device) - start)
    return 2.0 * size**3 / best


PASSES = {"walk": 3.0, "perplexity": 1.0, "wanda": 2.0, "sparsegpt": 2.0, "magnitude": 0.0, "rank-gain": 5.0, "kfac": 5.0}


def share_of_peak(name: str, model: Any, data: CalibrationSet, passes: float, seconds: float, device: str) -> float:
    """Operations of the task's forwards and backwards per second, over the peak."""
    weights = sum(m.numel for b in partition(model, "layer") for m in b.modules)
    return 2.0 * weights * data.samples * data.length * PASSES.get(name, passes) / seconds / peak(device)


def plain(model: Any, data: CalibrationSet, batch_size: int) -> float:
    """Seconds of a forward and a backward with input gradients of one layer on all tokens, times the layers."""
    replay, best = Replay(model), float("inf")
    inputs = list(data.batches(batch_size, next(model.parameters()).device))
    with prepared(model):
        for p in model.parameters():
            p.requires_grad_(False)
        replay.probe(inputs[0])
        hidden = [replay.first_inputs(batch).detach().requires_grad_(True) for batch in inputs]
        middle, h0 = len(replay.layers) // 2, hidden[0]
        for _ in range(3):
            start = now(h0.device)
            for batch, h in zip(inputs, hidden, strict=True):
                for again in (False, True):
                    with replay.begin(middle, h), replay.end(middle), torch.set_grad_enabled(again):
                        out = replay.run(batch)
                out.backward(torch.ones_like(out))
            best = min(best, now(h0.device) - start)
    return best * len(replay.layers)


class Nothing(Accumulator):
    """Takes nothing: the walk alone."""

    def update(self, site: Any) -> None:
        """Leave it."""


def products(model: Any, data: CalibrationSet) -> float:
    """Seconds of the token products of one layer (``X X'``, ``B B'``, ``B~ B~'``, ``B~ B'``), times the layers."""
    tokens = data.samples * data.length
    spent = 0.0
    name, _ = layers(model)[0]
    for block in partition(model, "linear", include=name.replace(".", r"\.") + r"\."):
        for m in block.modules:
            device = next(model.parameters()).device
            inputs, outputs = torch.randn(tokens, m.d_in, device=device), torch.randn(tokens, m.d_out, device=device)
            once = not m.name.endswith(("k_proj", "v_proj", "up_proj"))
            start = now(device)
            for _ in range(3):
                torch.mm(outputs, outputs.T)
            if once:
                torch.mm(inputs, inputs.T)
            spent += now(device) - start
    return spent * len(layers(model))


def task(name: str, model: Any, data: CalibrationSet, batch_size: int, folder: Path) -> Callable[[], Any]:
    """What is timed."""
    if name == "walk":
        return lambda: feed(model, data, partition(model, "layer"), Nothing(), batch_size=batch_size, walk="layers")
    if name in ("wanda", "sparsegpt", "magnitude"):
        plan = lb.plan_sparsity(partition(model, "layer"), sparsity=0.5, rule="uniform")
        given = None if name == "magnitude" else data
        return lambda: lb.prune(model, plan, given, name, batch_size)
    if name == "perplexity":
        return lambda: lb.perplexity(model, data, batch_size=batch_size)
    if name == "measure":
        from layerbudget.decisions.sparsity.plan import plan_sparsity

        return lambda: plan_sparsity(model, data, sparsity=0.5, batch_size=batch_size, passes=6)
    if name in BITS:
        return bits_task(name, model, data, batch_size, folder)
    by = "linear" if name == "rank-gain" else "layer"
    return lambda: lb.score(model, data, partition(model, by), name, batch_size=batch_size, walk="layers")


def bits_task(name: str, model: Any, data: CalibrationSet, batch_size: int, folder: Path) -> Callable[[], Any]:
    """``plan bits --stream`` with two draws, or ``quantize --stream`` of a plan without a measurement."""
    from layerbudget.decisions.bits.blocks import formats_table
    from layerbudget.decisions.bits.payload import BitsPayload
    from layerbudget.decisions.formats.baselines import uniform
    from layerbudget.decisions.formats.program import of_weights, plan_blocks

    if name == "plan-bits":
        return lambda: lb.plan_bits(model, data, bits=4.5, group=32, draws=2, batch_size=batch_size)
    if name == "plan-gptq":  # two formats of vLLM, one draw
        return lambda: lb.plan_bits(
            model, data, bits=6.0, formats=["w4-g32", "w8-g32"], method="gptq", draws=1, batch_size=batch_size
        )
    if name.startswith("plan-gguf"):  # the menu of all types, or of three
        given: dict[str, Any] = {"formats": ["Q3_K", "Q4_K", "Q6_K"]} if name.endswith("3") else {}
        given |= {"method": "gptq"} if name.endswith("gptq") else {}
        return lambda: lb.plan_bits(model, data, bits=4.5, family="gguf", draws=2, batch_size=batch_size, **given)
    table = formats_table(model, formats=("w3-g32", "w4-g32"))
    limit = int(table.size[:, :2].sum(0).mean())
    chosen = uniform(table, limit)
    blocks = plan_blocks(table, chosen)
    nothing: dict[str, Any] = {"bits": 0.0, "predicted": 0.0, "predicted_error": 0.0, "baselines": {}, "near_ties": []}
    payload = BitsPayload(**of_weights(table, chosen), **nothing)
    plan = lb.Plan(
        kind="bits", rule="uniform", model=describe(model), blocks=blocks, payload=payload,
        budget={"unit": "bytes", "limit": limit, "spent": sum(b.count for b in blocks)},
    )  # fmt: skip
    method = name.removeprefix("quantize-")
    given = None if method == "rtn" else data
    return lambda: lb.write_bits(model, plan, folder / "out", given, method=method, batch_size=batch_size)


def timed_layers(device: str) -> list[float]:
    """Seconds at which the layers of a plan of bits are done with, and the head before them; filled while it runs."""
    marks, settle = list[float](), RoundingErrors.settle

    def noted(self: RoundingErrors, names: Sequence[str]) -> None:
        settle(self, names)
        marks.append(now(device))

    RoundingErrors.settle = noted  # type: ignore[method-assign]
    return marks


def run_one(given: argparse.Namespace) -> dict[str, Any]:
    """One task in this process."""
    keep_freed()
    dtype = "float32" if given.task in BITS else "auto"
    model = lb.load_model(str(given.model), dtype=dtype, stream=True, device=given.device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    data = CalibrationSet(input_ids=torch.randint(3, vocabulary, (given.samples, given.length), generator=generator))
    reference = plain(model, data, given.batch_size)
    extra = products(model, data) if given.task in ("rank-gain", "kfac") else 0.0
    watch, marks = Peak(), timed_layers(given.device)
    watch.start()
    start = now(given.device)
    with tempfile.TemporaryDirectory(dir=given.scratch) as folder:
        tempfile.tempdir = folder  # finished layers of streamed models lie there too
        result = task(given.task, model, data, given.batch_size, Path(folder))()
    seconds = now(given.device) - start
    watch.ended.set()
    passes = result.payload.forward_passes if given.task == "measure" else 3.0
    reached = None if given.task in BITS else share_of_peak(given.task, model, data, passes, seconds, given.device)
    more, count = {} if reached is None else {"of_peak": reached}, model.config.num_hidden_layers
    if len(marks) == count + 2:  # head, layers from the last to the first, embedding
        more["of_layer"] = 1 / 3 + (marks[count] - marks[0]) / reference
    return {
        "task": given.task, "seconds": seconds, "forward_backward": reference, "bound": reference * passes / 3.0 + extra,
        "memory_gib": watch.largest, "parameters": sum(p.numel() for p in model.parameters()),
        **more, **predicted(given, model.config, passes),
    }  # fmt: skip


def predicted(given: argparse.Namespace, config: Any, passes: float) -> dict[str, float]:
    """What ``doctor`` says of the task on a machine without room for the weights; nothing where it does not know it."""
    kind = FORECAST.get(given.task)
    if kind is None:
        return {}
    shape = shape_of_config(config, torch.bfloat16)
    pace = pace_of_shape(shape, torch.bfloat16, given.device)
    text = Text(samples=given.samples, length=given.length, batch=given.batch_size)
    found = price(given.task, [WorkItem(kind, text, passes if kind == "directional" else None)], shape, pace, 1)
    return {"predicted_gib": found.memory / 2**30, "predicted_seconds": found.seconds}


def said(row: dict[str, Any], key: str, digits: str) -> str:
    """A prediction, or a dash."""
    return format(row[key], digits) if key in row else "-"


def table(rows: list[dict[str, Any]], given: argparse.Namespace) -> list[str]:
    """As Markdown."""
    lines = [
        f"{'seconds of the processor, one thread' if alone(given.device) else f'{torch.get_num_threads()} threads'}, bfloat16 weights mapped from safetensors.",
        "",
        "| task | seconds | doctor said | forwards+backwards | of the layers alone | over its bound | anonymous GiB at the peak | doctor said | of the machine's peak |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['task']} | {r['seconds']:.0f} | {said(r, 'predicted_seconds', '.0f')} | {r['seconds'] / r['forward_backward']:.2f} | "
            f"{said(r, 'of_layer', '.2f')} | {r['seconds'] / r['bound']:.2f} | "
            f"{r['memory_gib']:.2f} | {said(r, 'predicted_gib', '.2f')} | {said(r, 'of_peak', '.1%')} |"
        )
    return lines


def main() -> None:
    """Run the tasks one after another and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="+", default=["walk", *TASKS])
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help="folder for pruned layers")
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.scratch is not None:
        given.scratch.mkdir(parents=True, exist_ok=True)
    if given.task:
        sys.stdout.write(json.dumps(run_one(given)) + "\n")
        return
    rows = []
    for name in given.tasks:
        words = [sys.executable, "-m", "benchmarks.size", "tasks", *sys.argv[1:], "--task", name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(f"{name}: {done.stderr.strip().splitlines()[-1:]}\n")
            continue
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        sys.stderr.write(f"{rows[-1]}\n")
        size = f"{rows[0]['parameters'] / 1e9:.2f} B parameters, {given.samples} x {given.length} tokens"
        title = f"{given.name or given.model.name}: {size}"
        write_section("size", title, table(rows, given), out=given.out)  # after each: a later one may be ended
    if not rows:
        raise SystemExit("No task ended well.")


if __name__ == "__main__":
    main()
