"""``layerbudget quantize``: write a model in the formats of its plan."""

from __future__ import annotations

import argparse
from typing import Any

from ..compressors.base import QUANTISERS
from .outlook import expect, text_of, words_of
from .progress import progress_bar
from .shared import DATA, add_treating_options, batch_of, named_values, refuse


def register(subparsers: Any) -> None:
    """Add the parser of ``quantize``."""
    parser = subparsers.add_parser("quantize")
    add_treating_options(
        parser, "plan of kind bits or recipe, made for this model", QUANTISERS.names(),
        "quantiser (default: the one that was measured)", dtype="float32",
    )  # fmt: skip
    parser.add_argument("--resume", metavar="DIR", help="keep finished layers here until the result is saved")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the written model")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Round, write, recount from the file."""
    from ..compressors.base import find_quantiser
    from ..decisions.bits.apply import write_bits
    from ..decisions.bits.program import formats_of_plan
    from ..decisions.joint.recipe import bits_of
    from ..doctor.cost import treating
    from ..plan import Plan
    from ..storage.folders import check_folder
    from ..storage.parts import clear
    from ..storage.writing import check_space
    from .shared import load

    plan = bits_of(Plan.load(arguments.plan))
    formats_of_plan(plan)
    check_folder(arguments.out, overwrite=arguments.overwrite)
    method = arguments.method or str(plan.extra["method"])
    blind = find_quantiser(method).statistic == "none"
    if blind:
        refuse(arguments, DATA, f"the method {method}")
    arguments.method = method
    arguments.dtype = arguments.dtype or "float32"  # grids of formats are finer than what checkpoints hold
    model, tokenizer, data = load(arguments, data=not blind)
    if tokenizer is None:
        tokenizer = _tokenizer(arguments)
    places = [arguments.out, *([arguments.resume] if arguments.resume else [])]
    check_space(dict.fromkeys(places, _size(model, plan)))
    text, what = text_of(data, arguments), f"{method}{f' with {words_of(data)}' if data is not None else ''}"
    expect(arguments, what, model, lambda shape: treating(method, text))
    with progress_bar(arguments, f"quantise by {method}") as progress:
        receipt = write_bits(
            model, plan, arguments.out, data, tokenizer=tokenizer, method=method, batch_size=batch_of(arguments, model, data),
            resume=arguments.resume, overwrite=arguments.overwrite, progress=progress, **named_values(arguments.own),
        )  # fmt: skip
    if arguments.resume:
        clear(arguments.resume)
    arguments.console.print(
        f"Recounted {receipt.bytes} bytes (planned {receipt.planned}), {receipt.bits:.4f} bits per weight; "
        f"{receipt.file} bytes of file; saved to {arguments.out}."
    )
    for note in receipt.notes:
        arguments.console.print(note)
    return {**receipt.to_dict(), "output": str(arguments.out)}


def _size(model: Any, plan: Any) -> int:
    """Bytes of what will be written: what the plan counted, the rest of the model in two bytes each, and a tokenizer."""
    from ..decisions.sparsity.save import BESIDE

    total = sum(p.numel() for p in model.parameters())
    return BESIDE + int(plan.counts.sum()) + 2 * max(0, total - int(plan.numel.sum()))


def _tokenizer(arguments: argparse.Namespace) -> Any:
    from ..errors import BadModel
    from ..models.loading import load_tokenizer

    try:
        return load_tokenizer(arguments.model, revision=arguments.revision)
    except BadModel:
        return None  # rounding to nearest needs no text
