"""Build the documentation: every page of docs/ and one reference page of the public names, as plain HTML in site/.

python docs/build.py [--out site]
"""

from __future__ import annotations

import argparse
import html
import importlib
import inspect
from pathlib import Path

from markdown_it import MarkdownIt

import layerbudget

HERE = Path(__file__).parent
STYLE = (
    "body{max-width:52rem;margin:2rem auto;padding:0 1rem;font:16px/1.55 system-ui,sans-serif;color:#1f2933}"
    "pre,code{background:#f1f3f5;border-radius:4px}pre{padding:.8rem;overflow-x:auto}code{padding:.1rem .25rem}"
    "table{border-collapse:collapse}nav a{margin-right:1rem}"
    "td,th{border-bottom:1px solid #dee2e6;padding:.25rem .7rem;text-align:left}"
)


def page(title: str, body: str, names: list[str]) -> str:
    """Return a complete HTML page with the navigation."""
    links = "".join(f'<a href="{n}.html">{n.replace("-", " ")}</a>' for n in names)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)} - layerbudget</title>'
        f"<style>{STYLE}</style><nav>{links}</nav>{body}\n"
    )


def reference() -> str:
    """Return the reference page: signature and docstring of every public name."""
    parts = ["<h1>Reference</h1>"]
    modules = sorted({f"layerbudget.{m}" for m in layerbudget._PUBLIC.values()} | {"layerbudget.program", "layerbudget.errors"})
    for module_name in modules:
        module = importlib.import_module(module_name)
        parts.append(f"<h2>{module_name}</h2><pre>{html.escape(inspect.getdoc(module) or '')}</pre>")
        for name in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
            item = getattr(module, name)
            if not (inspect.isclass(item) or inspect.isfunction(item)) or not item.__module__.startswith("layerbudget"):
                continue
            if not hasattr(module, "__all__") and item.__module__ != module_name:
                continue
            try:
                signature = str(inspect.signature(item))
            except (TypeError, ValueError):
                signature = "(...)"
            parts.append(f"<h3><code>{name}{html.escape(signature)}</code></h3>")
            parts.append(f"<pre>{html.escape(inspect.getdoc(item) or '')}</pre>")
    return "".join(parts)


def main() -> None:
    """Write every page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE.parent / "site")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(HERE.glob("*.md"), key=lambda p: (p.stem != "index", p.stem))
    names = [p.stem for p in sources] + ["reference"]
    markdown = MarkdownIt("commonmark").enable("table")
    for source in sources:
        text = source.read_text(encoding="utf-8").replace(".md)", ".html)")
        (out / f"{source.stem}.html").write_text(page(source.stem, markdown.render(text), names), encoding="utf-8")
    (out / "reference.html").write_text(page("reference", reference(), names), encoding="utf-8")
    print(f"{len(names)} pages in {out}; open {out / 'index.html'}")


if __name__ == "__main__":
    main()
