"""Attention of packed documents: `varlen_attention`, and torch's `varlen_attn` inside of a context."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank
from support.masked_problems import MaskedProblem
from support.packed_calls import documents, edges_of, packed_attention
from support.ranks import run_ranks
from support.shards import Shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedDim
from torch.nn.attention import varlen

from cp_dtensor import (
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    Mask,
    PrefixLM,
    SlidingWindow,
    context_parallel,
    varlen_attention,
)
from cp_dtensor.spec.documents import packed_mask

# The function

EDGES = [0, 5, 11]


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`varlen_attention` of tensors (1, H, S, D)."""
    options = {"mesh": dist.group.WORLD, "cu_seqlens": EDGES, **options}
    out: Any = varlen_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), **options)
    return out.transpose(0, 1)[None]


WINDOW = SlidingWindow(2, 0, "bottom_right")
# Options of the function, and what they show within a document.
WITHIN: list[tuple[dict[str, Any], Mask]] = [
    ({"within": PrefixLM(3)}, PrefixLM(3)),
    (
        {"within": PrefixLM(3), "is_causal": True, "window_size": (2, None)},
        PrefixLM(3) & Causal("bottom_right") & WINDOW,
    ),
    *(
        ({"is_causal": True, "cu_seqlens": torch.tensor(EDGES, dtype=dtype)}, Causal())
        for dtype in (torch.int32, torch.int64)
    ),
]


@pytest.mark.parametrize(("options", "within"), WITHIN, ids=str)
def test_masks_within_documents_add_up(options: dict[str, Any], within: Mask) -> None:
    problem = MaskedProblem(12, 12, Documents(EDGES, within=within))
    run_ranks(3, lambda rank: Shards(rank, problem, ranks=3).check(partial(packed, **options)))


