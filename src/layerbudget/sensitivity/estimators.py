"""The estimators by name, and their options: what an estimator does not read is refused, never ignored.

Its options are the keyword-only parameters of its function. ``damping``, ``damping_unit``, ``batch_size`` and ``seed`` mean
what they mean everywhere (:func:`layerbudget.sensitivity.gain.score`). The decorator :func:`estimator` registers a function of
one's own when its file is imported; an entry point of the group ``layerbudget.estimators`` names its module, and
``my.py:weight-norm`` names it in a file. No torch here: functions are imported when they are used.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..registry import Option, Registry, load_function, options_of, resolve_options
from ..scores import Scores

Call = Callable[..., Scores]
SHARED = ("damping", "damping_unit", "batch_size", "seed")
_GIVEN = ("progress", "resume", "finished", "corrected")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimator:
    """One way of scoring blocks.

    ``home`` is ``module:function`` below this package, or the function itself; ``summary`` a line for the help and the docs.
    ``data`` says whether it reads data at all, ``linear`` whether it knows Linear and Conv1D only and refuses fused experts.
    ``preset`` are arguments that tell it from another estimator with the same function.
    """

    name: str
    home: str | Call
    summary: str
    data: bool = True
    linear: bool = False
    preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def call(self) -> Call:
        """The function."""
        return functools.partial(self._function, **self.preset)

    @property
    def options(self) -> dict[str, Option]:
        """Every option that it reads, shared ones first."""
        found = options_of(self._function, without=_GIVEN)
        return {name: found[name] for name in sorted(found, key=lambda n: SHARED.index(n) if n in SHARED else len(SHARED))}

    @property
    def _function(self) -> Call:
        return load_function(self.home, __package__)

    def takes(self, name: str) -> bool:
        """Whether its function has such a parameter: ``progress``, ``resume``, ``finished``."""
        return name in inspect.signature(self._function).parameters

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options, see :func:`layerbudget.registry.resolve_options`."""
        return resolve_options(f"The estimator {self.name}", self.options, given)


_OWN = (
    Estimator(name="gradient-norm", home=".curvature.diagonal:score_gradient_norm", summary="squared norm of the gradient"),
    Estimator(
        name="fisher-diagonal", home=".curvature.diagonal:score_diagonal", summary="gain under the diagonal empirical Fisher"
    ),
    Estimator(
        name="fisher-gram",
        home=".curvature.fisher:score_gram",
        summary="gain under the empirical Fisher, with noise floor, errors and verdict",
    ),
    Estimator(
        name="fisher-mc", home=".curvature.fisher:score_monte_carlo", summary="gain under the Fisher with labels from the model"
    ),
    Estimator(name="kfac", home=".curvature.kfac:score_kfac", linear=True, summary="gain under K-FAC, damped exactly"),
    Estimator(
        name="ekfac", home=".curvature.kfac:score_kfac", linear=True, summary="gain under EK-FAC", preset={"corrected": True}
    ),
    Estimator(name="ggn", home=".curvature.exact:score_ggn", summary="gain under the exact Gauss-Newton matrix, in a bracket"),
    Estimator(name="hessian", home=".curvature.exact:score_hessian", summary="gain under the exact Hessian: a diagnostic"),
    Estimator(name="adapter", home=".adapter_space:score_adapter", linear=True, summary="gain of adding a LoRA adapter"),
    Estimator(name="rank-gain", home=".rank_gain:score_rank_gain", linear=True, summary="gain of every further LoRA rank"),
    Estimator(name="layerif", home=".influence:score_layerif", summary="LayerIF: influence of training on validation samples"),
    Estimator(name="fisher-trace", home=".curvature.diagonal:score_trace", summary="trace of the empirical Fisher"),
    Estimator(name="outlier-ratio", home=".baselines:outlier_ratio", linear=True, summary="OWL's share of outlying weights"),
    Estimator(
        name="spectral-tail", home=".baselines:spectral_tail", data=False, summary="AlphaPruning's exponent of weight spectra"
    ),
    Estimator(name="ablation", home=".ablation:ablation", summary="loss increase without the block"),
    Estimator(name="block-influence", home=".ablation:block_influence", summary="ShortGPT's turn of the hidden states"),
)
ESTIMATORS: Registry[Estimator] = Registry("estimator", group="layerbudget.estimators", own={e.name: e for e in _OWN})


def estimator(name: str, *, summary: str = "", data: bool = True) -> Callable[[Call], Call]:
    """Register a function ``(model, data, blocks, *, ...) -> Scores`` under a name; a name that is taken is replaced.

    ``summary`` is a line for the help, ``data`` says whether it reads data.
    """

    def add(call: Call) -> Call:
        ESTIMATORS.add(name, Estimator(name=name, home=call, summary=summary, data=data))
        return call

    return add


def estimators() -> dict[str, Estimator]:
    """All estimators by name."""
    return ESTIMATORS.all()


def find_estimator(name: str) -> Estimator:
    """The estimator of that name."""
    return ESTIMATORS.find(name)
