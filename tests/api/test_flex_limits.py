"""FlexAttention in contexts: replaced and restored functions, and refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.flex_checks import block_mask, context, draw, window
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import flex_attention as torchs_module
from torch.nn.attention.flex_attention import flex_attention

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


# Masks that do not fit


def _in_context(mask: Any, rank: int) -> None:
    q, k, v, _ = (shard(tensor, HeadTail(), rank, 2) for tensor in draw(32))
    with context():
        flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def _function(mask: Any, rank: int, seq_len: int | None = None) -> None:
    q, k, v, _ = (shard(tensor, HeadTail(), rank, 2) for tensor in draw(32))
    options = {"mesh": dist.group.WORLD, "enable_gqa": True, "seq_len": seq_len}
    context_parallel_flex_attention(q, k, v, block_mask=mask, **options)


@pytest.mark.parametrize("lengths", [(16, 16), (32, 16), (64, 32)])
@pytest.mark.parametrize("call", [_in_context, _function, partial(_function, seq_len=32)])
def test_masks_of_other_lengths_are_refused_alike_before_anything_is_sent(
    call: Callable[..., None], lengths: tuple[int, int]
) -> None:
    """Masks of local rows, of all queries and local keys, and of too many rows."""
    mask = torchs_module.create_block_mask(window, None, None, *lengths, device="cpu", BLOCK_SIZE=8)
    refused = pytest.raises(ValueError, match=rf"block mask .* got one of \({lengths[0]}, {lengths[1]}\)")
    with recorded_collectives() as collectives, refused:
        run_ranks(2, partial(call, mask))
    assert set(kinds(collectives)) <= {"AllGather"}  # on entry, and of lengths
    assert sum(tensor.numel() for each in collectives for tensor in each.sent) < 200  # one of k has 1,024


def test_masks_of_other_batch_rows_are_refused_alike_before_anything_is_sent() -> None:
    """Also on ranks without tokens, which use no mask."""
    mask, whole, layout = block_mask(window, 2, batch=2), torch.randn(3, 2, 2, 4), MirroredBatch()

    def body(rank: int) -> None:
        q = shard(whole, layout, rank, 3)
        with context(layout=layout, seq_len=2):
            flex_attention(q, q, q, block_mask=mask)

    refused = pytest.raises(ValueError, match="a block mask of one batch row or of 3, got one of 2")
    with recorded_collectives(of_first_calls=True) as collectives, refused:
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


# Calls that contexts refuse


class _OwnRecompute(torch.autograd.Function):
    """A recompute without torch.utils.checkpoint."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        return q * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return flex_attention(grad, grad, grad)


Q = torch.randn(2, 2, 8, 4)
MASK = block_mask(window, 16, batch=2)


def _flex(q: torch.Tensor = Q, k: torch.Tensor | None = None, mask: Any = None) -> object:
    k = q if k is None else k
    return flex_attention(q, k, k, block_mask=mask)


def _replicated() -> DTensor:
    return DTensor.from_local(Q, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)


def _backward() -> None:
    _OwnRecompute.apply(Q.clone().requires_grad_()).sum().backward()


BUFFERS = {"layout": MirroredBatch(), "buffer_seq_dims": [1]}
# A call, its context, the error and its message.
REFUSED: list[tuple[Callable[[], object], dict[str, Any], type[Exception], str]] = [
    (partial(_flex, mask=torch.ones(16, 16)), {}, TypeError, "block_mask to be a BlockMask or None, got Tensor"),
    (partial(_flex, k=Q[:, :1]), {}, ValueError, "enable_gqa=True"),
    (lambda: _flex(mask=MASK.to("meta")), {}, ValueError, "block mask on the device of q, cpu, got one on meta"),
    (lambda: _flex(_replicated()), {}, NotImplementedError, "takes plain tensors inside context_parallel"),
    (lambda: context_parallel_flex_attention(Q, _replicated(), _replicated(), mesh=dist.group.WORLD), {}, TypeError,
     r"expected k to be a plain tensor, .* placed \(Replicate\(\),\)"),
    (lambda: _flex(_nested()), {}, NotImplementedError, "nested tensors"),
    (lambda: _flex(Q.to("meta")), {}, ValueError, "Found input tensors on meta"),  # torch's own error
    (_flex, {"mask": Causal()}, NotImplementedError, "does not take the mask of its context"),
    (_flex, BUFFERS, ValueError, "needs the batch size of the buffers, 4"),
    (_backward, {}, RuntimeError, "is ambiguous whether the call belongs to the context"),
    (_flex, {"each alone": True}, NotImplementedError, "left to each rank alone"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "options", "error", "message"), REFUSED)
def test_calls_that_are_refused(
    call: Callable[[], object], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def body(rank: int) -> None:
        given = {**options, "buffers": [torch.ones(4, 16)]} if options is BUFFERS else options
        alone = "each alone" in options
        around = RingAttnMode(dist.group.WORLD) if alone else context(**given)
        with around, RingAttnMode.disable() if alone else nullcontext(), pytest.raises(error, match=message):
            call()

    run_ranks(2, body)
