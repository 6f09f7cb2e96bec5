"""`integrations.diffusers`: calls of the backend as diffusers makes them, on thread ranks, against one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("diffusers", reason="needs the extra [integrations]")

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)

from cp_dtensor.integrations import diffusers as cp_diffusers

RANKS = 4
HEADS, KV_HEADS, DIM = 4, 2, 8
DEGREES = [(4, 1), (1, 4), (2, 2)]
UNEVEN = ((5, 3, 0, 6), (2, 1, 1, 3))
"""Lengths of the ranks' queries and keys that no layout of the package has."""


def problem(q_len: int, kv_len: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out: (batch, sequence, heads, head dim)."""
    shapes = [(2, q_len, HEADS, DIM), (2, kv_len, KV_HEADS, DIM), (2, kv_len, KV_HEADS, DIM), (2, q_len, HEADS, DIM)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def one_device(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """out, dq, dk and dv."""
    *qkv, grad_out = tensors
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in qkv)
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options)
    out = out.transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def config_of(degrees: tuple[int, int], is_uneven: bool = False) -> Any:
    """A `ParallelConfig`, set up as `enable_parallelism` does it."""
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("ring", "ulysses"))
    ring, ulysses = degrees
    config = SimpleNamespace(
        ring_degree=ring, ulysses_degree=ulysses, ring_anything=is_uneven, ulysses_anything=False, _mesh=mesh,
        _ring_mesh=mesh["ring"], _ulysses_mesh=mesh["ulysses"],
    )  # fmt: skip
    return SimpleNamespace(context_parallel_config=config)


def parts(tensor: torch.Tensor, lengths: tuple[int, ...], dim: int = 1) -> tuple[torch.Tensor, ...]:
    return tensor.split(list(lengths), dim)


def check(
    degrees: tuple[int, int],
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    local_options: Any = None,
    **options: Any,
) -> None:
    """Compares out and gradients on every rank; `local_options(rank)` are the options of a rank's call."""
    tensors = problem(*map(sum, lengths))
    expected = one_device(tensors, **options)
    lengths_of = (lengths[0], lengths[1], lengths[1], lengths[0])

    def body(rank: int) -> None:
        q, k, v, grad_out = (parts(tensor, lengths)[rank] for tensor, lengths in zip(tensors, lengths_of, strict=True))
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        out = dispatch_attention_fn(
            *leaves, **(options if local_options is None else local_options(rank)), enable_gqa=True,
            backend="cp_dtensor", parallel_config=config_of(degrees, len({*lengths[0]}) > 1),
        )  # fmt: skip
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted, each in zip((out, *grads), expected, (lengths[0], *lengths_of[:3]), strict=True):
            torch.testing.assert_close(got, parts(wanted, each)[rank], rtol=1e-10, atol=1e-10)

    cp_diffusers.register()
    run_ranks(RANKS, body)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        *[(((6,) * 4, (6,) * 4), {"is_causal": is_causal}) for is_causal in (False, True)],
        # Such as joined text and image, each divided by itself.
        *[((UNEVEN[0], UNEVEN[0]), {"is_causal": is_causal}) for is_causal in (False, True)],
        *[(lengths, {"scale": 0.3}) for lengths in (UNEVEN, ((6,) * 4, (2,) * 4))],  # cross-attention
    ],
)
def test_lengths(degrees: tuple[int, int], lengths: Any, options: dict[str, Any]) -> None:
    check(degrees, lengths, **options)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("lengths", [(UNEVEN[0], UNEVEN[0]), ((6,) * 4, (2,) * 4)])
@pytest.mark.parametrize("form", ["whole keys", "own keys", "own keys of each head", "biases", "rows"])
def test_masks(degrees: tuple[int, int], lengths: Any, form: str) -> None:
    q_len, kv_len = map(sum, lengths)
    mask = torch.rand(2, 1, 1, kv_len) < 0.7
    mask[..., 0] = True
    if form == "own keys of each head":
        mask = mask.expand(2, HEADS, 1, kv_len)
    if form == "biases":
        mask = torch.randn(2, 1, 1, kv_len, dtype=torch.float64)
    if form == "rows":
        mask = torch.randn(2, HEADS, q_len, kv_len, dtype=torch.float64)

    def local(rank: int) -> dict[str, Any]:
        if form == "rows":
            return {"attn_mask": parts(mask, lengths[0], 2)[rank]}
        own = mask if form == "whole keys" else parts(mask, lengths[1], 3)[rank]
        return {"attn_mask": own if form == "own keys of each head" else own[:, 0, 0]}

    check(degrees, lengths, local, attn_mask=mask)


def test_log_sum_exp() -> None:
    q, k, v, _ = problem(8, 8)
    logits = q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).transpose(2, 3) / DIM**0.5
    expected = logits.logsumexp(3).transpose(1, 2)

    def body(rank: int) -> None:
        own = [parts(tensor, (2,) * 4)[rank] for tensor in (q, k, v)]
        _, lse = cp_diffusers.attention(*own, enable_gqa=True, return_lse=True, _parallel_config=config_of((2, 2)))
        torch.testing.assert_close(lse, parts(expected, (2,) * 4)[rank])

    run_ranks(RANKS, body)


def test_without_context_parallelism_it_is_attention_of_this_rank() -> None:
    q, k, v, _ = problem(6, 5)
    cp_diffusers.register()
    with attention_backend("cp_dtensor"):
        mask = torch.tensor([[True] * 5, [True, False, True, True, False]])
        out = dispatch_attention_fn(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, one_device([q, k, v, q], attn_mask=mask[:, None, None])[0])
    with pytest.raises(NotImplementedError, match="with context parallelism only"):
        cp_diffusers.attention(q, k, v, return_lse=True)


def test_registration_adds_one_name() -> None:
    cp_diffusers.register()
    member = AttentionBackendName("cp_dtensor")
    cp_diffusers.register()
    assert AttentionBackendName("cp_dtensor") is member is AttentionBackendName.CP_DTENSOR  # type: ignore[attr-defined]
    assert [*AttentionBackendName].count(member) == 1
    assert isinstance(member, str)
    assert (member.name, member.value) == ("CP_DTENSOR", "cp_dtensor")
    assert _AttentionBackendRegistry._backends[member] is cp_diffusers.attention
    assert _AttentionBackendRegistry._is_context_parallel_available(member)


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    q, k, v, _ = problem(8, 8)

    def masked(rank: int) -> None:
        own = [parts(tensor, (2,) * 4)[rank] for tensor in (q, k, v)]
        mask = torch.ones(2, 1, 2, 2, dtype=torch.bool)
        cp_diffusers.attention(*own, attn_mask=mask, enable_gqa=True, _parallel_config=config_of((4, 1)))

    def divided(rank: int) -> None:
        own = [parts(q, (2,) * 4)[rank], *(parts(tensor, (1, 3, 2, 2))[rank] for tensor in (k, v))]
        cp_diffusers.attention(*own, enable_gqa=True, _parallel_config=config_of((4, 1), is_uneven=True))

    with pytest.raises(ValueError, match=r"with the 8 keys of all ranks, or with this rank's 2 keys and one row"):
        run_ranks(RANKS, masked)
    with pytest.raises(ValueError, match=r"to be divided alike, got \(2, 2, 2, 2\) and \(1, 3, 2, 2\)"):
        run_ranks(RANKS, divided)
