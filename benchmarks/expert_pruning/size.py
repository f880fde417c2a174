"""Experts that stay at the shapes of a 30 B mixture: memory and time of the streamed look, by layer.

    python -m benchmarks.expert_pruning size FOLDER

FOLDER gets Qwen3-30B-A3B's shapes (48 layers of 128 experts there) with few layers, random weights in bfloat16: 1.2 GB a layer
and as much for both ends. Memory is the anonymous memory at the peak, loading and the interpreter included. The temporary folder
(`TMPDIR`) takes the stacks of experts, 1.2 GB a layer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import transformers
from benchmarks.size.tasks import Peak, anonymous
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.expert_pruning import sensitivity
from layerbudget.models.experts import find_experts
from layerbudget.models.offload import mapped

SHAPES = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
WHOLE = 48


def make(folder: Path, layers: int) -> None:
    """Write the model, once."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SHAPES, num_hidden_layers=layers, dtype="bfloat16")
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if name.endswith("norm.weight") else p.normal_(0, 0.02)
    model.save_pretrained(folder)


def main() -> None:
    """Make the model where it is missing, look at it, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--draws", type=int, default=4)
    a = parser.parse_args()
    if not (a.folder / "config.json").is_file():
        make(a.folder, a.layers)
        raise SystemExit("Made. Run it again: this process has held the whole model.")
    torch.set_num_threads(1)
    watch = Peak()
    watch.start()
    model = lb.load_model(str(a.folder), dtype="quick", stream=True)
    ids = torch.randint(0, SHAPES["vocab_size"], (a.samples, a.length), generator=torch.Generator().manual_seed(0))
    data, found, spent = CalibrationSet(input_ids=ids, source="random"), find_experts(model), []
    removals = sensitivity.ExpertSums._removals

    def timed(self, layer, held):
        began = time.process_time()
        out = removals(self, layer, held)
        spent.append(time.process_time() - began)
        return out

    sensitivity.ExpertSums._removals = timed
    loaded, largest, began, wall = anonymous(), watch.largest, time.process_time(), time.perf_counter()
    sensitivity.expert_removals(model, found, data, rules=("directional", "reap"), draws=a.draws, batch_size=a.samples)
    seconds, wall, top = time.process_time() - began, time.perf_counter() - wall, watch.largest
    each = seconds / a.layers
    lines = [
        f"Qwen3-30B-A3B's shapes with {a.layers} of {WHOLE} layers, random weights in bfloat16 on disk, streamed; {a.samples} x "
        f"{a.length} tokens, {a.draws} draws, one thread of a busy two-core machine.", "",
        "| | |", "|---|---|",
        f"| anonymous memory at the peak, GiB (while loading {largest:.2f}, then {loaded:.2f}) | {top:.2f} |",
        f"| computed in | {str(mapped(model).dtype).removeprefix('torch.')} |",
        f"| processor seconds per layer, ends shared out | {each:.0f} |",
        f"| of these to let experts go, three times (all text, and each half), two rules | {sum(spent) / a.layers:.0f} |",
        f"| seconds on the clock, all | {wall:.0f} |",
        f"| {WHOLE} layers, arithmetic, processor hours | {each * WHOLE / 3600:.1f} |", "",
        f"Measured with masks, a plan or a forecast takes forwards more, each about {1 / (1 + 2 * a.draws + 16):.0%} of the look.", "",
    ]  # fmt: skip
    write_section("expert_pruning", "Experts that stay, at 30 B shapes", lines, out=a.out)


if __name__ == "__main__":
    main()
