"""The packages that know the formats, imported when they are needed. No torch."""

from __future__ import annotations

from typing import Any

from ..errors import MissingDependency


def need_gguf() -> Any:
    """The package ``gguf``.

    Raises:
        MissingDependency: It is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingDependency(
            "GGUF formats need the package gguf.", "", "Install layerbudget[bits], or use compressed-tensors."
        ) from error
    return gguf
