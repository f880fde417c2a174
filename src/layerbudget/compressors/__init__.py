"""Treatments of one weight matrix. A new treatment is a file here and a line in the table, or a decorator anywhere."""

from .base import TREATMENTS, Level, Treatment, treatment

__all__ = ["TREATMENTS", "Level", "Treatment", "treatment"]
