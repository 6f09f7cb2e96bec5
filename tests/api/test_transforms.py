"""What every function that communicates refuses by name: torch.func, forward mode, batches of gradients, meta tensors.

SDPA in a context leaves meta tensors to torch (test_context_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.collectives import recorded_collectives
from support.ranks import run_ranks
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import flex_attention

from cp_dtensor import (
    Contiguous,
    Documents,
    affine_scan,
    causal_conv1d,
    context_parallel,
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_mla,
    context_parallel_unshard,
    gated_delta_rule,
    halo,
    kda,
    linear_attention,
    mamba2,
    relayout,
    ring_attention,
    shift,
    ulysses_attention,
    varlen_attention,
)

Function = Callable[[torch.Tensor], Any]


def drawn(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


X = drawn(1, 2, 4, 8)
OF_ATTENTION = "attention", "ring", "ulysses", "mla", "varlen", "flex"
IN_CONTEXT = "sdpa in a context", "causal sdpa in a context", "shift in a context"
OF_ROWS = "halo", "shift", "relayout", "causal_conv1d", "delta rule by heads"
OF_STATES = "gated_delta_rule", "kda", "linear_attention", "mamba2", "affine_scan"
EACH = (*OF_ATTENTION, *IN_CONTEXT, *OF_ROWS, *OF_STATES, "unshard")


def functions(rank: int, size: int, device: str = "cpu") -> dict[str, Function]:
    """Functions of x (1, 2, 4, 8), this rank's."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    there: dict[str, Any] = {"mesh": mesh, "layout": Contiguous()}
    k, v, rows = (drawn(1, 2, 4, 8, seed=2 * rank + each, device=device) for each in range(3))
    beta = rows[..., 0].transpose(1, 2).sigmoid()
    up, weight = drawn(2 * 8, 8, device=device), drawn(8, 3, device=device)
    heads = {"method": "heads", **there}

    def in_context(function: Function) -> Function:
        def call(x: torch.Tensor) -> Any:
            with context_parallel(mesh, layout=Contiguous(), seq_len=4 * size):
                return function(x)

        return call

    def last(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)

    return {
        "attention": lambda x: context_parallel_attention(x, k, v, **there),
        "ring": lambda x: ring_attention(x, k, v, is_causal=True, **there),
        "ulysses": lambda x: ulysses_attention(k, x, v, **there),
        "mla": lambda x: context_parallel_mla(x, k[:, 0], v[:, 0, :, :2], up=up, **there),
        "varlen": lambda x: varlen_attention(last(x)[0], last(k)[0], last(v)[0], cu_seqlens=[0, 4 * size], **there),
        "flex": lambda x: context_parallel_flex_attention(k, x, v, **there),
        "sdpa in a context": in_context(lambda x: F.scaled_dot_product_attention(x, k, v)),
        "causal sdpa in a context": in_context(lambda x: F.scaled_dot_product_attention(k, v, x, is_causal=True)),
        "unshard": lambda x: context_parallel_unshard(mesh, [x], [2], Contiguous())[0],
        "halo": lambda x: halo(x, 2, dim=2, **there),
        "shift": lambda x: shift(x, 1, dim=2, **there),
        "relayout": lambda x: relayout(x, Contiguous(), Contiguous(), mesh=mesh, dim=2),
        "causal_conv1d": lambda x: causal_conv1d(x[:, 0], weight, **there),
        "shift in a context": in_context(lambda x: shift(x, 1, dim=2, mesh=mesh)),
        "delta rule by heads": lambda x: gated_delta_rule(last(x), last(k), last(v), None, beta, **heads),
        "gated_delta_rule": lambda x: gated_delta_rule(last(k), last(x), last(v), -beta, beta, **there),
        "kda": lambda x: kda(last(k), last(x), last(v), -last(k).abs(), beta, **there),
        "linear_attention": lambda x: linear_attention(last(k), last(x), last(v), **there),
        "mamba2": lambda x: mamba2(last(x), beta, -torch.ones(2, device=device), last(k), last(v), **there),
        "affine_scan": lambda x: affine_scan(x[:, :, 0, 0], v[..., :2], seq_len=4 * size, **there),
        "Documents": lambda x: Documents(x.flatten().int()),
        "from_ids": lambda x: Documents.from_ids(x.flatten(0, 2).int()),
    }  # fmt: skip


def summed(function: Function) -> Function:
    return lambda x: function(x).square().sum()


@pytest.mark.parametrize("name", EACH)
def test_transforms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # which takes seconds

    def body(rank: int) -> None:
        function = functions(rank, 2)[name]
        expected = function(X + rank)
        for transformed in (
            lambda: torch.func.grad(summed(function))(X),
            lambda: torch.func.vjp(function, X),
            lambda: torch.func.vmap(function)(X.expand(3, *X.shape)),
            lambda: torch.func.grad(lambda factor: function(X).sum() * factor)(torch.ones(())),
        ):
            for _ in range(2):  # the first call and another one
                with pytest.raises(NotImplementedError, match=r"torch\.(func|vmap)"):
                    transformed()
        torch.testing.assert_close(function(X + rank), expected, rtol=0, atol=0)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own decompositions
@pytest.mark.parametrize("name", [name for name in EACH if name not in ("flex", *OF_STATES)])
def test_forward_mode_and_batches_of_gradients(name: str) -> None:
    """On one rank, since torch's level of forward mode is one of all threads; FlexAttention is torch's own there."""

    def body(rank: int) -> None:
        function = functions(rank, 1)[name]
        with pytest.raises(NotImplementedError, match=r"transform of torch\.func"):
            torch.func.jvp(function, (X,), (X,))
        refused = pytest.raises(NotImplementedError, match="got tangents of forward-mode differentiation")
        with forward_ad.dual_level(), refused:
            function(forward_ad.make_dual(X, torch.ones_like(X)))
        if name != "unshard":
            x = X.clone().requires_grad_()
            out = function(x)
            with pytest.raises(NotImplementedError, match="one gradient at a time, got a batch of them"):
                torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)

    run_ranks(1, body)


@pytest.mark.parametrize("name", [*(name for name in EACH if "sdpa" not in name), "Documents", "from_ids"])
def test_meta_tensors_are_refused_before_any_exchange(name: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=r"got .*meta"):
            functions(rank, 2, "meta")[name](X.to("meta"))

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert "context" in name or not collectives  # ranks compare contexts
