"""Beside the code of other projects, and plans read by it; checkpoints with further layers. Writes results/peers.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "exports": "exports, read by the released packages of their tools",
    "further": "checkpoints with layers that predict further tokens, before and after",
    "pruning": "masks, time and memory beside wanda, sparsegpt and llm-compressor",
    "rounding": "matrices rounded by AutoRound and gptq-gguf-toolkit beside ours",
    "sparsity": "our counts in wanda's code; EvoPress's own search beside ours",
}

if __name__ == "__main__":
    run_parts("peers", __doc__, PARTS)
