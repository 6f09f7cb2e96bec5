"""Multi-head latent attention on one device: keys and values of compressed latents, and the adjoint.

    k = [up_k latent | rotary key],  v = up_v latent      for each token and head

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor._torch.tensors import wide_dtype


def expand_latents(latent: Tensor, rotary: Tensor, up: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of latents. Differentiable.

    Args:
        latent: (B, 1, T, R).
        rotary: (B, 1, T, Dr), one key for all heads, its positions applied.
        up: (H, Dn + Dv, R): for each head Dn rows of keys, then Dv rows of values.
        head_dim: Dn + Dr.

    Returns:
        k: (B, H, T, Dn + Dr). v: (B, H, T, Dv), a view with gaps between rows.
    """
    heads, rows = up.shape[:2]
    projected = F.linear(latent.squeeze(1), up.flatten(0, 1)).unflatten(2, (heads, rows)).transpose(1, 2)
    plain, v = projected.split((head_dim - rotary.size(3), rows - head_dim + rotary.size(3)), dim=3)
    of_heads = rotary.expand(-1, heads, -1, -1)
    # In memory (B, T, H, D), as the projection is, so that rows are copied and not transposed.
    return torch.cat((plain.transpose(1, 2), of_heads.transpose(1, 2)), dim=3).transpose(1, 2), v


def contract_gradients(
    grad_k: Tensor, grad_v: Tensor, latent: Tensor, up: Tensor, grad_up: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the adjoint of `expand_latents`.

    Args:
        grad_k, grad_v: (B, H, T, Dn + Dr) and (B, H, T, Dv).
        latent: (B, 1, T, R), finite.
        up: (H, Dn + Dv, R).
        grad_up: like `up`, in float32 or wider; its gradient is added. None if it is not needed.

    Returns:
        The gradients of latent (B, 1, T, R), and of the rotary key (B, 1, T, Dr) in float32 or wider.
    """
    plain_dim = up.size(1) - grad_v.size(3)
    plain, of_rotary = grad_k.split((plain_dim, grad_k.size(3) - plain_dim), dim=3)
    of_projected = torch.cat((plain.transpose(1, 2), grad_v.transpose(1, 2)), dim=3).to(up.dtype).flatten(2)
    if grad_up is not None:
        grad_up.add_((of_projected.flatten(0, 1).mT @ latent.flatten(0, 2)).view(up.shape))
    return (of_projected @ up.flatten(0, 1)).unsqueeze(1), of_rotary.sum(1, keepdim=True, dtype=wide_dtype(grad_k))
