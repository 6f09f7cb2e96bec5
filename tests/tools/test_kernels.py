"""The benchmark of kernels: its masks, its errors and its refusal of CPUs. The kernels' reference runs here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support.masked_problems import shown

from cp_dtensor.tools.bench.cases import Case, Heads, Source, all_tokens
from cp_dtensor.tools.kernels import MASKS, Problem, main, passes, ready_kernels, relative_error

LENGTH = 256
NAMES = [{"prefix": "prefix:64", "window 4096": "window 40", "documents 2048": "documents 50"}.get(m, m) for m in MASKS]


def problem_of(mask: str, dropout_p: float) -> Problem:
    case = Case(LENGTH, Heads(4, 2), 16, 1, "float32", mask, "HeadTail", "auto")
    return Problem(case, dropout_p, Source(0, torch.device("cpu")).inputs(case, all_tokens).contiguous())


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("mask", NAMES)
def test_kernels_see_the_mask_and_errors_are_small(mask: str, dropout_p: float) -> None:
    problem = problem_of(mask, dropout_p)
    forward, backward = passes(problem, ready_kernels(problem)["Triton"])
    out = forward()
    assert relative_error(problem, out) < 1e-5
    assert relative_error(problem, 1.5 * out) == pytest.approx(0.5, rel=1e-4)
    assert [grad.shape for grad in backward()] == [
        x.shape for x in (problem.inputs.q, problem.inputs.k, problem.inputs.v)
    ]
    if not dropout_p:
        seen = shown(problem.case.mask_value, LENGTH, LENGTH, 1)[0, 0]
        inputs = problem.inputs
        expected = F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=seen, enable_gqa=True)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_errors_are_those_of_heads_with_dims_of_their_own() -> None:
    case = dataclasses.replace(problem_of("causal", 0.0).case, heads=Heads(2, 2, 24, 8))
    inputs = Source(0, torch.device("cpu")).inputs(case, all_tokens).contiguous()
    out = F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
    assert relative_error(Problem(case, 0.0, inputs), out) < 1e-5


def test_torch_has_kernels_of_some_masks() -> None:
    names = {mask: set(ready_kernels(problem_of(mask, 0.0))) - {"Triton"} for mask in NAMES}
    assert names["causal"] == names["full"] == {"FlashAttention-2", "cuDNN"}
    assert names["window 40"] == names["documents 50"] == {"FlashAttention-2"}
    assert names["prefix:64"] == set()
    with_dropout = {mask: set(ready_kernels(problem_of(mask, 0.1))) - {"Triton"} for mask in ("causal", "window 40")}
    assert with_dropout == {"causal": {"FlashAttention-2", "cuDNN"}, "window 40": set()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_cpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "the benchmark of kernels needs a GPU" in capsys.readouterr().err


def test_useful_work_counts_the_pairs_of_the_mask() -> None:
    case = problem_of("causal", 0.0).case
    pairs = LENGTH * (LENGTH + 1) // 2
    assert case.flops("fwd") == 4 * 16 * 4 * pairs
    assert dataclasses.replace(case, mask="full").flops("fwdbwd") == 3.5 * 4 * 16 * 4 * LENGTH**2
