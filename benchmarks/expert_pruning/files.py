"""What layerbudget makes of the experts of every family, beside plain code that shares nothing with it.

Every family of ``benchmarks.robustness architectures`` with routed experts is a tiny random model of two layers with eight experts. Each is

    masks       pruned by Wanda to one half, and by magnitude. Beside it: every product of the model with a weight is seen
                while transformers runs ("eager" experts), its inputs are squared and added up, and of every row the half
                with the smallest ``|w| norm(x)`` goes, layer after layer.
    experts     left with half of its experts, and loaded by ``from_pretrained``. Beside it: the whole model, whose routers
                are told that the other experts have a score of minus infinity.
    GGUF        written in a mix of types. Beside it: the package ``gguf`` reads the file, and rounds the model's own
                tensors, cut into gate, up and down by hand.
    types       where llama.cpp's converter writes the file in 16 bits (here: the package ``gguf``, by its own names), given
                the types of a plan. Beside it: as for GGUF.
    vLLM        packed for vLLM in a mix of formats. Beside it: the integers are taken from their words of 32 bits, scales
                are multiplied, by what ``config.json`` says of every name; names are those that transformers saves.
    loaded      packed in one format, and loaded by ``from_pretrained``. Beside it: the same rounding of the model's own.

A cell is *equal*, *refused* with the sentence, or *DIFFERS*. Rows are kept under ``results/rows``: what they have of other families
and columns stays.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.expert_pruning.references import (
    Products,
    cut_by_hand,
    matrices,
    prune_by_hand,
    rounded,
    scheme_of,
    stacks,
    unpacked,
)
from benchmarks.robustness.architectures import FAMILIES, complaint, mixtures, plain, run, tiny
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section
from safetensors.torch import load_file

import gguf
import layerbudget as lb
from layerbudget.models.loading import DEMO_MODEL

SAMPLES, LENGTH, EXPERTS = 8, 32, 8
TEXT = ["--samples", str(SAMPLES), "--length", str(LENGTH), "--batch-size", "4"]
GGUF_TYPES, PACKED_FORMATS = "Q4_0,Q5_1,Q8_0,F16", "w4-g32,w4-g32-asym,w8-g32"
# llama.cpp's name of every family that it knows, as its converter has it.
ARCHITECTURES = {
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next", "mixtral": "llama", "olmoe": "olmoe",
    "phimoe": "phimoe", "granitemoe": "granitemoe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "llama4_text": "llama4", "afmoe": "afmoe", "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe", "exaone_moe": "exaone-moe", "gemma4_text": "gemma4", "glm4_moe_lite": "deepseek2",
    "granitemoehybrid": "granitehybrid", "granitemoeshared": "granitemoe", "hunyuan_v1_moe": "hunyuan-moe",
    "kimi_linear": "kimi-linear", "lfm2_moe": "lfm2moe", "mimo_v2_flash": "mimo2", "minimax_m2": "minimax-m2",
    "qwen3_5_moe_text": "qwen35moe", "solar_open": "glm4moe", "nemotron_h": "nemotron_h_moe", "jamba": "jamba",
    "glm4v_moe (images)": "glm4moe", "llama4 (images)": "llama4", "qwen3_vl_moe (images)": "qwen3vlmoe",
    "qwen3_5_moe (images)": "qwen35moe",
}  # fmt: skip

Cell = dict[str, Any]


# --- a family on disk ---------------------------------------------------------------------------------------------------------


class Family:
    """A family's model in a folder, as it is read back by plain transformers, and the command line on it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.kind, self.folder = name, name.split()[0], folder
        model = tiny(name, EXPERTS)
        with torch.no_grad():  # biases of routers and experts are zeros in a new model: a wrong row would not be seen
            for key, tensor in model.state_dict().items():
                if tensor.is_floating_point() and "bias" in key.rpartition(".")[2] and re.search("expert|gate|router", key):
                    tensor.normal_(0, 0.02)
        model.save_pretrained(folder / "model")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / file, folder / "model" / file)
        self.text = folder / "text.txt"
        lines = [f"In the year {i} the river rose to {i % 7} feet and {i % 5} boats were lost." for i in range(400)]
        self.text.write_text("\n\n".join(" ".join(lines[i : i + 20]) for i in range(0, 400, 20)))
        tokens = lb.calibration(str(self.text), lb.load_tokenizer(str(folder / "model")), samples=SAMPLES, length=LENGTH)
        self.tokens = tokens.input_ids

    def load(self, folder: str = "model", **options: Any) -> Any:
        """Return the model of a folder, in float32, loaded by transformers alone."""
        loader = getattr(transformers, FAMILIES[self.name][1])
        return loader.from_pretrained(self.folder / folder, dtype=torch.float32, **options).eval()

    def does(self, line: str) -> str:
        """Run a command line; return the sentence of its refusal, nothing where it worked."""
        words = {"m": self.folder / "model", "w": self.folder, "d": ["--data", str(self.text), *TEXT]}
        argv = [w for part in line.split() for w in (words["d"] if part == "TEXT" else [part.format(**words)])]
        code, said, trace = run(argv)
        if code is None:
            raise RuntimeError(f"{line}: {trace}")
        return "" if code == 0 else plain(complaint(said))

    def plan(self, name: str) -> dict[str, Any]:
        """Return a plan that was written."""
        return json.loads((self.folder / f"{name}.json").read_text())

    def saved(self, folder: str) -> dict[str, torch.Tensor]:
        """Return every tensor of a folder under its name there."""
        return {n: t for file in sorted((self.folder / folder).glob("*.safetensors")) for n, t in load_file(file).items()}


