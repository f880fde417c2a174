"""Sentences on a GGUF file that a command has written: what it is expected to cost, and what compares it with the model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ..plan import Plan
from ..session import Session

_DENSE, _KEPT = "model-f16.gguf", "--kl-divergence-base base.kld"


def end_of_gguf(
    session: Session, plan: Plan, *sentences: str, file: str, dense: str | None = None, cache: str = ""
) -> dict[str, Any]:
    """Say what a file is expected to cost and what measures it: ``evaluate`` where it reads the file, else llama.cpp.

    Args:
        session: The command.
        plan: The plan.
        sentences: What is said before.
        file: The file.
        dense: The GGUF file that it was made from; None where it was made from the model itself.
        cache: Options of llama.cpp for the types of the cache, which only llama.cpp rounds.

    Returns:
        Both as fields.
    """
    from ..execution.processes import broadcast
    from ..gguf.header import is_read

    run = "llama-perplexity -m"
    compares = f"{run} {shlex.quote(dense or _DENSE)} -f TEXT {_KEPT} && {run} {shlex.quote(file)} {_KEPT} --kl-divergence"
    compares += f" {cache}" if cache else ""
    evaluates = not cache and broadcast(lambda: is_read(Path(file)))
    more = [f"llama.cpp compares both by {compares}"] if evaluates else []
    more.append("llama.cpp rounds activations too: its own figures are higher, for every file.")
    if dense is None:
        more.append(f"{_DENSE} is the unrounded model, as llama.cpp's convert_hf_to_gguf.py --outtype f16 writes it.")
    other = "" if evaluates else compares
    return session.end(plan, *sentences, more=more, options=("--dtype", "float32"), other=other)
