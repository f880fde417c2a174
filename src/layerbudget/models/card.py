"""The model card beside what was made by a plan: what it was made from, its figures and the command. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..decision import decision_of
from ..plan import Plan
from ..records import made_by

LOAD = "from transformers import {auto}\nmodel = {auto}.from_pretrained('.')"
TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}


def loading(architecture: str, *, alike: bool = True, labels: Sequence[str] = ()) -> str:
    """Lines of Python that load a checkpoint of a class, whose layers have as many experts or are not ``alike`` in that.

    With ``labels`` a class of a head for labels gets a new head with their number and names.

    >>> loading("LlamaForCausalLM").splitlines()[0]
    'from transformers import AutoModelForCausalLM'
    """
    if not alike:
        return "import layerbudget as lb\nmodel = lb.load_model('.')"
    ending = next((ending for ending in TASKS if architecture.endswith(ending)), "")
    load = LOAD.format(auto=f"AutoModel{'ForCausalLM' if ending == 'LMHeadModel' else ending}")
    if not labels or not ending.endswith("Classification"):
        return load
    options = f"num_labels={len(labels)}, ignore_mismatched_sizes=True, id2label={dict(enumerate(map(str, labels)))}"
    return load.replace("'.')", f"'.', {options})")


def hub_name(plan: Plan) -> str | None:
    """The name on the hub of the model that a plan was made for; None for one that came from a folder or a file."""
    where = str(plan.model.get("id") or "")
    on_hub = where.count("/") == 1 and not Path(where).exists() and not where.startswith((".", "/", "~"))
    return where if on_hub else None


def model_card(
    plan: Plan,
    relation: str,
    done: str,
    what: str,
    rows: Mapping[str, str],
    use: str,
    *,
    architecture: str = "",
    library: str | None = "transformers",
    tags: Sequence[str] = (),
    more: str = "",
) -> str:
    """``README.md`` for the Hugging Face hub: metadata with the base model, a table of figures, the command, and the use.

    Args:
        plan: What was applied.
        relation: What the model is to its base, in the hub's words: adapter, finetune or quantized. A pruned model is a
            finetune there: the hub has no closer word.
        done: As in "quantised by a plan", for the title.
        what: What became of the model's weights, as the end of "The weights of MODEL, ...".
        rows: Figures, by what they are of.
        use: How it is used, as lines of a shell or of Python.
        architecture: Name of the model's class, which says the task; none for an adapter's.
        library: What loads it.
        tags: Tags of the hub.
        more: Text at the end.
    """
    base = hub_name(plan)
    head: dict[str, Any] = {"base_model": base, "base_model_relation": relation} if base else {}
    head |= {"quantized_by": "layerbudget"} if relation == "quantized" else {}
    task = next((t for ending, t in TASKS.items() if architecture.endswith(ending)), None)
    head |= {"pipeline_tag": task} if task else {}
    head |= {"library_name": library} if library else {}
    head |= {"tags": list(tags)} if tags else {}
    meta = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items())
    figures = {"chosen by": f"{plan.rule}, over {len(plan.blocks)} blocks", **decision_of(plan).describe(plan).figures}
    table = "".join(f"| {name} | {text} |\n" for name, text in {**rows, **figures}.items())
    command = made_by()
    made = f"\nMade by\n\n    {command}\n" if command else ""
    named = f"[{base}](https://huggingface.co/{base})" if base else "a model"
    title = f"{Path(str(plan.model.get('id') or '')).name or 'Model'}, {done} by a plan"
    lines = "".join(f"    {line}\n" for line in use.splitlines())
    body = f"The weights of {named}, {what}\n\n| | |\n|---|---|\n{table}{made}\nUse it:\n\n{lines}{more}"
    return f"---\n{meta}---\n\n# {title}\n\n{body}"
