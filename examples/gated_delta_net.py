"""A hybrid decoder: gated delta nets, and attention in every n-th layer, as in Qwen3-Next.

A gated delta net mixes tokens by a short convolution and a state of each head. On one device it goes from token to
token, so that the training script compares the functions of shards with plain torch. B batch, S sequence, H heads, D
head dim.
"""

from __future__ import annotations

import torch
from config import Model
from llama import Llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cp_dtensor import causal_conv1d, gated_delta_rule

CONV_WIDTH = 4


class Hybrid(Llama):
    """`Llama` in which all layers but every `config.attention_every`-th mix tokens by a gated delta net."""

    def __init__(self, config: Model, vocab_size: int, seq_len: int) -> None:
        super().__init__(config, vocab_size, seq_len)
        for number, block in enumerate(self.layers.values(), start=1):
            if number % config.attention_every:
                block.attention = GatedDeltaNet(config)
        self._init_weights(config)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps (B, S) token ids and their (B, S) positions in their documents to (B, S, vocab_size) logits."""
        x, freqs_cis = self.tok_embeddings(tokens), self.freqs_cis[positions]
        for block in self.layers.values():
            x = block(x, positions if is_recurrent(block) else freqs_cis, attn_mask)
        return self.output(self.norm(x))


def is_recurrent(block: nn.Module) -> bool:
    """True if a layer has a gated delta net; also if it is wrapped for checkpointing."""
    return any(isinstance(module, GatedDeltaNet) for module in block.modules())


class GatedDeltaNet(nn.Module):
    """Gated delta rule after a short convolution.

    Source: Gated Delta Networks (arXiv 2412.06464), without its output gate.
    """

    mesh: DeviceMesh | None = None
    """The ranks that share the sequence; None on one device."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.heads, self.head_dim = config.n_heads, config.dim // config.n_heads
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wab = nn.Linear(config.dim, 2 * self.heads, bias=False)
        self.conv = nn.Parameter(torch.empty(3 * config.dim, CONV_WIDTH))
        self.decay_log = nn.Parameter(torch.zeros(self.heads))
        self.norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (B, S, dim) to (B, S, dim). `positions` (B, S) begin with 0 in each document; ranks do not read them."""
        taps = self.conv + F.pad(torch.ones_like(self.conv[:, :1]), (CONV_WIDTH - 1, 0))  # near the token itself
        qkv = self.wqkv(x)
        qkv = (
            convolved_alone(qkv, taps, positions)
            if self.mesh is None
            else causal_conv1d(qkv, taps, activation="silu", mesh=self.mesh)
        )
        q_BSHD, k_BSHD, v_BSHD = (each.unflatten(-1, (-1, self.head_dim)) for each in qkv.chunk(3, dim=-1))
        q_BSHD, k_BSHD = F.normalize(q_BSHD, dim=-1), F.normalize(k_BSHD, dim=-1)
        a_BSH, b_BSH = self.wab(x).chunk(2, dim=-1)
        g_BSH, beta_BSH = -self.decay_log.exp() * F.softplus(a_BSH), b_BSH.sigmoid()
        if self.mesh is None:
            out_BSHD = delta_rule_alone(q_BSHD, k_BSHD, v_BSHD, g_BSH, beta_BSH, positions)
        else:
            result = gated_delta_rule(q_BSHD, k_BSHD, v_BSHD, g_BSH, beta_BSH, mesh=self.mesh)
            assert isinstance(result, torch.Tensor)  # no states asked for
            out_BSHD = result
        return self.wo(self.norm(out_BSHD).flatten(2))


def convolved_alone(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """silu of the causal depthwise convolution of (B, S, C), within documents, on one device."""
    total = torch.zeros_like(x)
    for back in range(min(CONV_WIDTH, x.size(1))):
        shifted = F.pad(x, (0, 0, back, 0))[:, : x.size(1)] * (positions >= back).unsqueeze(-1)
        total = total + shifted * weight[:, CONV_WIDTH - 1 - back]
    return F.silu(total)


def delta_rule_alone(
    q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, g_BSH: torch.Tensor, beta_BSH: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The gated delta rule from token to token, on one device; the state of a document begins with zeros."""
    state_BHDD, outs = torch.zeros_like(k_BSHD[:, 0].unsqueeze(-1) * v_BSHD[:, 0].unsqueeze(-2)), []
    for q, k, v, g, beta, position in zip(
        *(each.unbind(1) for each in (q_BSHD, k_BSHD, v_BSHD, g_BSH, beta_BSH, positions)), strict=True
    ):
        kept = g.exp() * (position > 0).unsqueeze(-1)
        state_BHDD = state_BHDD * kept[..., None, None]
        change = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ state_BHDD).squeeze(-2))
        state_BHDD = state_BHDD + k.unsqueeze(-1) * change.unsqueeze(-2)
        outs.append((q.unsqueeze(-2) @ state_BHDD).squeeze(-2) * q.size(-1) ** -0.5)
    return torch.stack(outs, 1)
