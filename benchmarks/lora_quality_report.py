"""Tables and sentences from the lines that ``lora_quality.py`` wrote."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from layerbudget.evaluation import statistics
from layerbudget.records import write_text

RESULTS = Path(__file__).parent / "results"
UNITS = {"mrpc": "accuracy", "cola": "mean Matthews of both dev sets", "prose": "held-out loss, nats"}
Runs = dict[str, dict[int, dict]]
RULES = {
    "ranks": ("uniform", "gain-absolute", "permuted-absolute", "eva", "adalora"),
    "experts": ("uniform", "gain-absolute", "permuted-absolute", "2468", "8642", "alphalora", "layerif"),
}


def write_report(results: str, about: str) -> None:
    """Write means, standard errors and paired tests against uniform, one section per setting."""
    groups: dict[tuple, Runs] = {}
    for line in Path(results).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        setting = tuple(row[k] for k in ("task", "form", "steps", "batch", "rows", "length", "lr"))
        setting += (row.get("attention", "sdpa"), row.get("rank", 8) if row["form"] == "ranks" else row.get("experts", 5))
        groups.setdefault(setting, {}).setdefault(row["rule"], {})[row["seed"]] = row
    text = ["# Plans of ranks and experts against uniform, paired over seeds", "", about.strip(), ""]
    text += [f"Python {platform.python_version()}, torch {torch.__version__}, CPU, one thread per run.", ""]
    summary: list[dict] = []
    for setting, by_rule in groups.items():
        text += _section(setting, by_rule, summary)
    text += _missing(groups)
    write_text(RESULTS / "lora_quality.md", "\n".join(text) + "\n", overwrite=True)
    write_text(RESULTS / "lora_quality.json", json.dumps(summary, indent=1, default=list) + "\n", overwrite=True)
    print("\n".join(text))


def _section(setting: tuple, by_rule: Runs, summary: list[dict]) -> list[str]:
    task, form, steps, batch, count, length, lr, attention, size = setting
    text = [
        f"## {task}, {form}",
        "",
        f"{steps} steps of {batch} rows out of {count}, at most {length} tokens, lr {lr:g}, {attention} attention, uniform {form}: {size}.",
        "",
    ]
    text += [f"| rule | seeds | adapter parameters | {UNITS[task]} | held-out loss | minus uniform | p |"]
    text += ["|---|---|---|---|---|---|---|"]
    sentences = []
    for rule, runs in by_rule.items():
        values = {k: statistics.mean_and_error([r[k] for r in runs.values()]) for k in ("score", "loss")}
        test = _against_uniform(by_rule, rule)
        entry = {"task": task, "form": form, "rule": rule, "seeds": sorted(runs), "setting": setting, **values}
        summary.append({**entry, "against_uniform": vars(test) if test else None})
        score, loss = (f"{m:.4f}" + (f" ± {e:.4f}" if e is not None else "") for m, e in values.values())
        numbers = sorted({f"{r['adapter_parameters']:,}" for r in runs.values()})
        cells = [rule, len(runs), " to ".join(numbers), loss if task == "prose" else score, loss]
        cells += [f"{-test.difference if task == 'prose' else test.difference:+.4f}", f"{test.p:.2g}"] if test else ["", ""]
        text.append("| " + " | ".join(map(str, cells)) + " |")
        if test:
            sentences.append(f"- {test.sentence(rule, 'uniform', 'nats gained' if task == 'prose' else UNITS[task])}")
    return [*text, "", *sentences, ""]


def _missing(groups: dict[tuple, Runs], wanted: int = 5) -> list[str]:
    """Say which comparisons have fewer seeds than they need."""
    lines = ["## Not complete", "", f"Rules with fewer than {wanted} seeds; their rows above, if any, decide nothing.", ""]
    for task in UNITS:
        for form, rules in RULES.items():
            seeds = {r: max((len(g.get(r, {})) for s, g in groups.items() if s[:2] == (task, form)), default=0) for r in rules}
            short = [f"{rule} ({n})" for rule, n in seeds.items() if n < wanted]
            if short:
                lines.append(f"- {task}, {form}: {', '.join(short)}")
    return [*lines, ""]


def _against_uniform(by_rule: Runs, rule: str) -> statistics.Comparison | None:
    """Compare scores (larger is better) over the shared seeds."""
    shared = sorted(set(by_rule[rule]) & set(by_rule.get("uniform", {})))
    if rule == "uniform" or len(shared) < 2:
        return None
    return statistics.paired_t(*([by_rule[r][s]["score"] for s in shared] for r in (rule, "uniform")))
