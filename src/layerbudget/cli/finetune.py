"""``layerbudget finetune``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ..finetuning.protocol import DEVICES
from ..progress import Steps
from .display import expect, progress_bar
from .options import (
    add_model,
    add_resume,
    add_set,
    add_verb,
    given,
    load_model,
    load_tokenizer,
    refuse,
    settings,
    split_revision,
)

LONGEST = 1024  # tokens of a row of text where no cutoff is named, as TRL has it


def register(subparsers: Any) -> None:
    """Add the parser of ``finetune``."""
    p = add_verb(subparsers, "finetune", handler)
    add_model(p, "demo, a local folder, or a hub id: a causal LM or an encoder")
    p.add_argument("plan", metavar="PLAN", help="plan.json of kind ranks or experts, or a recipe, made for this model")
    p.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the adapters and results")
    learned = p.add_mutually_exclusive_group(required=True)
    learned.add_argument(
        "--data",
        metavar="DATA",
        help="text for a language model: rows of messages, conversations, prompt and completion, instruction and output (loss "
        "on the answers), or text; a .jsonl, .json or .parquet file, a folder, a hub dataset",
    )
    learned.add_argument("--task", help="labels: cola, mrpc, rte, commonsenseqa, openbookqa, scienceqa, or a file of rows")
    p.add_argument("--held-out", metavar="DATA", help="with --data: held-out text (default: a tenth of the rows)")
    p.add_argument("--data-dir", metavar="DIR", help="with --task: folder with the task's original files")
    p.add_argument("--seeds", type=int, nargs="+", default=[0], help="one training per seed (default: 0)")
    p.add_argument("--epochs", type=float, help="passes over the training rows (default: the preset's)")
    p.add_argument("--lr", type=float, help="peak learning rate (default: the preset's)")
    p.add_argument("--batch", type=int, help="rows per step (default: the preset's)")
    p.add_argument("--against", metavar="DIR", help="paired tests against another result folder (of a uniform plan, say)")
    place = p.add_argument_group("model in memory")
    place.add_argument("--device", choices=DEVICES, default="auto", help="default: the accelerator where there is one")
    place.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="precision of the base's weights; auto (default): what the checkpoint holds, bfloat16 for float16",
    )
    place.add_argument("--four-bit", action="store_true", help="hold the base in 4 bits (NF4, needs bitsandbytes)")
    place.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again, to keep fewer")
    place.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast (always with --dtype bfloat16)")
    advanced = p.add_argument_group("advanced")
    advanced.add_argument("--preset", default="default", choices=("default", "paper"), help="training protocol")
    add_set(
        advanced,
        "a number of the protocol: start (gradients: ranks start in the top directions of the task's gradient), alpha_policy "
        "(constant-ratio, constant-alpha or rslora), accumulation, dropout, cutoff, warmup, ...",
    )
    add_resume(advanced, "finished seeds and checkpoints")


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Train, predict, summarise over seeds, and compare where asked."""
    import transformers

    from ..data.tasks import NAMES, load_task
    from ..data.text import read_texts
    from ..finetuning.adapters import classifier_loader
    from ..finetuning.finetune import finetune

    if a.task not in NAMES:
        refuse(a, ("data_dir",), "a task in a file of its own" if a.task else "--data")
    if a.task:
        refuse(a, ("held_out",), "a labelled task")
    plan, base, recipe = _validated_plan(a)
    protocol, rows = _protocol(a, base)
    tokenizer = load_tokenizer(a)
    task: Any
    if a.task:
        task = load_task(a.task, a.data_dir)
    else:
        task = read_texts(
            a.data,
            tokenizer,
            limit=protocol.cutoff,
            everything=protocol.on_prompt,
            held_out=a.held_out,
        )
    task = task.limited(rows)
    transformers.utils.logging.set_verbosity_error()  # the head's weights are missing from a bare encoder, as they should be
    _expect(a, base, task, protocol)
    del base  # every seed loads its own
    name, revision = split_revision(a.model)
    with progress_bar(a, f"finetune on {task.name}") as progress:
        Steps(progress, math.ceil(len(task.train) / protocol.batch * protocol.epochs), "loading")
        result = finetune(
            classifier_loader(
                name,
                len(getattr(task, "labels", ())),
                dtype=a.dtype,
                device=a.device,
                revision=revision,
                four_bit=a.four_bit,
                prepare=None if recipe is None else recipe.prepare,
                prepared=None if recipe is None else recipe.identity,
            ),
            plan,
            task,
            a.out,
            tokenizer=tokenizer,
            protocol=protocol,
            checkpointing=a.gradient_checkpointing,
            seeds=a.seeds,
            resume=a.resume,
            overwrite=a.overwrite,
            bf16=a.bf16,
            against=a.against,
            progress=progress,
        )
    _show(a.console, result)
    if recipe is not None:
        result = {**result, "recipe": _recounted(a, recipe, result["seeds"][0])}
    for split, tests in result.get("against", {}).items():
        a.console.print(f"{split}: {tests['verdict']}")
        a.console.print(f"{split}, in detail: {tests['samples']['sentence']}")
    return {**result, "output": a.out}


