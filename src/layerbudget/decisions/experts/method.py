"""Mixture of LoRA experts as a PEFT method: every module holds its own number of experts and a router over them.

Importing this module registers the method with PEFT, so import it before ``PeftModel.from_pretrained``.
"""

from __future__ import annotations

from .config import ExpertsConfig
from .layer import ExpertsLinear
from .registration import register
from .tuner import ExpertsModel

__all__ = ["ExpertsConfig", "ExpertsLinear", "ExpertsModel"]

register()
