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
        by_name = options_of(self._function, without=_GIVEN)
        return {name: by_name[name] for name in sorted(by_name, key=lambda n: SHARED.index(n) if n in SHARED else len(SHARED))}

    @property
    def _function(self) -> Call:
        return load_function(self.home, __package__)

    def takes(self, name: str) -> bool:
        """Whether its function has such a parameter: ``progress``, ``resume``, ``finished``."""
        return name in inspect.signature(self._function).parameters

    def resolve_options(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """All options, see :func:`layerbudget.registry.resolve_options`."""
        return resolve_options(f"The estimator {self.name}", self.options, chosen)


_OWN = {
    "gradient-norm": (".curvature.diagonal:score_gradient_norm", "squared norm of the gradient"),
    "fisher-diagonal": (".curvature.diagonal:score_diagonal", "gain under the diagonal empirical Fisher"),
    "fisher-gram": (".curvature.fisher:score_gram", "gain under the empirical Fisher, with noise floor, errors and verdict"),
    "fisher-mc": (".curvature.fisher:score_monte_carlo", "gain under the Fisher with labels from the model"),
    "kfac": (".curvature.kfac:score_kfac", "gain under K-FAC, damped exactly"),
    "ekfac": (".curvature.kfac:score_kfac", "gain under EK-FAC"),
    "ggn": (".curvature.exact:score_ggn", "gain under the exact Gauss-Newton matrix, in a bracket"),
    "hessian": (".curvature.exact:score_hessian", "gain under the exact Hessian: a diagnostic"),
    "adapter": (".adapter_space:score_adapter", "gain of adding a LoRA adapter"),
    "rank-gain": (".rank_gain:score_rank_gain", "gain of every further LoRA rank"),
    "layerif": (".influence:score_layerif", "LayerIF: influence of training on validation samples"),
    "fisher-trace": (".curvature.diagonal:score_trace", "trace of the empirical Fisher"),
    "outlier-ratio": (".baselines:outlier_ratio", "OWL's share of outlying weights"),
    "spectral-tail": (".baselines:spectral_tail", "AlphaPruning's exponent of weight spectra"),
    "ablation": (".ablation:ablation", "loss increase without the block"),
    "block-influence": (".ablation:block_influence", "ShortGPT's turn of the hidden states"),
}
_LINEAR = ("kfac", "ekfac", "adapter", "rank-gain", "outlier-ratio")


def _own(name: str, home: str, summary: str) -> Estimator:
    preset = {"corrected": True} if name == "ekfac" else {}
    data, linear = name != "spectral-tail", name in _LINEAR
    return Estimator(name=name, home=home, summary=summary, data=data, linear=linear, preset=preset)


ESTIMATORS: Registry[Estimator] = Registry(
    "estimator", group="layerbudget.estimators", builtin={name: _own(name, *row) for name, row in _OWN.items()}
)


def estimator(name: str, *, summary: str = "", data: bool = True) -> Callable[[Call], Call]:
    """Register a function ``(model, data, blocks, *, ...) -> Scores`` under a name; a name that is taken is replaced.

    ``summary`` is a line for the help, ``data`` says whether it reads data.
    """

    def add(call: Call) -> Call:
        ESTIMATORS.add(name, Estimator(name=name, home=call, summary=summary, data=data))
        return call

    return add
