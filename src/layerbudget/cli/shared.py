"""What several commands share: options for text, progress bars, writing results."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Callback = Callable[[int, int], None]


def add_data_options(parser: argparse.ArgumentParser, *, samples: int = 128, length: int = 256) -> None:
    """``--data --samples --length --seed --batch-size --dtype``."""
    parser.add_argument(
        "--data", default="stdlib", help="stdlib, c4, wikitext2, name[:config[:split[:column]]], or local files"
    )
    parser.add_argument("--samples", type=int, default=samples, help="calibration sequences (default %(default)s)")
    parser.add_argument("--length", type=int, default=length, help="tokens per sequence (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", help="precision in which the model is loaded (default %(default)s)")
    parser.add_argument("--revision", help="hub revision of the model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default %(default)s)")


def load(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Model, tokenizer and calibration set that the options name."""
    from ..data.text import calibration
    from ..loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(arguments.model, revision=arguments.revision)
    data = calibration(arguments.data, tokenizer, samples=arguments.samples, length=arguments.length, seed=arguments.seed)
    options = {"four_bit": True} if getattr(arguments, "four_bit", False) else {}
    model = load_model(arguments.model, dtype=arguments.dtype, revision=arguments.revision, device=arguments.device, **options)
    return model, tokenizer, data


def named_values(texts: Sequence[str]) -> dict[str, Any]:
    """Options given as ``--set NAME=VALUE``; a value is read as JSON where it is JSON, as text otherwise."""
    from ..errors import InvalidInput

    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise InvalidInput(f"--set {text} is not NAME=VALUE.", "", "Write for example --set draws=4.")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


@contextlib.contextmanager
def progress_bar(arguments: argparse.Namespace, text: str) -> Iterator[Callback | None]:
    """Yield a ``callback(done, total)`` that draws a bar with the time left, or nothing with ``--quiet``."""
    if getattr(arguments, "quiet", False):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
