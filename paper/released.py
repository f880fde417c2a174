r"""The paper's released artefacts, recomputed: expert counts and sparsity ratios of Mistral-7B for three tasks.

What the released code computes differs from the paper's text, and its files are in file-name order (0, 1, 10, 11, ...), so
that position p belongs to layer ``file_order[p]``. The recipe that reproduces the files:

- sparsity: raw scores, kappa 1, cap 0.51, *exactly* half of the parameters: the ``exactly`` rule of
  :func:`layerbudget.solvers.sparsify` (the released multiplier is ``b - t`` with ``t = 2 eta q rho / n`` on the free layers);
- experts: ``w = (q + 0.05 median q)^2``, ``f_k = gamma w_k / (lambda c_k)``, ``floor(1 + max(f_k, 1))`` with
  ``sum_k c_k (1 + max(f_k, 1)) = sigma x base FLOPs``. The cost c counts the MLP adapters twice
  (2,195,456 FLOPs instead of 1,310,720); in CoLA five positions have the true cost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from layerbudget.errors import UnknownBlock
from layerbudget.solvers.dual import piecewise_root
from layerbudget.solvers.programs import sparsify

from .outcome import Claim, Outcome
from .released_files import read_released

GAMMA, BITS, ETA = 0.9, 16.0, 2.0
_TRUE_COST_POSITIONS = {"cola": (0, 26, 28, 30, 31)}


def released() -> dict[str, Any]:
    """The released figures and the recovered scores, as a record (read from the package)."""
    text = (resources.files(__package__) / "data" / "released_mistral7b.json").read_text(encoding="utf-8")
    return json.loads(text)


Record = Mapping[str, Any]


def _task(name: str, record: Record | None) -> tuple[Record, Mapping[str, Any], np.ndarray]:
    record = released() if record is None else record
    if name not in record["tasks"]:
        raise UnknownBlock(f"There is no task {name!r}.", f"Tasks: {', '.join(record['tasks'])}.", "Name one of those.")
    return record, record["tasks"][name], np.array(record["file_order"])


def recompute_sparsity(name: str, record: Record | None = None) -> dict[str, Any]:
    """Recompute the sparsity ratios of one task.

    Args:
        name: ``cola``, ``mrpc`` or ``openbookqa``; with files of one's own also ``commonsenseqa`` and ``scienceqa``.
        record: From :func:`~paper.released_files.read_released`; the packaged one by default.

    Returns:
        ``{ratios, released, largest_difference, multiplier, released_multiplier, at_cap, gap, kkt_residual}``, lists in true
        layer order, and both lists in file order as well.

    Raises:
        UnknownBlock: Another task.

    >>> recompute_sparsity("cola")["largest_difference"] < 1e-9
    True
    """
    record, task, order = _task(name, record)
    want = task["sparsity"]
    q, n = np.array(task["influence_scores"]), np.full(record["blocks"], float(record["numel_per_block"]))
    s = sparsify(
        q, n, sparsity=0.5, max_sparsity=want["max_sparsity"], exponent=want["exponent"], bits=BITS, eta=ETA,
        spend="exactly", units="literal",
    )  # fmt: skip
    truth = np.empty_like(q)
    truth[order] = want["ratios_file_order"]
    return {
        "ratios": s.value.tolist(),
        "released": truth.tolist(),
        "ratios_file_order": s.value[order].tolist(),
        "released_file_order": want["ratios_file_order"],
        "largest_difference": float(np.abs(s.value - truth).max()),
        "multiplier": BITS - s.shadow_price,
        "released_multiplier": want["multiplier_b_minus_lambda"],
        "at_cap": int((s.value >= s.upper).sum()),
        "gap": s.gap,
        "kkt_residual": s.kkt_residual,
    }


def recompute_experts(name: str, variant: str = "all", record: Record | None = None) -> dict[str, Any]:
    """Recompute the expert counts of one task.

    Args:
        name: ``cola``, ``mrpc`` or ``openbookqa``.
        variant: ``all`` or ``neg`` (released for another aggregation of the same influences; recomputed from the ``all``
            scores, so its multiplier differs by a few parts in a thousand).
        record: As for :func:`recompute_sparsity`.

    Returns:
        ``{counts, released, equal, total, multiplier, released_multiplier, budget, unspent}``, lists in true layer order,
        and both lists in file order as well.

    Raises:
        UnknownBlock: Another task.

    >>> recompute_experts("mrpc")["equal"]
    32
    """
    record, task, order = _task(name, record)
    want = task["experts"][variant]
    q = np.array(task["influence_scores"])[order]
    w = (q + 0.05 * np.median(q[q > 0])) ** 2
    cost = np.full(q.size, float(record["expert_flops_as_released"]))
    cost[list(_TRUE_COST_POSITIONS.get(name, ()))] = record["expert_flops_true"]
    budget = want["sigma"] * record["base_flops_per_token"]
    t, _, _ = piecewise_root(w, np.zeros(q.size), cost, np.full(q.size, np.inf), budget - float(cost.sum()))
    counts = np.floor(1.0 + np.maximum(t * w / cost, 1.0)).astype(int)
    theirs = np.array(want["counts_file_order"])
    return {
        "counts": _true_order(counts, order),
        "released": _true_order(theirs, order),
        "counts_file_order": counts.tolist(),
        "released_file_order": theirs.tolist(),
        "equal": int((counts == theirs).sum()),
        "total": int(counts.sum()),
        "multiplier": GAMMA / t,
        "released_multiplier": want["multiplier"],
        "sigma": want["sigma"],
        "budget": budget,
        "unspent": 1.0 - float(cost @ counts) / budget,
    }


def _true_order(values: np.ndarray, order: np.ndarray) -> list[int]:
    ordered = np.empty_like(values)
    ordered[order] = values
    return ordered.tolist()


def reproduce_released(record: Record | None = None) -> dict[str, Any]:
    """Recompute everything that was released for the three packaged tasks, or for those of a record.

    Returns:
        ``{tasks: {name: {sparsity, experts: {all, neg}}}, file_order, all_counts_equal, largest_ratio_difference}``.
    """
    record = released() if record is None else record
    tasks = {
        name: {
            "sparsity": recompute_sparsity(name, record),
            "experts": {v: recompute_experts(name, v, record) for v in task["experts"]},
        }
        for name, task in record["tasks"].items()
    }
    return {
        "tasks": tasks,
        "file_order": record["file_order"],
        "all_counts_equal": all(e["equal"] == record["blocks"] for t in tasks.values() for e in t["experts"].values()),
        "largest_ratio_difference": max(t["sparsity"]["largest_difference"] for t in tasks.values()),
        "note": "Released lists are in file order: position p belongs to layer file_order[p]; the released runs applied "
        "them to layer p.",
    }


def run_released(*, files: Path | str | None = None, **_: Any) -> Outcome:
    """The released lists and ratios under the constants of Table 4: three packaged tasks, or all whose files a folder holds.

    Raises:
        NotFound: The folder has no such files.
        CorruptFile: A file that is not what its name says.
    """
    started = time.monotonic()
    found = reproduce_released(None if files is None else read_released(files, released()))
    rows = []
    for name, task in found["tasks"].items():
        rows.append({"task": name, "artefact": "sparsity ratios", "largest_difference": task["sparsity"]["largest_difference"]})
        for variant, e in task["experts"].items():
            rows.append({"task": name, "artefact": f"experts, {variant}", "equal": e["equal"], "of": 32, "total": e["total"]})
    equal, of = sum(r.get("equal", 0) for r in rows), sum(r.get("of", 0) for r in rows)
    worst = found["largest_ratio_difference"]
    claims = (
        Claim(claim="every released expert count", met=found["all_counts_equal"], detail=f"{equal} of {of}"),
        Claim(claim="every released sparsity ratio", met=worst < 1e-9, detail=f"largest difference {worst:.1e}"),
        Claim(claim="with the printed beta of 1", met=False, detail="the released expert lists have beta 2, see the recipe"),
    )
    text = f"{equal} of {of} expert counts and all ratios to {worst:.0e}, with beta 2 and the lists in file-name order"
    return Outcome(
        name="released", items=("table-4",), setting={"files": files is not None, "tasks": list(found["tasks"])},
        result=found, rows=rows, claims=claims, finding=text,
        seconds=time.monotonic() - started, draw=lambda path: _draw(found, path),
    )  # fmt: skip


def _draw(found: dict[str, Any], path: Path) -> Path:
    from layerbudget.reporting.figures import ACCENT, ALERT, new_figure, save_figure

    figure = new_figure(9.0, 2.6)
    for axes, (name, task) in zip(figure.subplots(1, len(found["tasks"])), found["tasks"].items(), strict=True):
        axes.bar(range(32), task["experts"]["all"]["counts"], color=ACCENT)
        axes.plot(range(32), task["experts"]["all"]["released"], ".", color=ALERT, markersize=4)
        axes.set(title=name, xlabel="layer")
    figure.axes[0].set_ylabel("experts (bars: ours, dots: released)")
    return save_figure(figure, path)
