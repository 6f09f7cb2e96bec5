"""Time whole batches of documents of very different lengths: planned, by groups of one size, and without groups.

    torchrun --nproc-per-node 4 docs/scripts/batch_steps.py --output run.csv

A batch has documents of lognormal lengths, median 2,048 tokens, at most 131,072. Layers are those of Llama 3 8B under
FSDP2, checkpointed. "planned" is `plan_batch`; "degree d" packs the longest documents first into rows that d ranks
share; degree 1 is data parallelism with packing, whose ranks hold the longest document alone. All pass over the same
documents in the same layout, in steps that all ranks take together. Prints a table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from reports import parser_of, report, start_nccl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from cp_dtensor import context_parallel, plan_batch
from cp_dtensor.api.batch import BatchStep
from cp_dtensor.comm.submeshes import submesh
from cp_dtensor.plan.batch import RankGroup
from cp_dtensor.tools.report import MEASURED, machine_columns, times_of

WIDTH, MLP, HEADS, KV_HEADS, VOCABULARY, LONGEST = 4096, 14336, 32, 8, 1024, 131072
SHAPE: dict[str, Any] = {
    "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 128, "parameters": WIDTH * (2 * WIDTH + 2048 + 3 * MLP),
}  # fmt: skip


class Layer(nn.Module):
    """Attention and an MLP, without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 2048, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * MLP, bias=False), nn.Linear(MLP, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map (1, S, WIDTH) to (1, S, WIDTH)."""
        heads = self.qkv(hidden).unflatten(2, (-1, 128)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(hidden).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Embeddings, layers, and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of (1, S) tokens."""
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")


def lengths_of(batch: int, tokens: int) -> list[int]:
    """Return the lengths of the documents of a batch, about so many tokens in all."""
    draw, lengths = random.Random(batch), [LONGEST]
    while sum(lengths) < tokens:
        lengths.append(min(LONGEST, 2 + int(draw.lognormvariate(7.62, 1.6))))
    return lengths


def groups_of_one_size(lengths: Sequence[int], mesh: DeviceMesh, size: int, most: int) -> Iterator[BatchStep]:
    """Yield the steps of packed rows that `size` ranks share. A group without a row repeats the first of the step."""
    rows: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        fits = (row for row in rows if sum(lengths[each] for each in row) + lengths[document] <= most)
        if (row := next(fits, None)) is None:
            rows.append(row := [])
        row.append(document)
    places, mine = mesh.size() // size, mesh.get_local_rank() // size
    for start in range(0, len(rows), places):
        step = rows[start : start + places]
        documents = tuple(step[mine if mine < len(step) else 0])
        scale = mesh.size() / sum(lengths) if mine < len(step) else 0.0
        groups = tuple(RankGroup(index * size, size, tuple(row), 0.0) for index, row in enumerate(step))
        ranks = submesh(mesh, [size] * (mesh.size() // size))
        yield BatchStep(groups, ranks, documents, tuple(lengths[each] for each in documents), scale)


def main() -> None:
    """Time all methods and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=500_000, help="of a batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, default=4, help="the first is not timed")
    options = parser.parse_args()
    start_nccl()
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp_cp",))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(options.layers)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    share = LONGEST // ranks
    rows = []
    for method in ("planned", *(f"degree-{size}" for size in range(ranks, 0, -1) if ranks % size == 0)):
        times, sums, count, steps = [], [], 0, 0
        torch.cuda.reset_peak_memory_stats()
        for batch in range(options.batches):
            lengths = lengths_of(batch, options.tokens)
            generator = torch.Generator("cuda").manual_seed(batch)
            tokens = [torch.randint(VOCABULARY, (length,), device="cuda", generator=generator) for length in lengths]
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            if method == "planned":
                plan = [*plan_batch(lengths, mesh, tokens_per_rank=share, hardware="H100", **SHAPE)]
            else:
                size = int(method.split("-")[1])
                plan = [*groups_of_one_size(lengths, mesh, size, LONGEST if size == 1 else share * size)]
            loss = torch.zeros((), device="cuda")
            for step in plan:
                buffers = [step.pack(tokens), step.pack(tokens)]
                with context_parallel(
                    step.mesh, buffers=buffers, buffer_seq_dims=[1, 1], mask=step.mask, layout=step.layout
                ):
                    part = step.scale * model(*buffers)
                    part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            slowest = torch.tensor(time.perf_counter() - started, device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(loss)
            sums.append(round(loss.item() / ranks, 5))
            if batch:
                times.append(1e3 * slowest.item())
                count, steps = count + sum(lengths), steps + len(plan)
        speed = 1e3 * count / sum(times) / ranks
        memory = torch.cuda.max_memory_allocated() / 2**20
        if dist.get_rank() == 0:
            note = f"{speed:.0f} tokens/s a GPU; {steps} steps in {len(times)} batches; losses {sums}"
            about = machine_columns(ranks) | {
                "status": MEASURED, "mask": "lognormal documents", "layout": "Balanced", "tokens": options.tokens,
                "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 128, "method": method, "pass": "batch",
            }  # fmt: skip
            rows.append(about | times_of([times]) | {"mib": memory, "note": note})
            report(f"{method:10}", rows, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