def _validated_plan(a: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Read the plan, refuse one that was made for another model; return that model too, and what a recipe says of its base."""
    from ..kinds import check_kind
    from ..models.blocks import describe
    from ..plan import Plan

    plan = Plan.load(a.plan)
    if plan.kind == "recipe":
        refuse(a, ("four_bit",), "a recipe, which says the base's formats")
    else:
        check_kind(plan.kind, ("ranks", "experts", "recipe"), "cannot be trained")
    base = load_model(a, stream=None, four_bit=False)  # a cast keeps the digest
    if plan.kind == "recipe":
        from ..decisions.joint.recipe import base_of

        recipe = base_of(plan, a.model, base)
        return recipe.ranks, base, recipe
    plan.validate(describe(base, a.model))
    return plan, base, None


def _protocol(a: argparse.Namespace, base: Any) -> tuple[Any, int | None]:
    """The preset with what was named, and the most training rows; rows of text may be longer than labelled ones."""
    from ..finetuning.protocol import PRESETS

    named, own = given(a, "epochs", "lr", "batch"), settings(a)
    if a.data and "cutoff" not in own:
        own["cutoff"] = min(LONGEST, getattr(base.config, "max_position_embeddings", None) or LONGEST)
    rows = own.pop("train_rows", None)
    return PRESETS[a.preset].changed({**own, **named}), rows


def _expect(a: argparse.Namespace, base: Any, task: Any, protocol: Any) -> None:
    """Say what will be trained on, and what it will cost; rows of a labelled task count a quarter of the longest allowed."""
    from ..doctor.cost import Text, training

    rows = ", ".join(f"{len(found)} {split}" for split, found in (("to train on", task.train), *task.evaluation.items()))
    lengths = [len(row.input_ids) for row in task.train if hasattr(row, "input_ids")] or [protocol.cutoff // 4]
    length, batch = max(1, sum(lengths) // len(lengths)), protocol.batch // protocol.accumulation
    text = Text(samples=len(task.train), length=length, batch=batch)
    steps, seeds = -(-len(task.train) // protocol.batch), ", ".join(map(str, a.seeds))
    held = sum(map(len, task.evaluation.values()))
    what = f"{task.name}: {rows}; {protocol.epochs:g} epochs of {steps} steps, seeds {seeds}"
    expect(a, what, base, lambda _: training(text, protocol.epochs, len(a.seeds), held))


def _recounted(a: argparse.Namespace, recipe: Any, seed: int) -> dict[str, int]:
    """Bytes of base and adapter, the latter counted in its file."""
    found: dict[str, int] = recipe.recount(Path(a.out) / f"seed-{seed}" / "adapter")
    where = a.model if recipe.written else "what `layerbudget apply MODEL RECIPE` writes"
    a.console.print(
        f"Recounted {found['base']} bytes of base and {found['adapter']} of adapter, {found['spent']} of {found['limit']}; "
        f"the adapter belongs on {where}."
    )
    return found


def _show(console: Any, result: dict[str, Any]) -> None:
    from rich.table import Table

    trained = f"{result['trained_parameters']:,} trained parameters"
    table = Table(title=f"{result['task']}: {result['kind']} by {result['rule']}, {trained}")
    for column in ("split", "metric", "mean over seeds", "standard error"):
        table.add_column(column)
    for split, metrics in result["metrics"].items():
        for name, m in metrics.items():
            error = "-" if m["stderr"] is None else f"{m['stderr']:.4f}"
            table.add_row(split, name, f"{m['value']:.4f}", error)
    console.print(table)
    if result["metric"] == "loss":
        console.print(f"Loss in nats per learned token, {result['rows']['held_out']} rows held out; before: the base model.")
