"""A GGUF file that is read as a model: what it says, the configuration that says the same, and where its parameters lie.

Everything goes by the table that files are written by (:mod:`.architectures`): a number that no field of the configuration
takes, a tensor that no parameter takes, and a parameter without a tensor are refused by name. So what is read is what llama.cpp
computes, or nothing is read.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..errors import BadModel, CorruptFile, InvalidInput, NotFound
from ..storage.checkpoint import broken
from .architectures import ARCHITECTURES, Architecture, rope_of
from .names import rope_factors
from .reader import read_gguf
from .tensors import Stored, stored_tensors

_GPT2 = Architecture(
    name="gpt2",
    square=True,
    takes=frozenset(("layer_norm_epsilon", "n_inner", "activation_function")),
    expects={"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
)
#: What is read, by transformers' model type. It is all that is written, and GPT-2.
READ: Mapping[str, Architecture] = {**{k: a for k, a in ARCHITECTURES.items() if k != "mistral"}, "gpt2": _GPT2}
PLAIN = ("F64", "F32", "F16", "BF16")  # types that are plain numbers
FACTORS = "rope_freqs.weight"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# What a file says of its architecture, and the fields of a configuration: the first that the class declares.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
}
_NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")
_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Words that say nothing more where they have these values; None stands for any value.
_NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
    "vocab_size": None,  # the rows of the embedding are counted
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,
    "rope.scaling.attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "nextn_predict_layers": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "decoder_sparse_step": (1,),
}
_SEEN = frozenset(
    "attention.value_length rope.freq_base rope.freq_base_swa rope.dimension_count rope.dimension_count_swa rope.scaling.type "
    "rope.scaling.factor attention.sliding_window attention.sliding_window_pattern".split()
)
_BROKEN = (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, TypeError, OSError)


class GgufFile:
    """A GGUF file, in one part or several.

    Attributes:
        path: The file that was named.
        parts: All of its files.
        arch: llama.cpp's name of the architecture.
        said: What the file says of it, without the name in front.
        tensors: By name.

    Raises:
        CorruptFile: It is no GGUF file, or it is cut off.
        NotFound: A part is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.parts = path, _parts_of(path)
        opened = [_open_part(part) for part in self.parts]
        self.fields = opened[0][1]
        self.arch = str(self.fields.get("general.architecture"))
        self.said = {k.partition(".")[2]: v for k, v in self.fields.items() if k.startswith(f"{self.arch}.")}
        self.tensors = {tensor.name: tensor for reader, _ in opened for tensor in reader.tensors}
        if (count := self.fields.get("split.count") or 1) != len(self.parts):
            raise NotFound(
                f"{path} is one of {count} parts.", "Parts are named NAME-00001-of-00003.gguf.", "Give them these names."
            )

    def types(self) -> dict[str, int]:
        """Return how many weights of matrices have each type."""
        weights: dict[str, int] = {}
        for tensor in (t for t in self.tensors.values() if len(t.shape) > 1):
            weights[tensor.tensor_type.name] = weights.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
        return weights

    def refuse(self, what: str, remedy: str = "") -> BadModel:
        """Return the error of something that is not read."""
        return BadModel(
            f"{self.path} has {what}, which is not read from a GGUF file here.",
            f"Files of {', '.join(dict.fromkeys(a.name for a in READ.values()))} are read, as llama.cpp computes them.",
            remedy or "Give the folder that the file was converted from.",
        )


def _open_part(path: Path) -> tuple[Any, dict[str, Any]]:
    """The reader of a file, and what its header says."""
    try:
        reader = read_gguf(path)
        return reader, reader.values()
    except _BROKEN as error:
        reason = error if path.stat().st_size else "it is empty"
        raise broken(path, "GGUF", reason, "It may be cut off: write or copy it again.") from error


