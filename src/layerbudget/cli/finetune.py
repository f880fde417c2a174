"""``layerbudget finetune``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ..finetuning.protocol import ALPHA_POLICIES, DEVICES, STARTS, TRAINERS
from ..progress import Steps
from .progress import progress_bar
from .shared import add_skip, named_values, refuse


def register(subparsers: Any) -> None:
    """Add the parser of ``finetune``."""
    parser = subparsers.add_parser("finetune")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id: a causal LM or an encoder")
    parser.add_argument("plan", metavar="PLAN", help="plan.json of kind ranks or experts, made for this model")
    learned = parser.add_mutually_exclusive_group(required=True)
    learned.add_argument(
        "--data", metavar="DATA", help="text for a language model: rows of messages, conversations, prompt and completion, "
        "instruction and output (loss on the answers), or text; a .jsonl, .json or .parquet file, a folder, a hub dataset",
    )  # fmt: skip
    learned.add_argument(
        "--task", help="labels: cola, mrpc, rte, commonsenseqa, openbookqa, scienceqa, or a .jsonl, .json or .csv file"
    )
    parser.add_argument("--held-out", metavar="DATA", help="with --data: held-out text (default: a tenth of the rows)")
    add_skip(parser)
    parser.add_argument("--packing", action="store_true", help="with --data: several rows in one sequence, kept apart")
    parser.add_argument(
        "--trainer", choices=TRAINERS, help="with --data: trl trains by TRL's SFTTrainer, on the same tokens (default: own)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="folder with the task's original files")
    parser.add_argument("--preset", default="default", choices=("default", "paper"), help="training protocol")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=float, help="passes over the training rows (default: the preset's)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: the preset's)")
    parser.add_argument("--batch", type=int, help="rows per step (default: the preset's)")
    parser.add_argument("--accumulation", type=int, help="backward passes per step, causal LMs only")
    parser.add_argument("--balance", type=float, help="weight of the load-balancing loss of experts (default 0)")
    parser.add_argument("--train-rows", type=int, help="use so many training rows only")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=VALUE",
        help="another number of the protocol: dropout, cutoff, warmup, ratio, weight_decay, ... (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--device", choices=DEVICES, default="auto", help="default: the accelerator where there is one")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="precision of the base's weights; auto (default): what the checkpoint holds, bfloat16 for float16",
    )  # fmt: skip
    parser.add_argument("--four-bit", action="store_true", help="hold the base in 4 bits (NF4, needs bitsandbytes)")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="compute activations again instead of keeping them"
    )
    parser.add_argument("--revision", help="hub revision of the model")
    parser.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast (always with --dtype bfloat16)")
    parser.add_argument("--replan", type=float, metavar="FRACTION", help="plan again once after this fraction of training")
    parser.add_argument(
        "--start",
        choices=STARTS,
        help="gradients: ranks start in the top directions of the task's gradient, for causal LMs (default: PEFT's)",
    )
    parser.add_argument(
        "--alpha-policy",
        choices=ALPHA_POLICIES,
        help="scale of an update by its rank: one alpha/r everywhere (default), one alpha (alpha/r), or rsLoRA's alpha/sqrt(r)",
    )
    parser.add_argument("--resume", metavar="DIR", help="keep finished seeds and checkpoints here; a stopped run goes on")
    parser.add_argument("--against", metavar="DIR", help="paired tests against another result folder (of a uniform plan, say)")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="train every N-th seed only: N processes share --resume")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the adapters and results")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, predict, summarise over seeds, and compare where asked."""
    from ..data.tasks import NAMES, load_task
    from ..data.text import read_texts
    from ..finetuning.adapters import classifier_loader
    from ..finetuning.finetune import finetune
    from ..models.loading import load_tokenizer

    part = _part(arguments)
    if arguments.task not in NAMES:
        refuse(arguments, ("data_dir",), "a task in a file of its own" if arguments.task else "--data")
    if arguments.task:
        refuse(arguments, ("held_out", "packing", "trainer", "skip_bad_rows"), "a labelled task")
    plan, base, recipe = _validated_plan(arguments)
    protocol = _protocol(arguments, base)
    tokenizer = load_tokenizer(arguments.model, revision=arguments.revision)
    task: Any
    if arguments.task:
        task = load_task(arguments.task, arguments.data_dir)
    else:
        task = read_texts(
            arguments.data,
            tokenizer,
            limit=protocol.cutoff,
            everything=protocol.on_prompt,
            held_out=arguments.held_out,
            skip_bad_rows=arguments.skip_bad_rows,
        )
    task = task.limited(arguments.train_rows)
    import transformers

    transformers.utils.logging.set_verbosity_error()  # the head's weights are missing from a bare encoder, as they should be
    _expect(arguments, base, task, protocol)
    del base  # every seed loads its own
    with progress_bar(arguments, f"finetune on {task.name}") as progress:
        Steps(progress, math.ceil(len(task.train) / protocol.batch * protocol.epochs), "loading")
        result = finetune(
            classifier_loader(
                arguments.model, len(getattr(task, "labels", ())), dtype=arguments.dtype, device=arguments.device,
                revision=arguments.revision, four_bit=arguments.four_bit,
                prepare=None if recipe is None else recipe.prepare, prepared=None if recipe is None else recipe.identity,
            ),
            tokenizer, plan, task, arguments.out, protocol=protocol,
            checkpointing=arguments.gradient_checkpointing, seeds=arguments.seeds, resume=arguments.resume,
            overwrite=arguments.overwrite, bf16=arguments.bf16, replan=arguments.replan, against=arguments.against,
            progress=progress, part=part,
        )  # fmt: skip
    _show(arguments.console, result)
    if recipe is not None:
        result = {**result, "recipe": _recounted(arguments, recipe, result["seeds"][0])}
    for split, tests in result.get("against", {}).items():
        arguments.console.print(f"{split}: {tests['verdict']}")
        arguments.console.print(f"{split}, in detail: {tests['samples']['sentence']}")
    return {**result, "output": arguments.out}


