"""Global sequence lengths of a call, and the check that all ranks make the same call.

A shard does not determine the global length: 5 tokens on one of 2 ranks are a part of 9 or of 10. If buffers, a DTensor
or the caller do not determine it either, one small all-gather finds it. The same all-gather compares a hash of
everything else that must be equal on all ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor

from cp_dtensor.attention.backends.select import allowed_backends, is_deterministic
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.engine.config import AttentionConfig, refuse_other_lengths
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import Layout, shard_lengths
from cp_dtensor.spec.masks import Mask

Facts = dict[str, object]
"""The facts of a call on one rank that must be equal on every rank, by name."""


def global_lengths(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Mask, modifiers: Modifiers,
    scale: float, lengths: tuple[int, int] | None, *, gives_lse: bool = False, compiled: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Returns the global lengths of queries and keys.

    Ranks exchange nothing where `lengths`, the layout or the declared lengths of a context determine them, except in
    debug mode.

    Refuses `lengths` of the caller that do not fit the local shards; and, on every rank alike, calls that differ
    between ranks. `gives_lse`: the call returns the log-sum-exp; `compiled`: in compiled code.
    """
    layout, rank, world_size = config.layout, config.ranks.rank, config.ranks.size
    if not config.debug:
        if lengths is not None:
            _check_local_lengths(q.size(2), k.size(2), lengths, layout, rank, world_size)
            return lengths
        declared = config.declared_lengths or ()
        known_q, known_kv = (known_length(tensor.size(2), declared, layout, rank, world_size) for tensor in (q, k))
        if known_q is not None and known_kv is not None:
            return known_q, known_kv
    facts = _facts(q, k, v, config, mask, modifiers, scale, lengths, gives_lse, compiled)
    # Readable facts travel only where their hashes differ.
    digest = int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little", signed=True)
    gathered = config.ranks.gather_integers([q.size(2), k.size(2), digest], q.device)
    local_q, local_kv, digests = map(list, zip(*gathered, strict=True))
    if len({*digests}) > 1:
        gathered_facts = config.ranks.gather_objects(facts, q.device)
        _refuse_masks_of_local_keys(gathered_facts, local_kv)
        _refuse_disagreement(gathered_facts, has_single_query=1 in local_q)
    found = global_length(local_q, layout, "query"), global_length(local_kv, layout, "key")
    if lengths is not None and lengths != found:
        raise ValueError(f"got seq_len={lengths} for (queries, keys), but the ranks' shards are of {found} tokens")
    if lengths is None and config.lengths_vary:
        _refuse_whole_queries(local_q, found[0], config.declared_lengths or ())
    if config.debug:
        _refuse_equal_rows(modifiers, config, min(local_q))
    return found


# Comparison of ranks


def _facts(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Mask, modifiers: Modifiers,
    scale: float, lengths: tuple[int, int] | None, gives_lse: bool, compiled: bool,
) -> Facts:  # fmt: skip
    exchanges_heads = config.method in ("ulysses", "hybrid")
    # Over one axis of CPUs "auto" is a ring, where lse does not travel.
    may_exchange = exchanges_heads or (config.method == "auto" and (q.is_cuda or config.ranks.inner is not None))
    declared_q, declared_kv = lengths or (None, None)
    facts: Facts = {
        "batch_size": q.size(0),
        "q_heads": q.size(1),
        "kv_heads": k.size(1),
        "head_dim": q.size(3),
        "v_head_dim": v.size(3),
        "up": modifiers.described_up(),
        "dtype": str(q.dtype),
        "mask": repr(mask),
        "attn_mask": modifiers.described(q),
        "sinks": modifiers.described_sinks(values=config.debug),
        "dropout_p": float(modifiers.dropout_p),
        "softcap": modifiers.softcap,
        "scale": scale,
        "layout": repr(config.layout),
        "method": config.method,
        "rotate_method": config.transport.name,
        "deterministic": is_deterministic(q, allowed_backends(), config.deterministic),
        "requires_grad": torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        "declared_q": declared_q,
        "declared_kv": declared_kv,
        # Where heads are exchanged, lse travels too: for the caller, or for the backward of compiled code.
        "returns_lse": gives_lse and may_exchange,
        "compiled": compiled,
        # Where heads are exchanged, rows of an attn_mask travel; "auto" is a ring then.
        "attn_mask_has_rows": modifiers.has_rows and exchanges_heads,
    }
    return _without_gradients(facts) if compiled else facts


