"""Training with FSDP2 and context parallelism: a complete script. What context parallelism needs is marked `cp:`.

torchrun --nproc-per-node 2 examples/fsdp2.py    # GPUs if there is one for each rank, otherwise CPUs
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cp_dtensor import context_parallel

VOCABULARY, WIDTH, HEADS, LENGTH = 256, 64, 4, 1024


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps (B, S, WIDTH) to (B, S, WIDTH)."""
        q, k, v = self.qkv(self.norms[0](hidden)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of (B, S) tokens; labels of -100 do not count."""
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")


def batch(step: int, data_rank: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions, (2, LENGTH) each: whole sequences, on all ranks that share them."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    tokens = torch.randint(32, (2, LENGTH // 2), generator=generator).repeat_interleave(2, 1).to(device)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)  # cp: shifted while the sequence is whole
    return tokens, labels, torch.arange(LENGTH, device=device).repeat(2, 1)


def train(cp_size: int, steps: int) -> list[float]:
    """The mean loss of each step; the ranks are `cp_size` for each sequence, times data parallelism."""
    ranks = dist.get_world_size()
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    mesh = init_device_mesh(device, (ranks // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    token_mesh = mesh["dp", "cp"]._flatten("dp_cp")  # cp: all ranks that have other tokens
    torch.manual_seed(0)  # equal weights
    model = Model().to(device)
    for module in (*model.blocks, model):
        sharded = fully_shard(module, mesh=token_mesh)
        if device == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens, labels, positions = batch(step, mesh.get_local_rank("dp"), device)  # cp: not by the global rank
        count = (labels != -100).sum()  # of the whole sequence, equal on its ranks
        with context_parallel(mesh["cp"], buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 1]):  # cp:
            total = model(tokens, positions, labels)  # of this rank's part of each sequence
            loss = total * cp_size / count  # cp: FSDP2 averages gradients over the ranks
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / ranks)
        losses.append(mean.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("start with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(cp_size=2, steps=10)
    dist.barrier()  # a rank that ends closes connections that others may still use
    dist.destroy_process_group()
