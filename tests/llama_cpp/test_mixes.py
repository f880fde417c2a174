"""The types of llama.cpp's mixes are those of the files that llama-quantize itself writes.

``llama_mixes.txt`` holds them for small models of seven shapes, with and without an importance matrix: what differs from the
mix's base type. ``LAYERBUDGET_LLAMA_QUANTIZE=PATH LAYERBUDGET_WRITE=1 pytest`` makes it anew by that program.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.llama_cpp.mixes import MIXES, LlamaModel, Tensor, find_mix, needs_matrix, types_of
from layerbudget.reporting.explain import explain_plan

GOLDEN = Path(__file__).parent / "llama_mixes.txt"
PROGRAM = os.environ.get("LAYERBUDGET_LLAMA_QUANTIZE")
DENSE = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split()
STACKED = "ffn_gate_exps ffn_up_exps ffn_down_exps".split()
# Architecture, layers, heads, heads of keys, experts, hidden, width of the MLP, tied, matrices of a layer.
CASES = {
    "dense": ("llama", 17, 8, 2, 0, 256, 512, False, DENSE),
    "tied": ("qwen3", 24, 2, 2, 0, 256, 256, True, DENSE),
    "odd": ("llama", 9, 4, 2, 0, 96, 256, False, DENSE),
    "odder": ("llama", 8, 2, 2, 0, 64, 80, True, DENSE),
    "experts": ("llama", 16, 4, 2, 8, 256, 256, False, [*DENSE[:4], "ffn_gate_inp", *STACKED]),
    "shared": ("qwen2moe", 10, 4, 1, 4, 256, 256, False,
               [*DENSE[:4], "ffn_gate_inp", *STACKED, "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]),
    "70B": ("llama", 80, 8, 1, 0, 256, 256, False, DENSE),
    "falcon": ("falcon", 16, 4, 1, 0, 256, 256, False, ["attn_qkv", "attn_output", "ffn_up", "ffn_down"]),
}  # fmt: skip


def tensors_of(case):
    """Every matrix of a model of that shape; the rules and llama-quantize read the rows' lengths, not how many there are."""
    _, layers, _, _, experts, hidden, width, tied, names = CASES[case]
    found = [Tensor(name=n, d_out=4, d_in=hidden) for n in ["token_embd.weight", *([] if tied else ["output.weight"])]]
    for i, name in itertools.product(range(layers), names):
        d_in, copies = width if "ffn_down" in name else hidden, experts if "exps" in name else 1
        found.append(Tensor(name=f"blk.{i}.{name}.weight", d_out=4, d_in=d_in, copies=copies))
    return found


def line(case, mix, imatrix, types):
    """What differs from the base type, as ``part=TYPE:layers``; the same types of all layers have no layers."""
    found: dict[str, dict[str, list[int]]] = {}
    for tensor, kind in zip(tensors_of(case), types, strict=True):
        layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        found.setdefault(part, {}).setdefault(kind, []).append(int(layer or 0))
    words = []
    for part, kinds in found.items():
        for kind, layers in kinds.items():
            if len(kinds) > 1 or kind != MIXES[mix]:
                words.append(f"{part}={kind}" + (f":{','.join(map(str, layers))}" if len(kinds) > 1 else ""))
    return " ".join([case, mix, "imatrix" if imatrix else "none", *words])


def ours(case):
    """The lines of a case by the rules."""
    (arch, layers, heads, keys, experts, *_), tensors = CASES[case], tensors_of(case)
    for mix, imatrix in itertools.product(MIXES, (True, False)):
        model = LlamaModel(architecture=arch, layers=layers, heads=heads // keys, experts=experts, imatrix=imatrix)
        types = types_of(mix, model, tensors[::-1])[::-1]  # in any order
        refused = not imatrix and needs_matrix(mix, tensors, types)
        yield f"{case} {mix} none refused" if refused else line(case, mix, imatrix, types)


@pytest.mark.parametrize("case", CASES)
def test_types_are_those_of_llama_quantize(case):
    golden = [row for row in GOLDEN.read_text().splitlines() if row.split()[0] == case]
    assert list(ours(case)) == golden


def written(case, folder):
    """A file of random weights in 32 bits, and an importance matrix of ones."""
    gguf = pytest.importorskip("gguf")
    arch, layers, heads, keys, experts, hidden, width, *_ = CASES[case]
    rng, model, matrix = np.random.default_rng(0), folder / f"{case}.gguf", folder / f"{case}.imatrix"
    writer, ones = gguf.GGUFWriter(model, arch), gguf.GGUFWriter(matrix, "")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-6)
    writer.add_vocab_size(32)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(width)
    ones.add_string("general.type", "imatrix")
    ones.add_array("imatrix.datasets", ["ones"])
    ones.add_uint32("imatrix.chunk_count", 1)
    ones.add_uint32("imatrix.chunk_size", 64)
    for t in tensors_of(case):
        shape = (t.d_out, t.d_in) if t.copies == 1 else (t.copies, t.d_out, t.d_in)
        writer.add_tensor(t.name, rng.normal(size=shape).astype(np.float32))
        ones.add_tensor(f"{t.name}.in_sum2", np.ones((t.copies, t.d_in), dtype=np.float32))
        ones.add_tensor(f"{t.name}.counts", np.ones((t.copies, 1), dtype=np.float32))
    for each in (writer, ones):
        each.write_header_to_file()
        each.write_kv_data_to_file()
        each.write_tensors_to_file()
        each.close()
    return model, matrix


