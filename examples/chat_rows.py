"""300 rows of chat from the standard library: "write this function", and the function. What people bring, without a download.

python examples/chat_rows.py rows.jsonl
"""

import argparse as a
import ast
import configparser as b
import email.message as c
import http.client as d
import inspect
import itertools
import json
import logging as e
import mailbox as f
import optparse as g
import shutil as h
import statistics as i
import sys
import tarfile as j
import urllib.request as k
import zipfile as m

MODULES = (a, b, c, d, e, f, g, h, i, j, k, m)


def all_rows():
    """Rows of ``messages``, one per documented function of at most 40 lines."""
    for module in MODULES:
        source = inspect.getsource(module)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.end_lineno - node.lineno < 40:
                asked = f"Write {node.name} of {module.__name__}: {ast.get_docstring(node).splitlines()[0]}"
                said = ast.get_source_segment(source, node)
                yield {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def rows(count: int = 300) -> list[dict]:
    """The first ones."""
    return list(itertools.islice(all_rows(), count))


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())