def _part(arguments: argparse.Namespace) -> tuple[int, int]:
    """Which of the seeds are trained here.

    Raises:
        InvalidInput: No such part.
    """
    from ..errors import InvalidInput
    from ..storage.parts import parse_part

    part = parse_part(arguments.part)
    if not 1 <= part[0] <= part[1] <= len(arguments.seeds):
        raise InvalidInput(
            f"The part is {arguments.part} of {len(arguments.seeds)} seeds.", "It is I/N with 1 <= I <= N <= seeds.",
            "Write for example 1/2.",
        )  # fmt: skip
    if part[1] > 1:
        refuse(arguments, ("against", "overwrite"), "a part, which writes no summary")
    return part


def _expect(arguments: argparse.Namespace, base: Any, task: Any, protocol: Any) -> None:
    """Say what will be trained on, and what it will cost; rows of a labelled task count a quarter of the longest allowed."""
    from ..doctor.cost import Text, training
    from .outlook import expect

    rows = ", ".join(f"{len(found)} {split}" for split, found in (("to train on", task.train), *task.evaluation.items()))
    lengths = [len(row.input_ids) for row in task.train if hasattr(row, "input_ids")] or [protocol.cutoff // 4]
    text = Text(
        samples=len(task.train), length=max(1, sum(lengths) // len(lengths)), batch=protocol.batch // protocol.accumulation
    )
    held, seeds = sum(map(len, task.evaluation.values())), len(arguments.seeds)
    what = (
        f"{task.name}: {rows}; {protocol.epochs:g} epochs of {-(-len(task.train) // protocol.batch)} steps, "
        f"seeds {', '.join(map(str, arguments.seeds))}"
    )
    expect(arguments, what, base, lambda shape: training(text, protocol.epochs, seeds, held))


LONGEST = 1024  # tokens of a row of text where no cutoff is named, as TRL has it


def _protocol(arguments: argparse.Namespace, base: Any) -> Any:
    """The preset with what was named; rows of text may be longer than labelled ones."""
    from ..finetuning.protocol import PRESETS

    named = ("epochs", "lr", "batch", "accumulation", "balance", "start", "alpha_policy", "trainer")
    given = {k: getattr(arguments, k) for k in named if getattr(arguments, k) is not None}
    settings = named_values(arguments.settings)
    if arguments.data and "cutoff" not in settings:
        settings["cutoff"] = min(LONGEST, getattr(base.config, "max_position_embeddings", None) or LONGEST)
    if arguments.packing:
        given["packing"] = True
    return PRESETS[arguments.preset].changed({**settings, **given})


def _recounted(arguments: argparse.Namespace, recipe: Any, seed: int) -> dict[str, int]:
    """Bytes of base and adapter, the latter counted in its file."""
    found: dict[str, int] = recipe.recount(Path(arguments.out) / f"seed-{seed}" / "adapter")
    where = arguments.model if recipe.written else "what `layerbudget quantize MODEL RECIPE` writes"
    arguments.console.print(
        f"Recounted {found['base']} bytes of base and {found['adapter']} of adapter, {found['spent']} of {found['limit']}; "
        f"the adapter belongs on {where}."
    )
    return found


def _validated_plan(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Read the plan, refuse one that was made for another model; return that model too, and what a recipe says of its base."""
    from ..kinds import check_kind
    from ..models.blocks import describe
    from ..models.loading import load_model
    from ..plan import Plan

    plan = Plan.load(arguments.plan)
    if plan.kind == "recipe":
        refuse(arguments, ("four_bit", "replan"), "a recipe, which says the base's formats")
    else:
        check_kind(plan.kind, ("ranks", "experts", "recipe"), "cannot be trained")
    base = load_model(  # a cast keeps the digest
        arguments.model, dtype=arguments.dtype, revision=arguments.revision, device=arguments.device
    )
    if plan.kind == "recipe":
        from ..decisions.joint.adapters import base_of

        recipe = base_of(plan, arguments.model, base)
        return recipe.ranks, base, recipe
    plan.validate(describe(base, arguments.model))
    return plan, base, None


def _show(console: Any, result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        title=f"{result['task']}: {result['kind']} by {result['rule']}, {result['trained_parameters']:,} trained parameters"
    )
    for column in ("split", "metric", "mean over seeds", "standard error"):
        table.add_column(column)
    for split, metrics in result["metrics"].items():
        for name, m in metrics.items():
            error = "-" if m["stderr"] is None else f"{m['stderr']:.4f}"
            table.add_row(split, name, f"{m['value']:.4f}", error)
    console.print(table)
    if result["metric"] == "loss":
        console.print(f"Loss in nats per learned token, {result['rows']['held_out']} rows held out; before: the base model.")
    for split, seeds in result["one_class"].items():
        if seeds:
            which = ", ".join(map(str, seeds))
            console.print(f"{split}: every row got the same label with seed {which}; the accuracy is that label's share.")
