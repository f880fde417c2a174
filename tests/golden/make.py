"""Scores, plans and masks of the embedded model and of four tiny architectures, as digests: what a refactoring must not move.

    python tests/golden/make.py write OUT.json            # with the package that is installed, or PYTHONPATH=OTHER/src
    python tests/golden/make.py compare A.json B.json     # exit code 1 and a list where they differ
    python tests/golden/make.py add tests/golden/digests.json   # entries of new rules; the others stay as they are

Digests hold bit for bit on one machine only (kernels differ between processors), so two sources are compared by running both
on the same one. ``digests.json`` beside this file holds them for the environment that it names, and rounded numbers for
all others; ``test_golden.py`` reads it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import layerbudget as lb
from layerbudget.decisions.rules import rules_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.reference_pruning import prune_as_reference  # noqa: E402

TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
ESTIMATORS: dict[str, dict[str, Any]] = {
    "fisher-gram": {}, "gradient-norm": {}, "fisher-diagonal": {}, "fisher-mc": {}, "kfac": {}, "ekfac": {}, "adapter": {},
    "ggn": {"steps": 4}, "hessian": {"steps": 4}, "layerif": {}, "fisher-trace": {},
    "outlier-ratio": {}, "spectral-tail": {}, "ablation": {}, "block-influence": {},
}  # fmt: skip
KINDS = ("sparsity", "lora-experts", "ranks")
QUICK = ("fisher-gram", "kfac", "gradient-norm", "layerif", "outlier-ratio", "spectral-tail")  # on the embedded model
MEASURED = ("calibrated", "calibrated-permuted", "by-rank", "by-rank-permuted")  # rules that need more than one number a block


def tiny(kind: str) -> torch.nn.Module:
    """A random model of an architecture, weights large enough that tokens matter."""
    import transformers as t

    grouped = {**TINY, "num_key_value_heads": 2}
    makers = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**grouped, head_dim=8, sliding_window=8)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=61, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
        ),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
        ),
    }
    torch.manual_seed(0)
    model = makers[kind]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.15)
    return model.eval()


def tokens(samples: int, length: int, vocabulary: int, *, padded: bool = False) -> lb.CalibrationSet:
    """Random tokens."""
    ids = torch.randint(3, vocabulary, (samples, length), generator=torch.Generator().manual_seed(2))
    mask = None
    if padded:
        mask = (torch.arange(length)[None] < torch.arange(length - samples, length)[:, None]).long()
    return lb.CalibrationSet(input_ids=ids, attention_mask=mask)


def entry(values: Any) -> dict[str, Any]:
    """Digest and a rounded summary of numbers, all of them finite: nothing can be compared with a NaN."""
    x = np.ascontiguousarray(np.asarray(values, dtype=np.float64))
    if not np.isfinite(x).all():
        raise ValueError(f"{np.sum(~np.isfinite(x))} of {x.size} numbers are not finite")
    flat = x.reshape(-1)
    some = flat if flat.size <= 12 else np.array([flat.sum(), np.abs(flat).sum(), flat @ np.cos(np.arange(flat.size))])
    return {"digest": hashlib.sha256(x.tobytes()).hexdigest()[:16], "size": x.size, "about": [float(f"{v:.6g}") for v in some]}


def score_entry(found: lb.Scores) -> dict[str, Any]:
    """Gains and floors that are there, and the positions of the gains that are refused."""
    gains = [v for row in found.gain for v in row]
    floor = [v for row in found.noise_floor or () for v in row or () if v is not None]
    there = entry([*(v for v in gains if v is not None), *floor])
    refused = [i for i, v in enumerate(gains) if v is None]
    return {**there, "refused": refused} if refused else there


def plan_entry(plan: lb.Plan) -> dict[str, Any]:
    """A plan by its numbers; the words around them may change."""
    return entry([*plan.values, *plan.counts, float(plan.budget["spent"])])


def masks(model: torch.nn.Module) -> dict[str, Any]:
    """Weights of a pruned model."""
    blocks = lb.partition(model, "linear")
    named = dict(model.named_parameters())
    held = [
        named[m.name if m.name in named else f"{m.name}.weight"].detach().float().flatten() for b in blocks for m in b.modules
    ]
    flat = torch.cat(held)
    zeros = (flat == 0).double().numpy()
    return {"weights": entry(flat.double().numpy()), "zeros": entry(zeros)}


def scores_of(model: torch.nn.Module, data: lb.CalibrationSet, names: Any) -> Iterator[tuple[str, Any, lb.Scores | None]]:
    """Every estimator that this model allows."""
    from layerbudget.errors import LayerbudgetError

    blocks = lb.partition(model)
    for name in names:
        try:
            size = {} if name == "spectral-tail" else {"batch_size": 4}  # which reads weights only
            found = lb.score(model, data, blocks, name, **size, **ESTIMATORS.get(name, {}))
        except LayerbudgetError as error:
            yield name, {"refused": type(error).__name__}, None
            continue
        yield name, score_entry(found), found


def plans_of(scores: lb.Scores) -> Iterator[tuple[str, Any]]:
    """Plans of every kind and rule from one score record."""
    k, rules = len(scores.names), {kind: [n for n in rules_of(kind) if n not in MEASURED] for kind in KINDS}
    for rule in rules["sparsity"]:
        yield f"sparsity {rule}", plan_entry(lb.plan_sparsity(scores, sparsity=0.45, rule=rule))
    for rule in rules["lora-experts"]:
        for budget in ({"total": 6 * k}, {"budget": "45% flops"}):
            yield f"experts {rule} {budget}", plan_entry(lb.plan_lora_experts(scores, rule=rule, expert_rank=2, **budget))
    for rule in rules["ranks"]:
        yield f"ranks {rule}", plan_entry(lb.plan_ranks(scores, rule=rule, mean_rank=5, multiple=2))
    joint = lb.plan_joint(scores, budget=f"{-0.2 * float(scores.numel.sum()):.0f} B")
    yield "joint", {**plan_entry(joint), "capacity": list(joint.payload.capacity.counts.values())}


def pruned(make: Any, scores: lb.Scores, data: lb.CalibrationSet) -> Iterator[tuple[str, Any]]:
    """Masks of every pruner in every mode, and of its reference implementation."""
    from layerbudget.errors import LayerbudgetError

    plan = lb.plan_sparsity(scores, sparsity=0.5)
    even = lb.plan_sparsity(scores, sparsity=0.5, rule="uniform")
    for method in ("magnitude", "wanda", "sparsegpt"):
        inputs = None if method == "magnitude" else data
        modes: dict[str, tuple[Any, dict[str, Any]]] = {
            "plain": (plan, {}), "2:4": (even, {"pattern": "2:4"}), "n:8": (plan, {"pattern": "n:8"}),
            "sequential": (plan, {"true_sequential": True}),
        }  # fmt: skip
        for mode, (which, options) in modes.items():
            model = make()
            try:
                lb.prune(model, which, inputs, method, batch_size=4, **options)
            except LayerbudgetError as error:
                yield f"{method} {mode}", {"refused": type(error).__name__}
                continue
            yield f"{method} {mode}", masks(model)
        model = make()
        prune_as_reference(model, plan, inputs, method)
        yield f"{method} parity", masks(model)


def architecture(kind: str) -> Iterator[tuple[str, Any]]:
    """Everything of one tiny architecture."""
    data = tokens(6, 12, 61, padded=kind == "llama")
    model, first = tiny(kind), None
    for name, found, record in scores_of(model, data, ESTIMATORS):
        yield f"score {name}", found
        if name == "fisher-gram":
            first = record
    gram = first if first is not None else next(r for _, _, r in scores_of(model, data, ["fisher-gram", "spectral-tail"]) if r)
    yield from plans_of(gram)
    yield from pruned(lambda: tiny(kind), gram, data)
    if kind != "mixtral":
        by_rank = lb.score(model, data, lb.partition(model, "linear"), "rank-gain", batch_size=4, largest=16)
        yield "score rank-gain", entry(by_rank.extra["increments"])
        yield "ranks by-rank", plan_entry(lb.plan_ranks(by_rank, rule="by-rank", mean_rank=4, max_rank=16))
    if kind == "llama":
        shapes = lb.plan_shapes(model, data, "25% flops", multiple=4, batch_size=4, draws=1, passes=30)
        yield "shapes", plan_entry(shapes)


def embedded() -> Iterator[tuple[str, Any]]:
    """The model of the package."""
    model = lb.load_model("demo")
    data = tokens(8, 64, model.config.vocab_size)
    gram = None
    for name, found, record in scores_of(model, data, QUICK):
        yield f"score {name}", found
        gram = record if name == "fisher-gram" else gram
    yield from plans_of(gram)
    for method in ("magnitude", "wanda", "sparsegpt"):
        model = lb.load_model("demo")
        lb.prune(model, lb.plan_sparsity(gram, sparsity=0.5), None if method == "magnitude" else data, method)
        yield method, masks(model)


def environment() -> dict[str, str]:
    """What digests depend on."""
    import transformers

    return {
        "torch": torch.__version__.split("+")[0], "transformers": transformers.__version__, "numpy": np.__version__,
        "machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip


def make() -> dict[str, Any]:
    """All of it."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    found = {f"{kind}: {name}": value for kind in ("llama", "gemma2", "gpt2", "mixtral") for name, value in architecture(kind)}
    found |= {f"embedded: {name}": value for name, value in embedded()}
    return {"environment": environment(), "entries": found}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Entries whose digests differ, or that one side lacks."""
    return [name for name in {**a["entries"], **b["entries"]} if a["entries"].get(name) != b["entries"].get(name)]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("write").add_argument("out", type=Path)
    verbs.add_parser("add").add_argument("out", type=Path)
    pair = verbs.add_parser("compare")
    pair.add_argument("first", type=Path)
    pair.add_argument("second", type=Path)
    given = parser.parse_args()
    if given.verb == "write":
        found = make()
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found['entries'])} entries of {Path(lb.__file__).parent} in {given.out}")
        return 0
    if given.verb == "add":
        held, made = json.loads(given.out.read_text()), make()["entries"]
        new = [name for name in made if name not in held["entries"]]
        held["entries"] = {name: held["entries"].get(name, value) for name, value in made.items()}
        given.out.write_text(json.dumps(held, indent=1) + "\n")
        print("\n".join(new) or "no entry is new")
        return 0
    wrong = differences(*(json.loads(p.read_text()) for p in (given.first, given.second)))
    print("\n".join(wrong) or "all digests are equal")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
