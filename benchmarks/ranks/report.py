"""Tables and sentences from the lines that ``training`` wrote."""

from __future__ import annotations

from pathlib import Path

from benchmarks.stamp import read_rows, write_section

from layerbudget.evaluation import statistics

UNITS = {
    "mrpc": "accuracy",
    "cola": "mean Matthews of both dev sets",
    "prose": "held-out loss, nats",
    "code": "held-out loss, nats",
}
BELOW_BEST = {
    ("prose", "ranks", 0.006),
    ("prose", "ranks", 0.002),
    ("prose", "lora-experts", 0.002),
}  # uniform trains better faster
Runs = dict[str, dict[int, dict]]


def write_report(name: str, out: Path, label: str = "") -> None:
    """Write means, standard errors and paired tests against uniform, one section per setting; the label is of the model."""
    groups: dict[tuple, Runs] = {}
    for row in read_rows(name, out):
        setting = tuple(row[k] for k in ("task", "form", "steps", "batch", "rows", "length", "lr"))
        setting += (row.get("attention", "sdpa"), row.get("rank", 8) if row["form"] == "ranks" else row.get("experts", 5))
        groups.setdefault(setting, {}).setdefault(row["rule"], {})[row["seed"]] = row
    for setting, by_rule in sorted(groups.items(), key=lambda g: (g[0][1] != "ranks", g[0][0], -g[0][6])):
        task, form, steps, *_, rate, _, size = setting
        title = f"{label + ', ' if label else ''}{task}, {form}: {size} each, {steps} steps at {rate:g}"
        write_section(
            "ranks" if form == "ranks" else "lora_experts", title, _section(setting, by_rule), out=out, peers=("peft",)
        )


def _section(setting: tuple, by_rule: Runs) -> list[str]:
    task, form, steps, batch, count, length, lr, attention, size = setting
    text = [
        f"{steps} steps of {batch} rows out of {count}, at most {length} tokens, lr {lr:g}, {attention} attention, uniform {form}: {size}.",
        "",
    ]
    if any(row.get("dtype") == "float32" for runs in by_rule.values() for row in runs.values()):
        text[0] += " Weights and products are float32."
    if (task, form, lr) in BELOW_BEST:
        text += [
            "**Below uniform's best rate** (by the learning rates of ranks.md): kept to show what that makes of a comparison.",
            "",
        ]
    text += [f"| rule | seeds | adapter parameters | {UNITS[task]} | held-out loss | minus uniform | p | p, Holm |"]
    text += ["|---|---|---|---|---|---|---|---|"]
    sentences = []
    tests = {rule: _against_uniform(by_rule, rule) for rule in by_rule}
    adjusted = dict(zip(tests, _holm([t.p if t else None for t in tests.values()]), strict=True))
    for rule, runs in by_rule.items():
        values = {k: statistics.mean_and_error([r[k] for r in runs.values()]) for k in ("score", "loss")}
        test = tests[rule]
        score, loss = (f"{m:.4f}" + (f" ± {e:.4f}" if e is not None else "") for m, e in values.values())
        numbers = sorted({f"{r['adapter_parameters']:,}" for r in runs.values()})
        cells = [rule, len(runs), " to ".join(numbers), loss if task in ("prose", "code") else score, loss]
        cells += (
            [
                f"{-test.difference if task in ('prose', 'code') else test.difference:+.4f}",
                f"{test.p:.2g}",
                f"{adjusted[rule]:.2g}",
            ]
            if test
            else [""] * 3
        )
        text.append("| " + " | ".join(map(str, cells)) + " |")
        if test:
            sentences.append(f"- {test.sentence(rule, 'uniform', 'nats gained' if task in ('prose', 'code') else UNITS[task])}")
    planned = [
        r for runs in by_rule.values() for r in runs.values() if r.get("uniform_share") and r["rule"].startswith("by-rank")
    ]
    if planned:
        share, noise = planned[0]["uniform_share"], planned[0]["noise_share"]
        words = f"The plan itself says, before any training, that uniform ranks have {share:.1%} of its gain"
        sentences.append(f"- {words}" + (f"; noise alone has {noise:.0%}." if noise is not None else "."))
    return [*text, "", *sentences, ""]


def write_rates(name: str, out: Path) -> None:
    """Write which learning rate serves each rule, on a seed that no comparison uses."""
    rows = read_rows(name, out)
    text = ["Held-out loss in nats on seed 9 at equal parameters; a rule's smallest in bold. The comparisons give every rule"]
    text += ["the same rate and, as ``rule@rate``, a rule its own where that differs.", ""]
    for setting in dict.fromkeys(_rate_setting(r) for r in rows):
        losses: dict[str, dict[float, float]] = {}
        for row in (r for r in rows if _rate_setting(r) == setting):
            rule, _, rate = row["rule"].partition("@")
            losses.setdefault(rule, {})[float(rate or row["lr"])] = row["loss"]
        rates = sorted({rate for found in losses.values() for rate in found})
        text += [
            f"### {setting[0]}, {setting[1]}: {setting[2]} each, {setting[3]} steps",
            "",
            "| rule | " + " | ".join(f"{r:g}" for r in rates) + " |",
            "|---" * (len(rates) + 1) + "|",
        ]
        for rule, found in losses.items():
            cells = [f"{found[r]:.4f}" if r in found else "" for r in rates]
            cells = [f"**{c}**" if c and found[r] == min(found.values()) else c for c, r in zip(cells, rates, strict=True)]
            text.append(f"| {rule} | " + " | ".join(cells) + " |")
        text.append("")
    write_section("ranks", "Learning rates, on a seed that no comparison uses", text, out=out, peers=("peft",))


def _rate_setting(row: dict) -> tuple:
    return row["task"], row["form"], row.get("rank", 8) if row["form"] == "ranks" else row.get("experts", 5), row["steps"]


def _holm(values: list[float | None]) -> list[float | None]:
    """Holm's adjustment of the p-values of one table, in their order."""
    known = sorted((p, i) for i, p in enumerate(values) if p is not None)
    adjusted, largest = list(values), 0.0
    for place, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - place)))
        adjusted[i] = largest
    return adjusted


def _against_uniform(by_rule: Runs, rule: str) -> statistics.Comparison | None:
    """Compare scores (larger is better) over the shared seeds."""
    shared = sorted(set(by_rule[rule]) & set(by_rule.get("uniform", {})))
    if rule == "uniform" or len(shared) < 2:
        return None
    return statistics.paired_t(*([by_rule[r][s]["score"] for s in shared] for r in (rule, "uniform")))
