"""Does a plan of ranks or experts train better than uniform, at equal parameters? Paired over seeds.

    python -m benchmarks.ranks training run --task mrpc --model MINILM --data-dir DATA --form ranks --rules uniform gain permuted
    python -m benchmarks.ranks training run --task prose --model demo --data-dir DATA --form lora-experts --rules uniform gain permuted
    python -m benchmarks.ranks training report
    python -m benchmarks.ranks training rates --name ranks_rates

Rules for ranks: uniform; gain (adapter gain, each block damped relative to its own curvature); gain-absolute (one damping for
all blocks, the default of ``score --estimator adapter``); permuted and permuted-absolute (their scores in random order);
by-rank (K-FAC gain of every further rank), by-rank-plain (the same without curvature: the tables keep it, the package does
not), by-rank-permuted (its curves in random order), by-rank-shuffled (its ranks in random order among modules of equal cost),
equal-parameters (every module the same number); gain-init (uniform ranks started in the gradient's directions, rows of A as
long as PEFT's), gain-init-unit (rows of length 1, as EVA's) and gain-init-matched (rows whose outputs are as large as those of
PEFT's own, as the package does); gain-absolute-init-unit (both: planned ranks, started so); eva; adalora; replan (uniform, planned
again after 30 % of the steps: the tables keep it, the package does not, since a plan at the start gains more); none (the
model as it is). ``rule+policy`` is the rule with scales that follow the rank
(``rslora``, ``constant-alpha``: all alike at the mean rank), ``rule@rate`` the rule at a learning rate of its own, chosen on
seed 9, which no table holds (the learning rates of ranks.md). For experts: uniform, gain, gain-absolute, permuted, permuted-absolute, 2468,
8642, alphalora, layerif.

Tasks: ``cola`` and ``mrpc`` with a classification head on an encoder (the pooler is trained with the head, or nothing is
learned), ``prose`` adapts a causal LM from code to books (three for training, Pride and Prejudice held out), ``code`` a causal
LM of books (``benchmarks.train_second_model``) to the standard library. Every run appends
one row to ``results/rows/NAME.jsonl`` and is skipped when its line is there, so the command can be stopped
and repeated. The seed sets the head, the adapter's start and the order of the rows; runs of one seed are paired. Base weights
are bf16 (``--dtype``), adapters float32 under bf16 autocast, no dropout, one thread. Attention is eager (``--attention``): the bf16
backward of the CPU's fused kernel takes half of a step; lines without the field were made with ``sdpa``. AdaLoRA's budget is
a total of ranks and it keeps more of them in the small modules, so its mean rank is set to 9/8 of uniform's (it starts at 1.7
of it); its parameters are counted after training, over what it kept: on prose at rank 8 it has 17 % more than the others.

Rates. All rules of a table share one learning rate, and a rule whose own best rate differs also runs at that (``rule@rate``).
It matters more than any rule: AdaLoRA at the common rate hardly leaves its start (zero singular values between factors of
0.02), and at a rate below uniform's best every rule that makes the first steps larger (higher ranks where gradients are
large, a start of its own) looks better than it is. The older prose tables have that flaw and are marked; they stay because
they show its size. Rates were chosen by uniform's loss on seed 9. ``by-rank-init-unit+rslora`` joined the tables last, after
seeds 0 to 4 of the others had been seen; seeds 5 to 8 came after it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.ranks.report import write_rates, write_report
from benchmarks.ranks.tasks import Classification, Code, Prose
from benchmarks.stamp import RESULTS, keep_row, read_rows
from peft import get_peft_model

from layerbudget.decisions.lora_experts.method import add_lora_experts
from layerbudget.decisions.ranks.apply import add_ranks, lora_layers, to_lora_config
from layerbudget.decisions.ranks.payload import RanksPayload
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.decisions.ranks.start import initialise_from_gradients
from layerbudget.decisions.rules import shuffled as order_of
from layerbudget.models.blocks import describe, partition
from layerbudget.plan import Plan, PlanBlock, payload_of
from layerbudget.solvers import allocate, published, round_capacity

UNIFORM = ("eva", "adalora", "gain-init", "gain-init-unit", "gain-init-matched")  # these begin with uniform ranks


def scores_for(bench, form: str, rule: str, cache: dict):
    """Score the model once per kind of score; blocks are Linears for ranks, layers for experts."""
    from layerbudget.sensitivity.adapter_space import accumulated_gradients, score_adapter
    from layerbudget.sensitivity.rank_gain import score_rank_gain

    kinds = {"alphalora": "spectral", "layerif": "layerif", "gradients": "gradients"}
    kinds |= dict.fromkeys(("by-rank", "by-rank-permuted", "by-rank-shuffled"), "rank-gain")
    kind = kinds.get(rule, "absolute" if rule.endswith("-absolute") else "gain")
    key = (form, kind)
    if key not in cache:
        model = bench.model(0).float()
        bench.warm(model)
        blocks = partition(model, "linear" if form == "ranks" else "layer", exclude=bench.exclude)
        data = bench.calibration()
        if kind == "spectral":
            from layerbudget.sensitivity.baselines import spectral_tail

            cache[key] = spectral_tail(model, None, blocks)
        elif kind == "layerif":
            from layerbudget.sensitivity.influence import score_layerif

            half = len(data) // 2
            cache[key] = score_layerif(model, data.select(slice(0, half)), blocks, validation=data.select(slice(half, None)))
        elif kind == "rank-gain":
            cache[key] = score_rank_gain(model, data, blocks)
        elif kind == "gradients":
            cache[key] = accumulated_gradients(model, data, [m.name for b in blocks for m in b.modules])
        else:
            cache[key] = score_adapter(model, data, blocks, rank=8, replicates=20)
            if kind == "absolute":  # one damping for all blocks, the median of their largest eigenvalues
                tau = float(np.median(cache[key].extra["largest_eigenvalue"]))
                cache[key] = score_adapter(
                    model, data, blocks, rank=8, replicates=20, damping=[tau], damping_unit="absolute"
                )  # fmt: skip
    return cache[key]


def plan_for(bench, form: str, rule: str, seed: int, options: argparse.Namespace, cache: dict) -> Plan:
    """Uniform, or a plan from scores, at equal parameters (ranks) or equal total (experts)."""
    model = bench.model(0)
    blocks = partition(model, "linear" if form == "ranks" else "layer", exclude=bench.exclude)
    if form == "ranks":
        cost = np.array([b.modules[0].d_in + b.modules[0].d_out for b in blocks], dtype=float)
        counts = np.full(len(blocks), options.rank)
        if rule in ("gain", "gain-absolute", "permuted", "permuted-absolute"):
            weights = scores_for(bench, form, rule, cache).weights()
            weights = weights[order_of(weights.size, seed)] if rule.startswith("permuted") else weights
            solution = allocate(weights, cost, options.rank * cost.sum(), upper=4.0 * options.rank, spend="exactly")
            counts = round_capacity(solution).counts
        elif rule.startswith("by-rank"):
            kind = "by-rank-permuted" if rule.endswith("permuted") else "by-rank"
            control = {"seed": seed} if rule.endswith("permuted") else {}
            plan = plan_ranks(scores_for(bench, form, rule, cache), mean_rank=options.rank, rule=kind, **control)
            counts, said = plan.counts, payload_of(plan, RanksPayload)
            cache["said", rule] = {"uniform_share": said.uniform_share, "noise_share": said.noise_share}
            if rule == "by-rank-shuffled":
                counts = shuffled(counts, cost, seed)
        elif rule == "equal-parameters":
            counts = round_capacity(allocate(np.ones(len(cost)), cost, options.rank * cost.sum(), spend="exactly")).counts
        unit, spent = "parameters", int(cost @ counts)
    else:
        total = options.experts * len(blocks)
        counts, unit, spent = expert_counts(bench, rule, seed, len(blocks), total, cache), "experts", total
    return Plan(
        kind="lora-experts" if form == "experts" else form, rule=rule, model=describe(model), hyperparameters={"expert_rank": 8},
        budget={"unit": unit, "limit": spent, "spent": spent},
        blocks=tuple(
            PlanBlock(name=b.name, value=float(c), count=int(c), numel=b.numel, modules=tuple(m.name for m in b.modules))
            for b, c in zip(blocks, counts, strict=True)
        ),
    )  # fmt: skip


def shuffled(counts: np.ndarray, cost: np.ndarray, seed: int) -> np.ndarray:
    """Permute ranks among modules of equal cost: what remains is how much each kind of module gets, not which layer."""
    counts, generator = counts.copy(), np.random.default_rng(seed)
    for size in np.unique(cost):
        same = np.flatnonzero(cost == size)
        counts[same] = generator.permutation(counts[same])
    return counts


def expert_counts(bench, rule: str, seed: int, layers: int, total: int, cache: dict) -> np.ndarray:
    """Experts per layer by a rule, at least one each."""
    if rule == "uniform":
        return np.full(layers, total // layers)
    if rule in ("2468", "8642"):
        return published.mola_experts(layers, rule, total)
    scores = scores_for(bench, "lora-experts", rule, cache)
    if rule == "alphalora":
        return published.alphalora_experts(scores.values(), total)
    if rule == "layerif":
        return published.layerif_experts(scores.values(), total)
    weights = scores.weights()
    weights = weights[order_of(weights.size, seed)] if rule.startswith("permuted") else weights
    return round_capacity(allocate(weights, np.ones(layers), total, base=1.0, spend="exactly")).counts


def adapted(bench, form: str, rule: str, seed: int, options: argparse.Namespace, cache: dict):
    """A model with its adapters, bf16 base and float32 adapters, and the plan's counts."""
    rule, _, policy = rule.partition("+")
    planned = "uniform" if rule in UNIFORM else rule.removesuffix("-init-unit").removesuffix("-init-matched")
    plan = plan_for(bench, form, planned, seed, options, cache)
    model = bench.model(seed)
    torch.manual_seed(seed)
    if form == "lora-experts":
        wrapped = add_lora_experts(model, plan, validate=False, lora_alpha=16, **bench.extra)
    elif rule == "adalora":
        wrapped = _adalora(model, plan, options, bench)
    elif rule == "eva":
        wrapped = _eva(model, plan, bench)
    else:
        wrapped = add_ranks(model, plan, validate=False, alpha_policy=policy or "constant-ratio", **bench.extra)
        if rule.endswith(("-init", "-init-unit", "-init-matched")):
            near = (
                [batch for batch, _ in zip(bench.batches(77, 0), range(4), strict=False)] if rule.endswith("-matched") else []
            )
            initialise_from_gradients(wrapped, scores_for(bench, form, "gradients", cache), near)
            for module in lora_layers(wrapped).values() if rule.endswith("-unit") else ():
                module.lora_A["default"].weight.data *= 3**0.5
    for parameter in wrapped.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else getattr(torch, options.dtype))
    return wrapped, [b.count for b in plan.blocks]