def _parts_of(path: Path) -> list[Path]:
    """All files of a file that may be in several parts."""
    if (named := _PART.fullmatch(path.name)) is None:
        return [path]
    parts = [path.with_name(f"{named[1]}-{i:05}-of-{named[3]}.gguf") for i in range(1, int(named[3]) + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise NotFound(f"{path} lacks a part: there is no {missing[0].name}.", "All parts lie in one folder.", "Copy it there.")
    return parts


def open_gguf(path: Path) -> GgufFile:
    """Return a file; one that was opened before and did not change is not read again."""
    return _opened(path.absolute(), state_of(path))


def state_of(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the time of change and the size of every part, by which a changed file is known."""
    return tuple((state.st_mtime_ns, state.st_size) for state in (part.stat() for part in _parts_of(path)))


@functools.lru_cache(maxsize=4)
def _opened(path: Path, _: tuple[tuple[int, int], ...]) -> GgufFile:
    return GgufFile(path)


# --- configuration -----------------------------------------------------------------------------------------------------------


def _short(value: Any) -> Any:
    """A number of 32 bits as the shortest decimal that is the same in 32 bits: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def model_type(gguf_file: GgufFile) -> str:
    """Return transformers' name of the architecture; one that is not read is refused."""
    kinds = [kind for kind, arch in READ.items() if arch.name == gguf_file.arch]
    if gguf_file.fields.get("general.type") == "imatrix" or "imatrix.datasets" in gguf_file.fields:
        raise gguf_file.refuse(
            "an importance matrix and no model", "Give the model's own file as MODEL; --imatrix takes this one."
        )
    if gguf_file.arch == "clip" or gguf_file.fields.get("general.type") == "mmproj":
        raise gguf_file.refuse("the part for images and no language model", "Give the file of the language model.")
    if not kinds:
        raise gguf_file.refuse(f"the architecture {gguf_file.arch}")
    if gguf_file.arch == "llama":
        return "mixtral" if gguf_file.said.get("expert_count") else "llama"
    if gguf_file.arch == "olmo2":
        return "olmo3" if gguf_file.said.get("attention.sliding_window") else "olmo2"
    return kinds[0]


def configuration(gguf_file: GgufFile) -> Any:
    """Return the configuration of transformers that says what a file says.

    Raises:
        BadModel: The file says something that no configuration of a table's architecture does, or lacks what one needs.
    """
    from transformers import CONFIG_MAPPING

    kind = model_type(gguf_file)
    arch, made, said = READ[kind], CONFIG_MAPPING[kind], {k: _uniform(v) for k, v in gguf_file.said.items()}
    known = {f.name for f in dataclasses.fields(made)} | set(getattr(made, "attribute_map", {}))
    fields: dict[str, Any] = {}
    for word, names in _FIELDS.items():
        name = next((n for n in names if n in known), None)
        if name is not None and word in said:
            fields[name] = _short(said[word])
        elif name is not None and (word in (*_NEEDED, *_SCALES) or word.endswith("epsilon")):
            raise gguf_file.refuse(f"no {gguf_file.arch}.{word}")
        elif word in said and not _is_no_field(word, said, fields):
            raise gguf_file.refuse(f"{word} = {str(said[word])[:40]}")
    fields |= {n: None for n in _CAPS if n in known and n not in fields}
    width = said.get("attention.key_length") or fields["hidden_size"] // fields["num_attention_heads"]
    square = width * fields["num_attention_heads"] == fields["hidden_size"]
    fields |= {"head_dim": width} if "head_dim" in known or not square else {}
    if "num_key_value_heads" in known:
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields |= _ends(gguf_file) | _switches(gguf_file, known) | _windows(gguf_file, arch, known)
    fields |= {n: v for n, v in arch.expects.items() if n in known and not callable(v)}
    config = made(**fields)
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = _ropes(gguf_file, config, width)
    for name, value in arch.expects.items():
        if callable(value) and name in known:
            setattr(config, name, value(config))
    _check_said(gguf_file, said, config, arch, width)
    return config


def _uniform(value: Any) -> Any:
    """A value of every layer as one, where all are the same."""
    if not isinstance(value, list) or not value or isinstance(value[0], bool):
        return value
    return value[0] if all(v == value[0] for v in value) else value


def _is_no_field(word: str, said: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Whether a word without a field says what follows from others."""
    if word == "attention.key_length":
        return True  # Qwen's models of experts read head_dim without declaring it; the shapes of tensors are compared
    if word == "attention.head_count_kv":
        return bool(said[word] == said["attention.head_count"])
    return word in ("expert_count", "expert_used_count") and not said[word]


def _ends(gguf_file: GgufFile) -> dict[str, Any]:
    """The size of the vocabulary, whether the head is the embedding, and the tokens that begin, end and pad a text."""
    embedding, head = gguf_file.tensors.get("token_embd.weight"), gguf_file.tensors.get("output.weight")
    if embedding is None:
        raise gguf_file.refuse("no token_embd.weight")
    size = int(embedding.shape[1])
    tied = head is None or (head.tensor_type == embedding.tensor_type and np.array_equal(head.data, embedding.data))
    fields: dict[str, Any] = {"vocab_size": size, "tie_word_embeddings": tied}
    for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = gguf_file.fields.get(f"tokenizer.ggml.{name}_token_id")
        fields[f"{kind}_token_id"] = token if token is not None and token < size else None
    return fields


def _switches(gguf_file: GgufFile, known: set[str]) -> dict[str, bool]:
    """Which products have biases."""
    has = {"attention_bias": "attn_q.bias", "use_qkv_bias": "attn_q.bias", "qkv_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
    return {field: f"blk.0.{tensor}" in gguf_file.tensors for field, tensor in has.items() if field in known}


def _windows(gguf_file: GgufFile, arch: Architecture, known: set[str]) -> dict[str, Any]:
    """Windows of attention: of architectures that have some, the file's; of others none."""
    window: Any = gguf_file.said.get("attention.sliding_window")
    pattern: Any = gguf_file.said.get("attention.sliding_window_pattern")
    if not arch.windows:
        if window:
            raise gguf_file.refuse(f"attention.sliding_window = {window}")
        return {"sliding_window": None} if "sliding_window" in known else {}
    if not window:
        raise gguf_file.refuse(f"no {gguf_file.arch}.attention.sliding_window")
    count = gguf_file.said["block_count"]
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = [i % pattern < pattern - 1 for i in range(count)]
    if pattern is None:  # llama.cpp's own, which is that of the class
        return {"sliding_window": window}
    slides = cast(Sequence[bool], pattern)
    return {"sliding_window": window, "layer_types": [f"{'sliding' if s else 'full'}_attention" for s in slides[:count]]}


def _ropes(gguf_file: GgufFile, config: Any, width: int) -> dict[str, Any]:
    """Rotary embeddings, of layers with windows too where the class has their own."""
    said = gguf_file.said
    base, kind = _short(float(said.get("rope.freq_base", 10000.0))), said.get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if kind == "linear" and said.get("rope.scaling.factor", 1.0) != 1.0:
        rope |= {"rope_type": "linear", "factor": _short(float(said["rope.scaling.factor"]))}
    elif kind not in ("none", "linear"):
        raise gguf_file.refuse(f"rope.scaling.type = {kind}")
    if (part := said.get("rope.dimension_count", width) / width) != 1.0:
        rope["partial_rotary_factor"] = part
    elif "partial_rotary_factor" in config.rope_parameters:
        rope["partial_rotary_factor"] = 1.0
    if (factors := gguf_file.tensors.get(FACTORS)) is not None:
        rope |= _stretched(gguf_file, config, rope, np.asarray(factors.data, dtype=np.float32).reshape(-1))
    if "full_attention" not in config.rope_parameters:
        return rope
    other = said.get("rope.freq_base_swa", 10000.0 if gguf_file.arch == "gemma3" else base)
    slides = {"rope_type": "default", "rope_theta": _short(float(other))}
    return {"full_attention": rope, "sliding_attention": slides}


def _stretched(gguf_file: GgufFile, config: Any, rope: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's numbers, from which the factors of a file follow."""
    config.rope_parameters = dict(rope)
    lengths = (8192, *(1 << n for n in range(4, 18)))
    for factor in dict.fromkeys((_short(float(factors.max())), round(float(factors.max())))):
        for length in lengths:
            scaling = {"rope_type": "llama3", "factor": float(factor), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            config.rope_parameters = {**rope, **scaling, "original_max_position_embeddings": length}
            made = rope_factors(config)
            if made is not None and made.shape == factors.shape and np.allclose(made, factors, rtol=1e-6, atol=0):
                return dict(config.rope_parameters)
    raise gguf_file.refuse(f"factors in {FACTORS} that are not those of Llama 3")


def _check_said(gguf_file: GgufFile, said: Mapping[str, Any], config: Any, arch: Architecture, width: int) -> None:
    """Refuse a word that nothing was made of, and what this architecture computes otherwise."""
    neutral = {**_NEUTRAL, "expert_weights_norm": (bool(getattr(config, "norm_topk_prob", True)),)}
    for word, value in said.items():
        allowed = neutral.get(word, ())
        if word not in _FIELDS and word not in _SEEN and allowed is not None and value not in allowed:
            raise gguf_file.refuse(f"{word} = {str(value)[:40]}")
    if said.get("attention.value_length", width) != width:
        raise gguf_file.refuse(f"attention.value_length = {said['attention.value_length']}")
    if said.get("rope.dimension_count_swa", width) != width:
        raise gguf_file.refuse(f"rope.dimension_count_swa = {said['rope.dimension_count_swa']}")
    if "rope.freq_base_swa" in said and "sliding" not in rope_of(config):
        raise gguf_file.refuse(f"rope.freq_base_swa = {said['rope.freq_base_swa']}")
    if odd := arch.against(config):
        raise gguf_file.refuse(odd[0].what)


# --- tensors -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter of a model: its shape, and the tensors that make it."""

    shape: tuple[int, ...]
    tensors: tuple[Stored, ...]


def places(gguf_file: GgufFile, config: Any) -> dict[str, Place]:
    """Return where every parameter of a configuration's model lies, by full name.

    Raises:
        BadModel: A parameter without a tensor, a tensor of another shape, or one that no parameter takes.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    turned = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    try:
        stored = stored_tensors(config, shapes, READ[config.model_type])
    except InvalidInput as error:
        raise gguf_file.refuse(str(error.args[0]) if error.args else "other tensors") from error
    place_of = {}
    for name, shape in shapes.items():
        tensors = tuple(dataclasses.replace(t, turned=name in turned) for t in stored[name])
        for each in tensors:
            if each.name not in gguf_file.tensors:
                raise gguf_file.refuse(f"no tensor {each.name}")
            if int(gguf_file.tensors[each.name].n_elements) * each.parts != int(np.prod(shape)):
                raise gguf_file.refuse(
                    f"a tensor {each.name} of the shape {[int(n) for n in gguf_file.tensors[each.name].shape]}"
                )
        place_of[name] = Place(shape, tensors)
    taken = {t.name for place in place_of.values() for t in place.tensors} | {FACTORS}
    taken |= {"output.weight"} if config.tie_word_embeddings else set()
    if left := [name for name in gguf_file.tensors if name not in taken]:
        raise gguf_file.refuse(f"the tensor {left[0]}")
    return place_of


def is_read(file: Path) -> bool:
    """Return whether a GGUF file is read as a model, as far as its header says it."""
    try:
        gguf_file = open_gguf(file)
        places(gguf_file, configuration(gguf_file))
    except (BadModel, CorruptFile, NotFound, InvalidInput):
        return False
    return True
