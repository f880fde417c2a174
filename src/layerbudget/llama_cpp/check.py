"""A GGUF file that was written, beside the model that it was written from: llama.cpp loads it, and both say the same."""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..compressors.formats import find_format
from ..compressors.ggml import library_file
from ..errors import CoverageError
from ..execution.loss import Batch
from ..execution.modes import inference
from ..execution.replay import Replay, unwalkable
from ..models.blocks import config_of, pretrained, text_config
from ..models.machine import free_bytes
from ..models.offload import mapped
from .runtime import LlamaError, NoAnswer, ask

TEXTS = (
    'def read(path):\n    """Return the text of a file."""\n    with open(path) as file:\n        return file.read()\n',
    "The cat sat on the mat.  It's 12,345 steps from here, isn't it?",
    "naïve café, 東京タワー, Привет мир, 😀",
)
TOKENS = 32
_NOT_INSTALLED = "llama.cpp did not load the file: the package xllamacpp is not installed."
_LEAST, _TIMES = 1e-3, 20.0  # nats per token that pass anyway, and of what rounded inputs explain


class Followed:
    """Probabilities of a streamed model on the tokens of the check, taken along while its layers are rounded one by one.

    Afterwards no layer is rounded any more. The tokens go through every layer twice: once as they are, and once with the inputs
    of products rounded as llama.cpp rounds them.

    Args:
        model: Streamed.
        tokenizer: As for :func:`check_file`.
        formats: Format of every planned matrix.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, formats: Mapping[str, str]) -> None:
        self.replay, self.formats, self.ids = Replay(model), formats, _ids(model, tokenizer)
        self.inputs = {"input_ids": torch.tensor([self.ids], device=next(model.parameters()).device)}
        self.states: list[torch.Tensor] = []
        self.said: list[torch.Tensor] = []

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any, formats: Mapping[str, str]) -> Followed | None:
        """Return one for a model whose layers run alone, where llama.cpp is installed; else None."""
        if library_file() is None or mapped(model) is None:
            return None
        made = cls(model, tokenizer, formats)
        batch = Batch(rows=slice(0, 1), args=(), kwargs=made.inputs, targets=made.inputs["input_ids"], keys=())
        return None if unwalkable(model, (), [batch]) else made

    def follow(self, index: int) -> None:
        """Take the tokens through a layer that is rounded now: with -1 to the first one, with the last one to the end."""
        count, model = len(self.replay.layers), self.replay.model
        if index < 0:
            self.replay.probe(self.inputs)
            self.states = [self.replay.first_inputs(self.inputs)] * 2
            return
        for way in (0, 1):
            with _rounded_inputs(model, self.formats) if way else contextlib.nullcontext():
                with self.replay.begin(index, self.states[way]), self.replay.end(index):
                    self.states[way] = self.replay.run(self.inputs)
                if index == count - 1:
                    with self.replay.begin(count, self.states[way]):
                        self.said.append(_log_probabilities(model(**self.inputs)))


def check_file(
    file: Path, model: nn.Module, tokenizer: Any, formats: Mapping[str, str], followed: Followed | None = None
) -> str:
    """Return a sentence on what llama.cpp makes of a file: its tokens, and its probabilities beside the rounded model's.

    Where the package of llama.cpp is not installed, or gives no answer, the sentence says so. Probabilities are not compared
    of a file that is larger than the free memory, and of a streamed model that was not ``followed``.

    Args:
        file: With the tokenizer's vocabulary, where ``tokenizer`` is not None.
        model: As the file has it.
        tokenizer: None compares no tokens.
        formats: Format of every planned matrix.
        followed: What a streamed model said, whose weights are not rounded any more.

    Raises:
        CoverageError: llama.cpp refuses the file, splits texts into other tokens, or computes something else.
    """
    library = library_file()
    if library is None:
        return _NOT_INSTALLED
    size = text_config(config_of(model)).vocab_size
    texts = tuple(text for text in TEXTS if tokenizer is not None and _holds(tokenizer, text, size))
    ids = () if file.stat().st_size > free_bytes() else _ids(model, tokenizer)
    try:
        tokens, raw = ask(library, file, texts=texts, ids=ids)
    except NoAnswer as error:
        return f"llama.cpp did not check the file: {error}."
    except LlamaError as error:
        raise CoverageError(
            f"llama.cpp does not load the file: {error}.", "", "Nothing is kept. Plan for compressed-tensors, and report this."
        ) from error
    said = ["llama.cpp loads the file"]
    if texts:
        _check_tokens(texts, tokens, tokenizer)
        said.append(f"the tokens of {len(texts)} texts are equal")
    if not ids:
        said.append("no probabilities were compared: it is larger than the free memory")
    elif mapped(model) is not None and followed is None:
        _finite(raw)
        said.append("of a streamed model whose layers do not run alone no probabilities were compared")
    else:
        ours, coarse = _probabilities(model, formats, ids) if followed is None else followed.said
        said.append(_compare(ours, coarse, _finite(raw).reshape(len(ids), -1)))
    return "; ".join(said) + "."


def _wrong(library: Path, file: Path, ids: tuple[int, ...]) -> str:
    """What llama.cpp refuses of a file, or computes from it; empty where nothing is wrong."""
    try:
        logits = ask(library, file, ids=ids)[1]
    except LlamaError as error:
        return f"it does not load ({error})"
    return "" if not ids or np.isfinite(np.frombuffer(logits, np.float32)).all() else "it computes numbers that are not finite"


def check_alike(file: Path, source: Path, tokens: int) -> str:
    """Return a sentence on whether llama.cpp loads a file that has the metadata of another one, and computes finite numbers.

    It names no tokens, which are those of the other file, and compares no probabilities. Where llama.cpp does not take the
    other file either, or gives no answer, the sentence says so.

    Args:
        file: That was written.
        source: That it was written from.
        tokens: Of the vocabulary.

    Raises:
        CoverageError: llama.cpp refuses the file, or computes numbers that are not finite, and takes the other one.
    """
    library = library_file()
    if library is None:
        return _NOT_INSTALLED
    count = 0 if file.stat().st_size > free_bytes() else min(TOKENS, tokens)
    ids = tuple(np.random.default_rng(0).integers(0, tokens, count).tolist())
    try:
        if wrong := _wrong(library, file, ids):
            if _wrong(library, source, ids):
                return f"llama.cpp did not check the file: {source.name} is not taken either; {wrong}."
            what = f"llama.cpp takes {source.name}, and not the file that was made from it: {wrong}."
            raise CoverageError(what, "", "Nothing is kept. Plan other formats, and report this.")
    except NoAnswer as error:
        return f"llama.cpp did not check the file: {error}."
    computes = f"; what it computes on {count} tokens is finite" if count else ""
    return f"llama.cpp loads the file{computes}. No probabilities were compared."


def _ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Tokens of a text, or any where there is no tokenizer."""
    config = text_config(config_of(model))
    count = min(TOKENS, int(getattr(config, "max_position_embeddings", None) or TOKENS))
    read = [] if tokenizer is None else tokenizer(TEXTS[0])["input_ids"]
    ids = [i for i in read if i < config.vocab_size][:count]  # a tokenizer may have more tokens than its model
    if len(ids) < count // 2:
        ids = np.random.default_rng(0).integers(0, config.vocab_size, count).tolist()
    return tuple(int(i) for i in ids)


