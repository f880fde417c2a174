"""Plans of the cache at equal bytes. Writes results/cache.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "plans": "KL of every rule beside one format; predicted beside measured",
    "packed": "a planned cache packed by HQQ: bytes, KL, seconds (needs hqq)",
    "llama_cpp": "a rounded cache in llama.cpp itself beside ours (needs xllamacpp)",
}

if __name__ == "__main__":
    run_parts("cache", __doc__, PARTS)
