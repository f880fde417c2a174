"""Plans of one descent at several lengths: what ``plan_directional`` gives at 1, 2, 4, ... steps, for the price of the longest.

The first steps of a long descent are those of a short one; only the last step differs, which the pruner itself measures.
``python benchmarks/courses.py`` shows on the embedded model that the plans and their passes are the same.
"""

from __future__ import annotations

import copy
import time

import numpy as np

from layerbudget.compressors.base import find_treatment
from layerbudget.decisions.sparsity.descent import _arrive, _entry, _go, _goal
from layerbudget.decisions.sparsity.sequential import APPLYING, PASSES, _Plain, _plan, _Run
from layerbudget.models.blocks import describe
from layerbudget.sensitivity.directional.decisions import Decisions
from layerbudget.sensitivity.directional.journal import Trajectory
from layerbudget.sensitivity.directional.point import TrustRegion
from layerbudget.solvers.counts import round_parameters


def plans(model, data, *, sparsity, method, by, steps=(1, 2, 4, 8), budgets=(PASSES,), trust=0.06, cap=0.95):
    """``{steps or "24 passes": (plan, CPU seconds)}``, the model left as it was."""
    started, longest, identity = time.process_time(), max(steps), describe(model)
    decisions = Decisions.by(model, by)
    plain = _Plain(sparsity=sparsity, cap=cap, trust=trust, draws=0, terms="first", seed=0)
    settings = plain.settings(decisions, longest, 1e9, leap=True)
    treatment = find_treatment(method)
    treatment.begin(model, data)
    point = TrustRegion(model, data, decisions, treatment)
    point.passes += treatment.price
    start = round_parameters(np.full(len(decisions), sparsity), decisions.numel, settings.total, cap)
    path = Trajectory(counts=[start], log=[])
    point.move(start, point.dense)
    here = _arrive(point, start, point.dense, trust, settings, 0)
    path.log.append(_entry(point, here, None, step=0))
    ends, stuck = [], False
    while True:
        _, _, goal, promise = _goal(point, here, path, settings)
        ends.append((Trajectory(counts=list(path.counts), log=list(path.log), solution=path.solution, goal=goal, promise=promise),
                     point.passes, time.process_time() - started))  # fmt: skip
        gone = None if len(path.log) >= longest else _go(point, here, path, settings)
        if gone is None:
            stuck = len(path.log) < longest
            break
        here, record = gone
        path.counts.append(here.counts)
        path.log.append({**_entry(point, here, None, step=len(path.log)), **record})
    # (end, whether the descent tried in vain to go on from there)
    wanted = {k: (min(k, len(ends)) - 1, k > len(ends)) for k in steps}
    for b in budgets:
        end = max(i for i, e in enumerate(ends) if e[1] <= b - APPLYING)
        wanted[f"{b:g} passes"] = (end, stuck and end == len(ends) - 1)
    found, landed, spent = {}, {}, point.passes
    for label, key in wanted.items():
        if key not in landed:
            course, point.passes, seconds = copy.deepcopy(ends[key[0]])
            point.passes, before = spent if key[1] else point.passes, time.process_time()
            measured = _Run._land(point, course)
            plan = _plan(identity, point, course, measured, None, {"by": by, "method": method, "sparsity": sparsity})
            landed[key] = (plan, seconds + time.process_time() - before)
        found[label] = landed[key]
    point.restore()
    return found


def main():
    from layerbudget.data.text import calibration
    from layerbudget.decisions.sparsity.sequential import plan_directional
    from layerbudget.models.loading import load_model, load_tokenizer

    model = load_model("demo")
    data = calibration("stdlib", load_tokenizer("demo"), samples=4, length=64)
    for by in ("linear", "rows:1"):
        found = plans(model, data, sparsity=0.6, method="wanda", by=by, steps=(1, 2, 4), budgets=(9.0,))
        for label, (plan, _) in found.items():
            limit = {"passes": 9.0} if isinstance(label, str) else {"steps": label, "passes": 1e9}
            same = plan_directional(model, data, sparsity=0.6, by=by, **limit)
            rows = plan.extra.get("rows")
            equal = (same.values == plan.values).all()
            if rows is not None:
                equal &= all((rows.counts[name] == same.extra["rows"].counts[name]).all() for name in rows.counts)
            print(by, label, "same plan" if equal else "DIFFERENT", plan.extra["forward_passes"], same.extra["forward_passes"])


if __name__ == "__main__":
    main()
