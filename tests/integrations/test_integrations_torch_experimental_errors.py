"""Exceptions of the drop-in have the types and the key phrases of torch's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from cp_dtensor.integrations import torch_experimental as ours


def shard_dims(module: Any, mesh: Any) -> None:
    module._context_parallel_shard(mesh, [torch.zeros(1, 8)], [1, 1])


def shard_type(module: Any, mesh: Any) -> None:
    module._context_parallel_shard(mesh, [torch.zeros(1, 8), 3], [1, 1])


def shard_rows(module: Any, mesh: Any) -> None:
    balancer = ours._PerDocumentHeadTailLoadBalancer([[4, 4], [8]], 2, "cpu")
    module._context_parallel_shard(mesh, [torch.zeros(3, 8)], [1], balancer)


def context_dims(module: Any, mesh: Any) -> None:
    with module.context_parallel(mesh, buffers=[torch.zeros(8)], buffer_seq_dims=[]):
        pytest.fail("entered")


def context_no_restore(module: Any, mesh: Any) -> None:
    with module.context_parallel(
        mesh, buffers=[torch.zeros(8)], buffer_seq_dims=[0], no_restore_buffers={torch.zeros(8)}
    ):
        pytest.fail("entered")


def rotate_method(module: Any, mesh: Any) -> None:
    module.set_rotate_method("rings")


def lengths(module: Any, mesh: Any) -> None:
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 6, 8)
    op = torch.ops.aten._scaled_dot_product_flash_attention
    module._templated_ring_attention(mesh.get_group(), 2, op, q, k, k, is_causal=True)


CASES = [
    (shard_dims, ValueError, "`seq_dims` must have the same number of elements as `buffers`"),
    (shard_type, ValueError, "Unknown buffer type: <class 'int'>"),
    (shard_rows, ValueError, "Cannot rearrange buffer"),
    (context_dims, ValueError, "`seq_dims` must have the same number of elements as `buffers`"),
    (context_no_restore, ValueError, "`no_restore_buffers` must be a subset of `buffers`"),
    (rotate_method, NotImplementedError, "rings|Unknown method|rotate"),
    (lengths, NotImplementedError, "is_causal requires the same query and context sequence lengths"),
]


@pytest.mark.parametrize("module", [ours, torchs], ids=["ours", "torch"])
@pytest.mark.parametrize(("call", "kind", "phrase"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_types_and_phrases(call: Any, kind: type[Exception], phrase: str, module: ModuleType) -> None:
    if call is shard_type and module is torchs:
        pytest.skip("torch has this error too, but looks for the device of what it does not know first")

    def body(rank: int) -> None:
        call(module, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))

    with pytest.raises(kind, match=phrase):
        run_ranks(2, body)


def test_unknown_attention_types() -> None:
    for module in (ours, torchs):
        with pytest.raises(ValueError, match="Unknown attention type"):
            module._ContextParallel(2, "sdpa")._apply(torch.nn.Identity(), None)  # type: ignore[arg-type]
