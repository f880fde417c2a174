"""A model is looked at before GPU hours are spent: what will fail, what misleads, and what every long verb takes."""

from .checks import Finding
from .diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]
