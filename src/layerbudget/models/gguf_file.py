"""A GGUF file as a model of transformers: its own reader gives the weights, and every number of the file is compared."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import BadModel, InvalidInput, MissingDependency
from ..storage.checkpoint import gguf_of
from .blocks import check_finite, pretrained
from .loading import DTYPES, find_device, foreign, load_tokenizer, silent

# llama.cpp's names of the architectures whose logits are those of llama.cpp.
READ = ("llama", "qwen2", "qwen3", "phi3", "starcoder2", "stablelm")
_FACTORS = "rope_freqs.weight"


def _field(name: str) -> Callable[[Any], Any]:
    return lambda config: getattr(config, name)


def _eps(config: Any) -> Any:
    return getattr(config, "layer_norm_eps", None) or config.norm_epsilon


# What a file says of its architecture, and where the configuration has it. A word that is not here is not read.
_SAYS: dict[str, Callable[[Any], Any]] = {
    "block_count": _field("num_hidden_layers"),
    "context_length": _field("max_position_embeddings"),
    "embedding_length": _field("hidden_size"),
    "feed_forward_length": _field("intermediate_size"),
    "vocab_size": _field("vocab_size"),
    "attention.head_count": _field("num_attention_heads"),
    "attention.head_count_kv": _field("num_key_value_heads"),
    "attention.key_length": lambda config: _width(config),
    "attention.value_length": lambda config: _width(config),
    "attention.layer_norm_rms_epsilon": _field("rms_norm_eps"),
    "attention.layer_norm_epsilon": _eps,
    "attention.causal": lambda config: True,
    "rope.freq_base": lambda config: config.rope_parameters["rope_theta"],
    "rope.dimension_count": lambda config: int(
        _width(config) * float(config.rope_parameters.get("partial_rotary_factor") or 1.0)
    ),
    "rope.scaling.type": lambda config: {"default": "none"}.get(kind := config.rope_parameters["rope_type"], kind),
    "rope.scaling.factor": lambda config: config.rope_parameters.get("factor", 1.0),
    "use_parallel_residual": _field("use_parallel_residual"),
}


def _width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def gguf_config(file: Path) -> Any:
    """Return the configuration of the model in a GGUF file; no weight is read.

    Raises:
        BadModel: Something that transformers reads otherwise than llama.cpp, or no GGUF file.
        MissingDependency: Without the package ``gguf``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    said, tensors = _read_header(file)
    with foreign(f"transformers does not load {file}", "", _llama_cpp(file)), silent():
        config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
        _complete(config, said, tensors)
        for word, value in said.items():
            if word not in _SAYS or not _is_same(_SAYS[word](config), value):
                raise _otherwise(file, f"{word} = {str(value)[:40]}")
        with torch.device("meta"):
            taken = {*get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), TensorProcessor()), _FACTORS}
    if left := [name for name in tensors if name not in taken]:
        raise _otherwise(file, f"the tensor {left[0]}")
    return config


def is_read(file: Path) -> bool:
    """Return whether :func:`load_gguf` reads a GGUF file, as far as its header says it."""
    try:
        gguf_config(file)
    except (BadModel, MissingDependency):
        return False
    return True


