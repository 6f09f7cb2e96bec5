"""FlexAttention in contexts: replaced and restored functions, and refusals."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.flex_checks import SCALE, block_mask, context, draw, one_device, window
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import flex_attention as torchs_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cp_dtensor import Contiguous, HeadTail, MirroredBatch, _torch, context_parallel_flex_attention
from cp_dtensor.integrations.unified import RingAttnMode
from cp_dtensor.spec.masks import Causal


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo must not compile in several threads at once, as `flex_attention` would in the ranks."""
    monkeypatch.setattr(torchs_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def test_outside_of_contexts_and_after_them_it_is_torchs_own() -> None:
    gc.collect()  # FlexAttention stays replaced as long as other tests' modules with ContextParallel exist
    q, k, v, _ = draw(20)
    code, function = flex_attention.__code__, flex_attention
    expected = flex_attention(q, k, v, enable_gqa=True)

    def body(rank: int) -> None:
        with context():
            with context(layout=Contiguous()):
                assert flex_attention.__code__ is not _torch.original_flex_attention.__code__
            local = flex_attention(*(shard(tensor, HeadTail(), rank, 2) for tensor in (q, k, v)), enable_gqa=True)
            assert_close(local, shard(expected, HeadTail(), rank, 2))
        assert torch.equal(flex_attention(q, k, v, enable_gqa=True), expected)  # another rank may still be in a context

    run_ranks(2, body)
    assert torchs_module.flex_attention is function
    assert flex_attention.__code__ is code


def test_code_that_another_package_has_installed_stays() -> None:
    def other() -> None:
        """Another package's."""

    code = flex_attention.__code__

    def body(rank: int) -> None:
        with context():
            flex_attention.__code__ = other.__code__

    try:
        run_ranks(1, body)
        assert flex_attention.__code__ is other.__code__
    finally:
        flex_attention.__code__ = code


def test_meta_tensors_are_left_to_torch() -> None:
    def body(rank: int) -> None:
        q = torch.empty(1, 2, 5, 4, device="meta")
        with context(), pytest.raises(ValueError, match="Found input tensors on meta"):
            flex_attention(q, q, q)

    run_ranks(1, body)


@pytest.mark.parametrize("lengths", [(16, 16), (32, 16), (64, 32)])
@pytest.mark.parametrize("seq_len", [None, 32])
def test_masks_of_other_lengths_are_refused_alike_before_anything_is_sent(
    lengths: tuple[int, int], seq_len: int | None
) -> None:
    """Masks of local rows, of all queries and local keys, and of too many rows."""
    mask = torchs_module.create_block_mask(window, None, None, *lengths, device="cpu", BLOCK_SIZE=8)
    whole = draw(32)

    def body(rank: int) -> None:
        q, k, v, _ = (shard(tensor, HeadTail(), rank, 2) for tensor in whole)
        with context():
            flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    def function(rank: int) -> None:
        q, k, v, _ = (shard(tensor, HeadTail(), rank, 2) for tensor in whole)
        context_parallel_flex_attention(
            q, k, v, mesh=dist.group.WORLD, block_mask=mask, enable_gqa=True, seq_len=seq_len
        )

    for call in (body, function):
        with (
            recorded_collectives() as collectives,
            pytest.raises(ValueError, match=rf"block mask .* got one of \({lengths[0]}, {lengths[1]}\)"),
        ):
            run_ranks(2, call)
        assert set(kinds(collectives)) <= {"AllGather"}  # on entry, and of lengths
        assert sum(tensor.numel() for each in collectives for tensor in each.sent) < 200  # one of k has 1,024


def test_masks_of_other_batch_rows_are_refused_alike_before_anything_is_sent() -> None:
    """Also on ranks without tokens, which use no mask."""
    mask = block_mask(window, 2, batch=2)
    whole = torch.randn(3, 2, 2, 4)

    def body(rank: int) -> None:
        layout = MirroredBatch()
        q = shard(whole, layout, rank, 3)
        with context(layout=layout, seq_len=2):
            flex_attention(q, q, q, block_mask=mask)

    with (
        recorded_collectives(of_first_calls=True) as collectives,
        pytest.raises(ValueError, match="a block mask of one batch row or of 3, got one of 2"),
    ):
        run_ranks(3, body)
    assert kinds(collectives) == ["AllGather"] * 2  # on entry, and of the call


def test_in_debug_mode_ranks_compare_their_masks_lengths() -> None:
    whole = draw(32)

    def body(rank: int) -> None:
        q, k, v, _ = (shard(tensor, HeadTail(), rank, 2) for tensor in whole)
        with context(debug=True):
            flex_attention(q, k, v, block_mask=block_mask(window, 32 if rank else 31), enable_gqa=True)

    one, other = errors_by_rank(2, body)
    assert "block mask of the whole sequence, got one of (31, 31)" in str(one)
    assert "rank 1 says (32, 32), the others 'refused" in str(other)


def test_what_does_not_fit_is_refused() -> None:
    q = torch.randn(2, 2, 8, 4)
    mask = block_mask(window, 16, batch=2)

    def body(rank: int) -> None:
        with context():
            with pytest.raises(TypeError, match="expected block_mask to be a BlockMask or None, got Tensor"):
                flex_attention(q, q, q, block_mask=torch.ones(16, 16))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="enable_gqa=True"):
                flex_attention(q, q[:, :1], q[:, :1])
            with pytest.raises(ValueError, match="block mask on the device of q, cpu, got one on meta"):
                flex_attention(q, q, q, block_mask=mask.to("meta"))
            mesh = init_device_mesh("cpu", (2,))
            replicated = DTensor.from_local(q, mesh, [Replicate()])
            with pytest.raises(NotImplementedError, match="takes plain tensors inside context_parallel"):
                flex_attention(replicated, replicated, replicated)
            with pytest.raises(TypeError, match=r"expected k to be a plain tensor, .* placed \(Replicate\(\),\)"):
                context_parallel_flex_attention(q, replicated, replicated, mesh=mesh)
            nested = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
            with pytest.raises(NotImplementedError, match="nested tensors"):
                flex_attention(nested, nested, nested)
        with context(mask=Causal()), pytest.raises(NotImplementedError, match="does not take the mask of its context"):
            flex_attention(q, q, q)
        with (
            context(layout=MirroredBatch(), buffers=[torch.ones(4, 16)], buffer_seq_dims=[1]),
            pytest.raises(ValueError, match="needs the batch size of the buffers, 4"),
        ):
            flex_attention(q, q, q)

    run_ranks(2, body)


