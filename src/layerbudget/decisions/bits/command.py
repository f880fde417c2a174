"""``plan bits``, ``apply`` of a plan that has formats of weights, and the commands that follow both."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ...compressors.base import QUANTISERS
from ...compressors.formats import BY_MOMENTS, GGUF, PACKED, RUNTIMES, find_format, find_runtime
from ...errors import InvalidInput
from ...plan import Plan, payload_of
from ...requests import READING
from ...storage.checkpoint import GGUF_FILE
from ..files import need_scores, text_of_plan
from ..formats.baselines import check_mixes
from ..formats.limits import Limits
from ..formats.payload import FormatsPayload
from ..formats.program import formats_of_plan, plan_from_table
from ..formats.request import need_samples, on_check
from ..written import end_of_gguf
from .card import on_method
from .payload import BitsPayload
from .terms import whole_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from ...session import Session
    from .request import BitsRequest, BitsWrite

_MEASURED = ("formats", "by", "group", "method", "draws", "rows", "whole", "imatrix", "unwritten")  # of a model


# --- plan -------------------------------------------------------------------------------------------------------------------


def plan(session: Session) -> Plan:
    """Return the plan by the damage of formats to a model, checked as a whole, or from what was measured before."""
    return _by_damage(session) if session.request.measures else _from_scores(session)


def _from_scores(session: Session) -> Plan:
    request: BitsRequest = session.request
    scores = need_scores(request.source, "plan bits MODEL --bits N --save-scores FILE")
    request.check_measured(scores)
    return plan_from_table(scores, Limits(**request.limits), request.rule)


def _by_damage(session: Session) -> Plan:
    from .blocks import narrow_rows
    from .forecast import choosing
    from .plan import plan_bits

    request: BitsRequest = session.request
    family = request.family or (RUNTIMES[request.runtime].family if request.runtime else PACKED if not request.like else GGUF)
    request.check_formats(request.runtime, family)
    check_mixes(request.rule, request.like, family)
    need_samples(session, request.method)
    model, tokenizer, data, check = session.load_checked(16 if request.checked is None else request.checked)
    if family == GGUF and (narrow := narrow_rows(model)):
        session.announce(narrow)
    checked, draws = None if check is None else session.size(check), request.draws or 4
    parts = choosing(
        session.size(data), checked, draws=draws, **counted_of(request, find_runtime(request.runtime, family), model)
    )
    session.expect(f"measuring what every format costs{session.on_text(data)}{on_check(check)}", model, parts)
    options = request.given(*_MEASURED, "runtime", "seed", "save_scores", "resume")
    with session.progress("measuring formats") as progress:
        options |= {"batch_size": session.batch(model, data), "progress": progress, "overwrite": request.overwrite}
        options |= {"family": family, "rule": request.rule, **request.limits}
        result = plan_bits(model, data, check, tokenizer=tokenizer, **options)
    session.facts["no file"] = request.unwritten == "plan" and has_no_file(model, result)
    return result


def counted_of(request: Any, runtime: Any, model: nn.Module) -> dict[str, Any]:
    """Return what a measurement of formats rounds, as :func:`~layerbudget.decisions.bits.forecast.choosing` takes it."""
    from ...execution.tied import tied_columns
    from .blocks import blocks_of
    from .rounding import anchors_of

    method = request.method or "rtn"
    widths = sorted({m.d_in for block in blocks_of(model, runtime) for m in block.modules})  # groups divide them
    menu = [form.name for form in runtime.formats(widths, request.formats, request.group)]
    anchors = anchors_of(menu, runtime.family, feedback=method in BY_MOMENTS)
    counted = {"runtime": runtime.name, "method": method, "names": request.formats, "group": request.group}
    return {**counted, "rows": request.rows or 16, "anchors": anchors, "tied": tied_columns(model)}


def has_no_file(model: Any, plan: Plan) -> bool:
    """Return whether a plan of bits gives few bits to matrices which no file of its runtime holds so."""
    from .blocks import unwritable

    small = [name for name, form in payload_of(plan, BitsPayload).formats.items() if not find_format(form).plain]
    return bool(unwritable(model, small, find_runtime(plan.payload.runtime, plan.payload.family)))


def follow(session: Session, plan: Plan, weights: Plan) -> str:
    """Say and return the command that writes the file of a plan, or gives it to the tool that does.

    Args:
        session: The command that made it.
        plan: The plan.
        weights: The plan of bits in it.
    """
    request = session.request
    model = str(request.source if request.measures else plan.model.get("id") or "MODEL")
    imatrix, method = plan.hyperparameters.get("imatrix"), plan.payload.method
    options = ["--imatrix", imatrix] if imatrix else []
    if session.facts.get("no file"):
        session.say("apply writes no file of this plan: another tool has to.")
        return session.follow("export", request.out, "--to", _tool_of(weights))
    if plan.payload.family == GGUF:
        inputs = options or ["--inputs", model] * (method != "rtn")
        requantises = ("apply", "model-f16.gguf", request.out, *inputs, "-o", "planned.gguf")
        if not plan.payload.head_bytes:
            session.say("apply does not write this architecture as GGUF; llama.cpp's convert_hf_to_gguf.py --outtype f16 does.")
            return session.follow(*requantises)
        if plan is weights:
            session.say(f"A GGUF file that you have gets these types by {shlex.join(['layerbudget', *requantises])}")
    if needs := find_runtime(weights.payload.runtime, weights.payload.family).needs(formats_of_plan(weights)):
        session.say(needs)
    rounds = any(not find_format(f).plain for f in formats_of_plan(weights).values())
    if plan.payload.runtime == "vllm" and method == "rtn" and rounds:
        session.say("The plan was measured with weights that are rounded to nearest (rtn). gptq loses less, and takes longer.")
        options += ["--method", "gptq"]
    return session.follow("apply", model, request.out, "-o", "DIR", *options)


def _tool_of(plan: Plan) -> str:
    """The format of the tool that takes a plan of bits which ``apply`` does not write."""
    from .export import auto_round

    try:
        auto_round(plan)
    except InvalidInput:
        return "csv"
    return "auto-round"


# --- apply ------------------------------------------------------------------------------------------------------------------


def write(
    session: Session,
    plan: Plan,
    weights: Plan,
    *,
    text_files: Mapping[str, str] | None = None,
    cache: str = "",
) -> dict[str, Any]:
    """Round, write, recount from the file, and return the receipt with what follows.

    Args:
        session: The command.
        plan: The plan.
        weights: The plan of bits in it.
        text_files: Further text files of the folder, by name.
        cache: Options of llama.cpp for the types of the cache, where that is planned too.
    """
    request: BitsWrite = session.request
    formats_of_plan(weights)
    receipt = (
        _requantise(session, plan, weights, text_files)
        if request.model.endswith(".gguf")
        else _quantise(session, plan, weights, text_files)
    )
    others, rest = "norms" if receipt.family == GGUF else "the embedding and norms", receipt.file - receipt.tensors
    session.say(
        f"Recounted {receipt.bytes:,} bytes of the planned matrices (planned {receipt.planned:,}), {receipt.bits:.4f} bits per "
        f"weight; saved to {request.out}.",
        f"The whole file has {receipt.file:,} bytes: {receipt.tensors - receipt.bytes:,} more for tensors that were not "
        f"planned, such as {others}, and {rest:,} of metadata.",
        *filter(None, (receipt.llama_cpp,)),
        *receipt.notes,
        *filter(None, (on_method(weights, receipt.method),)),
    )
    return {**receipt.written(), "output": str(request.out), **_end(session, plan, cache, receipt.notes)}


def _quantise(session: Session, plan: Plan, weights: Plan, text_files: Mapping[str, str] | None) -> Any:
    """Write the model's own file."""
    from ...execution.processes import is_main
    from ...execution.sharing import together
    from ...storage.writing import check_space
    from ..sparsity import BESIDE
    from .apply import write_bits
    from .forecast import applying

    request: BitsWrite = session.request
    request.refuse(("inputs",), "a model that is no GGUF file")
    method = request.method or str(weights.payload.method)
    quantiser = QUANTISERS.find(method)
    blind = quantiser.statistic == "none" or request.imatrix is not None
    if blind:
        request.refuse(READING, f"the method {method}{' with an importance matrix' if request.imatrix else ''}")
    else:
        _use_text_of(session, plan, weights, method)
    request.dtype = request.dtype or "float32"  # grids of formats are finer than what checkpoints hold
    model, tokenizer, data = (
        session.load(data=False, lean=True) if blind else session.load_apart(plan, _checked(plan), lean=True)
    )
    size = BESIDE + whole_bytes(weights)  # what the plan counted, and a tokenizer
    places = filter(None, (request.out, request.resume))
    together(lambda: check_space(dict.fromkeys(places, size)) if is_main() else None)
    text = session.size(data)
    session.expect(f"{method}{session.on_text(data)}", model, applying(method, text, weights, model))
    options = {**request.more, **request.given("imatrix", "resume"), "method": method, "overwrite": request.overwrite}
    options |= {} if request.verify is None else {"check": request.verify}
    with session.progress(f"quantise by {method}") as progress:
        options |= {
            "tokenizer": tokenizer,
            "batch_size": session.batch(model, data),
            "progress": progress,
            "text_files": text_files,
        }
        return write_bits(model, weights, request.out, data, **options)


