"""Programs of CPU ranks end with status 0, though gloo's threads still free tensors while Python ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]

SEQUENCE_OPERATIONS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Contiguous, HeadTail, causal_conv1d, context_parallel_shard, context_parallel_unshard, gated_delta_rule, halo,
    linear_attention, relayout, shift,
)

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))
g, beta = (torch.rand(1, 32, 2) for _ in range(2))
shards = context_parallel_shard(mesh, [q, F.normalize(k, dim=-1), v, -g, beta], [1] * 5)
mine = [shard.requires_grad_() for shard in shards]
x = mine[0].flatten(2)
results = [
    gated_delta_rule(*mine, mesh=mesh, seq_len=32), linear_attention(*mine[:4], mesh=mesh, seq_len=32),
    causal_conv1d(x, torch.randn(16, 4, requires_grad=True), mesh=mesh), halo(x, 2, mesh=mesh, dim=1),
    shift(x, -1, mesh=mesh, dim=1), relayout(x, HeadTail(), Contiguous(), mesh=mesh, dim=1),
]
sum(result.square().sum() for result in results).backward()
whole = context_parallel_unshard(mesh, results[:1], [1])
"""
SLOW_TO_FREE = """
import time
import weakref


def compute(_):
    end = time.thread_time() + 0.5  # of this thread, however busy the machine is
    while time.thread_time() < end:
        pass


if dist.get_rank() == 1:
    time.sleep(0.3)  # so that the tensors of rank 0 are gloo's alone when the exchange ends
tensor = torch.ones(4)
watch = weakref.ref(tensor, compute)  # runs in the thread that frees the tensor
work = dist.all_reduce(tensor, async_op=True)
del work, tensor
"""
END = """
dist.barrier()
dist.destroy_process_group()
"""


def statuses(folder: Path, program: str) -> tuple[list[int], str]:
    """Exit statuses of two ranks, which end as programs of users do, and what they print."""
    (folder / "program.py").write_text(program)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        environment |= {name: str(value) for name, value in place.items()}
        command = [sys.executable, "program.py"]
        ranks.append(
            subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    printed = "".join(rank.communicate(timeout=120)[0] for rank in ranks)
    return [rank.returncode for rank in ranks], printed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the states of threads are read from /proc")
def test_gloo_frees_its_tensors_before_python_ends(tmp_path: Path) -> None:
    """A tensor takes half a second to free, and autograd nodes and the mesh keep the group."""
    codes, printed = statuses(tmp_path, SEQUENCE_OPERATIONS + SLOW_TO_FREE + END)
    assert codes == [0, 0], printed
