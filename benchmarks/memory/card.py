"""What llama.cpp itself allocates on a card and beside it, on a machine without a card.

llama.cpp is given a device of its own interface that says it is a card: buffers of another type, in the processor's memory, and
the processor's arithmetic. It places tensors, cache and buffers as for any card, and says the bytes of each side. As the backends
of real cards do, this one takes over matrix products of 32 tokens and more whose weights lie with the processor, unless it is
told not to. The functions are those of the wheel of ``xllamacpp``; they run in a child process, which this file is the script of.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
SHOWN = 0.0051 * MIB  # llama.cpp says bytes in hundredths of a MiB
CARD, PROCESSOR = "CARD", "processor"
CACHES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "IQ4_NL": 20}  # ggml's numbers
_LINE = re.compile(r"(\w+) (model|KV|compute|output) buffer size = +([\d.]+) MiB")
_EXPERTS = r"blk\.%d\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # llama.cpp's own pattern, of --n-cpu-moe
_BATCH = 32  # tokens of a product that a card takes over
_TOOK, _GPU = 60, 1

Sides = dict[str, dict[str, float]]  # bytes by side, ``CARD`` or ``processor``, and part: model, KV, compute, output


def allocated(
    library: Path,
    file: Path,
    *,
    layers: int = 999,
    experts: int = 0,
    context: int = 512,
    batch: int = 1,
    cache: tuple[str, str] = ("F16", "F16"),
    takes_over: bool = True,
) -> Sides:
    """Return the bytes that llama.cpp says it allocates, by side and part.

    Args:
        library: The shared object that has llama.cpp's functions.
        file: A GGUF file; it is loaded.
        layers: As of ``--n-gpu-layers``.
        experts: As of ``--n-cpu-moe``.
        context: Tokens of a sequence.
        batch: Sequences at a time.
        cache: Types of keys and of values.
        takes_over: Whether the card computes long batches of the processor's matrices; ``--no-op-offload`` is the contrary.

    Raises:
        RuntimeError: llama.cpp does not load the file, or says nothing of its buffers.
    """
    asked = {
        "library": str(library), "file": str(file), "layers": layers, "experts": experts, "context": context * batch,
        "batch": batch, "cache": [CACHES[name] for name in cache], "takes_over": takes_over,
    }  # fmt: skip
    command = [sys.executable, "-I", "-W", "ignore", __file__]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=_TOOK, env=environment, check=False
    )
    lines = _LINE.findall(done.stdout)
    if done.returncode or not any(part == "compute" for _, part, _ in lines):
        raise RuntimeError(f"llama.cpp says nothing of its buffers:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    sides: Sides = {CARD: {}, PROCESSOR: {}}
    for name, part, size in lines:
        side = sides[CARD if name == CARD else PROCESSOR]
        side[part] = side.get(part, 0.0) + float(size) * MIB
    return sides


# ---- the child process

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_YES, _NUMBER, _TEXT = ctypes.c_bool, ctypes.c_int, ctypes.c_char_p


class _Options(ctypes.Structure):
    """Options of a model or a context, by value: no longer than this."""

    _fields_ = [("words", ctypes.c_uint32 * 128)]


class _Override(ctypes.Structure):
    _fields_ = [("pattern", _TEXT), ("type", _POINTER)]


class _Card:
    """A device beside the processor: its table of functions is the processor's, but for what tells the two apart."""

    def __init__(self, functions: Any, takes_over: bool) -> None:
        self.functions, self.kept = functions, list[Any]()
        processor = self.call("ggml_backend_dev_by_type", _POINTER, _NUMBER)(0)
        self.host = self.call("ggml_backend_dev_buffer_type", _POINTER, _POINTER)(processor)
        place_in_buffer, place_in_backend = self.place("ggml_backend_buffer_get_type"), self.place("ggml_backend_get_device")
        self.type = self.copy(self.host, self.place("ggml_backend_buft_get_device") + 2)
        self.device = self.copy(processor, self.place("ggml_backend_dev_backend_reg") + 2)
        allocate = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE)(self.type[1])
        begin = ctypes.CFUNCTYPE(_POINTER, _POINTER, _TEXT)(self.device[5])
        where, what = ctypes.addressof(self.device), ctypes.addressof(self.type)

        def made(of: Any, place: int, value: int) -> Any:
            ctypes.c_uint64.from_address(of + 8 * place).value = value
            return of

        self.set(self.type, 0, _TEXT, [_POINTER], lambda _: CARD.encode())
        self.set(self.type, 1, _POINTER, [_POINTER, _SIZE], lambda _, n: made(allocate(self.host, n), place_in_buffer, what))
        self.set(self.type, 7, _YES, [_POINTER], lambda _: False)  # no other device reads its memory
        self.set(self.device, 0, _TEXT, [_POINTER], lambda _: CARD.encode())
        self.set(self.device, 3, _NUMBER, [_POINTER], lambda _: _GPU)
        self.set(self.device, 5, _POINTER, [_POINTER, _TEXT], lambda _, s: made(begin(processor, s), place_in_backend, where))
        self.set(self.device, 6, _POINTER, [_POINTER], lambda _: what)
        self.set(self.device, 8, _POINTER, [_POINTER, _POINTER, _SIZE, _SIZE], lambda *_: None)  # no mapped file
        self.set(self.device, 9, _YES, [_POINTER, _POINTER], lambda *_: True)  # it computes everything
        self.set(self.device, 10, _YES, [_POINTER, _POINTER], lambda _, other: other == what)
        self.set(self.device, 11, _YES, [_POINTER, _POINTER], lambda _, t: takes_over and self.tokens(t) >= _BATCH)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of the library with its types."""
        function = getattr(self.functions, name)
        function.restype, function.argtypes = result, list(arguments)
        return function

    def place(self, reader: str) -> int:
        """Which word of a structure a function reads: it is given one whose words are their own places."""
        words = (ctypes.c_uint64 * 64)(*range(64))
        return self.call(reader, _POINTER, _POINTER)(ctypes.addressof(words)) or 0

    def copy(self, of: int, count: int) -> Any:
        """A structure of so many words."""
        return (ctypes.c_uint64 * count).from_buffer_copy(ctypes.string_at(of, 8 * count))

    def set(self, table: Any, place: int, result: Any, arguments: list[Any], function: Callable[..., Any]) -> None:
        """Put a function into a table."""
        self.kept.append(ctypes.CFUNCTYPE(result, *arguments)(function))
        table[place] = ctypes.cast(self.kept[-1], _POINTER).value

    def tokens(self, tensor: int) -> int:
        """Tokens of an operation, as ggml-cuda counts them: none of a row that is looked up."""
        name = self.call("ggml_op_desc", _TEXT, _POINTER)(tensor)
        sizes = (ctypes.c_int64 * 4).from_address(tensor + 16)
        if name == b"GET_ROWS":
            return 0
        if name.startswith(b"MUL_MAT"):
            return sizes[2 if name.startswith(b"MUL_MAT_ID") else 1]
        return sizes[1] * sizes[2] * sizes[3]


def _load(asked: dict[str, Any]) -> str:
    """What llama.cpp says while it loads a file and makes a context."""
    said = list[str]()
    functions = ctypes.CDLL(asked["library"])
    card = _Card(functions, asked["takes_over"])
    hear = ctypes.CFUNCTYPE(None, _NUMBER, _TEXT, _POINTER)(lambda _, text, data: said.append(text.decode("utf8", "replace")))
    card.call("llama_log_set", None, type(hear), _POINTER)(hear, None)
    functions.llama_backend_init()
    options = card.call("llama_model_default_params", _Options)()
    if list(options.words[4:7]) != [2**32 - 1, 1, 2**32 - 1]:
        raise SystemExit("llama.cpp's options of a model lie otherwise than this script knows")
    devices = (_POINTER * 2)(ctypes.addressof(card.device), None)
    overrides = (_Override * (asked["experts"] + 1))()
    for layer in range(asked["experts"]):
        overrides[layer].pattern, overrides[layer].type = (_EXPERTS % layer).encode(), card.host
    pointers = (ctypes.c_uint64 * 2).from_buffer(options)
    pointers[:] = [ctypes.addressof(devices), ctypes.addressof(overrides)]
    options.words[4], options.words[6] = asked["layers"], 0  # the file is read, not mapped: so both sides are said exactly
    model = card.call("llama_model_load_from_file", _POINTER, _TEXT, _Options)(asked["file"].encode(), options)
    if model:
        context = card.call("llama_context_default_params", _Options)()
        if list(context.words[:4]) != [512, 2048, 512, 1] or list(context.words[26:28]) != [1, 1]:
            raise SystemExit("llama.cpp's options of a context lie otherwise than this script knows")
        context.words[0], context.words[3], context.words[5] = asked["context"], asked["batch"], asked["batch"]
        context.words[13] = 1  # flash attention
        context.words[26], context.words[27] = asked["cache"]
        card.call("llama_init_from_model", _POINTER, _POINTER, _Options)(model, context)
    return "".join(said)


if __name__ == "__main__":
    sys.stdout.write(_load(json.load(sys.stdin)))
    sys.stdout.flush()
    os._exit(0)  # what it holds is freed with the process
