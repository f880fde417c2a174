"""Speed and memory of the mixture of LoRA experts, in ratios to plain LoRA of equal total rank and to MoLA's own layer.

    python -m benchmarks.lora_experts layer --mola PATH_TO_CHECKOUT_OF_GCYZSL_MoLA [--rounds 9]

One adapted square Linear with a frozen base, forward and backward including the input's gradient, rank 8, top-2, one thread.
Times are process CPU time, variants interleaved in one run, medians. Saved activations are what autograd keeps for the
backward pass, without inputs and parameters. Variants:

- ``plain``: LoRA of rank ``E r``, PEFT's layer.
- ``ours``: the layer of this package: experts and router in one product over the input, gate spread in rank space.
- ``two passes``: the same with the router as a product of its own and every leaf called as a module (what runs under
  sharding wrappers and hooks; dropout, too, needs the second pass).
- ``grouped``: tokens sorted by expert, one pair of products per expert.
- ``mola``: ``Linear_MoE`` of the checkout, read at run time (its file does not import under current PEFT).
"""

from __future__ import annotations

import argparse
import ast
import math
import statistics
import time
import warnings
from pathlib import Path

import torch
from benchmarks.stamp import RESULTS, write_section
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as PlainLora
from torch import nn

from layerbudget.decisions.lora_experts.layer import Routing, route
from layerbudget.decisions.lora_experts.method import ExpertsConfig, ExpertsLinear

RANK, TOP_K, ALPHA = 8, 2, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def mola_class(checkout: str):
    """``Linear_MoE`` and its base, taken from the checkout's source by name; nothing of it is stored here."""
    source = (Path(checkout) / "src" / "mola_lora_hacked.py").read_text(encoding="utf-8")
    wanted = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name in ("LoraMoE_Layer", "Linear_MoE")]
    space = {
        "torch": torch, "nn": nn, "F": nn.functional, "math": math, "warnings": warnings,
        "transpose": lambda weight, flag: weight.T if flag else weight,
    }  # fmt: skip
    exec(compile(ast.Module(body=wanted, type_ignores=[]), "mola", "exec"), space)
    return space["Linear_MoE"]


def grouped(x, a, b, gate, top_k: int, scale: float) -> torch.Tensor:
    """The update from tokens sorted by expert; ``(T, d_in) -> (T, d_out)``."""
    experts, rank = gate.shape[-1], a.shape[0] // gate.shape[-1]
    weight, index = gate.topk(min(top_k, experts), dim=-1)
    order = index.flatten().argsort(stable=True)
    token = order.div(index.shape[-1], rounding_mode="floor")
    counts = torch.bincount(index.flatten(), minlength=experts).tolist()
    parts = []
    for expert, rows in enumerate(x[token].split(counts)):
        part = slice(expert * rank, (expert + 1) * rank)
        parts.append(rows @ a[part].T @ b[:, part].T)
    update = torch.cat(parts) * (weight.flatten()[order] * scale).to(x.dtype).unsqueeze(-1)
    return torch.zeros(x.shape[0], b.shape[0], dtype=update.dtype, device=x.device).index_add(0, token, update)


