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
LENGTHS = ((5, 3, 0, 6), (2, 1, 1, 3))
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


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize(
    "form", ["causal", "no mask", "whole keys", "own keys", "own keys of each head", "own keys, one on each rank"]
)
def test_parts_of_any_lengths_and_masks_of_keys(degrees: tuple[int, int], form: str) -> None:
    """Such as joined text and image, each divided by itself; even lengths are in tests/matrix."""
    is_uneven = "one" not in form
    lengths = (LENGTHS[0], LENGTHS[form != "causal"]) if is_uneven else ((6,) * RANKS, (1,) * RANKS)
    tensors, lengths_of = problem(*map(sum, lengths)), (lengths[0], lengths[1], lengths[1], lengths[0])
    mask = torch.rand(2, HEADS if "head" in form else 1, 1, sum(lengths[1])) < 0.7
    mask[..., 0] = True
    options: dict[str, Any] = {"attn_mask": mask} if "keys" in form else {"is_causal": form == "causal"}
    expected = one_device(tensors, **options)

    def body(rank: int) -> None:
        q, k, v, grad_out = (x.split([*parts], 1)[rank] for x, parts in zip(tensors, lengths_of, strict=True))
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        local = dict(options)
        if "keys" in form:
            own = mask if form == "whole keys" else mask.split([*lengths[1]], 3)[rank]
            local["attn_mask"] = own if "head" in form else own[:, 0, 0]
        out = dispatch_attention_fn(
            *leaves,
            **local,
            enable_gqa=True,
            backend="cp_dtensor",
            parallel_config=config_of(degrees, "one" not in form),
        )
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted, parts in zip((out, *grads), expected, (lengths[0], *lengths_of[:3]), strict=True):
            torch.testing.assert_close(got, wanted.split([*parts], 1)[rank], rtol=1e-10, atol=1e-10)

    cp_diffusers.register()
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

    def call(rank: int, q_parts: list[int], parts: list[int], **options: Any) -> None:
        own = [q.split(q_parts, 1)[rank], *(each.split(parts, 1)[rank] for each in (k, v))]
        config = config_of((4, 1), is_uneven=q_parts != parts)
        cp_diffusers.attention(*own, enable_gqa=True, _parallel_config=config, **options)

    even, mask = [2] * 4, torch.ones(2, 1, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"with the 8 keys of all ranks, or with this rank's 2 keys and one row"):
        run_ranks(RANKS, lambda rank: call(rank, even, even, attn_mask=mask))
    with pytest.raises(ValueError, match=r"to be divided alike, got \(2, 2, 2, 2\) and \(1, 3, 2, 2\)"):
        run_ranks(RANKS, lambda rank: call(rank, even, [1, 3, 2, 2]))
