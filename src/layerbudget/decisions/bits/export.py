"""A plan of bits in the words of other tools, which quantise by it themselves: text, no weights. No torch.

Every function gives each planned matrix its format, or refuses by name what the tool does not have. Regular expressions are
anchored and escaped. Where a tool takes every expert for a module of its own, one expression stands for the experts of a layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from ...compressors.formats import BY_MOMENTS, GGUF, PACKED, Format, find_format
from ...decision import Export
from ...errors import InvalidInput
from ...gguf.names import find_names
from ...plan import Plan, payload_of
from ...records import stacks
from ..formats.payload import WeightsPayload
from ..formats.program import formats_of_plan

_HERE = "apply the plan here: layerbudget apply MODEL PLAN."
_MODIFIERS = {"rtn": "QuantizationModifier", "gptq": "GPTQModifier"}
_MLX_BITS, _MLX_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
# The module of mlx_lm that computes the experts of a layer, behind the layer's own name.
_MLX_EXPERTS = {
    "qwen2_moe": "mlp.switch_mlp",
    "qwen3_moe": "mlp.switch_mlp",
    "qwen3_next": "mlp.switch_mlp",
    "olmoe": "mlp.switch_mlp",
    "glm4_moe": "mlp.switch_mlp",
    "deepseek_v2": "mlp.switch_mlp",
    "deepseek_v3": "mlp.switch_mlp",
    "ernie4_5_moe": "mlp.switch_mlp",
    "mixtral": "block_sparse_moe.switch_mlp",
    "phimoe": "block_sparse_moe.switch_mlp",
}
# Matrices of a layer that ONNX Runtime GenAI's builder has a node of its own for, and the node's part of the name.
_ONNX = re.compile(
    r"(?P<layer>model\.layers\.\d+)\.(?:self_)?(?P<part>attn(?=\.[qkvo]_)|mlp(?=\.(?:gate|up|down)_))\.(?P<leaf>\w+)"
)
_INNER = re.compile(r"model\.language_model\.")  # what the language model of a model that sees is called here
_STACK = re.compile(r"(?P<layer>.*?)\.[^.]+\.experts\.(?P<leaf>\w+)")


def llama_cpp(plan: Plan) -> str:
    """Return lines ``regular expression=type``, for ``llama-quantize --tensor-type-file``."""
    formats = _formats(plan, GGUF)
    names = find_names(formats)
    lines = {t: f.name.lower() for n, f in formats.items() for t in names[n]}
    latent = "attn_[kv]_b\\.weight=f16\n" * any(n.endswith(".kv_a_proj_with_mqa") for n in formats)  # no plan changes these
    return latent + "".join(f"^{re.escape(t)}\\.weight={kind}\n" for t, kind in lines.items())


def auto_round(plan: Plan) -> str:
    """Return ``{module: {bits, group_size, sym, data_type}}`` as JSON, for ``AutoRound(layer_config=...)``.

    Experts have a regular expression in the place of a name, whose dots AutoRound escapes itself. What the plan keeps in
    16 bits stands there too: AutoRound gives its own scheme to modules that are not named.
    """
    layer_config: dict[str, dict[str, Any]] = {}
    for name, form in _formats(plan, PACKED).items():
        _check("AutoRound's table", name, form, (2, 3, 4, 5, 6, 7, 8))
        whole = {"bits": form.bits, "group_size": _group(form), "sym": form.symmetric, "data_type": "int"}
        key = f"^{_pattern(name)}$".replace(r"\.", ".") if stacks([name]) else name  # AutoRound escapes dots by itself
        layer_config[key] = {"bits": 16, "data_type": "float"} if form.plain else whole
    return json.dumps(layer_config, indent=1) + "\n"


def llm_compressor(plan: Plan, *, method: str | None = None) -> str:
    """Return a recipe of llm-compressor as YAML: one group for every format, with the matrices that it is for.

    The modifier is ``QuantizationModifier`` for ``rtn`` and ``GPTQModifier`` for ``gptq``; by default what comes next to what
    the plan was measured with. What no group names stays in 16 bits. ``AutoRoundModifier`` (of llm-compressor 0.14) looks for
    targets inside one layer, where no full name is found, and then rounds all matrices in the format of the first group.

    Raises:
        InvalidInput: A method that has no modifier.
    """
    method = method or ("gptq" if payload_of(plan, WeightsPayload).method in BY_MOMENTS else "rtn")
    if method == "autoround":
        raise InvalidInput(
            "llm-compressor's AutoRoundModifier finds no matrix by its full name, and rounds all of them in one format.",
            "",
            "Use AutoRound itself (--to auto-round), or --method gptq.",
        )
    if method not in _MODIFIERS:
        raise InvalidInput(
            f"llm-compressor's recipe has no {method}.", f"It has {', '.join(_MODIFIERS)}.", "Use --method gptq."
        )
    groups: dict[str, dict[str, Any]] = {}
    for name, form in _formats(plan, PACKED).items():
        if not form.plain:
            group = groups.setdefault(form.name, {"targets": [], "weights": form.arguments()})
            group["targets"].append(f"re:^{_pattern(name)}$")
    stage = {"quantization_stage": {"quantization_modifiers": {_MODIFIERS[method]: {"config_groups": groups}}}}
    return "# what no group names stays in 16 bits\n" + str(yaml.safe_dump(stage, sort_keys=False, width=1000))


def gptqmodel(plan: Plan) -> str:
    """Return the arguments of GPTQModel's ``QuantizeConfig`` as JSON, with its table ``dynamic`` of regular expressions.

    GPTQModel applies negative expressions first and gives all other modules ``bits`` and ``group_size``; so one negative
    expression says all that the plan does not round.
    """
    dynamic: dict[str, dict[str, Any]] = {}
    for name, form in _formats(plan, PACKED).items():
        _check("GPTQModel", name, form, (2, 3, 4, 5, 6, 7, 8))
        if not form.plain:
            dynamic[f"+:^{_pattern(name)}$"] = {"bits": form.bits, "group_size": _group(form), "sym": form.symmetric}
    if not dynamic:
        raise InvalidInput("This plan keeps all matrices in 16 bits.", "", "Plan with fewer: --bits 4.")
    named = "|".join(key[3:-1] for key in dynamic)
    first = next(iter(dynamic.values()))
    whole = {**first, "desc_act": False, "dynamic": {f"-:^(?!(?:{named})$)": {}, **dynamic}}
    return json.dumps(whole, indent=1) + "\n"


def torchao(plan: Plan) -> str:
    """Return torchao's ``FqnToConfig`` as JSON, as its ``config_from_dict`` reads it. What is not named stays in 16 bits."""
    configs: dict[str, Any] = {}
    for name, form in _formats(plan, PACKED).items():
        if form.plain:
            continue
        if stacks([name]):
            what = f"{name} is a stack of experts, which torchao's configurations of integers do not take."
            ways = "Keep experts in 16 bits (--keep experts=bf16), or plan for another tool: --runtime vllm or llama.cpp."
            raise InvalidInput(what, "They take matrices.", ways)
        if form.floating and form.group is not None:
            what = f"{name} gets {form.name}, whose weights torchao rounds together with inputs."
            raise InvalidInput(what, "It has w1 to w8 and fp8.", "Plan with --formats w4-g32,fp8.")
        configs[name] = _torchao(form)
    return json.dumps(_typed("FqnToConfig", {"fqn_to_config": configs}), indent=1) + "\n"


