"""Checkpoints with layers that predict further tokens (MTP), before and after every verb that writes a folder.

    python -m benchmarks.peers further [--models MODEL ...]

transformers does not load these layers. Small models with random weights get them in the names that published checkpoints of
their architecture have. A verb writes a folder, and its tensors are compared one by one with those of the source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.stamp import RESULTS, write_section
from safetensors.torch import load_file, save_file

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.shapes.save import save_smaller
from layerbudget.decisions.shapes.units import find_parts
from layerbudget.errors import LayerbudgetError
from layerbudget.models.experts import cut_experts, find_experts
from layerbudget.storage.checkpoint import Stored

logger = logging.getLogger("layerbudget")

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LINEAR = {
    f"linear_{name}": n
    for name, n in (("key_head_dim", 8), ("value_head_dim", 8), ("num_key_heads", 2), ("num_value_heads", 4))
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeConfig", {**MIXTURE, **SHARED}),
    "deepseek_v3": ("DeepseekV3Config", {**MIXTURE, **SHARED, **LATENT, "num_key_value_heads": 4, "head_dim": 8}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**MIXTURE, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 32,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**MIXTURE, "n_routed_experts": 4, "v_head_dim": 16, "sliding_window": 8, "mlp_layer_types": ["dense", "sparse"],
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": ("Qwen2Config", {}),
}  # fmt: skip
NUMBERED = ("glm4_moe", "deepseek_v3")  # the layer further on has the number behind the last
COUNT = "num_nextn_predict_layers"


def write_source(name: str, folder: Path) -> list[str]:
    """Write a checkpoint in bfloat16 with a layer further on, and return the names of that layer's tensors."""
    config, fields = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SIZES, **fields}))
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    count, wide = SIZES["num_hidden_layers"], SIZES["hidden_size"]
    last, first = f"model.layers.{count - 1}.", "model.layers.0."
    if name in NUMBERED:
        place, ends = f"model.layers.{count}.", {"eh_proj": (wide, 2 * wide), "enorm": (wide,), "hnorm": (wide,)}
        ends |= {"shared_head.norm": (wide,), "embed_tokens": (VOCABULARY, wide), "shared_head.head": (VOCABULARY, wide)}
    elif name == "mimo_v2_flash":
        place, last = "model.mtp.layers.0.", first  # a dense one
        ends = {"eh_proj": (wide, 2 * wide), "enorm": (wide,), "hnorm": (wide,), "final_layernorm": (wide,)}
    else:
        place = "mtp.layers.0."
        ends = {"../fc": (wide, 2 * wide), "../norm": (wide,), "../pre_fc_norm_embedding": (wide,)}
    further = {place + n.removeprefix(last): torch.randn_like(t) for n, t in tensors.items() if n.startswith(last)}
    names = {end: f"mtp.{end[3:]}" if end.startswith("../") else place + end for end in ends}
    further |= {f"{names[end]}.weight": torch.randn(shape).bfloat16() for end, shape in ends.items()}
    save_file(tensors | further, folder / "model.safetensors", metadata={"format": "pt"})
    if name in (*NUMBERED, "qwen2"):
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, COUNT: 1}))
    return sorted(further)


