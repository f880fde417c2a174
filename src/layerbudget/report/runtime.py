"""What gets smaller and what gets faster, where. Nothing is promised that no kernel delivers."""

from __future__ import annotations

_DENSE = (
    "file and memory: smaller by the removed parameters; time: less, by somewhat under the removed FLOPs' share, everywhere"
)
_ROWS = {
    "unstructured": (
        "unstructured zeros, stored densely",
        "file and memory: unchanged (a compressed copy: layerbudget export DIR --to packed); time: unchanged in every "
        "common runtime",
    ),
    "n:m": (
        "n:m zeros, stored densely",
        "file and memory: unchanged; time: unchanged unless your runtime has kernels for exactly this pattern on your GPU "
        "(2:4 only; vLLM removed its 2:4 kernels)",
    ),
    "depth": ("whole blocks removed", "file, memory, key-value cache and time: smaller in proportion, everywhere"),
    "heads": (
        "attention heads removed",
        _DENSE + "; key-value cache: smaller only where whole key-value groups went",
    ),
    "structured": (
        "heads, MLP width or whole blocks removed",
        _DENSE + "; key-value cache: smaller by the removed key-value groups and blocks only",
    ),
    "width": (
        "MLP width removed",
        _DENSE,
    ),
}


def runtime_box(kind: str = "unstructured", *, pattern: str | None = None) -> str:
    """One honest paragraph about a pruned checkpoint.

    Args:
        kind: ``unstructured``, ``depth``, ``heads``, ``width`` or ``structured``.
        pattern: The n:m pattern, when there is one.

    >>> runtime_box("depth").split(". ")[0]
    'What you have: whole blocks removed'
    """
    what, effect = _ROWS["n:m" if pattern else kind]
    return f"What you have: {what}. What it changes: {effect}."