def _holds(tokenizer: Any, text: str, size: int) -> bool:
    """Whether a file's vocabulary of that size has all tokens of a text, and they all its letters; toys lack some of both."""

    def letters(text: str) -> str:
        return "".join(
            c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c) and not c.isspace()
        )

    ids = tokenizer(text)["input_ids"]
    return max(ids, default=0) < size and letters(tokenizer.decode(ids, skip_special_tokens=True)) == letters(text)


def _check_tokens(texts: tuple[str, ...], theirs: list[list[int]], tokenizer: Any) -> None:
    """Refuse other tokens. One at the beginning or the end of a text is a matter of the file's switches for these."""
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    for text, their in zip(texts, theirs, strict=True):
        ours = tokenizer(text)["input_ids"]
        ours, their = ([i for n, i in enumerate(ids) if n not in (0, len(ids) - 1) or i not in ends] for ids in (ours, their))
        if ours != their:
            at = next((i for i, (a, b) in enumerate(zip(ours, their, strict=False)) if a != b), min(len(ours), len(their)))
            what = f"llama.cpp splits {text!r} into other tokens than the tokenizer"
            difference = f"{their[at : at + 4]} for {ours[at : at + 4]} from token {at}"
            raise CoverageError(f"{what}: {difference}.", "", "Nothing is kept. Plan for compressed-tensors, and report this.")


