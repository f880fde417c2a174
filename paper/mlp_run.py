"""Tables 8 to 12 as one run: released, corrected or both, with what each difference changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerbudget.solvers.inputs import choice

from . import mlp
from .mlp_both import as_released, both, closest, within
from .outcome import Claim, Outcome
from .published import MLP_TABLES, mlp_entries

VARIANTS = ("both", "released", "corrected")
SEEDS = {"small": (0, 1, 2), "full": tuple(range(10))}


def run_mlp(
    *, scale: str = "small", variant: str = "both", progress: Callable[[int, int], None] | None = None, **_: Any
) -> Outcome:
    """Run the experiment.

    Args:
        scale: ``small``: the paper's three seeds; ``full``: ten.
        variant: ``released``, ``corrected`` or ``both``.
        progress: Called with what is done and in total.

    Raises:
        InvalidInput: Another variant.
        MissingDependency: scikit-learn is not installed.
    """
    choice(variant, "variant", VARIANTS)
    started, seeds = time.process_time(), SEEDS[scale]
    if variant == "released":
        result: dict[str, Any] = {"released": as_released(seeds, progress)}
    elif variant == "corrected":
        result = {"corrected": mlp.tables(seeds, progress=progress)}
    else:
        result = both(seeds, progress)
        result["sentences"] = [d["sentence"] for d in result["differences"]]
    tables = _tables(result)
    return Outcome(
        name="mlp", items=tuple(MLP_TABLES.values()), setting={"scale": scale, "variant": variant, "seeds": list(seeds)},
        result=result, rows=_rows(tables), claims=_claims(tables), finding=_finding(tables),
        seconds=time.process_time() - started, draw=lambda path: _draw(tables, path),
    )  # fmt: skip


def _tables(result: Mapping[str, Any]) -> dict[str, Any]:
    found = {"released": result["released"]["tables"]} if "released" in result else {}
    if "corrected" in result:
        found |= {f"corrected, {k}": v for k, v in result["corrected"]["tables"].items()}
    return found


def _rows(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for tau, proxies in mlp_entries().items():
        for proxy, metrics in proxies.items():
            for metric, theirs in metrics.items():
                row: dict[str, Any] = {"tau": tau, "proxy": proxy, "metric": metric, "published": theirs[0],
                                       "published_deviation": theirs[1]}  # fmt: skip
                for name, table in tables.items():
                    ours = table.get(str(tau), {}).get(proxy, {}).get(metric) or (None, None)
                    row |= {name: ours[0], f"{name}, deviation": ours[1]}
                rows.append(row)
    return rows


def _claims(tables: Mapping[str, Any]) -> list[Claim]:
    """The two halves of the paper's conclusion: LayerIF-style is closest at small damping, the gradient norm at large."""
    claims = []
    for name, table in tables.items():
        near = closest(table)
        low, high = [near.get(str(t)) for t in (1e-3, 1e-2, 1e-1)], [near.get(str(t)) for t in (1.0, 2.0)]
        for text, found, wanted in (
            ("LayerIF-style is closest up to tau 0.1", low, "layerif_style"),
            ("the gradient norm is closest from tau 1 on", high, "grad_norm"),
        ):
            known = [f for f in found if f is not None]
            claims.append(Claim(
                claim=f"{text} ({name})", met=all(f == wanted for f in known) if len(known) == len(found) else None,
                detail=", ".join(str(f or "no value") for f in found),
            ))  # fmt: skip
    return claims


def _finding(tables: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{within(t)['count']} {name}" for name, t in tables.items())
    return f"of the 30 published correlations within one joint standard deviation: {counts}"


def _draw(tables: Mapping[str, Any], path: Path) -> Path:
    from layerbudget.reporting.figures import ACCENT, ALERT, MUTED, new_figure, save_figure

    figure = new_figure(3.4 * (len(tables) + 1), 3.2)
    theirs = {str(t): {p: {"spearman": m["spearman"]} for p, m in rows.items()} for t, rows in mlp_entries().items()}
    panels = {"published": theirs, **tables}
    for axes, (name, table) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True):
        for proxy, color in zip(mlp.PROXIES, (ACCENT, MUTED, ALERT), strict=True):
            points = [(float(t), *row[proxy]["spearman"]) for t, row in table.items() if row[proxy]["spearman"]]
            if points:
                x, y, e = zip(*points, strict=True)
                axes.errorbar(x, y, yerr=e, marker="o", capsize=2, color=color, label=proxy)
        axes.set(xscale="log", title=name, xlabel="damping", ylim=(-0.5, 1.1))
    figure.axes[0].set_ylabel("Spearman against the direct gain")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    return save_figure(figure, path)
