"""Library frames of a warm call: how many there are, and how deep the kernel of a tile lies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cp_dtensor
from cp_dtensor import context_parallel, enable_context_parallel_dispatcher, ring_attention

PACKAGE = cp_dtensor.__file__.removesuffix("__init__.py")
LOCAL, RANKS = 64, 2

FORWARD, BACKWARD, DEPTH = 160, 180, 8
"""Most frames of a forward, of a backward, and most frames down to the backend that computes a tile."""
MODEL_FORWARD = 300
"""Most frames of a forward of a whole model of transformers that has one layer."""


class Frames:
    """Counts calls of the package's functions in this thread while open."""

    def __init__(self) -> None:
        self.count = self.tile_depth = self._depth = 0

    def __enter__(self) -> Frames:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE):
            return
        if event == "call":
            self.count += 1
            self._depth += 1
            if path.endswith("backends/aten.py"):
                self.tile_depth = max(self.tile_depth, self._depth)
        elif event == "return":
            self._depth -= 1


def counted(call: Callable[[], torch.Tensor]) -> tuple[Frames, Frames]:
    """The frames of forward and of backward, after a warm-up."""
    for _ in range(3):
        out = call()
        out.backward(torch.ones_like(out))
    with Frames() as forward:
        out = call()
    grad = torch.ones_like(out)
    with Frames() as backward:
        out.backward(grad)
    return forward, backward


def leaves() -> list[torch.Tensor]:
    return [torch.randn(1, 4, LOCAL, 16, requires_grad=True) for _ in range(3)]


def in_context(mesh: DeviceMesh) -> tuple[Frames, Frames]:
    q, k, v = leaves()
    tokens = torch.arange(RANKS * LOCAL)
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0]):
        return counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def by_function(mesh: DeviceMesh) -> tuple[Frames, Frames]:
    q, k, v = leaves()

    def call() -> torch.Tensor:
        out = ring_attention(q, k, v, mesh=mesh, is_causal=True, seq_len=RANKS * LOCAL)
        assert isinstance(out, torch.Tensor)
        return out

    return counted(call)


def of_dtensors(mesh: DeviceMesh) -> tuple[Frames, Frames]:
    q, k, v = (DTensor.from_local(leaf.detach(), mesh, [Shard(2)]).requires_grad_() for leaf in leaves())

    def call() -> torch.Tensor:
        local: torch.Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True).to_local()  # type: ignore[attr-defined]
        return local

    with enable_context_parallel_dispatcher():
        return counted(call)


@pytest.mark.parametrize("measured", [in_context, by_function, of_dtensors], ids=["context", "ring", "dtensor"])
def test_warm_calls(measured: Callable[[DeviceMesh], tuple[Frames, Frames]]) -> None:
    def body(_rank: int) -> tuple[Frames, Frames]:
        return measured(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)))

    for forward, backward in run_ranks(RANKS, body):
        found = f"{forward.count} frames of forward, {backward.count} of backward, a tile at {forward.tile_depth}"
        assert 0 < forward.tile_depth <= DEPTH, found
        assert 20 < forward.count <= FORWARD, found
        assert 20 < backward.count <= BACKWARD, found


def test_warm_calls_of_a_model_of_transformers() -> None:
    """A call of a whole model through the provider: checks of the model, its masks, one layer of attention."""
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra [transformers]")
    from cp_dtensor.integrations.transformers import ModelBatch, register

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attn_implementation=register(),
    )  # fmt: skip

    def body(_rank: int) -> tuple[Frames, Frames]:
        model, batch = transformers.LlamaForCausalLM(config), ModelBatch(input_ids=torch.arange(16)[None])
        with context_parallel(init_device_mesh("cpu", (RANKS,)), **batch.buffers):
            return counted(lambda: model(**batch.inputs, use_cache=False).logits)

    for forward, backward in run_ranks(RANKS, body):
        found = f"{forward.count} frames of forward, {backward.count} of backward"
        assert FORWARD < forward.count <= MODEL_FORWARD, found
        assert 20 < backward.count <= BACKWARD, found
