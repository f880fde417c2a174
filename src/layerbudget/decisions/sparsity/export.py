"""A plan of sparsity in the file of another tool: llm-compressor's recipe."""

from __future__ import annotations

import dataclasses

import numpy as np

from ...decision import Export
from ...plan import Plan
from ...solvers.rounding import few_levels, round_parameters


def llm_compressor(plan: Plan, *, method: str | None = None, pattern: str | None = None, levels: int | None = None) -> str:
    """Return a recipe with one modifier per distinct ratio, and in its comments how it is run.

    The method is ``wanda`` or ``sparsegpt``; by default what the plan was measured with, else ``wanda``. Every modifier walks
    the model, so the number of distinct ratios is what it costs: there are at most ``levels``, the total kept.
    """
    from .apply import method_of, other_pruner
    from .save import recipe

    method, _ = method_of(plan, method, {})
    lines = [f"# {note}" for note in other_pruner(plan, method)]
    if levels is not None:
        plan, change = with_levels(plan, levels)
        lines.append(f"# at most {levels} levels: no block's sparsity moves by more than {change:.4f}, the total stays")
    lines += [
        "# from llmcompressor import oneshot",
        '# oneshot(model=MODEL, dataset=DATA, recipe=RECIPE, pipeline="sequential")',
        "# sequential: one pass per layer for each modifier; the default of some versions runs the whole model instead",
    ]
    return "\n".join(lines) + "\n" + recipe(plan, method, pattern=pattern)


def with_levels(plan: Plan, levels: int) -> tuple[Plan, float]:
    """Return a plan with at most so many distinct sparsities and the same total, and the largest change of one block."""
    numel = plan.numel.astype(np.float64)
    values = few_levels(plan.counts / numel, numel, levels)
    counts = round_parameters(values, numel, int(plan.counts.sum()), np.ones(len(values)))
    blocks = [dataclasses.replace(b, value=float(v), count=int(c)) for b, v, c in zip(plan.blocks, values, counts, strict=True)]
    change = float(np.abs(values - plan.counts / numel).max())
    return dataclasses.replace(plan, blocks=tuple(blocks), certificate={}), change


EXPORTS = (
    Export(
        name="recipe",
        call=llm_compressor,
        kinds=("sparsity",),
        file="recipe.yaml",
        summary="llm-compressor's recipe",
        use="llmcompressor.oneshot(model=..., recipe={file!r}, pipeline='sequential') prunes by it.",
    ),
)
