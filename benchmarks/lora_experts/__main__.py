"""The mixture of LoRA experts. Writes results/lora_experts.md; `benchmarks.ranks training` has its plans."""

from benchmarks.stamp import run_parts

PARTS = {
    "layer": "speed and memory of the layer beside plain LoRA and MoLA's",
}

if __name__ == "__main__":
    run_parts("lora_experts", __doc__, PARTS)
