"""The long verbs on models of any size. Writes results/size.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "random_models": "write a random model of real shapes, shard by shard",
    "clock": "one process and two of every verb, by the clock",
    "commands": "peak memory and processor seconds of whole commands on a real model, beside another checkout",
    "forecasts": "what every long verb forecasts, beside the time and memory that it took",
    "goal": "a whole plan of bits beside six forwards and backwards of its text and ggml's own rounding",
    "machines": "what each of several processes does of every verb, on paper and beside a run",
    "tasks": "time and memory of every verb beside one forward and backward",
}

if __name__ == "__main__":
    run_parts("size", __doc__, PARTS)
