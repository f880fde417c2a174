"""The page of every kind of folder: what it says, that nothing leaves it, and in a browser that its slider moves the bars."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest
from tests import zoo
from tests.decisions.formats.test_program import record

from layerbudget.canonical import dumps
from layerbudget.decision import DECISIONS, decision_of
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.expert_pruning.payload import ExpertPruningPayload
from layerbudget.decisions.lora_experts.plan import plan_lora_experts
from layerbudget.decisions.memory.plan import plan_memory
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.decisions.sparsity.payload import SparsityPayload
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.plan import Plan, PlanBlock
from layerbudget.reporting.data import charts_of
from layerbudget.reporting.page import build_page, write_report
from layerbudget.reporting.records import FolderResults, explained, gather, headline_of
from layerbudget.reporting.tables import grid_of
from layerbudget.storage.writing import write_text

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome", "chrome") if shutil.which(b)), None)
DEMO = [
    {"model": "dense", "target": None, "sparsity": 0.0, "perplexity": 3.0, "standard_error": 0.1},
    {"model": "uniform", "target": 0.5, "sparsity": 0.5, "perplexity": 4.0, "standard_error": 0.1, "log_difference": None},
    {"model": "gain, per layer", "target": 0.5, "sparsity": 0.5, "perplexity": 3.9, "standard_error": 0.1,
     "log_difference": -0.03, "log_difference_error": 0.01},
]  # fmt: skip


VERSUS = {"difference": -0.1, "low": -0.2, "high": -0.01, "holm": 0.01}
PLACE = {"rank_low": 1.0, "rank_high": 2.0, "first": 0.9123456789012345}
CONTEST = {
    "kind": "sparsity", "unit": "nats per token", "seeds": [0], "held_out": 9, "versions": {"torch": "2"},
    "sentences": ["At 0.5: better than uniform: owl(own).", "First is owl(own) (in 90% of the resamples)."],
    "settings": {"scores": {"own": "own.csv"}, "rules": ["owl"], "budgets": [0.5, 0.6]},
    "budgets": [
        {"budget": at, "rows": [
            {"name": "owl(own)", "control": "", "mean": 2.0 + at, "versus_uniform": VERSUS, **PLACE},
            {"name": "owl(own, permuted)", "control": "permuted", "mean": 2.2, "versus_uniform": VERSUS, **PLACE},
            {"name": "uniform", "control": "uniform", "mean": 2.1 + at, "versus_uniform": None, **PLACE},
        ]} for at in (0.5, 0.6)
    ],
}  # fmt: skip


def test_the_page_of_a_grid_has_all_its_rows_in_a_table_and_in_the_picture(tmp_path):
    """It said nine plans and drew four, without uniform and controls, and had all rows as one cell of JSON."""
    (tmp_path / "comparison.json").write_text(json.dumps(CONTEST))
    text = build_page(tmp_path)
    names = [row["name"] for row in CONTEST["budgets"][0]["rows"]]
    assert all(f"<td>{name}</td>" in text for name in names) and text.count("<td>uniform</td>") == 2
    drawn = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [i["label"] for i in drawn["paired"]["items"]] == [f"{n} at {at:g}" for at in (0.5, 0.6) for n in names]
    assert "versus_uniform" not in text and "9123456789012345" not in text and "<td>91%</td>" in text


def test_the_title_of_a_grid_says_no_more_than_its_verdict(tmp_path):
    """The first row was the title, though it was level with uniform, or the score was shuffled."""
    own, shuffled, uniform = CONTEST["budgets"][0]["rows"]
    level = {**own, "versus_uniform": {**VERSUS, "holm": 0.4}}
    for rows, end in (([level, uniform], "none is better than uniform"), ([shuffled, own], "a shuffled score is first")):
        record = {**CONTEST, "budgets": [{"budget": 0.5, "rows": rows}]}
        (tmp_path / "comparison.json").write_text(json.dumps(record))
        assert f"<h1>2 plans of sparsity compared: {end}</h1>" in build_page(tmp_path)


def by_rank():
    scores = zoo.scores([3.0, 2.0, 1.0, 4.0])
    curves = [[g / (1 + i) ** 2 for i in range(40)] for g in scores.gain[0]]
    return dataclasses.replace(scores, extra={"increments": [curves]})


def test_the_page_of_a_trained_adapter_says_what_its_plan_says_of_few_rows():
    """Plan and table advised uniform, and the page of what was trained by it was silent."""
    plan = plan_ranks(dataclasses.replace(by_rank(), data={"samples": 40, "length": 8}), mean_rank=4)
    metrics = {"held_out": {"loss": {"value": 2.0, "stderr": None}}}
    tuned = {"metric": "loss", "metrics": metrics, "seeds": [0], "task": "rows", "kind": "ranks", "rule": "by-rank"}
    few, level = "40 scored rows, fewer than 64, do not tell ranks apart: take uniform, or score more rows.", "They are level."
    for against, told in ({}, few), ({"held_out": {"verdict": level}}, level):
        found = FolderResults(folder="x", tuned={**tuned, "against": against}, plans={"plan.json": plan})
        assert headline_of(found)[1].endswith(told)


def walked():
    """A plan that was measured step by step, from uniform on: blocks in the order of the alphabet, not of reading."""
    names = [f"model.layers.{i}.{n}" for i in (0, 1) for n in ("mlp.down_proj", "self_attn.q_proj")]
    values = [[0.5] * 4, [0.4, 0.6, 0.5, 0.5], [0.3, 0.7, 0.4, 0.6]]
    path = [{"step": 0, "divergence": 0.2, "passes": 4.0}, {"step": 1, "divergence": 0.14, "passes": 7.0, "predicted": -0.08},
            {"step": 2, "divergence": 0.1, "passes": 10.0, "predicted": -0.05}]  # fmt: skip
    path = [{**step, "values": row} for step, row in zip(path, values, strict=True)]
    blocks = [PlanBlock(name=n, value=v, count=int(100 * v), numel=100, modules=(n,)) for n, v in zip(names, values[-1])]
    solved = {"status": "binding", "message": "", "multiplier": 1.0, "shadow_price": 1.0, "gap": 0.0, "kkt_residual": 0.0,
              "at_lower": 1, "at_upper": 2, "inert": ["bits"]}  # fmt: skip
    return Plan(
        kind="sparsity", rule="directional", model={"id": "demo"}, blocks=tuple(blocks), hyperparameters={"max_sparsity": 0.95},
        budget={"unit": "parameters", "limit": 200, "spent": 200}, certificate=solved,
        payload=SparsityPayload(path=path, measured=0.1, predicted=0.09, forward_passes=10.0),
    )  # fmt: skip


def kept():
    """Four of eight experts of every layer, with a forecast."""
    blocks = [PlanBlock(name=f"model.layers.{i}.mlp", value=0.5, count=4, numel=64, modules=(f"m{i}",)) for i in (0, 1)]
    rows = [
        {"keep": k, "experts": int(16 * k), "predicted": p, "predicted_error": p / 9, "measured": m, "measured_error": m / 5}
        for k, p, m in ((0.875, 1e-5, 8e-6), (0.5, 4e-3, 8e-3))
    ]
    told = {k: v for k, v in rows[1].items() if k not in ("keep", "experts")}
    curve = [{"keep": r["keep"], "forecast": r["measured"], "values": v} for r, v in zip(rows, ([1.0, 0.75], [0.5, 0.5]))]
    payload = ExpertPruningPayload(
        kept={},
        curve=curve,
        measured_here=0.007,
        crossed=True,
        forecast=rows,
        forward_passes=32.0,
        beside=None,
        **told,
    )
    return Plan(
        kind="expert-pruning", rule="directional", model={"id": "a/moe"}, blocks=tuple(blocks), payload=payload,
        budget={"unit": "experts", "limit": 8, "spent": 8},
    )  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    """One folder of each kind."""
    for name in ("demo", "scores", "ranks", "experts", "pruned", "tuned", "other", "compared", "fit", "walked", "kept"):
        (tmp_path / name).mkdir()
    scores = zoo.scores([1.0, 2.0, 3.0])
    scores.save(tmp_path / "demo" / "scores.json")
    plan_sparsity(scores, sparsity=0.5).save(tmp_path / "demo" / "plan.json")
    write_text(tmp_path / "demo" / "result.json", dumps({"rows": DEMO, "verdict": "Verdict: better by 3 %.", "seconds": 3.0}))
    scores.save(tmp_path / "scores" / "scores.json")
    by_rank().save(tmp_path / "ranks" / "scores.json")
    plan_ranks(by_rank(), mean_rank=8).save(tmp_path / "ranks" / "plan.json")
    plan_lora_experts(scores, total=9).save(tmp_path / "experts" / "plan.json")
    fit = plan_memory(zoo.fit_scores(), memory="994 KB", context=64)
    fit.save(tmp_path / "fit" / "plan.json")
    walked().save(tmp_path / "walked" / "plan.json")
    scores.save(tmp_path / "walked" / "scores.json")  # of other blocks than the plan's
    kept().save(tmp_path / "kept" / "plan.json")
    seeds = {"value": 2.1, "stderr": 0.01, "by_seed": [2.0, 2.2]}
    test = {"difference": -0.1, "low": -0.3, "high": 0.1, "sentence": "a is level with b"}
    tuned = {
        "task": "rows.jsonl", "metric": "loss", "kind": "ranks", "rule": "by-rank", "trained_parameters": 100, "seeds": [0, 1],
        "metrics": {"held_out": {"loss": seeds, "loss_before": {**seeds, "value": 2.5}}},
        "identity": {"versions": {"torch": "2"}},
        "against": {"held_out": {"verdict": "Over 2 trainings each: a", "seeds": test, "samples": test}},
    }  # fmt: skip
    write_text(tmp_path / "tuned" / "result.json", dumps(tuned))
    write_text(tmp_path / "compared" / "comparison.json", dumps(CONTEST))
    write_text(tmp_path / "other" / "table.json", dumps({"sentence": "x", "rows": [{"name": "a<b", "value": 1.5}]}))
    return tmp_path


@pytest.fixture
def pruned(saved_model, tmp_path):
    from layerbudget.cli import main

    zoo.plan(zoo.speaker("llama")).save(tmp_path / "p.json")
    out = tmp_path / "made"
    assert main(["apply", str(saved_model("llama")), str(tmp_path / "p.json"), "--method", "magnitude", "-o", str(out)]) == 0
    return out


def test_every_kind_of_folder_has_its_headline(folders, pruned):
    said = {
        "demo": ("50% sparsity for", "Verdict: better by 3 %.", "The plan: made from Python", 'data-chart="paired"'),
        "scores": ("can still gain", "The scores: made from Python"),
        "ranks": ("LoRA ranks", "take uniform", "No command is recorded"),
        "experts": ("9 LoRA experts", "The plan in words"),
        "fit": ("994 KB at 64 tokens x 1 for", 'data-chart="memory"', "Best plans of other budgets", "id='budget'",
                "memory, MiB"),
        "walked": ("50% sparsity for demo", "50 % less than uniform", "step, from uniform", "<b>0.3 – 0.7</b>",
                   "1 blocks fell and 2 rose as far as one step may", 'data-chart="forecast"'),
        "kept": ("8 experts stay in moe", "<b>0.5</b>", "On other text of this kind expect 0.008", 'data-chart="forecast"'),
        "tuned": ("rows.jsonl: ranks, rule by-rank", "Before: 2.5000", "is level with", "loss before"),
        "compared": ("6 plans of sparsity compared: owl(own) is better than uniform at 0.6", 'data-chart="paired"',
                     "The comparison: made"),
        "other": ("Results of other", "a&lt;b"),
    }  # fmt: skip
    for name, parts in said.items():
        text = build_page(folders / name)
        assert all(part in text for part in parts), (name, [p for p in parts if p not in text])
        assert not re.search(r"https?://|src=\"(?!data:)|@import|url\(", text), "the page must be self-contained"
    text = build_page(pruned)
    assert "Recounted:" in text and "layerbudget apply" in text and "What you have: unstructured zeros" in text


def test_a_receipt_of_another_plan_is_not_the_plans_own(folders, pruned):
    """The headline had its figures."""
    assert gather(pruned).receipt is not None
    plan = Plan.load(pruned / "plan.json")
    dataclasses.replace(plan, rule="another").save(pruned / "plan.json", overwrite=True)
    found = gather(pruned)
    assert found.receipt is None and "receipt.json" in found.others
    assert "Recounted" not in build_page(pruned).split("All numbers")[0]


def test_a_page_of_bits_speaks_of_costs_and_says_one_command_once(tmp_path):
    scores = dataclasses.replace(record(), made_by="layerbudget plan bits demo --save-scores scores.json --out plan.json")
    scores.save(tmp_path / "scores.json")
    plan = plan_bits(scores, bits=4.0)
    dataclasses.replace(plan, made_by=scores.made_by).save(tmp_path / "plan.json")
    text = build_page(tmp_path)
    assert "What the smallest format costs each block" in text and "can still gain" not in text
    assert text.count("--save-scores scores.json") == 1


def test_the_grid_is_the_planners_own(folders):
    scores = zoo.scores([1.0, 2.0, 3.0])
    sparsity = DECISIONS.find("sparsity")
    grid = sparsity.charts(None, scores)["grid"]
    for budget in (0.3, 0.6):
        plan = plan_sparsity(scores, sparsity=budget)
        assert grid["plans"][grid["budgets"].index(budget)]["values"] == pytest.approx(plan.values, rel=1e-3)
        assert grid["budgets"][sparsity.charts(plan, scores)["grid"]["start"]] == budget
    ranks = DECISIONS.find("ranks").charts(None, by_rank())["grid"]
    assert max(ranks["budgets"]) < 64, "budgets beyond what was measured have no place"


def test_formats_that_hold_the_weights_exactly_lose_nothing():
    """What the arithmetic leaves of their damage, 3e-18 once, stood beside the bar."""
    plan = plan_memory(zoo.fit_scores(), memory="994 KB", context=64)
    damages = [1e-3, 2e-6, 2.96e-18]
    curve = [{**row, "predicted": d} for row, d in zip(plan.payload.curve, damages, strict=False)]
    points = decision_of(plan).charts(zoo.saying(plan, curve=curve), None)["memory"]["points"]
    assert [p["predicted"] for p in points if not p["own"]] == [1e-3, 2e-6, 0.0]


def test_the_slider_of_a_fit_has_the_best_plan_of_every_memory(folders):
    """Solved again at each memory, and the plan's own bytes by part."""
    plan = Plan.load(folders / "fit" / "plan.json")
    data = charts_of(gather(folders / "fit"))
    assert len(data["grid"]["budgets"]) == 8 and len(data["memory"]["points"]) == 9
    for row, shown in zip(plan.payload.curve, data["grid"]["plans"], strict=True):
        again = plan_memory(zoo.fit_scores(), memory=f"{row['memory']} bytes", context=64)
        assert shown["values"] == pytest.approx(again.values, rel=1e-3) and row["predicted"] == again.payload.predicted
    own = next(p for p in data["memory"]["points"] if p["own"])
    assert sum(own["parts"]) * 2**20 == pytest.approx(plan.budget["spent"]) and data["memory"]["names"][:2] == [
        "weights",
        "cache",
    ]


