"""A decoder with learned sparse attention, as in DeepSeek-V3.2.

In each layer an indexer scores the keys of each query, and multi-head latent attention reads the best of them. The
indexer learns by a loss of its own: its distribution of these keys against attention's. On one device scores and
attention are dense, so that the training script compares the functions of shards with plain torch. B batch, S sequence,
H heads, D head dim, R latent dim.
"""

from __future__ import annotations

import torch
from config import Model
from llama import FeedForward, Llama, rotate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cp_dtensor import indexed_attention, indexer_loss, select_keys


class Sparse(Llama):
    """`Llama` with sparse attention in all layers."""

    def __init__(self, config: Model, vocab_size: int, seq_len: int) -> None:
        super().__init__(config, vocab_size, seq_len)
        self.layers = nn.ModuleDict({name: SparseBlock(config) for name in self.layers})
        self._init_weights(config)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps (B, S) token ids and their positions to logits; leaves the loss of all indexers in `index_loss`."""
        x, freqs_cis = self.tok_embeddings(tokens), self.freqs_cis[positions]
        losses = []
        for block in self.layers.values():
            x, loss = block(x, freqs_cis, attn_mask)
            losses.append(loss)
        self.index_loss = torch.stack(losses).sum()
        return self.output(self.norm(x))


class SparseBlock(nn.Module):
    """Sparse attention and feed-forward, each after a norm and added to its input; and the loss of the indexer."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = SparseAttention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, attn_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, loss = self.attention(self.attention_norm(x), freqs_cis, attn_mask)
        x = x + out
        return x + self.feed_forward(self.ffn_norm(x)), loss


class SparseAttention(nn.Module):
    """Multi-head latent attention over the keys that an indexer selects; a head has D plain and D rotary dims.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """

    mesh: DeviceMesh | None = None
    """The ranks that share the sequence; None on one device."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim, self.topk = config.dim // config.n_heads, config.index_topk
        self.wq = nn.Linear(config.dim, config.n_heads * 2 * self.head_dim, bias=False)
        self.wkv_a = nn.Linear(config.dim, config.latent_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.latent_dim, eps=config.norm_eps)
        self.wk_rope = nn.Linear(config.dim, self.head_dim, bias=False)
        self.wkv_b = nn.Linear(config.latent_dim, config.n_heads * 2 * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.wq_index = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wk_index = nn.Linear(config.dim, self.head_dim, bias=False)
        self.index_norm = nn.LayerNorm(self.head_dim)
        self.w_index = nn.Linear(config.dim, config.n_kv_heads, bias=False)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, attn_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps (B, S, dim) to (B, S, dim) and the loss of the indexer, summed over these tokens."""
        dim, scale = self.head_dim, (2 * self.head_dim) ** -0.5
        plain, rotary = self.wq(x).unflatten(-1, (-1, 2 * dim)).split(dim, -1)
        q_BHSD = torch.cat((plain, rotate(rotary, freqs_cis)), -1).transpose(1, 2)
        latent_BSR = self.kv_norm(self.wkv_a(x))
        k_rope_BSD = rotate(self.wk_rope(x).unsqueeze(2), freqs_cis).squeeze(2)
        up = self.wkv_b.weight  # for each head D rows of keys, then D rows of values

        seen = x.detach()  # the indexer learns by its own loss alone
        q_index_BSHD = rotate(self.wq_index(seen).unflatten(-1, (-1, dim)), freqs_cis)
        k_index_BSD = rotate(self.index_norm(self.wk_index(seen)).unsqueeze(2), freqs_cis).squeeze(2)
        weights_BSH = self.w_index(seen)
        index = q_index_BSHD, k_index_BSD, weights_BSH
        if self.mesh is None:
            out_BHSD, loss = sparse_alone(q_BHSD, latent_BSR, k_rope_BSD, up, index, self.topk, scale, attn_mask)
        else:
            indices = select_keys(*index, topk=self.topk, mesh=self.mesh)
            out_BHSD = indexed_attention(q_BHSD, latent_BSR, k_rope_BSD, up=up, indices=indices, mesh=self.mesh)
            up_k = up.unflatten(0, (q_BHSD.size(1), -1))[:, :dim]
            absorbed = torch.cat((q_BHSD[..., :dim] @ up_k, q_BHSD[..., dim:]), -1).detach()
            k = torch.cat((latent_BSR, k_rope_BSD), -1).unsqueeze(1)
            loss = indexer_loss(*index, absorbed, k, indices=indices, scale=scale, mesh=self.mesh).sum()
        return self.wo(out_BHSD.transpose(1, 2).flatten(2)), loss


def sparse_alone(
    q_BHSD: torch.Tensor, latent_BSR: torch.Tensor, k_rope_BSD: torch.Tensor, up: torch.Tensor,
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor], topk: int, scale: float, attn_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over the best keys, and the loss of the indexer, on one device, by dense scores."""
    (length, heads), (q_index_BSHD, k_index_BSD, weights_BSH) = (q_BHSD.size(2), q_BHSD.size(1)), index
    allowed = torch.ones(length, length, dtype=torch.bool, device=up.device).tril()[None]
    allowed = allowed if attn_mask is None else attn_mask[:, 0]
    products = torch.einsum("bthd,bsd->bths", q_index_BSHD, k_index_BSD).relu()
    scores = (products * weights_BSH.unsqueeze(-1)).sum(2).masked_fill(~allowed, float("-inf"))
    best = scores.detach().float().sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, torch.ones_like(best, dtype=torch.bool))
    chosen = chosen & allowed

    k_BHSD, v_BHSD = torch.einsum("bsr,hdr->bhsd", latent_BSR, up.unflatten(0, (heads, -1))).chunk(2, -1)
    k_BHSD = torch.cat((k_BHSD, k_rope_BSD.unsqueeze(1).expand_as(k_BHSD)), -1)
    attention = (q_BHSD @ k_BHSD.mT * scale).masked_fill(~chosen[:, None], float("-inf")).softmax(-1)
    found = scores.masked_fill(~chosen, float("-inf")).log_softmax(-1).masked_fill(~chosen, 0.0)
    return attention @ v_BHSD, F.kl_div(found, attention.detach().mean(1), reduction="sum")
