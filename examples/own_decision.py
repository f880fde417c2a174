"""A decision of one's own: which layers stay in bfloat16 while all others are rounded to 8 bits.

One registration gives it a command, a file of its plans, an explanation, a page, an export and an application::

    layerbudget plan examples/own_decision.py:kept16 demo --keep 3 -o kept.json
    layerbudget explain kept.json --plugin examples/own_decision.py
    layerbudget export kept.json --plugin examples/own_decision.py
    layerbudget apply demo kept.json -o KEPT --plugin examples/own_decision.py
"""

import dataclasses
import json

import torch

import layerbudget as lb
from layerbudget.decision import DECISIONS, Decision, Export, Summary
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import describe, weight_of
from layerbudget.plan import PlanBlock, payload_of
from layerbudget.records import Receipt
from layerbudget.requests import option
from layerbudget.session import PlanRequest


@dataclasses.dataclass(kw_only=True)
class Kept16Request(PlanRequest):
    """Which layers stay in bfloat16 while all others are rounded to 8 bits."""

    command = "plan kept16"
    keep: int = option(2, help="so many layers stay in bfloat16 (default: 2)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept16Payload:
    """What only such plans say: the squared rounding error of every layer, as a share of its squared weights."""

    errors: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept16Receipt(Receipt):
    """What was counted: matrices that were rounded, and those that stay."""

    rounded: int
    kept: int


def rounded(weight):
    """Return a matrix on a grid of 8 bits with one scale a row."""
    scale = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-30) / 127
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


def plan_kept16(model, *, keep=2):
    """Return the plan that keeps the layers which rounding would change most."""
    blocks, errors = lb.partition(model), {}
    if not 0 <= keep <= len(blocks):
        raise InvalidInput(f"keep is {keep}.", f"The model has {len(blocks)} layers.", f"Use a number from 0 to {len(blocks)}.")
    for block in blocks:
        weights = [weight_of(model, module.name)[1].detach() for module in block.modules]
        change = sum(float((rounded(w).float() - w.float()).square().sum()) for w in weights)
        errors[block.name] = change / sum(float(w.float().square().sum()) for w in weights)
    stay = sorted(errors, key=errors.__getitem__, reverse=True)[:keep]
    return lb.Plan(
        kind="kept16",
        rule="largest-error",
        model=describe(model),
        blocks=tuple(PlanBlock.of(b, 16.0 if b.name in stay else 8.0, int(b.name in stay)) for b in blocks),
        budget={"unit": "layers", "limit": keep, "spent": keep},
        hyperparameters={"keep": keep},
        payload=Kept16Payload(errors=errors),
    )


def apply_kept16(model, plan, data=None):
    """Round every matrix of the other layers, in place, and return what was counted."""
    identity = describe(model)
    plan.validate(identity)
    counts = {True: 0, False: 0}
    for name, block in plan.by_module().items():
        counts[block.count == 1] += 1
        if block.count == 0:
            weight = weight_of(model, name)[1]
            with torch.no_grad():
                weight.copy_(rounded(weight))
    counted = {"rounded": counts[False], "kept": counts[True]}
    return Kept16Receipt(plan_digest=plan.digest, identity=identity, model=model, **counted)


def skipped_modules(plan):
    """Return the matrices that bitsandbytes leaves alone, as JSON."""
    return json.dumps({"llm_int8_skip_modules": [m for m, block in plan.by_module().items() if block.count]}, indent=1) + "\n"


class Kept16(Decision):
    """The layers that stay in bfloat16."""

    name, summary = "kept16", "which layers stay in bfloat16 while all others are rounded to 8 bits"
    decides, counts, command, writes, whole = "bits", "1 where the layer stays", "apply", True, False
    Request, Payload = Kept16Request, Kept16Payload
    exports = (
        Export(
            name="skip-modules",
            call=skipped_modules,
            kinds=("kept16",),
            file="skip.json",
            summary="bitsandbytes' llm_int8_skip_modules",
            use="BitsAndBytesConfig(load_in_8bit=True, **json.load(open('{file}'))) leaves these matrices alone.",
        ),
    )

    def apply(self, model, plan, data=None, **options):
        """See :func:`apply_kept16`."""
        return apply_kept16(model, plan, data, **options)

    def plan(self, session):
        """Plan from the weights alone: no text is read."""
        model, _, _ = session.load(data=False)
        return plan_kept16(model, keep=session.request.keep)

    def write(self, session, plan):
        """Round and save an ordinary checkpoint, with the plan beside it."""
        model, tokenizer, _ = session.load(data=False)
        receipt = apply_kept16(model, plan)
        model.save_pretrained(session.request.out)
        tokenizer.save_pretrained(session.request.out)
        plan.save(f"{session.request.out}/plan.json")
        session.say(f"{receipt.rounded} matrices were rounded and {receipt.kept} stay; saved to {session.request.out}.")
        return {**receipt.counted(), "output": session.request.out, **session.end(plan)}

    def describe(self, plan):
        """Return what is said of such a plan."""
        errors = payload_of(plan, Kept16Payload).errors
        stay = [block.name for block in plan.blocks if block.count]
        whole = sum(errors.values()) or 1.0
        share = sum(errors[name] for name in stay) / whole
        return Summary(
            title=f"{len(stay)} layers in bfloat16 for",
            verdict=f"{len(stay)} of {len(plan.blocks)} layers stay in bfloat16; they have {share:.0%} of the rounding error.",
            expected="Verdict: the damage was not measured; compare it with the dense model on text of your own.",
            sentences=[f"{name} stays: rounding would change {errors[name]:.2g} of its squared weights." for name in stay],
        )


DECISIONS.add("kept16", Kept16())


if __name__ == "__main__":
    model = lb.load_model("demo")
    plan = plan_kept16(model, keep=3)
    print(Kept16().describe(plan).verdict)
    print(lb.apply_plan(model, plan))
