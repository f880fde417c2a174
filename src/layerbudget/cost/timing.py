"""How fast work is here: seconds that are measured on one layer of a model, and on one small matrix for each kind of work.

A forward and a backward are timed on the middle layer and on the head (:func:`pace_of`). Rounding, sorting into a mask and
products of inputs are timed on a few rows, and are proportional to the rows and columns of a matrix. Every one is timed once in
a process. With one thread, seconds are those of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..compressors.base import Level, Treatment
from ..compressors.formats import find_format
from ..compressors.sparsegpt import inverse_factor
from ..errors import LayerbudgetError
from ..execution.inputs import InputMoments
from ..execution.modes import inference, prepared
from ..execution.panels import count_numbers
from ..execution.replay import Replay
from ..sensitivity.directional.directions import Apart, Int8Directions, Itself, Nested

_WIDE = 512  # columns of a matrix that is timed: every format fits
_FEW, _MANY = 16, 256  # rows of it
_TOKENS = 256  # that products of inputs are timed on
_ENOUGH = 0.1  # seconds of runs of which no third one is needed
_REAL = 4e9  # products that the timed forward of a layer, or of the head, may cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of one token: its forward and backward through all layers, and through the head and the loss."""

    forward: float
    backward: float
    head: float
    head_backward: float
    device: str = "cpu"


def seconds_of(run: Callable[[], Any], repeats: int = 2) -> float:
    """Return the least seconds of some runs, of two where they are long; a tensor that is returned is waited for."""
    clock, spent = time.process_time if torch.get_num_threads() == 1 else time.perf_counter, list[float]()
    while len(spent) < min(repeats, 2) or (len(spent) < repeats and sum(spent) < _ENOUGH):
        start = clock()
        result = run()
        if isinstance(result, torch.Tensor):
            result.reshape(-1)[0].item()
        spent.append(clock() - start)
    return min(spent)


def pace_of(model: nn.Module, length: int, batch: int, products: tuple[int, int], vocabulary: int) -> Pace:
    """Return the pace of a loaded model, from its middle layer and its head on sequences of numbers.

    Args:
        model: Any model of which one layer can run alone; else it is timed as a whole.
        length: Tokens of a sequence.
        batch: Sequences at a time, fewer where they would take seconds.
        products: Multiplications per token of one layer, and of the head.
        vocabulary: Number of tokens.
    """
    rows = max(1, min(batch, int(_REAL / max(length * products[0], 1))))
    device = next(model.parameters()).device
    ids = (torch.arange(rows * length, device=device) % max(1, min(vocabulary, 100))).reshape(rows, -1)
    inputs, places = {"input_ids": ids}, max(1, min(length, int(_REAL / max(rows * products[1], 1))))
    try:
        replay = Replay(model)
        with inference(model):
            replay.probe(inputs)
            hidden = replay.first_inputs(inputs)
        with prepared(model):
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            layer = _both(replay, inputs, hidden, len(replay.layers) // 2)
            piece = {"input_ids": ids[:, :places]}
            head = _both(replay, piece, hidden[:, :places], len(replay.layers))
    except (LayerbudgetError, KeyError, IndexError, TypeError, AttributeError, RuntimeError):  # a layer does not run alone
        with inference(model):
            seconds = seconds_of(lambda: model(**inputs)[0]) / ids.numel()
        return Pace(forward=seconds, backward=seconds, head=0.0, head_backward=0.0, device=device.type)
    layers = len(replay.layers) / ids.numel()
    ends = {"head": head[0] / (rows * places), "head_backward": head[1] / (rows * places)}
    return Pace(forward=layer[0] * layers, backward=layer[1] * layers, **ends, device=device.type)


def _both(replay: Replay, inputs: dict[str, torch.Tensor], hidden: torch.Tensor, index: int) -> tuple[float, float]:
    """Seconds of a forward and a backward of a layer, or of the head and the loss, which has the index behind the last one."""
    state = hidden.detach().requires_grad_(True)

    def run() -> torch.Tensor:
        if index == len(replay.layers):
            with replay.begin(index, state):
                logits = replay.model(**inputs).logits
            return torch.log_softmax(logits.float(), dim=-1)[..., :1].sum()
        with replay.begin(index, state), replay.end(index):
            return replay.run(inputs)

    outputs = list[torch.Tensor]()

    def kept() -> torch.Tensor:
        outputs[:] = [*outputs[-1:], run()]
        return outputs[-1]

    forward = seconds_of(kept, repeats=4)  # the first ones prepare kernels and touch their memory
    return forward, seconds_of(lambda: outputs.pop().sum().backward(), repeats=2)


@functools.lru_cache(maxsize=8)
def rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the multiplications per second of a wide matrix with 256 tokens."""
    x, w = (torch.ones(rows, 2048, device=device, dtype=dtype) for rows in (_TOKENS, 2048))
    return x.numel() * len(w) / seconds_of(lambda: x @ w.T, repeats=4)


def pace_of_rate(layers: float, head: float, dtype: torch.dtype, device: torch.device | str) -> Pace:
    """Return the pace of a model that is not loaded, from its multiplications per token in all layers and in the head."""
    speed = rate(dtype, torch.device(device))
    layer, ends, place = layers / speed, head / speed, torch.device(device).type
    return Pace(forward=layer, backward=layer, head=ends, head_backward=ends, device=place)


# --- one matrix -------------------------------------------------------------------------------------------------------------


@functools.cache
def _inputs(columns: int) -> torch.Tensor:
    """``X X'`` of some inputs."""
    x = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(0))
    return x.T @ x


