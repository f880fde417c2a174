"""Models with adapters: the base that a training starts from, a plan's adapters on it and their start, and saved adapters."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import checked
from ..data.calibration import CalibrationSet
from ..data.tasks import Task
from ..data.text import Texts
from ..decision import DECISIONS, check_kind, decision_of
from ..decisions.adapters import patterns_of_stacks
from ..errors import BadModel, InvalidInput, NotFound
from ..models.blocks import config_of, text_config
from ..models.loading import class_for, find_checkpoint, foreign, from_checkpoint, several, silent
from ..models.packed import unpacked
from ..models.precision import held_dtype, quick_dtype
from ..plan import Plan
from ..sensitivity.adapter_space import accumulated_gradients
from ..storage import reading
from ..storage.checkpoint import broken
from ..storage.unread import named_unread
from .merging import REMEDY, merge_adapter, sparse, zeros_of
from .protocol import DEVICES, Protocol
from .rows import Rows, TextRows, is_causal
from .training import shares_weights

logger = logging.getLogger(__name__)

Loader = Callable[[int], nn.Module]
Start = tuple[Mapping[str, Tensor], Sequence[Mapping[str, Tensor]]]  #: Gradients by module, and the rows that they are of.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
START_SAMPLES = 128
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclasses.dataclass(frozen=True)
class NamedLoader:
    """``seed -> model`` that can say what it loads before it does."""

    load: Loader
    settings: Mapping[str, Any]  #: precision and revision of the base, part of the identity of what is trained on it

    def __call__(self, seed: int) -> nn.Module:
        """Return the model of that seed."""
        return self.load(seed)


def classifier_loader(
    name: str,
    labels: int,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    four_bit: bool = False,
) -> NamedLoader:
    """Return ``seed -> model``: a causal LM as it is, any other checkpoint with a fresh classification head of ``labels``
    outputs.

    Args:
        name: ``demo``, a folder or a hub id.
        labels: Outputs of a fresh head.
        dtype: Of the base's weights: ``float32``, ``bfloat16``, or ``auto`` (what the checkpoint holds, bfloat16 for 16 bits of
            either kind, float32 where the processor can only emulate them). What is trained is float32 in any case.
        device: Where to put it.
        revision: Hub revision.
        four_bit: Hold the Linear weights in 4 bits (NF4), as QLoRA does.
    """
    import transformers

    if dtype not in (*PRECISIONS, "auto"):
        raise InvalidInput(f"dtype is {dtype!r}.", f"Bases are held in {' or '.join(PRECISIONS)}.", "Use bfloat16.")
    if device not in DEVICES:
        known = f"It is one of {', '.join(DEVICES)}."
        raise InvalidInput(f"The device is {device!r}.", known, "Choose a card with CUDA_VISIBLE_DEVICES.")
    checkpoint = find_checkpoint(name, revision=revision, device=device, four_bit=four_bit)
    if dtype == "auto":
        half = held_dtype(checkpoint.config).itemsize == 2 and quick_dtype(torch.bfloat16, checkpoint.place) == torch.bfloat16
        dtype = "bfloat16" if half else "float32"
    options: dict[str, Any] = {"dtype": PRECISIONS[dtype], "revision": revision}
    if four_bit:
        options |= checkpoint.in_four_bits(PRECISIONS[dtype])
    auto = checkpoint.auto
    if auto not in (transformers.AutoModelForCausalLM, several()):
        auto = transformers.AutoModelForSequenceClassification  # a head of the checkpoint may have another number of labels
        options |= {"num_labels": labels, "fresh_head": True}
    auto = class_for(auto, checkpoint.config)

    @silent()
    def load(seed: int) -> nn.Module:
        transformers.set_seed(seed)
        made, _ = from_checkpoint(auto, name, checkpoint.where, **options)
        model: nn.Module = unpacked(made)
        return model if four_bit or shares_weights() else model.to(checkpoint.place)

    return NamedLoader(load, {"dtype": dtype, "quantised": four_bit, "revision": revision})


def fit_names(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with module names as this model has them: an encoder gains a prefix when a head is put on it."""
    names = {n for n, _ in model.named_modules()}
    prefix = getattr(model, "base_model_prefix", "")
    if all(m in names for b in plan.blocks for m in b.modules) or not prefix:
        return plan

    def fitted(name: str) -> str:
        bare = name.removeprefix(prefix + ".")
        return next((n for n in (name, f"{prefix}.{bare}", bare) if n in names), name)

    blocks = tuple(
        dataclasses.replace(b, name=fitted(b.name), modules=tuple(fitted(m) for m in b.modules)) for b in plan.blocks
    )
    return dataclasses.replace(plan, blocks=blocks)


