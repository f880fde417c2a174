"""Both programs against closed forms, a plain bisection, CVXPY + Clarabel, and their own statuses."""

import math
import pickle
import re

import numpy as np
import pytest
import torch
from tests.instances import dense_bisection

from layerbudget.errors import (
    DegenerateScores,
    InfeasibleBudget,
    InvalidCost,
    InvalidInput,
    LayerbudgetError,
    LengthMismatch,
    NegativeValue,
    NotFinite,
)
from layerbudget.solvers import (
    CalibratedPenalty,
    allocate,
    allocate_increments,
    choose,
    few_levels,
    round_capacity,
    round_parameters,
    solve_joint,
    sparsify,
    transfer_allocation,
    transfer_sparsity,
)
from layerbudget.solvers.dual import piecewise_root
from layerbudget.solvers.published import layerif_experts
from layerbudget.solvers.utilities import UTILITIES

MISTRAL_N, MISTRAL_C, MISTRAL_BASE = 218_103_808.0, 1_310_720.0, 13_958_643_712


def test_water_level_by_hand():
    s = allocate([4.0, 2.0, 1.0], 1.0, 4.0, spend="exactly")
    assert s.value.tolist() == [3.0, 1.0, 0.0] and s.status == "binding" and s.inert == ("alpha", "gamma")
    assert s.multiplier_interval == (s.multiplier, s.multiplier)
    assert s.certificate()["at_lower"] == 1 and s.certificate()["at_upper"] == 0


@pytest.mark.parametrize("k", [3, 40, 500])
def test_plain_bisection_agrees(k, rng):
    w, c, u = rng.random(k) + 0.01, rng.random(k) + 0.1, rng.random(k) * 9
    budget = 0.4 * (c @ u)
    t = dense_bisection(lambda t: c @ np.clip(t * w / c - 1, 0, u), budget, 1e-6, 1e6)
    assert np.allclose(allocate(w, c, budget, upper=u, spend="exactly").value, np.clip(t * w / c - 1, 0, u), atol=1e-12)
    n, m = c * 100, u / 9
    t = dense_bisection(lambda t: n @ np.clip(t * n / (2 * w), 0, m), 0.3 * (n @ m), 1e-9, 1e6)
    s = sparsify(w, n, 0.3 * (n @ m), max_sparsity=m, spend="exactly")
    assert np.allclose(s.value, np.clip(t * n / (2 * w), 0, m), atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_clarabel_agrees(seed):
    cp = pytest.importorskip("cvxpy")
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 40))
    q, c = rng.random(k) + 0.05, rng.random(k) + 0.2
    upper, budget = 1 + rng.random(k) * 5, (0.1 + 0.6 * rng.random()) * 3 * c.sum()
    rule = ("exactly", "at_most")[seed % 2]
    e = cp.Variable(k)
    constraint = c @ e == budget if rule == "exactly" else c @ e <= budget
    budget = min(budget, 0.99 * float(c @ upper))
    constraint = c @ e == budget if rule == "exactly" else c @ e <= budget
    a, g = 0.5 / c.mean(), 0.9 / q.mean()
    problem = cp.Problem(cp.Minimize(a * (c @ e) - g * (q @ cp.log1p(e))), [constraint, e >= 0, e <= upper])
    problem.solve(solver=cp.CLARABEL)
    s = allocate(q, c, budget, upper=upper, spend=rule)
    assert s.primal == pytest.approx(problem.value, rel=1e-6, abs=1e-6) and s.primal <= problem.value + 1e-6
    assert np.allclose(s.value, e.value, atol=2e-3)
    r = cp.Variable(k)
    target = 0.4 * c.sum()
    problem = cp.Problem(cp.Minimize(2 * (q / q.mean()) @ cp.square(r)), [c @ r == target, r >= 0, r <= 0.6])
    problem.solve(solver=cp.CLARABEL)
    s = sparsify(q, c, target, max_sparsity=0.6, bits=0.0, spend="exactly")
    assert s.primal == pytest.approx(problem.value, rel=1e-6) and np.allclose(s.value, r.value, atol=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_clarabel_agrees_on_the_joint_program(seed):
    cp = pytest.importorskip("cvxpy")
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 20))
    q, a = rng.random(k) + 0.05, rng.random(k) + 0.2
    s, budget = a * 8, float(rng.normal() * a.sum())
    e, r = cp.Variable(k), cp.Variable(k)
    w = q / q.mean()
    loss = 0.5 / a.mean() * (a @ e) - 0.9 * (w @ cp.log1p(e)) + 2 * (w @ cp.square(r))
    problem = cp.Problem(cp.Minimize(loss), [a @ e - s @ r <= budget, e >= 0, e <= 9, r >= 0, r <= 0.7])
    problem.solve(solver=cp.CLARABEL)
    found = solve_joint(q, a, s, budget, upper=9.0, max_sparsity=0.7)
    assert found.primal == pytest.approx(problem.value, rel=1e-6, abs=1e-6)
    assert np.allclose(found.capacity, e.value, atol=3e-3) and np.allclose(found.sparsity, r.value, atol=1e-3)


