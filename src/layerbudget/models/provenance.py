"""What numbers depend on beside weights and data: precision, kernels, versions. A part of every identity that is resumed."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .blocks import quantised

PACKAGES = ("torch", "transformers", "numpy")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of what computed the numbers; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def computation(model: nn.Module) -> dict[str, Any]:
    """Precision and kernels in which a model computes: two runs that differ here are two measurements.

    Returns:
        ``dtype`` (all types of parameters), ``quantised``, ``attention`` and ``experts`` (implementations that transformers was
        told to use), ``autocast`` (type, where it is on for the model's device) and ``matmul`` (torch's float32 precision). The
        device itself is left out: kernels of one precision differ by rounding, as batch sizes do.
    """
    config, first = getattr(model, "config", None), next(model.parameters(), None)
    device = "cpu" if first is None else first.device.type
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    return {
        "dtype": "+".join(kinds),
        "quantised": bool(quantised(model)),
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "autocast": str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else None,
        "matmul": torch.get_float32_matmul_precision(),
    }
