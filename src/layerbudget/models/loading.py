"""Load models and tokenizers: the embedded one, a local folder, or a hub id; and the blocks of a configuration alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..arguments import checked
from ..errors import BadModel, CorruptFile, InvalidInput, LayerbudgetError, NotFound, UnknownStructure
from ..gguf.folder import folder_of, rounded_before
from ..gguf.header import open_gguf
from ..gguf.tokenizer import tokenizer_of
from ..records import Block
from ..storage import reading
from ..storage.checkpoint import Stored, check_files, gguf_of, need_all, weight_files
from ..storage.hub import check_id
from ..storage.unread import on_unread
from .blocks import check_finite, partition, pretrained, text_config
from .experts import EXPERTS_KEPT, uneven
from .machine import SHARE, free_bytes
from .offload import load_mapped
from .packed import as_numbers, check_quantised, check_unread, in_one_precision, packed_before, packed_matrices, unpacked
from .precision import DTYPES, find_device, four_bit_config, held_dtype, quick_dtype

logger = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
_LAYERS = 100_000  # more than any model has, and few enough to be refused in seconds
_COPY = 3 << 28  # bytes of the weights in another precision that are held, at most, where layers may come one at a time
_MODEL_IS = "MODEL is demo, a local folder written by save_pretrained, a GGUF file, or a hub id that this machine can reach."
_WORDS = ("*token*", "*vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "*.bpe")  # files of tokenizers
_CHECK = "Check the name, or download it first and give the folder."


def check_adapter(name: str | Path) -> None:
    """Refuse a local folder that holds an adapter, alone or beside a model: transformers puts it on what it loads there."""
    file = Path(name).expanduser() / "adapter_config.json"
    if not file.is_file():
        return
    record = reading.read(
        file, "adapter configuration", limit=1 << 26, as_type=dict[str, Any], remedy="Save the adapter again."
    )
    named = record.get("base_model_name_or_path")
    base = str(named or "its base")
    if weight_files(file.parent):
        raise BadModel(
            f"{name} holds the weights of a model and an adapter of {base} beside them.",
            "transformers would add the adapter to these weights, which may hold it already.",
            "If it was merged into them, move adapter_config.json and adapter_model.safetensors elsewhere. If not, move "
            "the adapter too, and give its folder with --adapter.",
        )
    raise BadModel(
        f"{name} is an adapter of {base} and no model.",
        "MODEL is the model that it was trained for.",
        f"Give {base} as MODEL, and the adapter to a command that reads one: "
        f"{shlex.join(['layerbudget', 'evaluate', base if named else 'MODEL', '--adapter', str(name)])}.",
    )


def resolve(name: str, revision: str | None = None) -> str:
    """The packaged folder for ``demo``, a local folder that was checked, that of a GGUF file, or the hub id as it is."""
    path = Path(name).expanduser()
    check_adapter(name)
    if revision is not None and (name == "demo" or path.exists()):
        raise InvalidInput(f"{name} has no revision {revision!r}.", "Hub repositories have revisions.", "Leave it out.")
    if name == "demo":
        return str(DEMO_MODEL)
    if (file := gguf_of(name)) is not None:
        return str(folder_of(file))
    if path.is_dir():
        if not (path / "config.json").is_file():
            for file in sorted(path.glob("*/adapter/adapter_config.json")):
                check_adapter(file.parent)  # a result of finetune
            raise NotFound(
                f"{name} holds no config.json.",
                "A model folder has config.json and safetensors files.",
                "Point to the folder that save_pretrained wrote.",
            )
        if _read_config(path / "config.json").get("model_type") == "nemotron-nas":  # layers of different shapes
            raise BadModel(
                f"{name} is a folder for vLLM alone: transformers computes no layers of different shapes.",
                "What the shapes cost when they were planned is in its README.md.",
                f"Evaluate it in vLLM (vllm serve {name} --trust-remote-code). Or plan equal layers "
                "(plan shapes --even): every command reads these.",
            )
        check_unread(path)
        return str(path)
    if path.exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise NotFound(
            f"There is no model folder {name}.", "MODEL is demo, a local folder, a GGUF file or a hub id.", "Check the path."
        )
    check_id(name, "model", file="config.json", revision=revision)
    return name


def _read_config(file: Path) -> dict[str, Any]:
    """The content of a config.json; one that would keep transformers busy for ever is refused before it begins."""
    remedy = "Download it again."
    record: dict[str, Any] = reading.read(file, "configuration", limit=1 << 26, as_type=dict[str, Any], remedy=remedy)
    for part in (record, record.get("text_config")):
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            count = part.get(name) if isinstance(part, dict) else None
            if isinstance(count, (int, float)) and not 0 <= count <= _LAYERS:
                raise CorruptFile(f"{file} asks for {count} layers.", f"At most {_LAYERS:,}.", remedy)
    return record


@checked
def blocks_from_config(config: Mapping[str, Any] | Path | str, *, by: str = "layer") -> tuple[Block, ...]:
    """The blocks of a model from its ``config.json`` alone: plans without weights.

    transformers makes the model without memory, and :func:`~layerbudget.models.blocks.partition` finds its blocks. A
    configuration without ``model_type`` is read as one of Llama (with ``num_local_experts``: Mixtral).

    Args:
        config: The configuration, or the path of the file or its folder.
        by: See :func:`~layerbudget.models.blocks.partition`.

    Raises:
        NotFound, CorruptFile: No such file, or not JSON.
        BadModel: transformers makes no model of it.
        UnknownStructure: A model without a single list of layers, or one that reads no text.

    >>> mistral = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    ...                num_key_value_heads=8)
    >>> blocks_from_config(mistral)[0].numel
    218103808
    """
    from transformers import AutoConfig

    if not isinstance(config, Mapping):
        if not (Path(config) / "config.json").is_file():
            check_adapter(config)
        config = _read_config(Path(config) / "config.json" if Path(config).is_dir() else Path(config))
    kind = config.get("model_type") or ("mixtral" if config.get("num_local_experts") else "llama")
    with foreign("The configuration does not read", "It is a transformers config.json.", "Point to a model folder."):
        made = AutoConfig.for_model(**{**_with_floats(config), "model_type": kind})
        with torch.device("meta"):
            return partition(from_config(made), by)


def _with_floats(value: Any) -> Any:
    """A configuration with infinite numbers in the place of the words that transformers writes for them."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Inside, transformers and compressed-tensors draw no bars and report nothing of what they load but errors.

    What is wrong with a checkpoint is said as an error of this package, and progress is its own.
    """
    from tqdm import tqdm
    from transformers.utils import logging

    bars, initializer, drawn, level = cast(Any, tqdm), vars(tqdm)["__init__"], tqdm.__init__, logging.get_verbosity()

    def hidden(bar: Any, *arguments: Any, **options: Any) -> None:
        drawn(bar, *arguments, **{**options, "disable": True})

    bars.__init__ = hidden
    logging.set_verbosity_error()
    try:
        yield
    finally:
        bars.__init__ = initializer
        logging.set_verbosity(level)


@contextlib.contextmanager
def foreign(what: str, feasible: str, remedy: str) -> Iterator[None]:
    """Say as :class:`BadModel` what a library's loader says of a broken file, also with a bare ``Exception``."""
    try:
        yield
    except LayerbudgetError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        first = " ".join(lines) if lines[0].endswith(":") else lines[0]  # a list follows
        if "custom code" in first:
            first = "it needs code of its own, which is not run here."
            feasible, remedy = "Models that transformers computes by itself are read.", "Take another model."
        elif unknown := re.search(r"model type `(.+?)` but Transformers does not recognize", first):
            first = f"transformers {version('transformers')} knows no model type {unknown[1]}."
            remedy = "Install a later transformers if that knows it, else take another model."
        raise BadModel(f"{what}: {textwrap.shorten(first, 300, placeholder=' ...')}", feasible, remedy) from error


