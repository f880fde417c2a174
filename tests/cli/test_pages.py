"""Pages that are made from the commands are current."""

import os

import pytest
from tests.pages import DOCS, between, commands_list, commands_sentence, floating_table, options_page, rules_page, types_table

from layerbudget.cli.commands import VERBS, requests_of_all
from layerbudget.requests import flag_of, positional

MADE = {
    "options.md": lambda _: options_page(),
    "rules.md": lambda _: rules_page(),
    "llms.txt": lambda text: between(text, "commands", commands_list()),
    "skill.md": lambda text: between(text, "commands", commands_sentence()),
    "bits.md": lambda text: between(between(text, "floats", floating_table()), "types", types_table()),
}


@pytest.mark.parametrize("name", MADE)
def test_the_pages_are_current(name):
    file = DOCS / name
    held = file.read_text(encoding="utf-8")
    made = MADE[name](held)
    if os.environ.get("LAYERBUDGET_WRITE"):
        file.write_text(made, encoding="utf-8")
        held = made
    assert held == made, "LAYERBUDGET_WRITE=1 pytest tests/cli/test_pages.py writes it anew"


def test_the_page_has_every_option_of_every_command():
    sections = {part.split("`", 1)[0]: part for part in options_page().split("## `layerbudget ")[1:]}
    requests = requests_of_all()
    assert set(sections) == set(requests)
    for command, request in requests.items():
        for name, field in request.options().items():
            if field.metadata["group"] != "options of every command" and not positional(name, field):
                assert f"| `{flag_of(request, name)}`" in sections[command], (command, name)
    assert "| `--sketch` |" in sections["score"] and "| `--alpha-policy` |" in sections["export"]


def test_the_list_has_every_verb():
    assert [line.split("`")[1] for line in commands_list().splitlines()] == list(VERBS)


def test_the_page_of_rules_has_every_rule_of_every_kind_that_has_some():
    from layerbudget.decisions.rules import RULES, rules_of

    page = rules_page()
    assert all(f"| `{name}` |" in page.split(f"## `{kind}`")[1].split("## ")[0] for kind in RULES for name in rules_of(kind))
    assert "| `uniform` | the same rank everywhere, as far as the bounds allow | shapes alone | `method` |" in page
    assert page.count("| the gain of every rank |") == 2 and page.count("| damage by sparsity |") == 2


def test_the_tables_of_formats_have_every_format():
    from layerbudget.compressors.formats import FLOATING, TYPES

    assert [line.split("`")[1] for line in floating_table().splitlines()[2:]] == [f.name for f in FLOATING]
    assert [line.split("`")[1] for line in types_table().splitlines()[2:]] == [f.name for f in TYPES]
    assert (
        "| `nvfp4` | e2m1, groups of 16 with a scale in e4m3, one number over all | 4.5 | multiples of 16 |" in floating_table()
    )
    assert "| `mxfp4` | e2m1, groups of 32 with a power of two in 8 bits (e8m0) | 4.25 | multiples of 32 |" in floating_table()
    assert "| `mxfp8` | e4m3, groups of 32 with a power of two in 8 bits (e8m0) | 8.25 | multiples of 32 |" in floating_table()
    assert (
        "| `fp8` | e4m3, one row with a power of two in bfloat16 | 8 and 16 per row | any | Marlin FP8 | no |"
        in floating_table()
    )
