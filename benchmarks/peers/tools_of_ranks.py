"""Tools that train by a plan of ranks: rank and scale of every adapter that each built from an exported plan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
import yaml
from benchmarks.peers.exported import Found, Tool, name_as_before, stand_in, text

import layerbudget as lb
from layerbudget.decisions.ranks.apply import lora_layers
from layerbudget.exports import EXPORTS
from layerbudget.plan import Plan


def ranks(exclude: str | None = None, **options: Any) -> Callable[[Any], Plan]:
    """How a plan of ranks is made, of mean rank 4; without options ranks differ, and stacks of experts have some."""

    def make(model: Any) -> Plan:
        scores = lb.score(model, text(), lb.partition(model, "linear", exclude=exclude))
        return lb.plan_ranks(scores, mean_rank=4, min_rank=0, **options)

    return make


def wanted(plan: Plan) -> Found:
    """What a plan says: the rank, and the scale of the update."""
    return {name: (block.count, 2.0) for name, block in plan.by_module().items() if block.count}


def built(model: Any) -> Found:
    """What PEFT's layers say of a model that was adapted by PEFT."""
    return {
        name: (layer.lora_A["default"].weight.shape[0] // int(getattr(layer, "num_experts", 1)), layer.scaling["default"])
        for name, layer in lora_layers(model).items()
    }


def load(folder: Path) -> Any:
    """The model of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def peft(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """PEFT reads the file as the configuration of an adapter, and builds the model."""
    import peft

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "adapter_config.json").write_text(EXPORTS.find("lora").text(plan, {}))
        config = peft.LoraConfig.from_pretrained(place)
    return wanted(plan), built(peft.get_peft_model(load(folder), config))


def axolotl(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """Axolotl checks the YAML of a run with its own schema, and its own loader adapts the model."""
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    stand_in("posthog")
    from axolotl.loaders.adapter import load_lora
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    run = {
        "base_model": str(folder), "datasets": [{"path": "none", "type": "alpaca"}], "learning_rate": 1e-4,
        "micro_batch_size": 1, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    config = validate_config(DictDefault({**run, **yaml.safe_load(EXPORTS.find("axolotl").text(plan, {}))}))
    model, _ = load_lora(load(folder), config)
    return wanted(plan), built(model)


def llama_factory(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """LLaMA-Factory parses the YAML of a run, and its own init_adapter adapts the model."""
    lines = yaml.safe_load(EXPORTS.find("llama-factory").text(plan, {}))
    return wanted(plan), built(_llama_factory(folder, lines))


def llama_factory_folder(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """LLaMA-Factory goes on training an adapter that was saved before its first step, whose ranks differ."""
    with tempfile.TemporaryDirectory() as place:
        lb.add_ranks(load(folder), plan).save_pretrained(place)
        return wanted(plan), built(_llama_factory(folder, {"finetuning_type": "lora", "adapter_name_or_path": place}))


def _llama_factory(folder: Path, lines: dict[str, Any]) -> Any:
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # it asks for versions of transformers and trl that it was tested with
    import trl

    trl.AutoModelForCausalLMWithValueHead = object  # of an older trl; imported, and not called here
    from llamafactory.hparams.parser import _parse_infer_args
    from llamafactory.model.adapter import init_adapter

    model_args, _, finetuning_args, _ = _parse_infer_args({"model_name_or_path": str(folder), **lines})
    model = load(folder)
    return init_adapter(model.config, model, model_args, finetuning_args, is_trainable=True)


def mlx(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """mlx_lm reads the YAML by its own loader, and its linear_to_lora_layers adapts the model."""
    from mlx_lm import load
    from mlx_lm.lora import yaml_loader
    from mlx_lm.tuner.utils import linear_to_lora_layers

    name_as_before(folder)
    config = yaml.load(EXPORTS.find("mlx-lora").text(plan, {}), yaml_loader)
    model, _ = load(str(folder))
    linear_to_lora_layers(model, config["num_layers"], config["lora_parameters"])
    return wanted(plan), {n: (m.lora_a.shape[-1], m.scale) for n, m in model.named_modules() if hasattr(m, "lora_a")}


ONE = ranks("experts", rule="mdl", max_rank=8, multiple=8)
TOOLS = {
    "peft": Tool(peft, "peft", "executed", ranks(), "rank"),
    "axolotl": Tool(axolotl, "axolotl", "executed", ranks(), "rank"),
    "llama-factory": Tool(llama_factory, "llamafactory", "executed", ONE, "rank"),
    "llama-factory, adapter_name_or_path": Tool(llama_factory_folder, "llamafactory", "executed", ranks(), "rank"),
    "mlx-lora": Tool(mlx, "mlx-lm", "executed", ONE, "rank"),
}
