"""The packages that know the formats, imported when they are needed. No torch."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import MissingDependency


def need_gguf() -> Any:
    """The package ``gguf``.

    Raises:
        MissingDependency: It is not installed.
    """
    return _need("gguf", "GGUF formats need the package gguf.", "use compressed-tensors")


def need_packing() -> tuple[Any, Any]:
    """The packer of compressed-tensors and its scheme.

    Raises:
        MissingDependency: It is not installed.
    """
    what, other = "Writing these formats needs the package compressed-tensors.", "plan for gguf"
    packer = _need("compressed_tensors.compressors.pack_quantized.base", what, other)
    return packer.PackedQuantizationCompressor, _need("compressed_tensors.quantization", what, other).QuantizationScheme


def _need(module: str, what: str, other: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(what, "", f"Install layerbudget[bits], or {other}.") from error