def check_trained(plan: Plan) -> None:
    """Refuse a plan of a decision that is not trained.

    Raises:
        InvalidInput: It is of one.
    """
    check_kind(plan.kind, [name for name, decision in DECISIONS.all().items() if decision.trains], "cannot be trained")


def adapt(model: nn.Module, plan: Plan, protocol: Protocol, start: Start | None = None) -> nn.Module:
    """Return the model with the plan's adapters; a BERT-style pooler is trained with the head (frozen, nothing is learned).

    What is trained is held in float32 whatever the base is held in: PEFT does so for its adapters, not for heads. Errors are
    those of the plan's decision, and InvalidInput for a plan that is not trained. ``start`` are gradients of the mean loss by
    module, in whose top directions the adapters start, and the rows that they are of.
    """
    check_trained(plan)
    plan = fit_names(plan, model)
    options: dict[str, Any] = {"task_type": "CAUSAL_LM" if is_causal(model) else "SEQ_CLS"}
    poolers = (m for n, m in model.named_modules() if n.rpartition(".")[2] == "pooler")
    if not is_causal(model) and any(True for pooler in poolers for _ in pooler.parameters()):
        options["modules_to_save"] = ["pooler"]
    adapted: nn.Module = decision_of(plan).adapt(model, plan, protocol, start, **options)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def started(plain: nn.Module, plan: Plan, protocol: Protocol, rows: Rows | TextRows, task: Task | Texts) -> nn.Module:
    """Return the adapted model with the protocol's start: PEFT's, or in the top directions of the task's gradient.

    The gradient is that of the mean loss over at most ``START_SAMPLES`` training rows, a fixed random sample.
    """
    protocol.check(plan, causal=rows.causal)
    _say_zeros(plain, plan)
    if protocol.start == "default":
        return adapt(plain, plan, protocol)
    if not rows.causal:
        logger.warning("Gradients through an untrained head are a poor start: compare with the default one.")
    modules = [m for b in fit_names(plan, plain).blocks if b.count for m in b.modules]
    examples: Any = task.train
    chosen = np.random.default_rng(0).permutation(len(examples))[:START_SAMPLES]
    batch = rows.collate(rows.encoded([examples[i] for i in chosen]))
    tokens: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    data = CalibrationSet(source=task.name, **tokens)
    gradients = accumulated_gradients(plain.eval(), data, modules)
    return adapt(plain, plan, protocol, (gradients, list(data.batches(8, next(plain.parameters()).device))))


def _say_zeros(plain: nn.Module, plan: Plan) -> None:
    """Say of a pruned base, before it is trained on, what becomes of its zeros."""
    if not decision_of(plan).merges:
        return
    modules = dict(plain.named_modules())
    weights = [
        cast(Tensor, w)
        for b in fit_names(plan, plain).blocks
        if b.count
        for m in b.modules
        if (w := _weight(modules, m)) is not None
    ]
    zeros, total = sum(map(zeros_of, weights)), sum(w.numel() for w in weights)
    if sparse(zeros, total):
        logger.warning(
            "%.3g %% of the base's weights that get adapters are zeros. They stay while the adapter is beside the base; "
            "merging it into the weights fills them.",
            100 * zeros / total,
        )


def _weight(modules: Mapping[str, nn.Module], name: str) -> Any:
    """The weight of a module, or a stack of experts of that name."""
    parent, _, last = name.rpartition(".")
    return getattr(modules[name], "weight", None) if name in modules else getattr(modules.get(parent), last, None)


