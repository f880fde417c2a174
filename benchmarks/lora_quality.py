"""Does a plan of ranks or experts train better than uniform, at equal parameters? Paired over seeds.

    python benchmarks/lora_quality.py run --task mrpc --model MINILM --data-dir DATA --form ranks --rules uniform gain permuted
    python benchmarks/lora_quality.py run --task prose --model demo --data-dir DATA --form experts --rules uniform gain permuted
    python benchmarks/lora_quality.py report

Rules for ranks: uniform, gain (adapter gain, each block damped relative to its own curvature), gain-absolute (one damping for
all blocks), permuted, permuted-absolute, gain-init (uniform ranks started in the gradient's directions), eva, adalora, replan
(uniform, planned again after 30 % of the steps). For experts: uniform, gain, gain-absolute, permuted, permuted-absolute, 2468,
8642, alphalora, layerif.

Tasks: ``cola`` and ``mrpc`` with a classification head on an encoder (the pooler is trained with the head, or nothing is
learned), ``prose`` adapts a causal LM from code to books (three for training, Pride and Prejudice held out). Every run appends
one JSON line to ``benchmarks/results/lora_quality.jsonl`` and is skipped when its line is there, so the command can be stopped
and repeated. The seed sets the head, the adapter's start and the order of the rows; runs of one seed are paired. Base weights
are bf16, adapters float32 under bf16 autocast, no dropout, one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
import torch
from peft import get_peft_model

from layerbudget.blocks import describe, partition
from layerbudget.data.calibration import CalibrationSet
from layerbudget.data.tasks import load_task
from layerbudget.evaluation import statistics
from layerbudget.lora.initialise import initialise_from_gradients
from layerbudget.lora.mixtures import add_experts
from layerbudget.lora.ranks import add_ranks, to_lora_config
from layerbudget.plan import Plan, PlanBlock
from layerbudget.program import allocate, round_capacity, rules
from layerbudget.records import write_text

RESULTS = Path(__file__).parent / "results"
BOOKS = ("moby.txt", "war.txt", "sheppard.txt")
HEAD_STEPS = 40


class Classification:
    """CoLA or MRPC on an encoder with a fresh head."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.options = options
        self.task = load_task(options.task, options.data_dir).limited(options.train_limit)
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.extra = {"task_type": "SEQ_CLS", "modules_to_save": ["pooler"]}
        self.train = self._encode(self.task.train)
        self.held = {k: self._encode(v) for k, v in self.task.evaluation.items()}
        self.exclude = "pooler|classifier"

    def _encode(self, rows):
        pairs = [r.pair for r in rows] if rows[0].pair else None
        coded = self.tokenizer([r.text for r in rows], pairs, truncation=True, max_length=self.options.length)["input_ids"]
        return [(torch.tensor(c), r.label) for c, r in zip(coded, rows, strict=True)]

    def model(self, seed: int) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.options.model, num_labels=len(self.task.labels), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        return model.eval()

    def batch(self, rows):
        longest = max(len(c) for c, _ in rows)
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
        for i, (c, _) in enumerate(rows):
            ids[i, : len(c)] = c
        labels = torch.tensor([label for _, label in rows])
        return {"input_ids": ids, "attention_mask": (ids != self.tokenizer.pad_token_id).long(), "labels": labels}

    def batches(self, seed: int, epoch: int):
        """Rows of similar length together, batches in a seeded order."""
        generator = np.random.default_rng([seed, epoch])
        noise = generator.random(len(self.train)) * 4
        order = np.argsort([len(c) for c, _ in self.train] + noise)
        starts = generator.permutation(np.arange(0, len(order), self.options.batch))
        for start in starts:
            yield self.batch([self.train[i] for i in order[start : start + self.options.batch]])

    def calibration(self, samples: int = 128) -> CalibrationSet:
        rows = [self.train[i] for i in np.random.default_rng(0).permutation(len(self.train))[:samples]]
        batch = self.batch(rows)
        return CalibrationSet(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"], source=self.task.name
        )

    def warm(self, model: torch.nn.Module) -> None:
        """Give the fresh head a direction before gradients are measured through it (pooler and classifier only)."""
        head = [p for n, p in model.named_parameters() if "pooler" in n or "classifier" in n]
        optimizer = torch.optim.AdamW(head, lr=1e-3)
        for step, batch in enumerate(self.batches(1234, 0)):
            if step == HEAD_STEPS:
                break
            with torch.no_grad():
                mask = batch["attention_mask"]
                hidden = model.base_model.encoder(
                    model.base_model.embeddings(batch["input_ids"]), attention_mask=_additive(mask)
                ).last_hidden_state
            logits = model.classifier(model.base_model.pooler(hidden))
            torch.nn.functional.cross_entropy(logits, batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> dict:
        result: dict = {"predictions": {}, "labels": {}}
        losses, scores = [], []
        for split, rows in self.held.items():
            order = np.argsort([len(c) for c, _ in rows])
            predicted = np.zeros(len(rows), dtype=int)
            for start in range(0, len(rows), 64):
                part = order[start : start + 64]
                batch = self.batch([rows[i] for i in part])
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(**batch)
                losses += [float(output.loss)] * len(part)
                predicted[part] = output.logits.float().argmax(-1).numpy()
            labels = [label for _, label in rows]
            metric = statistics.matthews if self.task.metric == "matthews" else statistics.accuracy
            scores.append(metric(labels, predicted))
            result[f"{split}_accuracy"] = statistics.accuracy(labels, predicted)
            result[f"{split}_f1"] = statistics.f1(labels, predicted)
            result[f"{split}_matthews"] = statistics.matthews(labels, predicted)
            result["predictions"][split] = "".join(map(str, predicted))
            result["labels"][split] = "".join(map(str, labels))
        return {**result, "loss": float(np.mean(losses)), "score": float(np.mean(scores))}


def _additive(mask: torch.Tensor) -> torch.Tensor:
    return (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min


class Prose:
    """A causal LM of code, adapted to books."""

    def __init__(self, options: argparse.Namespace) -> None:
        from layerbudget.loading import load_model, load_tokenizer

        self.options, self.load = options, load_model
        self.tokenizer = load_tokenizer(options.model)
        self.extra = {"task_type": "CAUSAL_LM"}
        self.exclude = "lm_head|embed"
        books = Path(options.data_dir) / "books"
        self.train = torch.cat([self._rows(books / name, options.train_limit or 1024) for name in BOOKS])
        self.held = self._rows(books / "pride.txt", 64)

    def _rows(self, path: Path, count: int) -> torch.Tensor:
        text = path.read_text(encoding="utf-8-sig")[20000 : 20000 + count * self.options.length * 8]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        count = min(count, len(ids) // self.options.length)
        return torch.tensor(ids[: count * self.options.length]).view(count, self.options.length)

    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return self.load(self.options.model)

    def batches(self, seed: int, epoch: int):
        order = np.random.default_rng([seed, epoch]).permutation(len(self.train))
        for start in range(0, len(order) - self.options.batch + 1, self.options.batch):
            ids = self.train[order[start : start + self.options.batch]]
            yield {"input_ids": ids, "labels": ids}

    def calibration(self, samples: int = 64) -> CalibrationSet:
        rows = np.random.default_rng(0).permutation(len(self.train))[:samples]
        return CalibrationSet(input_ids=self.train[rows], source="books")

    def warm(self, model: torch.nn.Module) -> None:
        """Nothing to do: the model has its head."""

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> dict:
        losses = []
        for ids in self.held.split(16):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids).logits
            each = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none"
            ).mean(-1)  # fmt: skip
            losses += each.tolist()
        return {"losses": [round(v, 5) for v in losses], "loss": float(np.mean(losses)), "score": -float(np.mean(losses))}


def scores_for(bench, form: str, rule: str, cache: dict):
    """Score the model once per kind of score; blocks are Linears for ranks, layers for experts."""
    from layerbudget.scores.adapter_space import accumulated_gradients, score_adapter

    kinds = {"alphalora": "spectral", "layerif": "layerif", "gain-init": "gradients"}
    kind = kinds.get(rule, "absolute" if rule.endswith("-absolute") else "gain")
    key = (form, kind)
    if key not in cache:
        model = bench.model(0).float()
        bench.warm(model)
        blocks = partition(model, "linear" if form == "ranks" else "layer", exclude=bench.exclude)
        data = bench.calibration()
        if kind == "spectral":
            from layerbudget.scores.spectral import spectral_tail

            cache[key] = spectral_tail(model, None, blocks)
        elif kind == "layerif":
            from layerbudget.scores.influence import score_layerif

            half = len(data) // 2
            cache[key] = score_layerif(model, data.select(slice(0, half)), blocks, validation=data.select(slice(half, None)))
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
            weights = rules.permuted(weights, seed) if rule.startswith("permuted") else weights
            solution = allocate(weights, cost, options.rank * cost.sum(), upper=4.0 * options.rank, rule="exactly")
            counts = round_capacity(solution).counts
        unit, spent = "parameters", int(cost @ counts)
    else:
        total = options.experts * len(blocks)
        counts, unit, spent = expert_counts(bench, rule, seed, len(blocks), total, cache), "experts", total
    return Plan(
        kind=form, rule=rule, model=describe(model), hyperparameters={"expert_rank": 8},
        budget={"unit": unit, "limit": spent, "spent": spent},
        blocks=tuple(
            PlanBlock(name=b.name, value=float(c), count=int(c), numel=b.numel, modules=tuple(m.name for m in b.modules))
            for b, c in zip(blocks, counts, strict=True)
        ),
    )  # fmt: skip


def expert_counts(bench, rule: str, seed: int, layers: int, total: int, cache: dict) -> np.ndarray:
    """Experts per layer by a rule, at least one each."""
    if rule == "uniform":
        return np.full(layers, total // layers)
    if rule in ("2468", "8642"):
        return rules.mola_experts(layers, rule, total)
    scores = scores_for(bench, "experts", rule, cache)
    if rule == "alphalora":
        return rules.alphalora_experts(scores.values(), total)
    if rule == "layerif":
        return rules.layerif_experts(scores.values(), total)
    weights = scores.weights()
    weights = rules.permuted(weights, seed) if rule.startswith("permuted") else weights
    return round_capacity(allocate(weights, np.ones(layers), total, base=1.0, rule="exactly")).counts


def adapted(bench, form: str, rule: str, seed: int, options: argparse.Namespace, cache: dict):
    """A model with its adapters, bf16 base and float32 adapters, and the plan's counts."""
    plan = plan_for(bench, form, "uniform" if rule in ("eva", "adalora", "gain-init", "replan") else rule, seed, options, cache)
    model = bench.model(seed)
    head = {n: p.detach().clone() for n, p in model.named_parameters() if "pooler" in n or "classifier" in n}
    torch.manual_seed(seed)
    if form == "experts":
        wrapped = add_experts(model, plan, validate=False, lora_alpha=16, **bench.extra)
    elif rule == "adalora":
        wrapped = _adalora(model, plan, options, bench)
    elif rule == "eva":
        wrapped = _eva(model, plan, bench)
    else:
        wrapped = add_ranks(model, plan, validate=False, **bench.extra)
        if rule == "gain-init":
            initialise_from_gradients(wrapped, scores_for(bench, form, rule, cache))
    for parameter in wrapped.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data.bfloat16()
    del head
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
        init_r=int(options.rank * 1.5), target_r=options.rank, tinit=options.steps // 10 or 1, tfinal=options.steps // 3 or 1,
        deltaT=5, total_step=options.steps, lora_alpha=2 * options.rank, target_modules=targets, **bench.extra,
    )  # fmt: skip
    return get_peft_model(model, config)


def train(bench, form: str, rule: str, seed: int, options: argparse.Namespace, cache: dict) -> dict:
    """One run: adapt, train, evaluate."""
    start = time.process_time()
    model, counts = adapted(bench, form, rule, seed, options, cache)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0)
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
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            if rule == "adalora":
                model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
            if rule == "replan" and step == int(0.3 * options.steps):
                counts = replan(bench, model, optimizer, form, seed, options)
                trained = [p for p in model.parameters() if p.requires_grad]
            history.append(float(loss.detach()))
            step += 1
        epoch += 1
    model.eval()
    number = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and "lora_" in n)
    return {
        "task": options.task, "form": form, "rule": rule, "seed": seed, "steps": options.steps, "adapter_parameters": number,
        "counts": counts, "train_loss": float(np.mean(history[-20:])), "cpu_seconds": round(time.process_time() - start, 1),
        "lr": options.lr, "batch": options.batch, "length": options.length, "rows": len(bench.train), **bench.evaluate(model),
    }  # fmt: skip