def test_the_slider_of_bits_has_the_best_plan_of_every_size(folders):
    """Solved again at each, from the smallest formats to sixteen bits; a large model keeps none."""
    plan_bits(zoo.fit_scores(), bits=5).save(folders / "bits.json")
    (folders / "bits").mkdir()
    (folders / "bits.json").rename(folders / "bits" / "plan.json")
    grid = charts_of(gather(folders / "bits"))["grid"]
    assert grid["own"] == pytest.approx(Plan.load(folders / "bits" / "plan.json").payload.bits, rel=1e-3)
    assert len(grid["budgets"]) == 8 and grid["budgets"][-1] == 16 and set(grid["plans"][-1]["values"]) == {16.0}
    for row, shown in zip(Plan.load(folders / "bits" / "plan.json").payload.curve, grid["plans"], strict=True):
        again = plan_bits(zoo.fit_scores(), bits=row["bits"])
        assert shown["values"] == pytest.approx(again.values, rel=1e-3)
        assert shown["told"] == f"{again.payload.predicted:.3g} nats per token predicted"
    assert "id='budget'" in build_page(folders / "bits")


def test_the_slider_of_experts_and_of_shapes(folders):
    """Experts: a plan for every share of the forecast. Shapes: the steps, without the words on uniform."""
    grid = charts_of(gather(folders / "kept"))["grid"]
    assert grid["budgets"] == [87.5, 50] and grid["start"] == 1 and grid["own"] == 50
    assert grid["plans"][0]["values"] == [1.0, 0.75] and "0.008 nats per token, measured with" in grid["plans"][1]["told"]
    shapes = zoo.saying(walked(), "shapes", shapes={}, dropped=[])
    grid = decision_of(shapes).charts(shapes, None)["grid"]
    assert grid["budgets"] == [1, 2, 3] and [p["told"] for p in grid["plans"]] == [
        f"{v} nats per token" for v in (0.2, 0.14, 0.1)
    ]
    shares = ({"share": 0.5, "predicted": 0.1}, {"share": 1.0}, {})  # the first steps of shapes take a part of the budget each
    path = [{**step, **told} for step, told in zip(walked().payload.path, shares)]
    shapes = zoo.saying(shapes, path=path)
    points = decision_of(shapes).charts(shapes, None)["forecast"]["points"]
    assert [p["label"] for p in points] == ["step 1", "step 2", "step 3"]


