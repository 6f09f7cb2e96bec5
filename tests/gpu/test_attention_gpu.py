"""The attention kernels compiled for the GPU of this machine: one case of each kind of arguments.

Every case is compiled, forward and backward, which takes a few seconds. Other values and sizes are tested with Triton's
interpreter elsewhere. `test_attention_precision` has the default blocks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention_kernels import (
    SCALE,
    SMALL,
    BlockConfig,
    Tensors,
    backward_kernel,
    biases_of,
    check,
    configs,
    draw,
    launch,
    masks_of,
    patterns,
    through_kernels,
    to,
)
from support.dropouts import dropout_in_runs, dropout_of, moved
from support.hidden_rows import NAMES, assert_close, exact, row_bias
from support.row_masks import window

from cp_dtensor.attention.lse import rounded_lse
from cp_dtensor.attention.masked import RowMask, attention_backward, attention_delta, attention_forward
from cp_dtensor.attention.merge import merge
from cp_dtensor.attention.triton.dropout import kept_reference

pytestmark = pytest.mark.gpu
ROWS, COLUMNS = 37, 53
TMA = replace(SMALL, tma=True)


def test_pointers_intervals_and_an_additive_bias() -> None:
    tensors = draw("cuda", ROWS, COLUMNS, heads=(4, 2), dims=(48, 20), batch=2)
    for kind in ("any intervals", "documents", "prefixes"):
        mask, bias = masks_of(ROWS, COLUMNS)[kind], biases_of(4, ROWS, COLUMNS)["additive"]
        check(tensors, mask, bias, SMALL)


def test_hidden_rows() -> None:
    """Rows whose keys are all hidden by large finite numbers, in two tiles of columns, whose results are merged."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, grad_out = (torch.randn(2, heads, 80, 32, generator=generator) for heads in (4, 2, 2, 4))
    bias, scale = row_bias(80, 80), 32**-0.5
    expected = exact(q, k, v, grad_out, bias, torch.ones(80, 80, dtype=torch.bool))
    *tensors, bias = (x.cuda() for x in (q, k, v, grad_out, bias))
    q, k, v, grad_out = tensors
    halves = (slice(0, 48), slice(48, 80))
    parts = [
        attention_forward(q, k[:, :, half], v[:, :, half], RowMask(), scale, bias=bias[..., half], split_lse=True)
        for half in halves
    ]
    (out, lse), (part_out, part_lse) = parts
    merge(out, lse, out, lse, [((0, 80), part_out, part_lse)])
    grads = [
        attention_backward(grad_out, q, k[:, :, half], v[:, :, half], out, lse, RowMask(), scale, bias=bias[..., half])
        for half in halves
    ]
    of_q, of_k, of_v = zip(*grads, strict=True)
    results = (out, rounded_lse(lse), sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2))
    for name, got, wanted in zip(NAMES, results, expected, strict=False):
        assert_close(got.cpu(), wanted, name, 1e-4)


@pytest.mark.parametrize("dims", [(68, 5), (20, 5), (132, 20), (100, 36), (72, 8), (5, 68), (64, 5)])
@pytest.mark.parametrize("offset", [0, 1], ids=["whole", "slices"])
def test_head_dims_that_are_no_powers_of_two(dims: tuple[int, int], offset: int) -> None:
    """In bfloat16, also as slices at addresses that are not multiples of 16 bytes."""
    generator = torch.Generator().manual_seed(7)
    wide = [torch.randn(1, 3, 333, dims[i] + offset, generator=generator).bfloat16() for i in (0, 0, 1, 1)]
    tensors = [x[..., offset:] for x in wide]
    no_bias, seen = torch.zeros(1, 1, 333, 333), torch.ones(333, 333, dtype=torch.bool).tril()
    expected = exact(*(x.double() for x in tensors), no_bias, seen)
    q, k, v, grad_out = (x.cuda()[..., offset:] for x in wide)
    scale = dims[0] ** -0.5
    for mask in (RowMask(causal_offset=0), to(window(torch.arange(333), None, 0), "cuda")):
        out, lse = attention_forward(q, k, v, mask, scale)
        grads = attention_backward(grad_out, q, k, v, out, lse, mask, scale)
        for name, got, wanted in zip(NAMES, (out, lse, *grads), expected, strict=False):
            error = ((got.cpu().double() - wanted).norm() / wanted.norm()).item()
            assert error <= 1e-2, f"{name}: {error:.1e}"


def test_nan_of_a_seen_key_reaches_the_gradients() -> None:
    q, k, v = draw("cuda", ROWS, COLUMNS, batch=2)
    k[:, :, 7] = float("nan")
    out, lse, dq, dk, dv = through_kernels((q, k, v), torch.ones_like(q), RowMask(), None, SMALL)
    assert all(x.isnan().all() for x in (out, lse, dq, dk, dv))