def _eva(model, plan, bench):
    from peft import EvaConfig, initialize_lora_eva_weights

    config = to_lora_config(plan, init_lora_weights="eva", eva_config=EvaConfig(rho=2.0), **bench.extra)
    wrapped = get_peft_model(model, config)
    data = [{k: v for k, v in b.items() if k != "labels"} for b, _ in zip(bench.batches(77, 0), range(24), strict=False)]
    initialize_lora_eva_weights(wrapped, data, show_progress_bar=False)
    return wrapped


def _adalora(model, plan, options, bench):
    from peft import AdaLoraConfig

    targets = [b.name for b in plan.blocks]
    config = AdaLoraConfig(
        init_r=int(options.rank * 1.7), target_r=int(options.rank * 1.125), tinit=options.steps // 10 or 1,
        tfinal=options.steps // 3 or 1, deltaT=5, total_step=options.steps, lora_alpha=2 * options.rank,
        target_modules=targets, **bench.extra,
    )  # fmt: skip
    return get_peft_model(model, config)


def kept_ranks(model) -> tuple[int, list[int]]:
    """Parameters and ranks per module that AdaLoRA did not mask: one column of A, one row of B, one singular value each."""
    triplets = {n: p for n, p in model.named_parameters() if "lora_E" in n}
    shapes = dict(model.named_parameters())
    counts = [int((p != 0).sum()) for p in triplets.values()]
    sizes = [shapes[n.replace("lora_E", "lora_A")].shape[1] + shapes[n.replace("lora_E", "lora_B")].shape[0] for n in triplets]
    return sum(c * (s + 1) for c, s in zip(counts, sizes, strict=True)), counts


