"""FlexAttention of shards on ranks that are threads: in contexts and as a function, and its refusals."""

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
from support.flex_checks import (
    SCALE,
    block_mask,
    context,
    dense_flex_attention,
    distance,
    documents,
    draw,
    one_device,
    window,
)
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import flex_attention as torchs_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from cp_dtensor import (
    BalancedBlocks,
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    _torch,
    context_parallel_flex_attention,
)
from cp_dtensor.integrations.unified import RingAttnMode
from cp_dtensor.spec.balanced_layouts import PerDocument
from cp_dtensor.spec.masks import Causal

CASES = {
    "mask": (window, None),
    "mask of documents and score": (documents, distance),
    "score": (None, distance),
    "nothing": (None, None),
}
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo must not compile in several threads at once, as `flex_attention` would in the ranks."""
    monkeypatch.setattr(torchs_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def _with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces torch's FlexAttention by one that has gradients on CPUs and reads the tables of block masks."""
    monkeypatch.setattr(_torch, "original_flex_attention", dense_flex_attention)


def masks(case: str, length: int) -> dict[str, Any]:
    mask_mod, score_mod = CASES[case]
    mask = None if mask_mod is None else block_mask(mask_mod, length)
    return {"score_mod": score_mod, "block_mask": mask, "scale": SCALE, "enable_gqa": True}


@pytest.mark.parametrize(
    ("layout", "length", "ranks"),
    [
        (HeadTail(), 64, 4),  # whole blocks
        (HeadTail(), 61, 3),
        (Striped(1), 50, 3),
        (Striped(8), 61, 3),
        (MirroredBatch(), 51, 4),
        (PerDocument([0, 13, 40, 61]), 61, 3),
        (BalancedBlocks((1, 2, 3, 4, 3, 2, 1, 9), 8, 61), 61, 3),
        (Contiguous(), 3, 4),  # a rank without tokens
    ],
    ids=str,
)
@each_case
@pytest.mark.usefixtures("_with_gradients")
def test_out_and_gradients(case: str, layout: Layout, length: int, ranks: int) -> None:
    whole, arguments = draw(length), masks(case, length)
    expected = one_device(whole, *CASES[case])

    def body(rank: int) -> None:
        *local, grad = (shard(tensor, layout, rank, ranks) for tensor in whole)
        inputs = [tensor.requires_grad_() for tensor in local]
        with context(layout=layout, seq_len=length):
            out = flex_attention(*inputs, **arguments)
        for got, whole_result in zip((out, *torch.autograd.grad(out, inputs, grad)), expected, strict=False):
            assert_close(got, shard(whole_result, layout, rank, ranks))

    run_ranks(ranks, body)


@pytest.mark.usefixtures("_with_gradients")
def test_gradients_of_lse_alone() -> None:
    """The last rank has no tokens. It takes part in the backward nevertheless, for which the others wait."""
    whole = draw(3)
    q, k = (x.clone().requires_grad_() for x in whole[:2])
    _, lse = dense_flex_attention(q, k, whole[2], scale=SCALE, enable_gqa=True, return_lse=True)
    expected = torch.autograd.grad(lse.sum(), (q, k))

    def body(rank: int) -> None:
        *local, _ = (shard(tensor, Contiguous(), rank, 4) for tensor in whole)
        inputs = [tensor.requires_grad_() for tensor in local]
        with context(layout=Contiguous(), seq_len=3):
            _, aux = flex_attention(*inputs, scale=SCALE, enable_gqa=True, return_aux=AuxRequest(lse=True))
        for got, whole_result in zip(torch.autograd.grad(aux.lse.sum(), inputs[:2]), expected, strict=True):
            assert_close(got, shard(whole_result, Contiguous(), rank, 4))

    run_ranks(4, body)


