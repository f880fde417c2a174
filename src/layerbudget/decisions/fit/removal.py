"""What fewer experts cost a model, and what is left then takes, for several numbers that all layers can keep."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...compressors.formats import GGUF, find_runtime
from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput
from ...execution.processes import process_group
from ...models.blocks import config_of, text_config
from ...models.experts import ExpertLayer, check_experts, cut_experts, find_experts
from ...progress import Progress, say
from ..bits.blocks import unwritable
from ..bits.gguf_names import is_written
from ..bits.plan import empty_table
from ..bits.table import Table
from ..kept_experts.masks import Masked, folds_for
from ..kept_experts.program import RIVAL, Fold, KeptProgram, crossed
from ..kept_experts.sensitivity import expert_removals

if TYPE_CHECKING:
    from torch import nn

STEPS = 16  # numbers of experts that are tried at most


def numbers(found: Sequence[ExpertLayer]) -> list[int]:
    """Return the numbers of experts that every layer can keep, all of them first: at most ``STEPS``, evenly."""
    able = list(range(found[0].count, max(e.floor for e in found) - 1, -max(e.groups for e in found)))
    return [able[i] for i in np.unique(np.linspace(0, len(able) - 1, STEPS).round().astype(int))]


def check_written(model: nn.Module, options: Mapping[str, Any], modules: Sequence[str], what: str, kind: str) -> None:
    """Refuse a model whose file another tool writes: it becomes smaller when ``apply`` writes it.

    Args:
        model: The whole one.
        options: Of the formats.
        modules: Full names of the matrices that become smaller.
        what: What goes, in words.
        kind: Of the plan that can be applied first.
    """
    target = find_runtime(str(options["runtime"]), str(options["family"]))
    planned = options.get("unwritten") == "plan" and unwritable(model, modules, target)
    if planned or (target.family == GGUF and not is_written(text_config(config_of(model)))):
        what = f"apply writes no file of {type(model).__name__} for {target.name}, and {what} when it writes one."
        raise InvalidInput(what, "", f"Leave that out, or do it first: layerbudget plan {kind}.")


def smaller_tables(model: nn.Module, tokenizer: Any, options: Mapping[str, Any]) -> dict[int, Table]:
    """Return the bytes of all formats by the number of experts that stay, without damages; all experts come first.

    Raises:
        UnknownStructure: No routed experts, or experts that are called in an unknown way.
        InvalidInput: Layers with different numbers of experts; an importance matrix.
        CoverageError: Several processes.
    """
    found = find_experts(model)
    if options.get("imatrix") is not None:
        what = "An importance matrix is of all experts, and fewer of them are in the file."
        raise InvalidInput(what, "", "Leave it out: without it importances are of the text. Or leave experts out.")
    if process_group().size > 1:
        raise CoverageError("Experts are chosen in one process.", "", "Use one, or leave experts out.")
    if len({e.count for e in found}) > 1:
        what = "The layers of this model have different numbers of experts."
        raise InvalidInput(what, "A runtime has one number for all layers.", "Leave experts out.")
    check_experts(found)
    tables = {found[0].count: empty_table(model, tokenizer, options)}
    for left in numbers(found)[1:]:
        with torch.device("meta"):
            skeleton: Any = type(model)(copy.deepcopy(config_of(model)))
        cut_experts(skeleton, {e.name: range(left) for e in found})
        tables[left] = empty_table(skeleton, tokenizer, options)
    return tables


def measure_removal(
    model: nn.Module,
    data: CalibrationSet,
    tables: Mapping[int, Table],
    *,
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the damage of every number of experts, measured with the others masked, and the bytes of what is left.

    Who goes is decided as by :func:`~layerbudget.decisions.kept_experts.plan.plan_kept_experts`: by predicted damage or by
    REAP, whichever measures less. The damage is measured on sequences that did not choose, by halves of the text, in nats per
    token.

    Returns:
        ``layers``: name, parameters of an expert and matrices of every layer. ``numbers``: of every number that stays
        (``left``) which experts (``kept``), ``measured`` and ``predicted`` with standard errors, ``measured_here`` on the text
        that chose, and the bytes of a table of formats. ``passes``: forward equivalents.
    """
    found = find_experts(model)
    say(progress, "experts")
    given = {"draws": draws, "seed": seed, "batch_size": batch_size}
    removals, passes = expert_removals(model, found, data, rules=("directional", RIVAL), progress=progress, **given)
    program, *others = (KeptProgram(r["directional"], r[RIVAL], even=True) for r in removals)
    own = Masked(model, found, data, batch_size)
    folds, parts = folds_for(model, found, data, batch_size, others)
    folds = folds or [Fold(program=program, measure=own.measure, judge=own.judge)]
    price, rows = np.ones(len(found), dtype=np.int64), list[dict[str, Any]]()
    for left, table in tables.items():
        most = left * len(found)
        steps, _ = program.within(most, price)
        kept = program.refined(steps, own.measure).kept(steps)
        told = {"left": left, "kept": kept, "measured_here": own.measure(kept), **crossed(folds, most, price)}
        rows.append(told | {"size": table.size.tolist(), "fixed": table.fixed, "head": table.head})
    return {
        "layers": [{"name": e.name, "numel": e.numel, "modules": list(e.modules)} for e in found],
        "numbers": rows,
        "crossed": len(folds) > 1,
        "passes": passes + sum(part.passes for part in (own, *parts)),
    }
