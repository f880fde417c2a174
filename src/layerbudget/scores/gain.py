"""The layer gain ``zeta_k^2 = g_k'(C_k + tau I)^-1 g_k`` under every curvature, by name.

Half of it is the decrease of the damped quadratic model of the loss when block k alone may move (paper, Lemma 1).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .. import blocks as model_blocks
from ..errors import InvalidInput
from ..records import Block
from . import stages
from .curvature.common import Progress
from .loss import Data
from .record import Scores

ESTIMATORS: dict[str, str] = {
    "gradient-norm": "layerbudget.scores.curvature.gradient:score_gradient_norm",
    "fisher-diagonal": "layerbudget.scores.curvature.diagonal:score_diagonal",
    "fisher-gram": "layerbudget.scores.curvature.fisher:score_gram",
    "fisher-mc": "layerbudget.scores.curvature.fisher:score_monte_carlo",
    "kfac": "layerbudget.scores.curvature.kfac:score_kfac",
    "ekfac": "layerbudget.scores.curvature.kfac:score_ekfac",
    "ggn": "layerbudget.scores.curvature.ggn:score_ggn",
    "hessian": "layerbudget.scores.curvature.hessian:score_hessian",
    "nystrom": "layerbudget.scores.curvature.nystrom:score_nystrom",
    "adapter": "layerbudget.scores.adapter_space:score_adapter",
    "rank-gain": "layerbudget.scores.rank_gain:score_rank_gain",
    "layerif": "layerbudget.scores.influence:score_layerif",
    "fisher-trace": "layerbudget.scores.proxies:fisher_trace",
    "outlier-ratio": "layerbudget.scores.proxies:outlier_ratio",
    "spectral-tail": "layerbudget.scores.proxies:spectral_tail",
    "ablation": "layerbudget.scores.proxies:ablation",
    "block-influence": "layerbudget.scores.proxies:block_influence",
}


def check_estimator(name: str) -> None:
    """Refuse an unknown estimator, before a model is loaded.

    Raises:
        InvalidInput: The message lists the known names.
    """
    if name not in ESTIMATORS:
        raise InvalidInput(f"There is no estimator {name!r}.", f"There are {', '.join(ESTIMATORS)}.", "Choose one of those.")


def _check_options(estimator: str, call: Callable[..., Scores], options: Mapping[str, Any]) -> None:
    """Refuse options that the estimator does not have, instead of ignoring them.

    Raises:
        InvalidInput: The message lists those that it has.
    """
    shared = ("model", "data", "blocks", "damping", "damping_unit", "batch_size", "seed", "progress", "stage")
    parameters = inspect.signature(call).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in shared]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InvalidInput(
            f"{estimator} has no option {unknown[0]!r}.",
            f"Its options are {', '.join(known)}." if known else "It has no options.",
            "Correct the name or leave it out.",
        )


def score(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    estimator: str = "fisher-gram",
    damping: float | Sequence[float] | None = None,
    damping_unit: str | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    stage: Path | str | None = None,
    **options: Any,
) -> Scores:
    """Score every block of a model on a calibration set.

    Args:
        model: Any transformers model with a head, or a plain classifier.
        data: The calibration set.
        blocks: From :func:`layerbudget.blocks.partition`.
        estimator: A name of :data:`ESTIMATORS`.
        damping: tau, one or several, in ``damping_unit``; ``None`` for the default sweep.
        damping_unit: ``max`` or ``mean`` (relative to each block's own largest or mean eigenvalue), ``median`` (one damping for
            all blocks, relative to the median of their largest eigenvalues) or ``absolute``; ``None`` for the estimator's own
            choice: ``median`` for ``adapter``, ``max`` for all others.
        batch_size: Sequences per forward pass.
        seed: Of everything random. The same seed gives the same bytes.
        progress: Called with ``(done, total)`` sequences or products.
        stage: Folder in which finished records are kept and found again; ``fisher-gram`` also keeps its per-sequence rows
            there, so that a run resumes and more samples cost only themselves.
        **options: Of the estimator (``sketch``, ``draws``, ``steps``, ...).

    Returns:
        A record with one row per damping: gains, standard errors, noise floors, status, provenance.

    Raises:
        InvalidInput: An unknown estimator or an argument outside its domain.
        UnknownBlock: A block that the model does not have.
        BadModel: Weights that are not finite.
        CoverageError: Weight matrices that the estimator cannot see.
        CurvatureFailure: A curvature that is not positive definite at any damping.
    """
    check_estimator(estimator)
    module, function = ESTIMATORS[estimator].split(":")
    call = getattr(importlib.import_module(module), function)
    _check_options(estimator, call, options)
    model_blocks.check_finite(model)
    unit = damping_unit or ("median" if estimator == "adapter" else "max")
    arguments = {"damping": damping, "damping_unit": unit, "batch_size": batch_size, "seed": seed, **options}
    if stage is None:
        return call(model, data, blocks, progress=progress, **arguments)
    key = stages.request(model, data, blocks, estimator, arguments)
    known = stages.finished(stage, key)
    if known is not None:
        return known
    if estimator == "fisher-gram":
        arguments["stage"] = stage
    scores = call(model, data, blocks, progress=progress, **arguments)
    stages.keep(stage, key, scores)
    return scores
