"""Files that commands of the decision core read: scores, configurations, curves, latencies. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import CorruptFile, InvalidInput
from ..records import Block
from ..scores import Scores
from ..sensitivity.importing import scores_with_shapes
from ..storage import reading

_HEAD = 1 << 25  # bytes that a configuration may have
LARGEST = 1e100  # of a measured number: squares and sums of such are still numbers


def load_scores(path: str) -> Scores | Sequence[Block]:
    """Return scores from scores.json, or from a table with the shapes of the blocks; or blocks from a model's config.json.

    Raises:
        NotFound, CorruptFile: No such file, or none of these.
    """
    file = Path(path)
    if not file.suffix and not file.exists():
        from ..models.loading import resolve

        file = Path(resolve(path))
    file = file / "config.json" if file.is_dir() else file
    if file.suffix.lower() == ".csv":
        return scores_with_shapes(file)
    if file.is_file() and file.stat().st_size <= _HEAD:
        record = reading.read(file, "JSON")
        if isinstance(record, Mapping) and "schema_version" not in record:
            if "hidden_size" in record or "text_config" in record:
                from ..models.loading import blocks_from_config

                return blocks_from_config(file)
        if isinstance(record, list):
            return scores_with_shapes(file)
    elif file.is_file():
        with file.open("rb") as handle:
            if b'"schema_version"' not in handle.read(4096):
                return scores_with_shapes(file)
    return Scores.load(file)


def need_scores(path: str) -> Scores:
    """Return scores from scores.json.

    Raises:
        InvalidInput: A configuration, which holds no scores.
    """
    found = load_scores(path)
    if isinstance(found, Scores):
        return found
    raise InvalidInput(f"{path} is a configuration and holds no scores.", "", "Score the model first: layerbudget score.")


def read_curves(path: str) -> tuple[dict[str, tuple[list[float], list[float]]], str | None]:
    """Return measured curves ``{block: (ratios, losses)}``, and the pruner that they are of where it is named.

    Raises:
        NotFound, CorruptFile: No such file, or no curves in it.
    """
    record = reading.read(Path(path), "JSON")
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
    return found, record.get("method")


def read_latency(path: str) -> dict[str, float]:
    """Return seconds per unit of capacity ``{block: seconds}``."""
    record = reading.read(Path(path), "JSON")
    try:
        return {str(k): float(v) for k, v in record.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path} holds no latencies ({error!r}).", "It needs {block: seconds}.", "Measure again.") from error


def read_fixed(items: Iterable[str]) -> dict[str, float]:
    """Return what blocks get in any case, from ``BLOCK=NUMBER``."""
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
