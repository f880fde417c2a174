"""``layerbudget finetune``."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

from ..data.files import LONGEST
from ..decision import DECISIONS, check_kind, decision_of
from ..decisions.files import check_rows
from ..exports import find_plan
from ..finetuning.protocol import PRESETS, Protocol
from ..finetuning.request import FinetuneRequest
from ..plan import Plan
from ..progress import Steps
from ..verdicts import CONVENTION, plus_minus
from .session import Session, split_revision


def run(session: Session) -> dict[str, Any]:
    """Train, predict, summarise over seeds, and compare where asked."""
    request: FinetuneRequest = session.request  # type: ignore[assignment]  # it is the one of this command
    plan = find_plan(request.plan)
    check_kind(plan.kind, [name for name, decision in DECISIONS.all().items() if decision.trains], "cannot be trained")
    for source in (request.data, request.held_out):
        check_rows(source)
    import transformers

    with contextlib.redirect_stdout(sys.stderr):  # where WANDB_MODE is offline this import says so
        import transformers.integrations.integration_utils

    from ..data.tasks import NAMES
    from ..finetuning.adapters import classifier_loader
    from ..finetuning.finetune import finetune
    from ..finetuning.training import check_reporters

    reporters = [name for name in request.report_to.split(",") if name]
    check_reporters(reporters)
    if request.task not in NAMES:
        request.refuse(("data_dir",), "a task in a file of its own" if request.task else "--data")
    base = _validated_base(session, plan)
    protocol = _protocol(request, base)
    tokenizer = session.load_tokenizer()
    task = _rows(request, tokenizer, protocol)
    transformers.utils.logging.set_verbosity_error()  # the head's weights are missing from a bare encoder, as they should be
    _expect(session, base, plan, task, protocol)
    del base  # every seed loads its own
    name, revision = split_revision(request.model)
    labels = len(getattr(task, "labels", ()))
    loader = classifier_loader(name, labels, revision=revision, **request.given("dtype", "device", "four_bit"))
    with session.progress(f"finetune on {task.name}") as progress:
        if not request.dry_run:  # what is checked beside ends with the first step
            Steps(progress, math.ceil(len(task.train) / protocol.batch * protocol.epochs), "loading")
        result = finetune(
            loader,
            plan,
            task,
            request.out,
            tokenizer=tokenizer,
            protocol=protocol,
            checkpointing=request.gradient_checkpointing,
            progress=progress,
            report_to=reporters,
            **request.given("seeds", "resume", "overwrite", "against", "bf16"),
        )
    _show(session, result)
    tests = result.get("against", {})
    for split, test in tests.items():
        session.say(*(f"{_words(split)}: {test[over]['sentence']}" for over in ("seeds", "samples") if test[over]))
    session.say(_verdict(result, tests, plan))
    _say_what_follows(session, result)
    return {**result, "output": request.out}


def _rows(request: FinetuneRequest, tokenizer: Any, protocol: Protocol) -> Any:
    """Return the labelled task, or the rows of text."""
    from ..data.tasks import load_task
    from ..data.text import read_texts

    if request.task:
        return load_task(request.task, request.data_dir).limited(request.train_rows)
    options: dict[str, Any] = {"limit": protocol.cutoff, "everything": protocol.on_prompt, "held_out": request.held_out}
    return read_texts(str(request.data), tokenizer, **options).limited(request.train_rows)


def _validated_base(session: Session, plan: Plan) -> Any:
    """Return the model that the plan was made for; refuse another one."""
    from ..models.blocks import describe

    base = session.load_model(four_bit=False)  # a cast keeps the digest
    plan.validate(describe(base, session.request.model))
    return base


def _protocol(request: FinetuneRequest, base: Any) -> Protocol:
    """The preset with what was named; rows of text may be longer than labelled ones, and none than the model's positions."""
    from ..data.calibration import positions_of

    most = LONGEST if request.data else PRESETS[request.preset].cutoff
    return request.protocol(min(most, positions_of(base) or most))


