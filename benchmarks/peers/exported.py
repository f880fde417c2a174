"""What every reader of an exported plan shares: the two models, names of experts, and the record of a tool."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import layerbudget as lb
from layerbudget.plan import Plan
from layerbudget.records import stacks

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
MIXTURE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS = {"llama": {}, "qwen3_moe": MIXTURE}
Found = dict[str, Any]  # what every module got: bits and group size (None for a whole row), a rank, or a format of the cache


@dataclasses.dataclass(frozen=True)
class Tool:
    """One tool that an exported plan is given to.

    Attributes:
        run: Gives a plan to the tool: folder of the model, its kind, the plan. Returns what the plan says and what the tool
            gave, by module and in the tool's names.
        package: Whose version is said.
        how: ``executed``: the tool changed a model, and what it made was read back. ``parsed``: the tool's own parser and
            matcher said what every module gets.
        plan: Makes the plan of a model.
        gives: What a module gets, for the table: ``format``, ``rank``.
        refused: Kinds of models that the export refuses, and why.
    """

    run: Callable[[Path, str, Plan], tuple[Found, Found]]
    package: str
    how: str
    plan: Callable[[Any], Plan]
    gives: str = "format"
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


def make_model(kind: str) -> Any:
    """A random model; the vocabulary is that of the embedded tokenizer."""
    torch.manual_seed(0)
    names = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM")}
    config, model = (getattr(transformers, name) for name in names[kind])
    return model(config(vocab_size=len(lb.load_tokenizer("demo")), **SIZES, **MODELS[kind])).eval()


def text() -> Any:
    """A few tokens that decide."""
    return lb.calibration("stdlib", lb.load_tokenizer("demo"), samples=2, length=32)


def experts_apart(name: str) -> list[str]:
    """Names of the matrices of every expert, for tools that take each for a module."""
    if not stacks([name]):
        return [name]
    head, _, leaf = name.rpartition(".")
    leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    return [f"{head}.{i}.{leaf}" for i in range(MIXTURE["num_experts"]) for leaf in leaves]


def stand_in(*names: str, suffix: str = "") -> None:
    """Let code import what is not here and what it does not call: compiled kernels, and reports of use."""
    for name in names:
        module = mock.MagicMock()
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        if suffix:
            loader = importlib.machinery.ExtensionFileLoader(name, f"/{name}{suffix}")
            module.__spec__ = importlib.machinery.ModuleSpec(name, loader, origin=f"/{name}{suffix}")
        sys.modules[name] = module


def name_as_before(folder: Path) -> None:
    """Write names of transformers 4 into a folder's configuration, which mlx_lm and exllamav3 read."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "num_experts": MIXTURE["num_experts"]}
    (folder / "config.json").write_text(json.dumps(config))
