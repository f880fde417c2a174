"""What each of several processes does of every verb: on paper for models of 8, 70 and 235 billion parameters, and beside a run.

    OMP_NUM_THREADS=1 python -m benchmarks.size machines paper
    OMP_NUM_THREADS=1 python -m benchmarks.size machines run MODEL [MODEL]

``paper`` prices the verbs from configurations alone (``doctor config.json --card "80 GiB" --machines N``). ``run`` starts every
command in two processes on this machine, and puts the bytes that they exchanged beside what ``--dry-run --machines 2`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.stamp import ROOT, write_section

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "dtype": "bfloat16"}
MODELS = {
    "8 billion": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
    "70 billion": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192},
    "235 billion, 22 of them met by a token": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}  # the sizes of Llama 3 and of Qwen3-235B-A22B
MACHINES = (1, 8, 64)
VERBS = (
    "score fisher-gram",
    "score rank-gain",
    "score kfac",
    "score gradient-norm",
    "plan sparsity",
    "plan shapes",
    "plan bits",
    "plan bits --method gptq",
    "plan expert-pruning",
    "apply, sparsegpt",
    "apply, gptq",
    "evaluate",
)
RUNS = {
    "score --estimator gradient-norm": "score MODEL TEXT --estimator gradient-norm -o s0.json",
    "score --estimator fisher-gram": "score MODEL TEXT --estimator fisher-gram -o s1.json",
    "score --estimator rank-gain": "score MODEL TEXT --estimator rank-gain -o s2.json",
    "score --estimator kfac": "score MODEL TEXT --estimator kfac -o s3.json",
    "plan sparsity": "plan sparsity MODEL TEXT --sparsity 0.5 -o sparsity.json",
    "plan bits": "plan bits MODEL TEXT --check 4 --bits 5 -o bits.json",
    "plan bits --method gptq": "plan bits MODEL TEXT --check 4 --bits 5 --method gptq -o gptq.json",
    "plan cache": "plan cache MODEL TEXT --check 4 --bits 6 --context 512 -o cache.json",
    "plan shapes": "plan shapes MODEL TEXT --save 10%flops --passes 32 -o shapes.json",
    "apply, wanda": "apply MODEL sparsity.json TEXT -o wanda",
    "apply, sparsegpt": "apply MODEL sparsity.json TEXT --method sparsegpt -o sparsegpt",
    "evaluate": "evaluate MODEL --windows 8",
}  # in this order: a plan is made before it is applied


def command(words: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    """One process of the command line, whose document is read from its standard output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **variables}
    line = [sys.executable, "-m", "layerbudget", *words, "--json"]
    return subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The document of a process, which has to end well."""
    output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors)
    document: dict[str, Any] = json.loads(output or "{}")
    return document


def in_two(words: list[str], folder: Path) -> dict[str, Any]:
    """The document of the first of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = [command(words, folder, **where, RANK=str(i), LOCAL_RANK=str(i)) for i in range(2)]
    return [result_of(process) for process in both][0]


def on_paper() -> None:
    """Price every verb for so many cards of 80 GiB."""
    for name, config in MODELS.items():
        rows = [
            "| verb | cards | sequences of each | memory GiB | operations 10^12 | read GiB | exchanged GiB | limit | seconds |",
            "|---|---:|---:|---:|---:|---:|---:|---|---:|",
        ]
        with tempfile.TemporaryDirectory() as made:
            file = Path(made) / "config.json"
            file.write_text(json.dumps(config))
            words = ["doctor", str(file), "--card", "80 GiB", "--samples", "128", "--machines"]
            by_size = {n: result_of(command([*words, str(n)], Path(made)))["forecast"] for n in MACHINES}
        for verb in VERBS:
            for n in MACHINES:
                part = next((row["share"] for row in by_size[n] if row["verb"] == verb), None)
                if part is not None:
                    shown = [f"{part[key] / unit:.3g}" for key, unit in _UNITS]
                    rows.append(
                        f"| {verb} | {n} | {part['sequences']} | {' | '.join(shown)} | {part['limit']} | {part['seconds']:.0f} |"
                    )
        about = (
            "128 sequences of 256 tokens; every card has 80 GiB, does 4 x 10^14 operations in a second, reads 3 GB/s and sends "
            "25 GB/s. `seconds` are those of the limit alone."
        )
        write_section("size", f"several cards, on paper: {name}", [about, "", *rows])


_UNITS = (("memory", 2**30), ("operations", 1e12), ("read", 2**30), ("sent", 2**30))


def in_a_run(models: list[str], samples: int) -> None:
    """Every command in two processes, beside its dry run."""
    for model in models:
        rows = ["| command | exchanged MB, on paper | in the run | ratio |", "|---|---:|---:|---:|"]
        place = model if model == "demo" else str(Path(model).resolve())
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            for name, line in RUNS.items():
                text = {"MODEL": [place], "TEXT": ["--samples", str(samples), "--length", "128"]}
                words = [w for each in line.split() for w in text.get(each, [each])]
                part = result_of(command([*words, "--dry-run", "--machines", "2"], folder))["share"]
                sent = in_two(words, folder)["took"]["sent"]
                ratio = part["sent"] / max(sent, 1)
                rows.append(f"| {name} | {part['sent'] / 1e6:.2f} | {sent / 1e6:.2f} | {ratio:.2f} |")
                write_section("size", f"two processes beside their dry run: {Path(model).name}", rows)


def main() -> None:
    """Write the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paper", "run"))
    parser.add_argument("models", nargs="*", help="with run: demo, or folders")
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    if given.what == "paper":
        on_paper()
    else:
        in_a_run(given.models or ["demo"], given.samples)


if __name__ == "__main__":
    main()
