"""llm-compressor's recipe, with as few distinct ratios as asked for."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..decisions.sparsity.apply import method_of, other_pruner
from ..decisions.sparsity.export import recipe
from ..plan import Plan
from ..solvers.counts import round_parameters
from ..solvers.levels import few_levels


def with_levels(plan: Plan, levels: int) -> tuple[Plan, float]:
    """The plan with at most so many distinct sparsities and the same total, and the largest change of one block.

    Args:
        plan: A plan of sparsities.
        levels: How many.
    """
    numel = plan.numel.astype(np.float64)
    values = few_levels(plan.counts / numel, numel, levels)
    counts = round_parameters(values, numel, int(plan.counts.sum()), np.ones(len(values)))
    blocks = [dataclasses.replace(b, value=float(v), count=int(c)) for b, v, c in zip(plan.blocks, values, counts, strict=True)]
    change = float(np.abs(values - plan.counts / numel).max())
    return dataclasses.replace(plan, blocks=tuple(blocks), certificate={}), change


def llm_compressor(plan: Plan, *, method: str | None = None, pattern: str | None = None, levels: int | None = None) -> str:
    """A recipe with one modifier per distinct ratio, and in its comments how it is run.

    Every modifier walks the model: in llm-compressor's sequential pipeline once over all layers, so that the number of
    distinct ratios is what it costs.

    Args:
        plan: A plan of sparsities.
        method: ``wanda`` or ``sparsegpt``; what the plan was measured with by default, else ``wanda``.
        pattern: ``n:m``, for all blocks.
        levels: At most so many distinct ratios, the total kept.
    """
    method, _ = method_of(plan, method, {})
    lines = [f"# {note}" for note in other_pruner(plan, method)]
    if levels is not None:
        plan, change = with_levels(plan, levels)
        lines.append(f"# at most {levels} levels: no block's sparsity moves by more than {change:.4f}, the total stays")
    lines += [
        "# from llmcompressor import oneshot",
        '# oneshot(model=MODEL, dataset=DATA, recipe="recipe.yaml", pipeline="sequential")',
        "# sequential: one pass per layer for each modifier; the default of some versions runs the whole model instead",
    ]
    return "\n".join(lines) + "\n" + recipe(plan, method, pattern=pattern)