def _torchao(form: Format) -> dict[str, Any]:
    """The configuration of one format."""
    if form.floating:
        return _typed("Float8WeightOnlyConfig", {"granularity": _typed("PerRow", {"dim": -1})}, 2)
    per = _typed("PerAxis", {"axis": 0}) if form.group is None else _typed("PerGroup", {"group_size": form.group})
    fields = {
        "weight_dtype": {"_type": "torch.dtype", "_data": f"int{form.bits}"},
        "granularity": per,
        "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC" if form.symmetric else "ASYMMETRIC"},
    }
    return _typed("IntxWeightOnlyConfig", fields, 2)


def _typed(kind: str, fields: dict[str, Any], version: int = 1) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": fields}


def modelopt(plan: Plan) -> str:
    """Return ModelOpt's ``{quant_cfg, algorithm}`` as YAML, for ``modelopt.torch.quantization.quantize``.

    It is YAML because ModelOpt wants the axis of a block as an integer key.

    Weights alone are rounded. ModelOpt's own export then writes ``quantized_layers``. All quantisers are off but those that are
    named.
    """
    rows: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, form in _formats(plan, PACKED).items():
        if form.plain:
            continue
        if not form.symmetric:
            what = f"{name} gets {form.name}, and ModelOpt's grids are symmetric."
            raise InvalidInput(what, "", "Leave out -asym: --formats w4-g32,w8-g32.")
        rows.append({"quantizer_name": _quantiser(name), "cfg": _modelopt(form)})
    return str(yaml.safe_dump({"quant_cfg": rows, "algorithm": "max"}, sort_keys=False))


