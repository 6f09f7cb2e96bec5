"""`context_parallel_shard`, `context_parallel_unshard` and `local_positions`, over one axis and over two."""

import math
from collections.abc import Callable

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
from torch.distributed.tensor import distribute_tensor

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel_shard,
    context_parallel_unshard,
    local_positions,
)

WORLD = 3
LAYOUTS = [Contiguous(), HeadTail(), Striped(), Striped(block=3), MirroredBatch()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
Names = tuple[str, ...]
ONE_AXIS: Names = ("cp",)
TWO_AXES: list[Names] = [RING_ULYSSES, ULYSSES_RING, ("cp_node", "cp_gpu")]
any_names = st.sampled_from([ONE_AXIS, *TWO_AXES])


def on_mesh(names: Names, sizes: tuple[int, ...]) -> tuple[DeviceMesh, int]:
    """The mesh, and this rank's place in the sequence."""
    mesh = init_device_mesh("cpu", sizes[: len(names)], mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return mesh, place(list(coordinate), names, tuple(mesh.shape))


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
@given(cases(), any_names, st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_shards_are_the_layouts_positions_and_unshard_is_the_inverse(
    case: tuple[Layout, tuple[int, ...], int, torch.dtype], names: Names, sizes: tuple[int, ...]
) -> None:
    layout, shape, dim, dtype = case

    def body(rank: int) -> None:
        whole = distinct(shape, dtype)
        mesh, here = on_mesh(names, sizes)
        (mine,) = context_parallel_shard(mesh, [whole], [dim], layout)
        assert mine.dtype == dtype
        assert torch.equal(mine, shard(whole, layout, here, mesh.size(), dim % len(shape)))
        (back,) = context_parallel_unshard(mesh, [mine], [dim], layout)
        assert back.dtype == dtype
        assert torch.equal(back, whole)
        assert torch.equal(whole, distinct(shape, dtype))

    run_ranks(math.prod(sizes[: len(names)]), body)


def test_the_axis_called_ulysses_is_the_inner_one_by_hand() -> None:
    """Ranks 0 1 2 3 stand at (0, 0), (0, 1), (1, 0), (1, 1) of the mesh."""

    def body(rank: int) -> dict[Names, list[int]]:
        meshes = {names: on_mesh(names, (2, 2))[0] for names in TWO_AXES}
        return {names: local_positions(mesh, 4, Contiguous()).tolist() for names, mesh in meshes.items()}

    owned = run_ranks(4, body)
    assert [of_rank[RING_ULYSSES] for of_rank in owned] == [[0], [1], [2], [3]]
    assert [of_rank[ULYSSES_RING] for of_rank in owned] == [[0], [2], [1], [3]]
    assert [of_rank["cp_node", "cp_gpu"] for of_rank in owned] == [[0], [1], [2], [3]]


def test_several_tensors_of_different_lengths_and_dims_at_once() -> None:
    wholes = [distinct((2, 9), torch.int64), distinct((5, 3), torch.complex64), distinct((2, 2, 1), torch.bool)]

    def body(rank: int) -> None:
        shards = context_parallel_shard(dist.group.WORLD, wholes, (1, 0, -1))
        for mine, whole, dim in zip(shards, wholes, (1, 0, 2), strict=True):
            assert torch.equal(mine, shard(whole, HeadTail(), rank, WORLD, dim))
        for back, whole in zip(context_parallel_unshard(dist.group.WORLD, shards, (1, 0, -1)), wholes, strict=True):
            assert torch.equal(back, whole)

    run_ranks(WORLD, body)


def test_shards_are_new_memory() -> None:
    def body(rank: int) -> None:
        whole = distinct((6, 2), torch.float32)
        (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [0], Contiguous())
        mine.fill_(-1)
        assert torch.equal(whole, distinct((6, 2), torch.float32))

    run_ranks(1, body)
    run_ranks(WORLD, body)


@each_layout
def test_the_gradient_of_shard_is_zero_outside_of_the_shard_and_sums_to_the_whole(layout: Layout) -> None:
    weight = normal(4, 7, 2)

    def body(rank: int) -> torch.Tensor:
        whole = normal(4, 7, 2, seed=1).requires_grad_()
        (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [1], layout)
        (mine * shard(weight, layout, rank, WORLD, 1)).sum().backward()
        owned = shard(torch.arange(56).view(4, 7, 2), layout, rank, WORLD, 1)
        others = torch.ones(56, dtype=torch.bool)
        others[owned.flatten()] = False
        assert whole.grad is not None
        assert not whole.grad.flatten()[others].any()
        return whole.grad

    torch.testing.assert_close(sum(run_ranks(WORLD, body)), weight, rtol=0, atol=0)


def whole_loss(hidden: torch.Tensor) -> torch.Tensor:
    """A loss that mixes tokens."""
    return (hidden.cumsum(1) ** 2 * normal(*hidden.shape, seed=2)).sum()


@pytest.mark.parametrize(
    ("names", "sizes", "length"),
    [*((ONE_AXIS, (3,), length) for length in (1, 2, 7, 12)), *((names, (3, 2), 7) for names in TWO_AXES)],
    ids=str,
)
@pytest.mark.parametrize("grad", ["replicated", "partial"])
@each_layout
def test_gradients_through_shard_and_unshard_are_those_of_one_device(
    layout: Layout, grad: str, names: Names, sizes: tuple[int, ...], length: int
) -> None:
    alone = normal(2, length, 3).requires_grad_()
    whole_loss(alone.sin()).backward()
    shares = torch.linspace(0.1, 1, math.prod(sizes), dtype=torch.float64)

    def body(rank: int) -> torch.Tensor:
        mesh, _ = on_mesh(names, sizes)
        whole = normal(2, length, 3).requires_grad_()
        (mine,) = context_parallel_shard(mesh, [whole], [1], layout)
        (hidden,) = context_parallel_unshard(mesh, [mine.sin()], [1], layout, grad=grad)
        (whole_loss(hidden) * (shares[rank] / shares.sum() if grad == "partial" else 1.0)).backward()
        assert whole.grad is not None
        return whole.grad

    torch.testing.assert_close(sum(run_ranks(len(shares), body)), alone.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [0, 1, 2, 5, 13])
@each_layout
def test_local_positions_are_the_shard_of_arange(layout: Layout, length: int) -> None:
    def body(rank: int) -> None:
        rows = torch.arange(length).expand(5, length)
        positions = local_positions(dist.group.WORLD, length, layout, batch_size=5)
        assert positions.dtype == torch.int64
        assert torch.equal(positions, shard(rows, layout, rank, WORLD, 1))
        if not isinstance(layout, MirroredBatch):
            positions = local_positions(dist.group.WORLD, length, layout)
            assert positions.dtype == torch.int64
            assert torch.equal(positions, shard(rows[0], layout, rank, WORLD, 0))

    run_ranks(WORLD, body)


def test_positions_of_mirrored_rows_differ_so_the_batch_size_is_asked_for() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="batch_size"):
            local_positions(dist.group.WORLD, 8, MirroredBatch())
        assert local_positions(dist.group.WORLD, 4, MirroredBatch(), batch_size=2).tolist() == [
            [2 * rank, 2 * rank + 1],
            [2 - 2 * rank, 3 - 2 * rank],
        ]
        for seq_len in (-1, 2.0):
            with pytest.raises(ValueError, match="seq_len"):
                local_positions(dist.group.WORLD, seq_len)  # type: ignore[arg-type]

    run_ranks(2, body)


@pytest.mark.parametrize("function", [context_parallel_shard, context_parallel_unshard])
def test_what_does_not_fit_is_refused_before_any_collective(function: Callable[..., object]) -> None:
    tokens = distinct((2, 8), torch.int64)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(tokens, mesh)
        if rank != 0:  # which would have to join a collective
            return
        for dim in (2, -3):
            with pytest.raises(ValueError, match=rf"buffer 1: sequence dim {dim} is out of range for shape \(2, 8\)"):
                function(mesh, [tokens, tokens], [1, dim])
        with pytest.raises(ValueError, match="got 1 for 2"):
            function(mesh, [tokens, tokens], [1])
        with pytest.raises(TypeError, match="str"):
            function("cp", [tokens], [1])
        for dim in (True, 1.0, None):
            with pytest.raises(TypeError, match="buffer 0: expected an integer sequence dim"):
                function(mesh, [tokens], [dim])
        for not_plain in (sharded, [1, 2]):
            with pytest.raises(TypeError, match=f"plain torch.Tensor.*{type(not_plain).__name__}"):
                function(mesh, [not_plain], [1])
        for layout in (HeadTail, "headtail"):
            with pytest.raises(TypeError, match="layout"):
                function(mesh, [tokens], [1], layout)
        with pytest.raises(ValueError, match=r"buffer 1: .*needs a batch dim"):
            function(mesh, [tokens, tokens], [1, -2], MirroredBatch())
        with pytest.raises(ValueError, match="one batch size"):
            function(mesh, [tokens, tokens[:1]], [1, 1], MirroredBatch())

    run_ranks(2, body)


def test_unshard_refuses_an_unknown_kind_of_gradient() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="summed"):
            context_parallel_unshard(dist.group.WORLD, [torch.zeros(2)], [0], grad="summed")  # type: ignore[arg-type]

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


@pytest.mark.parametrize("differ", ["dtype", "shape", "dim", "layout", "count", "grad"])
def test_ranks_that_unshard_different_things_are_refused_on_every_rank(differ: str) -> None:
    def body(rank: int) -> None:
        odd = rank == 1
        tensor = torch.zeros(4, 5 if odd and differ == "shape" else 4, dtype=DTYPES[odd and differ == "dtype"])
        count = 2 if odd and differ == "count" else 1
        dim = int(odd and differ == "dim")
        layout = Contiguous() if odd and differ == "layout" else HeadTail()
        context_parallel_unshard(
            dist.group.WORLD, [tensor] * count, [dim] * count, layout,
            grad="partial" if odd and differ == "grad" else "replicated",
        )  # fmt: skip

    for error in errors_by_rank(WORLD, body):
        assert type(error) is ValueError
        assert "what rank 1 unshards differs from the others (here: one of " in str(error)
