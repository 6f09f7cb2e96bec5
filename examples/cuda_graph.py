"""A whole training step as one CUDA graph: forward, backward, sum of gradients over the ranks, update.

    torchrun --nproc-per-node 2 examples/cuda_graph.py

Two equal models train on the same batches, one eagerly, the other by replays of its graph. Their losses must agree.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from cp_dtensor import context_parallel_attention, context_parallel_shard

SEQ_LEN, DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY = 2048, 512, 8, 2, 4, 256
WARM_STEPS, STEPS = 3, 20
LARGEST_DIFFERENCE = 1e-3  # of losses around 5, in float32


class Block(nn.Module):
    """Attention over the tokens of all ranks, and a feed-forward layer."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, head_dim = mesh, DIM // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, KV_HEADS * head_dim, bias=False) for _ in range(2))
        self.ffn = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        # seq_len declares the length, of which ranks may have unequally many tokens.
        out = context_parallel_attention(q, k, v, mesh=self.mesh, is_causal=True, enable_gqa=True, seq_len=SEQ_LEN)
        assert isinstance(out, torch.Tensor)  # with return_lse=True the result is a pair
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    """This rank's share of the mean loss of next-token prediction."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(SEQ_LEN, DIM)
        self.blocks = nn.Sequential(*(Block(mesh) for _ in range(LAYERS)))
        self.output = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.blocks(self.embedding(tokens) + self.positions(positions)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / SEQ_LEN


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[torch.Tensor]) -> torch.Tensor:
    """Trains one step and returns the loss of all tokens."""
    optimizer.zero_grad()  # sets them to None, so that a graph has gradients of its own
    loss = model(*batch)
    loss.backward()
    total = loss.detach().clone()
    for tensor in (total, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)
    optimizer.step()
    return total


def batch_of(step: int, mesh: DeviceMesh) -> list[torch.Tensor]:
    """This rank's tokens, labels and positions of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.rand(1, SEQ_LEN + 1, generator=generator) ** (1 + step % 4) * VOCABULARY).long()
    whole = [tokens[:, :-1], tokens[:, 1:], torch.arange(SEQ_LEN)[None]]
    return context_parallel_shard(mesh, [each.to(mesh.device_type) for each in whole], [1] * 3)


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The graph of a step, and the tensor that has its result after each replay.

    The step runs `WARM_STEPS` times before. These calls connect the ranks, measure links, make plans, map shared memory
    and compile kernels; none of it can happen while a graph is captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, which must not end the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return graph, result


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node 2 examples/cuda_graph.py")
    local_rank, needed = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < needed:
        sys.exit(
            f"CUDA graphs need a GPU for each rank: expected {needed}, this machine has {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    difference, eager_ms, replay_ms = compare(mesh)
    if dist.get_rank() == 0:
        print(f"losses of {STEPS} steps differ by at most {difference:.1e}")
        print(f"a step takes {eager_ms:.2f} ms eagerly, {replay_ms:.2f} ms as a graph")
    dist.destroy_process_group()  # after the graph is gone: it holds NCCL's collectives
    sys.exit(not difference <= LARGEST_DIFFERENCE)


def compare(mesh: DeviceMesh) -> tuple[float, float, float]:
    """The largest difference of losses, and the milliseconds of an eager step and of a replay."""

    def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)  # equal weights on every rank and in both models
        model = Model(mesh).cuda()
        # capturable: the number of the step is on the GPU, where replays count it.
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

    model, optimizer = learner()
    for _ in range(WARM_STEPS):
        train_step(model, optimizer, batch_of(0, mesh))
    batches = [batch_of(step, mesh) for step in range(STEPS)]
    begin = seconds()
    expected = [train_step(model, optimizer, batch) for batch in batches]
    eager_ms = (seconds() - begin) / STEPS * 1e3

    model, optimizer = learner()
    inputs = batch_of(0, mesh)
    graph, result = captured(lambda: train_step(model, optimizer, inputs))
    losses = []
    begin = seconds()
    for batch in batches:
        for tensor, new in zip(inputs, batch, strict=True):
            tensor.copy_(new)  # a graph reads the memory that it was captured with
        graph.replay()
        losses.append(result.clone())  # which the next replay overwrites
    replay_ms = (seconds() - begin) / STEPS * 1e3
    difference = (torch.stack(losses) - torch.stack(expected)).abs().max().item()
    graph.reset()
    return difference, eager_ms, replay_ms


def seconds() -> float:
    """The time when all GPU work is done."""
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
