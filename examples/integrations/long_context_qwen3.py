"""Training of Qwen3 on one sequence that the ranks share, with little memory beside attention.

    pip install -c constraints.txt -e '.[kernels,transformers]' liger-kernel
    torchrun --nproc-per-node 2 examples/integrations/long_context_qwen3.py
    torchrun --nproc-per-node 8 examples/integrations/long_context_qwen3.py --tokens 1048576

On CPUs it trains a tiny model, and compares losses and gradients with the same model in one process. On GPUs it trains
Qwen3-8B with random weights on random tokens. What a rank with T tokens of D numbers keeps until backward:

- of a layer its input, T x D, in the host's memory (`save_on_cpu`), and the output of its attention, T x D, in the
  GPU's: a checkpoint recomputes the rest, but no attention. `keep_attention=False` recomputes attention too;
- of an MLP tiles of the sequence, whose hidden rows are computed again in backward;
- of the loss tiles too, by Liger's kernel: the logits of all tokens, T x vocabulary, never exist.

FSDP2 shards parameters, gradients and the state of the optimizer over the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers import Qwen3Config, Qwen3ForCausalLM

from cp_dtensor import ATTENTION_OPS, context_parallel
from cp_dtensor.integrations.transformers import ModelBatch, register

QWEN3_8B: Any = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=1 << 20, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
TINY: Any = Qwen3Config(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
)  # fmt: skip


class TokenLosses(nn.Module):
    """The sum of the cross entropies of this rank's tokens, in tiles of `tile` tokens.

    Args:
        model: a causal language model of transformers, of which this calls all but the head.
        tile: tokens whose logits are in memory at once; Liger chooses its own.
    """

    def __init__(self, model: Any, tile: int) -> None:
        super().__init__()
        self.model, self.tile = model, tile

    def forward(self, shift_labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the sum, of (B, S) labels; -100 does not count."""
        hidden = self.model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        weight, labels = self.model.lm_head.weight, shift_labels.flatten()
        if hidden.is_cuda:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            # The gradient of the weight is a sum over many chunks.
            liger = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
            return liger(weight, hidden, labels)
        tiles = zip(hidden.split(self.tile), labels.split(self.tile), strict=True)
        return torch.stack([checkpoint(loss_of_tile, weight, *tile, use_reentrant=False) for tile in tiles]).sum()


def loss_of_tile(weight: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the cross entropies of (T, D) rows."""
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def compute_in_tiles(module: nn.Module, tile: int) -> None:
    """Makes a module whose tokens do not see each other compute `tile` tokens at a time, again in backward."""
    whole = module.forward

    def tiled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([checkpoint(whole, rows, use_reentrant=False) for rows in x.split(tile, 1)], 1)

    module.forward = tiled


def checkpoint_layer(layer: nn.Module, keep_attention: bool) -> None:
    """Makes a layer keep its input, in the host's memory, and perhaps its attention; the rest is computed again."""
    whole = layer.forward
    keep = partial(create_selective_checkpoint_contexts, list(ATTENTION_OPS)) if keep_attention else noop_context_fn

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(whole, *args, use_reentrant=False, context_fn=keep, **kwargs)

    layer.forward = checkpointed


def prepared(model: Any, mesh: DeviceMesh, *, tile: int = 8192, keep_attention: bool = True) -> TokenLosses:
    """Returns the losses of a model, sharded over the ranks, with the memory of this file's first lines.

    Args:
        model: a model of transformers whose layers have an `mlp`; changed.
        mesh: the ranks that share sequences and parameters.
        tile: tokens of a tile of MLPs and of the loss.
        keep_attention: True keeps the output of each layer's attention on the GPU until backward, so that attention is
            computed once in forward and not again.
    """
    model.set_attn_implementation(register())
    losses = TokenLosses(model, tile)
    for layer in model.model.layers:
        compute_in_tiles(layer.mlp, tile)
        checkpoint_layer(layer, keep_attention)
    for module in (*model.model.layers, losses):
        sharded = fully_shard(module, mesh=mesh)
        if mesh.device_type == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return losses


def step(losses: TokenLosses, mesh: DeviceMesh, tokens: torch.Tensor) -> torch.Tensor:
    """Computes the gradients of a (B, S) batch, equal on all ranks; returns the mean loss of its tokens."""
    batch = ModelBatch(input_ids=tokens.clone(), labels=tokens)
    assert batch.shift_labels is not None
    count = (batch.shift_labels != -100).sum()  # of the whole sequence, equal on its ranks
    with context_parallel(mesh, **batch.buffers, no_restore_buffers=batch.buffers["buffers"]):
        loss = losses(batch.shift_labels, **batch.inputs) / count
        (loss * mesh.size()).backward()  # FSDP2 averages gradients over the ranks
    dist.all_reduce(total := loss.detach())
    return total


def compare(mesh: DeviceMesh) -> None:
    """Trains a tiny model on the ranks and alone.

    Raises:
        AssertionError: a loss or a gradient differs from that of one process.
    """
    model: Any
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(TINY).double()
    alone = deepcopy(model)
    losses = prepared(model, mesh, tile=5)
    for number in range(2):
        tokens = torch.randint(TINY.vocab_size, (2, 24), generator=torch.Generator().manual_seed(number))
        loss, expected = step(losses, mesh, tokens), alone(input_ids=tokens, labels=tokens).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach().double(), rtol=1e-6, atol=1e-6)
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-6, atol=1e-6)
        if mesh.get_rank() == 0:
            print(f"step {number}: loss {loss.item():.6f}; loss and gradients are those of one process", flush=True)


def train(mesh: DeviceMesh, tokens: int, steps: int) -> None:
    """Trains Qwen3-8B with random weights on random tokens, in bfloat16 with the state of AdamW."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)  # norms, RoPE and SwiGLU that save less
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(QWEN3_8B, dtype=torch.bfloat16)
    losses = prepared(model.train(), mesh)
    optimizer = torch.optim.AdamW(losses.parameters(), lr=1e-5, fused=True)
    text = torch.randint(QWEN3_8B.vocab_size, (1, tokens), device="cuda")
    for number in range(steps):
        loss = step(losses, mesh, text)
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(
                f"step {number}: loss {loss.item():.4f}, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
                flush=True,
            )


def main() -> None:
    """Compares on CPUs, trains on GPUs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= ranks
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh("cuda" if on_gpus else "cpu", (ranks,), mesh_dim_names=("cp",))
    if on_gpus:
        train(mesh, options.tokens, options.steps)
    else:
        compare(mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    main()