def _configuration(name: str, where: str, revision: str | None) -> Any:
    """The configuration of a model that is about to be loaded; a file that transformers refuses is named."""
    from transformers import AutoConfig

    said = f"{name} could not be loaded", _MODEL_IS, _CHECK
    if (Path(where) / "config.json").is_file():
        said = f"config.json of {name} does not read", "", "Correct it, or download or save the model again."
    with foreign(*said):
        return AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)


def read_configuration(name: str, revision: str | None = None) -> Any:
    """Return the configuration of a model, or of a file that is one; no weights are read.

    Raises:
        BadModel: It is none.
    """
    from transformers import AutoConfig

    path = Path(name).expanduser()
    where = str(path) if path.suffix == ".json" and path.is_file() else resolve(name, revision)
    with foreign(f"{name} is no configuration", "It is a transformers config.json.", "Point to a model folder."):
        return AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)


def several() -> Any:
    """The class of transformers that loads a language model that reads images, sound or both beside text."""
    import transformers

    return getattr(transformers, "AutoModelForMultimodalLM", transformers.AutoModelForImageTextToText)


def auto_class(config: Any) -> Any:
    """The class of transformers that loads such a checkpoint with its head."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    remedy = "Take a decoder or an encoder that reads one text: no option makes this one work."
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownStructure(f"{name or type(config).__name__} is an encoder-decoder.", "", remedy)
    if getattr(text_config(config), "vocab_size", None) is None:
        what = f"{name or type(config).__name__} reads no text: its configuration has no vocabulary."
        raise UnknownStructure(what, "", remedy)
    for ending, auto in (
        ("ForSequenceClassification", transformers.AutoModelForSequenceClassification),
        ("ForMaskedLM", transformers.AutoModelForMaskedLM),
        ("ForCausalLM", transformers.AutoModelForCausalLM),
        ("LMHeadModel", transformers.AutoModelForCausalLM),
    ):
        if name.endswith(ending):
            return auto
    if name.endswith("ForConditionalGeneration") and type(config) in (seeing := several())._model_mapping:
        return seeing
    return transformers.AutoModel if name else transformers.AutoModelForCausalLM


def class_for(auto: Any, config: Any) -> Any:
    """Return the class that makes models of a configuration with the head of another; experts may differ by layer."""
    counts = getattr(config, EXPERTS_KEPT, None)
    return auto if counts is None else uneven(auto._model_mapping[type(config)], counts)


def from_config(config: Any, **options: Any) -> nn.Module:
    """A model of a configuration, with the head that its checkpoint has and weights that are drawn."""
    auto = auto_class(config)
    made = class_for(auto, config)
    model: nn.Module = (made.from_config if made is auto else made._from_config)(config, **options)
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model that is about to be loaded: its folder or hub id, its configuration, the class that reads it, and where to."""

    where: str
    config: Any
    auto: Any
    place: torch.device

    def in_four_bits(self, compute: torch.dtype) -> dict[str, Any]:
        """Options of ``from_pretrained`` for a base in 4 bits whose products are computed in a type."""
        return {"quantization_config": four_bit_config(compute), "device_map": {"": str(self.place)}}


