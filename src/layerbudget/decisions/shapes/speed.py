"""Seconds of a request in llama.cpp by the sizes of the layers, from a few short runs on this machine.

    seconds  =  beside  +  sum over layers (layer  +  attention * (query heads + key-value heads)  +  channel * MLP width)

Every rate is one of reading a prompt and of writing tokens. Files of random weights are run, for speed depends on shapes and
types alone: the model's own layers, fewer layers, fewer heads, and half the width of the MLPs. Four least times say four rates.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from ...arguments import checked
from ...errors import InvalidInput, MissingDependency
from ...models.blocks import config_of, layers, text_config
from ...plan import Plan
from ...records import Result
from .layouts import find_attention
from .program import KINDS
from .save import left_parts, save_gguf

READ, WRITTEN = 256, 64
RATES = ("beside", "layer", "attention", "channel")
_LEAST, _NUMBERS = 4, 1 << 28  # layers of a file that is run; more of them up to so many weights, for caches are part of it
_SHORT, _LONG = 4, 20  # tokens written in two requests, whose difference counts
Sizes = tuple[int, int, int]  # query heads, key-value heads, MLP width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed(Result):
    """Seconds per token in llama.cpp, for 16 bits: what :func:`measure_speed` found.

    Attributes:
        read: Seconds of a token of a prompt of 256: ``beside`` all layers, of a ``layer``, of an ``attention`` head, of a
            ``channel`` of an MLP.
        written: The same of a token that is written.
        threads: Of llama.cpp.
    """

    read: Mapping[str, float]
    written: Mapping[str, float]
    threads: int

    def seconds(self, sizes: Sequence[Sizes]) -> tuple[float, float]:
        """Return the seconds of a token that is read, and of one that is written, for layers of some sizes."""
        row = _row(sizes)
        read, written = (
            float(sum(x * rate[name] for x, name in zip(row, RATES, strict=True))) for rate in (self.read, self.written)
        )
        return read, written

    def prices(self) -> dict[str, int]:
        """Return nanoseconds of a request, 256 tokens read and 64 written, by rate."""
        return {name: round(1e9 * (READ * self.read[name] + WRITTEN * self.written[name])) for name in RATES}


def _row(sizes: Sequence[Sizes]) -> tuple[int, int, int, int]:
    """How often every rate counts."""
    return 1, len(sizes), sum(heads + groups for heads, groups, _ in sizes), sum(width for _, _, width in sizes)


def sizes_of_layers(model: nn.Module, plan: Plan | None = None) -> list[Sizes]:
    """Return query heads, key-value heads and MLP width of every layer, as they are or as a plan leaves them."""
    heads, mlps = (left_parts(model, kind, plan).values() for kind in KINDS)
    return [(a.shape[0], a.shape[1], mlp.inputs) for a, mlp in zip(heads, mlps, strict=True)]


@checked
def measure_speed(model: nn.Module, *, threads: int = 1, rounds: int = 9) -> Speed:
    """Return seconds per token by the sizes of layers, measured in llama.cpp on this machine.

    Args:
        model: Of one of llama.cpp's architectures; only its configuration and shapes are read.
        threads: Of llama.cpp. With one, processor time counts, so that other programs take little from it.
        rounds: The least time of so many counts; files take turns.

    Raises:
        InvalidInput: Threads or rounds below one, or llama.cpp has no architecture for the model.
        MissingDependency: xllamacpp is not installed.
    """
    for name, value in (("threads", threads), ("rounds", rounds)):
        if value < 1:
            raise InvalidInput(f"{name} is {value}.", "It must be at least 1.", f"Use {name}=1.")
    need_llama()
    heads, groups, width = sizes_of_layers(model)[0]
    stack = layers(model)
    count = min(len(stack), max(_LEAST, _NUMBERS // sum(p.numel() for p in stack[0][1].parameters())))
    fewer = max(g for g in range(1, max(2, groups)) if groups == 1 or groups % g == 0)
    less = (heads // groups * fewer, fewer) if groups > 1 else (max(1, heads // 2), 1)
    probes = [[(heads, groups, width)] * count, [(heads, groups, width)] * max(1, count // 2)]
    probes += [[(*less, width)] * count, [(heads, groups, max(32, width // 64 * 32))] * count]
    with tempfile.TemporaryDirectory() as folder:
        files = [_write(model, sizes, Path(folder) / str(i)) for i, sizes in enumerate(probes)]
        times = request_seconds(files, threads=threads, rounds=rounds)
    rows = np.array([_row(sizes) for sizes in probes], dtype=np.float64)
    read, written = (dict(zip(RATES, nnls(rows, column)[0].tolist(), strict=True)) for column in times.T)
    return Speed(read=read, written=written, threads=threads)


def need_llama() -> Any:
    """Return the package xllamacpp, or say that it is missing."""
    try:
        import xllamacpp
    except ImportError as error:
        why = "Seconds in llama.cpp are measured by the package xllamacpp."
        raise MissingDependency(why, "", "Install xllamacpp (Linux, macOS), or save flops.") from error
    return xllamacpp


def _write(model: nn.Module, sizes: Sequence[Sizes], folder: Path) -> Path:
    """A GGUF file of the model's kind with random weights, layers of one size and a vocabulary that llama.cpp accepts."""
    config, (heads, groups, width) = copy.deepcopy(text_config(config_of(model))), sizes[0]
    head_dim = find_attention(layers(model)[0][1], layers(model)[0][0]).head_dim
    said = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim, "intermediate_size": width}
    fields = {k: v for k, v in config.to_dict().items() if k not in ("layer_types", "_name_or_path", "dtype")}
    hidden = int(config.hidden_size)
    try:
        made = type(config).from_dict({**fields, **said, "num_hidden_layers": len(sizes)})
        made.hidden_size = hidden
        with torch.random.fork_rng(devices=[]):
            random: Any = type(model)(made).float()
    except Exception as error:  # a configuration says in its own way what it refuses
        raise InvalidInput(f"No {type(config).__name__} has {said}.", str(error), "Save flops instead of latency.") from error
    save_gguf(random, _letters(int(config.vocab_size)), folder, check=False)
    return folder / "model.gguf"


