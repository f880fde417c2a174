"""A planned cache packed by HQQ: bytes that it allocates, KL and seconds beside one format for all, rounded alone and packed.

    python -m benchmarks.cache packed MODEL --data calibration.txt --evaluation evaluation.txt --bits 4.5 [--length 1024]

Held-out windows are read in pieces, as a chat is: later pieces read what the cache holds of earlier ones. Needs the package hqq.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.stamp import RESULTS, write_section
from transformers import DynamicCache

import layerbudget as lb
from layerbudget.decisions.cache.hqq import PackedLayer


def read(model: Any, cache: Any, ids: torch.Tensor, piece: int) -> torch.Tensor:
    """Log probabilities of every position, (T, V), with the cache filled piece by piece."""
    parts = [model(input_ids=ids[:, i : i + piece], past_key_values=cache).logits[0] for i in range(0, ids.shape[1], piece)]
    return torch.log_softmax(torch.cat(parts).float(), -1)


def held(cache: Any) -> int:
    """Bytes of all keys and values, those that are not packed in 16 bits."""
    packed = sum(layer.stored_bytes() for layer in cache.layers if isinstance(layer, PackedLayer))
    return int(packed + sum(2 * t.numel() for layer in cache.layers for t in (layer.keys, layer.values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--evaluation")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--group", type=int)
    parser.add_argument("--bits", type=float, nargs="+", default=[3.0, 3.5, 4.5])
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    tokenizer, model, name = lb.load_tokenizer(a.model), lb.load_model(a.model), a.name or Path(a.model).name
    fit = lb.calibration(a.data, tokenizer, samples=a.samples, length=a.length)
    text = lb.evaluation_set(a.evaluation or a.data, tokenizer, length=a.length)
    text = text.select(list(range(0, text.samples, max(1, text.samples // a.windows)))[: a.windows])
    plans = {}
    for bits in a.bits:
        made = {"context": a.length, "bits": bits, "group": a.group}
        plans[f"one format, {bits:g} bits"] = lb.plan_cache(model, fit, text, rule="uniform", **made)
        plans[f"plan, {bits:g} bits"] = lb.plan_cache(model, fit, text, **made)
    ways = {"16 bits": (None, {})}
    ways |= {f"{n}, {how}": (p, own) for n, p in plans.items() for how, own in (("rounded", {}), ("packed", {"packed": True}))}
    rows: dict[str, list[tuple[float, float, int]]] = {n: [] for n in ways}
    with torch.no_grad():
        for ids in text.input_ids.split(1):
            dense = None
            for each, (plan, own) in ways.items():
                cache = DynamicCache(config=model.config) if plan is None else lb.apply_plan(model, plan, **own).cache
                start = time.process_time()
                found = read(model, cache, ids, a.piece)
                seconds = time.process_time() - start
                dense = found if dense is None else dense
                kl = float((dense.exp() * (dense - found)).sum(-1)[a.piece :].mean())
                rows[each].append((kl, seconds, held(cache)))
    plain = torch.tensor(rows["16 bits"], dtype=torch.float64).mean(0)
    lines = [
        f"{len(text.input_ids)} held-out windows of {a.length} tokens, read in pieces of "
        f"{a.piece}; weights in {str(model.dtype)[6:]}, one thread. A packed cache keeps up to 128 "
        "of the newest tokens as they came.", "",
        "| cache | KL | bytes over 16 bits' | planned | seconds over 16 bits' |", "|" + "---|" * 5,
    ]  # fmt: skip
    sixteen = float(plain[2])
    for each, (plan, _) in ways.items():
        kl, seconds, size = torch.tensor(rows[each], dtype=torch.float64).mean(0).tolist()
        said = "" if plan is None else f"{plan.budget['spent'] / sixteen:.3f}"
        lines.append(f"| {each} | {kl:.5f} | {size / sixteen:.3f} | {said} | {seconds / float(plain[1]):.2f} |")
    write_section("cache", f"A cache that is packed: {name}", lines, out=a.out, peers=("hqq",))


if __name__ == "__main__":
    main()
