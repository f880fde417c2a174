"""Every command of README and docs runs as it is written, in order: a page at a time, in one folder with what the page names.

``pytest -s`` prints the commands and their times.
"""

from __future__ import annotations

import shutil
import time

import pytest
from tests import task_rows
from tests.documented import PAGES, lines_of, shrink, words_of
from tests.furniture import furnish

from layerbudget.cli import main

ELSEWHERE = {
    "make demo": "installs the package; tests/demo runs what it runs",
    "make test": "is this suite",
    "python -m paper list": "tests/paper does",
    "python -m paper run NAME -o DIR": "tests/paper does",
    "python examples/water_filling.py --budget 24 --out docs/water.png": "tests/test_examples.py draws it in another folder",
    "pip install '.[bits,cache,peft,eval,report]'": "installs from the network",
    "pip install '.[bits]'": "installs from the network",
    "pip install '.[cache]'": "installs from the network",
    "torchrun --nproc-per-node 4 -m layerbudget score MODEL --estimator rank-gain --by linear --data my.jsonl "
    "-o scores.json": "four processes",
    "torchrun --nproc-per-node 4 -m layerbudget finetune MODEL ranks.json --data my.jsonl -o planned": "four processes",
    "torchrun --nproc-per-node 2 -m layerbudget plan bits MODEL --bits 4 --method gptq --data my.txt --resume parts "
    "-o bits.json": "two processes",
    "accelerate launch -m layerbudget apply MODEL plan.json -o pruned": "needs a configured launcher",
    "accelerate launch --num_processes 4 --mixed_precision no -m layerbudget finetune MODEL ranks.json "
    "--data my.jsonl -o planned": "four processes",
    "accelerate launch --num_processes 4 --use_fsdp --fsdp_version 2 --mixed_precision no -m layerbudget finetune MODEL "
    "ranks.json --data my.jsonl -o planned": "four processes",
    "layerbudget evaluate pruned --perplexity wikitext2 --tasks arc_easy": "wikitext2 and arc_easy come from the hub",
    "layerbudget evaluate pruned --perplexity wikitext2": "wikitext2 comes from the hub",
    "lm_eval --model hf --model_args pretrained=pruned --tasks arc_easy": "arc_easy comes from the hub",
    "vllm serve MODEL --enable-lora --lora-modules mine=adapters/seed-0/adapter --max-lora-rank N": "needs vLLM",
    "vllm serve fitted $(cat fitted/cache.txt)": "needs vLLM",
}  # fmt: skip
BENCHMARK = "python -m benchmarks."  # takes minutes to hours; tests/test_benchmarks.py checks its name and its part
GIVEN = {"docs/serving.md": "README.md"}  # a page that goes on where another one ended
DIR = {
    "README.md": "pruned",
    "docs/serving.md": "pruned",
    "docs/smaller-matrices.md": "smaller",
}  # what a page calls DIR; elsewhere a folder with files of tasks
POSITIONS = dict.fromkeys(
    ("README.md", "docs/cache.md", "docs/memory.md", "docs/skill.md", "docs/start.md"), 32768
)  # of the model, where a page speaks of long contexts
HEADS = {
    "docs/memory.md": 2,
    "docs/skill.md": 2,
}  # of the model, where a page keeps its cache in llama.cpp's blocks of 32 channels
FAST = ("README.md", "docs/research.md", "docs/robustness.md")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Folders of pages that ran, by page."""
    return {}


def run_page(page, shelf, tmp_path_factory, monkeypatch, capsys) -> list[tuple[str, float]]:
    """Run a page's commands in its folder; their times."""
    place = tmp_path_factory.mktemp("page") / "here"
    before = GIVEN.get(page)
    if before:
        if before not in shelf:
            run_page(before, shelf, tmp_path_factory, monkeypatch, capsys)
        shutil.copytree(shelf[before], place, symlinks=True)
    else:
        place.mkdir()
        furnish(place, positions=POSITIONS.get(page, 64), heads=HEADS.get(page, 4))
        if page in DIR:
            (place / "DIR").symlink_to(DIR[page])
        else:
            (place / "DIR").mkdir()
            task_rows.zero_shot(place / "DIR")
    monkeypatch.chdir(place)
    times = []
    for line in lines_of(page):
        if line in ELSEWHERE or line.startswith(BENCHMARK):
            continue
        started = time.perf_counter()
        try:
            code = main(words_of(line))
        except SystemExit as end:  # --version
            code = end.code
        said = capsys.readouterr()
        assert code == 0, f"{page}: {line}\n{said.err[-2000:]}"
        times.append((line, time.perf_counter() - started))
    shelf[page] = place
    return times


@pytest.mark.parametrize("page", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PAGES if lines_of(p)])
def test_the_commands_of_a_page_run_as_they_are_written(page, shelf, tmp_path_factory, monkeypatch, capsys):
    """In small sizes (``shrink``): short texts, one epoch, and no memory is too large for a plan. Nothing else is changed."""
    undo = shrink()
    try:
        times = run_page(page, shelf, tmp_path_factory, monkeypatch, capsys)
    finally:
        undo()
    with capsys.disabled():
        print(f"\n{page}")
        for line, seconds in times:
            print(f"{seconds:7.1f} s  {line}")


def test_what_is_not_run_is_exactly_what_is_listed():
    """Every line of another program, or of the network, is named with its reason; nothing is named that no page shows."""
    shown = {line for page in PAGES for line in lines_of(page)}
    assert set(ELSEWHERE) <= shown
    assert {line for line in shown if not line.startswith(("layerbudget ", BENCHMARK))} <= set(ELSEWHERE)
    assert sum(line.startswith("layerbudget ") for line in set(ELSEWHERE)) == 2
