"""Layers of transformers' models over ranks, by functions of pooled blocks: DeepSeek-V4, GLM-5 Next and Qwen4."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sequences import Sequence

from cp_dtensor import (
    Documents,
    HeadTail,
    SlidingWindow,
    Striped,
    context_parallel_attention,
    pool_blocks,
    pooled_attention,
    select_pooled,
)

pytest.importorskip("transformers.models.deepseek_v4")
from transformers import DeepseekV4Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

LENGTH, WINDOW = 43, 5


def v4_model() -> Any:
    """A tiny DeepSeek-V4; with 16 index heads no two scores of a query are 0, which are equal."""
    torch.manual_seed(0)
    model = v4.DeepseekV4ForCausalLM(DeepseekV4Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=16, q_lora_rank=16,
        o_groups=2, o_lora_rank=8, sliding_window=WINDOW, index_n_heads=16, index_head_dim=8, index_topk=3,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, mlp_layer_types=["moe"] * 3,
        layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        attn_implementation="eager", use_cache=False,
    ))  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.float()


def pooled(owner: Any, x: torch.Tensor, overlap: bool, place: dict[str, Any]) -> torch.Tensor:
    """Keys of this rank's blocks, of a compressor or an indexer."""
    values, gates = owner.kv_proj(x), owner.gate_proj(x)
    keys, at = pool_blocks(values, gates, owner.position_bias, size=owner.compress_rate, overlap=overlap, **place)
    keys = owner.kv_norm(keys)
    cos, sin = owner.rotary_emb(keys, position_ids=at.expand(x.size(0), -1), layer_type="compress")
    return v4.apply_rotary_pos_emb(keys.unsqueeze(1), cos, sin).squeeze(1)


def compress(
    compressor: Any, place: dict[str, Any], x: torch.Tensor, residual: torch.Tensor, position_ids: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, None]:
    """Stands for the forward of a compressor; leaves the blocks of queries in its `chosen`."""
    compressor.chosen, indexer = None, getattr(compressor, "indexer", None)
    if indexer is not None:
        keys = pooled(indexer, x, True, place)
        cos, sin = indexer.rotary_emb(x, position_ids=position_ids, layer_type="compress")
        q = indexer.q_b_proj(residual).unflatten(2, (-1, indexer.head_dim)).transpose(1, 2)
        q = v4.apply_rotary_pos_emb(q, cos, sin).transpose(1, 2)
        weights = indexer.scorer.weights_proj(x) * indexer.scorer.weights_scaling * indexer.scorer.softmax_scale
        options = {"size": indexer.compress_rate, "topk": indexer.index_topk, **place}
        compressor.chosen = select_pooled(q, keys, weights, **options)
    return pooled(compressor, x, indexer is not None, place).unsqueeze(1), None