def _read_header(file: Path) -> tuple[dict[str, Any], set[str]]:
    """What a file says of its architecture, and the names of its tensors."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependency("A GGUF file is read by the package gguf.", "", "pip install gguf")
    from gguf import GGUFReader

    with foreign(f"{file} does not read as GGUF", "It is a file of llama.cpp.", "Write it again."):
        reader = GGUFReader(file)
        arch = str(reader.fields["general.architecture"].contents())
        said = {k.partition(".")[2]: f.contents() for k, f in reader.fields.items() if k.startswith(f"{arch}.")}
        tensors = {tensor.name for tensor in reader.tensors}
    if arch not in READ:
        raise _otherwise(file, f"the architecture {arch}")
    return said, tensors


def _otherwise(file: Path, what: str) -> BadModel:
    """The error of a file that holds something which transformers does not read as llama.cpp does."""
    return BadModel(
        f"{file} has {what}, which transformers does not read from a GGUF file as llama.cpp does.",
        f"Files of {', '.join(READ)} are evaluated here.",
        _llama_cpp(file),
    )


def _llama_cpp(file: Path) -> str:
    return f"llama.cpp evaluates it: llama-perplexity -m {shlex.quote(str(file))} -f TEXT."


@silent()
def load_gguf(name: str, *, dtype: str = "float32", device: str = "cpu") -> nn.Module:
    """Return the model that a GGUF file holds, in evaluation mode; its weights are the numbers that its types stand for.

    Args:
        name: The file, or a folder with ``model.gguf`` and no ``config.json``.
        dtype: See :func:`~layerbudget.models.loading.load_model`; ``auto`` is float32, as the types are finer than 16 bits.
        device: Where to put it.

    Raises:
        BadModel: Something that transformers reads otherwise than llama.cpp, or no GGUF file.
        InvalidInput: A device that this machine does not have.
    """
    from transformers import AutoModelForCausalLM

    place, file = find_device(device), gguf_of(name)
    if file is None:
        raise InvalidInput(f"{name} is no GGUF file.", "It ends in .gguf, or is a folder with model.gguf.", "Check the path.")
    config = gguf_config(file)
    with foreign(f"transformers does not load {name}", "", _llama_cpp(file)):
        own = {"gguf_file": file.name, "config": config, "dtype": DTYPES.get(dtype, torch.float32)}
        loader: Any = AutoModelForCausalLM
        model, report = loader.from_pretrained(str(file.parent), output_loading_info=True, **own)
        model.hf_quantizer.remove_quantization_config(model)
    if report["missing_keys"]:
        raise _otherwise(file, f"no {min(report['missing_keys'])}")
    _stretch(model, file)
    model = pretrained(model.to(place).eval())
    check_finite(model)
    model.config._name_or_path = name
    return model


def _complete(config: Any, said: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Give a configuration what its reader leaves at the default of the class."""
    config.vocab_size = said.get("vocab_size", config.vocab_size)
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = None
    if hasattr(config, "head_dim") and "attention.key_length" in said:
        config.head_dim = said["attention.key_length"]
    if getattr(config, "sliding_window", None):
        config.sliding_window = None  # a file that has one says it, and is refused
    for field, tensor in (("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")):
        if hasattr(config, field):
            setattr(config, field, f"blk.0.{tensor}" in tensors)
    rope = {"rope_type": "default", "rope_theta": float(said.get("rope.freq_base", 10000.0))}
    if said.get("rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": float(said.get("rope.scaling.factor", 1.0))}
    if (part := said.get("rope.dimension_count", _width(config)) / _width(config)) != 1.0:
        rope["partial_rotary_factor"] = part
    elif "partial_rotary_factor" in (config.rope_parameters or {}):
        rope["partial_rotary_factor"] = 1.0
    config.rope_parameters = rope


def _is_same(mine: Any, value: Any) -> bool:
    """Whether two values are equal, floats as the file's 32 bits."""
    return bool(np.float32(mine) == np.float32(value)) if isinstance(value, float) else bool(mine == value)


def _stretch(model: Any, file: Path) -> None:
    """Divide the frequencies of the rotary embedding by the factors of the file, where it has some (Llama 3)."""
    from gguf import GGUFReader

    for factors in (torch.from_numpy(np.array(t.data)) for t in GGUFReader(file).tensors if t.name == _FACTORS):
        for module in (m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)):
            module.inv_freq /= factors
            module.original_inv_freq = module.inv_freq.clone()


def load_gguf_tokenizer(name: str) -> Any:
    """Return the tokenizer beside a GGUF file, where there is one, else that of the file."""
    from transformers import AutoTokenizer

    file = gguf_of(name)
    if file is None:
        return load_tokenizer(name)
    own = {} if (file.parent / "tokenizer.json").is_file() else {"gguf_file": file.name}
    with foreign(f"{name} has no tokenizer that loads", "", "Save the tokenizer beside the file."):
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), trust_remote_code=False, **own)
        tokenizer("a", truncation=True)
        return tokenizer