def _letters(size: int) -> Any:
    """A tokenizer of single letters: token numbers are what is run."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *map(chr, range(97, 123)), "ab"][:size]
    merges = [("a", "b")] if "ab" in tokens else []
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def request_seconds(files: Sequence[Path], *, threads: int = 1, rounds: int = 5) -> np.ndarray:
    """Return least seconds per token of GGUF files in llama.cpp, ``(files, 2)``: reading 256 tokens, writing some.

    Files take turns, so that whatever else the machine does meets all of them. With one thread processor time counts.
    """
    servers, clock = [_open(file, threads) for file in files], time.process_time if threads == 1 else time.perf_counter

    def seconds(server: Any, read: int, written: int) -> float:
        """Seconds of one request."""
        asked = {"prompt": [3 + i % 16 for i in range(read)], "max_tokens": written}
        started = clock()
        server.handle_completions({**asked, "temperature": 0, "ignore_eos": True, "cache_prompt": False})
        return clock() - started

    times = np.full((len(files), 3), np.inf)
    for turn in range(3 * rounds):  # short requests often: the memory that writing waits for is seldom quiet
        for row, server in zip(times, servers, strict=True):
            new = [np.inf if turn % 3 else seconds(server, READ, 1), seconds(server, 1, _SHORT), seconds(server, 1, _LONG)]
            np.minimum(row, new, out=row)
    reading, short, long = times.T
    return np.stack((reading / READ, (long - short) / (_LONG - _SHORT)), 1)


def _open(file: Path, threads: int) -> Any:
    """A server of one file."""
    llama = need_llama()
    options = llama.CommonParams()
    options.model.path, options.n_ctx, options.n_batch, options.n_ubatch = str(file), 2 * READ, READ, READ
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.warmup, options.n_parallel, options.verbosity = True, 1, -1
    return llama.Server(options)