def attend(
    place: dict[str, Any], module: Any, q: torch.Tensor, k: torch.Tensor, *_: Any, scaling: float, sliding_window: int,
    s_aux: torch.Tensor, **__: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention interface: keys are this rank's tokens, and then the pooled keys of its blocks."""
    if module.compressor is None:
        mask = Documents(place["cu_seqlens"]) & SlidingWindow(sliding_window - 1, 0)
        options = {name: place[name] for name in ("mesh", "layout", "seq_len")}
        out = context_parallel_attention(q, k, k, mask=mask, sinks=s_aux, scale=scaling, enable_gqa=True, **options)
        return out.transpose(1, 2), None
    options = {"size": module.compressor.compress_rate, "window": sliding_window, "scale": scaling, **place}
    keys = k[:, 0].split((q.size(2), k.size(2) - q.size(2)), 1)
    return pooled_attention(q, *keys, indices=module.compressor.chosen, sinks=s_aux, **options).transpose(1, 2), None


@pytest.mark.parametrize("sequence", [
    Sequence(LENGTH, 3, HeadTail(), 2, (0, LENGTH)), Sequence(LENGTH, 2, Striped(3), 1, (0, 3, 20, LENGTH)),
], ids=["", "documents"])  # fmt: skip
def test_a_deepseek_v4_equals_one_process(sequence: Sequence, monkeypatch: Any) -> None:
    """Logits and the gradients of all parameters; documents as each alone."""
    whole, ids = v4_model(), torch.randint(64, (sequence.batch, LENGTH))
    spans = [span for span in sequence.documents() if span[0] < span[1]]
    wanted = torch.cat([whole(ids[:, slice(*span)]).logits for span in spans], 1)
    positions, weights = torch.cat([torch.arange(stop - start) for start, stop in spans]), torch.randn(wanted.shape)
    (wanted * weights).sum().backward()

    def body(rank: int) -> list[torch.Tensor | None]:
        place, model = {"mesh": dist.group.WORLD, **sequence.options()}, copy.deepcopy(whole)
        places[rank], model.config._attn_implementation = place, "pooled"
        for layer in model.model.layers:
            layer.self_attn.config = model.config
            if layer.self_attn.compressor is not None:
                layer.self_attn.compressor.forward = partial(compress, layer.self_attn.compressor, place)
        mine, at = (sequence.shard(x.unsqueeze(-1), rank).squeeze(-1) for x in (ids, positions.expand_as(ids)))
        model.zero_grad()
        out = model(mine, position_ids=at).logits
        torch.testing.assert_close(out, sequence.shard(wanted.detach(), rank), rtol=1e-4, atol=1e-4)
        (out * sequence.shard(weights, rank)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    places: dict[int, dict[str, Any]] = {}
    interface = lambda *given, **named: attend(places[dist.get_rank()], *given, **named)  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "pooled", interface)
    for (name, parameter), *shares in zip(whole.named_parameters(), *run_ranks(sequence.ranks, body), strict=True):
        if parameter.grad is None:  # of indexers
            assert shares == [None] * sequence.ranks, name
            continue
        error = (sum(shares) - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(min=1e-3)
        assert error <= 1e-4, f"{name}: {error}"


# Pooled index keys, whose blocks are expanded to tokens


def made(kind: Any, **settings: Any) -> Any:
    """An indexer of random weights."""
    torch.manual_seed(0)
    indexer = kind(SimpleNamespace(hidden_size=32, rms_norm_eps=1e-6, **settings), 0)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.normal_(std=0.4)
    return indexer


def glm_keys(indexer: Any, x: torch.Tensor, place: dict[str, Any] | None, _: Any) -> torch.Tensor:
    """Positions of the keys of GLM-5 Next's queries, of its indexer or by functions of shards."""
    residual = x[..., :16]
    if place is None:
        found: torch.Tensor = indexer(x, residual, torch.ones(x.shape[:2], dtype=torch.bool), None)
        return found
    q = indexer.wq_b(residual).unflatten(2, (-1, indexer.head_dim))
    keys, gates = indexer.k_norm(indexer.wk(x)), x @ indexer.index_kpool_compress_gate.T
    keys, _ = pool_blocks(keys, gates, indexer.index_kpool_compress_ape, size=indexer.index_kpool, **place)
    weights = indexer.weights_proj(x) * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    options = {"size": indexer.index_kpool, "topk": indexer.index_topk // indexer.index_kpool, **place}
    return select_pooled(q, keys, weights, expanded=True, **options)


def qwen_keys(indexer: Any, x: torch.Tensor, place: dict[str, Any] | None, at: torch.Tensor) -> torch.Tensor:
    """Positions of the keys of Qwen4's queries."""
    rates, dim = 10.0 ** -torch.arange(4.0), indexer.index_head_dim

    def table(at: torch.Tensor) -> dict[str, torch.Tensor]:
        angles = (at.unsqueeze(1) * rates).repeat(1, 2).expand(x.size(0), -1, -1)
        return {"cos": angles.cos(), "sin": angles.sin()}

    if place is None:
        seen = torch.ones(len(at), len(at), dtype=torch.bool).tril().expand(x.size(0), 1, -1, -1)
        mask = indexer(x, (*table(at).values(),), seen, None)[:, 0] & seen[:, 0]
        return torch.arange(len(at)).masked_fill(~mask, -1)
    q, keys = indexer.index_qk_proj(x).split((indexer.index_n_heads * dim, dim), 2)
    q = qwen.apply_rotary_pos_emb(indexer.q_layernorm(q.unflatten(2, (-1, dim))), unsqueeze_dim=2, **table(at))
    keys, starts = pool_blocks(keys, size=indexer.compress_ratio, **place)
    keys = qwen.apply_rotary_pos_emb(indexer.k_layernorm(keys).unsqueeze(1), **table(starts)).squeeze(1)
    options = {"size": indexer.compress_ratio, "topk": indexer.block_topk, **place}
    return select_pooled(q, keys, torch.full(q.shape[:3], dim**-0.5), expanded=True, **options)


GLM = {"index_n_heads": 16, "index_head_dim": 8, "qk_rope_head_dim": 0, "index_topk": 12, "q_lora_rank": 16,
       "index_kpool": 4, "index_kpool_always_select_tail": True}  # fmt: skip
QWEN = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 12,
        "indexer_compress_ratio": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("keys_of", "kind", "settings"),
    [(glm_keys, glm.Glm5NextTextIndexer, GLM), (qwen_keys, qwen.Qwen4ExpTextQSAIndexer, QWEN)],
)
@torch.no_grad()
def test_an_indexer_with_pooled_keys_selects_what_one_process_does(keys_of: Any, kind: Any, settings: Any) -> None:
    sequence, indexer = Sequence(LENGTH, 3, HeadTail(), 2), made(kind, **settings)
    x, positions = torch.randn(2, LENGTH, 32), torch.arange(LENGTH)
    wanted = keys_of(indexer, x, None, positions)

    def sets(found: torch.Tensor) -> list[list[int]]:
        return [sorted(each for each in query if each >= 0) for row in found.tolist() for query in row]

    @torch.no_grad()
    def body(rank: int) -> None:
        at = sequence.shard(positions.view(1, -1, 1), rank).flatten()
        place = {"mesh": dist.group.WORLD, "layout": HeadTail(), "seq_len": LENGTH}
        assert sets(keys_of(indexer, sequence.shard(x, rank), place, at)) == sets(sequence.shard(wanted, rank))

    run_ranks(3, body)
