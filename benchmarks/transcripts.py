"""Four users, each in one sitting: every command and all that it prints, nothing skipped.

    python benchmarks/transcripts.py [fine-tuning compression research teaching] --data-dir DIR [--llmcompressor PYTHON] [--out FOLDER]

``--data-dir`` has the original files of the tasks; ``--llmcompressor`` is the Python of an environment with llm-compressor. The
harness's stock task reads its rows from there through its own file loader, since nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

MERGE = """
import layerbudget as lb
from layerbudget.finetuning.adapters import load_adapter
model = load_adapter(lb.load_model("demo"), "adapters/seed-0/adapter", merge=True)
model.save_pretrained("merged"); lb.load_tokenizer("demo").save_pretrained("merged")
rows = lb.load_tokenizer("merged")("def read(self, size):", return_tensors="pt")
print(repr(lb.load_tokenizer("merged").decode(lb.load_model("merged").generate(**rows, max_new_tokens=24, do_sample=False)[0])))
"""
OWN = """
import layerbudget as lb
blocks = lb.partition(lb.load_model("demo"))
norm = lambda b: sum(float(lb.weight_of(lb.load_model("demo"), m.name)[1].detach().norm()) for m in b.modules)
with open("own.csv", "w") as file:
    file.write("name,score\\n" + "".join(f"{b.name},{1 + i}\\n" for i, b in enumerate(blocks)))
"""


def users(python: str, other: str | None) -> dict[str, tuple[str, list[str]]]:
    """``{name: (what it is about, shell commands)}``."""
    lb = "layerbudget"
    held = "--perplexity stdlib --windows 64 --length 128"
    recipe = [f"{other} {HERE / 'recipe_run.py'} run recipe | tail -3", f"{lb} evaluate recipe/theirs {held}"] if other else []
    return {
        "fine-tuning": ("300 rows of chat, ranks under a budget, an adapter beside uniform's, merged and served.", [
            f"{python} {ROOT / 'examples' / 'chat_rows.py'} chat.jsonl; wc -l chat.jsonl",
            f"{lb} score demo --data chat.jsonl --estimator rank-gain --by linear --samples 64 -o scores.json",
            f"{lb} plan ranks scores.json --budget '180k params' -o ranks.json",
            f"{lb} plan ranks scores.json --budget '180k params' --rule uniform -o uniform.json",
            f"{lb} finetune demo uniform.json --data chat.jsonl --epochs 2 --lr 0.006 -o adapters-uniform",
            f"{lb} finetune demo ranks.json --data chat.jsonl --epochs 2 --lr 0.006 --against adapters-uniform -o adapters",
            f"{lb} explain ranks.json",
            f"{python} merge.py",
            f"{lb} export ranks.json -o lora.json && head -c 400 lora.json",
            f"{lb} report adapters -o adapters.html && ls -l adapters.html",
        ]),
        "compression": ("A 2:4 model, a 3-bit model, the harness's own command on both, and our recipe in llm-compressor.", [
            f"{lb} score demo --samples 16 --length 128 -o scores.json",
            f"{lb} plan sparsity scores.json --rule uniform --sparsity 0.5 -o two-four.json",
            f"{lb} apply demo two-four.json --pattern 2:4 --samples 16 --length 128 -o two-four",
            f"{lb} plan bits demo --bits 3.6 --samples 16 --length 128 -o bits.json",
            f"{lb} apply demo bits.json --method gptq --samples 16 --length 128 -o three-bits",
            *(f"{lb} evaluate {m} {held}" for m in ("demo", "two-four", "three-bits")),
            *(f"{python} -m lm_eval --model hf --model_args pretrained={m},dtype=float32,max_length=512 --include_path stock"
              " --device cpu --tasks stock_arc_easy --batch_size 8 --limit 60 | tail -6" for m in ("two-four", "three-bits")),
            f"{lb} evaluate two-four --tasks arc_easy --data-dir DATA --limit 60",
            f"{python} {HERE / 'recipe_run.py'} prepare recipe --sparsity 0.5 | tail -3",
            *recipe,
            f"{lb} evaluate recipe/ours {held}",
        ]),
        "research": ("A score of one's own beside others, under two rules, at equal budgets.", [
            f"{python} own.py && head -4 own.csv",
            f"{lb} compare demo --scores gain,owl,own.csv --rules mdl,owl --sparsity 0.5 --samples 16 --length 128"
            " --windows 48 --seeds 0 1 -o comparison",
            f"{lb} explain transfer gain.json other.json --program sparsity",
            f"{lb} report comparison -o comparison.html && ls -l comparison.html",
        ]),
        "teaching": ("Water poured over ten layers, then over a model's.", [
            f"{python} {ROOT / 'examples' / 'water_filling.py'} --budget 24",
            f"{lb} score demo --samples 16 --length 128 -o gain.json",
            f"{lb} plan experts gain.json --total 60 -o experts.json",
            f"{lb} explain sweep gain.json --kind experts --budgets 36 60 120",
            f"{lb} explain experts.json",
        ]),
    }  # fmt: skip


def stock(folder: Path, data_dir: str) -> None:
    """The harness's own definition of ARC-Easy, reading local rows through its own file loader."""
    import yaml
    from lm_eval.tasks import TaskManager

    from layerbudget.evaluation import harness

    folder.mkdir()
    rows, split = harness.local_rows("arc_easy", Path(data_dir)), harness.LOCAL["arc_easy"][2]
    (folder / "arc_easy.json").write_text("\n".join(json.dumps(r) for r in rows))
    own = {"include": str(TaskManager().task_index["arc_easy"].yaml_path), "task": "stock_arc_easy", "dataset_path": "json"}
    own |= {"dataset_name": None, "tag": None, "dataset_kwargs": {"data_files": {split: str(folder / "arc_easy.json")}}}
    own |= {f"{s}_split": split if s == split else None for s in ("training", "validation", "test")}
    (folder / "stock_arc_easy.yaml").write_text(yaml.safe_dump(own))


