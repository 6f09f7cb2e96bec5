"""Time whole batches of documents of very different lengths: planned, by groups of one size, and without groups.

    torchrun --nproc-per-node 4 docs/scripts/batch_steps.py --output run.csv

A batch has documents of lognormal lengths, median 2,048 tokens, at most 131,072. Layers are those of Llama 3 8B as in
`train-bench`, under FSDP2, checkpointed. "planned" is `plan_batch`; "degree d" packs the longest documents first into
rows that d ranks share; degree 1 is data parallelism with packing, whose ranks hold the longest document alone. All
pass over the same documents in the same layout, in steps that all ranks take together. Prints a table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from common import Rows, parser, start_gpus, step_row
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cp_dtensor import context_parallel, plan_batch
from cp_dtensor.api.batch import BatchStep
from cp_dtensor.comm.submeshes import submesh
from cp_dtensor.plan.batch import RankGroup
from cp_dtensor.tools.report import times_of
from cp_dtensor.tools.train_bench import Llama, Size

LONGEST = 131072
SIZE = Size(layers=4, dim=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=1024)
SHAPE: dict[str, Any] = {"q_heads": SIZE.heads, "kv_heads": SIZE.kv_heads, "head_dim": SIZE.head_dim}
OF_LAYER: dict[str, Any] = {"parameters": replace(SIZE, layers=1, vocabulary=0).matmul_parameters}


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
    command = parser(__doc__)
    command.add_argument("--tokens", type=int, default=500_000, help="of a batch")
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--batches", type=int, default=4, help="the first is not timed")
    options = command.parse_args()
    start_gpus()
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp_cp",))
    with torch.device("cuda"):
        model = Llama(replace(SIZE, layers=options.layers), is_causal=True, checkpointed=True)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    share = LONGEST // ranks
    rows = Rows(options.output, dist.get_rank() == 0)
    for method in ("planned", *(f"degree-{size}" for size in range(ranks, 0, -1) if ranks % size == 0)):
        times, sums, count, steps = [], [], 0, 0
        torch.cuda.reset_peak_memory_stats()
        for batch in range(options.batches):
            lengths = lengths_of(batch, options.tokens)
            generator = torch.Generator("cuda").manual_seed(batch)
            tokens = [
                torch.randint(SIZE.vocabulary, (length,), device="cuda", generator=generator) for length in lengths
            ]
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            if method == "planned":
                plan = [*plan_batch(lengths, mesh, tokens_per_rank=share, hardware="H100", **SHAPE, **OF_LAYER)]
            else:
                size = int(method.split("-")[1])
                plan = [*groups_of_one_size(lengths, mesh, size, LONGEST if size == 1 else share * size)]
            loss = torch.zeros((), device="cuda")
            for step in plan:
                buffers = [step.pack(tokens), step.pack(tokens), step.positions("cuda")]
                with context_parallel(
                    step.mesh, buffers=buffers, buffer_seq_dims=[1] * 3, mask=step.mask, layout=step.layout
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
        about = step_row(
            ranks, mask="lognormal documents", layout="Balanced", tokens=options.tokens, method=method, **SHAPE,
            mib=torch.cuda.max_memory_allocated() / 2**20,
        )  # fmt: skip
        note = f"{speed:.0f} tokens/s a GPU; {steps} steps in {len(times)} batches; losses {sums[0]} to {sums[-1]}"
        rows.add(method, about | times_of([times]) | {"pass": "batch", "note": note})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
