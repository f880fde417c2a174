"""Preflight: examine a model before GPU hours are spent."""

from .checks import Finding
from .diagnosis import Diagnosis, double_backward_attention, examine

__all__ = ["Diagnosis", "Finding", "double_backward_attention", "examine"]
