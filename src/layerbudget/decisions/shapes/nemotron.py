"""Smaller models whose MLPs differ from layer to layer, for vLLM: folders of its architecture ``DeciLMForCausalLM``.

``block_configs`` of such a ``nemotron-nas`` configuration says for every layer how many query heads share a key-value head and
how wide its MLP is. The number of query heads is one for all layers. Names of weights are Llama's, and so is what is computed:
biases may be there, norms of queries and keys may not. vLLM reads ``block_configs`` by attributes, so a small module with the
configuration's class lies in the folder, and vLLM is asked to trust it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ...canonical import dumps
from ...compressors.formats import NEMOTRON
from ...errors import InvalidInput
from ...gguf.architectures import head_width, window_of
from ...models.blocks import config_of, describe, pretrained
from ...plan import Plan
from ...records import Receipt
from ...storage import reading
from ...storage.configuration import without_ahead
from ...storage.folders import write_model
from ...storage.writing import write_text
from .save import beside_model, left_parts

ARCHITECTURE = "DeciLMForCausalLM"
_TYPES = ("llama", "mistral", "qwen2")
_MODULE = "configuration_nemotron_nas"
_CODE = '''"""The configuration of a Llama whose layers differ, as vLLM's DeciLMForCausalLM reads it."""

from transformers import PretrainedConfig


class Fields(dict):
    """A JSON object whose fields are attributes too."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class NemotronNasConfig(PretrainedConfig):
    """One number of query heads; groups of key-value heads and MLP widths by layer."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **kwargs):
        self.block_configs = [Fields({name: Fields(part) for name, part in block.items()}) for block in block_configs]
        super().__init__(**kwargs)
'''


def check_config(config: Any) -> None:
    """Refuse a model that vLLM's DeciLM does not compute.

    Raises:
        InvalidInput: Another family than Llama, Mistral and Qwen2, another activation, or sliding windows.
    """
    kind, odd = str(config.model_type), ""
    if kind in _TYPES:
        act = getattr(config, "hidden_act", "silu")
        odd = f" with hidden_act = {act}" if act != "silu" else ""
        odd = odd or (f" with sliding_window = {window}" if (window := window_of(config)) else "")
    if kind not in _TYPES or odd:
        raise InvalidInput(
            f"A {kind} model{odd} whose layers differ is not written for vLLM.",
            f"vLLM's {ARCHITECTURE} computes layers that differ: of {', '.join(_TYPES)}, with silu and without windows.",
            "Plan with --even: vLLM loads that as it loads the model itself.",
        )


def check_nemotron(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan whose smaller model vLLM has no architecture for; said before anything is removed.

    Raises:
        InvalidInput: See :func:`check_config`; or layers that stay have different numbers of query heads.
    """
    plan.validate(describe(model))
    check_config(config_of(model))
    _query_heads(model, plan)


def _query_heads(model: nn.Module, plan: Plan | None = None) -> int:
    """The query heads of every layer, now or after a plan."""
    heads = sorted({w.shape[0] for w in left_parts(model, "heads", plan).values()})
    if len(heads) > 1:
        raise InvalidInput(
            f"The layers have {heads[0]} to {heads[-1]} query heads.",
            f"vLLM's {ARCHITECTURE} has one number of them for all layers; MLP widths may differ.",
            'Plan with --runtime vllm (runtime="vllm"), or write it for llama.cpp: apply --format gguf.',
        )
    return int(heads[0])


def save_nemotron(
    model: nn.Module,
    tokenizer: Any,
    out_dir: Path | str,
    *,
    plan: Plan | None = None,
    record: Receipt | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a smaller model as a ``nemotron-nas`` folder, whose MLP widths may differ. It appears complete or not at all.

    Arguments are those of :func:`~layerbudget.decisions.shapes.save.save_smaller`.

    Raises:
        InvalidInput: vLLM has no architecture for it.
    """
    use = f"vllm serve {out_dir} --trust-remote-code"
    side_files = beside_model(plan, record, model, use, ("nemotron-nas", "pruned"))
    side_files |= {"config.json": partial(_write_config, config=nemotron_config(model))}
    side_files |= {f"{_MODULE}.py": partial(write_text, text=_CODE)}
    return write_model(pretrained(model), tokenizer, out_dir, side_files, overwrite=overwrite, fits=False)


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration over one that has the fields of the source, which stay, as does the precision that it says."""
    fields = reading.read(path, "configuration", limit=1 << 26, as_type=dict[str, Any])
    stays = {name: fields[name] for name in ("dtype", "torch_dtype", "transformers_version") if name in fields}
    precision = fields.get("dtype") or fields.get("torch_dtype") or config["dtype"]
    config = without_ahead(config, [])  # vLLM's architecture has no layers that predict further tokens
    write_text(path, dumps({**fields, **config, "dtype": precision, **stays}), overwrite=True)


def nemotron_config(model: nn.Module) -> dict[str, Any]:
    """Return the ``config.json`` of a model as it is: what does not differ is said as the model's own configuration says it.

    Raises:
        InvalidInput: See :func:`check_nemotron`.
    """
    config = config_of(model)
    check_config(config)
    heads, mlps = left_parts(model, "heads"), left_parts(model, "mlp")
    queries, groups = _query_heads(model), [w.shape[1] for w in heads.values()]
    blocks = [
        {
            "attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": queries // g},
            "ffn": {"no_op": False, "replace_with_linear": False, "intermediate_size": mlp.inputs},
        }
        for g, mlp in zip(groups, mlps.values(), strict=True)
    ]
    biased = {n.rsplit(".", 2)[1] for n, _ in model.named_parameters() if n.endswith("_proj.bias")}
    nas_fields = {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoConfig": f"{_MODULE}.NemotronNasConfig"},
        "model_type": NEMOTRON,
        "block_configs": blocks,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": queries,
        "num_key_value_heads": max(groups),  # of what reads one number, the largest is enough
        "intermediate_size": max(mlp.inputs for mlp in mlps.values()),
        "head_dim": head_width(config),
        "attention_bias": "o_proj" in biased,
        "qkv_bias": "q_proj" in biased,
        "mlp_bias": "down_proj" in biased,
    }
    said = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
    return {**said, **nas_fields, "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
