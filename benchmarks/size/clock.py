"""Clock times of every verb that shares its work: one process, two of torchrun, and two of accelerate; one thread each.

    OMP_NUM_THREADS=1 python -m benchmarks.size clock MODEL [--layers 6] [--scale 1] [--only NAME ...] [--accelerate NAME ...]

Every command runs on the first layers of a model, experts on a random mixture as wide. The machine should have two cores that do
nothing else. ``--scale`` multiplies the text. Results are compared with those of one process, file by file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.robustness.processes import compare
from benchmarks.stamp import ROOT, write_section

import layerbudget as lb

TWO = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "-m", "layerbudget"],
    "accelerate": [  # with --cpu it starts one process alone
        *("accelerate.commands.launch", "--num_processes", "2", "--multi_gpu", "--mixed_precision", "no", "-m", "layerbudget")
    ],
}
TOLERANCE = {"finetune": 2e-2}  # steps follow the gradient of another order of sums
RUNS = {  # the words, and how many sequences of text there are; in this order: a plan of bits is made before it is applied
    "score --estimator fisher-gram": ("score MODEL TEXT --estimator fisher-gram -o gram.json", 48),
    "score --estimator rank-gain": ("score MODEL TEXT --estimator rank-gain -o gains.json", 16),
    "plan sparsity": ("plan sparsity MODEL TEXT --sparsity 0.5 -o sparsity.json", 16),
    "plan bits --method rtn": ("plan bits MODEL TEXT --check 16 --bits 4 --method rtn -o rtn.json", 20),
    "plan bits --method weighted": ("plan bits MODEL TEXT --check 16 --bits 4 -o weighted.json", 20),
    "plan bits --method gptq": ("plan bits MODEL TEXT --check 16 --bits 4 --method gptq -o gptq.json", 20),
    "plan bits --method descent": ("plan bits MODEL TEXT --check 8 --bits 4 --method descent -o descent.json", 16),
    "plan memory": ("plan memory MODEL TEXT --check 16 --memory 64MiB --context 512 -o memory.json", 20),
    "plan cache": ("plan cache MODEL TEXT --check 16 --bits 6 --context 2048 -o cache.json", 24),
    "plan shapes": ("plan shapes FEW TEXT --save 10%flops --passes 32 -o shapes.json", 4),
    "plan expert-pruning": ("plan expert-pruning MIXTURE TEXT --keep 0.75 -o experts.json", 48),
    "apply, sparsegpt": ("apply MODEL sparsity.json TEXT --method sparsegpt -o pruned", 96),
    "apply, gptq": ("apply MODEL gptq.json TEXT --method gptq -o rounded", 64),
    "finetune": ("finetune MODEL ranks.json --data rows.jsonl --epochs 4 --batch 8 --quiet -o tuned", 48),
    "evaluate": ("evaluate MODEL --windows SAMPLES --length 512 -o evaluated.json", 32),
}


class Took(NamedTuple):
    """Seconds of a run: the clock's, the clock's without starting and loading, and the processor's of all processes."""

    clock: float
    work: float
    processor: float


