"""Scores of layers: what they cost, and how far they can be trusted. Writes results/scores.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "cost": "time and memory of every estimator over one forward and backward",
    "influence": "LayerIF in one pass beside the procedure layer by layer",
    "noise": "gain, noise floor and stability against the number of sequences",
    "tracker": "cost of following gains during fine-tuning",
    "certificates": "predicted beside measured decrease; rankings that are certified",
}

if __name__ == "__main__":
    run_parts("scores", __doc__, PARTS)