@checked
def load_adapter(model: nn.Module, folder: Path | str, *, merge: bool = False) -> Any:
    """Return the model with a saved adapter, in evaluation mode; every tensor of the file is in it.

    The folder is what ``save_pretrained`` of PEFT wrote, here (``seed-0/adapter`` of a fine-tuning) or by another tool. Where
    the adapter was trained with a larger or smaller vocabulary and its file has the embeddings, the model's are resized.
    ``merge`` adds the update to the base's weights and returns the plain model, see
    :func:`~layerbudget.finetuning.merging.merge_adapter`.

    Raises:
        NotFound: No adapter is there.
        BadModel: It does not fit this model, is of a type that has no place in a model, or cannot be merged. The model is
            then as it was.
    """
    from peft import PeftModel

    folder = Path(folder)
    for decision in DECISIONS.all().values():
        decision.register()
    config, saved = saved_adapter(folder)
    kind, base = str(config.get("peft_type")), config.get("base_model_name_or_path")
    owner = next((d for d in DECISIONS.all().values() if d.adapter_type == kind), None)
    if merge and owner is not None and not owner.merges:
        raise BadModel(f"An adapter of {owner.name} cannot be merged.", "Its update depends on the token.", REMEDY)
    with _unchanged_if_refused(model):
        _check_head(model, config, saved)
        if differs := _another_base(model, base):
            equal = "nothing in its file shows whether they are equal"
            logger.warning(f"The adapter was trained on %s, and this base is %s: {equal}.", *differs)
        fit_vocabulary(model, saved)
        remedy = f"Give the base model that it was trained on{f' ({base})' if base else ''}."
        with foreign(f"The adapter {folder} does not fit this model", "", remedy), _whole_reason(), patterns_of_stacks():
            warnings.filterwarnings("error", "Found missing adapter keys")
            place = str(next(model.parameters()).device)
            adapted: Any = PeftModel.from_pretrained(model, str(folder), torch_device=place)  # type: ignore[arg-type]
            report = adapted.load_adapter(str(folder), "default", torch_device=place)  # the same again: PEFT drops its report
            with torch.inference_mode():  # options that PEFT does not check fail in the first forward
                adapted.eval()(input_ids=torch.tensor([[0, 1]], device=place))
        lost = [name for name in report.unexpected_keys if not _twice(name, saved)]
        if lost:
            what = f"{len(lost)} of the {len(saved)} tensors of {folder} have no place in this model, first {lost[0]}."
            raise BadModel(what, "", remedy)
        if merge and (named := named_unread(model)):
            logger.warning(
                "%s are not in this model: lb.write_model(merged, tokenizer, DIR) copies them, save_pretrained does not.", named
            )
        return merge_adapter(adapted) if merge else adapted.eval()


@contextlib.contextmanager
def _unchanged_if_refused(model: nn.Module) -> Iterator[None]:
    """Put a model back as it was where an error comes: PEFT puts its layers into it before it looks at the weights."""
    parts = [(module, dict(module._modules)) for module in model.modules()]
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    names, config = set(vars(model)), config_of(model)
    tokens = getattr(text_config(config), "vocab_size", None)
    try:
        yield
    except BaseException:
        for module, children in parts:
            module._modules.clear()
            module._modules.update(children)
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for name in set(vars(model)) - names:
            delattr(model, name)
        if tokens is not None:
            text_config(config).vocab_size = tokens
        raise


# What stands in a saved adapter, read before PEFT does.


