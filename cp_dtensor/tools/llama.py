"""Llama-shaped model of the training benchmark: RMSNorm, RoPE, grouped-query attention, SwiGLU, loss in pieces.

B batch, S sequence, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_ROPE_THETA = 500_000.0
_LOSS_TOKENS = 8192
"""Tokens whose logits are in memory at once: 4 GiB in float32 with a vocabulary of 128,256."""


@dataclass(frozen=True)
class Size:
    """Size of a model; `ffn` is the width of the SwiGLU."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        """Dim of an attention head."""
        return self.dim // self.heads

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with: all but the embeddings and the norms.

        >>> f"{PRESETS['8b-layers'].matmul_parameters / 8:.3g}, with 1/8 of the head"
        '2.84e+08, with 1/8 of the head'
        """
        attention = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.dim * self.ffn) + self.dim * self.vocabulary

    def step_flops(self, tokens: int, pairs: int) -> float:
        """Return model FLOPs of forward and backward: 6 for each token and parameter, 12 D for each pair, head, layer.

        What is computed again (in backward of attention, checkpointed layers and the loss) does not count. Source:
        PaLM, https://arxiv.org/abs/2204.02311, appendix B, which counts masked pairs too.

        Args:
            tokens: of all ranks.
            pairs: (query, key) pairs that the mask allows, of one head.
        """
        return 6.0 * tokens * self.matmul_parameters + 12.0 * self.layers * self.heads * self.head_dim * pairs


PRESETS: Mapping[str, Size] = MappingProxyType(
    {
        "toy": Size(2, 64, 4, 2, 128, 256),
        "1b": Size(16, 2048, 32, 8, 8192, 128_256),  # Llama 3.2 1B, with an output matrix of its own
        "8b-layers": Size(8, 4096, 32, 8, 14_336, 128_256),  # 8 of the 32 layers of Llama 3.1 8B
    }
)
"""Sizes by name."""


class Llama(nn.Module):
    """The loss of next-token prediction, with the same weights on every rank.

    Args:
        size: of the model.
        is_causal: argument of SDPA; False if a context has the mask.
        contiguous: True to pass attention contiguous (B, H, S, D) tensors, and such gradients.
        checkpointed: True to compute each layer again in backward.
    """

    def __init__(self, size: Size, **of_layers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.ModuleList(Layer(size, **of_layers) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.output = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Return the sum of the token losses of (B, S) tokens and their labels at their global positions."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        pieces = zip(x.flatten(0, 1).split(_LOSS_TOKENS), labels.flatten().split(_LOSS_TOKENS), strict=True)
        if labels.numel() <= _LOSS_TOKENS:
            return self._loss(*next(pieces))
        return torch.stack([checkpoint(self._loss, *piece, use_reentrant=False) for piece in pieces]).sum()

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), labels, reduction="sum")


class Layer(nn.Module):
    """Grouped-query attention with rotary positions, and feed-forward, each after a norm and added to its input."""

    def __init__(self, size: Size, *, is_causal: bool, contiguous: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.head_dim, self.is_causal, self.contiguous = size.head_dim, is_causal, contiguous
        self.checkpointed = checkpointed
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(size.dim, eps=1e-5) for _ in range(2))
        self.wq = nn.Linear(size.dim, size.heads * size.head_dim, bias=False)
        self.wk, self.wv = (nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(size.heads * size.head_dim, size.dim, bias=False)
        self.w1, self.w3 = (nn.Linear(size.dim, size.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the (B, S, dim) rows after this layer."""
        # Inside of the module, which FSDP2 wraps: it gathers the weights once for both computations.
        return (
            checkpoint(self._rows, x, positions, use_reentrant=False) if self.checkpointed else self._rows(x, positions)
        )

    def _rows(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x), positions)
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))

    def _attention(self, x: Tensor, positions: Tensor) -> Tensor:
        q_BSHD, k_BSHD, v_BSHD = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (x.transpose(1, 2) for x in (rotated(q_BSHD, positions), rotated(k_BSHD, positions), v_BSHD))
        if self.contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        # Looked up at each call, since torch's context parallel replaces it.
        out_BHSD = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=True)
        if self.contiguous:
            out_BHSD = _ContiguousGradient.apply(out_BHSD)
        return self.wo(out_BHSD.transpose(1, 2).flatten(2))


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def rotated(x_BSHD: Tensor, positions: Tensor) -> Tensor:
    """Apply RoPE at (B, S) positions, in float32 at least: halves of a head are the pairs' first and second numbers."""
    exact = x_BSHD.to(torch.promote_types(x_BSHD.dtype, torch.float32))
    first, second = exact.chunk(2, -1)
    pairs = torch.arange(first.size(-1), device=exact.device, dtype=exact.dtype)
    angles = (positions[..., None] * _ROPE_THETA ** (-pairs / first.size(-1)))[:, :, None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).type_as(x_BSHD)
