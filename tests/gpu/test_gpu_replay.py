"""`replay=True` on two GPUs: captured passes give what eager ones give, whatever comes between them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gpu_checks import WORLD_SIZE, largest_difference, relative_norm, shards
from support.problems import Problem, reference, shard
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    ContextParallel,
    Documents,
    HeadTail,
    SlidingWindow,
    context_parallel,
    context_parallel_attention,
)
from cp_dtensor.engine import replay

pytestmark = pytest.mark.gpu(WORLD_SIZE)
WAYS: dict[str, dict[str, Any]] = {
    "symm_mem": {"method": "ring", "rotate_method": "symm_mem", "is_causal": True},
    "ulysses": {"method": "ulysses", "is_causal": True},
    "window": {"method": "ring", "rotate_method": "symm_mem", "mask": SlidingWindow(100, 0)},
    "fused window": {"method": "ring", "rotate_method": "symm_mem", "mask": SlidingWindow(100, 0)},
    "softcap": {"method": "ring", "rotate_method": "symm_mem", "is_causal": True, "softcap": 5.0},
    "torch's switch": {"method": "ring", "rotate_method": "symm_mem", "is_causal": True},
    "deterministic": {"method": "ring", "rotate_method": "symm_mem", "is_causal": True, "deterministic": True},
}
DETERMINISTIC = ("deterministic", "torch's switch")
STEPS = 5
Tensors = list[torch.Tensor]


def call(inputs: Any, *, length: int, sinks: torch.Tensor | None = None, **options: Any) -> Tensors:
    """Returns out, lse, and the gradients of q, k, v and the sinks."""
    *qkv, grad_out = inputs
    leaves = [x.detach().requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    out, lse = context_parallel_attention(
        *leaves[:3], enable_gqa=True, layout=HeadTail(), seq_len=length, return_lse=True,
        sinks=None if sinks is None else leaves[3], **options,
    )  # fmt: skip
    out.backward(grad_out)
    return [out.detach(), lse, *(leaf.grad for leaf in leaves)]


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Returns views of one (B, S, heads, D), as of a projection to q, k and v together."""
    whole = torch.cat([x.transpose(1, 2) for x in (q, k, v)], 2)
    return [x.transpose(1, 2) for x in whole.split([q.size(1), k.size(1), v.size(1)], 2)]


def counted() -> Any:
    """Counts the graphs that are captured."""
    return mock.patch.object(replay, "Replay", wraps=replay.Replay)


def alike(ours: Tensors, want: Tensors, *, bits: bool = False) -> bool:
    """True for the same strides and, with `bits`, the same bits; many kernels add in another order in each run."""
    pairs = list(zip(ours, want, strict=True))
    close = all(relative_norm(a.double(), b.double()) < 1e-3 for a, b in pairs)
    return close and all(a.stride() == b.stride() and (not bits or torch.equal(a, b)) for a, b in pairs)


def _steps(rank: int, way: str, has_sinks: bool, dtype: torch.dtype) -> tuple[bool, int, list[float]]:
    """Steps of new inputs, replayed and eager: True if they are alike, graphs, and the largest errors in float64."""
    problem = Problem(512, 512, 2, 8, 2, 64, is_causal=True, dtype=dtype)
    group, same, errors = dist.new_group(range(WORLD_SIZE)), list[bool](), list[float]()
    torch.use_deterministic_algorithms(way == "torch's switch")  # empty tensors are NaN then
    with counted() as graphs:
        for seed in range(STEPS):
            inputs = shards(problem, seed, HeadTail(), rank)
            if way == "fused window":
                inputs = (*fused(*inputs[:3]), inputs[3])
            sinks = torch.randn(8, device="cuda") if has_sinks else None
            attend = partial(call, inputs, length=512, sinks=sinks, mesh=group, **WAYS[way])
            replayed, eager = attend(replay=True), attend()
            same.append(alike(replayed, eager, bits=dtype == torch.float64 or way in DETERMINISTIC))
            if dtype == torch.float64 and "is_causal" in WAYS[way] and way != "softcap" and not has_sinks:
                whole = reference(problem, *problem.draw(seed, "cuda"))
                expected = [shard(x, HeadTail(), rank, WORLD_SIZE) for x in whole]
                results = [replayed[0], *replayed[2:]]
                errors += [largest_difference(a, b) for a, b in zip(results, expected, strict=True)]
    torch.use_deterministic_algorithms(False)
    return all(same), graphs.call_count, errors


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", WAYS)
def test_replays_equal_eager_calls(gpus: Processes, way: str, dtype: torch.dtype, has_sinks: bool) -> None:
    if dtype == torch.float64 and way in ("softcap", *DETERMINISTIC):
        pytest.skip("these kernels are of half precision")
    for same, graphs, errors in gpus.run(_steps, way, has_sinks, dtype):
        assert same
        assert graphs == 2, "forward and backward, when they come for the second time"
        assert all(each < 1e-10 for each in errors), errors