def test_literal_constants_of_the_paper_are_degenerate_and_say_so(rng):
    q = rng.random(32)
    q /= q.sum()
    s = allocate(q, MISTRAL_C, 0.0276 * MISTRAL_BASE, units="literal")
    assert s.status == "degenerate" and not s.value.any() and "spend='exactly'" in s.message
    assert set(s.inert) >= {"alpha", "gamma", "weights"}
    s = sparsify(q, MISTRAL_N, sparsity=0.5, max_sparsity=0.51, units="literal")
    assert s.status == "degenerate" and (s.value == 0.51).all() and "spend='exactly'" in s.message
    assert s.spent / (32 * MISTRAL_N) == pytest.approx(0.51)
    s = sparsify(q, MISTRAL_N, sparsity=0.5, max_sparsity=0.51, units="literal", spend="exactly")
    assert s.status == "binding" and s.spent / (32 * MISTRAL_N) == pytest.approx(0.5) and s.multiplier < 0


def test_statuses(rng):
    q = rng.random(6) + 0.5
    assert allocate(q, 1.0, 1000.0).status == "slack" and allocate(q, 1.0, 1000.0).multiplier == 0
    assert allocate(q, 1.0, 1000.0, upper=0.01).status == "saturated"
    assert allocate(q, 1.0, 12.0, upper=2.0, spend="exactly").status == "saturated"
    assert sparsify(q, 10.0, sparsity=0.6, max_sparsity=0.6).status == "saturated"
    slack = sparsify(q, 10.0, sparsity=0.01, max_sparsity=1.0, bits=1.0)
    assert slack.status == "slack" and slack.slack > 0 and "spend='exactly'" in slack.message
    for s in (slack, allocate(q, 1.0, 1000.0), allocate(q, 1.0, 9.0, spend="exactly")):
        assert s.message and s.certificate()["status"] == s.status


def test_plateau_returns_all_multipliers():
    s = allocate([100.0, 1e-6], 1.0, 2.0, upper=[2.0, 1.0], spend="exactly")
    low, high = s.multiplier_interval
    assert s.value.tolist() == [2.0, 0.0] and high > 100 * low + 1 and low < s.multiplier < high
    assert s.gap <= 1e-12 and s.kkt_residual <= 1e-12


@pytest.mark.parametrize("k", [1, 31, 49, 5000])
def test_six_hundred_decades(k, rng):
    q = 10.0 ** rng.uniform(-300, 300, k)
    s = allocate(q, rng.random(k) * 1e9 + 1e6, 4e9 * k, upper=9.0)
    assert s.gap <= 1e-9 and s.kkt_residual <= 1e-9
    full = allocate(q, 1.0, 8.5 * k, upper=9.0, spend="exactly")
    assert full.spent == pytest.approx(8.5 * k) and full.kkt_residual <= 1e-9
    assert (np.diff(full.value[np.argsort(q)]) >= -1e-12).all()


