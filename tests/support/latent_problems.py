"""Problems of multi-head latent attention, and their results on one device in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cp_dtensor import Layout, context_parallel_mla
from support.masked_checks import MaskedCase, check_masked
from support.masked_problems import MaskedProblem, Tensors
from support.problems import normals, shard

NAMES = ("out", "dq", "d latent", "d k_rope", "lse")


def keys_and_values(latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor, heads: int, head_dim: int) -> Tensors:
    """Returns k and v of every head by the definition, head by head."""
    plain = head_dim - k_rope.size(2)
    weights = up.view(heads, -1, up.size(1))
    k = [torch.cat((latent @ each[:plain].T, k_rope), -1) for each in weights]
    v = [latent @ each[plain:].T for each in weights]
    return torch.stack(k, 1), torch.stack(v, 1)


@dataclass(frozen=True)
class LatentProblem(MaskedProblem):
    """A problem in global terms; `head_dim` is Dn + Dr, and `q_heads` are all heads."""

    q_heads: int = 3
    head_dim: int = 5
    rotary_dim: int = 2
    value_dim: int = 4
    latent_dim: int = 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.q_heads)

    def draw(self, seed: int) -> Tensors:
        """Draws q, latent, k_rope, up, the gradient of out, and the bias if there is one; equal on every rank."""
        normal = normals(seed)
        rows = self.q_heads * (self.head_dim - self.rotary_dim + self.value_dim)
        _, _, _, _, *bias = super().draw(seed)
        return (
            normal(self.batch, self.q_heads, self.q_len, self.head_dim),
            normal(self.batch, self.kv_len, self.latent_dim),
            normal(self.batch, self.kv_len, self.rotary_dim),
            normal(rows, self.latent_dim),
            normal(self.batch, self.q_heads, self.q_len, self.value_dim),
            *bias,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return "q", "latent", "k_rope", "up", "grad_out", "bias"

    def call(self, x: dict[str, torch.Tensor], **options: Any) -> Any:
        return context_parallel_mla(x["q"], x["latent"], x["k_rope"], up=x["up"], **options)

    def expected(self, tensors: Tensors, sinks: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        q, *leaves, grad_out = (tensor.clone().requires_grad_() for tensor in tensors[:5])
        kv = keys_and_values(*leaves, self.q_heads, self.head_dim)
        given = (q.detach(), *(x.detach() for x in kv), grad_out.detach(), *tensors[5:])
        found = super().expected(given, sinks)
        grads = torch.autograd.grad(kv, leaves, (found.pop("k"), found.pop("v")))
        return found | dict(zip(self.names[1:4], grads, strict=True))

    def results(self, tensors: Tensors) -> tuple[Tensors, torch.Tensor]:
        """Returns (out, dq, d latent, d k_rope, lse), and d up."""
        found = self.expected(tensors)
        return tuple(found[name] for name in ("out", "q", "latent", "k_rope", "lse")), found["up"]

    def shard(self, tensors: Tensors, layout: Layout, rank: int, size: int) -> Tensors:
        """Returns a rank's shards of the tensors of `draw`; `up` is whole."""
        q, latent, k_rope, up, grad_out, *bias = tensors
        return (
            shard(q, layout, rank, size),
            shard(latent, layout, rank, size, 1),
            shard(k_rope, layout, rank, size, 1),
            up.clone(),
            shard(grad_out, layout, rank, size),
            *(self.shard_bias(each, layout, rank, size) for each in bias),
        )

    shards = shard


LatentCase, check_latents = MaskedCase, check_masked
