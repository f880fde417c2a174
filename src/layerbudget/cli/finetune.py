"""``layerbudget finetune``."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from pathlib import Path
from typing import Any

from ..data.files import LONGEST
from ..exports import find_plan
from ..finetuning.protocol import DEVICES, PRESETS, Protocol
from ..kinds import check_kind
from ..plan import Plan
from ..progress import Steps
from ..registry import Option, options_of
from ..verdicts import CONVENTION, plus_minus
from .display import announce, expect, progress_bar, say, say_next, show_table
from .files import check_rows
from .options import add, add_out, add_set, add_verb, given, load_model, load_tokenizer, refuse, settings, split_revision

# Options beside the numbers of the protocol.
_BESIDE = {n: Option(name=n, type=t) for n, t in {"train_rows": int, "bf16": bool, "report_to": str}.items()}


def register(subparsers: Any) -> None:
    """Add the parser of ``finetune``."""
    p = add_verb(subparsers, "finetune", handler)
    add(p, "model", help="demo, a local folder, or a hub id: a causal LM or an encoder")
    p.add_argument("plan", metavar="PLAN", help="plan.json of kind ranks or experts, or a recipe, made for this model")
    add_out(p, "folder of the adapters and results", required=True, metavar="DIR")
    learned = p.add_mutually_exclusive_group(required=True)
    learned.add_argument(
        "--data",
        metavar="DATA",
        help="text for a language model: rows of messages, conversations, prompt and completion, instruction and output (loss "
        "on the answers), or text; a .jsonl, .json or .parquet file, a folder, a hub dataset",
    )
    learned.add_argument("--task", help="labels: cola, mrpc, rte, commonsenseqa, openbookqa, scienceqa, or a file of rows")
    p.add_argument("--held-out", metavar="DATA", help="with --data: held-out text (default: a tenth of the rows)")
    add(p, "--data-dir", help="with --task: folder with the task's original files")
    add(p, "--seeds", "--epochs", "--lr")
    p.add_argument("--batch", type=int, help="rows per step (default: the preset's, as of epochs and learning rate)")
    p.add_argument("--against", metavar="DIR", help="paired tests against another result folder (of a uniform plan, say)")
    place = p.add_argument_group("model in memory")
    add(place, "--device", choices=DEVICES, default="auto")
    precision = (
        "precision of the base's weights; auto (default): what the checkpoint holds, bfloat16 for float16, if the CPU can"
    )
    add(place, "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=precision)
    add(place, "--four-bit")
    place.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again, to keep fewer")
    advanced = p.add_argument_group("advanced")
    advanced.add_argument("--preset", default="default", choices=tuple(PRESETS), help="training protocol")
    add_set(
        advanced,
        "a number of the protocol: start (gradients: ranks start in the top directions of the task's gradient), alpha_policy "
        "(constant-ratio, constant-alpha or rslora), accumulation, dropout, cutoff, warmup, ...; bf16=true: autocast in it, "
        "as always with --dtype bfloat16; or report_to=wandb: a tracker of transformers that gets the loss",
    )
    add(advanced, "--resume")


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Train, predict, summarise over seeds, and compare where asked."""
    own = settings(a, {**options_of(Protocol), **_BESIDE})
    plan = _trainable(a)
    for source in (a.data, a.held_out):
        check_rows(source)
    import transformers

    with contextlib.redirect_stdout(sys.stderr):  # where WANDB_MODE is offline this import says so
        import transformers.integrations.integration_utils

    from ..data.tasks import NAMES, load_task
    from ..data.text import read_texts
    from ..finetuning.adapters import classifier_loader
    from ..finetuning.finetune import finetune
    from ..finetuning.training import check_reporters

    reporters = [name for name in own.pop("report_to", "").split(",") if name]
    check_reporters(reporters)
    if a.task not in NAMES:
        refuse(a, ("data_dir",), "a task in a file of its own" if a.task else "--data")
    if a.task:
        refuse(a, ("held_out",), "a labelled task")
    beside = {name: own.pop(name) for name in _BESIDE if name in own}
    rows = beside.pop("train_rows", None)
    plan, base, recipe = _validated_plan(a, plan)
    protocol = _protocol(a, base, own)
    tokenizer = load_tokenizer(a)
    task: Any
    if a.task:
        task = load_task(a.task, a.data_dir)
    else:
        own = {"limit": protocol.cutoff, "everything": protocol.on_prompt, "held_out": a.held_out}
        task = read_texts(a.data, tokenizer, **own)
    task = task.limited(rows)
    transformers.utils.logging.set_verbosity_error()  # the head's weights are missing from a bare encoder, as they should be
    _expect(a, base, plan, task, protocol)
    del base  # every seed loads its own
    name, revision = split_revision(a.model)
    prepared = {} if recipe is None else {"prepare": recipe.prepare, "prepared": recipe.identity}
    labels = len(getattr(task, "labels", ()))
    loader = classifier_loader(name, labels, revision=revision, **given(a, "dtype", "device", "four_bit"), **prepared)
    with progress_bar(a, f"finetune on {task.name}") as progress:
        if not a.dry_run:  # what is checked beside ends with the first step
            Steps(progress, math.ceil(len(task.train) / protocol.batch * protocol.epochs), "loading")
        result = finetune(
            loader,
            plan,
            task,
            a.out,
            tokenizer=tokenizer,
            protocol=protocol,
            checkpointing=a.gradient_checkpointing,
            progress=progress,
            **given(a, "seeds", "resume", "overwrite", "against"),
            report_to=reporters,
            **beside,
        )
    _show(a, result)
    if recipe is not None:
        result = {**result, "recipe": _recounted(a, recipe, result["seeds"][0])}
    tests = result.get("against", {})
    for split, test in tests.items():
        say(a, *(f"{_words(split)}: {test[over]['sentence']}" for over in ("seeds", "samples") if test[over]))
    say(a, _verdict(result, tests, plan))
    _say_what_follows(a, result)
    return {**result, "output": a.out}


