"""Limits of torch.compile: refusals, and recompilation where compiled code does not apply."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import Shards, causal, compiled, no_compilation, run_fresh
from support.packed_calls import packed_attention
from support.problems import assert_close
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from cp_dtensor import (
    Contiguous,
    Documents,
    HeadTail,
    MirroredBatch,
    _torch,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
    enable_context_parallel_dispatcher,
    ring_attention,
    varlen_attention,
)

ROOT = Path(__file__).resolve().parents[2]


def refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (each.detach() for each in Shards(rank).inputs())
    mask, attention = torch.ones(8, 8, dtype=torch.bool), nn.MultiheadAttention(8, 2, batch_first=True).double()
    edges, packed = torch.tensor([0, 5, 8], dtype=torch.int32), q[0].transpose(0, 1)
    mask = mask[: q.size(2), : q.size(2)]

    def enters(q: torch.Tensor) -> torch.Tensor:
        with context_parallel(mesh):
            return F.scaled_dot_product_attention(q, q, q)

    def ring(**options: Any) -> Any:
        return lambda q: ring_attention(q, q, q, mesh=mesh, **options)

    def sdpa(**options: Any) -> Any:
        return lambda q: F.scaled_dot_product_attention(q, q, q, **options)

    def fails(function: Any, *args: torch.Tensor, match: str) -> None:
        with pytest.raises(Exception, match=match):  # Dynamo's own errors, with the text of ours in them
            compiled(function)(*args)

    # Dynamo of torch 2.11 shows where the error was raised, not its text.
    fails(enters, q, match="cannot be entered inside of a torch.compile'd function|refuse_in_compiled_function")
    with pytest.raises(RuntimeError, match=r"cannot be entered inside of a torch\.compile'd function"):
        torch.compile(enters, backend="aot_eager")(q)  # runs between graphs
    message = "keys of the whole sequence"
    for function, match in (
        (lambda q: enable_context_parallel_dispatcher() and q, "enable_context_parallel_dispatcher cannot be"),
        (lambda q: ring_attention(q, k, v, mesh=mesh), "or enable_gqa=True"),
        (ring(rotate_method="no"), "unknown rotate method"),
        (lambda q: context_parallel_attention(q, q, q, mesh=mesh, method="hybrid"), "mesh of two or three dims"),
        (ring(attn_mask=mask), message),
        (lambda q: ring_attention(q, q, q, mesh=mesh, mask=mask), "mask to be a Mask.*, got .*Tensor"),
        (ring(mask=Documents([0, 99])), "of a mask end at 99"),
        (lambda _: varlen_attention(packed, packed, packed, mesh=mesh, cu_seqlens=edges), "cu_seqlens to be integers"),
        (ring(seq_len=100), "local tokens on rank"),  # found at run time
    ):
        fails(function, q, match=match)
    with context_parallel(mesh):
        fails(lambda q: packed_attention(q, q, q, edges, edges), q, match="long the whole sequence of a batch row is")
        fails(sdpa(attn_mask=mask), q, match=message)
        fails(sdpa(dropout_p=1.5), q, match="dropout_p between 0 and 1")
        with torch._dynamo.config.patch(caching_precompile=True):
            fails(lambda q: q + 1, q, match="caching_precompile takes compiled code from disk")
        fails(lambda q: attention(q, q, q)[0], q[0], match="need_weights=True")
        without = compiled(lambda q: attention(q, q, q, need_weights=False)[0])(q[0])
        assert_close(without, attention(q[0], q[0], q[0], need_weights=False)[0], "need_weights=False")


def second_derivatives(rank: int) -> None:
    """Refused in operators that run as they are (what AOTAutograd traces has none), also those of a plain sum."""
    mesh, (q, k, v) = init_device_mesh("cpu", (2,)), Shards(rank).inputs()
    attend = compiled(lambda q: ring_attention(q, k, v, mesh=mesh, enable_gqa=True), backend="eager")
    for loss in (torch.square, lambda out: out):  # the gradient of a sum is a constant
        (first,) = torch.autograd.grad(loss(attend(q)).sum(), q)
        (grad_q,) = torch.autograd.grad(loss(attend(q)).sum(), q, create_graph=True)
        assert_close(grad_q.detach(), first, "the first derivative is as it was")
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad_q.sum().backward()


def some_ranks_compile(rank: int) -> None:
    """As happens where those with other lengths reach Dynamo's recompile_limit."""
    mesh, shards = init_device_mesh("cpu", (2,)), Shards(rank)
    function = causal if rank else compiled(causal)
    for debug in (False, True):
        with context_parallel(mesh, method="ring", debug=debug):
            shards.check(function)
    message = r"returns_lse: rank 1 says False, .*; about compiled: rank 1 says False, the others True"
    with context_parallel(mesh, method="ulysses", debug=True), pytest.raises(ValueError, match=message):
        function(*shards.inputs())


def other_threads(rank: int) -> None:
    group = dist.new_group()  # another test may have warned for the group of all
    function = compiled(causal)
    shards = Shards(rank)
    with context_parallel(group), ThreadPoolExecutor(1) as thread:  # which is in no context
        shards.check(function)
        with pytest.warns(UserWarning, match="in a thread without a context"):
            result = thread.submit(function, *shards.inputs()).result()
    assert_close(result, causal(*shards.inputs()), "a thread outside of the context")