SCALES = (1,) * 4 + (4,) * 4 + (1,) * 3
"""Of lengths by step. Passes are replayed in the fourth step at the latest, and captured again after a buffer grows."""


def _layers(rank: int) -> tuple[bool, int]:
    """Layers of other lengths before one backward; the first runs late, on another stream."""
    group, options = dist.new_group(range(WORLD_SIZE)), WAYS["symm_mem"]
    same, main, other = True, torch.cuda.current_stream(), torch.cuda.Stream()
    with counted() as graphs:
        for step, scale in enumerate(SCALES):
            results: list[list[Tensors]] = []
            for replays in (True, False):
                outs, leaves, grads = [], [], []
                for layer in range(3):
                    length = 4096 * scale * (1 + layer)  # two MiB of K/V a rank and more
                    problem = Problem(length, length, 1, 8, 2, 64, is_causal=True, dtype=torch.bfloat16)
                    *qkv, grad_out = shards(problem, 10 * step + layer, HeadTail(), rank)
                    leaves.append([x.requires_grad_() for x in qkv])
                    grads.append(grad_out)
                    other.wait_stream(main)
                    with torch.cuda.stream(main if layer else other):  # later layers do not wait for it themselves
                        torch.cuda._sleep(0 if layer else 10_000_000)
                        out = context_parallel_attention(
                            *leaves[-1], mesh=group, enable_gqa=True, seq_len=length, replay=replays, **options
                        )
                    assert isinstance(out, torch.Tensor)
                    outs.append(out)
                main.wait_stream(other)
                torch.autograd.backward(outs, grads)
                torch.cuda.synchronize()
                results.append([[x.grad for x in of_layer] for of_layer in leaves])
            same = same and all(alike(a, b) for a, b in zip(*results, strict=True))
    return same, graphs.call_count


def test_layers_of_several_lengths_streams_and_a_growing_buffer(gpus: Processes) -> None:
    for same, graphs in gpus.run(_layers):
        assert same
        assert graphs == 18, "six for each of three spans of steps"


def _contexts(rank: int) -> list[tuple[bool, int]]:
    """SDPA in contexts with a checkpoint, in modules, and of DTensors."""
    mesh = init_device_mesh("cuda", (WORLD_SIZE,), mesh_dim_names=("cp",))
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.bfloat16)
    found = []

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def in_context(replays: bool, leaves: Any) -> Any:
        with context_parallel(mesh, seq_len=512, replay=replays):
            return checkpoint(sdpa, *leaves, use_reentrant=False)

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return sdpa(q, k, v)

    from torch.distributed.tensor.parallel import parallelize_module

    modules = [
        parallelize_module(Layer(), mesh, ContextParallel(seq_len=512, replay=replays)) for replays in (False, True)
    ]

    def in_module(replays: bool, leaves: Any) -> Any:
        return modules[replays](*leaves)

    def of_dtensors(replays: bool, leaves: Any) -> Any:
        q, k, v = (DTensor.from_local(x, mesh, [Shard(2)]) for x in leaves)
        out = context_parallel_attention(q, k, v, is_causal=True, enable_gqa=True, replay=replays)
        assert isinstance(out, DTensor)
        return out.to_local()

    for way in (in_context, in_module, of_dtensors):
        same = True
        with counted() as graphs:
            for seed in range(4):
                inputs, results = shards(problem, seed, HeadTail(), rank), []
                for replays in (True, False):
                    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
                    out = way(replays, leaves)
                    out.backward(inputs[3])
                    results.append([out.detach(), *(x.grad for x in leaves)])
                same = same and alike(*results)
        found.append((same, graphs.call_count))
    return found