def test_zero_weights_get_nothing_until_everybody_else_is_full():
    assert allocate([1.0, 0.0], 1.0, 3.0, spend="exactly", upper=[5.0, 5.0]).value == pytest.approx([3.0, 0.0], abs=1e-12)
    assert allocate([1.0, 0.0], 1.0, 7.0, spend="exactly", upper=[5.0, 5.0]).value == pytest.approx([5.0, 2.0])
    assert sparsify([1.0, 0.0], 1.0, 0.5, max_sparsity=0.9, spend="exactly").value == pytest.approx([0.0, 0.5], abs=1e-12)


def test_base_and_floor_differ():
    based = allocate([1.0, 1.0], 1.0, 6.0, base=1.0, spend="exactly")
    floored = allocate([5.0, 1.0], 1.0, 6.0, lower=1.0, spend="exactly")
    assert based.value == pytest.approx([3.0, 3.0]) and floored.value == pytest.approx([5.0, 1.0])
    assert allocate([5.0, 1.0], 1.0, 8.0, base=1.0, spend="exactly").value == pytest.approx([20 / 3, 4 / 3])


class Own:
    """An object with the methods of a function, and no others."""

    def __init__(self, value, derivative, inverse, concave=True):
        self.value, self.derivative, self.inverse, self.concave = value, derivative, inverse, concave


def test_own_functions_equal_the_built_in_ones(rng):
    q, c = rng.random(9) + 0.1, rng.random(9) + 0.5
    mine = Own(np.log1p, lambda x: 1 / (1 + x), lambda p: 1 / p - 1)
    a, b = (allocate(q, c, 20.0, utility=f, upper=8.0, spend="exactly") for f in (mine, "log"))
    assert np.allclose(a.value, b.value, rtol=1e-12) and a.primal == pytest.approx(b.primal)
    mine = Own(lambda x: x * x, lambda x: 2 * x, lambda p: p / 2, concave=False)
    a, b = (sparsify(q, c, sparsity=0.4, penalty=f, spend="exactly") for f in (mine, "quadratic"))
    assert np.allclose(a.value, b.value, rtol=1e-12)
    with pytest.raises(InvalidInput, match="curvature"):
        allocate(q, c, 20.0, utility=mine)


@pytest.mark.parametrize("function", [UTILITIES["log"](), *map(UTILITIES["power"], (0.5, -2.0))])
def test_utilities_are_consistent(function):
    x = np.linspace(0, 6, 13)
    step = 1e-6
    assert np.allclose((function.value(x + step) - function.value(x)) / step, function.derivative(x), rtol=1e-4)
    assert np.allclose(function.inverse(function.derivative(x)), x, atol=1e-9) and function.value(np.zeros(1)) == 0