def _requantise(session: Session, plan: Plan, weights: Plan, text_files: Mapping[str, str] | None) -> Any:
    """Give a GGUF file the types of a plan; with the inputs of its model, where that is named."""
    from ...execution.processes import one_process
    from .forecast import applying
    from .requantise import check_source, reads_itself, requantise

    one_process("A GGUF file gets other types")
    request: BitsWrite = session.request
    file, options = request.model, request.given("method", "imatrix")
    if request.inputs is None and reads_itself(file, weights, method=request.method, imatrix=request.imatrix):
        session.announce(f"{file} is also the model whose inputs are read, as with --inputs {shlex.quote(file)}.")
        request.inputs = file
    check_source(file, weights, method=request.method, imatrix=request.imatrix, reads=request.inputs is not None)
    request.refuse(("dtype", "resume", *request.more), "a GGUF file")
    options |= {"text_files": text_files} | ({} if request.verify is None else {"check": request.verify})
    if request.inputs is None:
        remedy = "Leave it out: what is known of the inputs is in --imatrix FILE. (--inputs MODEL reads text.)"
        request.refuse(READING, "a GGUF file", remedy)
        request.refuse(("device", "stream"), "a GGUF file")
    else:
        method, request.model, request.dtype = request.method or str(weights.payload.method), request.inputs, "float32"
        _use_text_of(session, plan, weights, method)
        model, _, data = session.load_apart(plan, _checked(plan))
        options |= {"inputs": model, "data": data, "batch_size": session.batch(model, data)}
        text = session.size(data)
        session.expect(f"{method}{session.on_text(data)}", model, applying(method, text, weights, model))
        request.model, request.dtype = file, None
    with session.progress("requantise, tensors") as progress:
        return requantise(file, weights, request.out, overwrite=request.overwrite, progress=progress, **options)


