"""The layer gain ``zeta_k^2 = g_k'(C_k + tau I)^-1 g_k`` under every curvature, and every other score, by name.

Half of the gain is the decrease of the damped quadratic model of the loss when block k alone may move (paper, Lemma 1).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..arguments import checked
from ..data.calibration import check_fits
from ..errors import InvalidInput
from ..execution.loss import Data
from ..execution.processes import broadcast, is_main, process_group
from ..models import blocks as model_blocks
from ..models.machine import computation, versions
from ..progress import Progress
from ..records import Block
from ..scores import Scores
from .curvature.common import check_damping, check_inputs
from .estimators import ESTIMATORS
from .stored import Finished, request_of

logger = logging.getLogger(__name__)
_OF_ADAPTERS = ("adapter", "rank-gain")


@checked
def score(
    model: nn.Module,
    data: Data | None,
    blocks: Sequence[Block],
    estimator: str = "fisher-gram",
    damping: float | Sequence[float] | None = None,
    damping_unit: str | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    resume: Path | str | None = None,
    **options: Any,
) -> Scores:
    """Score every block of a model on a calibration set.

    An option that the estimator does not read is refused; what is left out has the estimator's own default.

    Args:
        model: Any transformers model with a head, or a plain classifier.
        data: The calibration set; None for an estimator that reads weights only.
        blocks: From :func:`layerbudget.models.blocks.partition`.
        estimator: A name in ``layerbudget.sensitivity.estimators.ESTIMATORS``.
        damping: tau, one or several, in ``damping_unit``; the default sweep where it is left out.
        damping_unit: As in :class:`layerbudget.sensitivity.curvature.common.Dampings`; ``median`` by default for ``adapter``,
            ``max`` for all others.
        batch_size: Sequences per forward pass, 8 by default.
        seed: Of what is random, 0 by default. The same seed gives the same bytes.
        progress: Called with ``(done, total)`` sequences or products.
        resume: Folder in which finished records are kept and found again, also the gradients of sequences (``fisher-gram``) and
            finished blocks (``kfac``, ``ekfac`` and ``rank-gain``, not with dampings that wait for the last block, nor in
            several processes). Processes on several machines need one folder that all of them see.
        **options: Of the estimator (``sketch``, ``draws``, ``steps``, ...). Those that take gradients also have ``walk``:
            ``whole``, ``layers`` or ``auto``, as in :func:`layerbudget.execution.backward.feed`.

    Returns:
        A record with one row per damping: gains, standard errors, noise floors, status, provenance.

    Raises:
        InvalidInput: An unknown estimator, an option that it does not read, or an argument outside its domain.
        UnknownBlock: A block that the model does not have.
        BadModel: Weights that are not finite.
        CoverageError: Weight matrices that the estimator cannot see.
        CurvatureFailure: A curvature that is not positive definite at any damping.
    """
    chosen = ESTIMATORS.find(estimator)
    if not blocks:
        raise InvalidInput("No block was given.", "At least one is scored.", "Make them with layerbudget.partition(model).")
    shared = {"damping": damping, "damping_unit": damping_unit, "batch_size": batch_size, "seed": seed}
    arguments: dict[str, Any] = chosen.resolve_options({**shared, **options})
    if data is None and chosen.data:
        raise InvalidInput(f"{estimator} needs calibration data.", "", "Give some: layerbudget.calibration(...).")
    check_inputs(arguments.get("batch_size", 1))
    check_damping(arguments.get("damping"), arguments.get("damping_unit", "max"))
    model_blocks.check_finite(model)
    check_fits(model, data)
    data = data if chosen.data else None
    if chosen.name in _OF_ADAPTERS:
        blocks, lost = model_blocks.adaptable(model, blocks)
        if lost:
            logger.warning(
                "%d matrices are left out, the first %s: PEFT puts no adapter there (it refuses outputs of state space "
                "mixers, and takes plain gate, up and down beside fused experts for the experts).",
                len(lost),
                lost[0],
            )
    finished = None
    if resume is not None and is_main():
        finished = Finished(resume, request_of(model, data, blocks, chosen.name, arguments), blocks)
    known = None if resume is None else broadcast(lambda: None if finished is None else finished.scores())
    if known is not None:
        return known
    aside = {"progress": progress, "resume": resume, "finished": finished if process_group().size == 1 else None}
    arguments |= {name: value for name, value in aside.items() if value is not None and chosen.takes(name)}
    scores = _with_provenance(chosen.call(model, data, blocks, **arguments), model, data)
    if finished is not None:
        finished.finish(scores)
    return scores


def _with_provenance(scores: Scores, model: nn.Module, data: Data | None) -> Scores:
    if "computation" in scores.model:
        return scores
    described = {**model_blocks.describe(model), "computation": computation(model), **scores.model}
    source = scores.data or ({} if data is None else {**data.describe(), **getattr(data, "of_rows", dict)()})
    return dataclasses.replace(scores, model=described, data=source, versions=scores.versions or versions())
