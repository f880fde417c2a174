"""Smaller dense models. Writes results/shapes.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "smaller": "size, time and perplexity of fewer blocks, heads and MLP units",
    "directional": "directional damage beside uniform widths and FLAP, at equal FLOPs",
    "uneven": "shapes that differ by layer beside the nearest even ones, with tokens per second (needs xllamacpp)",
    "formats": "smaller shapes and higher formats beside all shapes and lower formats, at equal bytes",
}

if __name__ == "__main__":
    run_parts("shapes", __doc__, PARTS)