def test_where_each_rank_attends_alone_it_is_refused() -> None:
    q = torch.randn(1, 2, 8, 4)

    def body(rank: int) -> None:
        with (
            RingAttnMode(dist.group.WORLD),
            RingAttnMode.disable(),
            pytest.raises(NotImplementedError, match="left to each rank alone"),
        ):
            flex_attention(q, q, q)

    run_ranks(2, body)


class _OwnRecompute(torch.autograd.Function):
    """A recompute without torch.utils.checkpoint."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        return q * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return flex_attention(grad, grad, grad)


def test_in_the_backward_of_another_autograd_function_it_is_refused() -> None:
    def body(rank: int) -> None:
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        with context(), pytest.raises(RuntimeError, match="is ambiguous whether the call belongs to the context"):
            _OwnRecompute.apply(q).sum().backward()

    run_ranks(2, body)


def test_on_one_rank_arguments_are_torchs() -> None:
    """Also a mask of a single block, which fits every length."""
    whole = draw(20)
    expected, *_ = one_device(whole, window, None)
    one_block = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=_torch.WHOLE_BLOCK, mask_mod=window, seq_lengths=(1, 1),
    )  # fmt: skip

    def body(rank: int, ranks: int) -> None:
        with context():
            q, k, v, _ = (shard(tensor, HeadTail(), rank, ranks) for tensor in whole)
            for mask in (block_mask(window, 20), one_block):
                out = flex_attention(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True)
                assert_close(out, shard(expected, HeadTail(), rank, ranks))

    run_ranks(1, body, 1)
    run_ranks(2, body, 2)