def find_checkpoint(name: str, *, revision: str | None, device: str, four_bit: bool, stream: bool | None = None) -> Checkpoint:
    """The checkpoint to be loaded, looked up before any weight is read; arguments and errors as of :func:`load_model`."""
    place = find_device(device)
    where = resolve(name, revision)
    config = _configuration(name, where, revision)
    check_files(Path(where))
    with foreign(f"{name} could not be loaded", _MODEL_IS, _CHECK):
        auto = auto_class(config)
    check_quantised(name, config, stream, four_bit)
    return Checkpoint(where=where, config=config, auto=auto, place=place)


def _streams(
    stream: bool | None, where: str, config: Any, dtype: str, place: torch.device, *, four_bit: bool, lean: bool
) -> bool:
    """Whether weights stay in their files: as was asked, else where they would take more than half of what is free.

    If ``lean``, they also stay where the precision that was asked for would make a larger copy of them than ``_COPY``.
    """
    size = sum(file.stat().st_size for file in Path(where).glob("*.safetensors"))
    if stream and (four_bit or not size):
        raise InvalidInput(
            "A base in 4 bits cannot be streamed." if four_bit else f"{where} holds no safetensors files to stream from.",
            "Weights stay in the safetensors files of a local folder.",
            "Leave --stream out." if four_bit or Path(where).is_dir() else "Download the model and give its folder.",
        )
    if stream is not None or four_bit or getattr(config, "quantization_config", None):
        return bool(stream)
    wanted = size * held_dtype(config, dtype).itemsize / held_dtype(config).itemsize
    return wanted > SHARE * free_bytes(place) or (lean and place.type == "cpu" and wanted > max(size, _COPY))