def test_calibrated_curves_are_followed_and_capped():
    curves = CalibratedPenalty([0.2, 0.4, 0.6], [[1.0, 2.0, 3.0], [0.1, 0.9, 9.0]])
    s = sparsify([1.0, 1.0], 100.0, 70, max_sparsity=1.0, penalty=curves, spend="exactly")
    assert s.value == pytest.approx([0.3, 0.4]) and s.kkt_residual == 0
    with pytest.raises(InfeasibleBudget):
        sparsify([1.0, 1.0], 100.0, 121, max_sparsity=1.0, penalty=curves)
    with pytest.raises(InfeasibleBudget, match=r"^1,695,740 parameters \(0.8479 of all\) .* allow 1,600,000 "):
        sparsify([1.0, 1.0], 1e6, 1_695_740, max_sparsity=0.8)
    with pytest.raises(LengthMismatch):
        sparsify([1.0], 100.0, 1, penalty=curves)
    bumpy = CalibratedPenalty([0.2, 0.4], [[3.0, 4.0]])
    assert bumpy.change.tolist() == [1.0] and bumpy.slopes.tolist() == [[10.0]]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: allocate([1, np.nan], 1, 1), NotFinite),
        (lambda: allocate([1, np.inf], 1, 1), NotFinite),
        (lambda: allocate([1, -1], 1, 1), NegativeValue),
        (lambda: allocate([0, 0], 1, 1), DegenerateScores),
        (lambda: allocate([], 1, 1), LengthMismatch),
        (lambda: allocate([1, 1], [1, 1, 1], 1), LengthMismatch),
        (lambda: allocate([1, 1], [1, 0], 1), InvalidCost),
        (lambda: allocate([1, 1], [1, -2], 1), InvalidCost),
        (lambda: allocate([1, 1], [1, np.nan], 1), NotFinite),
        (lambda: allocate([1, 1], 1, np.nan), NotFinite),
        (lambda: allocate([1, 1], 1, 1, base=1), InfeasibleBudget),
        (lambda: allocate([1, 1], 1, 9, upper=2, spend="exactly"), InfeasibleBudget),
        (lambda: allocate([1, 1], 1, 9, lower=3, upper=2), InfeasibleBudget),
        (lambda: allocate([1, 1], 1, 1, spend="maybe"), InvalidInput),
        (lambda: sparsify([1, 1], [5, 0], 1), InvalidCost),
        (lambda: sparsify([1, 1], 5, sparsity=0.9), InfeasibleBudget),
        (lambda: sparsify([1, 1], 5, sparsity=0.1, min_sparsity=0.3, spend="exactly"), InfeasibleBudget),
        (lambda: sparsify([1, 1], 5), InvalidInput),
        (lambda: sparsify([1, 1], 5, 1, max_sparsity=1.5), InvalidInput),
        (lambda: sparsify([1, 1], 5, 1, penalty="cubic"), InvalidInput),
        (lambda: solve_joint([1, 1], 1, 1, -9.0), InfeasibleBudget),
        (lambda: solve_joint([1, 1], 1, 1, np.inf), NotFinite),
        (lambda: solve_joint([1, 1], 1, 1, 1.0, penalty=CalibratedPenalty([0.5], [[1.0], [2.0]])), InvalidInput),
    ],
)
def test_bad_input_is_named_with_range_and_remedy(call, kind):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind and isinstance(caught.value, ValueError)
    assert caught.value.what and caught.value.feasible and caught.value.remedy


def test_solutions_are_frozen_and_survive_pickling():
    s = allocate([2.0, 1.0], 1.0, 3.0, spend="exactly")
    with pytest.raises(AttributeError):
        s.multiplier = 0.0
    with pytest.raises(ValueError):
        s.value[0] = 9.0
    t = pickle.loads(pickle.dumps(s))
    assert t.value.tolist() == s.value.tolist() and t.certificate() == s.certificate()


def test_forty_copies_have_the_same_root(rng):
    for _ in range(50):
        k = 48
        a, b = rng.random(k) ** 6 + 1e-9, -rng.random(k)
        low, high = np.zeros(k), rng.random(k) * 5
        target = rng.random() * high.sum()
        t = piecewise_root(a, b, low, high, target)[0]
        doubled = piecewise_root(*(np.tile(v, 40) for v in (a, b, low, high)), target * 40)[0]
        assert doubled == pytest.approx(t, rel=1e-12)


def test_weights_of_four_hundred_decades_are_solved(rng):
    for k in (60, 300, 4000):
        q = 10.0 ** rng.uniform(-200, 200, k)
        s = allocate(q, rng.random(k) + 0.1, 3.0 * k * rng.random(), upper=rng.random(k) * 9 + 4, spend="exactly")
        assert s.gap <= 1e-9 and s.kkt_residual <= 1e-9 and abs(s.slack) <= 1e-12 * s.budget


def _stated(kind, solution, w, c, constants, units):
    """The objective as notation.md states it, and its utility or penalty alone."""
    price, scale = constants
    if units == "relative":
        price, scale = price / np.mean(c), scale / np.mean(w)
    x = solution.value
    if kind == "capacity":
        earned = scale * (w * np.log1p(x)).sum()
        return price * (c * x).sum() - earned, earned
    hurt = scale * (w * x**2).sum()
    return price * (c * (1 - x)).sum() + hurt, hurt