def _trainable(a: argparse.Namespace) -> Plan:
    """Read the plan; refuse one of a kind that is not trained."""
    plan = find_plan(a.plan)
    check_kind(plan.kind, ("ranks", "experts", "recipe"), "cannot be trained")
    if plan.kind == "recipe":
        refuse(a, ("four_bit",), "a recipe, which says the base's formats")
    return plan


def _validated_plan(a: argparse.Namespace, plan: Plan) -> tuple[Plan, Any, Any]:
    """Refuse a plan that was made for another model; return that model too, and what a recipe says of its base."""
    from ..decisions.joint.recipe import base_of
    from ..models.blocks import describe

    base = load_model(a, four_bit=False)  # a cast keeps the digest
    if plan.kind == "recipe":
        recipe = base_of(plan, a.model, base)
        return recipe.ranks, base, recipe
    plan.validate(describe(base, a.model))
    return plan, base, None


def _protocol(a: argparse.Namespace, base: Any, own: dict[str, Any]) -> Protocol:
    """The preset with what was named; rows of text may be longer than labelled ones, and none than the model's positions."""
    from ..data.calibration import positions_of

    if "cutoff" not in own:
        most = LONGEST if a.data else PRESETS[a.preset].cutoff
        own["cutoff"] = min(most, positions_of(base) or most)
    return PRESETS[a.preset].changed({**own, **given(a, "epochs", "lr", "batch")})


def _adapter_parameters(plan: Any, base: Any) -> int:
    """Parameters of LoRA factors of the planned ranks; every expert of a stack has its own."""
    from ..models.blocks import weight_of

    shapes = [(b.count, weight_of(base, name)[1].shape) for b in plan.blocks for name in b.modules if b.count]
    return sum(rank * math.prod(shape[:-2]) * sum(shape[-2:]) for rank, shape in shapes)