def _quantiser(name: str) -> str:
    """The pattern of ModelOpt's quantiser of a matrix; every expert of a stack has one."""
    head, _, leaf = name.rpartition(".")
    return f"{head}.{leaf}_weight_quantizer" if stacks([name]) else f"{name}.weight_quantizer"


def _modelopt(form: Format) -> dict[str, Any]:
    """Attributes of ModelOpt's quantiser for a format."""
    bits = form.bits if form.floats is None else [form.bits - 1 - form.floats.mantissa, form.floats.mantissa]
    if form.floating and form.group is not None:
        scales = [4, 3] if form.united else [8, 0]
        return {"num_bits": bits, "block_sizes": {-1: form.group, "type": "dynamic", "scale_bits": scales}}
    return {"num_bits": bits, "axis": 0} if form.group is None else {"num_bits": bits, "block_sizes": {-1: form.group}}


def mlx(plan: Plan, *, model_type: str | None = None) -> str:
    """Return the entry ``quantization`` of ``config.json`` as mlx_lm keeps it: ``{module: {group_size, bits}}``, 16 bits false.

    MLX's own grids have a minimum in 16 bits for every group: a matrix takes 16 bits per group more than planned. Experts have
    names of MLX's own, which depend on the architecture: ``model_type`` is that of the model's config.json. So have the layers
    of a model that sees: ``language_model.model.layers`` in the place of ``model.language_model.layers``.
    """
    forms = _formats(plan, PACKED)
    inner = any(_INNER.match(name) for name in forms) and not any(
        ".laurel." in name for name in forms
    )  # Gemma 3n's are as here
    entries: dict[str, Any] = {}
    for name, form in forms.items():
        if not form.plain and (form.floating or form.bits not in _MLX_BITS or form.group not in _MLX_GROUPS):
            raise InvalidInput(
                f"MLX has no {form.name}, which {name} gets.",
                "It has 2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128.",
                "Plan with --formats w2-g64,w3-g64,w4-g64,w6-g64,w8-g64.",
            )
        if form.plain and stacks([name]) and model_type not in _MLX_EXPERTS:
            continue  # what is not named stays in 16 bits
        for mlx_name in _mlx_names(_outer(name) if inner else name, model_type):
            entries[mlx_name] = False if form.plain else {"group_size": form.group, "bits": form.bits}
    rounded = [f for f in forms.values() if not f.plain]
    least = {"group_size": min((f.group or 0 for f in rounded), default=64), "bits": min((f.bits for f in rounded), default=4)}
    return json.dumps({"quantization": {**least, **entries}}, indent=1) + "\n"


