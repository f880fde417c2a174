r"""What an export is: a function from a plan, or from the folder of a result, to a file. No torch here.

An export of one's own is a function with a decorator::

    from layerbudget.exports.base import export

    @export("names", kinds=("sparsity",), suffix=".txt", summary="the names of the blocks")
    def names(plan, *, separator="\n"):
        return separator.join(plan.names)

Keyword-only parameters are its options, others are refused. An entry point of the group ``layerbudget.exports`` that names
its module does the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, NotFound
from ..plan import Plan
from ..registry import Option, Registry, load_function, options_of, resolve_options

Call = Callable[..., str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """One format.

    Attributes:
        name: What users write after ``--to``.
        home: ``module:function`` below this package, or the function: ``(plan, **options) -> text``.
        kinds: Kinds of plan that it writes; empty: all.
        file: Name of the file where none is given.
        summary: A line for the help.
        use: How the file is used, a sentence with ``{file}``.
    """

    name: str
    home: str | Call
    kinds: tuple[str, ...] = ()
    file: str = "plan.txt"
    summary: str = ""
    use: str = ""

    @property
    def call(self) -> Call:
        """The function."""
        return load_function(self.home, __package__)

    @property
    def options(self) -> dict[str, Option]:
        """Options that it reads."""
        return options_of(self.call)

    def text(self, plan: Plan, given: Mapping[str, Any]) -> str:
        """The content of the file.

        Raises:
            InvalidInput: A kind of plan that it does not write, or an option that it does not read.
        """
        if self.kinds and plan.kind not in self.kinds:
            fitting = [e.name for e in EXPORTS.all().values() if not e.kinds or plan.kind in e.kinds]
            raise InvalidInput(
                f"{self.name} is no format for a plan of kind {plan.kind}.", f"It writes {' and '.join(self.kinds)}.",
                f"For this plan there are {', '.join(fitting)}.",
            )  # fmt: skip
        return self.call(plan, **resolve_options(f"The format {self.name}", self.options, given))


_OWN = (
    Export(
        name="lora", home=".lora:lora_json", kinds=("ranks",), file="adapter_config.json",
        summary="PEFT's LoraConfig as JSON", use="peft.LoraConfig(**json.load(open('{file}'))) has every rank and alpha.",
    ),
    Export(
        name="recipe", home=".recipes:llm_compressor", kinds=("sparsity",), file="recipe.yaml",
        summary="llm-compressor's recipe",
        use="llmcompressor.oneshot(model=..., recipe='{file}', pipeline='sequential') prunes by it.",
    ),
    Export(name="layers", home=".tables:layers_json", file="layers.json", summary="{module: value} as JSON",
           use="One number per module, by its full name."),
    Export(name="csv", home=".tables:blocks_csv", file="plan.csv", summary="one row per block",
           use="One row per block, for a spreadsheet."),
    Export(name="tensor-types", home="..decisions.bits.export:llama_cpp", kinds=("bits",), file="tensor-types.txt",
           summary="llama.cpp's types of tensors", use="llama-quantize --tensor-type-file {file} quantises by it."),
    Export(name="auto-round", home="..decisions.bits.export:auto_round", kinds=("bits",), file="layer_config.json",
           summary="AutoRound's layer_config", use="AutoRound(model, layer_config=json.load(open('{file}'))) quantises by it."),
    Export(name="gptqmodel", home="..decisions.bits.export:gptq_model", kinds=("bits",), file="dynamic.json",
           summary="GPTQModel's dynamic", use="QuantizeConfig(dynamic=json.load(open('{file}'))) quantises by it."),
)  # fmt: skip
EXPORTS: Registry[Export] = Registry("export format", group="layerbudget.exports", own={e.name: e for e in _OWN})


def export(
    name: str, *, kinds: tuple[str, ...] = (), suffix: str = ".txt", summary: str = "", use: str = ""
) -> Callable[[Call], Call]:
    """Register a function ``(plan, *, ...) -> text`` as a format."""

    def add(call: Call) -> Call:
        EXPORTS.add(name, Export(name=name, home=call, kinds=kinds, file=f"{name}{suffix}", summary=summary, use=use))
        return call

    return add


def format_for(kind: str) -> str:
    """The format of a kind of plan where none is named: the first that is made for it."""
    return next((e.name for e in EXPORTS.all().values() if kind in e.kinds), "csv")


def find_plan(path: Path | str) -> Plan:
    """The plan in a file, or in the folder of a result (``plan.json``).

    Raises:
        NotFound: The folder holds none.
    """
    where = Path(path)
    if not where.is_dir():
        return Plan.load(where)
    if not (where / "plan.json").is_file():
        raise NotFound(
            f"{where} holds no plan.json.", "Folders of demo and prune hold one.", "Name the plan's own file.",
        )  # fmt: skip
    return Plan.load(where / "plan.json")
