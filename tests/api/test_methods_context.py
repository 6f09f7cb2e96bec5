"""`context_parallel` and `ContextParallel` with every method, over one axis and over two, compared with one device."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 13, 4, 2, 4, 11
WIDTH = HEADS * HEAD_DIM
LAYOUTS = [Contiguous(), HeadTail(), Striped(2)]
Names = tuple[str, ...]
Shape = tuple[int, ...]
Ways = tuple[Names, Shape, str]
WAYS: list[Ways] = [
    (("cp",), (4,), "ulysses"),
    (("cp",), (3,), "auto"),
    (RING_ULYSSES, (2, 2), "hybrid"),
    (ULYSSES_RING, (2, 3), "hybrid"),
    (RING_ULYSSES, (3, 2), "ring"),
    (ULYSSES_RING, (2, 2), "ring"),
    (("cp_node", "cp_gpu"), (2, 2), "auto"),
]
each_way = pytest.mark.parametrize(
    "way", WAYS, ids=lambda way: f"{way[2]} over {' x '.join(map(str, way[1]))} {way[0][0]}"
)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def on_mesh(way: Ways) -> tuple[DeviceMesh, int, int]:
    """The mesh, this rank's place in the sequence, and how many ranks there are."""
    names, shape, _ = way
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return mesh, place(list(coordinate), names, shape), mesh.size()


class Model(nn.Module):
    """A causal language model of one layer, with GQA and rotary positions; equal weights each time it is built."""

    def __init__(self) -> None:
        super().__init__()
        heads = HEADS + 2 * KV_HEADS
        self.embedding = nn.Parameter(normal(VOCABULARY, WIDTH, seed=0))
        self.qkv = nn.Parameter(normal(WIDTH, heads * HEAD_DIM, seed=1) / WIDTH**0.5)
        self.head = nn.Parameter(normal(WIDTH, VOCABULARY, seed=2) / WIDTH**0.5)

    def attend(self, hidden: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        qkv = (hidden @ self.qkv).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = (
            torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * freqs).flatten(-2)
            for each in (q, k)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return hidden + out.transpose(1, 2).flatten(2).tanh()

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, freqs: torch.Tensor, use_reentrant: bool | None = None
    ) -> torch.Tensor:
        """The sum of the losses of all tokens; `use_reentrant` None: without a checkpoint."""
        hidden = self.embedding[tokens]
        if use_reentrant is None:
            hidden = self.attend(hidden, freqs)
        else:
            hidden = torch.utils.checkpoint.checkpoint(self.attend, hidden, freqs, use_reentrant=use_reentrant)
        return F.cross_entropy((hidden @ self.head).flatten(0, 1), labels.flatten(), reduction="sum")

    def grads(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]


def batch() -> list[torch.Tensor]:
    """Tokens, labels and complex frequencies."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(2))
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] / torch.tensor([3.0, 7.0], dtype=torch.float64)
    return [tokens, labels, torch.polar(torch.ones_like(angles), angles)]


BUFFER_DIMS = [1, 1, 0]


@functools.cache
def alone() -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = Model()
    loss = model(*batch())
    loss.backward()
    return loss.detach(), model.grads()


@each_way
@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["no checkpoint", "reentrant", "non-reentrant"])
def test_a_model_in_a_context(use_reentrant: bool | None, way: Ways) -> None:
    """Layouts, and backward inside or after exit, take turns, so that each meets every kind of checkpoint."""
    turn = WAYS.index(way) + [None, True, False].index(use_reentrant)
    layout, inside = LAYOUTS[turn % len(LAYOUTS)], turn % 2 == 0
    loss, grads = alone()

    def body(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mesh, here, size = on_mesh(way)
        model, buffers = Model(), batch()
        options = {"no_restore_buffers": [buffers[1]], "method": way[2], "layout": layout}
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=BUFFER_DIMS, **options):
            local_loss = model(*buffers, use_reentrant)
            if inside:
                local_loss.backward()
        if not inside:
            local_loss.backward()
        tokens, labels, freqs = batch()
        assert torch.equal(buffers[0], tokens)
        assert torch.equal(buffers[1], shard(labels, layout, here, size, 1)), "not restored"
        assert torch.equal(buffers[2], freqs)
        return local_loss.detach(), model.grads()

    losses, ranks_grads = zip(*run_ranks(torch.Size(way[1]).numel(), body), strict=True)
    assert_close(sum(losses), loss)
    for parts, expected in zip(zip(*ranks_grads, strict=True), grads, strict=True):
        assert_close(sum(parts), expected)


PROBLEM = Problem(13, 13, batch=2, q_heads=4, kv_heads=2, is_causal=True)
WHOLE = PROBLEM.draw(0)
REFERENCE = reference(PROBLEM, *WHOLE)


class Shards:
    """A rank's leaves of one problem, and what attention of them should give."""

    def __init__(self, layout: Layout, here: int, size: int) -> None:
        *self.leaves, self.grad_out = (shard(each, layout, here, size) for each in WHOLE)
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.expected_out, *self.expected_grads = (shard(each, layout, here, size) for each in REFERENCE)
        self.out = torch.empty(0)

    def forward(self) -> None:
        """To be called inside of a context."""
        self.out = F.scaled_dot_product_attention(*self.leaves, is_causal=True, enable_gqa=True)
        assert_close(self.out, self.expected_out)

    def backward(self) -> None:
        self.out.backward(self.grad_out)
        for leaf, expected in zip(self.leaves, self.expected_grads, strict=True):
            assert_close(leaf.grad, expected)
            leaf.grad = None


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
def test_nested_contexts_with_other_methods(names: Names) -> None:
    """Each level has its own ranks, layout and method; backward belongs to the level of its forward."""

    def body(rank: int) -> None:
        mesh, here, size = on_mesh((names, (2, 2), "hybrid"))
        outer, between, after = (Shards(HeadTail(), here, size) for _ in range(3))
        of_rings = Shards(Striped(1), here, size)
        of_axis = Shards(Contiguous(), mesh.get_local_rank("ulysses"), 2)
        with context_parallel(mesh, method="hybrid", seq_len=LENGTH):
            outer.forward()
            with context_parallel(mesh, method="ring", layout=Striped(1), seq_len=LENGTH):
                of_rings.forward()
                outer.backward()
                with context_parallel(mesh["ulysses"], method="ulysses", layout=Contiguous(), seq_len=LENGTH):
                    of_axis.forward()
                    of_rings.backward()
                of_rings.forward()
            between.forward()
            of_axis.backward()
            with pytest.raises(KeyError), context_parallel(mesh, method="ring"):
                raise KeyError
            after.forward()
        for shards in (between, of_rings, after):
            shards.backward()

    run_ranks(4, body)
