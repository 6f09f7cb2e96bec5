"""Training a model of transformers on sequences that the ranks share.

    pip install -c constraints.txt -e '.[transformers]'
    torchrun --nproc-per-node 2 examples/integrations/transformers_two_ranks.py

The model has sliding windows, and its sequences are packed documents. Every rank also trains the same model alone on
whole sequences, by transformers' own loss, and compares losses and gradients. The example runs on GPUs if each rank has
one, else on CPUs over gloo.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import MistralConfig, MistralForCausalLM

from cp_dtensor import context_parallel
from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, check_model, register

VOCABULARY, LENGTH, BATCH, STEPS = 61, 48, 2, 3


def start() -> torch.device:
    """Start the process group, and return this rank's device."""
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def fresh_model(attn_implementation: str, device: torch.device) -> Any:
    """A model with equal weights each time, in float64, so that results differ by rounding only."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=10,
    )  # fmt: skip
    model: Any = MistralForCausalLM(config).double()
    model.to(device)
    model.set_attn_implementation(attn_implementation)
    return model


def batch(step: int, device: torch.device) -> dict[str, Any]:
    """(B, S) tokens, labels, and position ids that begin again in each document."""
    text = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    edge = 11 + step
    positions = torch.cat([torch.arange(edge), torch.arange(LENGTH - edge)]).expand(BATCH, -1)
    named = {"input_ids": text, "labels": text.clone(), "position_ids": positions}
    return {name: tensor.to(device) for name, tensor in named.items()}


def main() -> None:
    """Trains on the ranks and alone, and compares.

    Raises:
        AssertionError: a loss or a gradient differs from that of one process.
    """
    device = start()
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, alone = fresh_model(register(), device), fresh_model("sdpa", device)
    assert not check_model(model)
    replicated = DistributedDataParallel(model, process_group=mesh.get_group())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, alone)]
    for step in range(STEPS):
        ours = ModelBatch(**batch(step, device))
        with context_parallel(mesh, **ours.buffers):
            assert ours.shift_labels is not None
            # With a cache, transformers lets packed documents attend to each other.
            logits = replicated(**ours.inputs, use_cache=False).logits
            loss = causal_lm_loss(logits, ours.shift_labels)  # scaled for gradients that are averaged
            loss.backward()  # DistributedDataParallel averages them
        expected = alone(**batch(step, device), use_cache=False).loss
        expected.backward()
        torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=1e-6)
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, one process {expected.item():.6f}")
    if dist.get_rank() == 0:
        print("losses and gradients are those of one process")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    main()
