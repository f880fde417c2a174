"""The Python that the documentation shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks_of(page: str) -> list[str]:
    """Python fences of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_fine_tuning_page_adapts_a_model_by_its_plan():
    space: dict = {}
    (block,) = blocks_of("docs/fine-tuning.md")
    exec(compile(block, "docs/fine-tuning.md", "exec"), space)
    trained = sum(p.numel() for p in space["peft"].parameters() if p.requires_grad)
    assert trained == space["plan"].budget["spent"] <= space["plan"].budget["limit"]
    assert space["plan"].to_lora_config().rank_pattern and callable(space["fold_scales"])


@pytest.mark.slow
def test_the_six_lines_of_the_readme(capsys):
    (block,) = blocks_of("README.md")
    exec(compile(block, "README.md", "exec"), {})
    sparsity, perplexity = map(float, capsys.readouterr().out.split())
    assert sparsity == pytest.approx(0.5, abs=1e-3) and 5 < perplexity < 30
