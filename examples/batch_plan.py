"""Documents of very different lengths: each step divides the ranks into groups that fit them. Based on fsdp2.py.

torchrun --nproc-per-node 4 examples/batch_plan.py    # GPUs if there is one for each rank, otherwise CPUs
"""

import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp2 import HEADS, LENGTH, WIDTH, Model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cp_dtensor import context_parallel, plan_batch


def batch(number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tokens and labels of the documents of one batch, equal on all ranks: most are short, some long."""
    draw, generator = random.Random(number), torch.Generator().manual_seed(number)
    lengths = [min(LENGTH, 2 + int(draw.lognormvariate(4, 1.2))) for _ in range(20)]
    tokens = [torch.randint(32, (length // 2,), generator=generator).repeat_interleave(2) for length in lengths]
    return tokens, [F.pad(each[1:], (0, 1), value=-100) for each in tokens]


def train(batches: int) -> list[float]:
    """Return the mean loss of each batch."""
    device = "cuda" if torch.cuda.device_count() >= dist.get_world_size() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_cp",))
    torch.manual_seed(0)  # equal weights
    model = Model().to(device)
    for module in (*model.blocks, model):
        sharded = fully_shard(module, mesh=mesh)
        if device == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(batches):
        tokens, labels = batch(number)
        plan = plan_batch(
            [len(each) for each in tokens], mesh, tokens_per_rank=512, q_heads=HEADS, head_dim=WIDTH // HEADS,
            targets=sum(int((each != -100).sum()) for each in labels),
        )  # fmt: skip
        if dist.get_rank() == 0:
            print(plan, flush=True)
        loss = torch.zeros((), device=device)
        for step in plan:
            buffers = [step.pack(tokens).to(device), step.pack(labels).to(device), step.positions(device)]
            with context_parallel(
                step.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], mask=step.mask, layout=step.layout
            ):
                packed, targets, positions = buffers
                part = step.scale * model(packed, positions, targets)
                part.backward()
            loss += part.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / mesh.size())
        if dist.get_rank() == 0:
            print(f"batch {number}: loss {losses[-1]:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("start with torchrun: torchrun --nproc-per-node 4 examples/batch_plan.py")
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(batches=5)
    dist.barrier()  # a rank that ends closes connections that others may still use
    dist.destroy_process_group()
