"""The mixture under the Trainer, under two gloo processes and on a 4-bit base."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from peft import get_peft_model
from tests import zoo
from torch import nn
from transformers import Trainer, TrainingArguments

from layerbudget.decisions.lora_experts.method import BalanceScale, ExpertsConfig


def experts_for(model, counts, **options) -> ExpertsConfig:
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]
    pattern = {re.escape(n): counts[int(re.search(r"layers\.(\d+)", n).group(1))] for n in names}
    return ExpertsConfig(r=2, lora_alpha=4, target_modules=names, experts_pattern=pattern, task_type="CAUSAL_LM", **options)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=16):
        self.ids = torch.randint(3, 61, (count, 8), generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer(folder, steps, accumulation=1, batch=4, rate=1e-2, callbacks=(), **options):
    model = get_peft_model(zoo.adaptable(2), experts_for(zoo.adaptable(2), [3, 2], **options))
    zoo.perturb(model, scale=0.1)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=rate,
        report_to=[],
        gradient_accumulation_steps=accumulation,
        save_steps=2,
        logging_steps=1,
        seed=3,
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd" if rate > 1 else "adamw_torch",
    )
    return Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=list(callbacks))


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def test_trainer_learns_and_resumes_to_the_same_weights(tmp_path):
    whole = trainer(tmp_path / "whole", 4)
    start = weights(whole.model)
    whole.train()
    assert all(not torch.equal(start[n], p) for n, p in weights(whole.model).items())
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    resumed = trainer(tmp_path / "whole", 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected = weights(whole.model)
    assert all(torch.equal(expected[n], p) for n, p in weights(resumed.model).items())


def test_accumulation_leaves_the_balance_weight_as_it_is(tmp_path):
    """The balance term moves the router as much for one batch of 8 as for 4 accumulated batches of 2."""

    def movement(accumulation, callbacks):
        moved = []
        for coefficient in (0.0, 50.0):
            run = trainer(
                tmp_path / f"{accumulation}{coefficient}{len(callbacks)}",
                1,
                accumulation,
                8 // accumulation,
                2.0,
                callbacks,
                balance_coefficient=coefficient,
            )
            start = weights(run.model)
            run.train()
            moved.append({n: p - start[n] for n, p in weights(run.model).items() if "router" in n})
        return sum((moved[1][n] - moved[0][n]).norm() for n in moved[0])

    one, four, careless = movement(1, [BalanceScale()]), movement(4, [BalanceScale()]), movement(4, [])
    assert one > 0.1
    assert 0.7 < four / one < 1.4  # the statistics of four small batches differ a little from those of one
    assert 3.5 < careless / four < 4.5


def _ddp_worker(rank, folder):
    from datetime import timedelta
    from pathlib import Path

    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    store = distributed.FileStore(str(Path(folder) / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    layer, x = _starving_layer()
    wrapped = DistributedDataParallel(layer)
    wrapped(x[rank : rank + 1]).pow(2).mean().backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in layer.named_parameters() if p.grad is not None}, Path(folder) / "g.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def _starving_layer():
    """Ten experts and three tokens a process: most experts see no token at all."""
    from layerbudget.decisions.lora_experts.layer import ExpertsLinear, Routing

    torch.manual_seed(0)
    config = ExpertsConfig(r=2, target_modules=["x"], init_weights=False, top_k=2)
    base = nn.Linear(6, 5).requires_grad_(False)
    layer = ExpertsLinear(base, "default", 10, config, Routing())
    return layer, torch.randn(2, 3, 6)


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path):
    import torch.multiprocessing as processes

    running = processes.spawn(_ddp_worker, args=(str(tmp_path),), nprocs=2, join=False)
    try:
        finished = any(running.join(timeout=150) for _ in range(4))
    finally:
        for process in running.processes:
            process.kill()
    assert finished, "the two processes did not finish"
    layer, x = _starving_layer()
    layer(x).pow(2).mean().backward()
    got = torch.load(tmp_path / "g.pt")
    expected = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys() and len(got) == 3
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, atol=1e-6), name


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_four_bit_base_trains(tmp_path):
    from transformers import BitsAndBytesConfig, MistralForCausalLM

    zoo.adaptable(2, hidden_size=128, intermediate_size=128, head_dim=32, num_key_value_heads=4).save_pretrained(tmp_path)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = MistralForCausalLM.from_pretrained(tmp_path, quantization_config=four_bit, device_map={"": "cpu"})
    model = get_peft_model(base, experts_for(base, [3, 2]))
    zoo.perturb(model, scale=0.1)
    model(input_ids=Rows().ids[:2], labels=Rows().ids[:2]).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
