"""Which widths and group sizes vLLM's own rules give a kernel, for dense layers and for experts, beside our table of it.

    python -m benchmarks.runtimes vllm_kernels PATH/TO/FOLDER/WITH/vllm [FOLDER/WITH/ITS/PACKAGES ...]

The Python files of a vLLM wheel choose the kernel of packed integers for cards of several kinds: ``choose_mp_linear_kernel`` for a
dense layer, ``CompressedTensorsMoEMethod`` and ``CompressedTensorsWNA16MoEMethod`` for experts. The card is a description; no kernel
is built and none runs. Packages as of ``vllm_schemes``.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.runtimes.vllm_schemes import Absent, RoutedExperts
from benchmarks.stamp import RESULTS, write_section

from layerbudget.compressors.formats import RUNTIMES, find_format
from layerbudget.errors import InvalidInput

BITS: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
GROUPS: tuple[int | None, ...] = (16, 32, 64, 128, 256, None)
CARDS = {"7.5": torch.float16, "8.0": torch.bfloat16, "9.0": torch.bfloat16, "12.0": torch.bfloat16}
GEMMS = {n.upper(): n for n in ("dense", "indexed", "grouped_contiguous", "grouped_masked")}  # of Humming, which needs a card
ROWS, HIDDEN = 2048, 2048
PLACE = "vllm.model_executor.layers.quantization.compressed_tensors"


def card(platforms: Any) -> Any:
    """A platform of vLLM that stands for an NVIDIA card, whose compute capability is set by ``now``."""
    interface = importlib.import_module("vllm.platforms.interface")

    class Card(interface.Platform):  # type: ignore[misc, name-defined]
        _enum = interface.PlatformEnum.CUDA
        device_type, device_name, dispatch_key = "cuda", "cuda", "CUDA"
        now = "9.0"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            major, minor = cls.now.split(".")
            return interface.DeviceCapability(int(major), int(minor))

        @classmethod
        def fp8_dtype(cls) -> torch.dtype:
            return torch.float8_e4m3fn

    platforms._current_platform = Card()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "current_platform" in vars(module):
            module.current_platform = platforms._current_platform
    return Card


def dense(bits: int, group: int | None, symmetric: bool, dtype: torch.dtype) -> str:
    """The kernel of a dense layer, or none."""
    schemes = importlib.import_module("vllm.model_executor.layers.quantization.compressed_tensors.schemes")
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    how = {"strategy": "channel" if group is None else "group", "num_bits": bits, "group_size": group, "symmetric": symmetric}
    scheme = schemes.CompressedTensorsWNA16(**how)
    config = linear.MPLinearLayerConfig(
        full_weight_shape=(ROWS, ROWS), partition_weight_shape=(ROWS, ROWS), weight_type=scheme.quant_type, act_type=dtype,
        group_size=scheme.group_size, zero_points=not symmetric,
    )  # fmt: skip
    try:
        return str(linear.choose_mp_linear_kernel(config).__name__).removesuffix("LinearKernel")
    except ValueError:
        return ""


def experts(bits: int, group: int | None, symmetric: bool, dtype: torch.dtype) -> str:
    """What computes the experts of a layer, or none."""
    from compressed_tensors.quantization import QuantizationArgs

    config_class = importlib.import_module(f"{PLACE}.compressed_tensors").CompressedTensorsConfig
    rules = importlib.import_module(f"{PLACE}.compressed_tensors_moe.compressed_tensors_moe").CompressedTensorsMoEMethod
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy).model_dump()
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    config = config_class.from_config({"format": "pack-quantized", "config_groups": groups, "ignore": []})
    layer: Any = RoutedExperts()
    layer.moe_config = moe_config(dtype)
    try:
        method = rules.get_moe_method(config, layer, "model.layers.0.mlp.experts")
    except (ValueError, NotImplementedError, AssertionError):
        return ""
    return f"{method.wna16_backend.value.title()}"


def moe_config(dtype: torch.dtype) -> Any:
    """A mixture of 8 experts on one card, as vLLM describes it."""
    fused = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    activation = importlib.import_module("vllm.model_executor.layers.fused_moe.activation").MoEActivation.SILU
    parallel = fused.FusedMoEParallelConfig.make_no_parallel()
    how = {
        "num_experts": 8, "experts_per_token": 2, "hidden_dim": HIDDEN, "intermediate_size_per_partition": HIDDEN,
        "intermediate_size": HIDDEN, "num_local_experts": 8, "num_logical_experts": 8, "activation": activation,
        "device": "cuda", "routing_method": fused.RoutingMethodType.Renormalize, "moe_parallel_config": parallel,
        "in_dtype": dtype, "max_num_tokens": 512, "moe_backend": "auto", "intermediate_size_per_partition_unpadded": HIDDEN,
    }  # fmt: skip
    known = fused.FusedMoEConfig.__dataclass_fields__
    return fused.FusedMoEConfig(**{k: v for k, v in how.items() if k in known})


USED = (
    "vllm.model_executor.kernels.linear", "vllm.model_executor.layers.fused_moe.config",
    "vllm.model_executor.layers.fused_moe.oracle.int_wna16", "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe",
    "vllm.model_executor.layers.fused_moe.oracle.mxfp8", "vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe",
    "vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe", "vllm.model_executor.layers.fused_moe.experts.marlin_moe",
    f"{PLACE}.compressed_tensors", f"{PLACE}.compressed_tensors_moe.compressed_tensors_moe_wna16",
    "vllm.model_executor.layers.quantization.auto_awq", "vllm.model_executor.layers.quantization.auto_gptq",
    "vllm.model_executor.layers.quantization.moe_wna16",
)  # fmt: skip


def mxfp8(dtype: torch.dtype) -> list[str]:
    """What computes layers of two sizes and experts in mxfp8 on the card that is set; none of them is built."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.mxfp8")
    possible = linear.prioritize_humming(linear._POSSIBLE_MXFP8_KERNELS[linear.PlatformEnum.CUDA])
    names = []
    for rows in (ROWS, 64):
        config = linear.Mxfp8LinearLayerConfig(weight_shape=(rows, rows), bmm_batch_size=None)
        able = (k for k in possible if k.is_supported()[0] and k.can_implement(config)[0])
        names.append(next(able).__name__.removesuffix("Mxfp8LinearKernel"))
    return [*names, oracle.select_mxfp8_moe_backend(moe_config(dtype))[1].__name__]


