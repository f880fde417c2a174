"""Run the teaching notebook from top to bottom and store what it prints and draws, without Jupyter.

    python scripts/run_notebook.py [examples/teaching.ipynb]

Widgets are left out, so that the file shows what a reader without them sees. Equal notebooks give equal files.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  # the display is chosen first

NOTEBOOK = Path(__file__).parents[1] / "examples" / "teaching.ipynb"


def run(book: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook whose code cells have run in order, with their text and figures as outputs."""
    space: dict[str, Any] = {}
    count = 0
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
        text = printed.getvalue()
        outputs = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []
        cell |= {"execution_count": count, "outputs": outputs + [_image(number) for number in plt.get_fignums()]}
        plt.close("all")
    return book


def _image(number: int) -> dict[str, Any]:
    """Return a figure as an output of a cell."""
    png = io.BytesIO()
    plt.figure(number).savefig(png, dpi=72, metadata={"Software": None})
    data = {"image/png": base64.b64encode(png.getvalue()).decode() + "\n", "text/plain": ["<Figure>"]}
    return {"output_type": "display_data", "metadata": {}, "data": data}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", nargs="?", type=Path, default=NOTEBOOK)
    a = parser.parse_args()
    sys.modules["ipywidgets"] = None  # type: ignore[assignment]  # as where it is not installed
    book = run(json.loads(a.notebook.read_text(encoding="utf-8")))
    a.notebook.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