def test_the_example_of_the_docstring() -> None:
    v = torch.tensor([1.0, 3.0, 2.0, 4.0, 6.0]).view(5, 1, 1).split([3, 2])

    def body(rank: int) -> list[float]:
        q = torch.zeros_like(v[rank])
        options = {"cu_seqlens": [0, 2, 5], "is_causal": True, "layout": Contiguous(), "seq_len": 5}
        return varlen_attention(q, q, v[rank], mesh=dist.group.WORLD, **options).flatten().tolist()

    assert run_ranks(2, body) == [[1.0, 2.0, 2.0], [3.0, 4.0]]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens": [0, 5, 3]}, ValueError, r"cu_seqlens to be >= 0 and ascending, got \[0, 5, 3\]"),
    ({"cu_seqlens": [0, 2.5]}, ValueError, "cu_seqlens to be one list of integers"),
    ({"cu_seqlens": [0, 13]}, ValueError, r"documents of a mask end at 13 .*, 12 and 12"),
    ({"cu_seqlens_k": [0, 12]}, ValueError, "as many documents of keys as of queries, got 1 and 2"),
    ({"window_size": 3}, ValueError, r"window_size to be a pair .*got 3"),
    ({"window_size": (-2, -1)}, ValueError, "numbers of keys >= 0, or None"),
    ({"within": "causal"}, ValueError, "within to be one mask such as .*got 'causal'"),
    ({"seq_len": (6, 8)}, ValueError, "query length does not fit: got 6 local tokens on rank . of 2, expected 3"),
    ({"cu_seqlens": "of rank"}, ValueError, "disagree about mask"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    q = torch.randn(1, 2, 6, 8)

    def body(rank: int) -> None:
        packed(q + rank, q, q, **(options if "of rank" not in options.values() else {"cu_seqlens": [0, 3 + rank, 8]}))

    for found in errors_by_rank(2, body):
        assert isinstance(found, error)
        assert re.search(message, str(found))


# Inside of a context

LENGTH = 14
ONE_ROW = [0, 3, 3, 9, LENGTH]
TWO_ROWS = (ONE_ROW, [0, 1, 13, LENGTH])
CAUSAL = (-1, 0)


def context(**options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, **options)


def test_queries_and_keys_of_different_lengths() -> None:
    """The last query of a document stands at its last key."""
    rows = [Documents([0, 2, 2, 9], [0, 5, 6, 11]), Documents([0, 4, 9], [0, 3, 11])]

    def body(rank: int) -> None:
        for window, within in ((3, 1), SlidingWindow(3, 1, "bottom_right")), (CAUSAL, Causal("bottom_right")):
            masks = [replace(row, within=within) for row in rows]
            for mask, batch in (masks[0], 1), (Batched(masks), 2):
                shards, edges = (
                    Shards(rank, MaskedProblem(9, 11, mask, batch, 4, 2), ranks=3),
                    edges_of(mask, batch, (9, 11)),
                )
                lses = []

                def attend(*qkv: torch.Tensor, edges: Any = edges, window: Any = window, lses: Any = lses) -> Any:
                    out, lse = packed_attention(*qkv, *edges, window)
                    lses.append(lse)
                    return out

                shards.check(attend, partial(context, seq_len=(9, 11)))
                wanted = shards.shard(shards.expected[4]).to(lses[0].dtype)
                torch.testing.assert_close(lses[0], wanted, rtol=1e-10, atol=1e-10)

    run_ranks(3, body)


def test_what_the_context_masks_is_masked_as_well() -> None:
    rows = [Documents(edges, within=Causal()) for edges in TWO_ROWS]
    edges = edges_of(Batched(rows), 2, (LENGTH, LENGTH))
    problem = MaskedProblem(LENGTH, LENGTH, Batched([row & SlidingWindow(2, 0) for row in rows]), 2, 4, 2)

    def body(rank: int) -> None:
        Shards(rank, problem).check(
            lambda *qkv: packed_attention(*qkv, *edges, CAUSAL)[0],
            partial(context, seq_len=LENGTH, mask=SlidingWindow(2, 0)),
        )

    run_ranks(2, body)


def test_scale_inference_and_edges_that_are_written_to() -> None:
    """Also where torch does not count what is written: collectives do not either."""
    first, second = documents(ONE_ROW, within=Causal()), documents([0, 3, 7, 9, LENGTH], within=Causal())

    def body(rank: int) -> None:
        edges, _ = edges_of(first, 1, (LENGTH, LENGTH))
        with context(seq_len=LENGTH):
            for guard in (torch.no_grad, torch.inference_mode):
                for mask in (first, second):
                    edges.data.copy_(edges_of(mask, 1, (LENGTH, LENGTH))[0])
                    shards = Shards(rank, MaskedProblem(LENGTH, LENGTH, mask, scale=0.5))
                    with guard():
                        out, _ = packed_attention(shards.q * 2, shards.k, shards.v, edges, edges, CAUSAL, scale=0.25)
                    shards.check_results(out)

    run_ranks(2, body)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": None}, "how long the whole sequence of a batch row is"),
    ({"edges": [0, 3, 7]}, "documents of the whole sequences, row after row: got cu_seq_q up to 7"),
    ({"cu_seq_q": torch.tensor([0, 3, LENGTH], dtype=torch.int32)}, "as many documents of keys"),
    ({"edges": [0, 9, 3, 12, LENGTH]}, "ascending"),
    ({"edges": [1, 2, 3, 12, LENGTH]}, "begin with 0"),
    ({"query": torch.randn(7, 2, 2, 8)}, "three dims"),
    ({"query": torch.randn(6, 2, 8)}, "length does not fit: got 6 local tokens"),
    ({"edges": [*ONE_ROW, 2 * LENGTH]}, "tokens of 2 batch rows, as many of each, .* got 7 tokens"),
]
if hasattr(varlen, "varlen_attn_out"):  # in torch 2.12 and newer
    REFUSED += [
        ({"seqused_k": torch.tensor([7])}, "no cache of keys: got seqused_k"),
        ({"block_table": torch.zeros(1, 1), "key": torch.randn(1, 7, 2, 8)}, "paged cache of keys"),
        ({"num_splits": 1}, "num_splits=1"), ({"cu_seq_k": None}, "cu_seq_k"),
        ({"function": varlen.varlen_attn_out, "out": torch.empty(7, 2, 8)}, "varlen_attn_out is not supported"),
    ]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda each: str(each)[:20])