@silent()
@checked
def load_model(
    name: Path | str,
    *,
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    device: str | torch.device = "cpu",
    four_bit: bool = False,
    stream: bool | None = False,
    lean: bool = False,
    quiet: bool = False,
) -> nn.Module:
    """A model in evaluation mode with finite weights.

    The class follows the checkpoint: causal LM, masked LM, sequence classification, or the bare encoder.

    Args:
        name: ``demo``, a local folder, a GGUF file or a hub id.
        dtype: ``auto`` (what the checkpoint holds, as transformers does), ``quick`` (the same, but float32 where the processor
            can only emulate 16 bits), ``float32`` (default: scores and statistics are computed in it), ``bfloat16``,
            ``float16``, ``float64``; or one of torch's own, such as ``torch.float32``.
        revision: Hub revision.
        device: Where to put it; ``auto`` is the accelerator where there is one.
        four_bit: Hold its matrices in 4 bits, for scores that read activations and gradients, and for adapters.
        stream: Leave the weights in their files and bring one layer at a time; with None where they
            would take more than half of the free memory.
        lean: With None, leave them there also where another precision would make a copy of more than .75 GiB.
        quiet: Do not say which tensors of the checkpoint are not loaded.

    Raises:
        NotFound: No such folder, or not all files of its weights.
        BadModel: The checkpoint does not load, lacks tensors, has some of another shape, or of codes that nothing says how to
            read, or holds NaN or infinite weights.
        CorruptFile: A file of its weights is broken.
        InvalidInput: Unknown dtype, or a device that this machine does not have.
        MissingDependency: 4 bits without bitsandbytes.
    """
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in (*DTYPES, "auto", "quick"):
        raise InvalidInput(
            f"dtype is {dtype!r}.", f"It is one of auto, {', '.join(DTYPES)}.", "Use float32 unless memory is short."
        )
    name = str(name)
    checkpoint = find_checkpoint(name, revision=revision, device=str(device), four_bit=four_bit, stream=stream)
    if dtype == "quick":
        quick = quick_dtype(held_dtype(checkpoint.config), checkpoint.place)
        dtype = "float32" if quick == torch.float32 and not four_bit else "auto"
    where, config, place = checkpoint.where, checkpoint.config, checkpoint.place
    before = packed_before(config) if (file := gguf_of(name)) is None else rounded_before(file)
    auto = class_for(checkpoint.auto, config)
    with foreign(f"{name} could not be loaded", _MODEL_IS, _CHECK):
        streamed = _streams(stream, where, config, dtype, place, four_bit=four_bit, lean=lean)
        nf4 = checkpoint.in_four_bits(held_dtype(config, dtype)) if four_bit else {}
        if streamed:
            model, report = load_mapped(auto, config, where, dtype=DTYPES.get(dtype), device=place)
            need_all(name, where, report)
        else:
            precision = DTYPES.get(dtype, "auto")
            options = {"revision": revision, "dtype": precision, **as_numbers(config), **nf4}
            model, report = from_checkpoint(auto, name, where, **options)
            in_one_precision(model, config)
    model = pretrained(unpacked(model if four_bit or streamed else model.to(place)).eval())
    if model.config.dtype == torch.float64:  # torch has no grouped product of matrices in this precision
        model.set_experts_implementation("eager")
    check_finite(model, once=bool(streamed))
    model.config._name_or_path = name
    vars(model).update(_read_from=where, _unread=tuple(report["unexpected_keys"]))
    for sentence in (on_unread(model), before) if not quiet else ():
        if sentence:
            logger.warning("%s: %s", name, sentence)
    return model


def from_checkpoint(
    auto: Any, name: str, where: str, *, fresh_head: bool = False, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """A model of a class of transformers, and what that reports of its loading; ``options`` are those of ``from_pretrained``.

    With a ``fresh_head`` the checkpoint may lack what stands on its base, or have another one.

    Raises:
        BadModel: It does not load, lacks tensors, or has some of another shape than its configuration.
        CorruptFile: A file of its weights is broken.
    """
    from safetensors import SafetensorError

    with foreign(f"{name} could not be loaded", _MODEL_IS, _CHECK):
        try:
            asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, report = auto.from_pretrained(where, **asked, **options)
        except SafetensorError:
            Stored(Path(where))  # says which file it is
            raise
        need_all(name, where, report, f"{model.base_model_prefix}." if fresh_head else "")
    return model, report


@silent()
def check_packed(folder: Path) -> None:
    """Refuse a folder of packed matrices that :func:`load_model` does not load; one of them at a time is a matrix of numbers.

    Raises:
        BadModel: As of :func:`load_model`.
    """
    from compressed_tensors.compressors import decompress_module

    name = str(folder)
    name = str(name)
    checkpoint = find_checkpoint(name, revision=None, device="cpu", four_bit=False)
    auto = class_for(checkpoint.auto, checkpoint.config)
    model, _ = from_checkpoint(auto, name, checkpoint.where, dtype="auto")
    for matrix in map(model.get_submodule, packed_matrices(model)):
        with torch.no_grad():
            decompress_module(matrix)
        check_finite(matrix)
        for parameter in matrix.parameters():  # what was looked at leaves the memory
            parameter.data = parameter.new_empty(0)
    check_finite(model)


@checked
def load_tokenizer(name: Path | str, *, revision: str | None = None) -> Any:
    """The tokenizer that belongs to a model.

    Raises:
        NotFound: No such folder.
        BadModel: The folder has no tokenizer.
    """
    from transformers import AutoTokenizer

    name = str(name)
    where = resolve(name, revision)
    if (file := gguf_of(name)) is not None and not (Path(where) / "tokenizer.json").is_file():
        return tokenizer_of(open_gguf(file))
    missing = BadModel(
        f"{name} has no tokenizer: no file has its words.",
        "",
        "Copy the files of its tokenizer, such as tokenizer.json, into it.",
    )
    with foreign(f"{name} has no tokenizer that loads", "", "Save the tokenizer beside the model."):
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
        except Exception as error:
            _configuration(name, where, revision)  # which is read first, and may be what is wrong
            folder = Path(where)
            if folder.is_dir() and not any(file for words in _WORDS for file in folder.glob(words)):
                raise missing from error
            raise
        if not tokenizer("a 1", add_special_tokens=False)["input_ids"]:  # some classes load from nothing, and know no word
            raise missing
        tokenizer("a", truncation=True)  # a length that is no number shows here
        return tokenizer
