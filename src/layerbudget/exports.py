"""Plans in the files of other tools: one function per format, and the table of them. No torch here.

A function ``(plan, *, options) -> text`` with the decorator :func:`export` is a format too; so is what an installed package
registers in a module that its entry point of the group ``layerbudget.exports`` names.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .decisions.bits.export import auto_round, llama_cpp, mlx
from .decisions.bits.reasons import reasons
from .decisions.cache.export import llama_build, llama_cache, modelopt_cache, vllm_cache, vllm_options
from .decisions.fit.parts import parts_of
from .errors import InvalidInput, MissingDependency, NotFound
from .plan import Plan
from .registry import Registry, options_of, resolve_options
from .solvers.rounding import few_levels, round_parameters

Call = Callable[..., str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """One format."""

    name: str  #: what users write after --to
    call: Call  #: gives the text of a plan, and takes options by their names
    kinds: tuple[str, ...] = ()  #: kinds of plan that it writes, all where it is empty
    file: str = "plan.txt"  #: name of the file where none is given
    summary: str = ""  #: a line for the help
    use: str = ""  #: how the file is used, a sentence with {file} and {options}
    options: Callable[[Plan], str] | None = None  #: options of a command that the sentence names

    def sentence(self, plan: Plan, path: object) -> str:
        """Return how the file is used."""
        part, parts = self._part(plan), parts_of(plan)
        options = "" if self.options is None else self.options(part).rstrip()
        said = self.use.format(file=path, options=options).strip()
        if part.kind == "bits" and {"kept-experts", "shapes"} & set(parts):
            held = plan.extra.get("experts")
            what = "fewer heads or channels stay"
            what = what if held is None else f"{held['left']} of {held['of']} experts stay in every layer"
            said += (
                f" These types are for the smaller file, in which {what}, "
                "not for the original: layerbudget apply MODEL PLAN -o DIR writes it with them."
            )
        return said.strip()

    def text(self, plan: Plan, given: Mapping[str, Any]) -> str:
        """Return the content of the file.

        Raises:
            InvalidInput: A kind of plan that it does not write, or an option that it does not read.
        """
        plan = self._part(plan)
        return self.call(plan, **resolve_options(f"The format {self.name}", options_of(self.call), given))

    def _part(self, plan: Plan) -> Plan:
        """The plan that is written, or its part of the kind that is."""
        parts = parts_of(plan)
        plan = next((p for kind, p in parts.items() if kind in self.kinds), plan)
        if self.kinds and plan.kind not in self.kinds:
            fitting = [e.name for e in EXPORTS.all().values() if not e.kinds or {plan.kind, *parts} & {*e.kinds}]
            raise InvalidInput(
                f"{self.name} is no format for a plan of kind {plan.kind}.",
                f"It writes {' and '.join(self.kinds)}.",
                f"For this plan there are {', '.join(fitting)}.",
            )
        return plan


EXPORTS: Registry[Export] = Registry("export format", group="layerbudget.exports", summaries=True)


def export(name: str, **fields: Any) -> Callable[[Call], Call]:
    """Register a function ``(plan, *, ...) -> text`` as a format; fields are those of :class:`Export`."""

    def add(call: Call) -> Call:
        EXPORTS.add(name, Export(name=name, call=call, **fields))
        return call

    return add


def format_for(plan: Plan) -> str:
    """Return the format of a plan where none is named: the first that is made for its kind, or else for one of its parts."""
    kinds = dict.fromkeys((plan.kind, *parts_of(plan)))
    return next((e.name for kind in kinds for e in EXPORTS.all().values() if kind in e.kinds), "csv")


def find_plan(path: Path | str) -> Plan:
    """Return the plan in a file, or in the folder of a result (``plan.json``).

    Raises:
        NotFound: The folder holds none.
    """
    file = Path(path) / "plan.json" if Path(path).is_dir() else Path(path)
    if not file.is_file() and Path(path).is_dir():
        raise NotFound(f"{path} holds no plan.json.", "Folders of demo and apply hold one.", "Name the plan's own file.")
    return Plan.load(file)


@export(
    "lora",
    kinds=("ranks",),
    file="adapter_config.json",
    summary="PEFT's LoraConfig as JSON",
    use="peft.LoraConfig(**json.load(open('{file}'))) has every rank and alpha.",
)
def lora_json(plan: Plan, *, alpha_policy: str = "constant-ratio", dropout: float = 0.0) -> str:
    """Return ``LoraConfig`` as JSON; see :func:`~layerbudget.decisions.ranks.apply.to_lora_config`.

    Raises:
        MissingDependency: peft is not installed.
    """
    config = _lora_config(plan, alpha_policy, dropout)
    record = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


@export(
    "axolotl",
    kinds=("ranks",),
    file="axolotl-ranks.yaml",
    summary="the part of axolotl's YAML that says ranks",
    use="Put the lines of {file} into the YAML of your run; older versions of axolotl than #3673 refuse them.",
)
def axolotl_yaml(plan: Plan, *, alpha_policy: str = "constant-ratio", dropout: float = 0.0) -> str:
    """Return ``lora_rank_pattern``, ``lora_alpha_pattern`` and what belongs to them, as YAML.

    Raises:
        InvalidInput: An alpha that is no whole number, which axolotl does not read.
        MissingDependency: peft is not installed.
    """
    config = _lora_config(plan, alpha_policy, dropout)
    alphas = {config.lora_alpha, *config.alpha_pattern.values()}
    if any(alpha != int(alpha) for alpha in alphas):
        raise InvalidInput(
            f"axolotl reads whole alphas, and {alpha_policy} gives {next(a for a in sorted(alphas) if a != int(a)):g}.",
            "With --set alpha_policy=constant-ratio alpha is twice the rank.",
            "Use that, or export --to lora.",
        )
    lines: dict[str, Any] = {"adapter": "lora", "lora_r": config.r, "lora_alpha": int(config.lora_alpha)}
    lines |= {"lora_dropout": config.lora_dropout, **({"peft_use_rslora": True} if config.use_rslora else {})}
    lines |= {"lora_target_modules": sorted(config.target_modules), "lora_rank_pattern": dict(config.rank_pattern)}
    lines |= {"lora_target_parameters": sorted(config.target_parameters)} if config.target_parameters else {}
    lines["lora_alpha_pattern"] = {k: int(v) for k, v in config.alpha_pattern.items()}
    head = "# lora_r and lora_alpha are a fallback: every module has a rank and an alpha of its own below\n"
    return head + str(yaml.safe_dump(lines, sort_keys=False, width=1000))


def _lora_config(plan: Plan, alpha_policy: str, dropout: float) -> Any:
    try:
        from .decisions.ranks.apply import to_lora_config

        return to_lora_config(plan, alpha_policy=alpha_policy, dropout=dropout)
    except ImportError as error:
        raise MissingDependency("A LoraConfig needs peft.", "", "pip install '.[peft]' in the clone.") from error


@export(
    "recipe",
    kinds=("sparsity",),
    file="recipe.yaml",
    summary="llm-compressor's recipe",
    use="llmcompressor.oneshot(model=..., recipe='{file}', pipeline='sequential') prunes by it.",
)
def llm_compressor(plan: Plan, *, method: str | None = None, pattern: str | None = None, levels: int | None = None) -> str:
    """Return a recipe with one modifier per distinct ratio, and in its comments how it is run.

    The method is ``wanda`` or ``sparsegpt``; by default what the plan was measured with, else ``wanda``. Every modifier walks
    the model, so the number of distinct ratios is what it costs: there are at most ``levels``, the total kept.
    """
    from .decisions.sparsity.apply import method_of, other_pruner
    from .decisions.sparsity.save import recipe

    method, _ = method_of(plan, method, {})
    lines = [f"# {note}" for note in other_pruner(plan, method)]
    if levels is not None:
        plan, change = with_levels(plan, levels)
        lines.append(f"# at most {levels} levels: no block's sparsity moves by more than {change:.4f}, the total stays")
    lines += [
        "# from llmcompressor import oneshot",
        '# oneshot(model=MODEL, dataset=DATA, recipe="recipe.yaml", pipeline="sequential")',
        "# sequential: one pass per layer for each modifier; the default of some versions runs the whole model instead",
    ]
    return "\n".join(lines) + "\n" + recipe(plan, method, pattern=pattern)


def with_levels(plan: Plan, levels: int) -> tuple[Plan, float]:
    """Return a plan with at most so many distinct sparsities and the same total, and the largest change of one block."""
    numel = plan.numel.astype(np.float64)
    values = few_levels(plan.counts / numel, numel, levels)
    counts = round_parameters(values, numel, int(plan.counts.sum()), np.ones(len(values)))
    blocks = [dataclasses.replace(b, value=float(v), count=int(c)) for b, v, c in zip(plan.blocks, values, counts, strict=True)]
    change = float(np.abs(values - plan.counts / numel).max())
    return dataclasses.replace(plan, blocks=tuple(blocks), certificate={}), change


@export("layers", file="layers.json", summary="{module: value} as JSON", use="One number per module, by its full name.")
def layers_json(plan: Plan) -> str:
    """Return ``{module: value}`` in the model's own order."""
    counted = plan.kind in ("ranks", "experts")
    values = {m: b.count if counted else b.value for b in plan.blocks for m in b.modules}
    return json.dumps(values, indent=1) + "\n"