def _matrix(rows: int) -> torch.Tensor:
    return torch.randn(rows, _WIDE, generator=torch.Generator().manual_seed(1))


def _prepared(treatment: Treatment) -> Any:
    if treatment.statistic == "none":
        return None
    return treatment.prepare(_inputs(_WIDE) if treatment.statistic == "gram" else _inputs(_WIDE).diagonal() / _WIDE)


def _lines(run: Callable[[torch.Tensor], Any]) -> tuple[float, float]:
    """Seconds per column and per weight, of a few rows and of many."""
    few, many = (seconds_of(functools.partial(run, _matrix(rows))) for rows in (_FEW, _MANY))
    each = max(many - few, 0.0) / ((_MANY - _FEW) * _WIDE)
    return max(few - each * _FEW * _WIDE, 0.0) / _WIDE, max(each, many / (_MANY * _WIDE) / 4)


@functools.cache
def _treating(find: Callable[[str], Treatment], method: str, form: str | None) -> tuple[float, float]:
    treatment = find(method)
    made = _prepared(treatment)

    def run(weight: torch.Tensor) -> Any:
        level = Level(zeros=weight.numel() // 2) if form is None else Level(format=form, peak=float(weight.abs().max()))
        return treatment.apply(weight, made, level)

    run(_matrix(_FEW))  # what is made once
    return _lines(run)


def treating_seconds(find: Callable[[str], Treatment], method: str, form: str | None, rows: int, columns: int) -> float:
    """Return what a treatment of a matrix takes, without what is made of its inputs; zero for a format that it does not fit.

    Args:
        find: ``find_quantiser`` or ``find_treatment``.
        method: Name of the treatment.
        form: The format; None for a pruner, which is timed at half of the entries.
        rows: Of the matrix.
        columns: Of the matrix.
    """
    if form is not None and (find_format(form).plain or not find_format(form).fits(columns)):
        return 0.0
    column, weight = _treating(find, method, form)
    later = rows * columns**2 / 2 if find(method).statistic == "gram" else 0.0  # what an error changes of later columns
    return column * columns + weight * rows * columns + later / rate(torch.float32, torch.device("cpu"))


@functools.cache
def _sampling(find: Callable[[str], Treatment], method: str, forms: tuple[str, ...]) -> float:
    quantiser: Any = find(method)
    made, weight = _prepared(quantiser), _matrix(_FEW)
    levels = [Level(format=form, peak=float(weight.abs().max())) for form in forms]
    quantiser.quantise_each(weight, made, levels)  # what is made once
    return seconds_of(lambda: quantiser.quantise_each(weight, made, levels)) / _WIDE


def sampling_seconds(find: Callable[[str], Treatment], method: str, forms: Sequence[str], rows: int, columns: int) -> float:
    """Return what some rows of a matrix take in all of several formats that fit it.

    With error feedback few rows share their steps, and take as long as more.
    """
    fit = tuple(form for form in dict.fromkeys(forms) if not find_format(form).plain and find_format(form).fits(columns))
    shared = 1.0 if find(method).statistic == "gram" else rows / _FEW
    return _sampling(find, method, fit) * columns * shared if fit else 0.0


@functools.cache
def _factor(columns: int) -> float:
    return seconds_of(lambda: inverse_factor(_inputs(columns))[0]) / columns**3


def factor_seconds(columns: int) -> float:
    """Return what the factor of the second moments of so many inputs takes; few take longer than their share of many."""
    return _factor(_WIDE if columns <= 2 * _WIDE else 4 * _WIDE) * columns**3


@functools.cache
def _moments(kind: str) -> float:
    found, x = InputMoments(kind), torch.randn(_TOKENS, 2 * _WIDE)
    return seconds_of(functools.partial(found.add, x)) / _TOKENS / (count_numbers(2 * _WIDE) if kind == "gram" else 2 * _WIDE)


def moments_seconds(kind: str, tokens: int, columns: int) -> float:
    """Return what the ``diagonal`` or ``gram`` of the inputs of so many tokens takes; a ``gram`` is half of a square."""
    return 0.0 if kind == "none" else _moments(kind) * tokens * (count_numbers(columns) if kind == "gram" else columns)


@functools.cache
def finite_seconds(width: int) -> float:
    """Return the seconds per byte of looking for numbers of so many bytes that are not finite."""
    weight = _matrix(4 * _MANY).to({2: torch.bfloat16, 4: torch.float32}.get(width, torch.float64))
    return seconds_of(lambda: torch.isfinite(weight).all()) / weight.nbytes


@functools.cache
def meeting_seconds(length: int) -> float:
    """Return the seconds per token and width of the products of all tokens of a sequence with each other."""
    x = torch.randn(2, length, _WIDE)
    return seconds_of(lambda: torch.bmm(x, x.mT)) / (x.shape[0] * length * _WIDE)


@functools.cache
def _decomposing() -> float:
    return seconds_of(lambda: torch.linalg.eigh(_inputs(_WIDE))[0], repeats=1) / _WIDE**3


def decomposing_seconds(columns: int) -> float:
    """Return what the eigenvectors of a symmetric matrix take."""
    return _decomposing() * columns**3


@functools.cache
def _written(levels: int, length: int) -> tuple[float, float]:
    a, b = torch.randn(1, length, _WIDE), torch.randn(1, length, _MANY)
    weight = _matrix(_MANY)
    delta = Int8Directions((_MANY, _WIDE), iter([[weight] * levels]))
    directions = Apart(delta, Itself(lambda: [weight]), [0.0] * levels)
    between, by_token = (seconds_of(functools.partial(take, a, b)) for take in (directions.between, directions.by_token))
    return between / weight.numel(), by_token / weight.numel()


def written_seconds(levels: int, length: int, *, head: bool = False) -> float:
    """Return the seconds per weight of one sequence's derivatives along written changes; those of a ``head`` are by token."""
    return _written(levels, length)[head]


@functools.cache
def nested_seconds(levels: int) -> tuple[float, float]:
    """Return the seconds per weight of sorting a matrix by its scores, and of the derivatives along so many masks."""
    weight = _matrix(_MANY)
    counts = torch.linspace(0.4, 0.6, levels)[None] * weight.numel()

    def make() -> Nested:
        return Nested(weight, weight.abs(), torch.tensor([weight.numel() // 2]), counts)

    directions, gradient = make(), torch.randn(1, *weight.shape)
    return seconds_of(lambda: make().values) / weight.numel(), seconds_of(lambda: directions.along(gradient)) / weight.numel()