def test_the_slider_of_a_measured_plan_goes_from_uniform_to_the_plan(folders):
    """One place for each step, with the damage there; predicted and measured beside each other, never one point alone."""
    data, plan = charts_of(gather(folders / "walked")), walked()
    grid, shown = data["grid"], data["forecast"]["points"]
    assert grid["budgets"] == [0, 1, 2] and grid["start"] == 2 and grid["plans"][-1]["values"] == list(plan.values)
    assert grid["plans"][1]["told"] == "0.14 nats per token, 30 % less than uniform"
    assert [p["measured"] for p in shown] == [0.2, 0.14, 0.1] and shown[0]["predicted"] is None
    assert [p["predicted"] for p in shown[1:]] == pytest.approx([0.12, 0.09])
    assert "bits" not in " ".join(explained(plan)) and "floor" not in " ".join(explained(plan))
    rows = charts_of(gather(folders / "kept"))["forecast"]["points"]
    assert [(r["label"], r["predicted"], r["measured"]) for r in rows] == [
        ("87.5 % stay", 1e-5, 8e-6),
        ("50 % stay", 4e-3, 8e-3),
    ]
    bare = zoo.saying(plan, path=plan.payload.path[:1])
    bare.save(folders / "walked" / "plan.json", overwrite=True)
    assert charts_of(gather(folders / "walked"))["forecast"] is None