def train(bench, form: str, rule: str, seed: int, options: argparse.Namespace, cache: dict) -> dict:
    """One run: adapt, train, evaluate. ``rule@rate`` trains the rule at a rate of its own."""
    start, name = time.process_time(), rule
    rule, _, rate = rule.partition("@")
    if rule == "none":
        plain = bench.model(seed).to(getattr(torch, options.dtype))
        return {**_setting(bench, form, name, seed, options), "adapter_parameters": 0, "counts": [], **bench.evaluate(plain)}
    model, counts = adapted(bench, form, rule, seed, options, cache)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=float(rate or options.lr), weight_decay=0.0)
    warmup = max(1, int(0.06 * options.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, max(0.0, (options.steps - s) / max(1, options.steps - warmup)))
    )
    model.train()
    step, epoch, history = 0, 0, []
    while step < options.steps:
        for batch in bench.batches(seed, epoch):
            if step == options.steps:
                break
            with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            if rule == "adalora":
                model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
            history.append(float(loss.detach()))
            step += 1
        epoch += 1
    model.eval()
    number = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and "lora_" in n)
    if rule == "adalora":
        number, counts = kept_ranks(model)
    return {
        **_setting(bench, form, name, seed, options), "adapter_parameters": number, "counts": counts,
        "train_loss": float(np.mean(history[-20:])), "cpu_seconds": round(time.process_time() - start, 1),
        **cache.get(("said", rule.partition("+")[0].removesuffix("-init-unit").removesuffix("-init-matched")), {}), **bench.evaluate(model),
    }  # fmt: skip


