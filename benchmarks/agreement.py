"""Agreement of every estimator with plain dense linear algebra on five tiny models, in float64 and float32.

    python benchmarks/agreement.py [--out benchmarks/results]

The dense side is always float64 and loops over sequences and tokens (the oracles of ``tests/sensitivity``). The table has the
largest relative error over dampings 0.01, 0.1 and 1 (of the largest eigenvalue) of one block's gain. Norms and softmax of
transformers run in float32 even inside a float64 model, which limits agreement to about 1e-8 where the two sides batch
differently.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from layerbudget.execution import loss as L
from layerbudget.models.machine import versions
from layerbudget.sensitivity.gain import score

HERE = Path(__file__).resolve().parent
MODELS = ("mlp", "mistral", "gemma", "gpt2", "bert")
DAMPINGS = [0.01, 0.1, 1.0]


def oracle(name: str) -> ModuleType:
    """Load a file of ``tests/sensitivity`` by path."""
    spec = importlib.util.spec_from_file_location(name, HERE.parent / "tests" / "sensitivity" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def largest(values, truth) -> float:
    """Largest relative error."""
    values, truth = np.asarray(values, dtype=float), np.asarray(truth, dtype=float)
    return float(np.max(np.abs(values / truth - 1)))


def taus(scores) -> np.ndarray:
    """Absolute dampings of the only block."""
    return np.array(scores.extra["absolute_damping"])[:, 0]


def check(zoo, products, kfac, name: str, dtype: torch.dtype) -> dict[str, float | str]:
    """Errors of all estimators on one model."""
    exact, data = zoo.build_model(name), zoo.build_data(name, samples=4, length=6)
    model = zoo.build_model(name, dtype)
    if name == "mlp" and dtype == torch.float32:
        data = type(data)(inputs=data.inputs.float(), labels=data.labels)
    block = zoo.partition(exact, name)[1]
    wide = data if name != "mlp" else type(data)(inputs=data.inputs.double(), labels=data.labels)
    n, s = L.token_count(exact, data), zoo.dense_rows(exact, wide, [block])[0]
    g, targets = s.sum(0) / n, kfac.sampled(exact, wide)
    drawn = zoo.dense_rows(exact, wide, [block], targets)[0]
    ggn = products.dense_ggn(exact, wide, block)
    run = lambda estimator, **o: score(model, data, [block], estimator, damping=DAMPINGS, **o)  # noqa: E731
    eye = torch.eye(len(g), dtype=torch.float64)

    def against(scores, matrix) -> float:
        truth = [float(g @ torch.linalg.solve(matrix + t * eye, g)) for t in taus(scores)]
        return largest([row[0] for row in scores.gain], truth)

    out: dict[str, float | str] = {"gradient-norm": largest(score(model, data, [block], "gradient-norm").gain, float(g @ g))}
    out["fisher-gram"] = against(run("fisher-gram", replicates=2), s.T @ s / n)
    out["fisher-diagonal"] = against(run("fisher-diagonal"), torch.diag(s.square().sum(0) / n))
    same = torch.equal(kfac.sampled(model, data), targets)
    out["fisher-mc"] = against(run("fisher-mc"), drawn.T @ drawn / n) if same else "other draws"
    if same:
        kronecker(zoo, kfac, exact, wide, block, targets, g, drawn, n, run, out)
    scores = run("ggn", tolerance=1e-9, steps=300)
    truth = np.array([float(g @ torch.linalg.solve(ggn + t * eye, g)) for t in taus(scores)])
    low, high = (np.array(scores.extra[key])[:, 0] for key in ("lower", "upper"))
    out["ggn"] = largest(low, truth)
    slack = 1e-6  # the float32 parts of transformers make the dense matrix itself uncertain by about 1e-7
    loose = run("ggn", tolerance=0.1)
    t2 = np.array([float(g @ torch.linalg.solve(ggn + t * eye, g)) for t in taus(loose)])
    inside = [
        (a * (1 - slack) <= t).all() and (t <= b * (1 + slack)).all()
        for a, b, t in (
            (low, high, truth), (np.array(loose.extra["lower"])[:, 0], np.array(loose.extra["upper"])[:, 0], t2)
        )
    ]  # fmt: skip
    out["ggn bracket contains the truth"] = "yes" if all(inside) else "NO"
    return out


def kronecker(zoo, kfac, exact, data, block, targets, g, drawn, n, run, out) -> None:
    """K-FAC and EK-FAC from plain factors."""
    a, b = kfac.plain_factors(exact, data, [m.name for m in block.modules], targets)
    view = type("View", (), {"rows": staticmethod(zoo.dense_rows)})
    true = kfac.matrices(view, exact, data, block)
    sampled = kfac.matrices(view, exact, data, block, targets)
    for estimator in ("kfac", "ekfac"):
        scores = run(estimator)
        truth = np.zeros(len(DAMPINGS))
        for m in block.modules:
            (la, qa), (lg, qg) = torch.linalg.eigh(a[m.name].double()), torch.linalg.eigh(b[m.name].double())
            second = (qg.T @ sampled[m.name] @ qa).square().sum(0) / n if estimator == "ekfac" else torch.outer(lg, la)
            rotated = (qg.T @ (true[m.name].sum(0) / n) @ qa) ** 2
            truth += np.array([float((rotated / (second + t)).sum()) for t in taus(scores)])
        out[estimator] = largest([row[0] for row in scores.gain], truth)


NOTE = (
    "Largest relative error over three dampings, one block per model. The bracket is checked after a loose and a tight run, "
    "with a slack of 1e-6 for the float32 parts of transformers. MLP in float32: sampled labels depend on a sample's content, "
    "which rounding changes."
)


def main() -> None:
    """Write ``agreement.json`` and ``agreement.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    out = parser.parse_args().out
    zoo, products, kfac = oracle("conftest"), oracle("test_products"), oracle("test_kfac")
    found = {d: {m: check(zoo, products, kfac, m, getattr(torch, d)) for m in MODELS} for d in ("float64", "float32")}
    environment = {"cpu": platform.machine(), "threads": torch.get_num_threads(), **versions()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "agreement.json").write_text(json.dumps({"environment": environment, "errors": found}, indent=1) + "\n")
    lines = [
        "# Agreement with dense linear algebra",
        "",
        NOTE,
        "",
    ]
    for dtype, models in found.items():
        rows = list(dict.fromkeys(r for m in models.values() for r in m))
        lines += [f"| {dtype} | " + " | ".join(models) + " |", "|---" * (1 + len(models)) + "|"]
        for r in rows:
            cells = [m.get(r, "") for m in models.values()]
            lines.append(f"| {r} | " + " | ".join(f"{c:.0e}" if isinstance(c, float) else str(c) for c in cells) + " |")
        lines.append("")
    (out / "agreement.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
