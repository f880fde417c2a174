"""A comparison as CSV, LaTeX and one figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..records import dumps, made_by, write_text
from .run import ScoreComparison

COLUMNS = ("budget", "place", "name", "rule", "score", "control", "mean", "difference", "low", "high", "p", "holm",
           "versus_permuted", "p_permuted", "rank_low", "rank_high", "first", "forward", "backward", "spent")  # fmt: skip


def flat(result: ScoreComparison) -> list[dict[str, Any]]:
    """One flat row per plan and budget, best first."""
    rows = []
    for b in result.budgets:
        for place, r in enumerate(b["rows"], 1):
            u, c = r["versus_uniform"] or {}, r["versus_permuted"] or {}
            cost = result.cost.get(r["score"], {}) if r["score"] else {}
            rows.append({
                "budget": b["budget"], "place": place, **{k: r[k] for k in ("name", "rule", "score", "control", "mean")},
                **{k: u.get(k) for k in ("difference", "low", "high", "p", "holm")}, "versus_permuted": c.get("difference"),
                "p_permuted": c.get("holm"), **{k: r[k] for k in ("rank_low", "rank_high", "first")},
                "forward": cost.get("forward"), "backward": cost.get("backward"), "spent": r["spent"][0],
            })  # fmt: skip
    return rows


def to_csv(result: ScoreComparison) -> str:
    """CSV with a header."""

    def cell(v: Any) -> str:
        text = "" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v)
        return f'"{text}"' if "," in text else text

    lines = [",".join(COLUMNS), *(",".join(cell(r[c]) for c in COLUMNS) for r in flat(result))]
    return "\n".join(lines) + "\n"


def to_latex(result: ScoreComparison) -> str:
    """A booktabs table: mean, difference to uniform with its interval, Holm-corrected p, places."""
    lines = [
        r"\begin{tabular}{llrrrr}", r"\toprule",
        rf"budget & plan & {result.unit} & $\Delta$ uniform (95\,\%) & $p_\mathrm{{Holm}}$ & place \\",
    ]  # fmt: skip
    for b in result.budgets:
        lines.append(r"\midrule")
        for r in b["rows"]:
            u = r["versus_uniform"]
            delta = "--" if u is None else f"${u['difference']:+.4f}$ [${u['low']:+.4f}$, ${u['high']:+.4f}$]"
            p = "--" if u is None or "holm" not in u else f"{u['holm']:.3f}"
            name = r["name"].replace("_", r"\_").replace("%", r"\%")
            place = f"{r['rank_low']:.0f}--{r['rank_high']:.0f}"
            lines.append(rf"{b['budget']:g} & {name} & {r['mean']:.4f} & {delta} & {p} & {place} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def draw(result: ScoreComparison, path: Path | str) -> Path:
    """Difference to uniform with its 95 % interval, one panel per budget; permuted controls are pale.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    from ..report.figures import ACCENT, INK, MUTED, new_figure, save_figure

    shown = [[r for r in b["rows"] if r["versus_uniform"]] for b in result.budgets]
    figure = new_figure(1.5 + 3.6 * len(shown), 1.0 + 0.24 * max(map(len, shown)))
    for axes, b, rows in zip(figure.subplots(1, len(shown), squeeze=False)[0], result.budgets, shown, strict=True):
        for i, r in enumerate(reversed(rows)):
            u = r["versus_uniform"]
            spread = [[u["difference"] - u["low"]], [u["high"] - u["difference"]]]
            axes.errorbar(u["difference"], i, xerr=spread, fmt="o", markersize=4, color=MUTED if r["control"] else ACCENT)
        axes.set_yticks(range(len(rows)), [r["name"] for r in reversed(rows)], fontsize=7)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_title(f"budget {b['budget']:g}", loc="left", fontsize=10)
        axes.set_xlabel(f"against uniform, {result.unit}; left is better", fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def leave(result: ScoreComparison, out: Path | str, *, overwrite: bool = False) -> Mapping[str, str]:
    """Write ``comparison.json``, ``comparison.csv``, ``comparison.tex`` and ``comparison.png``.

    Raises:
        AlreadyExists: A file is there with other content and ``overwrite`` is false.
    """
    out = Path(out)
    texts = {
        "json": dumps({"schema_version": 1, **result, "made_by": made_by("compare")}),
        "csv": to_csv(result),
        "tex": to_latex(result),
    }
    made = {k: str(write_text(out / f"comparison.{k}", text, overwrite=overwrite)) for k, text in texts.items()}
    return {**made, "png": str(draw(result, out / "comparison.png"))}