def run(start: list[str], words: list[str], folder: Path) -> Took:
    """Run a command in some processes, which have to end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "0"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    line = [sys.executable, "-m", *start, *words, "--json", "--overwrite"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}: {' '.join(done.stderr.split())[-400:]}")
    work = json.loads(done.stdout[done.stdout.index("{") :])["took"]["seconds"]
    return Took(clock, work, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def check_starts_two(start: list[str], folder: Path) -> None:
    """Refuse a launcher that starts one process and says nothing of it."""
    script = folder / "who.py"
    script.write_text("import os; os.write(1, b'one of ' + os.environ['WORLD_SIZE'].encode() + b'. ')")
    line = [sys.executable, "-m", *start[:-2], str(script)]
    said = subprocess.run(line, capture_output=True, text=True, check=False).stdout
    if said.count("one of 2.") != 2:
        raise SystemExit(f"This starts no two processes: {' '.join(line)}")


def prepare(model: str, layers: int, folder: Path) -> None:
    """The first layers of a model, two of them, a random mixture of experts with its tokenizer, and rows of text."""
    import torch
    import transformers

    tokenizer = lb.load_tokenizer(model)
    for name, count in (("model", layers), ("few", 2)):
        whole = lb.load_model(model)
        body = whole.get_submodule(whole.base_model_prefix)
        del body.layers[count:]
        whole.config.num_hidden_layers = count
        if getattr(whole.config, "layer_types", None):
            whole.config.layer_types = whole.config.layer_types[:count]
        whole.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    mixture = transformers.MixtralConfig(**sizes, vocab_size=len(tokenizer), num_local_experts=8, num_experts_per_tok=2)
    transformers.MixtralForCausalLM(mixture).save_pretrained(folder / "mixture")
    tokenizer.save_pretrained(folder / "mixture")
    source = inspect.getsource(argparse)
    rows = [{"text": source[start : start + 600]} for start in range(0, 60 * 600, 600)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def words_of(line: str, samples: int, sound: Path, results: Path) -> list[str]:
    """The words of a command: models and rows of ``sound``, plans that one process has made."""
    text = ["--samples", str(samples), "--length", "128"]
    meant = {"TEXT": text, "SAMPLES": [str(samples)], "MODEL": [str(sound / "model")], "FEW": [str(sound / "few")]}
    meant |= {"MIXTURE": [str(sound / "mixture")], "rows.jsonl": [str(sound / "rows.jsonl")]}
    words = [word for each in line.split() for word in meant.get(each, [each])]
    made = words.index("-o")
    plans = [str(results / w) if w.endswith(".json") and i < made and not w.startswith("/") else w for i, w in enumerate(words)]
    return plans


def row_of(name: str, found: dict[str, Took], results: Path) -> str:
    """One row of the table."""
    one, out = found["one"], RUNS[name][0].split()[-1]
    cells = [f"{one.clock:.0f}", f"{one.work:.0f}"]
    for way in TWO:
        if way not in found:
            cells += ["-"] * 4
            continue
        two, same = found[way], compare(results / way / out, results / "one" / out, TOLERANCE.get(name, 1e-3))
        cells += [f"{two.clock:.0f}", f"**{one.clock / two.clock:.2f}**", f"{one.work / two.work:.2f}", same]
    undivided = 2.0 * found["torchrun"].processor / 2.0 - one.processor if "torchrun" in found else float("nan")
    return f"| {name} | {' | '.join(cells)} | {one.processor:.0f} | {undivided:.0f} |"


def main() -> None:
    """Run the commands and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--scale", type=float, default=1.0, help="times the text")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--accelerate", nargs="*", choices=RUNS, default=list(RUNS), help="commands that accelerate starts too")
    given = parser.parse_args()
    head = "| | clock, one process, s | its work, s |"
    for way in TWO:
        head += f" two of {way}, s | ratio | of the work | result |"
    head += " processor, one process, s | done twice, s |"
    rows = [head, "|---|---:|---:|" + "---:|---:|---:|---|" * 2 + "---:|---:|"]
    about = (
        f"The first {given.layers} layers of {Path(given.model).name} (two for shapes), and a random mixture of 4 layers x 8 experts. *Work* is the clock "
        "without the start of Python and the loading of the model. *Done twice* is what two processes take of the processor beyond one. Results are *equal* "
        "to the byte but for seconds and the command, or *close* to a thousandth."
    )
    with tempfile.TemporaryDirectory() as made:
        sound, results = Path(made) / "sound", Path(made) / "results"
        prepare(given.model, given.layers, sound)
        for start in TWO.values():
            check_starts_two(start, Path(made))
        for way in ("one", *TWO):
            (results / way).mkdir(parents=True)
        trace = f"score {sound / 'model'} --samples 4 --length 64 --estimator fisher-trace -o trace.json"
        ready = {
            "finetune": [trace, "plan ranks trace.json --mean-rank 8 -o ranks.json"],
            "apply, sparsegpt": [trace, "plan sparsity trace.json --sparsity 0.5 -o sparsity.json"],
        }
        for name in given.only:
            line, samples = RUNS[name]
            for before in ready.get(name, []):
                command = [sys.executable, "-m", "layerbudget", *before.split(), "--overwrite"]
                subprocess.run(command, cwd=results / "one", capture_output=True, check=True)
            words = words_of(line, max(4, round(samples * given.scale)), sound, results / "one")
            try:
                found: dict[str, Any] = {"one": run(["layerbudget"], words, results / "one")}
                for way, start in TWO.items():
                    if way == "torchrun" or name in given.accelerate:
                        found[way] = run(start, words, results / way)
                rows.append(row_of(name, found, results))
            except RuntimeError as error:  # the other commands are measured all the same
                rows.append(f"| {name} | {str(error).replace('|', ' ')} |" + " |" * 11)
            sys.stderr.write(f"{rows[-1]}\n")
            write_section(
                "size",
                f"one process and two, by the clock: {Path(given.model).name}, text x {given.scale:g}",
                [about, "", *rows],
            )


if __name__ == "__main__":
    main()
