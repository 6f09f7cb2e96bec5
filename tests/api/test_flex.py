"""FlexAttention of shards on ranks that are threads: in contexts and as a function, against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import kinds, recorded_collectives
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
from cp_dtensor.spec.balanced_layouts import PerDocument

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


@pytest.mark.parametrize("layout", [HeadTail(), Striped(1)], ids=str)
@each_case
def test_torchs_own_kernel(case: str, layout: Layout) -> None:
    """It has no gradients on CPUs."""
    whole, arguments = draw(61), masks(case, 61)
    out, *_, lse = one_device(whole, *CASES[case])

    def body(rank: int) -> None:
        q, k, v, _ = (shard(tensor, layout, rank, 3) for tensor in whole)
        with context(layout=layout, seq_len=61):
            local, aux = flex_attention(q, k, v, **arguments, return_aux=AuxRequest(lse=True))
        assert_close(local, shard(out, layout, rank, 3))
        torch.testing.assert_close(aux.lse.double(), shard(lse, layout, rank, 3), rtol=0, atol=1e-5)

    run_ranks(3, body)


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
