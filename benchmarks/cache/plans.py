"""Plans of the cache by directional damage, beside one format for all, first and last layers kept, and singly measured damage.

    python -m benchmarks.cache plans MODEL [--data FILE] [--evaluation FILE] [--length 1024] [--samples 6] [--check 4]
        [--windows 6] [--measure 2x512] [--dtype float32] [--out FOLDER]

Budgets are the bytes of ``int2``, ``int3`` and ``int4`` everywhere, at the length of the windows. Every plan is run on held-out
text with all keys and values rounded. ``--measure SEQUENCESxLENGTH`` also measures every layer, part and format by itself, on so
much of the calibration text, and plans by that: what prediction is worth. ``attention error`` gives the sensitivities of KVTuner
to the same program. ``plan`` is what ``plan cache`` takes of ``directional``, ``uniform`` and ``protect-ends`` after its check, on windows
that are neither the ones that decide nor those of the table. Menus: what HQQ keeps (2, 3, 4 and 8 bits, in groups of 64 and less), that in one size of groups, and five and six
bits too, which no cache keeps yet. Passes are forward equivalents over the whole text.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.decisions.bits.plan import describe_rows
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.cache.cache import PlannedCache, caching, read_back, rounding
from layerbudget.decisions.cache.plan import cache_space
from layerbudget.decisions.cache.sensitivity import cache_damage
from layerbudget.decisions.cache.space import CacheSpace
from layerbudget.decisions.formats.baselines import BASELINES
from layerbudget.decisions.formats.table import FormatTable
from layerbudget.models.blocks import layers
from layerbudget.sensitivity.sequences import per_token
from layerbudget.solvers.choices import choose

MENUS = {"": 2, ", one size of groups": 1, ", 2, 3, 4 and 8 bits": 0}


def measured(model: Any, data: Any, space: CacheSpace) -> tuple[np.ndarray, int]:
    """Damage of every block in every format alone, all else as it is, and the forwards that this took."""
    dense = DenseOutput(model, data, 1)
    damage, forwards = np.zeros((len(space.blocks), len(space.formats))), 1
    plain = np.full(len(space.blocks), len(space.formats) - 1)
    for i in range(len(space.blocks)):
        for j in range(len(space.formats) - 1):
            chosen = plain.copy()
            chosen[i] = j
            damage[i, j] = kl_of(model, dense, space, chosen)
            forwards += 1
    return damage, forwards


def attention_errors(model: Any, data: Any, space: CacheSpace) -> np.ndarray:
    """Relative squared error of a layer's attention output when its keys, or its values, alone are in a format, ``(K, m)``.

    These are the sensitivities of KVTuner (arXiv 2502.04420); here one exact program chooses by them, where KVTuner searches.
    """
    where = {(k.layer, k.part): i for i, each in enumerate(space.members) for k in each}
    error, handles = np.zeros((len(space.blocks), len(space.formats))), []
    plain = {layer: (space.formats[-1], space.formats[-1]) for layer, part in where}

    def listen(layer: int) -> Any:
        def run(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            for part, (j, form) in itertools.product((0, 1), enumerate(space.formats[:-1])):

                def change(_: int, keys: Any, values: Any, part: int = part, form: Any = form) -> Any:
                    return (read_back(keys, form, 0), values) if part == 0 else (keys, read_back(values, form, 1))

                own = {**kwargs, "past_key_values": PlannedCache(model.config, change)}
                off = module.forward(*args, **own)[0] - out[0]
                error[where[layer, part], j] += float(off.square().sum() / out[0].square().sum()) / data.samples

        return run

    for n, (_, layer) in enumerate(layers(model)):
        handles.append(layer.self_attn.register_forward_hook(listen(n), with_kwargs=True))
    try:
        with torch.no_grad(), caching(model, rounding(plain)):
            for ids in data.input_ids:
                model(input_ids=ids[None])
    finally:
        for handle in handles:
            handle.remove()
    return error


def kl_of(model: Any, dense: DenseOutput, space: CacheSpace, chosen: np.ndarray) -> float:
    """KL per token of a choice with the cache really rounded."""
    with caching(model, rounding(space.by_layer(chosen))):
        return per_token(*dense.rows(model)[:, :2].T)[0]


def menu(table: FormatTable, name: str) -> FormatTable:
    """The same with some formats alone: those of one size of groups, or those without five and six bits."""
    no = np.array([("-g" in n and MENUS[name] == 1) or (n in ("int5", "int6") and MENUS[name] < 1) for n in table.formats])
    return dataclasses.replace(table, damage=np.where(no, np.inf, table.damage), size=np.where(no, 0, table.size))


def agreement(predicted: np.ndarray, found: np.ndarray) -> str:
    """Predicted over measured in the median, and how well logarithms agree."""
    there = (predicted > 0) & (found > 0)
    p, q = np.log(predicted[there]), np.log(found[there])
    return (
        f"{math.exp(np.median(p - q)):.2f} in the median, log correlation {np.corrcoef(p, q)[0, 1]:.3f}, {there.sum()} of them"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--evaluation")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--check", type=int, default=4)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--group", type=int)
    parser.add_argument("--measure")
    parser.add_argument("--dtype", default="float32", help="precision of the model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    tokenizer, model, name = lb.load_tokenizer(a.model), lb.load_model(a.model, dtype=a.dtype), a.name or Path(a.model).name
    text = lb.calibration(a.data, tokenizer, samples=a.samples + a.check, length=a.length)
    fit, other = text.select(slice(0, a.samples)), text.select(slice(a.samples, None))
    held = lb.evaluation_set(a.evaluation or a.data, tokenizer, length=a.length)
    step = max(1, held.samples // a.windows)
    check = held.select(list(range(0, held.samples, step))[: a.windows])
    space = cache_space(model, a.length, group=a.group)
    start = time.process_time()
    damage, rest, passes = cache_damage(model, fit, space, a.draws)
    table = space.table(damage, rest)
    lines = [
        f"{a.samples} x {a.length} calibration tokens, {a.check} windows that check, {check.samples} held-out windows of {a.length}; "
        f"{len(space.blocks)} blocks, groups of {space.formats[0].group}; damages in {time.process_time() - start:.0f} s of one "
        f"core. The model is in {a.dtype}; +- is one standard error, paired by window.", "",
    ]  # fmt: skip
    tuner = space.table(attention_errors(model, fit, space), rest)
    tables = {"directional": (table, passes), "attention error": (tuner, 1.0)}
    if a.measure:
        count, length = map(int, a.measure.split("x"))
        some = dataclasses.replace(fit.select(slice(0, count)), input_ids=fit.input_ids[:count, :length])
        single, forwards = measured(model, some, space)
        beside = cache_damage(model, some, space, a.draws)[0]
        lines += [f"Predicted over measured, each by itself on {a.measure} tokens: {agreement(beside, single)}.", ""]
        tables["measured"] = (space.table(single, rest), float(forwards))
    dense, checked = DenseOutput(model, check, 1), DenseOutput(model, other, 1)
    own = describe_rows(dense.rows(model))
    lines += [f"Dense perplexity {own['perplexity']:.3f}.", ""]
    lines += ["| bytes of | plan | bits | KL | against uniform | perplexity | predicted | passes |", "|" + "---|" * 8]
    for level in [f.name for f in space.formats if f.name in ("int2", "int3", "int4")]:
        limit = int(table.size[:, table.formats.index(level)].sum())
        if level == "int2":  # half way to the next: at its own bytes nothing is left to choose
            limit = (limit + int(table.size[:, table.formats.index("int3")].sum())) // 2
        plain = menu(table, ", one size of groups")
        plans = {n: (BASELINES[n](plain, limit), 0.0) for n in ("uniform", "protect-ends")}
        for n, (t, p) in tables.items():
            some = {words: menu(t, words) for words in (MENUS if n != "attention error" else ("",))}
            plans |= {n + words: (choose(m.damage, m.size, limit).chosen, p) for words, m in some.items()}
        kl = {n: kl_of(model, checked, space, plans[n][0]) for n in ("directional", "uniform", "protect-ends")}
        taken = min(kl, key=kl.__getitem__)
        plans["plan" if taken == "directional" else f"plan: {taken}"] = plans[taken][0], passes
        rows: dict[str, np.ndarray] = {}
        seen: dict[bytes, np.ndarray] = {}
        for plan, (chosen, cost) in plans.items():
            key = chosen.tobytes()
            if key not in seen:
                with caching(model, rounding(space.by_layer(chosen))):
                    seen[key] = dense.rows(model)
            rows[plan] = seen[key]
            found = describe_rows(rows[plan], None if plan == "uniform" else rows["uniform"])
            k = np.arange(len(chosen))
            less = "" if plan == "uniform" else f"{found['kl'] / describe_rows(rows['uniform'])['kl'] - 1:+.0%}"
            less += f" ({found['difference']:+.2g} +- {found['difference_error']:.1g})" if less else ""
            said = f"{table.damage[k, chosen].sum():.4g}" if plan.startswith(("directional", "plan")) else ""
            bits = 8 * table.size[k, chosen].sum() / table.numel
            head = f"{level}{' and a half' if level == 'int2' else ''}"
            lines.append(
                f"| {head} | {plan} | {bits:.3f} | {found['kl']:.5f} | {less} | {found['perplexity']:.3f} | {said} | {cost:g} |"
            )
            print(lines[-1], flush=True)
    write_section("cache", f"Plans of the cache: {name}, {a.length} tokens", lines, out=a.out)


if __name__ == "__main__":
    main()