@pytest.mark.parametrize("units", ["relative", "literal"])
@pytest.mark.parametrize(
    ("kind", "budget", "more", "status"),
    [
        ("capacity", 6.0, {"spend": "exactly"}, "binding"),
        ("capacity", 6.0, {"alpha": 0.01}, "binding"),
        ("capacity", 60.0, {}, None),  # slack, or nobody earns anything
        ("capacity", 60.0, {"upper": 1.0, "alpha": 0.01}, "saturated"),
        ("sparsity", 2.0, {"spend": "exactly"}, "binding"),
        ("sparsity", 2.0, {"bits": 0.01}, "binding"),
        ("sparsity", 0.5, {"bits": 0.01, "min_sparsity": 0.2}, "slack"),
        ("sparsity", 0.5, {}, None),
    ],
)
def test_multiplier_and_shadow_price_are_the_slopes_that_the_notation_states(kind, budget, more, status, units):
    w, c = np.array([0.4, 0.3, 0.2, 0.1]), np.array([1.0, 2.0, 1.0, 1.0])
    call = {"capacity": allocate, "sparsity": sparsify}[kind]
    first, second = ("alpha", 0.5), ("gamma", 0.9)
    if kind == "sparsity":
        first, second = ("bits", 16.0), ("eta", 2.0)
    constants = more.get(first[0], first[1]), more.get(*second)
    step = 1e-5
    found, up, down = (call(w, c, budget + h, units=units, **more) for h in (0.0, step, -step))
    assert status is None or found.status == status
    assert found.gap < 1e-12 and found.kkt_residual < 1e-9
    (objective, alone), (objective_down, alone_down) = (_stated(kind, s, w, c, constants, units) for s in (up, down))
    sign = -1 if kind == "capacity" else 1
    assert (objective - objective_down) / (2 * step) == pytest.approx(sign * found.multiplier, abs=1e-6)
    assert (alone - alone_down) / (2 * step) == pytest.approx(found.shadow_price, abs=1e-6)
    assert (found.status == "binding") == (found.shadow_price > 0)


def test_no_cap_is_proposed_that_is_refused():
    for share, said in ((0.8, "Raise max_sparsity to at least 0.8"), (1.5, r"Prune less\.$")):
        with pytest.raises(InfeasibleBudget, match=said) as found:
            sparsify([1.0, 2.0], 1.0, sparsity=share)
        assert share < 1 or "Raise" not in str(found.value)


@pytest.mark.parametrize(("beyond", "spend"), [(0.0, "at_most"), (0.0, "exactly"), (1e9, "exactly")])
def test_an_end_of_a_range_that_a_refusal_names_is_feasible(beyond, spend):
    cost, bounds = [1234567.8, 3333333.3], {"lower": [1 / 3, 0.1], "upper": [7 / 3, 0.7], "spend": spend}
    for call, total in (
        (lambda total: allocate([1, 1], cost, total, **bounds), beyond),
        (lambda total: solve_joint([1, 1], cost, 1e7 / 3, total, max_sparsity=0.6, **bounds), beyond or -1e9),
        (lambda total: round_capacity(allocate([1, 1], cost, total, lower=bounds["lower"]), multiple=3), 2e6),
    ):
        with pytest.raises(InfeasibleBudget) as refused:
            call(total)
        for end in re.findall(r"-?\d[\d.]*\d", refused.value.feasible):
            call(float(end))


@pytest.mark.parametrize(("wanted", "spend"), [(0.9, "exactly"), (0.9, "at_least"), (0.05, "exactly")])
def test_a_sparsity_that_a_refusal_names_is_feasible(wanted, spend):
    size, bounds = [1234567, 3333333], {"min_sparsity": [1 / 3, 1 / 7], "max_sparsity": [2 / 3, 6 / 7], "spend": spend}
    with pytest.raises(InfeasibleBudget) as refused:
        sparsify([1, 1], size, sparsity=wanted, **bounds)
    for end in re.findall(r"0\.\d+", refused.value.feasible):
        sparsify([1, 1], size, sparsity=float(end), **bounds)
    bound = float(re.findall(r"(?:at least|min_sparsity to) (0\.\d+)", str(refused.value))[0])
    name = "max_sparsity" if wanted > 0.5 else "min_sparsity"
    sparsify([1, 1], size, sparsity=wanted, **{**bounds, name: bound})


