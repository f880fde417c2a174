"""Experts under fully sharded training, two gloo processes: a step and a saved adapter equal those of one process."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

IDS = torch.arange(32).view(2, 16)


def _model():
    from peft import get_peft_model
    from transformers import MistralConfig, MistralForCausalLM

    from layerbudget.decisions.lora_experts.method import ExpertsConfig

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    experts = ExpertsConfig(r=2, target_modules=["q_proj", "up_proj"], experts=3, top_k=2, init_weights=False)
    return get_peft_model(MistralForCausalLM(config), experts)


def _step(model, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def _nested_wrappers(model, ids):
    """FSDP's wrappers around every decoder layer, which change the names of tensors."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={MistralDecoderLayer})
    sharded = FullyShardedDataParallel(model, use_orig_params=True, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    _step(sharded, ids)
    with FullyShardedDataParallel.summon_full_params(sharded, writeback=False):
        return {k: v.detach().clone() for k, v in sharded.module.state_dict().items()}


def _distributed_tensors(model, ids):
    """``fully_shard`` of every decoder layer: parameters are DTensors between the passes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _step(model, ids)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _worker(rank, folder, shard):
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(str(Path(folder) / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    model = _model()
    gathered = shard(model, IDS[rank : rank + 1])
    if rank == 0:
        model.save_pretrained(str(Path(folder) / "adapter"), state_dict=gathered)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("shard", [_nested_wrappers, _distributed_tensors])
def test_a_sharded_step_and_its_saved_adapter_equal_one_process(tmp_path, shard):
    import torch.multiprocessing as processes
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    running = processes.spawn(_worker, args=(str(tmp_path), shard), nprocs=2, join=False)
    try:
        finished = any(running.join(timeout=150) for _ in range(4))
    finally:
        for process in running.processes:
            process.kill()
    assert finished, "the two processes did not finish"
    model = _model()
    _step(model, IDS)
    got, expected = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), get_peft_model_state_dict(model)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(got[name], value, atol=1e-6), name
