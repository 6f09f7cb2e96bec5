"""A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The model has no code for parallelism. Attention is `F.scaled_dot_product_attention`; module names are TorchTitan's.
B batch, S sequence, H query heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from config import Model
from torch import nn
from torch.nn import functional as F


class Llama(nn.Module):
    """Model that predicts next-token logits.

    Args:
        config: sizes.
        vocab_size: number of tokens.
        seq_len: number of positions in RoPE's table.
    """

    freqs_cis: torch.Tensor
    index_loss: torch.Tensor | float = 0.0
    """Sum over tokens of what the last forward adds to their losses, in models with indexers."""

    def __init__(self, config: Model, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, vocab_size, bias=False)
        table = rope_table(config.dim // config.n_heads, seq_len, config.rope_theta)
        self.register_buffer("freqs_cis", table, persistent=False)
        self._init_weights(config)

    def _init_weights(self, config: Model) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # the norms start at 1
            writes_residual = name.endswith(("wo.weight", "w2.weight"))
            std = 0.02 / math.sqrt(2 * config.n_layers) if writes_residual else 0.02
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps (B, S) token ids and their (B, S) positions for RoPE to (B, S, vocab_size) logits.

        Without `attn_mask`, attention is causal.
        """
        x, freqs_cis = self.tok_embeddings(tokens), self.freqs_cis[positions]
        for block in self.layers.values():
            x = block(x, freqs_cis, attn_mask)
        return self.output(self.norm(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis, attn_mask=attn_mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, causal without `attn_mask`."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        # The number of heads is inferred: under tensor parallelism a rank has only some of them.
        q_BSHD, k_BSHD, v_BSHD = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        out_BHSD = F.scaled_dot_product_attention(
            rotate(q_BSHD, freqs_cis).transpose(1, 2),
            rotate(k_BSHD, freqs_cis).transpose(1, 2),
            v_BSHD.transpose(1, 2),
            attn_mask=attn_mask,
            is_causal=attn_mask is None,
            enable_gqa=True,
        )
        return self.wo(out_BHSD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rope_table(head_dim: int, seq_len: int, theta: float) -> torch.Tensor:
    """(seq_len, head_dim / 2) complex: row i rotates pair j of a head by angle i * theta^(-2j / head_dim)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(seq_len), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x_BSHD: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Applies RoPE with the rotations `freqs_cis` (B, S, D / 2) of the tokens, in the precision of `freqs_cis`."""
    pairs = torch.view_as_complex(x_BSHD.to(freqs_cis.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(-2).type_as(x_BSHD)