def saved_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of a saved adapter; errors as of :func:`load_adapter`."""
    from peft import PeftConfig, PromptLearningConfig, load_peft_weights
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from safetensors import SafetensorError

    if not (folder / _CONFIG).is_file():
        inside = sorted({str(p.parent) for depth in ("*", "*/*") for p in folder.glob(f"{depth}/{_CONFIG}")})
        remedy = f"Point to {' or '.join(inside[:4])}." if inside else "Check the path; download an adapter of the hub first."
        raise NotFound(f"{folder} holds no {_CONFIG}.", "An adapter is a folder that save_pretrained wrote.", remedy)
    config: dict[str, Any] = reading.read(folder / _CONFIG, "adapter", limit=1 << 26, as_type=dict[str, Any])
    kind = str(config.get("peft_type"))
    if issubclass(PEFT_TYPE_TO_CONFIG_MAPPING.get(cast(Any, kind), PeftConfig), PromptLearningConfig):
        raise BadModel(
            f"{folder} holds an adapter of the type {kind}.",
            "It trains tokens before the text, not weights: LoRA and other types that change weights are read.",
            "Load it by PeftModel.from_pretrained.",
        )
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise NotFound(f"{folder} holds neither {' nor '.join(_WEIGHTS)}.", "", "Save the adapter again by save_pretrained.")
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        named = f"names the type {config['peft_type']}" if config.get("peft_type") else "names no peft_type"
        raise BadModel(
            f"{_CONFIG} of {folder} {named}.",
            f"peft {version('peft')} knows {', '.join(sorted(getattr(t, 'value', t) for t in PEFT_TYPE_TO_CONFIG_MAPPING))}.",
            "Install a later peft if that knows it, or save the adapter again by save_pretrained.",
        )
    remedy = "Save them again by save_pretrained."
    with foreign(f"The weights of the adapter {folder} cannot be read", "", remedy):
        try:
            saved = load_peft_weights(str(folder), device="cpu")
        except SafetensorError as error:
            raise broken(folder / _WEIGHTS[0], "safetensors", error, remedy) from error
    for name, tensor in saved.items():
        if not tensor.is_floating_point():
            what = f"{name} of the adapter {folder} is stored as {str(tensor.dtype).removeprefix('torch.')}."
            raise BadModel(what, "No adapter computes with whole numbers.", "Save it in floating point.")
        if not bool(torch.isfinite(tensor.double()).all()):
            what = f"{name} of the adapter {folder} holds values that are not finite."
            raise BadModel(what, "Weights must be finite.", "Take an earlier checkpoint, or train it again.")
    return config, saved


def _twice(name: str, saved: Mapping[str, Tensor]) -> bool:
    """Whether PEFT saved a trained embedding under two names, as it does where both were asked for."""
    tensor, other = saved.get(name), saved.get(name.replace(".modules_to_save.", ".").replace(".original_module.", "."))
    return tensor is not None and other is not None and tensor is not other and torch.equal(tensor, other)


@contextlib.contextmanager
def _whole_reason() -> Iterator[None]:
    """Inside, an error of several lines says its first reason: torch puts it behind a line without one."""
    try:
        yield
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise (RuntimeError(lines[1].strip()) if len(lines) > 1 else error) from error


def _another_base(model: Any, base: Any) -> tuple[str, str] | None:
    """The names of the base of an adapter and of a model, where both are known and are not the same."""
    names = [str(base or ""), str(getattr(model.config, "_name_or_path", "") or "")]
    short = [_short(name) for name in names]
    return (names[0], names[1]) if all(short) and short[0] != short[1] else None


def _short(name: str) -> str:
    """The last part of a model's name, also where that is the hub's folder of downloads."""
    parts = name.replace("--", "/").removesuffix("/").split("/")
    return (parts[-3] if len(parts) > 2 and parts[-2] == "snapshots" else parts[-1]).casefold()


def _plain(name: str) -> str:
    """The module of a saved tensor, as the plain model has it."""
    name = name.removeprefix("base_model.model.").rpartition(".")[0]
    return re.sub(r"[.](base_layer|lora_[AB]|modules_to_save|original_module|token_adapter)$", "", name)


def _check_head(model: Any, config: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    """Refuse an adapter whose head for labels is another one than the model's, or that the model lacks."""
    if config.get("task_type") not in ("SEQ_CLS", "TOKEN_CLS"):
        return
    modules: dict[str, Any] = dict(model.named_modules())
    heads = {_plain(n): t.shape[0] for n, t in saved.items() if n.endswith(".weight") and "lora_" not in n}
    head = next((n for n in heads if n.rpartition(".")[0] == "" or n.endswith(("out_proj", "score", "classifier"))), None)
    if head is None:
        return
    labels, outputs = heads[head], getattr(modules.get(head), "out_features", None)
    if outputs != labels and getattr(model.config, "num_labels", None) != labels or head not in modules:
        kind = "TokenClassification" if config["task_type"] == "TOKEN_CLS" else "SequenceClassification"
        has = f"this model's has {outputs}" if head in modules else f"a {type(model).__name__} has none"
        raise BadModel(
            f"The adapter has a head for {labels} labels, and {has}.",
            "",
            f"Load the base by transformers.AutoModelFor{kind}.from_pretrained(BASE, num_labels={labels}).",
        )


def fit_vocabulary(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Resize the embeddings of a model to those in the file of an adapter that was trained with another vocabulary.

    Raises:
        BadModel: The file has another number of tokens, and not all embeddings.
    """
    sides = {id(m): m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    names = {n: m for n, m in model.named_modules() if id(m) in sides}
    rows: dict[str, int] = {}
    whole = set()
    for key, tensor in saved.items():
        module = next((m for m in names if m in (_plain(key), _plain(f"{key}.x"))), None)
        if module is None or tensor.ndim != 2:
            continue
        if key.endswith("lora_embedding_A"):
            rows[key] = tensor.shape[1]
        elif key.endswith(".lora_B.weight"):
            rows[key] = tensor.shape[0]
        elif key.endswith(".weight") and "lora_" not in key:
            rows[key] = tensor.shape[0]
            whole.add(module)
    have = model.get_input_embeddings().weight.shape[0]
    sizes = set(rows.values()) - {have}
    if not sizes:
        return
    tied = len({id(m.weight) for m in names.values()}) == 1
    if len(sizes) > 1 or not (whole if tied else whole == set(names)):
        raise BadModel(
            f"The adapter was trained with a vocabulary of {max(sizes):,} tokens, the base has {have:,}, and the file of the "
            "adapter does not have all their embeddings.",
            "",
            "Save it again with save_pretrained(folder, save_embedding_layers=True), or give a base with these tokens.",
        )
    size = sizes.pop()
    model.resize_token_embeddings(size)
    logger.warning("The vocabulary is resized from %s to %s tokens, those of the adapter.", f"{have:,}", f"{size:,}")
