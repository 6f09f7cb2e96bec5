"""Refusals of `varlen_attn` inside a context, and calls that torch computes unchanged."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import varlen

from cp_dtensor import Full, context_parallel
from cp_dtensor.spec.documents import packed_mask

LENGTH = 14
ONE_ROW = [0, 3, 3, 9, LENGTH]


class Kernels:
    """Somebody's CPU kernels of torch's operator, which has none: each document's mean value, and gradients of it."""

    def __init__(self) -> None:
        self._library = torch.library.Library("torch_attn", "IMPL")
        self._library.impl("_varlen_attn", self._forward, "CPU")
        self._library.impl("_varlen_attn_backward", self._backward, "CPU")
        self.take_back = self._library._destroy

    @staticmethod
    def _means(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.cat([each.mean(0, keepdim=True).expand_as(each) for each in x.split(edges.diff().tolist())])

    def _forward(self, q: Any, k: Any, v: Any, edges: Any, *settings: Any) -> Any:
        return self._means(v, edges), q.new_zeros(q.shape[1::-1]), torch.zeros(2, dtype=torch.uint64)

    def _backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, edges: Any, *settings: Any) -> Any:
        return torch.zeros_like(q), torch.ones_like(k), self._means(grad, edges)


def of_kernels() -> bool:
    """Whether a call gives what `Kernels` do, with gradients and in inference mode; False if torch has no kernel."""
    q, k, v = (torch.randn(4, 2, 8).requires_grad_() for _ in range(3))
    edges, grad = torch.tensor([0, 1, 4], dtype=torch.int32), torch.randn(4, 2, 8)
    try:
        out = varlen.varlen_attn(q, k, v, edges, edges, 3, 3)
        with torch.inference_mode():
            inferred = varlen.varlen_attn(q, k, v, edges, edges, 3, 3)
    except NotImplementedError:
        return False
    got = out, inferred, *torch.autograd.grad(out, (q, k, v), grad)
    expected = [Kernels._means(v, edges)] * 2 + [torch.zeros(4, 2, 8), torch.ones(4, 2, 8), Kernels._means(grad, edges)]
    return all(map(torch.equal, got, expected))


@pytest.mark.parametrize("when", ["never", "before", "inside"])
def test_other_threads_have_torchs_own_and_what_others_registered(when: str) -> None:
    def body(rank: int) -> None:
        seen: list[bool] = []
        kernels = Kernels() if when == "before" else None
        try:
            with context_parallel(dist.group.WORLD, seq_len=4):
                kernels = Kernels() if when == "inside" else kernels
                thread = threading.Thread(target=lambda: seen.append(of_kernels()))
                thread.start()
                thread.join()
                assert not of_kernels()
            assert [*seen, of_kernels()] == [when != "never"] * 2
        finally:
            if kernels is not None:
                kernels.take_back()
        assert not of_kernels()

    run_ranks(1, body)


def refused(
    message: str, error: type[Exception] = ValueError, seq_len: Any = LENGTH, function: Any = None, **changes: Any
) -> None:
    """On both of two ranks, before any collective."""

    def body(rank: int) -> None:
        edges = torch.tensor(ONE_ROW, dtype=torch.int32)
        q = torch.randn(LENGTH // 2, 2, 8)
        arguments = {"query": q, "key": q, "value": q, "cu_seq_q": edges, "cu_seq_k": edges, "max_q": 9, "max_k": 9}
        if function is not None:
            arguments["out"] = torch.empty_like(q)
        with context_parallel(dist.group.WORLD, seq_len=seq_len), pytest.raises(error, match=message):
            (function or varlen.varlen_attn)(**{**arguments, **changes})

    run_ranks(2, body)


def test_bad_input() -> None:
    refused("how long the whole sequence of a batch row is", seq_len=None)
    local = torch.tensor([0, 3, 7], dtype=torch.int32)
    refused("documents of the whole sequences, row after row: got cu_seq_q up to 7", cu_seq_q=local, cu_seq_k=local)
    refused("as many documents of keys", cu_seq_q=torch.tensor([0, 3, LENGTH], dtype=torch.int32))
    refused("ascending", cu_seq_q=torch.tensor([0, 9, 3, 12, LENGTH], dtype=torch.int32))
    refused("begin with 0", cu_seq_q=torch.tensor([1, 2, 3, 12, LENGTH], dtype=torch.int32))
    refused("three dims", query=torch.randn(7, 2, 2, 8))
    refused("length does not fit: got 6 local tokens", query=torch.randn(6, 2, 8))
    two_rows = torch.tensor([*ONE_ROW, 2 * LENGTH], dtype=torch.int32)
    refused("tokens of 2 batch rows, as many of each, .* got 7 tokens", cu_seq_q=two_rows, cu_seq_k=two_rows)


def test_dtensors_are_refused() -> None:
    def body(rank: int) -> None:
        edges = torch.tensor(ONE_ROW, dtype=torch.int32)
        mesh = init_device_mesh("cpu", (2,))
        q = DTensor.from_local(torch.randn(7, 2, 8), mesh, [Shard(0)], run_check=False)
        with context_parallel(mesh, seq_len=LENGTH), pytest.raises(NotImplementedError, match="plain tensors"):
            varlen.varlen_attn(q, q, q, edges, edges, 9, 9)

    run_ranks(2, body)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no caches of keys")
def test_what_only_newer_torch_has_is_refused() -> None:
    refused("no cache of keys: got seqused_k", NotImplementedError, seqused_k=torch.tensor([7]))
    refused("paged cache of keys", NotImplementedError, block_table=torch.zeros(1, 1), key=torch.randn(1, 7, 2, 8))
    refused("num_splits=1", NotImplementedError, num_splits=1)
    refused("cu_seq_k", NotImplementedError, cu_seq_k=None)
    refused("varlen_attn_out is not supported", NotImplementedError, function=getattr(varlen, "varlen_attn_out", None))


def test_rows_of_packed_edges() -> None:
    def rows(edges: list[int], *lengths: int) -> tuple[int, tuple[int, int]]:
        _, pair, count = packed_mask(tuple(edges), tuple(edges), lengths, Full())
        return count, pair

    assert rows([0, 4, 12], 12) == (1, (12, 12))
    assert rows([0, 6, 6, 8, 12], 6) == (2, (6, 6))
    assert rows([0, 4, 12], 5, 12) == (1, (12, 12))
    with pytest.raises(ValueError, match="several numbers of batch rows"):
        rows([0, 6, 12], 6, 12)
    with pytest.raises(ValueError, match="inside of a batch row"):
        rows([0, 4, 8, 12], 6)
    with pytest.raises(ValueError, match="multiples of the length"):
        rows([0, 4, 11], 6)


def test_a_module_that_is_loaded_inside_of_a_context() -> None:
    """torch's operator is defined only then, and Dynamo is loaded with it, which contexts do not do themselves."""
    program = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
from cp_dtensor import context_parallel
q, edges = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
with context_parallel(dist.group.WORLD, seq_len=6):
    assert not {"torch._dynamo", "torch.nn.attention.varlen"} & sys.modules.keys()
    from torch.nn.attention.varlen import varlen_attn
    assert varlen_attn(q, q, q, edges, edges, 4, 4).shape == q.shape
try:
    varlen_attn(q, q, q, edges, edges, 4, 4)
except NotImplementedError as error:
    assert "_flash_attention_forward" in str(error)
else:
    raise AssertionError("the context has left something behind")
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "error", "-c", program, f"{folder}/store"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