class Grouped(nn.Module):
    """The grouped form on our storage."""

    def __init__(self, ours: ExpertsLinear) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Base output plus the grouped update."""
        a, b, router = (getattr(self.ours, f"lora_experts_{n}")["default"] for n in ("A", "B", "router"))
        flat = x.reshape(-1, x.shape[-1])
        update = grouped(flat, a.weight, b.weight, route(router(flat), TOP_K), TOP_K, ALPHA / RANK)
        return self.ours.base_layer(x) + update.view(*x.shape[:-1], -1)


def make(d: int, experts: int, dtype: torch.dtype, mola) -> dict[str, nn.Module]:
    """All variants around the same base weight, B away from zero."""
    torch.manual_seed(0)
    base = nn.Linear(d, d, bias=False)
    config = ExpertsConfig(r=RANK, lora_alpha=ALPHA, top_k=TOP_K, init_weights=False, target_modules=["x"])
    ours = ExpertsLinear(base, "default", experts, config, Routing())
    two = ExpertsLinear(base, "default", experts, config, Routing())
    two.load_state_dict(ours.state_dict())
    for leaf in ("A", "B"):
        two.get_submodule(f"lora_experts_{leaf}.default").register_forward_pre_hook(lambda *_: None)
    plain_config = LoraConfig(r=RANK * experts, lora_alpha=2 * RANK * experts, init_lora_weights=False)
    plain = PlainLora(base, "default", config=plain_config, r=RANK * experts, lora_alpha=2 * RANK * experts)
    built = {"plain": plain, "ours": ours, "two passes": two, "grouped": Grouped(ours)}
    if mola is not None:
        theirs = mola("default", d, d, r=[RANK], lora_alpha=ALPHA, number_experts=[experts], top_k=[TOP_K], bias=False)
        with torch.no_grad():
            theirs.weight.copy_(base.weight)
            theirs.router["router"].weight.copy_(ours.lora_experts_router["default"].weight)
            for e in range(experts):
                part = slice(e * RANK, (e + 1) * RANK)
                theirs.lora_A[f"default_{e}"].weight.copy_(ours.lora_experts_A["default"].weight[part])
                theirs.lora_B[f"default_{e}"].weight.copy_(ours.lora_experts_B["default"].weight[:, part])
        built["mola"] = theirs
    for module in (base, *built.values()):
        module.to(dtype)
    base.weight.requires_grad_(False)
    return built


def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Output; MoLA's layer returns its router logits beside it."""
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps, inputs and parameters excluded, each storage once."""
    known = {p.untyped_storage().data_ptr() for p in (*module.parameters(), x)}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(module, x)
    total = sum(kept.values())
    del y
    return total


def agreement(mola) -> float:
    """Largest relative difference, float64, of outputs and all gradients between MoLA's layer and ours."""
    worst = 0.0
    for experts in (2, 5, 8, 10):
        built = make(64, experts, torch.float64, mola)
        results = []
        for name in ("ours", "mola"):
            x = torch.randn(1, 40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
            y = call(built[name], x)
            y.square().mean().backward()
            parts = [y.detach(), x.grad]
            if name == "ours":
                a, b, router = (getattr(built[name], f"lora_experts_{n}")["default"].weight.grad for n in ("A", "B", "router"))
            else:
                a = torch.cat([built[name].lora_A[f"default_{e}"].weight.grad for e in range(experts)])
                b = torch.cat([built[name].lora_B[f"default_{e}"].weight.grad for e in range(experts)], 1)
                router = built[name].router["router"].weight.grad
            results.append([*parts, a, b, router])
        for one, two in zip(*results, strict=True):
            worst = max(worst, ((one - two).abs().max() / two.abs().max()).item())
    return worst


def measure(d: int, tokens: int, experts: int, dtype: str, rounds: int, mola) -> dict:
    """Median CPU milliseconds of every variant, interleaved."""
    built = make(d, experts, DTYPES[dtype], mola)
    x = torch.randn(1, tokens, d).to(DTYPES[dtype]).requires_grad_()
    gradient = torch.randn(1, tokens, d).to(DTYPES[dtype])
    times: dict[str, list[float]] = {name: [] for name in built}
    for turn in range(rounds + 2):
        for name, module in built.items():
            x.grad = None
            module.zero_grad(set_to_none=True)
            start = time.process_time()
            call(module, x).backward(gradient)
            if turn >= 2:
                times[name].append((time.process_time() - start) * 1e3)
    row = {"dtype": dtype, "d": d, "tokens": tokens, "experts": experts}
    row["ms"] = {name: statistics.median(v) for name, v in times.items()}
    row["saved"] = {name: saved_bytes(module, x) for name, module in built.items()}
    return row


def table(rows: list[dict]) -> list[str]:
    """Markdown rows: ratios of medians."""
    lines = [
        "| dtype | width | tokens | E | plain ms | ours / plain | two passes / plain | grouped / plain | mola / ours "
        "| saved mola / ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ms, kept = row["ms"], row["saved"]
        ratios = [ms[n] / ms["plain"] for n in ("ours", "two passes", "grouped")]
        theirs = [f"{ms['mola'] / ms['ours']:.2f}", f"{kept['mola'] / kept['ours']:.0f}"] if "mola" in ms else ["-", "-"]
        cells = [
            row["dtype"],
            row["d"],
            row["tokens"],
            row["experts"],
            f"{ms['plain']:.1f}",
            *(f"{r:.2f}" for r in ratios),
            *theirs,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def summary(rows: list[dict]) -> list[str]:
    """Say the worst ratio of each kind against what was aimed at."""
    lines = []
    for dtype, most, least in (("fp32", 1.2, 1.5), ("bf16", 1.5, 2.5)):
        part = [r for r in rows if r["dtype"] == dtype]
        if not part:
            continue
        ratios = sorted(r["ms"]["ours"] / r["ms"]["plain"] for r in part)
        lines.append(
            f"- {dtype}: ours / plain LoRA of equal total rank is {statistics.median(ratios):.2f} in the median, "
            f"{ratios[-1]:.2f} at worst (aim {most:g}; {sum(v <= most for v in ratios)} of {len(ratios)} sizes)."
        )
        if "mola" in part[0]["ms"]:
            faster = sorted(r["ms"]["mola"] / r["ms"]["ours"] for r in part)
            kept = sorted(r["saved"]["mola"] / r["saved"]["ours"] for r in part)
            lines.append(
                f"- {dtype}: {statistics.median(faster):.2f} times faster than MoLA's layer in the median, {faster[0]:.2f} "
                f"at least (aim {least:g}; {sum(v >= least for v in faster)} of {len(faster)} sizes); saved activations "
                f"1/{kept[0]:.0f} of MoLA's or less (aim 1/15)."
            )
    return lines


def second_look(rows: list[dict]) -> list[str]:
    """Say what limits bf16 at many experts, from this run's own columns."""
    part = [r for r in rows if r["dtype"] == "bf16" and r["experts"] >= 8]
    if not part:
        return []
    ours, two, sparse = (
        statistics.median(r["ms"][n] / r["ms"]["plain"] for r in part) for n in ("ours", "two passes", "grouped")
    )
    return [
        f"Second look at bf16 with 8 and more experts: {two:.2f} of plain LoRA when the router reads the input in a pass "
        f"of its own, {ours:.2f} in one product with A, {sparse:.2f} grouped by expert. The second pass over the input, and "
        "the second gradient that must be added to the input's, is what a router costs; gate, top-k and softmax work on "
        "`T x E` and `T x E r` numbers. "
        "What remains above 1 is small operators (softmax, top-k, scatter, the spread gate) at 512 tokens, "
        "where a step takes 2-3 ms. The grouped form copies the input k times and loses at every size here; it can only "
        "pay where `E r` is comparable to the width.",
        "",
    ]


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mola", help="checkout of GCYZSL/MoLA; left out, that column is missing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--experts", type=int, nargs="+", default=[2, 5, 8, 10])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mola = mola_class(options.mola) if options.mola else None
    rows = [
        measure(d, tokens, experts, dtype, options.rounds if tokens <= 1024 else max(3, options.rounds // 2), mola)
        for dtype in DTYPES for d in options.widths for tokens in options.tokens for experts in options.experts
    ]  # fmt: skip
    info = Path("/proc/cpuinfo")
    amx = "amx_bf16" in info.read_text() if info.is_file() else "unknown"
    text = ["\n".join(__doc__.split("\n")[4:]).strip(), "", f"1 thread, bf16 in AMX: {amx}", ""]
    if mola:
        text += [
            f"Outputs and all gradients agree with MoLA's layer to {agreement(mola):.1e} "
            "(float64, relative; MoLA computes its softmax in float32).",
            "",
        ]
    text += [*summary(rows), "", *second_look(rows), *table(rows), ""]
    write_section("lora_experts", "Speed and memory of the layer", text, out=options.out, peers=("peft",))


if __name__ == "__main__":
    main()
