"""`context_parallel_shard`, `context_parallel_unshard` and `local_positions`; what they and contexts do not take."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.collectives import errors_by_rank
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import shard
from support.ranks import run_ranks
from support.sequences import normal
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from cp_dtensor import (
    Balanced,
    BalancedBlocks,
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    MirroredBatch,
    PerDocument,
    Striped,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    local_positions,
)
from cp_dtensor._torch.tensors import indexable

WORLD = 3
LAYOUTS = [Contiguous(), HeadTail(), Striped(), Striped(block=3), MirroredBatch()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
Names = tuple[str, ...]
ONE_AXIS: Names = ("cp",)
TWO_AXES: list[Names] = [RING_ULYSSES, ULYSSES_RING, ("cp_node", "cp_gpu")]


def on_mesh(names: Names, sizes: tuple[int, ...]) -> tuple[DeviceMesh, int]:
    """The mesh, and this rank's place in the sequence."""
    mesh = init_device_mesh("cpu", sizes[: len(names)], mesh_dim_names=names)
    return mesh, place(list(mesh.get_coordinate() or []), names, tuple(mesh.shape))


def distinct(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose elements tell where they stand, as far as the dtype can."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if dtype.is_complex:
        return torch.complex(values.float(), -values.float()).to(dtype)
    return (values % 256 if dtype == torch.bfloat16 else values % 3 == 1 if dtype == torch.bool else values).to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], int, torch.dtype]:
    """A layout, and a tensor's shape, sequence dim (perhaps negative) and dtype."""
    layout = draw(st.sampled_from(LAYOUTS))
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    dim = draw(st.integers(1 if isinstance(layout, MirroredBatch) else 0, len(shape) - 1))
    shape[dim] = draw(st.integers(0, 20))
    return layout, tuple(shape), draw(st.sampled_from([dim, dim - len(shape)])), draw(st.sampled_from(DTYPES))


@settings(max_examples=120)
@example((Contiguous(), (18, 1), 0, torch.bool), ONE_AXIS, (2,))
@example((HeadTail(), (2, 9), 1, torch.float8_e4m3fn), ONE_AXIS, (3,))
@given(cases(), st.sampled_from([ONE_AXIS, *TWO_AXES]), st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_shards_are_the_layouts_positions_and_unshard_is_the_inverse(
    case: tuple[Layout, tuple[int, ...], int, torch.dtype], names: Names, sizes: tuple[int, ...]
) -> None:
    layout, shape, dim, dtype = case

    def body(rank: int) -> None:
        whole = distinct(shape, dtype)
        mesh, here = on_mesh(names, sizes)
        (mine,) = context_parallel_shard(mesh, [whole], [dim], layout)
        assert mine.dtype == dtype
        assert torch.equal(indexable(mine), shard(indexable(whole), layout, here, mesh.size(), dim % len(shape)))
        (back,) = context_parallel_unshard(mesh, [mine], [dim], layout)
        assert back.dtype == dtype
        assert torch.equal(indexable(back), indexable(whole))
        mine.zero_()  # new memory
        assert torch.equal(indexable(whole), indexable(distinct(shape, dtype)))
        rows = torch.arange(shape[dim]).expand(5, -1)
        for batch in (5,) if isinstance(layout, MirroredBatch) else (5, None):
            positions = local_positions(mesh, shape[dim], layout, batch_size=batch)
            assert positions.dtype == torch.int64
            owned = shard(rows, layout, here, mesh.size(), 1)
            assert torch.equal(positions.expand_as(owned), owned)
            assert positions.dim() == 1 + (batch is not None)

    run_ranks(math.prod(sizes[: len(names)]), body)


def test_by_hand() -> None:
    """The axis called "ulysses" is the inner one; ranks 0 to 3 stand at (0, 0), (0, 1), (1, 0), (1, 1) of the mesh."""

    def body(rank: int) -> list[list[int]]:
        meshes = [on_mesh(names, (2, 2))[0] for names in TWO_AXES]
        return [local_positions(mesh, 4, Contiguous()).tolist() for mesh in meshes]

    assert run_ranks(4, body) == [[[0], [0], [0]], [[1], [2], [1]], [[2], [1], [2]], [[3], [3], [3]]]

    def mirrored(rank: int) -> list[list[int]]:
        return local_positions(dist.group.WORLD, 4, MirroredBatch(), batch_size=2).tolist()

    assert run_ranks(2, mirrored) == [[[0, 1], [2, 3]], [[2, 3], [0, 1]]]


def test_several_tensors_of_different_lengths_and_dims_at_once() -> None:
    wholes = [distinct((2, 9), torch.int64), distinct((5, 3), torch.complex64), distinct((2, 2, 1), torch.bool)]

    def body(rank: int) -> None:
        shards = context_parallel_shard(dist.group.WORLD, wholes, (1, 0, -1))
        for mine, whole, dim in zip(shards, wholes, (1, 0, 2), strict=True):
            assert torch.equal(mine, shard(whole, HeadTail(), rank, WORLD, dim))
        for back, whole in zip(context_parallel_unshard(dist.group.WORLD, shards, (1, 0, -1)), wholes, strict=True):
            assert torch.equal(back, whole)

    run_ranks(WORLD, body)


# Gradients


def whole_loss(hidden: torch.Tensor) -> torch.Tensor:
    """A loss that mixes tokens."""
    return (hidden.cumsum(1) ** 2 * normal(*hidden.shape, seed=2)).sum()


OF_ONE_LENGTH = [
    PerDocument([2, 5, 5, 20, 21, 35], seq_len=37), Balanced(Documents([2, 5, 21, 35], within=Causal()), 37),
    *(BalancedBlocks(work, size, 37) for work, size in (((1, 2, 3, 4, 5, 1, 1, 1, 9, 0), 4), ((1, 2), 32))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "names", "sizes", "length"),
    [
        *((layout, ONE_AXIS, (3,), length) for layout in LAYOUTS for length in (1, 2, 7, 12)),
        *((layout, names, (3, 2), 7) for layout in LAYOUTS for names in TWO_AXES),
        *((layout, ONE_AXIS, (3,), 37) for layout in OF_ONE_LENGTH),
    ],
    ids=str,
)
def test_gradients_through_shard_and_unshard_are_those_of_one_device(
    layout: Layout, names: Names, sizes: tuple[int, ...], length: int
) -> None:
    alone = normal(2, length, 3).requires_grad_()
    whole_loss(alone.sin()).backward()
    shares = torch.linspace(0.1, 1, math.prod(sizes), dtype=torch.float64)

    def body(rank: int) -> list[torch.Tensor]:
        mesh, _ = on_mesh(names, sizes)
        grads = []
        for grad, share in (("replicated", 1.0), ("partial", shares[rank] / shares.sum())):
            whole = normal(2, length, 3).requires_grad_()
            (mine,) = context_parallel_shard(mesh, [whole], [1], layout)
            (hidden,) = context_parallel_unshard(mesh, [mine.sin()], [1], layout, grad=grad)
            (found,) = torch.autograd.grad(whole_loss(hidden) * share, whole)
            positions = local_positions(mesh, length, layout, batch_size=2)
            others = found.index_put((torch.arange(2)[:, None], positions), torch.zeros((), dtype=found.dtype))
            assert not others.any(), "zero outside of the shard"
            grads.append(found)
        return grads

    for of_ranks in zip(*run_ranks(len(shares), body), strict=True):
        torch.testing.assert_close(sum(of_ranks), alone.grad, rtol=1e-10, atol=1e-10)


# Refusals

TOKENS, LABELS = distinct((2, 8), torch.int64), distinct((2, 8), torch.int64)
MIRRORED = MirroredBatch()
PLAIN = "buffer 0: expected a plain torch.Tensor.*"


def in_context(mesh: Any, buffers: Any = (TOKENS,), dims: Any = (1,), layout: Any = None, **options: Any) -> object:
    return context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, layout=layout, **options)


