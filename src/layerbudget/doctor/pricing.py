"""What a long verb costs as a sum of parts whose costs are known.

A part is one of ``layerbudget.doctor.forecast.VERBS`` on so much text: the demo is one scoring, eight prunings, nine
evaluations and two searches. Seconds and forwards add up, memory is that of the largest part. Where a search spends forward
equivalents instead of running a verb, the part says how many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..compressors.base import QUANTISERS, find_quantiser, find_treatment
from ..records import Block
from ..sensitivity.estimators import estimators, find_estimator
from .effort import Pass, efforts
from .forecast import VERBS, Forecast, Shape, Speed, forecast

HOWS = ("whole", "layers", "streamed")
ROUNDING = 400.0  # products of float32 that rounding and packing one weight takes as long as
DRAWN, CANDIDATES = 4, 5  # draws of labels of `plan bits`, and what its check measures: baselines, the plan, the dense model
TASKS = {  # questions, options, and tokens of a request, of the harness's stock splits
    "rte": (277, 2, 80), "boolq": (3270, 2, 150), "arc_easy": (2376, 4, 35), "arc_challenge": (1172, 4, 40),
    "hellaswag": (10042, 4, 90), "winogrande": (1267, 2, 25), "openbookqa": (500, 4, 20),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """How much text: ``samples`` sequences of ``length`` tokens, ``batch`` of them at a time."""

    samples: int
    length: int = 256
    batch: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One verb with a forecast, on some text.

    Attributes:
        verb: One of the verbs that have a forecast.
        text: What it reads.
        forwards: Forward equivalents spent on that text; the forecast's own by default.
        times: How often.
        products: Multiplications of float32 beside, per weight.
        memory: Bytes, where an estimator keeps the whole graph and more than the verb does.
        held: The weights are in memory whatever their size.
    """

    verb: str
    text: Text
    forwards: float | None = None
    times: float = 1.0
    products: float = 0.0
    memory: int = 0
    held: bool = False


def price(verb: str, parts: Sequence[Part], shape: Shape, speed: Speed, machine: int | None = None) -> Forecast:
    """Add up the parts of a verb.

    Args:
        verb: What users type.
        parts: What it does.
        shape: The model.
        speed: Of the machine.
        machine: Bytes of memory; what is free here by default.
    """
    seconds = forwards = 0.0
    memory, how, fits = 0, 0, True
    tokens = parts[0].text.samples * parts[0].text.length
    weights = shape.layers * sum(m.numel for m in shape.matrices)
    for part in parts:
        text = part.text
        f = forecast(
            shape, speed, samples=text.samples, length=text.length, batch_size=text.batch, machine=machine, verbs=[part.verb]
        )[0]
        spent = f.forwards if part.forwards is None else part.forwards
        seconds += part.times * (f.seconds * spent / f.forwards + part.products * weights / speed.single)
        forwards += part.times * spent * text.samples * text.length / tokens
        walk, needs = HOWS.index("whole" if part.memory else f.how), max(f.memory, part.memory)
        if part.held and f.how == "streamed":
            walk, needs = HOWS.index("layers"), needs + shape.weights
        memory, how = max(memory, needs), max(how, walk)
        fits = fits and f.fits and (machine is None or needs <= machine)
    return Forecast(verb=verb, how=HOWS[how], memory=memory, seconds=seconds, forwards=forwards, fits=fits)


def scoring(name: str, text: Text, shape: Shape) -> list[Part] | None:
    """Parts of ``score``; None for an estimator without a cost model.

    Estimators that walk the layers hold what fisher-gram holds, ekfac what kfac does; the others keep the whole model's graph.
    """
    if f"score {name}" in VERBS:
        return [Part(verb=f"score {name}", text=text)]
    blocks = [
        Block(name=f"{i}", modules=tuple(dataclasses.replace(m, name=f"{i}.{m.name}") for m in shape.matrices))
        for i in range(shape.layers)
    ]
    kept = 2 * text.length * sum(m.d_in + m.d_out for m in shape.matrices) * shape.width * shape.layers
    one = Pass(seconds=0.0, weights=shape.weights, gradients=0, activations=kept + 12 * text.length * shape.vocabulary)
    found = {e.estimator: e for e in efforts(one, blocks, text.samples, min(text.batch, text.samples))}
    if name not in found:
        return None
    walks = name in estimators() and "walk" in find_estimator(name).options
    forwards = max(3.0 * found[name].passes, 0.01)
    factors = "score kfac" if name == "ekfac" else "score fisher-gram"
    verb, memory = (factors, 0) if walks else ("evaluate", found[name].memory)
    products = 10.0 * min(min(m.d_in, m.d_out) for m in shape.matrices) if name == "spectral-tail" else 0.0
    return [Part(verb=verb, text=text, forwards=forwards, products=products, memory=memory)]


def treating(method: str, text: Text, *, again: float = 1.0) -> list[Part]:
    """Parts of ``prune`` and ``quantize``: statistics of the inputs in two forwards, and what the method computes of them.

    Args:
        method: Its name.
        text: Calibration text.
        again: How often the inputs are collected.
    """
    rounds = ROUNDING if method in QUANTISERS.names() else 0.0
    statistic = (find_quantiser if rounds else find_treatment)(method).statistic
    if statistic == "none":
        return [Part(verb="evaluate", text=Text(samples=1, length=text.length), products=max(rounds, 20.0))]
    verb = "prune sparsegpt" if statistic == "gram" else "prune wanda"
    parts = [Part(verb=verb, text=text, forwards=1.0 + again, products=rounds)]
    return [*parts, Part(verb="measure", text=text, forwards=3.0)] if method == "gradient" else parts