@export("csv", file="plan.csv", summary="one row per block", use="One row per block, for a spreadsheet.")
def blocks_csv(plan: Plan) -> str:
    """Return ``block,value,count,parameters,modules``, one row per block; modules are separated by blanks.

    Plans of formats also have ``format``, its ``damage`` (nats per token), and format, bytes and damage of the next smaller and
    the next larger one, as :func:`~layerbudget.decisions.bits.reasons.reasons` gives them; what is not known is empty.
    """
    text = io.StringIO()
    rows, why = csv.writer(text, lineterminator="\n"), reasons(plan)
    steps = [(side, name) for side in ("smaller", "larger") for name in ("format", "bytes", "damage")]
    more = ("format", "damage", *(f"{side}_{name}" for side, name in steps)) if why else ()
    rows.writerow(("block", "value", "count", "parameters", "modules", *more))
    for k, b in enumerate(plan.blocks):
        own = why[k] if why else {}
        beside = [(own.get(side) or {}).get(name) for side, name in steps]
        told = (own["format"], own.get("damage"), *beside) if own else ()
        rows.writerow((b.name, repr(b.value), b.count, b.numel, " ".join(b.modules), *told))
    return text.getvalue()


export(
    "tensor-types",
    kinds=("bits",),
    file="tensor-types.txt",
    summary="llama.cpp's types of tensors",
    use="llama-quantize --tensor-type-file {file} quantises by it.",
)(llama_cpp)
export(
    "auto-round",
    kinds=("bits",),
    file="layer_config.json",
    summary="AutoRound's layer_config",
    use="AutoRound(model, layer_config=json.load(open('{file}'))) quantises by it.",
)(auto_round)
export(
    "mlx",
    kinds=("bits",),
    file="quantization.json",
    summary="mlx_lm's entry quantization",
    use="q = json.load(open('{file}'))['quantization']; mlx_lm.convert(MODEL, quantize=True, q_group_size=q['group_size'], "
    "quant_predicate=lambda path, _: q.get(path, False)) quantises by it.",
)(mlx)
export(
    "vllm-cache",
    kinds=("cache",),
    file="vllm-cache.json",
    summary="vLLM's layers without an fp8 cache",
    use="Serve so: vllm serve MODEL {options}",
    options=vllm_options,
)(vllm_cache)
export(
    "modelopt-cache",
    kinds=("cache",),
    file="hf_quant_config.json",
    summary="ModelOpt's kv_cache_quantized_layers",
    use="Runtimes that read ModelOpt's {file} beside a checkpoint find the layers whose cache has 8 bits.",
)(modelopt_cache)
export(
    "llama-cache",
    kinds=("cache",),
    file="cache.txt",
    summary="llama.cpp's types of keys and values",
    use="llama-server -m MODEL.gguf $(cat {file}) keeps them so.{options}",
    options=llama_build,
)(llama_cache)
