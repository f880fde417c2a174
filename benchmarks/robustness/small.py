"""What the robustness scripts share: a small model, texts and files of every kind, and one command run in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
WORDS = 97
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make_model(folder: Path, seed: int = 0, layers: int = 3) -> None:
    """A random Llama of a few layers with a tokenizer of words, as ``save_pretrained`` writes it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers}, initializer_range=0.1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w2")
    made.save_pretrained(folder)


def text(count: int = 3000, shift: int = 3) -> str:
    """Words with a little structure."""
    return " ".join(f"w{(7 * i * i + shift * i) % WORDS}" for i in range(count))


def make_task(path: Path, rows: int = 24) -> None:
    """A task of two labels as JSON lines, half of it held out."""
    lines = []
    for i in range(rows):
        label = "yes" if i % 2 else "no"
        words = " ".join(f"w{(5 * i + j) % 90 + (3 if label == 'yes' else 0)}" for j in range(6))
        lines.append(json.dumps({"text": words, "label": label, "split": "test" if i % 3 == 0 else "train"}))
    path.write_text("\n".join(lines) + "\n")


@dataclasses.dataclass
class Outcome:
    """How one command ended."""

    code: int | None
    seconds: float
    trouble: str | None = None  # "hang", or the last frames of a traceback
    said: str = ""


class Hang(BaseException):
    """The time of a case is over."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise :class:`Hang` in this thread after so many seconds."""

    def ring(number, frame):
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(arguments: list[str], seconds: float = 30.0) -> Outcome:
    """Run a command in this process; what it prints is kept."""
    from layerbudget.cli import main

    began, out, err = time.perf_counter(), io.StringIO(), io.StringIO()
    code, trouble = None, None
    try:
        with limit(seconds), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 2
    except Hang:
        trouble = "hang"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        mine = [f for f in frames if "layerbudget" in f.filename] or frames
        where = f"{Path(mine[-1].filename).name}:{mine[-1].lineno} {mine[-1].name}"
        trouble = f"{type(error).__name__} at {where}: {str(error)[:160]}"
    if code not in (0, 1, 2, None):
        trouble = f"exit code {code}"
    return Outcome(code, time.perf_counter() - began, trouble, err.getvalue()[-600:] + out.getvalue()[-200:])


def say(line: str) -> None:
    """A line of progress."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