def measuring(text: Text, search: str, *, passes: float | None = None, draws: int = 2) -> list[Part]:
    """Parts of ``measure``; a pattern takes the gradients of ``draws`` draws of labels and prunes twice."""
    if search == "directional":
        return [Part(verb="measure", text=text, forwards=passes)]
    return [Part(verb="measure", text=text, forwards=2.0 * draws + 3.0), Part(verb="prune wanda", text=text, times=2.0)]


def evaluating(texts: Sequence[Text], tasks: Sequence[str] = (), limit: int | None = None, batch: int = 16) -> list[Part]:
    """Parts of ``evaluate``: a forward over every window, and one over every option of every question."""
    parts = [Part(verb="evaluate", text=text) for text in texts]
    for name in tasks:
        questions, options, tokens = TASKS.get(name, (1000, 4, 80))
        requests = options * (questions if limit is None else min(limit, questions))
        parts.append(Part(verb="evaluate", text=Text(samples=max(requests, 1), length=tokens, batch=batch)))
    return parts


def training(text: Text, epochs: float, seeds: int, held_out: int) -> list[Part]:
    """Parts of ``finetune``: every row once per epoch, held-out rows after each seed."""
    judged = [Part(verb="evaluate", text=dataclasses.replace(text, samples=held_out), times=seeds)] if held_out else []
    return [Part(verb="finetune", text=text, times=epochs * seeds), *judged]


def structuring(text: Text, search: str, shape: Shape, *, kinds: int = 2, points: int = 4, trials: int = 8,
                passes: float | None = None) -> list[Part]:  # fmt: skip
    """Parts of ``plan structured``: every part of every layer at some sizes, the layers behind it, and plans as a whole."""
    if search == "directional":
        return [Part(verb="measure", text=text, forwards=passes or 46.0)]
    measured = kinds * points * shape.layers / 2
    refitted = Part(verb="prune sparsegpt", text=text)
    return [refitted, Part(verb="evaluate", text=text, forwards=2.0 * measured + 2.0 * trials)]


def choosing(text: Text, check: Text | None, shape: Shape, *, damage: str = "directional", formats: int = 4,
             draws: int = DRAWN, steps: int = 0) -> list[Part]:  # fmt: skip
    """Parts of ``plan bits``: rounding errors, ``1 + 2 draws`` passes along them or one per format, and the check."""
    once = 1.0 + 2.0 * draws
    spent = once + steps * (once + 2.0) if damage == "directional" else 1.0 + formats * len(shape.matrices) * shape.layers / 2
    parts = [Part(verb="measure", text=text, forwards=spent, products=formats * ROUNDING)]
    whole = [] if check is None else [Part(verb="evaluate", text=check, times=CANDIDATES, products=ROUNDING)]
    return [*parts, *whole]


def comparing(text: Text, held_out: Text, shape: Shape, scores: Sequence[str], *, rules: int = 1, budgets: int = 1,
              seeds: int = 1, method: str = "wanda", controls: bool = True) -> list[Part]:  # fmt: skip
    """Parts of ``compare`` on text: every score once per seed, every plan (uniform and controls too) pruned and measured."""
    known = [part for name in scores for part in scoring(name, text, shape) or []]
    plans = budgets * seeds * (1 + len(scores) * rules * (2 if controls else 1))
    one = [*treating(method, text), Part(verb="evaluate", text=held_out)]
    counted = [*((p, seeds) for p in known), *((p, plans) for p in one)]
    return [dataclasses.replace(p, times=p.times * count, held=True) for p, count in counted]


def demonstrating(shape: Shape) -> list[Part]:
    """Parts of ``demo``: it scores, searches twice, and prunes and measures four plans at two targets."""
    text, windows = Text(samples=64), Text(samples=96)
    search = Part(verb="measure", text=Text(samples=16), forwards=20.0, times=2.0)
    return [
        *(scoring("fisher-gram", text, shape) or []), search, Part(verb="prune wanda", text=text, times=8.0),
        Part(verb="evaluate", text=windows, times=9.0),
    ]  # fmt: skip


def long_verbs(shape: Shape, *, samples: int | None = None, length: int = 256, batch: int = 8,
               demo: bool = False) -> dict[str, list[Part]]:  # fmt: skip
    """Every long verb at its own default sizes, or at those given.

    Args:
        shape: The model.
        samples: Sequences for all of them.
        length: Tokens of each.
        batch: Sequences per forward.
        demo: Whether the model is the embedded one, which the demo runs on.
    """

    def text(own: int) -> Text:
        return Text(samples=samples or own, length=length, batch=batch)

    found = {f"score {name}": scoring(name, text(128), shape) for name in estimators()}
    verbs: dict[str, list[Part]] = {verb: parts for verb, parts in found.items() if parts}
    verbs["measure"] = measuring(text(16), "directional")
    verbs["measure --pattern 2:4"] = measuring(text(16), "pattern")
    for method in ("wanda", "sparsegpt"):
        verbs[f"prune {method}"] = treating(method, text(128))
    verbs["finetune"] = training(text(128), 1.0, 1, 0)
    verbs["evaluate"] = evaluating([text(96)])
    verbs["plan structured"] = structuring(text(16), "curves", shape)
    verbs["plan structured --search directional"] = structuring(text(16), "directional", shape)
    verbs["plan bits"] = choosing(text(32), text(16), shape)
    for method in ("rtn", "gptq"):
        verbs[f"quantize {method}"] = treating(method, text(128))
    verbs["compare --scores fisher-gram"] = comparing(text(64), text(96), shape, ["fisher-gram"])
    return {**verbs, "demo": demonstrating(shape)} if demo else verbs