@pytest.mark.usefixtures("_with_gradients")
def test_gradients_of_what_a_score_captures_are_shares() -> None:
    """`score_mod` indexes whole tensors by global positions; the gradients of all ranks add up to the gradient."""
    whole = draw(30)
    bias = torch.linspace(-1, 1, 30, dtype=torch.float64)

    def grad(attend: Callable[..., Any], *qkv: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
        leaf = bias.clone().requires_grad_()
        out = attend(*qkv, score_mod=lambda score, b, h, q, kv: score + leaf[q] * leaf[kv], enable_gqa=True)
        return torch.autograd.grad(out, leaf, grad_out)[0]

    def body(rank: int) -> torch.Tensor:
        *local, grad_out = (shard(tensor, HeadTail(), rank, 3) for tensor in whole)
        with context():
            return grad(flex_attention, *local, grad_out=grad_out)

    assert_close(sum(run_ranks(3, body)), grad(dense_flex_attention, *whole[:3], grad_out=whole[3]))


@pytest.mark.parametrize("layout", [HeadTail(), Striped(1)], ids=str)
@pytest.mark.usefixtures("_with_gradients")
def test_one_collective_each_way(layout: Layout) -> None:
    """With `seq_len`; without, the ranks also exchange lengths."""
    whole, mask = draw(40), block_mask(window, 40)

    def body(rank: int) -> None:
        *local, grad = (shard(tensor, layout, rank, 2) for tensor in whole)
        options = {"mesh": dist.group.WORLD, "enable_gqa": True, "layout": layout, "seq_len": 40}
        out: Any = context_parallel_flex_attention(*(x.requires_grad_() for x in local), block_mask=mask, **options)
        out.backward(grad)

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert kinds(collectives) == ["AllGather", "AllToAllBase"]


def test_what_is_promised_of_the_whole_mask_is_not_promised_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that rely on the promises would leave out keys or return NaN; other options are passed on."""
    promised = {"fwd_BLOCKS_ARE_CONTIGUOUS": True, "ROWS_GUARANTEED_SAFE": True}
    taken: list[tuple[int, dict[str, Any] | None]] = []

    def recorded(*args: Any, kernel_options: dict[str, Any] | None, **kwargs: Any) -> Any:
        taken.append((args[1].size(2), kernel_options))
        return dense_flex_attention(*args, **kwargs)

    monkeypatch.setattr(_torch, "original_flex_attention", recorded)
    whole, mask = draw(32), block_mask(window, 32)
    expected = one_device(whole, window, None)[0]

    def body(rank: int, ranks: int, *several: dict[str, Any]) -> None:
        local = [shard(tensor, HeadTail(), rank, ranks) for tensor in whole[:3]]
        with context():
            for options in several:
                out = flex_attention(*local, None, mask, SCALE, True, kernel_options=options)
                assert_close(out, shard(expected, HeadTail(), rank, ranks))

    run_ranks(2, body, 2, promised, {**promised, "BLOCK_M": 64})
    assert sorted(taken, key=str) == sorted([(32, None), (32, {"BLOCK_M": 64})] * 2, key=str)
    taken.clear()
    run_ranks(1, body, 1, promised)
    assert taken == [(32, promised)]


def test_masks_of_a_single_block_fit_every_length() -> None:
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

    for ranks in (1, 2):
        run_ranks(ranks, partial(body, ranks=ranks))


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
    (lambda: _flex(_replicated()), {}, NotImplementedError, "takes plain tensors inside of context_parallel"),
    (lambda: context_parallel_flex_attention(Q, _replicated(), _replicated(), mesh=dist.group.WORLD), {}, TypeError,
     r"expected k to be a plain tensor, .* placed \(Replicate\(\),\)"),
    (lambda: _flex(_nested()), {}, NotImplementedError, "nested tensors"),
    (lambda: _flex(Q.to("meta")), {}, ValueError, "Found input tensors on meta"),  # torch's own error
    (_flex, {"mask": Causal()}, NotImplementedError, "does not take the option mask of its context"),
    (_flex, {"deterministic": True}, NotImplementedError, "the option deterministic of its context, got True"),
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
