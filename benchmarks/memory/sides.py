"""The bytes of a card and of the processor's memory in plans, beside those that llama.cpp says it allocates.

    python -m benchmarks.memory sides [MODEL ...] [--context 512 2048] [--out FOLDER]

Without a MODEL these are a mixture and a dense model with random weights. Of each, some formats are measured once on little text.
Cards are of several sizes: from a little above the smallest that there is a plan for, to one that holds every layer. A plan is
written as a file, and llama.cpp loads it with the plan's own options and a card that stands for none (``card.py``).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.memory.card import CARD, MIB, PROCESSOR, allocated
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.compressors.ggml import library_file
from layerbudget.decisions.memory.payload import Placement, Side
from layerbudget.decisions.memory.plan import plan_memory, write_memory
from layerbudget.decisions.memory.program import MemoryLimits, fit_of
from layerbudget.decisions.memory.splits import splits_of
from layerbudget.plan import Plan
from layerbudget.scores import Scores

SIZES = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
RANDOM = {
    "Llama of 20 M parameters": ("Llama", {"intermediate_size": 1536}),
    "Qwen3-MoE of 63 M parameters": (
        "Qwen3Moe",
        {"intermediate_size": 512, "moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
}  # fmt: skip
FORMATS = ["Q4_0", "Q5_0", "Q8_0"]
SHARES = (0.05, 0.4, 1.0)  # of the way from the smallest card to one for everything
COLUMNS = (
    "model", "tokens", "options", "side", "weights counted", "llama.cpp", "cache counted", "llama.cpp", "buffers counted", "llama.cpp",
)  # fmt: skip


def make(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer: one of random weights, or of a folder."""
    if name not in RANDOM:
        return lb.load_model(name, dtype="float16", stream=False).float(), lb.load_tokenizer(name)
    tokenizer, (kind, sizes) = lb.load_tokenizer("demo"), RANDOM[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), max_position_embeddings=4096, **SIZES, **sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval(), tokenizer


def measured(name: str, folder: Path) -> Scores:
    """The damage of a few formats on little text: enough to have plans of mixed formats."""
    model, tokenizer = make(name)
    data = lb.calibration("stdlib", tokenizer, samples=2, length=128)
    options = {"formats": FORMATS, "cache": ["Q8_0", "Q4_0"], "draws": 1, "tokenizer": tokenizer}
    plan_memory(model, data, memory="100 GiB", context=512, save_scores=folder / "scores.json", **options)
    return Scores.load(folder / "scores.json")


def plans(scores: Scores, context: int) -> list[Plan]:
    """Plans for cards of several sizes, each with another number of layers at the processor."""
    splits = splits_of(fit_of(scores, MemoryLimits(memory="1 GiB", context=context)))
    low, high = min(split.least[0] for split in splits), splits[0].most[0]
    ram, found = max(split.most[1] for split in splits), dict[int, Plan]()
    for share in SHARES:
        gpu = int(low + share * (high - low))
        plan = plan_memory(scores, gpu=f"{gpu} bytes", ram=f"{ram} bytes", context=context)
        placement: Placement = plan.payload.placement
        found.setdefault(placement.layers, plan)
    return list(found.values())


def rows(name: str, plan: Plan, folder: Path) -> list[str]:
    """A row for each side of a plan: what it counts, and what llama.cpp says of its file, in MiB."""
    (model, tokenizer), here = make(name), plan.payload.placement
    write_memory(model, plan, folder / "out", tokenizer=tokenizer, overwrite=True)
    words = dict(zip(*[iter(here.options.split())] * 2, strict=True))
    types = {b.name: plan.payload.formats[b.modules[0]] for b in plan.blocks if b.name in ("keys", "values")}
    file, library = next((folder / "out").glob("*.gguf")), library_file()
    if library is None:
        raise SystemExit("llama.cpp is that of the package xllamacpp. Install it.")
    said = allocated(
        library, file, layers=int(words["--n-gpu-layers"]), experts=int(words.get("--n-cpu-moe", 0)),
        context=plan.payload.context, cache=(types["keys"], types["values"]),
    )  # fmt: skip
    lines = []
    sides: list[tuple[str, Side]] = [(CARD, here.card), (PROCESSOR, here.processor)]
    for side, counted in sides:
        of = said[side]
        theirs = (of.get("model", 0.0), of.get("KV", 0.0), of.get("compute", 0.0) + of.get("output", 0.0))
        both = zip((counted.weights, counted.cache, counted.buffers), theirs, strict=True)
        cells = [f"{value / MIB:.2f}" for pair in both for value in pair]
        lines.append(f"| {' | '.join((Path(name).name, str(plan.payload.context), here.options, side.lower(), *cells))} |")
    return lines


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    lines = [
        "MiB. llama.cpp's own words, with a card that stands for none: a device beside the processor that computes long batches of",
        "the processor's matrices, as CUDA's does. Weights of the processor's side have the file's metadata, which llama.cpp does",
        "not count; norms and biases are counted on both sides where whole layers lie with the processor.",
        "", f"| {' | '.join(COLUMNS)} |", "|---|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name in given.models or RANDOM:
        with tempfile.TemporaryDirectory() as place:
            scores = measured(name, Path(place))
            for context in given.context:
                for plan in plans(scores, context):
                    lines += rows(name, plan, Path(place))
    title = "Two memories, beside llama.cpp"
    if given.models:
        title += f": {', '.join(Path(name).name for name in given.models)}"
    write_section("memory", title, lines, out=given.out, peers=("xllamacpp",))


if __name__ == "__main__":
    main()
