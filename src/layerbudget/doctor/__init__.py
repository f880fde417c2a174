"""Preflight: a model is looked at before GPU hours are spent."""

from .checks import Finding
from .diagnosis import Diagnosis, diagnose, double_backward_attention

__all__ = ["Diagnosis", "Finding", "double_backward_attention", "diagnose"]
