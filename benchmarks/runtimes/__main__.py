"""Files of plans in the runtimes that read them. Writes results/runtimes.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "plans": "tokens per second of a planned GGUF file beside uniform (needs xllamacpp)",
    "types": "tokens per second of llama.cpp's types, and what they predict (needs xllamacpp)",
    "shapes": "tokens per second that measured rates predict for shapes (needs xllamacpp)",
    "llama_quantise": "llama.cpp's own quantiser by our tensor types (needs llama-quantize)",
    "vllm_schemes": "vLLM's own code reads our folders (needs its Python files)",
    "vllm_kernels": "the kernels of vLLM's rules for widths and groups (needs its Python files)",
    "vllm_shapes": "vLLM's own classes on layers that differ (needs its Python files)",
}

if __name__ == "__main__":
    run_parts("runtimes", __doc__, PARTS)