def test_the_cap_that_a_refusal_names_counts_what_is_held():
    """It named a cap below the one that was given, where blocks keep all their weights."""
    size, low = [1000, 1000, 1000], [0.0, 0.0, 0.0]
    with pytest.raises(InfeasibleBudget, match="Raise max_sparsity to at least 0.75, or") as refused:
        sparsify([1, 1, 1], size, sparsity=0.5, min_sparsity=low, max_sparsity=[0.55, 0.55, 0.0])
    assert "0.3666" in refused.value.feasible
    sparsify([1, 1, 1], size, sparsity=0.5, min_sparsity=low, max_sparsity=[0.75, 0.75, 0.0])
    with pytest.raises(InfeasibleBudget, match="Prune less"):
        sparsify([1, 1, 1], size, sparsity=0.7, min_sparsity=low, max_sparsity=[0.55, 0.55, 0.0])


def test_the_example_of_the_notation():
    s = allocate([0.4, 0.3, 0.2, 0.1], [1, 2, 1, 1], 6, spend="exactly")
    assert (round(s.multiplier, 4), round(s.shadow_price, 4), round(s.shadow_price / 3.6, 4)) == (-0.0727, 0.3273, 0.0909)


def test_a_barrier_is_never_reached():
    """Sparsity 1 came out where a weight is next to nothing: the certificate had no numbers, and its file was not read."""
    found = sparsify([1.0, 1e-20], [10, 10], 9, max_sparsity=1.0, penalty="log-barrier", spend="exactly")
    assert found.value.max() < 1 and np.isfinite([found.gap, found.kkt_residual, found.primal, found.dual]).all()
    assert found.gap < 1e-9 and found.kkt_residual < 1e-9
    with pytest.raises(InvalidInput, match="the log-barrier goes to 0.99999"):
        sparsify([1.0, 1.0], [10, 10], 9, min_sparsity=[0.0, 1.0], max_sparsity=1.0, penalty="log-barrier")


@pytest.mark.parametrize(
    ("solution", "said"),
    [
        (lambda: allocate([1, 2], 1, 5, upper=2), "The caps take at most 4, .* 1.6 is spent. .* with a budget of 4"),
        (lambda: allocate([1, 2], 1, 0, spend="exactly"), "The budget pays for base and floors alone"),
        (lambda: allocate([1, 2], 1, 4, lower=[1, 3], spend="exactly"), "The budget pays for base and floors alone"),
        (lambda: allocate([1, 2], 1, 5, upper=0), "Every floor equals its cap"),
        (lambda: sparsify([10, 20], [1, 1], sparsity=0.2, min_sparsity=0.25, bits=1.5), "prune 0.5 where 0.4 .* it to 0.83125"),
        (lambda: sparsify([1, 2], [1, 1], sparsity=0.1, min_sparsity=0.25, bits=0.0), "prune 0.5 where 0.2 was asked for. L"),
        (lambda: sparsify([10, 20], [1, 1], sparsity=0.4, min_sparsity=0.4, max_sparsity=0.4), "Every floor equals its cap"),
        (lambda: solve_joint([1, 3], 10, 100, 1e9, upper=3), "Use spend='exactly' with a budget of 60 to spend it"),
        (lambda: solve_joint([1, 3], 10, 100, -110, alpha=100), "-110 is the least that can be reached"),
        (lambda: solve_joint([1, 3], 10, 100, 60, upper=3, spend="exactly"), "raises the objective by 0.0388"),
    ],
)  # fmt: skip
def test_a_message_is_true_of_its_solution(solution, said):
    assert re.search(said, solution().message), solution().message


@pytest.mark.parametrize("kind", ["allocate", "joint"])
def test_a_budget_that_a_message_names_can_be_spent(kind):
    made = {
        "allocate": lambda budget, spend: allocate([1, 2], [1, 3], budget, upper=2.5, spend=spend),
        "joint": lambda budget, spend: solve_joint([1, 3], 10, 100, budget, upper=3, spend=spend),
    }[kind]
    most = float(re.search(r"with a budget of (\S+)[ .]", made(1000, "at_most").message)[1].rstrip("."))
    assert made(most, "exactly").spent == pytest.approx(most)