def _refuse_masks_of_local_keys(by_rank: list[Facts], local_kv: list[int]) -> None:
    """Refuses an attn_mask of a rank's own keys; first, since other facts may differ because of it."""
    texts = [str(facts["attn_mask"]) for facts in by_rank]
    keys = [text.partition(" :, ")[2].partition(")")[0] for text in texts]
    # One column is for all keys.
    local = [rank for rank, own in enumerate(local_kv) if own != 1 and keys[rank] == str(own) != str(sum(local_kv))]
    if local:
        raise ValueError(
            f"attn_mask has only this rank's keys on rank {', '.join(map(str, local))} ({texts[local[0]]}), expected "
            f"the keys of the whole sequence, {sum(local_kv)}: code that sees a shard has made it. Make the mask of "
            "the whole sequence and shard its query rows (context_parallel_shard(mesh, [attn_mask], [-2])), or give "
            "the context or the call a mask value, mask=..."
        )


def _refuse_disagreement(by_rank: list[Facts], has_single_query: bool) -> None:
    """Names the facts that differ, the ranks and their values, on every rank alike.

    `has_single_query`: True if a rank has one query only, so that its attn_mask has one row in any case.
    """
    if any(facts["compiled"] for facts in by_rank):
        by_rank = [_without_gradients(facts) for facts in by_rank]
    disagreements: list[str] = []
    for name in by_rank[0]:
        if name == "compiled" and not disagreements:  # no mistake by itself, but maybe the reason of others
            continue
        if name == "attn_mask_has_rows" and has_single_query:
            continue
        values = [repr(facts[name]) for facts in by_rank]  # so that NaN equals NaN
        usual = max(values, key=values.count)
        odd = [f"rank {rank} says {_shortened(value)}" for rank, value in enumerate(values) if value != usual]
        if odd:
            disagreements.append(f"{name}: {', '.join(odd)}, the others {_shortened(usual)}")
    if disagreements:  # all of them: the first may follow from another, as heads that were expanded for a mask
        raise ValueError(f"the ranks of the context-parallel axis disagree about {'; about '.join(disagreements)}")


def _refuse_equal_rows(modifiers: Modifiers, config: AttentionConfig, fewest: int) -> None:
    """Refuses an attn_mask whose rows are equal on all ranks and differ from query to query; on every rank alike."""
    bias = modifiers.bias
    if bias is None or config.ranks.size == 1 or fewest < 2 or not modifiers.has_rows:
        return
    rows = bias.detach().cpu()
    is_constant = torch.equal(rows, rows[:, :, :1].expand_as(rows))
    digest = int.from_bytes(blake2b(repr(rows.tolist()).encode(), digest_size=8).digest(), "little", signed=True)
    digests, constant = zip(*config.ranks.gather_integers([digest, int(is_constant)], bias.device), strict=True)
    if len({*digests}) == 1 and not any(constant):
        raise ValueError(
            f"attn_mask {tuple(bias.shape)} is equal on all ranks, although its rows differ and each rank has other "
            "queries: expected this rank's query rows, context_parallel_shard(mesh, [attn_mask], [-2]) of the whole"
        )


def _without_gradients(facts: Facts) -> Facts:
    """Returns the facts without those about gradients, which compiled code does not have."""
    without = {name: str(facts[name]).replace(" grad", "") for name in ("attn_mask", "sinks", "up")}
    return {**facts, "requires_grad": False, **without}


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:160]} ... {text[-35:]}"


def odd_ones(values: list[int]) -> str:
    """Returns the ranks whose value is not that of most ranks, "" if there are none.

    >>> odd_ones([7, 7, 8, 7, 9])
    '2, 4'
    """
    usual = max(values, key=values.count)
    return ", ".join(str(rank) for rank, value in enumerate(values) if value != usual)


# Global and local lengths


def global_length(lengths: list[int], layout: Layout, what: str) -> int:
    """Returns the global length that a layout divides into these local `lengths`; refused on every rank if none."""
    world_size = len(lengths)
    total = sum(lengths) if layout.only_length is None else layout.only_length
    expected = list(shard_lengths(layout, total, world_size))
    if lengths != expected:
        raise ValueError(
            f"the ranks' {what} lengths are not those of {layout}: got {lengths} on ranks 0 to {world_size - 1}, "
            f"expected {expected} for {total} tokens in all"
        )
    return total