def exllamav3(plan: Plan) -> str:
    """Return a recipe of exllamav3 as YAML, for ``convert --recipe``: the bits of every matrix, by its name.

    The first line is for what the plan does not name, which stays in 16 bits; exllamav3 takes the last line that matches. One
    pattern stands for a matrix of all experts of a layer. ``target_bpw`` is shown, and decides nothing. Bits are all that
    exllamav3 takes of a format: its own has no groups. A name that the model does not have is refused by exllamav3. The layers
    of a model that sees come as ``model.language_model`` or ``language_model.model`` there, and one pattern stands for both.
    """
    tensors, head, weights = {"*": 16}, 16, 0
    numel = {module: block.numel // len(block.modules) for block in plan.blocks for module in block.modules}
    for name, form in _formats(plan, PACKED).items():
        _check("exllamav3", name, form, range(1, 9))
        bits = 16 if form.plain else form.bits
        weights += bits * numel[name]
        if name.endswith("lm_head"):
            head = bits
            continue
        stack, _, leaf = name.rpartition(".")
        for own in [f"{stack}.*.{each}" for each in _leaves(leaf)] if stacks([name]) else [name]:
            tensors[_INNER.sub("*language_model.*", own)] = bits
    lines = {"target_bpw": round(weights / sum(numel.values()), 3), "head_bits": head, "tensors": tensors}
    return str(yaml.safe_dump(lines, sort_keys=False, width=1000))


def onnx(plan: Plan) -> str:
    """Return ``target_options`` of ONNX Runtime GenAI's model builder as JSON: an exact override for every planned matrix.

    The builder has one group size for the whole model, and rounds what no override names to 4 bits. The head is named in any
    case, and stays in 16 bits where the plan does not say more. It does not join q, k and v that are named. A name that its
    graph does not have is refused by the builder.
    """
    overrides: list[dict[str, Any]] = []
    forms = _formats(plan, PACKED)
    rounded = {name: form for name, form in forms.items() if not form.plain}
    kinds = {(form.group, form.symmetric) for form in rounded.values()}
    for name, form in forms.items():
        _check("ONNX Runtime GenAI", name, form, (4, 8), "w4-g32,w8-g32")
        if not (form.plain and stacks([name])):
            overrides.append(
                {"match": {"name": _onnx_name(name)}, **({"exclude": True} if form.plain else {"type": f"int{form.bits}"})}
            )
    if len(kinds) != 1 or None in next(iter(kinds)):
        raise InvalidInput(
            "ONNX Runtime GenAI rounds all matrices in groups of one size, and this plan does not.",
            f"It has {', '.join(sorted({form.name for form in rounded.values()})) or 'no rounded matrix'}.",
            "Plan with one group size: --formats w4-g32,w8-g32.",
        )
    if "lm_head" not in forms:
        overrides.append({"match": {"name": "/lm_head/MatMul"}, "exclude": True})
    group, symmetric = next(iter(kinds))
    weights = {"type": "int4", "block_size": group, "symmetric": symmetric, "method": "rtn", "overrides": overrides}
    return json.dumps({"quant_config": {"weights": weights, "moe": {"type": "none"}}}, indent=1) + "\n"


def _onnx_name(name: str) -> str:
    """The node of a matrix in the graph of ONNX Runtime GenAI's builder."""
    match = _ONNX.fullmatch(name)
    if name == "lm_head":
        return "/lm_head/MatMul"
    if match is None:
        raise InvalidInput(
            f"{name} has no node of its own in the graphs of ONNX Runtime GenAI.",
            "Overrides take q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj of dense layers, and lm_head.",
            f"Keep experts in 16 bits (--keep experts=bf16), or {_HERE}" if stacks([name]) else f"A{_HERE[1:]}",
        )
    return f"/{match['layer'].replace('.', '/', 1)}/{match['part']}/{match['leaf']}/MatMul"


def _outer(name: str) -> str:
    """The name in mlx_lm of a matrix of a model that sees: its language model is a whole model there."""
    return _INNER.sub("language_model.model.", name) if _INNER.match(name) else f"language_model.{name}"


def _mlx_names(name: str, model_type: str | None) -> list[str]:
    """Names in mlx_lm of a matrix: two for gate and up of experts that are one parameter here."""
    if not stacks([name]):
        return [name]
    match = _STACK.fullmatch(name)
    if match is None or model_type not in _MLX_EXPERTS:
        known = f"The names are known for {', '.join(_MLX_EXPERTS)}."
        remark = f" (not known: {model_type})" if model_type else ""
        raise InvalidInput(
            f"{name} is a stack of experts, which MLX names by the architecture{remark}.",
            known,
            "Say --model-type, as config.json has it, or keep experts in 16 bits (--keep experts=bf16).",
        )
    return [f"{match['layer']}.{_MLX_EXPERTS[model_type]}.{leaf}" for leaf in _leaves(match["leaf"])]


def _leaves(leaf: str) -> tuple[str, ...]:
    """The matrices of one expert that a stack holds in a row."""
    return ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)