def replan(bench, model, optimizer, form: str, seed: int, options: argparse.Namespace) -> list[int]:
    """Move capacity once, to where the optimiser's own moments see gain."""
    from layerbudget.lora.replan import adapter_leaves, replanned, resize, tracked_gains

    plan = plan_for(bench, form, "uniform", seed, options, {})
    shapes = {n: (leaf["A"].in_features, leaf["B"].out_features) for n, leaf in adapter_leaves(model).items()}
    counts = replanned(plan, tracked_gains(model, optimizer), shapes, 1 if form == "ranks" else 2)
    resize(model, optimizer, counts)
    return list(counts.values())


def key_of(row: dict) -> tuple:
    """What identifies a run."""
    return tuple(row[k] for k in ("task", "form", "rule", "seed", "steps", "lr", "batch", "length", "rows"))


def run(options: argparse.Namespace) -> None:
    """Run what is missing, seed by seed, so that what is complete is paired."""
    torch.set_num_threads(1)
    bench = Prose(options) if options.task == "prose" else Classification(options)
    path = Path(options.results)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {key_of(json.loads(line)) for line in path.read_text().splitlines()} if path.exists() else set()
    cache: dict = {}
    for seed in options.seeds:
        for rule in options.rules:
            wanted = {**vars(options), "rule": rule, "seed": seed, "rows": len(bench.train)}
            if key_of(wanted) in done:
                continue
            row = train(bench, options.form, rule, seed, options, cache)
            with path.open("a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
            print(
                f"{row['task']} {row['form']} {rule} seed {seed}: score {row['score']:.4f} loss {row['loss']:.4f}", flush=True
            )


def report(options: argparse.Namespace) -> None:
    """Tables of means, standard errors and paired tests against uniform."""
    rows = [json.loads(line) for line in Path(options.results).read_text().splitlines()]
    groups: dict[tuple, dict[str, dict[int, dict]]] = {}
    for row in rows:
        setting = (row["task"], row["form"], row["steps"], row["lr"], row["batch"], row["length"], row["rows"])
        groups.setdefault(setting, {}).setdefault(row["rule"], {})[row["seed"]] = row
    text = [
        "# Plans of ranks and experts against uniform, paired over seeds",
        "",
        __doc__.split("\n\n", 2)[2].replace("\n", " "),
        "",
    ]
    text += [f"Python {platform.python_version()}, torch {torch.__version__}, CPU, one thread per run.", ""]
    summary = []
    for setting, by_rule in groups.items():
        task, form, steps, lr, batch, length, count = setting
        unit = {"mrpc": "accuracy", "cola": "mean Matthews of both dev sets", "prose": "nats"}[task]
        text += [
            f"## {task}, {form}",
            "",
            f"{steps} steps of {batch} rows out of {count}, at most {length} tokens, lr {lr:g}.",
            "",
        ]
        text += [
            f"| rule | seeds | adapter parameters | {unit} | held-out loss | p against uniform (score, loss) |",
            "|---|---|---|---|---|---|",
        ]
        sentences = []
        for rule, runs in by_rule.items():
            score, loss = (
                statistics.mean_and_error([abs(r[k]) if k == "loss" else r[k] for r in runs.values()])
                for k in ("score", "loss")
            )
            tests = _against_uniform(by_rule, rule)
            entry = {
                "task": task,
                "form": form,
                "rule": rule,
                "seeds": len(runs),
                "score": score,
                "loss": loss,
                "setting": setting,
            }
            summary.append({**entry, **{k: vars(v) for k, v in tests.items()}})
            cells = [f"{m:.4f}" + (f" ± {e:.4f}" if e is not None else "") for m, e in (score, loss)]
            p = ", ".join(f"{t.p:.2g}" for t in tests.values()) or "-"
            number = sorted({r["adapter_parameters"] for r in runs.values()})
            text.append(f"| {rule} | {len(runs)} | {number[0]:,} | {cells[0]} | {cells[1]} | {p} |")
            sentences += [f"- {k}: {t.sentence(rule, 'uniform')}" for k, t in tests.items()]
        text += ["", *sentences, ""]
    write_text(RESULTS / "lora_quality.md", "\n".join(text) + "\n", overwrite=True)
    write_text(RESULTS / "lora_quality.json", json.dumps(summary, indent=1, default=list) + "\n", overwrite=True)
    print("\n".join(text))


def _against_uniform(by_rule: dict, rule: str) -> dict:
    if rule == "uniform" or "uniform" not in by_rule:
        return {}
    shared = sorted(set(by_rule[rule]) & set(by_rule["uniform"]))
    if len(shared) < 2:
        return {}
    return {k: statistics.paired_t(*([by_rule[r][s][k] for s in shared] for r in (rule, "uniform"))) for k in ("score", "loss")}


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("run", "report"))
    parser.add_argument("--task", choices=("cola", "mrpc", "prose"), default="mrpc")
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
    parser.add_argument("--results", default=str(RESULTS / "lora_quality.jsonl"))
    options = parser.parse_args()
    (run if options.verb == "run" else report)(options)


if __name__ == "__main__":
    main()
