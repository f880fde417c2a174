"""A model with a plan's adapters for a task: names that fit it, what else is trained, and where the adapters start."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import nn

from ..data.tasks import Task
from ..data.text import Texts
from ..decisions.ranks.apply import add_ranks
from ..errors import InvalidInput
from ..plan import Plan
from .initialise import initialise_from_gradients, task_gradients
from .protocol import Protocol
from .rows import Rows, is_causal
from .text_rows import TextRows

logger = logging.getLogger(__name__)


def fit_names(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with module names as this model has them: an encoder gains a prefix when a head is put on it."""
    names = {n for n, _ in model.named_modules()}
    prefix = getattr(model, "base_model_prefix", "")
    if all(m in names for b in plan.blocks for m in b.modules) or not prefix:
        return plan

    def fitted(name: str) -> str:
        bare = name.removeprefix(prefix + ".")
        return next((n for n in (name, f"{prefix}.{bare}", bare) if n in names), name)

    blocks = tuple(
        dataclasses.replace(b, name=fitted(b.name), modules=tuple(fitted(m) for m in b.modules)) for b in plan.blocks
    )
    return dataclasses.replace(plan, blocks=blocks)


def adapt(model: nn.Module, plan: Plan, protocol: Protocol) -> nn.Module:
    """Add the plan's adapters; a BERT-style pooler is trained with the head (frozen, it lets nothing be learned).

    Raises:
        InvalidInput: A plan of another kind than ranks or experts.
        UnknownBlock: The plan names a module that the model does not have.
        CoverageError: The recount differs from the plan.
    """
    plan = fit_names(plan, model)
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if not is_causal(model):
        options = {"task_type": "SEQ_CLS"}
        if any(n.rpartition(".")[2] == "pooler" and any(True for _ in m.parameters()) for n, m in model.named_modules()):
            options["modules_to_save"] = ["pooler"]
    if plan.kind == "ranks":
        options |= {"alpha_policy": protocol.alpha_policy, "ratio": protocol.ratio}
        return _in_float32(add_ranks(model, plan, validate=False, dropout=protocol.dropout, **options))
    if plan.kind == "experts":
        from ..decisions.experts.method import add_experts

        if protocol.alpha_policy != "constant-ratio":
            raise InvalidInput(
                f"alpha_policy is {protocol.alpha_policy!r} for a plan of experts.", "All experts have one rank.", "Leave it."
            )
        options |= {"lora_alpha": protocol.alpha, "lora_dropout": protocol.dropout, "balance_coefficient": protocol.balance}
        return _in_float32(add_experts(model, plan, validate=False, top_k=protocol.top_k, **options))
    raise InvalidInput(f"A plan of kind {plan.kind!r} cannot be trained.", "Kinds are ranks and experts.", "Plan one of those.")


def _in_float32(model: nn.Module) -> nn.Module:
    """Hold what is trained in float32 whatever the base is held in: PEFT does so for its adapters, not for heads."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def started(plain: nn.Module, plan: Plan, protocol: Protocol, rows: Rows | TextRows, task: Task | Texts) -> nn.Module:
    """Adapt a model and give its adapters the protocol's start.

    Raises:
        InvalidInput: Experts with a start of their own: all experts of a module would begin equal.
    """
    if protocol.start == "default":
        return adapt(plain, plan, protocol)
    if plan.kind != "ranks":
        raise InvalidInput(
            f"start is {protocol.start!r} for a plan of {plan.kind}.", "It is for ranks: experts must begin apart.", "Leave it."
        )
    if not rows.causal:
        logger.warning("Gradients through an untrained head are a poor start: compare with the default one.")
    modules = [m for b in fit_names(plan, plain).blocks if b.count for m in b.modules]
    gradients = task_gradients(plain, rows, task.train, modules)
    model = adapt(plain, plan, protocol)
    initialise_from_gradients(model, gradients, norm=1.0)
    return model