def tokens() -> lb.CalibrationSet:
    """Random tokens."""
    drawn = torch.randint(3, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    return lb.CalibrationSet(input_ids=drawn)


def by_zeros(model: Any, out: Path) -> None:
    """Prune to half."""
    plan = lb.plan_sparsity(lb.partition(model, "linear", exclude="lm_head"), sparsity=0.5, rule="uniform")
    lb.save_pruned(model, None, plan, lb.prune(model, plan, None, "magnitude"), out)


def by_bits(model: Any, out: Path) -> None:
    """Round for vLLM, experts too."""
    damage = rounding_damage(model, tokens(), runtime="vllm", formats=["w8-g32", "w4-g32"], draws=1, unwritten="16-bit")
    lb.write_bits(model, lb.plan_bits(damage, bits=9.5), out)


def by_experts(model: Any, out: Path) -> None:
    """Cut half of the experts."""
    layers = find_experts(model)
    cut_experts(model, {layer.name: range(layer.count // 2) for layer in layers})
    lb.write_model(model, None, out)


def by_shapes(model: Any, out: Path) -> None:
    """Remove half of the MLP channels of every layer."""
    kind = "mlp" if any(part.kind == "mlp" for part in find_parts(model, kinds=("mlp",))) else "heads"
    lb.remove_units(model, tokens(), 0.5, kind=kind, **({"multiple": 8} if kind == "mlp" else {}))
    save_smaller(model, None, out)


def by_merge(model: Any, out: Path) -> None:
    """Merge an adapter."""
    plan = lb.plan_ranks(lb.partition(model, "linear", exclude="lm_head|mlp"), mean_rank=2, rule="uniform")
    with tempfile.TemporaryDirectory() as place:
        lb.add_ranks(model, plan, task_type="CAUSAL_LM").save_pretrained(place)
        base = lb.load_model(str(model.config._name_or_path), quiet=True)
        lb.write_model(lb.load_adapter(base, place, merge=True), None, out)


VERBS: dict[str, Callable[[Any, Path], None]] = {
    "zeros": by_zeros, "bits (vLLM)": by_bits, "adapter merged": by_merge, "fewer experts": by_experts, "smaller shapes": by_shapes,
}  # fmt: skip


def counts(folder: Path) -> dict[str, int]:
    """The numbers of layers further on in a configuration."""
    fields = json.loads((folder / "config.json").read_text())
    return {n: v for n, v in fields.items() if "nextn" in n or "mtp" in n}


def compare(source: Path, out: Path, further: list[str]) -> dict[str, Any]:
    """How many tensors of the layers further on are in the written folder, bit for bit, and how many are not."""
    before, after = Stored(source), Stored(out)
    there = [n for n in further if n in after.names]
    equal = [n for n in there if before.dtype(n) == after.dtype(n) and torch.equal(before.tensor(n), after.tensor(n))]
    numbers = {
        "before": len(further),
        "equal": len(equal),
        "changed": len(there) - len(equal),
        "left out": len(further) - len(there),
    }
    return {**numbers, "counts": (counts(source), counts(out))}


class Notes(logging.Handler):
    """Keeps the sentences that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def noted() -> Any:
    """The sentences that are logged meanwhile."""
    handler = Notes()
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def measure(name: str, verb: str, place: Path) -> dict[str, Any]:
    """Write a folder by a verb, and compare; ``said`` is what was logged of the layers further on, ``refused`` an error."""
    source, out = place / "source", place / "out"
    further = write_source(name, source)
    with noted() as lines:
        model = lb.load_model(str(source))
        try:
            VERBS[verb](model, out)
        except LayerbudgetError as error:
            return {"model": name, "verb": verb, "refused": str(error).split(". ")[0]}
    said = [line for line in lines if "MTP" in line and "no verb reads" not in line]
    return {
        "model": name,
        "verb": verb,
        **compare(source, out, further),
        "said": said,
        "read": lb.load_model(str(out), quiet=True) is not None,
    }


def main() -> None:
    """One row for each model and verb."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    lines = ["| model | verb | tensors before | equal after | changed | left out | count before | count after | said |"]
    lines += ["|---|---|---:|---:|---:|---:|---|---|---|"]
    for name in given.models:
        for verb in VERBS:
            with tempfile.TemporaryDirectory() as place:
                row = measure(name, verb, Path(place))
            if "refused" in row:
                lines.append(f"| {name} | {verb} | | | | | | | refused: {row['refused']} |")
                continue
            before, after = (", ".join(map(str, c.values())) or "none" for c in row["counts"])
            said = "left out" if any("not in the folder" in line for line in row["said"]) else ""
            numbers = " | ".join(str(row[k]) for k in ("before", "equal", "changed", "left out"))
            lines.append(f"| {name} | {verb} | {numbers} | {before} | {after} | {said} |")
            print(lines[-1], flush=True)
    write_section("peers", "Layers that predict further tokens, before and after", lines, out=given.out)
