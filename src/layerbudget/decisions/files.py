"""Files that commands of the decision core read: scores, configurations, curves, latencies. No torch."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CorruptFile, InvalidInput, NotFound
from ..models.memory import check_positions, read_context
from ..plan import Plan
from ..records import Block
from ..scores import Scores
from ..sensitivity.importing import scores_with_shapes
from ..storage import reading

SMALL = 1 << 25  # bytes of a file that is read twice
_DEMO = Path(__file__).parents[1] / "demo" / "model"
LARGEST = 1e100  # of a measured number: squares and sums of such are still numbers


def load_scores(path: str) -> Scores | Sequence[Block]:
    """Return scores from scores.json or from a table with the shapes of the blocks, or blocks from a model's config.json."""
    file = Path(path)
    if file.is_dir() or not (file.suffix or file.exists()) or file.name.endswith("config.json"):
        from ..models.loading import blocks_from_config, resolve

        return blocks_from_config(file if file.exists() else resolve(path))
    table = file.suffix.lower() == ".csv"
    if file.is_file() and not table:
        with file.open("rb") as handle:
            table = handle.read(64).lstrip().startswith(b"[")
    return scores_with_shapes(file) if table else Scores.load(file)


def need_scores(path: str, makes: str = "score") -> Scores:
    """Return scores from scores.json, or say which command ``makes`` them."""
    if not Path(path).exists() and makes != "score":
        remedy = f"Check the path, or measure first: layerbudget {makes}."
        raise NotFound(f"There is no scores file at {path}.", "MODEL is a folder or a hub id.", remedy)
    scores = load_scores(path)
    if isinstance(scores, Scores):
        return scores
    raise InvalidInput(f"{path} is a configuration and holds no scores.", "", f"Measure the model first: layerbudget {makes}.")


def _read(path: str, what: str, kind: Any, needed: str) -> tuple[Any, Mapping[str, Any]]:
    """A table of blocks in a JSON file: what it holds under that name or as a whole, and the whole."""
    record = reading.read(Path(path), "JSON")
    try:
        table = msgspec.convert(record[what] if isinstance(record, Mapping) and what in record else record, kind, strict=False)
    except msgspec.ValidationError as error:
        raise CorruptFile(f"{path} holds no {what} ({error}).", f"It needs {needed}.", "Measure again.") from error
    return table, record


def read_curves(path: str) -> tuple[dict[str, tuple[list[float], list[float]]], str | None]:
    """Return measured curves ``{block: (ratios, losses)}``, and the pruner that they are of where it is named."""
    needed = "{block: [ratios, losses]}"
    curves, record = _read(path, "curves", dict[str, tuple[list[float], list[float]]], needed)
    beyond = next((k for k, sides in curves.items() for side in sides for x in side if not abs(x) <= LARGEST), None)
    if beyond is not None:
        raise CorruptFile(f"{path}: the curve of {beyond} holds numbers beyond {LARGEST:g}.", "", "Measure again.")
    return curves, record.get("method") if "curves" in record else None


def read_latency(path: str) -> dict[str, float]:
    """Return seconds per unit of capacity ``{block: seconds}``."""
    return _read(path, "latencies", dict[str, float], "{block: seconds}")[0]


def refuse_long(name: str, context: str | int) -> None:
    """Refuse a context that a local configuration says to be too long; others are refused once they are loaded."""
    tokens, path = read_context(context), Path(name).expanduser()
    file = path if path.suffix == ".json" else (_DEMO if name == "demo" else path) / "config.json"
    record = reading.read(file, "configuration", limit=1 << 26) if file.is_file() else None
    record = record.get("text_config") or record if isinstance(record, dict) else {}
    most = record.get("max_position_embeddings")
    check_positions(tokens, most if isinstance(most, int) else 0)


def check_rows(source: str | None) -> None:
    """Refuse local files of text that are missing, do not read, or hold broken messages, before anything is loaded.

    Large files are left to the verb itself.
    """
    from ..data.dialogues import check_messages
    from ..data.files import is_local, parts_of, read_rows

    parts = parts_of(source or "")
    if not parts or not all(is_local(part) for part in parts):
        return
    for part in parts:
        path = Path(part).expanduser()
        if not path.is_file() or path.stat().st_size <= SMALL:
            check_messages(read_rows(part))


def read_fixed(items: Iterable[str]) -> dict[str, float]:
    """Return what blocks get in any case, from ``BLOCK=NUMBER``."""
    fixed = {}
    for item in items:
        name, _, value = item.rpartition("=")
        if name in fixed:
            raise InvalidInput(f"--fix names {name} twice.", "A block is fixed at one number.", "Leave one of them out.")
        try:
            fixed[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise InvalidInput(
                f"--fix {item!r} does not parse.", "It is BLOCK=NUMBER.", "For example --fix model.layers.0=0.2."
            )
    return fixed


def text_of_plan(plan: Plan) -> dict[str, Any]:
    """Return ``data``, ``samples``, ``length`` and ``seed`` of the text that decided a plan.

    They are in the plan, or in the command that made it, which names a text as the user did; empty where neither says.

    >>> from types import SimpleNamespace
    >>> text_of_plan(SimpleNamespace(made_by="layerbudget plan shapes demo --data my.txt --samples 8 --length 64", data={}))
    {'data': 'my.txt', 'samples': 8, 'length': 64}
    """
    made = dict(itertools.pairwise(shlex.split(plan.made_by)))
    typed = {name: made[f"--{name}"] for name in ("data", "samples", "length", "seed") if f"--{name}" in made}
    options: dict[str, Any] = {name: value if name == "data" else int(value) for name, value in typed.items()}
    kept = {n: plan.data[n] for n in ("samples", "length", "seed") if n in plan.data}
    return {**({"data": plan.data["source"]} if "source" in plan.data else {}), **options, **kept}