def sharded_tensor() -> DTensor:
    return DTensor.from_local(TOKENS, init_device_mesh("meta", (2,)), [Shard(0)], run_check=False)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 2), torch.randn(5, 2)], layout=layout)


def quantized() -> torch.Tensor:
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this torch has no quantized tensors")
    return torch.quantize_per_tensor(torch.ones(8, 2), 1.0, 0, torch.qint8)


EACH, CONTEXT = (context_parallel_shard, context_parallel_unshard, in_context), (in_context,)
Make = Callable[[], tuple[Any, ...]]
# Functions; tensors, dims and layout; the error and its message.
REFUSED: list[tuple[tuple[Callable[..., object], ...], Make, type[Exception], str]] = [
    *((EACH, lambda dim=dim: ([TOKENS, LABELS], [1, dim]), ValueError, f"buffer 1: sequence dim {dim} is out of range")
      for dim in (2, -3)),
    *((EACH, lambda dim=dim: ([TOKENS], [dim]), TypeError, "buffer 0: expected an integer sequence dim")
      for dim in (True, 1.0, None)),
    *((EACH, lambda layout=layout: ([TOKENS], [1], layout), TypeError, "layout") for layout in (HeadTail, "headtail")),
    *((EACH, lambda layout=layout: ([nested(layout)], [1]), TypeError, r"buffer 0: expected .* got a nested tensor")
      for layout in (torch.jagged, torch.strided)),
    (EACH, lambda: ([TOKENS, LABELS], [1]), ValueError, "got 1 for 2"),
    (EACH, lambda: ([sharded_tensor()], [1]), TypeError, PLAIN + "DTensor"),
    (EACH, lambda: ([[1, 2]], [1]), TypeError, PLAIN + "list"),
    (EACH, lambda: ([TOKENS, LABELS], [1, -2], MIRRORED), ValueError, r"buffer 1: .*needs a batch dim"),
    (EACH, lambda: ([TOKENS, TOKENS[:1]], [1, 1], MIRRORED), ValueError, "one batch size"),
    (CONTEXT, lambda: (TOKENS, [0]), TypeError, "buffers to be a sequence"),
    (CONTEXT, lambda: ([TOKENS], 0), TypeError, "buffer_seq_dims to be a sequence"),
    (CONTEXT, lambda: ([TOKENS], None), ValueError, "got 0 for 1"),
    (CONTEXT, lambda: ([TOKENS, TOKENS], [1, 1]), ValueError, "buffer 1 is the same tensor as buffer 0"),
    (CONTEXT, lambda: ([torch.ones(1, 8, requires_grad=True) * 1], [1]), ValueError,
     r"buffer 0: got a tensor that requires grad.*context_parallel_shard"),
    # It would say that it is a shard, and compute with the whole.
    (CONTEXT, lambda: ([TwoTensor(TOKENS, LABELS)], [1]), TypeError, "TwoTensor, which keeps its data in other"),
    # Contents that cannot be compared; a view of a quantized one ended the process.
    (CONTEXT, lambda: ([torch.ones(8, 2).to_sparse()], [0]), TypeError, "a dense tensor, got one of torch.sparse_coo"),
    (CONTEXT, lambda: ([torch.ones(8, 2).to_sparse_csr()], [0]), TypeError, "tensor, got one of torch.sparse_csr"),
    (CONTEXT, lambda: ([quantized()], [0]), TypeError, "tensor, got one of torch.qint8"),
    ((partial(in_context, no_restore_buffers=TOKENS),), tuple, TypeError, "no_restore_buffers to be a collection"),
    ((partial(in_context, no_restore_buffers=[LABELS]),), tuple, ValueError, r"no_restore_b.*same objects.*\(2, 8\)"),
    ((partial(in_context, rotate_method="ring"),), tuple, ValueError, r"'ring'.*'allgather', 'alltoall'"),
    ((partial(context_parallel_unshard, grad="summed"),), lambda: ([TOKENS], [1]), ValueError, "summed"),
    ((partial(local_positions, seq_len=-1), partial(local_positions, seq_len=2.0)), tuple, ValueError, "seq_len"),
    ((partial(local_positions, seq_len=8, layout=MIRRORED),), tuple, ValueError, "batch_size"),
    (tuple(lambda _, f=each: f("cp", [TOKENS], [1]) for each in EACH), tuple, TypeError, "got str"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch's, of nested, of sparse and of quantized tensors
@pytest.mark.parametrize(("functions", "make", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_before_any_collective(
    functions: tuple[Callable[..., object], ...], make: Make, error: type[Exception], message: str
) -> None:
    def body(rank: int) -> None:
        if rank == 0:  # the other one would have to join a collective
            for function in functions:
                with pytest.raises(error, match=message):
                    function(dist.group.WORLD, *make())

    run_ranks(2, body)


def test_a_tensor_that_keeps_its_data_in_others_is_sharded() -> None:
    def body(rank: int) -> None:
        (mine,) = context_parallel_shard(dist.group.WORLD, [TwoTensor(torch.arange(8), torch.arange(8))], [0])
        assert (mine.a.tolist(), mine.b.tolist()) == ([[0, 1, 6, 7], [2, 3, 4, 5]][rank],) * 2

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("names", "sizes", "lengths", "message"),
    [
        (ONE_AXIS, (2,), [4, 1], r"got \[4, 1\].*expected \[3, 2\]"),
        (ULYSSES_RING, (2, 2), [1, 2, 3, 4], r"got \[1, 2, 3, 4\].*expected \[3, 3, 2, 2\]"),
    ],
)
def test_shards_whose_lengths_are_not_the_layouts_are_refused_on_every_rank(
    names: Names, sizes: tuple[int, ...], lengths: list[int], message: str
) -> None:
    def body(rank: int) -> None:
        mesh, here = on_mesh(names, sizes)
        with pytest.raises(ValueError, match=message):
            context_parallel_unshard(mesh, [torch.zeros(lengths[here])], [0], Contiguous())

    run_ranks(len(lengths), body)


ODD: dict[str, dict[str, Any]] = {
    "dtype": {"tensors": [torch.zeros(4, 4).double()]}, "shape": {"tensors": [torch.zeros(4, 5)]},
    "count": {"tensors": [torch.zeros(4, 4)] * 2, "dims": [0, 0]}, "dim": {"dims": [1]},
    "layout": {"layout": Contiguous()}, "grad": {"grad": "partial"},
}  # fmt: skip


@pytest.mark.parametrize("differ", ODD)
def test_ranks_that_unshard_different_things_are_refused_on_every_rank(differ: str) -> None:
    def body(rank: int) -> None:
        usual = {"tensors": [torch.zeros(4, 4)], "dims": [0], "layout": HeadTail(), "grad": "replicated"}
        tensors, dims, layout, grad = {**usual, **(ODD[differ] if rank == 1 else {})}.values()
        context_parallel_unshard(dist.group.WORLD, tensors, dims, layout, grad=grad)

    for error in errors_by_rank(WORLD, body):
        assert type(error) is ValueError
        assert "what rank 1 unshards differs from the others (here: one of " in str(error)