def _finite(raw: bytes) -> np.ndarray:
    logits = np.frombuffer(raw, np.float32)
    if not np.isfinite(logits).all():
        raise CoverageError("llama.cpp computes numbers that are not finite.", "", "Nothing is kept. Plan other formats.")
    return logits


def _log_probabilities(output: Any) -> torch.Tensor:
    return torch.log_softmax(output.logits[0].float(), -1).cpu()


@torch.no_grad()
def _probabilities(model: nn.Module, formats: Mapping[str, str], ids: tuple[int, ...]) -> list[torch.Tensor]:
    """Log-probabilities of a rounded model, then those with the inputs of products rounded too, ``(tokens, V)`` each."""
    inputs: Any = {"input_ids": torch.tensor([ids], device=next(model.parameters()).device)}
    with inference(model):
        ours = _log_probabilities(model(**inputs))
        with _rounded_inputs(model, formats):
            return [ours, _log_probabilities(model(**inputs))]


def _compare(ours: torch.Tensor, coarse: torch.Tensor, logits: np.ndarray) -> str:
    """Compare probabilities; ``coarse`` says what llama.cpp's rounding of the inputs of products explains."""
    theirs = torch.log_softmax(torch.from_numpy(logits.copy()), -1)
    apart, explained = (float((ours.exp() * (ours - other)).sum(-1).clamp(min=0).quantile(0.75)) for other in (theirs, coarse))
    if apart > max(_LEAST, _TIMES * explained):
        raise CoverageError(
            f"llama.cpp computes something else from the file: of {len(ours)} tokens a quarter has a KL of more than "
            f"{apart:.2g} nats from the rounded model.",
            f"Its own arithmetic explains about {explained:.2g}.",
            "Nothing is kept. Plan for compressed-tensors, and report this.",
        )
    most = float((ours - theirs).abs().max())
    return f"on {len(ours)} tokens its log-probabilities differ by at most {most:.2g} (KL of the upper quartile {apart:.1g})"


@contextlib.contextmanager
def _rounded_inputs(model: nn.Module, formats: Mapping[str, str]) -> Iterator[None]:
    """Within it the inputs of matrices are rounded as llama.cpp's products round them: to 8 bits, or to 16 for numbers."""
    head: Any = pretrained(model).get_output_embeddings()
    hooks, modules = [], dict(model.named_modules())
    for name, form in formats.items():
        owner: Any = modules.get(name) or model.get_submodule(name.rpartition(".")[0])
        owner = head if isinstance(owner, nn.Embedding) and head is not None and head.weight is owner.weight else owner
        if not isinstance(owner, nn.Embedding):
            block = None if find_format(form).plain else 256 if find_format(form).group == 256 else 32
            hooks.append(
                owner.register_forward_pre_hook(lambda _, x, block=block: (_rounded(x[0], block), *x[1:]) if x else None)
            )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """Numbers in 8 bits with a scale for every block of channels, or in 16 bits."""
    if block is None or x.shape[-1] % block:
        return x.half().to(x.dtype)
    parts = x.reshape(*x.shape[:-1], -1, block)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((parts / scale).round() * scale).reshape(x.shape)
