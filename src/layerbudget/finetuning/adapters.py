r"""Models with adapters: the base that a training starts from, a plan's adapters on it and their start, and saved adapters.

A start in the gain's own directions: let ``G = U S V'`` be the gradient of the mean loss with respect to a weight, accumulated
over a calibration set. Of all rank-r updates with a given norm, ``-U_r S_r V_r'`` lowers the linearised loss most
(Eckart-Young). With ``B = 0`` the first gradient of ``B`` is ``G A'``; rows of ``A`` equal to the top right singular vectors
let it reach exactly that subspace, and the model starts unchanged. EVA (Paischer et al. 2024) takes the top directions of the
*inputs* instead.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.calibration import CalibrationSet
from ..data.tasks import Task
from ..data.text import Texts
from ..decisions.ranks.apply import add_ranks, lora_layers, patterns_of_stacks
from ..errors import BadModel, CoverageError, InvalidInput, NotFound
from ..models.loading import class_for, find_checkpoint, foreign, held_dtype, quick_dtype, several, silent, unpacked
from ..plan import Plan
from ..sensitivity.adapter_space import accumulated_gradients
from ..storage import reading
from .protocol import DEVICES, Protocol
from .rows import Rows, TextRows, is_causal
from .training import shares_weights

logger = logging.getLogger(__name__)

Loader = Callable[[int], nn.Module]
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
START_SAMPLES = 128


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
    prepare: Callable[[nn.Module], object] | None = None,
    prepared: Mapping[str, Any] | None = None,
) -> NamedLoader:
    """Return ``seed -> model``: a causal LM as it is, any other checkpoint with a fresh classification head of ``labels``
    outputs.

    ``dtype`` is that of the base's weights (``auto``: what the checkpoint holds, bfloat16 for 16 bits of either kind, float32
    where the processor can only emulate them); what is trained is float32 in any case. ``four_bit`` holds the Linear weights
    in 4 bits (NF4), as QLoRA does. ``prepare`` is called
    with every model, to put it into the formats of a recipe; ``prepared`` names that in the identity of what is trained on it.
    """
    import transformers

    if dtype not in (*PRECISIONS, "auto"):
        raise InvalidInput(f"dtype is {dtype!r}.", f"Bases are held in {' or '.join(PRECISIONS)}.", "Use bfloat16.")
    if device not in DEVICES:
        known = f"It is one of {', '.join(DEVICES)}."
        raise InvalidInput(f"The device is {device!r}.", known, "Choose a card with CUDA_VISIBLE_DEVICES.")
    found = find_checkpoint(name, revision=revision, device=device, four_bit=four_bit)
    if dtype == "auto":
        half = held_dtype(found.config).itemsize == 2 and quick_dtype(torch.bfloat16, found.place) == torch.bfloat16
        dtype = "bfloat16" if half else "float32"
    options: dict[str, Any] = {"dtype": PRECISIONS[dtype], "revision": revision}
    if four_bit:
        options |= found.in_four_bits(PRECISIONS[dtype])
    auto = found.auto
    if auto not in (transformers.AutoModelForCausalLM, several()):
        auto = transformers.AutoModelForSequenceClassification  # a head of the checkpoint may have another number of labels
        options |= {"num_labels": labels, "ignore_mismatched_sizes": True}
    auto = class_for(auto, found.config)

    @silent()
    def load(seed: int) -> nn.Module:
        transformers.set_seed(seed)
        model: nn.Module = unpacked(auto.from_pretrained(found.where, **options))
        if prepare is not None:
            prepare(model)
        return model if four_bit or shares_weights() else model.to(found.place)

    return NamedLoader(load, {"dtype": dtype, "quantised": four_bit, "revision": revision, **(prepared or {})})


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


def adapt(model: nn.Module, plan: Plan, protocol: Protocol) -> nn.Module:
    """Return the model with the plan's adapters; a BERT-style pooler is trained with the head (frozen, nothing is learned).

    What is trained is held in float32 whatever the base is held in: PEFT does so for its adapters, not for heads. Errors are
    those of :func:`~layerbudget.decisions.ranks.apply.add_ranks`, and InvalidInput for a plan of another kind.
    """
    plan = fit_names(plan, model)
    options: dict[str, Any] = {"task_type": "CAUSAL_LM" if is_causal(model) else "SEQ_CLS"}
    poolers = (m for n, m in model.named_modules() if n.rpartition(".")[2] == "pooler")
    if not is_causal(model) and any(True for pooler in poolers for _ in pooler.parameters()):
        options["modules_to_save"] = ["pooler"]
    adapted: nn.Module
    if plan.kind == "ranks":
        options |= {"alpha_policy": protocol.alpha_policy, "ratio": protocol.ratio, "dropout": protocol.dropout}
        adapted = add_ranks(model, plan, validate=False, **options)
    elif plan.kind == "experts":
        from ..decisions.experts.method import add_experts

        options |= {"lora_alpha": protocol.alpha, "lora_dropout": protocol.dropout, "balance_coefficient": protocol.balance}
        adapted = add_experts(model, plan, validate=False, top_k=protocol.top_k, **options)
    else:
        raise InvalidInput(f"A plan of kind {plan.kind!r} cannot be trained.", "Kinds are ranks and experts.", "Plan one.")
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def started(plain: nn.Module, plan: Plan, protocol: Protocol, rows: Rows | TextRows, task: Task | Texts) -> nn.Module:
    """Return the adapted model with the protocol's start: PEFT's, or in the top directions of the task's gradient.

    The gradient is that of the mean loss over at most ``START_SAMPLES`` training rows, a fixed random sample.
    """
    protocol.check(plan.kind, causal=rows.causal)
    if protocol.start == "default":
        return adapt(plain, plan, protocol)
    if not rows.causal:
        logger.warning("Gradients through an untrained head are a poor start: compare with the default one.")
    modules = [m for b in fit_names(plan, plain).blocks if b.count for m in b.modules]
    examples: Any = task.train
    chosen = np.random.default_rng(0).permutation(len(examples))[:START_SAMPLES]
    batch = rows.collate(rows.encoded([examples[i] for i in chosen]))
    tokens: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    gradients = accumulated_gradients(plain.eval(), CalibrationSet(source=task.name, **tokens), modules)
    model = adapt(plain, plan, protocol)
    initialise_from_gradients(model, gradients, norm=1.0)
    return model


def initialise_from_gradients(
    model: nn.Module, gradients: Mapping[str, Tensor], adapter_name: str = "default", *, norm: float = 3**-0.5
) -> None:
    """Set ``A`` of every LoRA module to the top right singular vectors of its gradient ``(d_out, d_in)``; ``B`` stays zero.

    ``norm`` is that of each row of A. ``1/sqrt(3)``, the default, is that of PEFT's own start, so that only the directions
    differ from it; EVA uses 1, which also makes the first steps of B larger.
    """
    for name, module in lora_layers(model, adapter_name).items():
        if name not in gradients:
            raise CoverageError(f"There is no gradient for {name}.", "", "Accumulate gradients for every module of the plan.")
        a = module.lora_A[adapter_name].weight
        _, _, right = torch.linalg.svd(gradients[name].double(), full_matrices=False)
        rows = right[: a.shape[0]] * norm
        with torch.no_grad():
            a[: len(rows)] = rows.to(a.dtype)


def load_adapter(model: nn.Module, folder: Path | str, *, merge: bool = False) -> Any:
    """Return the model with a saved adapter, in evaluation mode; every tensor of the file is in it.

    ``PeftModel.from_pretrained`` only warns where tensors find no place. The folder is what ``save_pretrained`` wrote
    (``seed-0/adapter`` of a fine-tuning). ``merge`` adds the update to the base's weights and returns the plain model (ranks).

    Raises:
        NotFound: No adapter is there.
        BadModel: It does not fit this model, or a mixture should be merged.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    from ..decisions.experts import method  # noqa: F401  (registers the mixture with PEFT)

    folder = Path(folder)
    if not (folder / "adapter_config.json").is_file():
        inside = sorted(str(p.parent) for p in folder.glob("*/adapter/adapter_config.json"))
        raise NotFound(
            f"{folder} holds no adapter_config.json.",
            "An adapter is a folder that save_pretrained wrote.",
            f"Point to {inside[0]}." if inside else "Check the path.",
        )
    kind = reading.read(folder / "adapter_config.json", "adapter", limit=1 << 26, as_type=dict[str, Any]).get("peft_type")
    if merge and kind == "LORA_EXPERTS":
        raise BadModel("A mixture of experts cannot be merged.", "Its update depends on the token.", "Keep it as an adapter.")
    remedy = "Give the base model that it was trained on."
    with foreign(f"The adapter {folder} does not fit this model", "", remedy), patterns_of_stacks():
        adapted: Any = PeftModel.from_pretrained(model, str(folder))  # type: ignore[arg-type]
        saved = load_file(folder / "adapter_model.safetensors")
        with torch.inference_mode():  # options that PEFT does not check fail in the first forward
            adapted.eval()(input_ids=torch.tensor([[0, 1]], device=next(model.parameters()).device))
    embeddings = any("embed" in name or "lm_head" in name for name in saved)  # left to itself, PEFT asks the hub about them
    present = get_peft_model_state_dict(adapted, save_embedding_layers=embeddings)
    lost = [k for k, v in saved.items() if k not in present or not torch.equal(present[k].cpu(), v.to(present[k].dtype))]
    if lost:
        what = f"{len(lost)} of the {len(saved)} tensors of {folder} have no place in this model, first {lost[0]}."
        raise BadModel(what, "", remedy)
    return (adapted.merge_and_unload() if merge else adapted).eval()
