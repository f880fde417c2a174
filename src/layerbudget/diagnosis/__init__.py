"""A model is looked at before GPU hours are spent: what will fail, what misleads, and what every long verb takes."""

from .diagnosis import Diagnosis, Finding, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]
