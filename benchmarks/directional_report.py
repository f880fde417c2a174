"""Every rule of sparsity in one table per model, today's committed tables beside the directional rows, and a figure.

    python benchmarks/directional_report.py

Reads ``quality_stdlib.json`` (three seeds, 16 sequences; the second model is trained for minutes of processor time and is another
one each time, so its rules are all measured anew) and the rows that ``pruning_quality.py`` and ``directional_peers.py`` left;
writes ``directional_table_stdlib.md``, ``directional_table_books.md``, their ``.json`` and ``directional.png``.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MODELS = {
    # title, table of the same model that is committed already, names of the rows
    "stdlib": ("embedded model (standard library)", "quality_stdlib.json", ("directional", "rules", "gradient")),
    "books": ("second model (books), trained anew", None, ("directional", "rules")),
}
MORE = {64: "_64", 256: "_256"}
KEPT = ("method", "rule", "target", "seed", "sparsity", "value", "forwards", "seconds", "predicted", "measured", "samples")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows_of(name):
    """All rows of a model: committed ones, and those of the .jsonl files where there are any (else of the last report)."""
    rows = []
    if MODELS[name][1]:
        base = json.loads((RESULTS / MODELS[name][1]).read_text())
        rows += [{**r, "samples": 16, "table": "quality"} for r in base["rows"] if "value" in r]
    kept = RESULTS / f"directional_table_{name}.json"
    own = [{**r, "table": "directional"} for r in json.loads(kept.read_text())["rows"]] if kept.exists() else []
    for first in MODELS[name][2]:
        for samples, suffix in {16: "", **MORE}.items():
            for r in lines_of(RESULTS / f"{first}_{name}{suffix}.jsonl"):
                if "value" in r:
                    own.append({**{k: r[k] for k in KEPT if k in r}, "samples": samples, "table": "directional"})
    if name == "stdlib":
        for r in lines_of(RESULTS / "directional_peers.jsonl"):
            if r["part"] == "search" and r["rule"].startswith("EvoPress"):
                own.append({"method": r["method"], "rule": r["rule"], "target": r["sparsity"], "seed": r["seed"], "value": r["value"],
                            "forwards": r["forwards"] + r["levels"], "seconds": r["seconds"], "samples": 16})  # fmt: skip
    found = {(r["method"], r["rule"], r["target"], r["seed"], r["samples"]): r for r in own}
    return rows, list(found.values())


def cell(values):
    if not values:
        return "-"
    error = f" +- {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{error}"


def place(rule):
    """Order of the rules in a table."""
    order = ("uniform", "size", "ATP", "Alpha", "LayerIF", "gradient norm", "gain", "permuted", "OWL", "DLP", "LSA", "evolution", "EvoPress",
             "calibrated", "directional (block)", "directional (Linear)", "directional (8 rows)", "directional (rows)")  # fmt: skip
    first = next((i for i, o in enumerate(order) if rule.startswith(o)), len(order))
    steps = [int(w) for w in rule.replace("passes", "").split() if w.isdigit()]
    return first, (7.5 if "passes" in rule else steps[-1] if steps else 0), rule


def table(rows, samples):
    found = [r for r in rows if r["samples"] == samples]
    lines = []
    for method in sorted({r["method"] for r in found}):
        mine = [r for r in found if r["method"] == method]
        targets = sorted({r["target"] for r in mine})
        lines += [f"### {method}, {samples} sequences", ""]
        lines += ["| rule | " + " | ".join(f"{t:.0%}" for t in targets) + " | forwards | CPU s | seeds |"]
        lines += ["|---" * (len(targets) + 4) + "|"]
        # a rule that was measured with several seeds for some targets only shows the seeds of each
        for rule in sorted({r["rule"] for r in mine}, key=place):
            one = [r for r in mine if r["rule"] == rule]
            cells = [cell([r["value"] for r in one if r["target"] == t]) for t in targets]
            seeds = sorted({len({r["seed"] for r in one if r["target"] == t}) for t in targets} - {0})
            forwards = [r["forwards"] for r in one]
            spread = (
                f"{min(forwards):.0f} to {max(forwards):.0f}" if max(forwards) - min(forwards) > 0.5 else f"{forwards[0]:.0f}"
            )
            lines.append(
                f"| {rule} | " + " | ".join(cells) + f" | {spread} | {statistics.mean(r['seconds'] for r in one):.1f} "
                f"| {' or '.join(map(str, seeds))} |"
            )
        lines.append("")
    return lines


def verdicts(rows):
    """Directional plans of at most 26 forwards against the best of the other rules, cell by cell, on the seeds of the plan."""
    lines = [
        "| pruner | zeros | best of the other rules (forwards) | 24 passes by matrix (forwards) | difference | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for method, target in sorted(
        {(r["method"], r["target"]) for r in rows if r["samples"] == 16 and r["method"] != "gradient"}
    ):
        mine = [r for r in rows if (r["method"], r["target"], r["samples"]) == (method, target, 16)]
        ours = "directional (Linear), 24 passes"
        seeds = {r["seed"] for r in mine if r["rule"] == ours}
        there = {n: [r for r in mine if r["rule"] == n and r["seed"] in seeds] for n in {r["rule"] for r in mine}}
        there = {n: found for n, found in there.items() if {r["seed"] for r in found} == seeds}
        mean = {n: statistics.mean(r["value"] for r in found) for n, found in there.items() if found}
        cost = {n: statistics.mean(r["forwards"] for r in found) for n, found in there.items() if found}
        others = [n for n in mean if not n.startswith("directional")]
        if seeds and len(others) > 1:
            best = min(others, key=mean.get)
            lines.append(
                f"| {method} | {target:.0%} | {best}: {mean[best]:.2f} ({cost[best]:.0f}) | {mean[ours]:.2f} ({cost[ours]:.0f}) "
                f"| {100 * (mean[ours] / mean[best] - 1):+.1f} % | {len(seeds)} |"
            )
    return [*lines, ""]


def figure(models, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    targets = (0.5, 0.6, 0.7)
    fig, axes = plt.subplots(len(models), len(targets), figsize=(13, 4.2 * len(models)), squeeze=False)
    for row, (name, rows) in zip(axes, models.items(), strict=True):
        for ax, target in zip(row, targets, strict=True):
            mine = [r for r in rows if r["method"] == "wanda" and r["target"] == target]
            uniform = statistics.mean(r["value"] for r in mine if r["rule"] == "uniform" and r["samples"] == 16)
            for key in sorted({(r["rule"], r["samples"]) for r in mine}, key=lambda k: (*place(k[0]), k[1])):
                one = [r for r in mine if (r["rule"], r["samples"]) == key]
                x, y = statistics.mean(r["forwards"] for r in one), statistics.mean(r["value"] for r in one)
                if y > 1.01 * uniform or key[0] == "uniform":
                    continue
                ours = key[0].startswith("directional")
                shade = {16: "tab:blue", 64: "tab:cyan", 256: "tab:purple"}[key[1]] if ours else "0.45"
                ax.plot(max(x, 0.5), y, "o" if "rows" not in key[0] else "s", color=shade, ms=5)
                label = key[0].replace("directional ", "") + (f", {key[1]} seq." if key[1] > 16 else "")
                ax.annotate(label, (max(x, 0.5), y), fontsize=5.5, xytext=(3, 2), textcoords="offset points", color=shade)
            ax.axhline(uniform, color="0.7", lw=0.8, ls="--")
            ax.set_xscale("log")
            ax.set_xlim(0.4, 2000)
            ax.set_title(f"{MODELS[name][0]}, Wanda {target:.0%}", fontsize=8)
            ax.set_xlabel("forward equivalents of the calibration text", fontsize=7)
            ax.set_ylabel("perplexity", fontsize=7)
            ax.tick_params(labelsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=130, metadata={"Software": None})


def main():
    drawn = {}
    for name, (label, _, _) in MODELS.items():
        base, own = rows_of(name)
        if not own:
            continue
        there = {(r["method"], r["rule"]) for r in base}
        rows = base + [r for r in own if r["samples"] > 16 or (r["method"], r["rule"]) not in there]
        drawn[name] = rows
        lines = [f"# Plans by directional damage beside every other rule, {label}", ""]
        lines += [
            "Perplexity on 256 held-out windows of 128 tokens at equal recounted sparsity, mean over calibration seeds +- standard"
        ]
        lines += [
            "error. A forward counts 1, a backward 2, of the whole calibration text; the dense forward and the last measurement by"
        ]
        lines += [
            "the pruner itself are included. Largest sparsity of one unit: 0.95 for directional plans, 0.9 for the others.",
            "",
        ]
        lines += ["## At most 26 forwards, against the best of the other rules", "", *verdicts(rows), "## All rules", ""]
        for samples in (16, *MORE):
            lines += table(rows, samples)
        (RESULTS / f"directional_table_{name}.md").write_text("\n".join(lines))
        order = sorted(own, key=lambda r: (r["samples"], r["method"], r["target"], place(r["rule"]), r["seed"]))
        order = [{k: r[k] for k in KEPT if k in r} for r in order]
        (RESULTS / f"directional_table_{name}.json").write_text(json.dumps({"rows": order}, indent=0) + "\n")
    figure(drawn, RESULTS / "directional.png")


if __name__ == "__main__":
    main()
