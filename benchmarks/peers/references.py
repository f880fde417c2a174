"""Run the reference implementations of pruning, unmodified, from their checkouts, on the CPU and transformers 5.

What is patched, in memory only: the calibration loader returns our tokens; ``.cuda()`` and ``torch.cuda.synchronize`` do
nothing; every decoder layer gets its position embeddings when the reference forgets to pass them (they are computed once, so
this costs the reference no time).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import shutil
import sys
import tempfile
import types
from argparse import Namespace
from pathlib import Path

import torch


def _neutralise_cuda() -> None:
    torch.cuda.synchronize = lambda *a, **k: None
    torch.Tensor.cuda = lambda self, *a, **k: self


def _give_position_embeddings(model, length: int) -> None:
    position_ids = torch.arange(length)[None]
    hidden = torch.zeros(1, length, model.config.hidden_size, dtype=next(model.parameters()).dtype)
    embeddings = model.model.rotary_emb(hidden, position_ids)
    for layer in model.model.layers:
        own = layer.forward

        def forward(*args, own=own, **kwargs):
            kwargs.setdefault("position_embeddings", embeddings)
            return own(*args, **kwargs)

        layer.forward = forward
    model.hf_device_map, model.seqlen = {}, length


def _loader(ids):
    return [(row[None], None) for row in ids]


@contextlib.contextmanager
def _on_path(folder: Path, drop: tuple[str, ...]):
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [m for m in sys.modules if m.split(".")[0] in drop]:
            del sys.modules[name]


class _Turns(Namespace):
    """Arguments whose ``sparsity_ratio`` is the next matrix's every time it is read; the repository reads it once a matrix."""

    @property
    def sparsity_ratio(self):
        return next(self.ratios)


def wanda_repository(path: Path, method: str):
    """``run(model, ids, ratio, pattern)`` of locuslab/wanda: magnitude, wanda or sparsegpt.

    The ratio may be a dictionary by full name of the matrix.
    """
    _neutralise_cuda()
    with _on_path(path, ("lib",)):
        sys.modules["lib.data"] = types.ModuleType("lib.data")
        sys.modules["lib.data"].get_loaders = None
        module = importlib.import_module("lib.prune")

    def run(model, ids, ratio, pattern=(0, 0)):
        _give_position_embeddings(model, ids.shape[1])
        module.get_loaders = lambda *a, **k: (_loader(ids), None)
        args = {"nsamples": len(ids), "seed": 0, "use_variant": False}
        if isinstance(ratio, dict):
            named = [f"model.layers.{i}.{n}" for i, layer in enumerate(model.model.layers) for n in module.find_layers(layer)]
            args = _Turns(**args, ratios=iter([ratio[name] for name in named]))
        else:
            args = Namespace(**args, sparsity_ratio=ratio)
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            getattr(module, f"prune_{method}")(args, model, None, torch.device("cpu"), *pattern)

    return run


def sparsegpt_repository(path: Path, true_sequential: bool = False):
    """``run(model, ids, ratio, pattern)`` of IST-DASLab/sparsegpt."""
    _neutralise_cuda()
    with _on_path(path, ("llama", "sparsegpt", "modelutils", "quant")):
        module = importlib.import_module("llama")

    def run(model, ids, ratio, pattern=(0, 0)):
        _give_position_embeddings(model, ids.shape[1])
        module.args = Namespace(
            nsamples=len(ids), true_sequential=true_sequential, minlayer=-1, maxlayer=1000, prune_only="", invert=False,
            wbits=16, sparsity=ratio, prunen=pattern[0], prunem=pattern[1], percdamp=0.01, blocksize=128,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            module.llama_sequential(model, _loader(ids), torch.device("cpu"))

    return run


def _tokenizer(size: int):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


def _give_a_folder(model) -> None:
    """It wants a model that came from somewhere."""
    folder = tempfile.mkdtemp(prefix="peer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    model.config._name_or_path = model.name_or_path = folder


def llm_compressor(path: Path | None, method: str, recipe: str | None = None):
    """``run(model, ids, ratio, pattern)`` of vllm-project/llm-compressor (an installed copy, or a folder that holds one)."""
    if path is not None:
        sys.path.insert(0, str(path))
    with contextlib.redirect_stderr(io.StringIO()):
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    with contextlib.suppress(ImportError):
        from loguru import logger

        logger.remove()
    kind = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}.get(method)

    def run(model, ids, ratio, pattern=(0, 0)):
        data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
        structure = f"{pattern[0]}:{pattern[1]}" if pattern[1] else "0:0"
        chosen = recipe or kind(sparsity=ratio, mask_structure=structure, targets=["Linear"], ignore=["re:.*lm_head"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            oneshot(
                model=model,
                processor=_tokenizer(model.config.vocab_size),
                dataset=data,
                recipe=chosen,
                num_calibration_samples=len(ids),
                max_seq_length=ids.shape[1],
                shuffle_calibration_samples=False,
            )

    run.prepare = _give_a_folder
    return run