@pytest.mark.parametrize(("budget", "alpha"), [(-20.0, 0.5), (5.0, 0.01), (-60.0, 2.0)])
def test_the_shadow_price_of_the_joint_program_is_the_slope_of_its_objective(budget, alpha):
    found, step = solve_joint([1, 3], 10, 100, budget, alpha=alpha), 1e-3
    up, down = (solve_joint([1, 3], 10, 100, budget + e, alpha=alpha).primal for e in (step, -step))
    assert found.status == "binding" and found.shadow_price == pytest.approx((down - up) / (2 * step), rel=1e-5)
    assert f"lowers the objective by {found.shadow_price:.3g}" in found.message


def test_a_floor_beyond_a_measured_curve_is_refused_and_so_is_what_no_cap_allows():
    curves = CalibratedPenalty([0.25, 0.5], [[1, 3], [2, 3]])
    with pytest.raises(InvalidInput, match=r"min_sparsity 0.8, and its curve ends at 0.5.*measure further"):
        sparsify([1, 1], [100, 100], sparsity=0.8, max_sparsity=0.9, min_sparsity=0.8, penalty=curves, spend="exactly")
    for penalty, end in ((curves, "0.5"), ("log-barrier", "0.999999")):
        with pytest.raises(InfeasibleBudget, match=f"Prune less: the penalty goes to {end}.$"):
            sparsify([1, 2], [100, 100], sparsity=1, max_sparsity=1, penalty=penalty)


@pytest.mark.parametrize(
    "call",
    [
        lambda: round_capacity(solve_joint([1, 3], 10, 100, -20)),
        lambda: allocate(torch.tensor([4.0, 2.0], requires_grad=True), 1, 4),
        lambda: allocate(np.ma.array([1.0, 2.0], mask=[False, True]), 1, 4),
        lambda: allocate_increments([[4, 1], [3, 2]], 1, 30, lower=np.inf),
        lambda: allocate_increments({"a": [4, 1]}, 1, 3),
        lambda: transfer_allocation([1, 2], [2, 1], 1, 4, gamma="x"),
        lambda: transfer_sparsity([1, 2], [2, 1], 1, sparsity=0.2, bits=None),
        lambda: choose([[1, 2]], [[1, 2]], None),
        lambda: choose([[1, 2]], [[1, 2]], math.inf),
        lambda: choose([[1, 2], [1]], [[1, 2], [1]], 3),
        lambda: few_levels([0.1, 0.5], [1, 1, 1], 2),
        lambda: few_levels([0.1, 0.5, 0.3], [0, 1, 1], 2),
        lambda: few_levels([0.1, math.nan], [1, 1], 1),
        lambda: few_levels([0.1, 0.5], [1, 1], 1.5),
        lambda: round_parameters([0.5, 0.5], [3, 3], 100),
        lambda: round_parameters([0.5, math.nan], [3, 3], 3),
        lambda: round_parameters([0.5, 0.5], [3, 3], 3.5),
        lambda: layerif_experts([1, 2], 7.5),
    ],
)
def test_what_no_program_can_take_is_refused_in_a_sentence(call):
    with pytest.raises(LayerbudgetError):
        call()


def test_units_of_a_transfer_are_not_to_be_chosen():
    with pytest.raises(TypeError, match="units"):
        transfer_allocation([1, 2], [2, 1], 1, 4, units="relative")


def test_records_are_plain_values():
    found = choose([[9.0, 4.0, 1.0], [5.0, 3.0, 1.0]], [[2, 3, 4], [2, 3, 4]], 5)
    rounded = round_capacity(allocate(np.ones(50), np.linspace(1, 2, 50), 100, spend="exactly"))
    for record in (found.certificate(), rounded.to_dict()):
        assert all(type(v) in (str, int, float, bool, list, type(None)) for v in record.values()), record
    assert "\n" not in repr(found) + repr(rounded) and repr(rounded).startswith("RoundedCapacity([")
