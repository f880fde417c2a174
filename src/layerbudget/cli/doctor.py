"""``layerbudget doctor``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from ..budget import parse_bytes, unit_of
from ..decisions.files import refuse_long
from ..errors import InvalidInput
from ..models.memory import read_context
from ..requests import TEXT, TextRequest, model_option, option
from .session import Session, split_revision

_ALONE = ("finetune", "compare", "demo")  # torch's own sums, parts of a grid, and one process
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


@dataclasses.dataclass(kw_only=True)
class DoctorRequest(TextRequest):
    """Check a model, and price every long command, before hours are spent."""

    command: ClassVar[str] = "doctor"
    unread: ClassVar[tuple[str, ...]] = ("table", "dry_run")
    prices: ClassVar[bool] = True

    model: str = model_option("demo, a local folder, a hub id, a GGUF file, or a config.json (prices only)")
    card: str | None = option(
        None,
        metavar="SIZE",
        help='price the long commands for a card or machine of so much memory, "24 GiB" (default: this one); loads no weights',
    )
    context: str | None = option(
        None, metavar="TOKENS", help="with --card: also say how many bits fit it at 8192 or 32k tokens"
    )
    machines: int | None = option(
        None, metavar="N", help="also price every long command for each of N processes, with a card of its own for every one"
    )
    samples: int | None = option(None, group=TEXT, help="price every command for so many sequences (default: its own number)")
    batch_size: int | None = option(None, group=TEXT, help="sequences per forward pass (default: 8)")

    def check(self) -> None:
        """Refuse a context without a card, and one that the model does not have."""
        super().check()
        if self.context and not self.card:
            raise InvalidInput("--context needs a memory.", "The cache lies in it.", "Give --card '8 GiB'.")
        if self.context:
            refuse_long(self.model, self.context)  # at once: PyTorch and transformers take seconds to load
        if self.card or not _has_weights(self.model):
            why = "--card, which reads no text and no weights" if self.card else "a configuration without weights"
            self.refuse(("data", "stream"), why)


def run(session: Session) -> dict[str, Any]:
    """Examine the model, price every long command; exit code 1 where something will fail."""
    from rich.table import Table
    from rich.text import Text as Words

    from ..cost.price import place_of
    from ..cost.sizes import Text
    from ..diagnosis import diagnose
    from ..diagnosis.diagnosis import refusals
    from ..errors import UnknownStructure
    from ..models.precision import describe_place

    request: DoctorRequest = session.request
    if request.card or not _has_weights(request.model):
        return _unloaded(session)
    samples = request.samples
    model, tokenizer, data = session.load()
    request.samples = samples  # of the prices: every command has a number of its own
    session.announce(f"{request.model}: {describe_place(model)}.")
    diagnosis = diagnose(model, tokenizer, data)
    table = Table("check", "", "finding", "what to do", box=None, pad_edge=False)
    for f in diagnosis.findings:
        table.add_row(f.check, Words(f.severity, _STYLES[f.severity]), f.what, f.remedy)
    session.console.print(table)
    result = {**diagnosis.to_dict(), "model": request.model, "exit_code": 0 if diagnosis.ok else 1}
    if not diagnosis.ok:
        return result
    result["reach"] = _reached(session, model, data)
    refused, batch = refusals(model), request.batch_size or 8
    try:
        place = place_of(model, Text(samples=batch, length=data.length, batch=batch))
    except UnknownStructure:
        return {**result, "forecast": []}
    where = f"on this machine's {next(model.parameters()).device.type}"
    return {**result, "refused": refused, "forecast": _priced(session, place, where, refused)}


def _reached(session: Session, model: Any, data: Any) -> list[dict[str, Any]]:
    """Show what of the model every verb reaches."""
    from rich.table import Table

    from ..diagnosis.diagnosis import sample_of
    from ..diagnosis.reach import reached
    from ..errors import LayerbudgetError

    try:
        rows = reached(model, sample_of(model, data))
    except LayerbudgetError:  # without blocks, as a finding has said
        return []
    title = "what every verb reaches of the matrices' weights, embeddings and output head aside"
    table = Table("verb", "share", "what it leaves", box=None, pad_edge=False, title=title, title_justify="left")
    for row in rows:
        table.add_row(row.verb, f"{row.share:.1%}", row.left)
    session.console.print(table)
    return [dataclasses.asdict(row) for row in rows]


def _has_weights(name: str) -> bool:
    """Whether there is more than a configuration; what is no local folder is left to the loader."""
    path = Path(name).expanduser()
    endings = (".safetensors", ".bin", ".index.json", ".pt", ".gguf")
    return (
        path.suffix == ".gguf"
        or not path.is_file()
        and (not path.is_dir() or any(f.name.endswith(endings) for f in path.iterdir()))
    )


def _unloaded(session: Session) -> dict[str, Any]:
    """Prices from a configuration, on a machine that may be another one: as fast as this one."""
    from ..cost.price import pace_of_shape
    from ..cost.sizes import shape_of_config
    from ..models.loading import read_configuration
    from ..models.machine import free_bytes
    from ..models.precision import DTYPES, find_device, held_dtype, quick_dtype

    request: DoctorRequest = session.request
    config = read_configuration(*split_revision(request.model))
    device = find_device(request.device or "auto")
    dtype = DTYPES.get(request.dtype or "auto") or quick_dtype(held_dtype(config), device)
    machine, where = free_bytes(device), "this machine"
    if request.card:
        machine, where = parse_bytes(request.card, "A card", "24 GiB"), request.card
    shape = shape_of_config(config, dtype)
    more = {"fits": _fits(session, config, machine, shape.experts)} if request.context else {}
    title = f"in {where}, {str(dtype).removeprefix('torch.')}, as fast as this machine's {device.type}; no weights were read"
    forecast = _priced(session, (shape, pace_of_shape(shape, dtype, device), machine), title, {})
    return {
        "model": request.model,
        "layers": shape.layers,
        "weights": shape.weights,
        **more,
        "forecast": forecast,
        "exit_code": 0,
    }


def _fits(session: Session, config: Any, memory: int, experts: bool) -> list[dict[str, Any]]:
    """Show what fits the memory at the context."""
    from ..diagnosis.fits import what_fits

    request: DoctorRequest = session.request
    rows = what_fits(config, memory, context := read_context(request.context or ""))
    unit, name = unit_of(memory)
    head, shown = ("cache", f"its {name}", f"{name} for weights", "bits per weight", "largest mix"), []
    for r in rows:
        sizes = (f"{r[n] / unit:.2f}" if r[n] >= 0.1 * unit else f"{r[n] / unit:.2g}" for n in ("cache_bytes", "left"))
        shown.append((r["cache"], *sizes, r["bits"] or "none", r["mix"] or ("-" if r["cache"] == "fp8" else "none")))
    session.show(f"what fits {request.card} at {context} tokens, beside buffers", head, shown)
    mixes = [r["mix"] for r in rows if r["mix"]]
    for runtime, part in dict.fromkeys((r["runtime"], r["share"]) for r in rows if r["share"] < 1.0):
        session.say(f"{runtime} takes {part:.0%} of a memory, which is what counts there.")
    ways = {(r["runtime"], r["method"]): None for r in rows if r["bits"]}
    if ways:
        usual = {("llama.cpp", "rtn"): "", ("llama.cpp", "weighted"): " --method weighted"}
        flags = next((words for way, words in usual.items() if way in ways), " --runtime vllm")
        session.say(
            f"layerbudget plan memory MODEL --memory '{request.card}' --context {request.context}{flags} chooses both together."
        )
    elif mixes:
        fewer = " Or keep fewer experts (plan expert-pruning)." if experts else ""
        session.say(f"Only a mix fits: layerbudget plan bits MODEL --like {mixes[-1]} has its bytes, for less damage.{fewer}")
    else:
        session.say(f"Nothing fits {request.card} at {context} tokens: take a shorter context or a larger card.")
    return rows


def _priced(session: Session, place: tuple[Any, ...], title: str, refused: dict[str, str]) -> list[dict[str, Any]]:
    """Price every long verb but those that refuse the model, and show it."""
    from rich.table import Table
    from rich.text import Text

    from ..cost.price import duration, price
    from ..diagnosis.verbs import long_verbs

    request: DoctorRequest = session.request
    sizes: dict[str, Any] = {"samples": request.samples, "length": request.length or 256, "batch": request.batch_size or 8}
    shape = place[0]
    about = {"experts": shape.experts, "widest": max(shape.inputs), "tied": shape.tied}
    verbs = long_verbs(**sizes, **about, demo=request.model == "demo")
    title = f"what the long verbs take {title}; finetune: one epoch"
    head = ("verb", "text", "how", "memory", "time", "forwards", "fits")
    table, costs = Table(*head, box=None, pad_edge=False, title=title, title_justify="left"), []
    for verb, parts in verbs.items():
        if verb in refused:
            continue
        cost, text = price(verb, parts, *place), parts[0].text
        costs.append({**dataclasses.asdict(cost), "samples": text.whole, "length": text.length})
        row = (verb, f"{text.whole} x {text.length}", cost.how, f"{cost.memory / 2**30:.2f} GiB", duration(cost.seconds))
        table.add_row(*row, f"{cost.forwards:.1f}", "yes" if cost.fits else Text("no", "bold red"))
    session.console.print(table)
    for why in dict.fromkeys(why for verb, why in refused.items() if verb in verbs):
        session.say(f"refused: {', '.join(verb for verb in verbs if refused.get(verb) == why)}. {why}")
    if request.machines is not None:
        shared = {cost["verb"]: verbs[cost["verb"]] for cost in costs if cost["verb"] not in _ALONE}
        shares = _shared(session, shared, place, request.machines)
        costs = [{**cost, "share": shares.get(cost["verb"])} for cost in costs]
    return costs


def _shared(session: Session, verbs: dict[str, Any], place: tuple[Any, ...], machines: int) -> dict[str, dict[str, Any]]:
    """Show what each of several processes holds and does of every verb that shares its work; return it by verb."""
    from ..cost.machines import share_of
    from ..cost.price import duration

    rows, shares, wanted = [], {}, machines
    for verb, parts in verbs.items():
        part = share_of(verb, parts, place[0], place[1], place[2], machines, *place[3:])
        shares[verb] = dataclasses.asdict(part)
        if part.limit == "text":
            wanted = max(wanted, machines * max(-(-p.text.whole // p.text.samples) for p in parts))
        limit = f"{part.limit}, {duration(part.seconds)}" if part.seconds else part.limit
        amounts = (part.memory / 2**30, part.operations / 1e12, part.read / 2**30, part.sent / 2**30)
        rows.append((verb, part.sequences, *(f"{amount:.3g}" for amount in amounts), limit))
    heads = ("verb", "sequences", "memory, GiB", "operations, 10^12", "read, GiB", "exchanged, GiB", "limit")
    session.show(f"what each of {machines} processes does, with a card of its own", heads, rows)
    if any(row["limit"] == "text" for row in shares.values()):
        session.say(f"text: fewer sequences than processes. --samples {wanted} gives each of them one.")
    return shares
