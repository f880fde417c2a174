"""Sphinx settings. ``make docs`` builds strictly: a broken reference or an unknown role fails."""

from __future__ import annotations

import re

import layerbudget

project, author = "layerbudget", "The layerbudget authors"
release = version = layerbudget.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3
myst_dmath_double_inline = True
autosummary_generate = True
autosummary_ignore_module_all = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_rtype = False
autodoc_mock_imports = ["bitsandbytes"]
templates_path = ["_templates"]
exclude_patterns = ["_build/html", "_build/doctrees", "_templates"]
html_extra_path = ["llms.txt"]
html_theme = "furo"
html_title = "layerbudget"
html_math_renderer = "mathml"
nitpicky = True  # every role must lead somewhere; names of other libraries are not looked up
nitpick_ignore = [  # type variables
    ("py:obj", "layerbudget.registry.T"),
    ("py:obj", "layerbudget.storage.reading.T"),
    ("py:obj", "layerbudget.solvers.steps.Point"),
    ("py:class", "layerbudget.solvers.steps.Point"),
    ("py:class", "types.ProtocolRequest"),  # made from the fields of the protocol
]
nitpick_ignore_regex = [
    ("py:class", r"(None\.|v, ).*"),  # signatures of dict in the words of its own docstrings
    ("py:class", r"layerbudget\.(.+\.)?_\w+"),  # shapes of files, private to the module that reads them
    (
        "py:.*",
        r"(torch|numpy|np|transformers|peft|collections|abc|typing|argparse|safetensors|nn|rich|pathlib|msgspec"
        r"|typing_extensions|threading)(\..*)?",
    ),
]


def visit_math(self, node) -> None:
    """Inline mathematics as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    self.body.append(convert(node.astext()))
    raise_skip()


def visit_math_block(self, node) -> None:
    """Displayed mathematics as MathML."""
    from latex2mathml.converter import convert

    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise_skip()


def raise_skip() -> None:
    """The node is done."""
    from docutils.nodes import SkipNode

    raise SkipNode


def resolve(app, env, node, content):
    """A bare name leads to the one object of this package that is called so, whichever file it is in."""
    from sphinx.util.nodes import make_refnode

    target = node.get("reftarget", "")
    found = {n: o for n, o in env.domains["py"].objects.items() if n.endswith(f".{target}") and not o.aliased}
    homes = [n for n in found if not any(n != m and m.count(".") > n.count(".") for m in found)] or list(found)
    if node.get("refdomain") != "py" or not homes:
        return None
    entry = found[homes[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)


def keep_equations(app, what, name, obj, options, lines) -> None:
    """Indented equations in docstrings are shown as they are written, not as quotations."""
    out, sections = [], re.compile(r"(Args|Returns|Raises|Attributes|Yields|Note|Examples?):$")
    for i, line in enumerate(lines):
        if sections.match(line):
            out += lines[i:]
            break
        before = next((x for x in reversed(lines[:i]) if x.strip()), "")
        opens = line.startswith("    ") and i and not lines[i - 1].strip() and not before.startswith((" ", "-", "*", ".."))
        if opens and not before.endswith("::") and not before[:1].isdigit():
            out += ["::", ""]
        out.append(line)
    lines[:] = out


def setup(app) -> None:
    """Register what is above."""
    app.connect("autodoc-process-docstring", keep_equations, priority=100)
    app.connect("missing-reference", resolve)
    app.add_html_math_renderer("mathml", inline_renderers=(visit_math, None), block_renderers=(visit_math_block, None))
