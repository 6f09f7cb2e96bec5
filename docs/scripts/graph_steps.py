"""Milliseconds of a training step: eagerly, as a CUDA graph, compiled, and compiled with graphs by Inductor.

torchrun --nproc-per-node 1 docs/scripts/graph_steps.py --tokens 1024 4096 16384 --json steps.json

The model and the capture are those of examples/cuda_graph.py, with 12 layers of 16 query and 4 kv heads of 64, in
bfloat16. On one GPU `--tokens` are those of one rank, without exchanges; with more, all ranks' together. Ends with
status 1 if losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor.tools.ranks import Device, start
from cp_dtensor.tools.report import table_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import cuda_graph

SIZES = {"DIM": 1024, "HEADS": 16, "KV_HEADS": 4, "LAYERS": 12, "VOCABULARY": 1024}
WAYS = ("eager", "graph", "compile", "reduce-overhead")
STEPS, WARM_STEPS = 20, 5
LARGEST_DIFFERENCE = 0.1
"""Of losses around 7 in bfloat16, whose neighbours are 0.03 apart."""


def losses_and_ms(way: str, mesh: DeviceMesh, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, float]:
    """The losses of some steps, and the milliseconds of one of them."""
    torch.manual_seed(0)
    model = cuda_graph.Model(mesh).to(mesh.device_type, dtype)
    capturable = mesh.device_type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable)
    inputs = cuda_graph.batch_of(0, mesh)
    batches = [cuda_graph.batch_of(step, mesh) for step in range(STEPS)]
    run, device = _step_of(way, model, optimizer, inputs), Device(mesh.device_type == "cuda")
    results: list[torch.Tensor] = []

    def steps(batches: list[list[torch.Tensor]]) -> None:
        for batch in batches:
            for tensor, new in zip(inputs, batch, strict=True):
                tensor.copy_(new)
            results.append(run().clone())

    steps(batches[:1] * WARM_STEPS)
    device.synchronize()
    ms = device.time_ms(lambda: steps(batches)) / STEPS
    return torch.stack(results), ms


def _step_of(
    way: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A training step on `inputs`."""
    is_compiled = way in ("compile", "reduce-overhead")
    if is_compiled:
        torch.compiler.reset()
        model.compile(dynamic=False, mode=None if way == "compile" else way)

    def step() -> torch.Tensor:
        if is_compiled:
            torch.compiler.cudagraph_mark_step_begin()
        return cuda_graph.train_step(model, optimizer, inputs)

    if way != "graph":
        # As many steps on these inputs as come before a capture, so that the losses after them are comparable.
        for _ in range(cuda_graph.WARM_STEPS):
            step()
        return step
    graph, result = cuda_graph.captured(step)

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def rows_of(tokens: int, mesh: DeviceMesh, ways: tuple[str, ...] = WAYS) -> list[dict[str, float | str]]:
    """A row for each way; the largest difference of its losses from those of the first."""
    for name, value in {**SIZES, "SEQ_LEN": tokens}.items():
        setattr(cuda_graph, name, value)
    rows: list[dict[str, float | str]] = []
    expected = None
    for way in ways:
        losses, ms = losses_and_ms(way, mesh)
        expected = losses if expected is None else expected
        difference = float((losses - expected).abs().max())
        rows.append({"tokens": tokens, "step": way, "ms": round(ms, 2), "losses differ by": round(difference, 5)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    if local_rank < 0 or torch.cuda.device_count() <= local_rank:
        sys.exit("expected torchrun, and a GPU for each rank")
    start("docs/scripts/graph_steps.py", sys.argv[1:], use_gpu=True, timeout_seconds=600)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    rows = [row for tokens in arguments.tokens for row in rows_of(tokens, mesh)]
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {mesh.size()} x {torch.cuda.get_device_name()}\n")
        print(table_of(rows))
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    torch.compiler.reset()  # drops Inductor's graphs, which hold collectives
    dist.destroy_process_group()
    sys.exit(any(not float(row["losses differ by"]) <= LARGEST_DIFFERENCE for row in rows))


if __name__ == "__main__":
    main()