def _use_text_of(session: Session, plan: Plan, weights: Plan, method: str) -> None:
    """Read the text that decided a plan, as it was drawn then unless another one is named.

    There is more of it where the plan was measured with a method that learns less of the inputs.
    """
    name = text_of_plan(plan).get("data", "stdlib")
    session.use_text_of(plan, as_drawn=session.request.data in (None, name))
    if weights.payload.method not in BY_MOMENTS:
        need_samples(session, method)


def _checked(plan: Plan) -> int:
    """Sequences that checked a plan."""
    check = payload_of(plan, FormatsPayload).check
    return 0 if check is None else int(check.data.get("samples", 0))


def _end(session: Session, plan: Plan, cache: str, notes: Sequence[str]) -> dict[str, Any]:
    """Say what the written model is expected to cost, and what measures it."""
    request: BitsWrite = session.request
    single = request.out.endswith(".gguf")
    if not single and plan.payload.family != GGUF:
        from ...models.packed import UNREAD

        return session.end(plan, other="" if UNREAD.isdisjoint(notes) else f"vllm serve {shlex.quote(request.out)}")
    dense = request.model if request.model.endswith(".gguf") else None
    return end_of_gguf(session, plan, file=request.out if single else f"{request.out}/{GGUF_FILE}", dense=dense, cache=cache)