def _expect(session: Session, base: Any, plan: Plan, task: Any, protocol: Protocol) -> None:
    """Say what will be trained on, and what it will cost; rows of a labelled task count a quarter of the longest allowed."""
    from ..cost.sizes import Text
    from ..cost.verbs import training

    request: FinetuneRequest = session.request  # type: ignore[assignment]  # it is the one of this command
    decision, splits = decision_of(plan), (("to train on", task.train), *task.evaluation.items())
    rows = ", ".join(f"{len(examples)} {_words(split)}" for split, examples in splits)
    lengths = [len(row.input_ids) for row in task.train if hasattr(row, "input_ids")] or [protocol.cutoff // 4]
    length, batch = max(1, sum(lengths) // len(lengths)), protocol.batch // protocol.accumulation
    text = Text(samples=len(task.train), length=length, batch=batch)
    learned = sum(label >= 0 for row in task.train for label in row.labels) if request.data else None
    for sentence in decision.before_training(plan, base, learned):
        session.announce(sentence)
    summary = decision.describe(plan)
    if summary.advises_other:
        session.announce(f"The plan: {summary.verdict}")
    steps, seeds = -(-len(task.train) // protocol.batch), ", ".join(map(str, request.seeds))
    what = f"{task.name}: {rows}; {protocol.epochs:g} epochs of {steps} steps, seeds {seeds}"
    session.expect(what, base, training(text, protocol.epochs, len(request.seeds), sum(map(len, task.evaluation.values()))))


def _say_what_follows(session: Session, result: dict[str, Any]) -> None:
    """Say the command that follows: the adapter on held-out rows that have a name, else the page of the results."""
    request: FinetuneRequest = session.request  # type: ignore[assignment]  # it is the one of this command
    held_out = request.held_out or ("stdlib" if request.data == "stdlib" else None)
    if request.task or held_out is None:
        session.follow("report", request.out, "-o", f"{request.out}/report.html")
        return
    words = ("--adapter", f"{request.out}/seed-{result['seeds'][0]}/adapter", "--against", request.model)
    session.follow("evaluate", request.model, *words, "--perplexity", held_out)


def _words(name: str) -> str:
    """A field as people write it: ``held-out``, ``loss before``."""
    return name.replace("held_out", "held-out").replace("_", " ")


def _verdict(result: dict[str, Any], tests: dict[str, Any], plan: Plan) -> str:
    """How the first split stands beside another run; without one its metric, and what it was before."""
    if tests:
        return f"Verdict: {next(iter(tests.values()))['verdict']}"
    split, metrics = next(iter(result["metrics"].items()))
    name, before = result["metric"], metrics.get("loss_before")
    outcome = f"{_words(split)} {name} {metrics[name]['value']:.4f}"
    change = result.get("change", {}).get(split)
    paired = (
        f"; change {change['difference']:+.4f}{plus_minus(change['stderr'], '.4f')} over {change['rows']} rows"
        if change
        else ""
    )
    outcome += f" (before: {before['value']:.4f}{paired})" if before else ""
    if plan.rule == "uniform" or len(set(plan.counts.tolist())) == 1:
        return f"Verdict: {outcome}. This plan is uniform: train another with as many parameters, --against this folder."
    advice = "train a plan of --rule uniform with as many parameters, and add --against"
    return f"Verdict: {outcome}. Nothing was compared with uniform: {advice}."


def _show(session: Session, result: dict[str, Any]) -> None:
    trained = f"{result['trained_parameters']:,} trained parameters"
    title = f"{result['task']}: {result['kind']}, rule {result['rule']}, {trained}"
    rows = [
        (
            _words(split),
            _words(name),
            f"{m['value']:.4f}",
            "-" if m["stderr"] is None else f"{m['stderr']:.4f}",
        )
        for split, metrics in result["metrics"].items()
        for name, m in metrics.items()
    ]
    session.show(title, ("split", "metric", "mean over seeds", "standard error over seeds"), rows)
    if result["metric"] == "loss":
        over = f"; {CONVENTION} of the change over rows, paired" if result.get("change") else ""
        session.say(
            f"Loss in nats per learned token, {result['rows']['held_out']} rows held out; before: the base model{over}."
        )