def test_contexts_with_checkpoints_modules_and_dtensors(gpus: Processes) -> None:
    for found in gpus.run(_contexts):
        same, graphs = zip(*found, strict=True)
        assert all(same)
        # A forward is captured once more where backward maps a larger buffer. Modules replay the graphs of contexts.
        assert graphs in ((2, 0, 2), (3, 0, 2))


def _captured_by_the_user(rank: int) -> bool:
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.bfloat16)
    inputs = shards(problem, 0, HeadTail(), rank)
    attend = partial(call, length=512, mesh=dist.group.WORLD, **WAYS["symm_mem"])
    with torch.inference_mode():
        for _ in range(3):
            context_parallel_attention(
                *inputs[:3], mesh=dist.group.WORLD, enable_gqa=True, seq_len=512, replay=True, return_lse=True,
                **WAYS["symm_mem"],
            )  # fmt: skip
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            attend(inputs, replay=True)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = attend(inputs, replay=True)
    for x, fresh in zip(inputs, shards(problem, 1, HeadTail(), rank), strict=True):
        x.copy_(fresh)
    graph.replay()
    return alike([x.clone() for x in results], attend(inputs))


def test_after_inference_and_in_graphs_of_the_user(gpus: Processes) -> None:
    assert gpus.run(_captured_by_the_user) == [True] * WORLD_SIZE


def _refusals(rank: int) -> None:
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.bfloat16)
    attend = partial(call, shards(problem, 0, HeadTail(), rank), length=512, mesh=dist.group.WORLD, replay=True)
    bias = torch.zeros(512 // WORLD_SIZE, 512, device="cuda")
    for options, message in (
        ({"attn_mask": bias}, "takes no attn_mask"),
        ({"dropout_p": 0.5}, "takes no dropout_p"),
        ({"mask": Documents((0, 100, 512)) & SlidingWindow(100, 0)}, "takes no packed documents"),
        ({"method": "ring", "rotate_method": "allgather"}, "share GPU memory"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            attend(**options)


def test_calls_that_cannot_be_replayed_are_refused(gpus: Processes) -> None:
    gpus.run(_refusals)


def _kept(rank: int) -> int:
    """Graphs that are left after more kinds of calls than are kept."""
    for rows in range(40):
        problem = Problem(64 + 2 * rows, 64 + 2 * rows, 1, 2, 2, 64, is_causal=True, dtype=torch.bfloat16)
        inputs = shards(problem, 0, HeadTail(), rank)
        for _ in range(3):
            results = call(inputs, length=problem.q_len, mesh=dist.group.WORLD, replay=True, **WAYS["symm_mem"])
        assert alike(results, call(inputs, length=problem.q_len, mesh=dist.group.WORLD, **WAYS["symm_mem"]))
    return len(replay._passes.get(dist.group.WORLD, None, list))  # type: ignore[arg-type]


def test_a_bounded_number_of_graphs_is_kept(gpus: Processes) -> None:
    assert gpus.run(_kept) == [replay._MOST_PASSES] * WORLD_SIZE


def _failing(rank: int) -> bool:
    """True if a capture that cannot be ended changes neither results nor the stream of the thread."""
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.bfloat16)
    group, stream = dist.new_group(range(WORLD_SIZE)), torch.cuda.current_stream()
    attend = partial(call, shards(problem, 0, HeadTail(), rank), length=512, mesh=group, **WAYS["symm_mem"])
    *qkv, _ = shards(problem, 0, HeadTail(), rank)
    attend()  # maps the buffer
    forward = partial(context_parallel_attention, *qkv, mesh=group, enable_gqa=True, seq_len=512, **WAYS["symm_mem"])
    unended = mock.patch.object(torch.cuda.CUDAGraph, "capture_end", side_effect=RuntimeError("unjoined work"))
    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin"), unended, torch.no_grad():
        outs = [forward(replay=True) for _ in range(3)]
        assert torch.cuda.current_stream() == stream
    same = all(alike([out], [forward()]) for out in outs)
    return same and all(alike(attend(replay=True), attend()) for _ in range(4))


def test_after_a_capture_that_raises_calls_are_right(gpus: Processes) -> None:
    assert gpus.run(_failing) == [True] * WORLD_SIZE
