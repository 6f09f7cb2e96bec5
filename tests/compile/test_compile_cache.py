"""Inductor's cache on disk: no process uses code inside a context that was compiled outside."""

import os
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from support.compile_checks import Shards, Tensors, check_equals_eager, compiled, fresh
from support.processes import Processes
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import context_parallel


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention alone, for which Inductor needs no C++ compiler."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def check(rank: int, in_context: bool) -> Tensors:
    """Compiled attention, forward and backward, is what it is uncompiled."""
    shards = Shards(rank)
    # Inductor of torch 2.11 cannot differentiate torch's own attention in float64 on CPUs.
    inputs = [each.detach()[:, :2].float().requires_grad_() for each in shards.inputs()]
    with context_parallel(init_device_mesh("cpu", (2,))) if in_context else nullcontext():
        in_graph = compiled(attention, backend="inductor")
        return check_equals_eager(attention, in_graph, inputs, shards.grad[:, :2].float())


def process(rank: int, folder: str, is_first: bool) -> None:
    directory = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{folder}/{rank}")
    # Else Inductor compiles programs to find out, and starts processes that compile.
    options = inductor_config.patch({"cpp.vec_isa_ok": False, "compile_threads": 1})
    fresh()
    results = []
    with directory, options:
        for number, in_context in enumerate((False, True) if is_first else (True, False), start=1):
            results.append(check(rank, in_context)[0])
            assert counters["aot_autograd"]["autograd_cache_hit"] == (0 if is_first else number)  # each finds its own
    assert not torch.equal(*results)


def test_code_on_disk_is_kept_apart(two_processes: Processes, tmp_path: Path) -> None:
    for is_first in (True, False):
        two_processes.run(process, str(tmp_path), is_first)