def test_descriptors_a_causal_mask_and_a_boolean_bias() -> None:
    tensors = draw("cuda", ROWS, COLUMNS, heads=(4, 2), batch=2)
    for kind in ("causal", "causal, from below"):
        check(tensors, masks_of(ROWS, COLUMNS)[kind], biases_of(4, ROWS, COLUMNS)["boolean"], config=TMA)


def test_dropout_with_intervals() -> None:
    tensors = draw("cuda", ROWS, COLUMNS, heads=(4, 2), dtype=torch.float16, batch=2)
    for kind in ("any intervals", "causal documents"):
        for dropout in (dropout_of(ROWS, COLUMNS), dropout_in_runs(ROWS, COLUMNS)):
            check(tensors, masks_of(ROWS, COLUMNS)[kind], config=TMA, dropout=dropout)


@pytest.mark.parametrize("config", [SMALL, replace(TMA, block_columns=32)], ids=["pointers", "descriptors"])
def test_dropout_keeps_what_the_reference_keeps(config: BlockConfig) -> None:
    rows, columns = 57, 64
    for dropout in (dropout_of(rows, columns), dropout_in_runs(rows, columns)):
        expected = kept_reference(dropout, 2, 2, range(rows), range(columns))
        for got in patterns(dropout, rows, columns, config, "cuda"):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dim", [64, 128])
def test_dropout_of_runs_is_that_of_single_elements_in_default_blocks(dim: int) -> None:
    """All results are bitwise equal, with equal blocks."""
    tensors = draw("cuda", 300, 520, heads=(4, 2), dims=(dim, dim), batch=2)
    dropout = moved(dropout_in_runs(300, 520), "cuda")
    forward, backward = configs.default_config(*tensors[1:]), configs.default_backward_config(*tensors, tensors[0])
    results = []
    for one in (dropout, replace(dropout, in_runs=False)):
        check(tensors, RowMask(causal_offset=7), config=None, dropout=one)
        out, lse = torch.empty_like(tensors[0]), tensors[0].new_empty(tensors[0].shape[:3], dtype=torch.float32)
        launch(out, lse, *tensors, RowMask(), SCALE, dropout=one, config=forward)
        gradients = [torch.empty_like(x) for x in tensors]
        delta = attention_delta(out, out)
        options = {"dropout": one, "config": backward}
        backward_kernel.launch_attention_backward(*gradients, out, *tensors, lse, delta, RowMask(), SCALE, **options)
        results.append((out, lse, *gradients))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_softcap_in_default_blocks(dim: int) -> None:
    tensors = draw("cuda", 300, 520, heads=(4, 2), dims=(dim, dim), batch=2)
    for kind, bias in (("causal", "none"), ("any intervals", "none"), ("full", "additive")):
        check(tensors, masks_of(300, 520)[kind], biases_of(4, 300, 520)[bias], config=None, softcap=2.0)


def test_float32() -> None:
    check(draw("cuda", 100, 90, dtype=torch.float32, batch=2), RowMask(causal_offset=0), config=None)


def test_blocks_that_are_not_seen_are_not_read() -> None:
    q, k, v = draw("cuda", 48, 80)
    mask = to(window(torch.arange(48), 15, 0), "cuda")
    for x in (k, v):
        x[:, :, 63:] = float("nan")
    results = through_kernels((q, k, v), torch.ones_like(q), mask, None, TMA)
    assert all(x[:, :, :63].isfinite().all() for x in results)


def test_a_graph_takes_masks_and_seeds_as_they_are_at_replay() -> None:
    """Tables that a mask cached before are not part of the graph; kernels read the seed."""
    q, k, v = draw("cuda", 300, 300, dims=(128, 128))
    position = torch.arange(300, device="cuda", dtype=torch.int32)
    mask, other = (window(position, left, 0) for left in (50, 150))
    assert mask.lo is not None
    assert other.lo is not None
    dropout = replace(moved(dropout_of(300, 300), "cuda"), q_positions=position, kv_positions=position)

    def call() -> Tensors:
        out, lse = attention_forward(q, k, v, mask, SCALE, dropout=dropout)
        return out, lse, *attention_backward(out, q, k, v, out, lse, mask, SCALE, dropout=dropout)

    call()  # compiles, and derives
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    mask.lo.copy_(other.lo)
    dropout.seed.fill_(77)
    graph.replay()
    mask = RowMask(lo=mask.lo, hi=mask.hi)  # nothing has been derived of it
    assert all(map(torch.equal, captured, call()))