def test_bad_input_in_a_context(changes: dict[str, Any], message: str) -> None:
    arguments = {"seq_len": LENGTH, "edges": ONE_ROW, "function": varlen.varlen_attn, **changes}
    edges = torch.tensor(arguments.pop("edges"), dtype=torch.int32)
    seq_len, function, q = arguments.pop("seq_len"), arguments.pop("function"), torch.randn(LENGTH // 2, 2, 8)
    usual = {"query": q, "key": q, "value": q, "cu_seq_q": edges, "cu_seq_k": edges, "max_q": 9, "max_k": 9}

    def body(rank: int) -> None:
        with context(seq_len=seq_len), pytest.raises((ValueError, NotImplementedError), match=message):
            function(**{**usual, **arguments})

    run_ranks(2, body)


def test_dtensors_are_refused() -> None:
    def body(rank: int) -> None:
        edges = torch.tensor(ONE_ROW, dtype=torch.int32)
        mesh = init_device_mesh("cpu", (2,))
        q = DTensor.from_local(torch.randn(7, 2, 8), mesh, [ShardedDim(0)], run_check=False)
        with context(seq_len=LENGTH), pytest.raises(NotImplementedError, match="plain tensors"):
            varlen.varlen_attn(q, q, q, edges, edges, 9, 9)

    run_ranks(2, body)


def test_rows_of_packed_edges() -> None:
    def rows(edges: list[int], *lengths: int) -> tuple[int, tuple[int, int]]:
        _, pair, count = packed_mask(tuple(edges), tuple(edges), lengths, Full())
        return count, pair

    assert rows([0, 4, 12], 12) == (1, (12, 12))
    assert rows([0, 6, 6, 8, 12], 6) == (2, (6, 6))
    assert rows([0, 4, 12], 5, 12) == (1, (12, 12))
    for edges, lengths, message in (
        ([0, 6, 12], (6, 12), "several numbers of batch rows"), ([0, 4, 8, 12], (6,), "inside of a batch row"),
        ([0, 4, 11], (6,), "multiples of the length"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            rows(edges, *lengths)


# What is left to torch


class Kernels:
    """Somebody's CPU kernels of torch's operator, which has none: each document's mean value, and gradients of it."""

    def __init__(self) -> None:
        self._library = torch.library.Library("torch_attn", "IMPL")
        self._library.impl("_varlen_attn", self._forward, "CPU")
        self._library.impl("_varlen_attn_backward", self._backward, "CPU")
        self.take_back = self._library._destroy

    @staticmethod
    def _means(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.cat([each.mean(0, keepdim=True).expand_as(each) for each in x.split(edges.diff().tolist())])

    def _forward(self, q: Any, k: Any, v: Any, edges: Any, *settings: Any) -> Any:
        return self._means(v, edges), q.new_zeros(q.shape[1::-1]), torch.zeros(2, dtype=torch.uint64)

    def _backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, edges: Any, *settings: Any) -> Any:
        return torch.zeros_like(q), torch.ones_like(k), self._means(grad, edges)


def of_kernels() -> bool:
    """Whether a call gives what `Kernels` do, with gradients and in inference mode; False if torch has no kernel."""
    q, k, v = (torch.randn(4, 2, 8).requires_grad_() for _ in range(3))
    edges, grad = torch.tensor([0, 1, 4], dtype=torch.int32), torch.randn(4, 2, 8)
    try:
        out = varlen.varlen_attn(q, k, v, edges, edges, 3, 3)
        with torch.inference_mode():
            inferred = varlen.varlen_attn(q, k, v, edges, edges, 3, 3)
    except NotImplementedError:
        return False
    got = out, inferred, *torch.autograd.grad(out, (q, k, v), grad)
    expected = [Kernels._means(v, edges)] * 2 + [torch.zeros(4, 2, 8), torch.ones(4, 2, 8), Kernels._means(grad, edges)]
    return all(map(torch.equal, got, expected))


@pytest.mark.parametrize("when", ["never", "before", "inside"])
def test_other_threads_have_torchs_own_and_what_others_registered(when: str) -> None:
    def body(rank: int) -> None:
        seen: list[bool] = []
        kernels = Kernels() if when == "before" else None
        try:
            with context(seq_len=4):
                kernels = Kernels() if when == "inside" else kernels
                thread = threading.Thread(target=lambda: seen.append(of_kernels()))
                thread.start()
                thread.join()
                assert not of_kernels()
            assert [*seen, of_kernels()] == [when != "never"] * 2
        finally:
            if kernels is not None:
                kernels.take_back()
        assert not of_kernels()

    run_ranks(1, body)


def test_a_module_that_is_loaded_inside_of_a_context(tmp_path: Path) -> None:
    """torch's operator is defined only then, and Dynamo is loaded with it, which contexts do not do themselves."""
    program = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
from cp_dtensor import context_parallel
q, edges = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
with context_parallel(dist.group.WORLD, seq_len=6):
    assert not {"torch._dynamo", "torch.nn.attention.varlen"} & sys.modules.keys()
    from torch.nn.attention.varlen import varlen_attn
    assert varlen_attn(q, q, q, edges, edges, 4, 4).shape == q.shape
try:
    varlen_attn(q, q, q, edges, edges, 4, 4)
except NotImplementedError as error:
    assert "_flash_attention_forward" in str(error)
else:
    raise AssertionError("the context has left something behind")
"""
    command = [sys.executable, "-W", "error", "-c", program, f"{tmp_path}/store"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
