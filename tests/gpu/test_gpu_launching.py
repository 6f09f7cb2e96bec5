"""Launches of compiled kernels on a GPU: correct results when arguments change from call to call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from support.attention_kernels import SCALE, Tensors, through_reference
from support.row_masks import documents

from cp_dtensor.attention.masked import RowMask, attention_backward, attention_delta, attention_forward
from cp_dtensor.attention.merge import add_parts, add_parts_reference, merge, merge_reference

launching = pytest.importorskip("cp_dtensor._torch.triton_launch")
pytestmark = pytest.mark.gpu


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched by `kernel[grid]`, not by an earlier compiled form."""
    jit = pytest.importorskip("triton").runtime.JITFunction
    launched: list[str] = []
    original = jit.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(jit, "run", recorded)
    return launched


def drawn(rows: int, dtype: torch.dtype = torch.bfloat16, shift: int = 0, rows_first: bool = False) -> Tensors:
    """Draws q, k, v and the gradient of out, `shift` elements after the start of their memory."""
    tensors = []
    for heads in (4, 2, 2, 4):
        memory = torch.randn(heads * rows * 64 + shift, device="cuda", dtype=dtype)[shift:]
        tensors.append(
            memory.view(1, rows, heads, 64).transpose(1, 2) if rows_first else memory.view(1, heads, rows, 64)
        )
    return tuple(tensors)


def attended(tensors: Tensors, mask: RowMask) -> Tensors:
    q, k, v, grad = tensors
    out, lse = attention_forward(q, k, v, mask, SCALE)
    delta = attention_delta(grad, out)
    return out, lse, *attention_backward(grad, q, k, v, out, lse, mask, SCALE, delta=delta)[:3]  # type: ignore[return-value]


def expected(tensors: Tensors, mask: RowMask) -> Tensors:
    return through_reference(tensors[:3], tensors[3], mask, None)


def assert_close(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for mine, reference in zip(got, wanted, strict=True):
        error = (mine.cpu().double() - reference).abs().max() / reference.abs().max()
        assert error < 2e-2, error


def masks(rows: int) -> list[RowMask]:
    position = torch.arange(rows, device="cuda")
    edges = torch.tensor([0, rows // 3, rows], device="cuda")
    return [RowMask(), RowMask(causal_offset=0), documents(position, edges, is_causal=True)]


def test_attention_that_changes_from_call_to_call(by_triton: list[str]) -> None:
    """Lengths, strides, dtypes and alignments take turns; each runs its own compiled form."""
    kinds = (
        (torch.bfloat16, 0, False), (torch.bfloat16, 4, False), (torch.float16, 0, True), (torch.float16, 1, True),
    )  # fmt: skip
    # Each mask with every length and with most kinds: all 24 would be compiled for a minute.
    cases = [
        (drawn(rows, *kind), masks(rows)[number % 3]) for number, (rows, kind) in enumerate(product((96, 131), kinds))
    ]
    wanted = [expected(*case) for case in cases]
    for turn in range(3):
        by_triton.clear()
        for case, reference in zip(cases, wanted, strict=True):
            assert_close(attended(*case), reference)
        assert by_triton if turn == 0 else not by_triton


def parts_of(dtype: torch.dtype, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.randn(3 * 2 * 50 * 64 + shift, device="cuda", dtype=dtype)[shift:]
    return memory.view(3, 2, 50, 64), torch.randn(3, 2, 50, device="cuda")


@pytest.mark.parametrize("kind", ["merge", "sum"])
def test_merges_and_sums(kind: str, by_triton: list[str]) -> None:
    for turn in range(3):
        by_triton.clear()
        for dtype, shift in ((torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float32, 1)):
            for rows in ((0, 50), (7, 31)):
                base, part = parts_of(dtype, shift), parts_of(dtype, 0)
                cut = tuple(x[:, :, : rows[1] - rows[0]] for x in part)
                results = []
                for function in (merge, merge_reference) if kind == "merge" else (add_parts, add_parts_reference):
                    out, lse = (torch.empty_like(x) for x in base)
                    if kind == "merge":
                        function(out, lse, *base, [(rows, *cut)])  # type: ignore[arg-type, operator]
                    else:
                        function(out, base[0], [(rows, cut[0].unsqueeze(0))], torch.float32)  # type: ignore[arg-type, operator]
                    results.append(out)
                torch.testing.assert_close(*results)
        assert turn == 0 or not by_triton


def warm(call: Callable[[], object], calls: int = 3) -> None:
    for _ in range(calls):
        call()


@pytest.mark.parametrize(("rows", "calls"), [(128, 3), (144, 1)])
def test_a_captured_graph_replays_it(rows: int, calls: int) -> None:
    """A form may be compiled by a single call before the capture."""
    tensors, mask = drawn(rows), masks(rows)[2]
    warm(lambda: attended(tensors, mask), calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attended(tensors, RowMask(lo=mask.lo, hi=mask.hi))
        got = attended(tensors, mask)
    for _ in range(2):
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        assert_close(got, expected(tensors, mask))


def test_streams_and_threads() -> None:
    """A thread that has not used the GPU before, and several threads at once, each with its own stream."""
    problems = [(drawn(128), masks(128)[1]) for _ in range(4)]
    for problem in problems:
        warm(lambda problem=problem: attended(*problem))  # type: ignore[misc]
    results: list[Tensors | None] = [None] * 4
    torch.cuda.synchronize()

    def run(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results[index] = attended(*problems[index])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, problem in zip(results, problems, strict=True):
        assert result is not None
        assert_close(result, expected(*problem))


def test_hooks_get_every_launch(by_triton: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    launches: list[object] = []
    tensors, mask = drawn(96), masks(96)[1]
    warm(lambda: attended(tensors, mask))
    chain = triton.knobs.runtime.launch_enter_hook
    chain.add(launches.append)
    try:
        attended(tensors, mask)
    finally:
        chain.remove(launches.append)
    assert len(launches) == 5  # forward; delta, numbers of rows, dK and dV, dQ


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_take_turns(by_triton: list[str]) -> None:
    tensors, mask = drawn(96), masks(96)[1]
    wanted = expected(tensors, mask)
    for turn in range(3):
        by_triton.clear()
        for device in (0, 1):
            with torch.cuda.device(device):
                got = attended(tuple(x.to(device) for x in tensors), mask)
            assert_close(got, wanted)
        assert turn == 0 or not by_triton
