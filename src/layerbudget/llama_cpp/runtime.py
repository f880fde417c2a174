"""Results of llama.cpp itself on a GGUF file: whether it loads, the tokens of texts, and logits.

The library is the one in the wheel of ``xllamacpp``. It may end its process by an assertion, so it runs in a child process:
this file is also the script of that process, which imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_BYTES_PER_SECOND = 20e6  # a slow disk and a slow processor: after so long a child is given up
_DEFAULTS = (512, 2048, 512, 1)  # tokens of a context, a batch and a micro-batch, and sequences, in front of its options


class LlamaError(Exception):
    """llama.cpp does not load a file, or does not compute with it; the text is what it says."""


class NoAnswer(Exception):
    """llama.cpp took too long, or the system ended its process."""


def ask(
    library: Path, file: Path, *, texts: tuple[str, ...] = (), ids: tuple[int, ...] = (), seconds: float | None = None
) -> tuple[list[list[int]], bytes]:
    """Return the tokens of every text, and the logits after every token of ``ids``: float32, one row of the vocabulary each.

    Tokens are those of ``llama_tokenize`` with special tokens read and added as the file says.

    Args:
        library: The shared object that has llama.cpp's functions.
        file: A GGUF file. It is mapped into memory.
        texts: Without them nothing is tokenised.
        ids: One sequence, at most 512; without it nothing is computed.
        seconds: How long it may take; by default a minute, and more for a large file.

    Raises:
        LlamaError: The file is refused, or the process was ended.
        NoAnswer: It took too long, or the system ended the process, for want of memory as a rule.
    """
    seconds = seconds or 60 + file.stat().st_size / _BYTES_PER_SECOND
    with tempfile.TemporaryDirectory() as folder:
        asked = {"library": str(library), "file": str(file), "texts": list(texts), "ids": list(ids), "folder": folder}
        command = [sys.executable, "-I", __file__]
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # else it starts a debugger when it is ended
        try:
            done = subprocess.run(
                command, input=json.dumps(asked).encode(), capture_output=True, timeout=seconds, env=environment, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"it took more than {seconds:.0f} s") from error
        if done.returncode == -signal.SIGKILL:
            raise NoAnswer("the system ended its process")
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            said = done.stderr.decode("utf8", "replace").splitlines()
            why = next((line.strip() for line in said if "ASSERT" in line), said[-1].strip() if said else "")
            raise LlamaError(f"the process was ended ({done.returncode}){': ' * bool(why)}{why}")
        read = json.loads(answer.read_text())
        if "refused" in read:
            raise LlamaError(read["refused"])
        logits = Path(folder) / "logits"
        return read["tokens"], logits.read_bytes() if logits.exists() else b""


# ---- the child process


class _Options(ctypes.Structure):
    """Options of a model or a context, by value: no longer than this."""

    _fields_ = [("words", ctypes.c_uint32 * 128)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embedding", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    ]


_Hear = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def _open(library: str) -> Any:
    """llama.cpp's functions with their types."""
    functions, pointer, number = ctypes.CDLL(library), ctypes.c_void_p, ctypes.c_int32
    numbers, floats, yes = ctypes.POINTER(number), ctypes.POINTER(ctypes.c_float), ctypes.c_bool
    types: tuple[tuple[str, Any, list[Any]], ...] = (
        ("model_default_params", _Options, []),
        ("context_default_params", _Options, []),
        ("model_load_from_file", pointer, [ctypes.c_char_p, _Options]),
        ("init_from_model", pointer, [pointer, _Options]),
        ("model_get_vocab", pointer, [pointer]),
        ("vocab_n_tokens", number, [pointer]),
        ("tokenize", number, [pointer, ctypes.c_char_p, number, numbers, number, yes, yes]),
        ("batch_init", _Batch, [number, number, number]),
        ("decode", number, [pointer, _Batch]),
        ("get_logits_ith", floats, [pointer, number]),
    )
    for name, result, arguments in types:
        function = getattr(functions, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


def _tokens(functions: Any, vocabulary: Any, text: str) -> list[int]:
    raw = text.encode()
    room = (ctypes.c_int32 * (len(raw) + 16))()
    count = functions.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
    return list(room[: max(0, count)])


def _logits(functions: Any, model: Any, ids: list[int], size: int, place: Path) -> None:
    """Write a row of logits for each token; the context is as long as the tokens, so that it takes little memory."""
    options = functions.llama_context_default_params()
    if tuple(options.words[:4]) == _DEFAULTS:
        options.words[0] = options.words[1] = options.words[2] = len(ids)
    context = functions.llama_init_from_model(model, options)
    if not context:
        raise LlamaError("no context of it is made")
    batch = functions.llama_batch_init(len(ids), 0, 1)
    batch.count = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.position[i], batch.sequences[i], batch.wanted[i] = token, i, 1, 1
        batch.sequence[i][0] = 0
    if code := functions.llama_decode(context, batch):
        raise LlamaError(f"its tokens are not computed (code {code})")
    with place.open("wb") as out:
        for i in range(len(ids)):
            out.write(ctypes.string_at(functions.llama_get_logits_ith(context, i), 4 * size))


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    said: list[str] = []
    hear = _Hear(lambda level, text, data: said.append(text.decode("utf8", "replace").strip()))
    functions = _open(asked["library"])
    functions.llama_log_set(hear, None)
    functions.llama_backend_init()
    model = functions.llama_model_load_from_file(asked["file"].encode(), functions.llama_model_default_params())
    if not model:
        why = next((text for text in said if "error loading" in text), said[-1] if said else "it says nothing")
        return {"refused": why.split("error loading model: ")[-1].split("error loading model hyperparameters: ")[-1]}
    vocabulary = functions.llama_model_get_vocab(model)
    tokens = [_tokens(functions, vocabulary, text) for text in asked["texts"]]
    if asked["ids"]:
        size = functions.llama_vocab_n_tokens(vocabulary)
        try:
            _logits(functions, model, asked["ids"], size, Path(asked["folder"]) / "logits")
        except LlamaError as error:
            return {"refused": f"{error}{'; '.join(('', *said[-2:]))}"}
    return {"tokens": tokens}


def main() -> None:
    """Answer the question on the standard input, by files in the folder that it names."""
    asked = json.load(sys.stdin)
    place = Path(asked["folder"]) / "answer.json"
    place.write_text(json.dumps(_answer(asked)))
    os._exit(0)  # what it holds is freed with the process


if __name__ == "__main__":
    main()
