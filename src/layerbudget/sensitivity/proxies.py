"""Every proxy score under one roof: what other papers rank layers by, in the same record as the gain.

``gradient norm`` lives with the curvatures (:mod:`layerbudget.sensitivity.gain`), LayerIF in
:mod:`layerbudget.sensitivity.influence`.
"""

from __future__ import annotations

from .ablation import ablation, block_influence
from .outliers import outlier_ratio
from .spectral import spectral_tail
from .trace import fisher_trace

__all__ = ["ablation", "block_influence", "fisher_trace", "outlier_ratio", "spectral_tail"]
