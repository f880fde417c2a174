"""Tables for the terminal."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from ..plan import Plan, PlanBlock
from ..records import Block, natural_key
from ..scores import Scores

MOST_COLUMNS = 12


def _cell(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def scores_table(scores: Scores, damping: float | None = None) -> Table:
    """One row per block: score, standard error, noise floor, status, share."""
    row = scores.index(damping)
    title = (
        f"{scores.estimator}, {scores.data.get('samples')} x {scores.data.get('length')} tokens of {scores.data.get('source')}"
    )
    if scores.damping_unit != "none":
        title += f", damping {scores.damping[row]:g} ({scores.damping_unit})"
    table = Table(title=title)
    for name in ("block", "parameters", "score", "standard error", "noise floor", "status"):
        table.add_column(name, justify="left" if name in ("block", "status") else "right", no_wrap=name == "block")
    for k, block in enumerate(scores.blocks):
        table.add_row(
            block.name, f"{block.numel:,}", _cell(scores.gain[row][k]), _cell(scores.standard_error[row][k]),
            _cell(scores.noise_floor[row][k]), scores.status[row][k],
        )  # fmt: skip
    return table


def plan_grid(
    plan: Plan, title: str = "", *, said: Sequence[str] | None = None, price: Sequence[float] | None = None
) -> Table | None:
    """The decision as a picture: layers downwards, matrices across; None where one column would say it all.

    Args:
        plan: The plan; sparsities are shown in percent, ranks and experts as they are counted.
        title: Above it.
        said: What to write for every block instead.
        price: Parameters of one unit of every block: each row then ends with those of its adapters.
    """
    grid = grid_of(plan.blocks)
    if grid.whole or len(grid.columns) > MOST_COLUMNS:
        return None
    words = [_decided(plan, k) for k in range(len(plan.blocks))] if said is None else list(said)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("layer", justify="right", no_wrap=True)
    for name in grid.columns:
        table.add_column(name.removesuffix("_proj"), justify="right")
    if price is not None:
        table.add_column("parameters", justify="right", no_wrap=True)
    for row, label in enumerate(grid.rows):
        found = [grid.cells.get((row, column)) for column in range(len(grid.columns))]
        cells = ["" if k is None else words[k] for k in found]
        if price is not None:
            cells.append(f"{sum(plan.blocks[k].count * price[k] for k in set(found) if k is not None):,.0f}")
        table.add_row(label, *cells)
    return table


def _decided(plan: Plan, k: int) -> str:
    block = plan.blocks[k]
    if plan.kind in ("ranks", "experts"):
        return f"{block.count}"
    return f"{100 * block.value:.0f}" if plan.kind == "sparsity" else f"{block.value:.3g}"


def plan_table(plan: Plan) -> Table:
    """One row per block: what it gets."""
    table = Table(
        title=f"{plan.kind} by {plan.rule}: {plan.budget.get('spent')} of {plan.budget.get('limit')} {plan.budget.get('unit')}"
    )
    for name in ("block", "parameters", "value", "count"):
        table.add_column(name, justify="left" if name == "block" else "right", no_wrap=name == "block")
    for block in plan.blocks:
        table.add_row(block.name, f"{block.numel:,}", f"{block.value:.4f}", f"{block.count:,}")
    return table


def path_table(plan: Plan) -> Table:
    """Steps of a plan by directional damage: predicted and measured change, divergence, passes."""
    table = Table(title=f"steps: {plan.extra['forward_passes']:.0f} forward equivalents")
    for name in ("step", "predicted", "measured", "nats per token", "passes"):
        table.add_column(name, justify="right")
    for entry in plan.extra["path"]:
        cells = [_cell(entry.get(name), "+.4f") for name in ("predicted", "measured")]
        cells += [_cell(entry["divergence"], ".4f"), f"{entry['passes']:.0f}"]
        table.add_row(str(entry["step"]), *cells)
    return table


def demo_table(result: Mapping[str, Any]) -> Table:
    """Dense, uniform, permuted and planned models: recounted sparsity and perplexity."""
    table = Table(title="held-out perplexity after Wanda pruning (standard library, evaluation modules)")
    for name in ("model", "target", "recounted sparsity", "perplexity", "standard error", "vs uniform"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in result["rows"]:
        table.add_row(
            row["model"], "-" if row["target"] is None else f"{row['target']:.0%}", f"{row['sparsity']:.4%}",
            f"{row['perplexity']:.3f}", f"{row['standard_error']:.3f}",
            "-" if row.get("vs_uniform") is None else f"{row['vs_uniform']:+.3%}",
        )  # fmt: skip
    return table


_PLACE = re.compile(r"^(?P<stack>.*?)\.(?P<layer>\d+)(?:\.(?P<rest>.*))?$")


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where every matrix stands.

    Attributes:
        rows: Labels of the layers, in the model's order.
        columns: Labels of the matrices, in the order in which they first come.
        cells: ``(row, column) -> index of the block`` that the matrix belongs to.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, int], int]

    @property
    def whole(self) -> bool:
        """Whether every row is one block, so that one column says it all."""
        owners: dict[int, int] = {}
        return all(owners.setdefault(row, k) == k for (row, _), k in self.cells.items()) and len(owners) == len(self.rows)


def grid_of(blocks: Sequence[Block | PlanBlock]) -> Grid:
    """Lay blocks out by layer and matrix; what stands in no layer gets a row of its own.

    Args:
        blocks: Blocks of scores or of a plan.
    """
    places: list[tuple[str, str, int]] = []
    for k, block in enumerate(blocks):
        for module in block.modules or ():
            name = module if isinstance(module, str) else module.name
            found = _PLACE.match(name)
            row = f"{found['stack']}.{found['layer']}" if found else name
            rest = (found["rest"] or "all") if found else "all"
            places.append((row, rest, k))
        if not block.modules:
            places.append((block.name, "all", k))
    rows = sorted({p[0] for p in places}, key=natural_key)
    columns = list(dict.fromkeys(p[1] for p in places))
    across, down = ({label: i for i, label in enumerate(labels)} for labels in (columns, rows))
    cells = {(down[r], across[c]): k for r, c, k in places}
    stacks = {r.rpartition(".")[0] for r in rows if _PLACE.match(r)}
    short = [r.rpartition(".")[2] if len(stacks) == 1 and _PLACE.match(r) else r for r in rows]
    return Grid(tuple(short), tuple(c.rpartition(".")[2] for c in columns), cells)
