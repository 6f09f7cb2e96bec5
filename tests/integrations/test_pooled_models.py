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

from cp_dtensor import HeadTail, Striped, pool_blocks, pooled_attention, select_pooled

pytest.importorskip("transformers.models.deepseek_v4")
from transformers import DeepseekV4Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

LENGTH, WINDOW = 43, 5


def config() -> DeepseekV4Config:
    """A tiny model; with 16 index heads no two scores of a query are 0, which are equal."""
    return DeepseekV4Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=16, q_lora_rank=16,
        o_groups=2, o_lora_rank=8, sliding_window=WINDOW, index_n_heads=16, index_head_dim=8, index_topk=3,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"], attn_implementation="eager",
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
    )  # fmt: skip


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
    options = {"size": module.compressor.compress_rate, "window": sliding_window, "scale": scaling, **place}
    keys = k[:, 0].split((q.size(2), k.size(2) - q.size(2)), 1)
    return pooled_attention(q, *keys, indices=module.compressor.chosen, sinks=s_aux, **options).transpose(1, 2), None


def run(layer: Any, rotary: Any, x: torch.Tensor, positions: torch.Tensor, mask: Any = None) -> torch.Tensor:
    """A layer of a model, for rows (B, T, dim) at positions (T,) in their documents."""
    ids = positions.expand(x.size(0), -1)
    embeddings = {kind: rotary(x, position_ids=ids, layer_type=kind) for kind in ("main", "compress")}
    return layer(x, position_embeddings=embeddings, position_ids=ids, attention_mask=mask)[0]


@pytest.mark.parametrize("index", [0, 1], ids=["every 6", "best of every 4"])
@pytest.mark.parametrize("sequence", [
    Sequence(LENGTH, 3, HeadTail(), 2, (0, LENGTH)), Sequence(LENGTH, 2, Striped(3), 1, (0, 3, 20, LENGTH)),
], ids=["", "documents"])  # fmt: skip
def test_a_layer_of_attention_equals_one_process(index: int, sequence: Sequence, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    settings = config()
    whole, rotary = v4.DeepseekV4Attention(settings, index), v4.DeepseekV4RotaryEmbedding(settings)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(std=0.4)
    x = torch.randn(sequence.batch, LENGTH, 32, requires_grad=True)
    outs, positions = [], []
    for start, stop in sequence.documents():
        at = torch.arange(stop - start)
        hidden = (at > at.unsqueeze(1)) | (at <= at.unsqueeze(1) - WINDOW)
        mask = torch.zeros(len(at), len(at)).masked_fill(hidden, float("-inf")).expand(sequence.batch, 1, -1, -1)
        if len(at):
            outs.append(run(whole, rotary, x[:, start:stop], at, mask))
            positions.append(at)
    wanted, place_of = torch.cat(outs, 1), torch.cat(positions)
    weights = torch.randn_like(wanted)
    trained = {name: each for name, each in whole.named_parameters() if "indexer" not in name}
    expected = torch.autograd.grad((wanted * weights).sum(), [x, *trained.values()])
    settings._attn_implementation = "pooled"

    def body(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        place = {"mesh": dist.group.WORLD, **sequence.options()}
        layer = copy.deepcopy(whole)
        layer.compressor.forward = partial(compress, layer.compressor, place)
        mine = sequence.shard(x.detach(), rank).requires_grad_()
        at = sequence.shard(place_of.view(1, -1, 1), rank).flatten()
        of_rank[rank] = place
        out = run(layer, rotary, mine, at)
        torch.testing.assert_close(out, sequence.shard(wanted.detach(), rank), rtol=1e-4, atol=1e-5)
        inputs = [mine, *(dict(layer.named_parameters())[name] for name in trained)]
        grads = torch.autograd.grad((out * sequence.shard(weights, rank)).sum(), inputs)
        return list(grads[1:]), grads[0]

    of_rank: dict[int, dict[str, Any]] = {}
    interface = lambda *given, **named: attend(of_rank[dist.get_rank()], *given, **named)  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "pooled", interface)
    found = run_ranks(sequence.ranks, body)
    for rank, (_, dx) in enumerate(found):
        torch.testing.assert_close(dx, sequence.shard(expected[0], rank), rtol=1e-4, atol=1e-4)
    for name, each, *shares in zip(trained, expected[1:], *(grads for grads, _ in found), strict=True):
        torch.testing.assert_close(
            sum(shares), each, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


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
