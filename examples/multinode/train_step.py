"""A training step on several nodes: one sequence over all ranks, in a mesh with an axis across nodes.

Each of these starts it; they also take another program, and its arguments:

    NODES=2 NODE_RANK=0 HEAD=node0 GPUS=8 bash examples/multinode/torchrun.sh       # on each node, with its NODE_RANK
    sbatch --nodes 2 --gpus-per-node 8 examples/multinode/slurm.sbatch
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import context_parallel

WORDS, DIM, HEADS, TOKENS = 97, 32, 4, 120
LARGEST_ERROR = 1e-10  # in float64


def mesh_of_nodes() -> DeviceMesh:
    """The mesh of all ranks: nodes x ranks of each, which are neighbours in the order of ranks.

    K/V cross the first axis once for each node. Names that begin with "cp" say that both axes share the sequence.
    """
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= per_node
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = int(os.environ["WORLD_SIZE"]) // per_node, per_node
    return init_device_mesh("cuda" if on_gpus else "cpu", shape, mesh_dim_names=("cp_node", "cp_gpu"))


class Model(nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(WORDS, DIM), nn.Linear(DIM, 3 * DIM)
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def loss_of(model: Model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the whole sequence, of which a rank has some tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS


def main() -> float:
    """The largest difference of a gradient from that of one rank."""
    mesh = mesh_of_nodes()
    torch.manual_seed(0)  # equal weights and tokens on every rank
    model = Model().double().to(mesh.device_type)
    text = torch.randint(WORDS, (1, TOKENS + 1), device=mesh.device_type)
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()
    expected = torch.autograd.grad(loss_of(model, tokens, labels), list(model.parameters()))

    with context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss_of(model, tokens, labels).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient in gradients:
        dist.all_reduce(gradient)  # each rank has the part of its tokens
    return max((mine - one).abs().max().item() for mine, one in zip(gradients, expected, strict=True))


if __name__ == "__main__":
    error = main()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: largest error of a gradient {error:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(error > LARGEST_ERROR)