def refused(sentence: str) -> Cell:
    """The cell of a refusal."""
    return {"state": "refused", "said": sentence}


def compared(equal: int, of: int, **more: Any) -> Cell:
    """The cell of a comparison of numbers one by one."""
    return {"state": "equal" if equal == of and of else "DIFFERS", "equal": equal, "of": of, **more}


# --- masks --------------------------------------------------------------------------------------------------------------------


def masks(family: Family) -> Cell:
    """Wanda, as the command line applies it."""
    if said := _pruned(family, "wanda", "TEXT"):
        return refused(said)
    mine = family.load(experts_implementation="eager")
    return _same_masks(family, mine, prune_by_hand(mine, family.tokens, _planned(family, mine)), "wanda")


@torch.no_grad()
def magnitude(family: Family) -> Cell:
    """Magnitude: of every expert's matrix the smaller half goes."""
    if said := _pruned(family, "magnitude", ""):
        return refused(said)
    mine, ties = family.load(), {}
    for name in _planned(family, mine):
        weight = dict(mine.named_parameters())[name]
        ties[name] = torch.zeros_like(weight, dtype=torch.bool)
        for w in matrices(weight, False):
            w[w.abs() <= w.abs().flatten().kthvalue(w.numel() // 2).values] = 0
    return _same_masks(family, mine, ties, "magnitude")


def _pruned(family: Family, method: str, text: str) -> str:
    if said := family.does("plan sparsity {m} --sparsity 0.5 --rule uniform -o {w}/half.json --overwrite"):
        return said
    return family.does(f"apply {{m}} {{w}}/half.json --method {method} {text} -o {{w}}/{method}")


def _planned(family: Family, model: Any) -> list[str]:
    """Full names of the parameters of a plan of sparsity; all experts are among them."""
    known = dict(model.named_parameters())
    found = [n if n in known else f"{n}.weight" for b in family.plan("half")["blocks"] for n in b["modules"]]
    if left := set(stacks(model)) - set(found):
        raise RuntimeError(f"not in the plan: {left}")
    return found


def _same_masks(family: Family, mine: Any, ties: Mapping[str, torch.Tensor], folder: str) -> Cell:
    """Compare every weight of a pruned folder with a model that was pruned by hand."""
    made, wanted = dict(family.load(folder).named_parameters()), dict(mine.named_parameters())
    count = {"experts": [0, 0, 0], "others": [0, 0, 0]}
    for name, near in ties.items():
        same = made[name].eq(wanted[name])
        for i, n in enumerate((int((same | near).sum()), same.numel(), int((~same & near).sum()))):
            count["experts" if near.ndim == 3 else "others"][i] += n
    (equal, of, tied), others = count.values()
    cell = compared(equal, of, ties=tied, others=others)
    return cell if others[0] == others[1] else cell | {"state": "DIFFERS"}


# --- fewer experts ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def experts(family: Family) -> Cell:
    """Half of the experts, the same number in all layers."""
    if said := family.does("plan expert-pruning {m} --keep 0.5 --even TEXT -o {w}/kept.json"):
        return refused(said)
    if said := family.does("apply {m} {w}/kept.json -o {w}/kept"):
        return refused(said)
    dense, smaller = family.load(), family.load("kept")
    removed = {}
    for block, kept in family.plan("kept")["extra"]["kept"].items():
        rows = [n for n, p in dense.named_parameters() if n.startswith(f"{block}.") and p.ndim == 2 and len(p) == EXPERTS]
        (router,) = [n for n in rows if ".experts." not in n]
        removed[router] = sorted(set(range(EXPERTS)) - set(kept))
        if not removed[router]:
            raise RuntimeError(f"{block} keeps all its experts")
    if len(removed) != len({n.rpartition(".")[0] for n in stacks(dense)}):
        raise RuntimeError(f"the plan has {len(removed)} layers of experts")
    sizes = {len(p) for p in stacks(smaller).values()}
    found, whole = smaller(input_ids=family.tokens).logits, dense(input_ids=family.tokens).logits
    with Products(dense, removed):
        wanted = dense(input_ids=family.tokens).logits
    off, moved = float((found - wanted).abs().max()), float((whole - wanted).abs().max())
    state = "equal" if off < 1e-4 * moved and sizes == {EXPERTS // 2} else "DIFFERS"
    return {"state": state, "off": off, "moved": moved, "sizes": sorted(sizes)}


# --- GGUF ---------------------------------------------------------------------------------------------------------------------


def same_file(file: Path, wanted: Mapping[str, tuple[str, np.ndarray]], formats: Mapping[str, str]) -> Cell:
    """Compare the experts of a GGUF file with tensors that the package ``gguf`` rounds here."""
    reader = gguf.GGUFReader(file)
    tensors = {t.name: t for t in reader.tensors}
    of_experts = {n for n in tensors if "_exps." in n and not n.endswith("bias")}
    if of_experts != set(wanted):
        return {"state": "DIFFERS", "said": f"the file has {sorted(of_experts)}"}
    equal = of = 0
    for name, (matrix, numbers) in wanted.items():
        kind = gguf.GGMLQuantizationType[formats[matrix]]
        if tensors[name].tensor_type != kind:
            return {"state": "DIFFERS", "said": f"{name} is {tensors[name].tensor_type.name}"}
        right = gguf.dequantize(gguf.quantize(numbers, kind), kind)
        found = gguf.dequantize(tensors[name].data, kind)
        equal, of = equal + int((found == right).sum()), of + right.size
    return compared(equal, of, types=sorted({formats[m] for m, _ in wanted.values()}))


_PLAN_GGUF = (
    f"plan bits {{m}} --format gguf --formats {GGUF_TYPES} --keep experts.*up_proj=Q4_0 --bits 8 --check 0 TEXT -o {{w}}/"
)


def in_gguf(family: Family) -> Cell:
    """A GGUF file that is written here."""
    if said := family.does(f"{_PLAN_GGUF}gguf.json"):
        return refused(said)
    if said := family.does("apply {m} {w}/gguf.json -o {w}/gguf"):
        return refused(said)
    file, model = family.folder / "gguf" / "model.gguf", family.load()
    header = gguf.GGUFReader(file)
    (count,) = [f.contents() for n, f in header.fields.items() if n.endswith(".expert_count")]
    if count != EXPERTS:
        return {"state": "DIFFERS", "said": f"expert_count is {count}"}
    return same_file(file, cut_by_hand(family.kind, model), family.plan("gguf")["extra"]["formats"])


def in_16_bits(family: Family, arch: str, file: Path) -> None:
    """Write the model as llama.cpp's converter would: its tensors by the names of the checkpoint, experts cut by hand."""
    model, saved = family.load(), family.saved("model")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = 1 + max(int(n) for n in re.findall(r"layers\.(\d+)\.", " ".join(saved)))
    names = gguf.get_tensor_name_map(kinds[arch], layers)
    tensors = {n: numbers for n, (_, numbers) in cut_by_hand(family.kind, model).items()}
    for name, tensor in {**model.state_dict(), **saved}.items():  # Kimi Linear's dense layer is saved under a name of experts
        short = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name).removeprefix("language_model.")
        known = names.get_name(short, try_suffixes=(".weight", ".bias"))
        if known and ".experts." not in name:
            tensors[known] = tensor.float().numpy()
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(layers)
    writer.add_expert_count(EXPERTS)
    for name, numbers in tensors.items():
        writer.add_tensor(name, numbers if numbers.ndim == 1 else numbers.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def types(family: Family) -> Cell:
    """The types of a plan, given to a file in 16 bits that another program wrote."""
    arch = ARCHITECTURES.get(family.name)
    if arch is None:
        return {"state": "-", "said": "The package gguf has no such architecture."}
    if said := family.does(f"{_PLAN_GGUF}types.json"):
        return refused(said)
    in_16_bits(family, arch, family.folder / "half.gguf")
    if said := family.does(f"apply {family.folder / 'half.gguf'} {{w}}/types.json -o {{w}}/typed.gguf"):
        return refused(said)
    halves = {n: (m, x.astype(np.float16).astype(np.float32)) for n, (m, x) in cut_by_hand(family.kind, family.load()).items()}
    return same_file(family.folder / "typed.gguf", halves, family.plan("types")["extra"]["formats"])


# --- compressed-tensors -------------------------------------------------------------------------------------------------------


def _left(family: Family) -> str:
    """The option that leaves a router alone which is a Linear and returns more than its product."""
    return " --unwritten 16-bit" if family.kind == "phimoe" else ""


def in_words(family: Family) -> Cell:
    """A folder for vLLM in a mix of formats."""
    formats = f"--formats {PACKED_FORMATS} --keep layers[.][13][.].*experts[.]=w4-g32-asym --bits 9{_left(family)}"
    if said := family.does(f"plan bits {{m}} --runtime vllm {formats} --check 0 TEXT -o {{w}}/vllm.json"):
        return refused(said)
    if said := family.does("apply {m} {w}/vllm.json -o {w}/vllm"):
        return refused(said)
    dense, made = family.saved("model"), family.saved("vllm")
    config = json.loads((family.folder / "vllm" / "config.json").read_text())["quantization_config"]
    single = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
    names = [n for n in dense if single.search(n)]
    if not names:
        return {"state": "DIFFERS", "said": "transformers saves no expert by itself"}
    stems = {re.sub(r"\.weight_(packed|scale|zero_point|shape)$", ".weight", n) for n in made}
    if stems != set(dense):
        return {"state": "DIFFERS", "said": f"names: {sorted(stems ^ set(dense))[:4]}"}
    count, kinds = {True: [0, 0], False: [0, 0]}, set()
    for name, weight in dense.items():
        scheme, stem = scheme_of(config, name.removesuffix(".weight")), name.removesuffix(".weight")
        if scheme is None:
            right, found = weight.bfloat16(), made[name]
        else:
            right, found = rounded(weight, scheme), unpacked(made, stem, scheme)
            kinds |= {f"w{scheme['num_bits']}{'' if scheme['symmetric'] else '-asym'}"} if name in names else set()
        for i, n in enumerate((int((right == found).sum()), right.numel())):
            count[name in names][i] += n
    cell = compared(*count[True], formats=sorted(kinds), others=count[False])
    return cell if kinds and count[False][0] == count[False][1] else cell | {"state": "DIFFERS"}


def loaded(family: Family) -> Cell:
    """A folder in one format, as transformers loads it: in bfloat16."""
    formats = f"--formats w4-g32 --keep experts[.]=w4-g32 --bits 9{_left(family)}"
    if said := family.does(f"plan bits {{m}} --runtime vllm {formats} --check 0 TEXT -o {{w}}/one.json"):
        return refused(said)
    if said := family.does("apply {m} {w}/one.json -o {w}/one"):
        return refused(said)
    notes = json.loads((family.folder / "one" / "receipt.json").read_text())["notes"]
    if said := [n for n in notes if "does not load it" in n]:
        return refused(said[0])
    scheme = {"num_bits": 4, "symmetric": True, "group_size": 32}
    with contextlib.redirect_stderr(io.StringIO()):  # bars of compressed-tensors
        dense, back = stacks(family.load()), dict(family.load("one").named_parameters())
    equal = of = 0
    for name, stack in dense.items():
        right = torch.stack([rounded(w, scheme).bfloat16().float() for w in stack.detach()])
        equal, of = equal + int((right == back[name]).sum()), of + right.numel()
    return compared(equal, of)


# --- the table ----------------------------------------------------------------------------------------------------------------

CHECKS = {
    "masks": masks, "magnitude": magnitude, "experts": experts, "GGUF": in_gguf, "types": types, "vLLM": in_words, "loaded": loaded,
}  # fmt: skip


def check(name: str, folder: Path, columns: Sequence[str] = tuple(CHECKS)) -> dict[str, Cell]:
    """Return all cells of a family."""
    family, found = Family(name, folder), {}
    for column in columns:
        try:
            found[column] = CHECKS[column](family)
        except RuntimeError as error:
            found[column] = {"state": "DIFFERS", "said": str(error)}
    return found


def shown(cell: Cell) -> str:
    """A cell in a few words."""
    more = ", ".join(cell.get("types", []) + cell.get("formats", []))
    if "moved" in cell:
        return f"{cell['state']} ({cell['off']:.0e} of {cell['moved']:.0e})"
    if cell["state"] == "equal":
        return f"equal{f' ({more})' if more else ''}"
    return cell["state"] if "of" not in cell else f"{cell['state']} ({cell['equal'] / cell['of']:.4%})"


def table(found: Mapping[str, Mapping[str, Cell]]) -> str:
    """The table and every sentence, as Markdown."""
    states = {c: [r[c]["state"] for r in found.values()] for c in CHECKS}
    rows = [f"{len(found)} families of tiny random models.", "",
            f"| family | {' | '.join(CHECKS)} |", f"|{'---|' * (len(CHECKS) + 1)}"]  # fmt: skip
    rows += [f"| {name} | {' | '.join(shown(r[c]) for c in CHECKS)} |" for name, r in found.items()]
    total = (f"{s.count('equal')} equal, {s.count('refused')} refused, {s.count('DIFFERS')} DIFFERS" for s in states.values())
    rows += [f"| all | {' | '.join(total)} |", "", "What was said:", ""]
    said: dict[tuple[str, str], list[str]] = {}
    for name, record in found.items():
        for column, cell in record.items():
            if "said" in cell:
                said.setdefault((column, f"{cell['state']}: {cell['said']}"), []).append(name)
    return "\n".join([*rows, *(f"- **{c}** ({', '.join(names)}): {text}" for (c, text), names in said.items())]) + "\n"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """No logs and no bars."""
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.utils.logging.enable_progress_bar()


def main() -> None:
    """Check the families, keep each, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=mixtures(), choices=mixtures())
    parser.add_argument("--columns", nargs="+", default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    earlier: dict[str, dict[str, Cell]] = {}
    for row in read_rows("expert_files", arguments.out):
        earlier.setdefault(row["family"], {}).update(row["cells"])
    for name in arguments.families:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as place, silent():
            cells = check(name, Path(place), arguments.columns)
        earlier[name] = earlier.get(name, {}) | cells
        keep_row("expert_files", {"family": name, "cells": cells}, arguments.out)
        print(f"{name} ({time.process_time() - began:.0f} s): {json.dumps(cells)}", flush=True)
    found = {n: earlier[n] for n in mixtures() if n in earlier and set(earlier[n]) >= set(CHECKS)}
    peers = ("gguf", "compressed-tensors")
    write_section("expert_pruning", "Experts of every family beside plain code", table(found), out=arguments.out, peers=peers)


if __name__ == "__main__":
    main()