def _setting(bench, form: str, rule: str, seed: int, options: argparse.Namespace) -> dict:
    fields = {"task": options.task, "form": form, "rule": rule, "seed": seed, "rows": len(bench.train)}
    return fields | {
        k: getattr(options, k) for k in ("steps", "lr", "batch", "length", "attention", "dtype", "rank", "experts")
    }


def key_of(row: dict) -> tuple:
    """What identifies a run."""
    names = ("task", "form", "rule", "seed", "steps", "lr", "batch", "length", "rows")
    size = row.get("rank", 8) if row["form"] == "ranks" else row.get("experts", 5)  # the common ones, before they were written
    return (*(row[k] for k in names), row.get("attention", "sdpa"), row.get("dtype", "bfloat16"), size)


def run(options: argparse.Namespace) -> None:
    """Run what is missing, seed by seed, so that what is complete is paired."""
    torch.set_num_threads(1)
    bench = {"prose": Prose, "code": Code}.get(options.task, Classification)(options)
    done = {key_of(row) for row in read_rows(options.name, options.out)}
    cache: dict = {}
    for seed in options.seeds:
        for rule in options.rules:
            wanted = {**vars(options), "rule": rule, "seed": seed, "rows": len(bench.train)}
            if key_of(wanted) in done:
                continue
            row = train(bench, options.form, rule, seed, options, cache)
            keep_row(options.name, row, options.out)
            print(
                f"{row['task']} {row['form']} {rule} seed {seed}: score {row['score']:.4f} loss {row['loss']:.4f}", flush=True
            )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "report", "rates"))
    parser.add_argument("--task", choices=("cola", "mrpc", "prose", "code"), default="mrpc")
    parser.add_argument("--model", default="demo", help="folder of the model")
    parser.add_argument("--data-dir", help="folder with cola/, mrpc/, books/")
    parser.add_argument("--form", choices=("ranks", "experts"), default="ranks")
    parser.add_argument("--rules", nargs="+", default=["uniform", "gain", "permuted"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=8, help="uniform rank")
    parser.add_argument("--experts", type=int, default=5, help="uniform experts per layer")
    parser.add_argument("--train-limit", type=int)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of base weights and products")
    parser.add_argument(
        "--first", action="store_true", help="rows of prose start with the token that all texts of the model do"
    )
    parser.add_argument("--name", default="ranks", help="of the rows")
    parser.add_argument("--label", default="", help="what the page calls a model other than those of rows named ranks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.verb == "run":
        run(options)
    elif options.verb == "rates":
        write_rates(options.name, options.out)
    else:
        write_report(options.name, options.out, options.label)


if __name__ == "__main__":
    main()
