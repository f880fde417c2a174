"""Run the 8-layer MLP experiment of the paper's appendix and write its tables.

python benchmarks/mlp_tables.py [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from layerbudget.models.machine import versions
from layerbudget.records import to_jsonable
from paper import mlp


def main() -> None:
    """Write ``mlp_tables.json`` and ``mlp_tables.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    out = parser.parse_args().out
    result = {**mlp.tables(), "versions": versions()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "mlp_tables.json").write_text(json.dumps(to_jsonable(result), indent=1) + "\n")
    environment = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    (out / "mlp_tables.md").write_text(f"{mlp.render(result)}\nEnvironment: {environment}.\n")


if __name__ == "__main__":
    main()