def kernels() -> tuple[dict[tuple[str, int, int | None, bool], dict[str, str]], dict[str, list[str]]]:
    """What computes every width and group size, by kind of layer and card; and what computes mxfp8, by card."""
    for name in USED:  # before there is a card: some ask the compiled part what it can
        importlib.import_module(name)
    place, found = card(importlib.import_module("vllm.platforms")), dict[tuple[str, int, int | None, bool], dict[str, str]]()
    with contextlib.ExitStack() as held:  # Humming and FlashInfer are requirements of vLLM's wheel, and compile on a card alone
        for own in ("has_humming", "has_flashinfer", "has_flashinfer_cutedsl"):
            for module in [m for n, m in list(sys.modules.items()) if n.startswith("vllm.") and own in vars(m)]:
                held.enter_context(patch.object(module, own, lambda: True))
        facade = importlib.import_module("vllm.utils.humming")
        vars(facade)["GemmType"] = enum.Enum("GemmType", GEMMS)
        for kind, rule in (("dense", dense), ("experts", experts)):
            for bits, group, symmetric in itertools.product(BITS, GROUPS, (True, False)):
                row = found.setdefault((kind, bits, group, symmetric), {})
                for place.now, dtype in CARDS.items():
                    row[place.now] = rule(bits, group, symmetric, dtype)
        floats = dict[str, list[str]]()
        for place.now in ("7.5", "8.0", "8.9", "9.0", "10.0", "12.0"):
            floats[place.now] = mxfp8(CARDS.get(place.now, torch.bfloat16))
    return found, floats


def ours(kind: str, bits: int, group: int | None, symmetric: bool) -> bool:
    """Whether our table of vLLM has the format."""
    name = f"w{bits}-{f'g{group}' if group else 'channel'}{'' if symmetric else '-asym'}"
    runtime, form = RUNTIMES["vllm"], find_format(name)
    try:
        runtime.check(form)
    except InvalidInput:
        return False
    return runtime.fits(["layers.0.mlp.experts.down_proj"] if kind == "experts" else ["layers.0.mlp.down_proj"], form)


def table(found: dict[tuple[str, int, int | None, bool], dict[str, str]]) -> list[str]:
    """One row for each kind of layer, width and grid; a cell has the kernels of the cards, and what our table says."""
    heads = ["row" if g is None else f"g{g}" for g in GROUPS]
    lines = [f"| layer | bits | zero points | {' | '.join(heads)} |", f"|---|---:|---|{'---|' * len(GROUPS)}"]
    for kind, bits, symmetric in itertools.product(("dense", "experts"), BITS, (True, False)):
        cells = []
        for group in GROUPS:
            kernels = found[kind, bits, group, symmetric].values()
            known, everywhere = ours(kind, bits, group, symmetric), all(kernels)
            names = "/".join(dict.fromkeys(k or "none" for k in kernels))
            cells.append(f"{names}{'' if known == everywhere else f' (ours: {known})'}")
        lines.append(f"| {kind} | {bits} | {'no' if symmetric else 'yes'} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Execute the rules, and write what they answer beside our table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("packages", type=Path, nargs="*", help="folders with packages that vLLM imports")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    sys.path.insert(0, str(given.vllm))
    sys.path.extend(map(str, given.packages))
    sys.meta_path.append(Absent())
    found, floats = kernels()
    alike = sum(ours(*key) == all(row.values()) for key, row in found.items())
    cards = ", ".join(f"SM{now.replace('.', '')} in {str(dtype).removeprefix('torch.')}" for now, dtype in CARDS.items())
    lines = [
        f"vLLM {importlib.import_module('vllm.version').__version__}: the kernels that its rules choose for {cards}, in this order "
        f"where they differ; matrices of {ROWS} x {ROWS}, 8 experts of {HIDDEN} x {HIDDEN}. None was built. Our table has a format "
        f"where all four have a kernel: alike in {alike} of {len(found)} cells.",
        "", *table(found),
        "", "The same for `mxfp8`:", "",
        f"| compute capability | layer of {ROWS} x {ROWS} | layer of 64 x 64 | experts |", "|---|---|---|---|",
        *(f"| {now} | {' | '.join(names)} |" for now, names in floats.items()),
    ]  # fmt: skip
    write_section("runtimes", "Integers that vLLM's rules give a kernel", lines, out=given.out, peers=("compressed-tensors",))


if __name__ == "__main__":
    main()
