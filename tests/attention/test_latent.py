"""Keys and values of latents by the definition, and their adjoint by autograd."""

from __future__ import annotations

import pytest
import torch
from support.latent_problems import keys_and_values

from cp_dtensor.attention.latent import contract_gradients, expand_latents

BATCH, HEADS, ROWS, PLAIN, ROTARY, VALUE, LATENT = 2, 3, 7, 4, 2, 5, 6


def draw(memory: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, rotary keys and up-projection; "rows" as transports bring them: row after row, side by side."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, BATCH, LATENT + ROTARY, generator=generator, dtype=torch.float64)
    both = rows.transpose(0, 1).unsqueeze(1)
    latent, rotary = both.split((LATENT, ROTARY), dim=3)
    if memory == "contiguous":
        latent, rotary = latent.contiguous(), rotary.contiguous()
    up = torch.randn(HEADS, PLAIN + VALUE, LATENT, generator=generator, dtype=torch.float64)
    return latent, rotary, up


@pytest.mark.parametrize("memory", ["contiguous", "rows"])
def test_keys_and_values(memory: str) -> None:
    latent, rotary, up = draw(memory)
    k, v = expand_latents(latent, rotary, up, PLAIN + ROTARY)
    wanted = keys_and_values(latent.squeeze(1), rotary.squeeze(1), up.flatten(0, 1), HEADS, PLAIN + ROTARY)
    for got, expected in zip((k, v), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert got.stride(3) == 1  # as backends need it


@pytest.mark.parametrize("needs_up", [False, True])
@pytest.mark.parametrize("memory", ["contiguous", "rows"])
def test_adjoint(memory: str, needs_up: bool) -> None:
    leaves = [tensor.requires_grad_() for tensor in draw(memory)]
    k, v = expand_latents(*leaves, PLAIN + ROTARY)
    grads = torch.randn_like(k), torch.randn_like(v)
    *expected, of_up = torch.autograd.grad((k, v), leaves, grads)
    latent, _, up = (leaf.detach() for leaf in leaves)
    total = torch.full_like(up, 3.0) if needs_up else None
    for got, wanted in zip(contract_gradients(*grads, latent, up, total), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    if total is not None:
        torch.testing.assert_close(total, of_up + 3.0, rtol=1e-12, atol=1e-12)


def test_gradients_of_half_precision_are_summed_over_heads_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    grad_k = torch.zeros(1, 3, 1, 2, dtype=torch.bfloat16)
    grad_k[0, :, 0, 1] = torch.tensor([256.0, 1.0, 1.0])
    latent, up = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.ones(3, 2, 1, dtype=torch.bfloat16)
    _, of_rotary = contract_gradients(grad_k, torch.zeros(1, 3, 1, 1, dtype=torch.bfloat16), latent, up, None)
    assert (of_rotary.dtype, of_rotary.item()) == (torch.float32, 258.0)