def _expect(a: argparse.Namespace, base: Any, plan: Any, task: Any, protocol: Protocol) -> None:
    """Say what will be trained on, and what it will cost; rows of a labelled task count a quarter of the longest allowed."""
    from ..doctor.cost import Text, training
    from ..plans.rank_table import by_rule_of_thumb
    from ..plans.verdict import advises_uniform, verdict

    splits = (("to train on", task.train), *task.evaluation.items())
    rows = ", ".join(f"{len(found)} {_words(split)}" for split, found in splits)
    lengths = [len(row.input_ids) for row in task.train if hasattr(row, "input_ids")] or [protocol.cutoff // 4]
    length, batch = max(1, sum(lengths) // len(lengths)), protocol.batch // protocol.accumulation
    text = Text(samples=len(task.train), length=length, batch=batch)
    if a.data and plan.kind == "ranks":
        learned = sum(label >= 0 for row in task.train for label in row.labels)
        parameters = _adapter_parameters(plan, base)
        sizes = f"{parameters:,} parameters for {learned:,} completion tokens"
        announce(a, f"The adapter has {sizes}. {by_rule_of_thumb(parameters, learned)}")
    if plan.kind == "ranks" and advises_uniform(plan):
        announce(a, f"The plan: {verdict(plan).removeprefix('Verdict: ')}")
    steps, seeds = -(-len(task.train) // protocol.batch), ", ".join(map(str, a.seeds))
    what = f"{task.name}: {rows}; {protocol.epochs:g} epochs of {steps} steps, seeds {seeds}"
    expect(a, what, base, training(text, protocol.epochs, len(a.seeds), sum(map(len, task.evaluation.values()))))


def _recounted(a: argparse.Namespace, recipe: Any, seed: int) -> dict[str, int]:
    """Bytes of base and adapter, the latter counted in its file."""
    found: dict[str, int] = recipe.recount(Path(a.out) / f"seed-{seed}" / "adapter")
    where = a.model if recipe.written else "what `layerbudget apply MODEL RECIPE` writes"
    counted = f"Recounted {found['base']} bytes of base and {found['adapter']} of adapter, {found['spent']} of {found['limit']}"
    say(a, f"{counted}; the adapter belongs on {where}.")
    return found


def _say_what_follows(a: argparse.Namespace, result: dict[str, Any]) -> None:
    """Say the command that follows: the adapter on held-out rows that have a name, else the page of the results."""
    held_out = a.held_out or ("stdlib" if a.data == "stdlib" else None)
    if a.task or held_out is None:
        say_next(a, "report", a.out, "-o", f"{a.out}/report.html")
        return
    words = ("--adapter", f"{a.out}/seed-{result['seeds'][0]}/adapter", "--against", a.model)
    say_next(a, "evaluate", a.model, *words, "--perplexity", held_out)


def _words(name: str) -> str:
    """A field as people write it: ``held-out``, ``loss before``."""
    return name.replace("held_out", "held-out").replace("_", " ")


def _verdict(result: dict[str, Any], tests: dict[str, Any], plan: Plan) -> str:
    """How the first split stands beside another run; without one its metric, and what it was before."""
    if tests:
        return f"Verdict: {next(iter(tests.values()))['verdict']}"
    split, metrics = next(iter(result["metrics"].items()))
    name, before = result["metric"], metrics.get("loss_before")
    told = f"{_words(split)} {name} {metrics[name]['value']:.4f}"
    change = result.get("change", {}).get(split)
    paired = (
        f"; change {change['difference']:+.4f}{plus_minus(change['stderr'], '.4f')} over {change['rows']} rows"
        if change
        else ""
    )
    told += f" (before: {before['value']:.4f}{paired})" if before else ""
    if plan.rule == "uniform" or len(set(plan.counts.tolist())) == 1:
        return f"Verdict: {told}. This plan is uniform: train another with as many parameters, --against this folder."
    advice = "train a plan of --rule uniform with as many parameters, and add --against"
    return f"Verdict: {told}. Nothing was compared with uniform: {advice}."


def _show(a: argparse.Namespace, result: dict[str, Any]) -> None:
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
    show_table(a, title, ("split", "metric", "mean over seeds", "standard error over seeds"), rows)
    if result["metric"] == "loss":
        over = f"; {CONVENTION} of the change over rows, paired" if result.get("change") else ""
        say(a, f"Loss in nats per learned token, {result['rows']['held_out']} rows held out; before: the base model{over}.")