def sitting(name: str, about: str, commands: Sequence[str], data_dir: str, out: Path) -> None:
    """Run one user's commands and write what was typed and printed."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "merge.py").write_text(MERGE)
        (folder / "own.py").write_text(OWN)
        if name == "compression":
            stock(folder / "stock", data_dir)
        if name == "research":
            for seed, file in ((0, "gain.json"), (1, "other.json")):
                _run(f"layerbudget score demo --samples 16 --length 128 --seed {seed} -o {file}", folder)
        lines, started = [f"# {about}", ""], time.monotonic()
        for command in commands:
            text, took, status = _run(command.replace("DATA", str(data_dir)), folder)
            shown = _plain(command, folder)
            lines += [f"    $ {shown}", *(f"    {line}".rstrip() for line in _plain(text, folder).splitlines())]
            lines += [f"    [{took:.0f} s{'' if status == 0 else f', exit status {status}'}]", ""]
            print(f"{name}: {took:.0f} s, status {status}: {shown[:90]}", flush=True)
        lines.append(f"In all {time.monotonic() - started:.0f} s on {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}).")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(command: str, folder: Path) -> tuple[str, float, int]:
    started = time.monotonic()
    bin_ = str(Path(sys.executable).parent)
    environment = {**os.environ, "COLUMNS": "110", "HF_HUB_OFFLINE": "1", "PATH": f"{bin_}:{os.environ['PATH']}",
                   "HF_DATASETS_CACHE": str(folder / ".datasets"), "TQDM_DISABLE": "1"}  # fmt: skip
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout, time.monotonic() - started, done.returncode


def _plain(text: str, folder: Path) -> str:
    """Without paths of this machine, and without what progress bars overwrote."""
    for path, name in ((sys.executable, "python"), (folder, "."), (HERE, "benchmarks"), (ROOT, ".")):
        text = text.replace(str(path), name)
    text = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+bin/python", "other-python", text)
    text = re.sub(r"/(?:[\w.-]+/)+site-packages/", ".../", text)
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.splitlines())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--llmcompressor", metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "transcripts")
    a = parser.parse_args()
    known = users(sys.executable, a.llmcompressor)
    for name in a.names or known:
        sitting(name, *known[name], data_dir=a.data_dir, out=a.out)


if __name__ == "__main__":
    main()