def checked_only_length(local_length: int, layout: Layout, rank: int, world_size: int) -> int:
    """Returns the only length of a layout; refuses a shard of this rank that does not fit it."""
    assert layout.only_length is not None
    expected = layout.local_length(layout.only_length, rank, world_size)
    if local_length != expected:
        raise ValueError(
            f"got {local_length} local tokens on rank {rank} of {world_size}, expected {expected}: this "
            f"{type(layout).__name__} divides sequences of {layout.only_length} tokens only, queries, keys and values "
            "alike; attention over other lengths, or to keys of another length, needs another layout"
        )
    return layout.only_length


@lru_cached
def known_length(
    local_length: int, declared: tuple[int, ...], layout: Layout, rank: int, world_size: int
) -> int | None:
    """Returns the declared global length that fits this rank's shard, or None if the ranks have to exchange lengths.

    All ranks must return the same, each from its own local length. So the result is None if there is a length that
    fits one declared length on one rank and another declared length on another rank. A shard of an undeclared length is
    refused if it may fit a declared one on other ranks, which then would not exchange.
    """
    if layout.only_length is not None:
        return checked_only_length(local_length, layout, rank, world_size)
    look_alikes = {length: _look_alikes(length, layout, world_size) for length in sorted(declared)}
    if any(one[1] >= next_one[0] for one, next_one in pairwise(look_alikes.values())):
        return None
    for length in declared:
        if layout.local_length(length, rank, world_size) == local_length:
            return length
    possible = _lengths_with_share(local_length, layout, rank, world_size)
    for length, (first, last) in look_alikes.items():
        if possible[0] <= last and possible[-1] >= first:
            raise ValueError(
                f"got {local_length} local tokens on rank {rank} of {world_size}, which is the share of {possible[0]} "
                f"to {possible[-1]} tokens in {layout}, but of no buffer's length {declared}; other ranks may take "
                f"theirs for a share of {length}. Announce every length that attention runs over: "
                "context_parallel(..., seq_len=...)"
            )
    return None


def _look_alikes(length: int, layout: Layout, world_size: int) -> tuple[int, int]:
    """Returns the smallest and the largest global length whose shard on some rank is as long as that of `length`."""
    local = shard_lengths(layout, length, world_size)
    spans = [_lengths_with_share(each, layout, rank, world_size) for rank, each in enumerate(local)]
    return min(span[0] for span in spans), max(span[-1] for span in spans)


def _lengths_with_share(local_length: int, layout: Layout, rank: int, world_size: int) -> range:
    """Returns the global lengths of which `rank` owns `local_length` tokens; shards grow with the global length."""

    def share(length: int) -> int:
        return layout.local_length(length, rank, world_size)

    beyond = 1
    while share(beyond) <= local_length:
        beyond *= 2
    lengths = range(beyond + 1)
    return range(bisect_left(lengths, local_length, key=share), bisect_right(lengths, local_length, key=share))


def longest_length(local_length: int, layout: Layout, rank: int, world_size: int) -> int:
    """The longest global length of which `rank` owns `local_length` tokens.

    >>> from cp_dtensor.spec.layouts import HeadTail
    >>> longest_length(2, HeadTail(), 0, 2)  # of 4 tokens rank 0 has 1 + 1, of 5 it has 2 + 1
    4
    """
    if layout.only_length is not None:
        return layout.only_length
    return _lengths_with_share(local_length, layout, rank, world_size).stop - 1


def _refuse_whole_queries(local: list[int], found: int, declared: tuple[int, ...]) -> None:
    """Refuses queries of a whole buffer's length on every rank, which are probably not sharded; on every rank alike."""
    if len(local) > 1 and found not in declared and len({*local}) == 1 and local[0] in declared:
        raise ValueError(
            f"got queries of {local[0]} tokens on each of {len(local)} ranks, as long as a whole buffer of the context "
            f"(lengths {declared}), expected this rank's part: a tensor becomes its shard where it is one of buffers, "
            "the very object (no copy or slice of it), or by context_parallel_shard. If there is a sequence of "
            f"{found} tokens in all, announce it: context_parallel(..., seq_len={found})"
        )


@lru_cached
def _check_local_lengths(
    q_local: int, kv_local: int, lengths: tuple[int, int], layout: Layout, rank: int, world_size: int
) -> None:
    for what, total, local in (("query", lengths[0], q_local), ("key", lengths[1], kv_local)):
        refuse_other_lengths(layout, total, f"{what} length")
        expected = layout.local_length(total, rank, world_size)
        if local != expected:
            raise ValueError(
                f"{what} length does not fit: got {local} local tokens on rank {rank} of {world_size}, "
                f"expected {expected} of {total} tokens in {layout}"
            )
