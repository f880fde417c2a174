"""Shapes by the program against trying every combination, and what a bad budget is told."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layerbudget.decisions.shapes.parts import Part, amount
from layerbudget.decisions.shapes.program import plan_shapes
from layerbudget.errors import InfeasibleBudget, InvalidInput, UnknownUnit
from layerbudget.plan import Plan
from layerbudget.plans.compare import diff_plans
from layerbudget.plans.explain import explain_plan


def make_parts(layers=3, heads=4, channels=5):
    parts = []
    for i in range(layers):
        for kind, units, each in (("heads", heads, 70), ("mlp", channels, 30)):
            parts.append(
                Part(
                    name=f"layers.{i}.{kind}", layer=f"layers.{i}", kind=kind, by="groups" if kind == "heads" else "8 channels",
                    units=units, unit_parameters=each, unit_channels=4 if kind == "heads" else 0,
                    channels=4 * units if kind == "heads" else 0, parameters=each * units, flops=2 * each * units,
                    modules=(f"layers.{i}.{kind}.weight",),
                )
            )  # fmt: skip
    return parts


def make_curves(parts, seed=0):
    """Convex curves measured at every number of units."""
    rng = np.random.default_rng(seed)
    out = {}
    for p in parts:
        steps = np.sort(rng.uniform(0.1, 2.0, p.units - 1))
        out[p.name] = (list(range(1, p.units)), np.cumsum(steps).tolist())
    return out


def best_of_all(parts, curves, need, dropped=()):
    """Least damage over every combination of units."""
    left = [p for p in parts if p.layer not in dropped]
    levels = [[(0, 0.0), *zip(*curves[p.name], strict=True)] for p in left]
    each = [2 * p.unit_parameters for p in left]
    need = need - sum(p.flops for p in parts if p.layer in dropped)
    return min(
        (sum(d for _, d in pick) for pick in itertools.product(*levels)
         if sum(u * c for (u, _), c in zip(pick, each, strict=True)) >= need),
        default=np.inf,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.07, 0.3, 0.55])
def test_whole_units_are_the_best_of_all_combinations(seed, share):
    parts = make_parts(layers=2)
    curves = make_curves(parts, seed)
    plan = plan_shapes(parts, curves, budget=f"{100 * share}% flops", max_removed=1.0)
    target = share * sum(p.flops for p in parts)
    assert plan.budget["limit"] == pytest.approx(target)
    saved = sum(2 * p.unit_parameters * plan.extra["shapes"][p.name]["removed"] for p in parts)
    assert plan.budget["spent"] == saved >= target
    assert plan.extra["predicted"] == pytest.approx(best_of_all(parts, curves, target))
    assert plan.extra["gap"] == pytest.approx(0, abs=1e-9)
    assert plan.certificate["gap"] < 1e-9


def test_layers_go_where_that_is_cheaper_and_only_there():
    parts = make_parts(layers=3)
    curves = make_curves(parts)
    budget = 0.5 * sum(p.flops for p in parts)
    for damage in (0.01, 3.0, 50.0):
        order = [("layers.1", damage), ("layers.0", 2 * damage)]
        plan = plan_shapes(parts, curves, budget=f"{budget} flops", order=order, max_removed=1.0)
        best = [best_of_all(parts, curves, budget, [n for n, _ in order[:d]]) for d in range(3)]
        total = [b + sum(x for _, x in order[:d]) for d, b in enumerate(best)]
        assert plan.extra["predicted"] == pytest.approx(min(total))
        assert plan.extra["dropped"] == [n for n, _ in order[: int(np.argmin(total))]]
        gone = [b for b in plan.blocks if b.name.startswith(tuple(f"{n}." for n in plan.extra["dropped"] or ["none"]))]
        assert all(b.count == b.numel and b.value == 1.0 for b in gone)


def test_even_plans_are_the_best_pair_and_keep_to_what_is_allowed():
    parts = make_parts(layers=3)
    curves = make_curves(parts)
    target = 0.4 * sum(p.flops for p in parts)
    for allowed in (None, {"heads": {2}}):
        plan = plan_shapes(parts, curves, budget="40% flops", even=True, allowed=allowed, max_removed=1.0)
        removed = {k: {s["removed"] for s in plan.extra["shapes"].values() if s["kind"] == k} for k in ("heads", "mlp")}
        assert all(len(v) == 1 for v in removed.values())
        damage = {
            (h, m): sum(([0, *curves[p.name][1]])[h if p.kind == "heads" else m] for p in parts)
            for h in ((0, 1, 2, 3) if allowed is None else (0, 2))
            for m in range(5)
            if 3 * (140 * h + 60 * m) >= target
        }
        assert plan.extra["predicted"] == pytest.approx(min(damage.values()))
        assert (min(removed["heads"]), min(removed["mlp"])) == min(damage, key=damage.get)


@pytest.mark.parametrize("unit", ["flops", "params", "bytes"])
def test_prices_and_the_json_round_trip(unit, tmp_path):
    parts = make_parts()
    one, whole = amount(parts[0], unit, context=0, bytes_per_parameter=4)
    assert (one, whole) == {"flops": (140, 560), "params": (70, 280), "bytes": (280, 1120)}[unit]
    plan = plan_shapes(parts, make_curves(parts), budget=f"20% {unit}", bytes_per_parameter=4.0)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.digest == plan.digest
    assert plan.counts.sum() * {"flops": 2, "params": 1, "bytes": 4}[unit] == plan.budget["spent"]
    assert (
        diff_plans(plan, again)["same"]
        and plan.kind == "structured"
        and "measured decides removed" in explain_plan(plan)["sentences"][0]
    )


def test_attention_scores_make_heads_worth_more_at_long_context():
    parts = make_parts()
    assert amount(parts[0], "flops", context=100) == (140 + 1600, 560 + 6400)
    flat = {p.name: (list(range(1, p.units)), [0.1 * u * p.unit_parameters for u in range(1, p.units)]) for p in parts}

    def heads(context):
        shapes = plan_shapes(parts, flat, budget="30% flops", context=context, max_removed=1.0).extra["shapes"].values()
        return sum(s["removed"] for s in shapes if s["kind"] == "heads")

    assert heads(100) > 0 and plan_shapes(parts, flat, budget="30% flops", context=100, kinds=("heads",)).extra["predicted"] > 0
    mlp = plan_shapes(parts, flat, budget="30% flops", context=100, max_removed=1.0).extra["shapes"]
    assert all(s["removed"] == 0 for s in mlp.values() if s["kind"] == "mlp")


def test_a_budget_that_cannot_be_met_names_the_range_and_the_remedy():
    parts = make_parts()
    curves = make_curves(parts)
    with pytest.raises(InfeasibleBudget, match=r"80.0%.*at most .*53.5%.*0 and 53.5% flops.*raise max_removed") as caught:
        plan_shapes(parts, curves, budget="80% flops", max_removed=0.65)
    assert "depth" in str(caught.value)
    everything = plan_shapes(parts, curves, budget="1380 flops", max_removed=0.65)
    assert everything.budget["spent"] == everything.budget["limit"]
    with pytest.raises(InfeasibleBudget, match="must lie in"):
        plan_shapes(parts, curves, budget="100% flops")
    with pytest.raises(InfeasibleBudget, match="equally in all layers"):
        plan_shapes(parts, curves, budget="60% flops", even=True, allowed={"heads": set()})
    with pytest.raises(UnknownUnit, match="not priced in ranks"):
        plan_shapes(parts, curves, budget="3 ranks")
    with pytest.raises(InvalidInput, match="nothing of kind 'tails'"):
        plan_shapes(parts, curves, budget="3% flops", kinds=("tails",))
    with pytest.raises(InvalidInput, match="max_removed is 1.5"):
        plan_shapes(parts, curves, budget="3% flops", max_removed=1.5)
    with pytest.raises(InvalidInput, match="not finite"):
        plan_shapes(parts, {**curves, "layers.0.mlp": ([1, 2], [0.1, float("nan")])}, budget="3% flops")
    mixed = [*make_parts(2), *make_parts(3, heads=6)[4:]]
    with pytest.raises(InvalidInput, match="differ in their heads"):
        plan_shapes(mixed, make_curves(mixed), budget="10% flops", even=True)
    assert sum(plan_shapes(parts, curves, budget="0% flops").counts) == 0
