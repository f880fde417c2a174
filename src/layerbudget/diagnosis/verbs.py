"""Parts of every long verb, as users type it: the rows of what ``doctor`` prices."""

from __future__ import annotations

import dataclasses

from ..compressors.formats import TOKENS
from ..cost.sizes import Text
from ..cost.verbs import comparing, training
from ..cost.work import SCORES, WorkItem, scoring, treating
from ..decisions.bits import both_uses, choosing
from ..decisions.expert_pruning import removing
from ..decisions.shapes import shaping
from ..decisions.sparsity import searching


def demonstrating() -> list[WorkItem]:
    """Parts of ``demo``: it scores, searches twice, and prunes and measures four plans at two targets."""
    text = Text(samples=64)
    treated = [dataclasses.replace(part, times=8.0) for part in treating("wanda", text)]
    search = [dataclasses.replace(part, times=2.0) for part in searching(Text(samples=16), 24.0)]
    return [*scoring("fisher-gram", text), *search, *treated, WorkItem("forward", Text(samples=96), times=9.0)]


def long_verbs(
    *,
    samples: int | None = None,
    length: int = 256,
    batch: int = 8,
    demo: bool = False,
    experts: bool = False,
    widest: int = 0,
    tied: int = 0,
) -> dict[str, list[WorkItem]]:
    """Parts of every long verb by what users type, each at its own default sizes or at those given.

    Args:
        samples: Samples of text; each verb's default where it is None.
        length: Tokens of a sample.
        batch: Sequences per pass.
        demo: Whether the model is the demo's.
        experts: Whether the model has routed experts: ``plan expert-pruning`` is then among the verbs.
        widest: Columns of the widest matrix, which say how much text error feedback wants.
        tied: Columns of a matrix that is embedding and head, which error feedback rounds for both uses.
    """

    def text(default: int) -> Text:
        return Text(samples=samples or default, length=length, batch=batch)

    verbs = {f"score {name}": scoring(name, text(128)) for name in SCORES}
    verbs |= {"plan sparsity": searching(text(16), 24.0), "plan shapes": shaping(text(16), 46.0)}
    verbs |= {"plan bits": choosing(text(32), text(16))}
    much = text(max(32, -(-TOKENS * widest // length)))
    verbs |= {"plan bits --method gptq": choosing(much, text(16), method="gptq", tied=tied)}
    verbs |= {"plan expert-pruning": removing(text(16))} if experts else {}
    verbs |= {f"apply, {method}": treating(method, text(128)) for method in ("wanda", "sparsegpt", "rtn", "gptq")}
    verbs["apply, gptq"] += both_uses("gptq", text(128), tied)
    verbs |= {"finetune": training(text(128), 1.0, 1, 0), "evaluate": [WorkItem("forward", text(96))]}
    verbs["compare"] = comparing(text(64), text(96), ["fisher-gram"], "wanda", seeds=1, plans=3)
    return {**verbs, "demo": demonstrating()} if demo else verbs
