"""Pages that are made from the commands are current."""

import os

import pytest
from tests.pages import DOCS, START, commands_list, commands_sentence, options_page, rules_page, with_commands

from layerbudget.cli.commands import VERBS, requests_of_all
from layerbudget.requests import flag_of, positional

MADE = {
    "options.md": lambda _: options_page(),
    "rules.md": lambda _: rules_page(),
    "llms.txt": lambda text: with_commands(text, commands_list()),
    "skill.md": lambda text: with_commands(text, commands_sentence()),
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
    assert all(START in (DOCS / name).read_text(encoding="utf-8") for name in ("llms.txt", "skill.md"))
    assert [line.split("`")[1] for line in commands_list().splitlines()] == list(VERBS)


def test_the_page_of_rules_has_every_rule_of_every_kind_that_has_some():
    from layerbudget.decisions.rules import RULES, rules_of

    page = rules_page()
    assert all(f"| `{name}` |" in page.split(f"## `{kind}`")[1].split("## ")[0] for kind in RULES for name in rules_of(kind))
    assert "| `uniform` | the same rank everywhere, as far as the bounds allow | shapes alone | `method` |" in page
    assert page.count("| the gain of every rank |") == 2 and page.count("| damage by sparsity |") == 2