def test_blocks_lie_by_layer_and_matrix(mistral):
    grid = grid_of(zoo.linears(mistral, 2).blocks)
    layers = len(mistral.model.layers)
    assert grid.rows[:layers] == tuple(map(str, range(layers))) and "q_proj" in grid.columns and not grid.whole
    assert grid_of(zoo.plan(mistral).blocks).whole


PROBE = """
<script>
const trouble = [];
addEventListener('error', e => trouble.push(e.message));
addEventListener('securitypolicyviolation', e => trouble.push('policy ' + e.blockedURI));
const errors = console.error; console.error = (...a) => { trouble.push(a.join(' ')); errors(...a); };
</script>"""
ACT = """
<script>
{
const heights = () => [...document.querySelectorAll('figure[data-chart=water] .bar')].map(b => b.getAttribute('height')).join();
const before = heights(), slider = document.getElementById('budget');
const found = {bars: before.split(',').length, wide: document.documentElement.scrollWidth <= innerWidth};
if (slider) slider.value = +slider.value < +slider.max ? slider.max : slider.min;
if (slider) { slider.dispatchEvent(new Event('input')); found.moved = heights() !== before; }
if (slider) { document.getElementById('own').click(); found.back = heights() === before; }
const first = document.querySelector('.cell');
if (first) {
  first.focus();
  first.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}));
  found.walked = document.activeElement.dataset.r === '1' && document.querySelector('.tip').textContent.includes('parameters');
}
found.cells = document.querySelectorAll('.cell').length;
found.svg = document.querySelectorAll('figure svg').length;
const bars = [...document.querySelectorAll('figure[data-chart=water] .bar')];
found.order = bars.map(b => b.textContent.split(':')[0]);
found.rings = document.querySelectorAll('circle.predicted').length;
found.dots = document.querySelectorAll('circle.measured').length;
found.trouble = trouble;
const out = document.createElement('pre'); out.id = 'found'; out.textContent = JSON.stringify(found); document.body.append(out);
}
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no headless browser is installed (Debian: chromium)")
@pytest.mark.parametrize("width", [1200, pytest.param(420, marks=pytest.mark.slow)])
def test_in_a_browser_the_slider_moves_the_bars_and_nothing_is_reported(folders, width):
    for name in ("demo", "ranks", "tuned", "scores", "fit", "walked", "kept"):
        page = write_report(folders / name, folders / f"{name}.html", overwrite=True)
        text = page.read_text()
        page.write_text(text.replace("<body>", "<body>" + PROBE) + ACT)
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
        match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
        assert match, done.stderr[-2000:]
        found = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        assert found["trouble"] == [] and found["wide"], (name, found)
        assert found["svg"] >= 1
        assert name != "walked" or found["order"][:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]
        assert name != "walked" or found["svg"] == 3
        assert name not in ("walked", "kept") or found["rings"] == 2 and found["dots"] == (3 if name == "walked" else 2)
        if name in ("demo", "ranks", "fit", "walked"):
            assert found["moved"] and found["back"] and found["walked"] and found["cells"] >= 3, (name, found)