def contexts_while_another_thread_compiles(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards, expected = Shards(rank), []

    def attend() -> None:
        with context_parallel(mesh):
            expected.append(causal(*shards.inputs()))

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
        return graph

    torch.compile(lambda x: x * 2.0, backend=backend)(torch.ones(2))
    shards.check_results(*expected)
    assert expected


def unsharding(rank: int) -> None:
    """Between graphs, there and back; never in one that is recorded."""
    whole = torch.arange(20.0).view(2, 10)
    (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [1])

    def twice(x: torch.Tensor, grad: Literal["replicated", "partial"]) -> torch.Tensor:
        return context_parallel_unshard(dist.group.WORLD, [x * 2.0], [1], grad=grad)[0] * 3.0

    cases: list[tuple[Literal["replicated", "partial"], float]] = [("replicated", 6.0), ("partial", 12.0)]
    for grad, factor in cases:
        for call in (twice, torch.compile(twice, backend="aot_eager")):
            x = mine.clone().requires_grad_()
            out = call(x, grad)
            assert_close(out, whole * 6.0, grad)
            (found,) = torch.autograd.grad(out.sum(), x)
            assert_close(found, torch.full_like(x, factor), grad)
    with pytest.raises(NotImplementedError, match="context_parallel_unshard cannot be part of a graph"):
        make_fx(lambda x: twice(x, "replicated"))(mine)


def parts_and_stances(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards, outside = Shards(rank), Shards(0, ranks=1)

    def in_parts(q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        q = q * 1.0
        torch._dynamo.graph_break()
        return causal(q, *kv)

    whole, parts = compiled(causal), torch.compile(in_parts, backend="aot_eager")
    nested = compiled(lambda q, k, v: whole(q, k, v) * 1.0)
    for function in (whole, parts, nested):
        for _ in range(2):
            outside.check(function)
            with context_parallel(mesh):
                shards.check(function)
    for stance in ("force_eager", "eager_on_recompile"):
        with torch.compiler.set_stance(stance), context_parallel(mesh, layout=Contiguous()):
            Shards(rank, layout=Contiguous()).check(whole)
    mirrored = Shards(rank, layout=MirroredBatch())
    positions = torch.arange(16).view(2, 8)
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[1], layout=MirroredBatch()):
        mirrored.check(whole)
        with pytest.raises(ValueError, match="attention needs the batch size of the buffers, 2"):
            whole(*(each[:1] for each in mirrored.inputs()))


BODIES = (
    refusals, second_derivatives, some_ranks_compile, other_threads, contexts_while_another_thread_compiles,
    unsharding, parts_and_stances,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_limits(two_processes: Processes, body: Any) -> None:
    two_processes.run(run_fresh, body)


def other_groups(rank: int) -> None:
    """Two axes, and groups that take turns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    one_axis = init_device_mesh("cpu", (4,))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: Any, method: str) -> torch.Tensor:
        return context_parallel_attention(
            q * 2.0, k, v, mesh=mesh, method=method, layout=HeadTail(), is_causal=True, enable_gqa=True
        ) * 3.0  # fmt: skip

    for each, method in ((mesh, "hybrid"), (mesh, "ring"), (one_axis, "ulysses")):
        Shards(rank, 16, ranks=4).check(compiled(attention), each, method)
    ring, other = mesh["ring"], mesh["ulysses"]
    function = compiled(causal)
    for _ in range(2):
        for axis, place in ((ring, rank // 2), (other, rank % 2)):
            with context_parallel(axis, layout=Contiguous()):
                Shards(place, 12, layout=Contiguous()).check(function)
    with no_compilation(), context_parallel(mesh, method="ring"):
        with context_parallel(other, layout=Contiguous()):
            Shards(rank % 2, 12, layout=Contiguous()).check(function)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            function(*Shards(rank, 12, ranks=4).inputs())


def test_two_axes_and_groups_that_take_turns(four_processes: Processes) -> None:
    four_processes.run(run_fresh, other_groups)


def test_functions_that_are_never_compiled_share_no_limit_of_recompilations() -> None:
    """Plain Python calls them where Dynamo compiles what it calls, as parts of models that it cannot trace do."""
    functions = [_torch.never_compiled(lambda x, n=n: x + n) for n in range(4)]

    class Breaks:
        def __enter__(self) -> None:
            torch._dynamo.graph_break()

        def __exit__(self, *_: object) -> None:
            pass

    def plain(x: torch.Tensor) -> torch.Tensor:
        with Breaks():
            for each in functions:
                x = each(x)
        return x

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        found = torch.compile(lambda x: plain(x * 2), backend="eager")(torch.ones(3))
    torch.testing.assert_close(found, torch.full((3,), 8.0))


def test_functions_that_are_never_compiled_name_the_reason_at_their_first_call() -> None:
    never = _torch.never_compiled(lambda x: x + 1, "it waits for other ranks")
    with pytest.raises(Exception, match="it waits for other ranks"):
        torch.compile(lambda x: never(x), fullgraph=True, backend="eager")(torch.zeros(2))
    assert torch.equal(torch.compile(lambda x: 2 * never(x), backend="eager")(torch.zeros(2)), torch.full((2,), 2.0))


def test_dynamo_that_is_loaded_inside_of_a_context() -> None:
    program = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cp_dtensor import context_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert "torch._dynamo" not in sys.modules
q = torch.randn(1, 2, 8, 4)
targets = []

def backend(module, inputs):
    from torch._dynamo.backends.common import aot_autograd
    compiler = lambda graph, _: targets.extend(str(node.target) for node in graph.graph.nodes) or graph.forward
    return aot_autograd(fw_compiler=compiler)(module, inputs)

with context_parallel(dist.group.WORLD):
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=backend, fullgraph=True)
    compiled(q)
    assert "cp_dtensor.attention.live" in targets, targets
targets.clear()
compiled(q)
assert targets and "cp_dtensor.attention.live" not in targets, targets
from torch._dynamo import eval_frame
assert eval_frame._callback_from_stance.__module__ == "torch._dynamo.eval_frame"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
