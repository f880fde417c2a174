"""Our recipe run by llm-compressor itself, and what it makes beside what ``layerbudget prune`` makes of the same plan and text.

    python benchmarks/recipe_run.py prepare FOLDER [--sparsity 0.6] [--method wanda]       # plan, recipe, tokens, our pruned model
    OTHER_PYTHON benchmarks/recipe_run.py run FOLDER              # an environment of its own: pip install torch llmcompressor
    python benchmarks/recipe_run.py compare FOLDER --out benchmarks/results/recipe_run-wanda.json

``run`` imports nothing of layerbudget: it is what a user of llm-compressor does with the recipe, in sequential mode.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def prepare(folder: Path, sparsity: float, method: str) -> None:
    """Write the dense model, the calibration tokens, the plan, the recipe, and the model that we prune."""
    import layerbudget as lb
    from layerbudget.cli import main
    from layerbudget.data.text import calibration

    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
    model.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    data = calibration("stdlib", tokenizer, samples=16, length=128, seed=0)
    (folder / "tokens.json").write_text(json.dumps(data.input_ids.tolist()))
    plan = folder / "plan.json"
    flags = ["--sparsity", str(sparsity), "--method", method, "--samples", "16", "--length", "128", "--by", "linear"]
    for arguments in (
        ["plan", "sparsity", "demo", *flags, "-o", str(plan)],
        ["export", str(plan), "--to", "recipe", "--set", f"method={method}", "-o", str(folder / "recipe.yaml")],
        ["apply", "demo", str(plan), "--method", method, "--samples", "16", "--length", "128", "-o", str(folder / "ours")],
    ):
        if main([*arguments, "--overwrite", "--quiet"]):
            raise SystemExit(f"layerbudget {' '.join(arguments)} failed")


def run(folder: Path) -> None:
    """Prune the dense model by the recipe with llm-compressor."""
    import llmcompressor
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "theirs").mkdir(exist_ok=True)
        (folder / "theirs" / name).write_bytes((folder / "dense" / name).read_bytes())
    ids = json.loads((folder / "tokens.json").read_text())
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(r) for r in ids]})
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    started = time.monotonic()
    oneshot(
        model=model, dataset=rows, recipe=str(folder / "recipe.yaml"), pipeline="sequential", num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]), tokenizer=str(folder / "dense"),
    )  # fmt: skip
    model.save_pretrained(folder / "theirs", save_compressed=False)
    versions = {"llmcompressor": llmcompressor.__version__, "torch": torch.__version__}
    (folder / "theirs.json").write_text(json.dumps({"seconds": time.monotonic() - started, **versions}))


def compare(folder: Path, out: Path) -> None:
    """Zeros, agreement of the masks and held-out perplexity of both."""
    import layerbudget as lb
    from layerbudget.evaluation.perplexity import evaluation_set, perplexity
    from layerbudget.models.blocks import partition, weight_of
    from layerbudget.records import dumps, write_text
    from program import environment

    windows = evaluation_set("stdlib", lb.load_tokenizer("demo"), length=128, windows=128)
    models = {name: lb.load_model(str(folder / name), dtype="float32") for name in ("dense", "ours", "theirs")}
    found: dict = {n: {"perplexity": perplexity(m, windows).value} for n, m in models.items()}
    blocks = partition(models["dense"], "linear")
    plan = lb.Plan.load(folder / "plan.json")
    same = zeros = total = worst = 0
    for block, want in zip(blocks, plan.values, strict=True):
        ours, theirs = (weight_of(models[n], block.name)[1] == 0 for n in ("ours", "theirs"))
        same, total = same + int((ours == theirs).sum()), total + ours.numel()
        zeros += int(theirs.sum())
        worst = max(worst, abs(float(theirs.float().mean()) - float(want)))
    found |= {
        "masks_equal": same / total, "sparsity_theirs": zeros / total, "largest_ratio_difference": worst,
        "theirs_run": json.loads((folder / "theirs.json").read_text()), "environment": environment(),
        "stages": (folder / "recipe.yaml").read_text().count("sparsity:"),
    }  # fmt: skip
    write_text(out, dumps(found), overwrite=True)
    print(dumps(found))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--method", default="wanda", choices=("wanda", "sparsegpt"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recipe_run-wanda.json")
    a = parser.parse_args()
    if a.what == "prepare":
        prepare(a.folder, a.sparsity, a.method)
    elif a.what == "run":
        run(a.folder)
    else:
        compare(a.folder, a.out)


if __name__ == "__main__":
    main()
