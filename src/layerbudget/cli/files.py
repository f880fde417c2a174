"""What the commands of the decision core read and show."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CorruptFile, InvalidInput
from ..models.configurations import blocks_from_config
from ..records import Block
from ..scores import Scores
from ..sensitivity.importing import scores_with_shapes
from ..storage import reading


class Leaves:
    """Subparsers whose parsers all inherit the same parents (``--json``, say)."""

    def __init__(self, subparsers: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
        self.subparsers, self.parents = subparsers, list(parents)

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Add one parser."""
        return self.subparsers.add_parser(name, parents=self.parents, **options)


_HEAD = 1 << 25  # bytes that a configuration may have


def load_scores(path: str) -> Scores | Sequence[Block]:
    """Scores from scores.json, or from a table with the shapes of the blocks; or blocks from a model's config.json.

    Raises:
        NotFound, CorruptFile: No such file, or none of these.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if file.suffix.lower() in (".csv", ".npy"):
        return scores_with_shapes(file)
    if file.is_file() and file.stat().st_size <= _HEAD:
        record = read_any(file)
        if isinstance(record, Mapping) and "schema_version" not in record:
            if "hidden_size" in record or "text_config" in record:
                return blocks_from_config(record)
        if isinstance(record, list) or (isinstance(record, Mapping) and {"name", "d_in"} <= set(record)):
            return scores_with_shapes(file)
    elif file.is_file():
        with file.open("rb") as handle:
            if b'"schema_version"' not in handle.read(4096):
                return scores_with_shapes(file)
    return Scores.load(file)


def need_scores(path: str) -> Scores:
    """Scores from scores.json.

    Raises:
        InvalidInput: A configuration, which holds no scores.
    """
    found = load_scores(path)
    if isinstance(found, Scores):
        return found
    raise InvalidInput(f"{path} is a configuration and holds no scores.", "", "Score the model first: layerbudget score.")


def read_any(path: Path) -> Any:
    """Parsed JSON.

    Raises:
        NotFound, CorruptFile: No such file, or not JSON.
    """
    return reading.read(path, "JSON")


LARGEST = 1e100  # of a measured number: squares and sums of such are still numbers


def read_curves(path: str) -> dict[str, tuple[list[float], list[float]]]:
    """Measured curves ``{block: (ratios, losses)}``.

    Raises:
        NotFound, CorruptFile: No such file, or no curves in it.
    """
    record = read_any(Path(path))
    curves = record.get("curves", record) if isinstance(record, Mapping) else None
    try:
        found = {str(k): ([float(x) for x in v[0]], [float(x) for x in v[1]]) for k, v in curves.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise CorruptFile(
            f"{path} holds no curves ({error!r}).", "It needs {block: [ratios, losses]}.", "Measure again."
        ) from error
    beyond = next((k for k, sides in found.items() for side in sides for x in side if not abs(x) <= LARGEST), None)
    if beyond is not None:
        raise CorruptFile(f"{path}: the curve of {beyond} holds numbers beyond {LARGEST:g}.", "", "Measure again.")
    return found


def read_latency(path: str) -> dict[str, float]:
    """Seconds per unit of capacity ``{block: seconds}``.

    Raises:
        NotFound, CorruptFile: No such file, or not a number for every name.
    """
    record = read_any(Path(path))
    try:
        return {str(k): float(v) for k, v in record.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path} holds no latencies ({error!r}).", "It needs {block: seconds}.", "Measure again.") from error


def read_fixed(items: Iterable[str]) -> dict[str, float]:
    """``BLOCK=NUMBER`` items as a mapping.

    Raises:
        InvalidInput: An item does not parse.
    """
    fixed = {}
    for item in items:
        name, _, value = item.rpartition("=")
        try:
            fixed[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise InvalidInput(
                f"--fix {item!r} does not parse.", "It is BLOCK=NUMBER.", "For example --fix model.layers.0=0.2."
            )
    return fixed


ROWS = 400  # of a table: nobody reads more, and drawing a million takes minutes


def show_table(
    a: argparse.Namespace, title: str, head: Sequence[str], rows: Iterable[Any], cells: Callable[[Any], Sequence[Any]] = tuple
) -> None:
    """Show a table where ``arguments.console`` is a rich console that a person may read; a long one loses its middle."""
    console = getattr(a, "console", None)
    if console is None or (getattr(a, "json", False) and not console.is_terminal):
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, no_wrap=name == "block")  # cut names of layers would all look alike
    rows = rows if isinstance(rows, Sequence) else list(rows)
    left_out = len(rows) - ROWS
    shown = [cells(row) for row in (rows if left_out <= 0 else [*rows[: ROWS // 2], *rows[-(ROWS // 2) :]])]
    if left_out > 0:
        shown.insert(ROWS // 2, (f"... {left_out:,} more", *[""] * (len(head) - 1)))
    for row in shown:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v) for v in row))
    console.print(table)


def say(a: argparse.Namespace, sentences: Iterable[str]) -> None:
    """Show sentences where ``arguments.console`` is a rich console."""
    console = getattr(a, "console", None)
    if console is not None:
        for sentence in sentences:
            console.print(sentence)