def _pattern(name: str) -> str:
    """A regular expression for a matrix; for a stack, the matrices of all its experts, each a module of its own."""
    if not stacks([name]):
        return re.escape(name)
    head, _, leaf = name.rpartition(".")
    leaves = "|".join(_leaves(leaf))
    return rf"{re.escape(head)}\.\d+\.(?:{leaves})"


def _group(form: Format) -> int:
    return -1 if form.group is None else form.group


def _check(tool: str, name: str, form: Format, bits: Sequence[int], instead: str = "w4-g32,w8-g64") -> None:
    """Refuse a format that is no integer of some widths, and name formats that the tool takes."""
    if not form.plain and (form.floating or form.bits not in bits):
        has = f"It has integers of {', '.join(map(str, bits))} bits."
        ways = f"Plan with --formats {instead}, or {_HERE}"
        raise InvalidInput(f"{name} gets {form.name}, which {tool} does not take.", has, ways)


def _formats(plan: Plan, family: str) -> dict[str, Format]:
    formats = {name: find_format(f) for name, f in formats_of_plan(plan).items()}
    if any(f.family != family for f in formats.values()):
        raise InvalidInput(f"This plan holds no {family} formats.", "", f"Plan with --format {family}.")
    return formats


def _export(name: str, call: Callable[..., str], file: str, summary: str, use: str) -> Export:
    return Export(name=name, call=call, kinds=("bits",), file=file, summary=summary, use=use)


EXPORTS = (
    _export(
        "tensor-types",
        llama_cpp,
        "tensor-types.txt",
        "llama.cpp's types of tensors",
        "llama-quantize --tensor-type-file {word} quantises by it.",
    ),
    _export(
        "auto-round",
        auto_round,
        "layer_config.json",
        "AutoRound's layer_config",
        "AutoRound(model, layer_config=json.load(open({file!r}))) quantises by it.",
    ),
    _export(
        "llm-compressor",
        llm_compressor,
        "bits-recipe.yaml",
        "llm-compressor's groups of formats",
        "llmcompressor.oneshot(model=..., dataset=..., recipe={file!r}) quantises by it.",
    ),
    _export(
        "gptqmodel",
        gptqmodel,
        "quantize_config.json",
        "GPTQModel's QuantizeConfig with dynamic",
        "GPTQModel.load(MODEL, QuantizeConfig(**json.load(open({file!r})))).quantize(TEXTS) quantises by it.",
    ),
    _export(
        "torchao",
        torchao,
        "torchao.json",
        "torchao's FqnToConfig",
        "torchao.quantization.quantize_(model, config_from_dict(json.load(open({file!r}))), filter_fn=None) quantises by it "
        "(from torchao.core.config import config_from_dict).",
    ),
    _export(
        "modelopt",
        modelopt,
        "modelopt.yaml",
        "ModelOpt's quant_cfg",
        "modelopt.torch.quantization.quantize(model, yaml.safe_load(open({file!r}))) quantises by it.",
    ),
    _export(
        "mlx",
        mlx,
        "quantization.json",
        "mlx_lm's entry quantization",
        "q = json.load(open({file!r}))['quantization']; mlx_lm.convert(MODEL, quantize=True, q_group_size=q['group_size'], "
        "quant_predicate=lambda path, _: q.get(path, False)) quantises by it.",
    ),
    _export(
        "exllamav3",
        exllamav3,
        "exl3-recipe.yaml",
        "exllamav3's recipe of bits by tensor",
        "python -m exllamav3.conversion.convert_model -i MODEL -o OUT -w WORK --recipe {word} quantises by it.",
    ),
    _export(
        "onnx",
        onnx,
        "onnx-target-options.json",
        "target_options of ONNX Runtime GenAI's model builder",
        "python -m onnxruntime_genai.models.builder -m MODEL -o OUT -e cpu --target_options {word} quantises by it.",
    ),
)