def quantised(folder, model, matrix, mix):
    """Types of the tensors in llama-quantize's file; lattices take it minutes, of them it says what it would write."""
    gguf, out, dry = pytest.importorskip("gguf"), folder / "out.gguf", mix.startswith("IQ")
    words = [
        PROGRAM,
        *(["--dry-run"] if dry else []),
        *(["--imatrix", matrix] if matrix else []),
        model,
        *([] if dry else [out]),
    ]
    done = subprocess.run([*map(str, words), mix, "1"], capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode or "will require an imatrix" in said:
        assert "requires an imatrix" in said or dry, said[-500:]
        return None
    if not dry:
        return {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    return {n: (k or "F32").upper() for n, k in re.findall(r"\] +(\S+) +- \[.*MiB(?: \((\w+)\))?$", said, re.MULTILINE)}


@pytest.mark.skipif(PROGRAM is None, reason="llama-quantize is named by LAYERBUDGET_LLAMA_QUANTIZE")
def test_llama_quantize_itself(tmp_path):
    rows = []
    for case in CASES:
        model, matrix = written(case, tmp_path)
        for mix, imatrix in itertools.product(MIXES, (True, False)):
            types = quantised(tmp_path, model, matrix if imatrix else None, mix)
            found = types and [types[t.name].replace("F32", "F16") for t in tensors_of(case)]
            rows.append(f"{case} {mix} none refused" if found is None else line(case, mix, imatrix, found))
    if os.environ.get("LAYERBUDGET_WRITE"):
        GOLDEN.write_text("\n".join(rows) + "\n")
    assert rows == GOLDEN.read_text().splitlines()


def test_names_of_mixes():
    assert find_mix("q4_k") == "Q4_K_M" and find_mix("IQ3_xs") == "IQ3_XS"
    with pytest.raises(InvalidInput, match="no mix 'Q9'.*IQ1_S, .*Q8_0"):
        find_mix("Q9")


def test_a_budget_is_of_the_whole_file_and_a_mix_is_the_mix(tmp_path):
    gguf = pytest.importorskip("gguf")
    model, tokenizer = zoo.build("llama-tied", intermediate_size=64, hidden_size=64, vocab_size=96), lb.load_tokenizer("demo")
    data = zoo.tokens(2, 12, vocabulary=96)
    own = {"family": "gguf", "draws": 1, "tokenizer": tokenizer, "formats": ["Q4_0", "Q5_0", "Q5_1", "Q8_0"]}
    with pytest.raises(InfeasibleBudget, match="^20,000 bytes for .* with what stays") as refused:
        plan_bits(model, data, budget="20 kB", **own)
    least = int(re.search(r"--budget (\d+)", str(refused.value)).group(1))
    for budget in (least, least + 20000):
        plan = plan_bits(model, data, budget=f"{budget} bytes", **own)
        size = plan.budget["tensors"] + plan.payload.head_bytes
        assert least <= size <= budget and f"{size:,} bytes" in explain_plan(plan)["sentences"][-1]
        moved = copy.deepcopy(model)
        moved.config._name_or_path = f"/models/{'in-a-folder-of-a-longer-name-' * 3}"  # bytes that the plan does not count
        write_bits(moved, plan, tmp_path / str(budget), data, tokenizer=tokenizer)
        assert (tmp_path / str(budget) / "model.gguf").stat().st_size == size
    one = plan_bits(model, data, bits=16, **(own | {"formats": ["F16"]}))
    assert "mix" not in one.payload.baselines, "a menu without the types of a mix has no mix"
    plan = plan_bits(model, data, like="Q4_K_M", rule="mix", **own)
    assert explain_plan(plan)["sentences"][-1].endswith("the plan is llama.cpp's Q4_K_M.")
    write_bits(model, plan, tmp_path / "mix", data)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "mix" / "model.gguf").tensors}
    assert types["token_embd.weight"] == "Q8_0" and types["blk.0.attn_q.weight"] == "Q5_0"
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(3)} == {"Q8_0", "Q5_0"}
